"""PyTorch DistributedDataParallel. `step.DdpStep` has the hooks of a step, `step.ddp_states` the states."""
