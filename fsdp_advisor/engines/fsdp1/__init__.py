"""PyTorch FSDP1. `step.Fsdp1Step` has the hooks of a step, `units.fsdp1_units` the units and states."""
