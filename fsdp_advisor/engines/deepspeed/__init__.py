"""DeepSpeed ZeRO-1, 2 and 3. `step.DeepspeedStep` has the hooks of a step, `partitions.states` the states."""
