"""The training engines (DDP, FSDP1, FSDP2, DeepSpeed ZeRO): one folder each, with its states, step, loading and saving.

`registry` selects the engine of a plan: `states_of` returns its states, `step_program` the program of its step.
`loading.load_methods` and `saving.save_methods` return its methods of loading and saving, `job_peaks.job_peaks` the peaks
of all phases of a job. An engine does not import torch.
"""
