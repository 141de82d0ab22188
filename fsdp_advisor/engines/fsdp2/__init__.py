"""PyTorch FSDP2. `step.Fsdp2Step` has the hooks of a step, `units.fsdp2_units` the units and states."""
