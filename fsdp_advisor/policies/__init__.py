"""Policies of a training job that every engine applies in the same way: optimizer, precision, gradient clipping.

`optimizers.optimizer_named` returns an optimizer, `precision.precision_of` the dtypes of a plan. May import `job`, `model`, and
`program.storages` and `program.instructions`.
"""
