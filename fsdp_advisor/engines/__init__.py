"""The training engines (DDP, FSDP1, FSDP2, DeepSpeed ZeRO): one folder each, with its states, step, loading and saving.

`registry` selects the engine of a plan: `states_of` returns its states, `step_program` the program of its step.
`loading.load_methods` and `saving.save_methods` return its methods of loading and saving, `job_peaks.job_peaks` the peaks
of all phases of a job. An engine does not import torch.

Modules outside of the folders serve several engines:

- units: `units` (sums), `wrapping` (the root's units), `policy_walk` (units of a wrap policy), `units_summary` (in words), `forward_order`
- FSDP1 and FSDP2: `fsdp_shards`, `fsdp_host`
- parameters and optimizer: `learned` (which get gradients), `optimizer_state`, `optimizer_work`
- loading and saving: `loading`, `saving`, `transfer`, `quantized_loading`, `merging` (adapters)
- parts of a job besides the training step: `reference`, `rollouts`, `vllm`, `evaluation`, `adalora`, `model_outputs`
- `framework_notes` (what a framework's estimate leaves out), `host`, `textbook` (a bare parameter count)
"""
