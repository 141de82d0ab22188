"""Policies of a training job that every engine applies in the same way: optimizer and gradient clipping.

`optimizers.optimizer_named` returns an optimizer. The dtypes of a job are properties of `job.plan.Plan`; `dtypes` has those of single
parameters.
"""
