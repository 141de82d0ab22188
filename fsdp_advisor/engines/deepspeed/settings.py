"""The settings of a plan and of DeepSpeed's configuration that decide memory: stage, offload, sizes of buckets and sub-groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.zero_buckets import zero_buckets
from fsdp_advisor.model.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of ``zero_optimization`` that decide memory, in elements. Source: zero/config.py, DeepSpeedZeroConfig."""

    reduce_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000


DEFAULTS = Settings()


def settings_of(profile: Profile, plan: Plan) -> Settings:
    """The plan's sizes. Others are DeepSpeed's defaults, or under accelerate and the Trainer their values for "auto", which depend on the
    model's hidden size.

    Source: accelerate/accelerator.py, _prepare_deepspeed; transformers/integrations/deepspeed.py, trainer_config_finalize.
    """
    return settings_for(hidden_size(profile), plan)


def settings_for(hidden: int | None, plan: Plan) -> Settings:
    """Bucket sizes and thresholds of a plan for a model with this hidden size; None: unknown."""
    given = {name.removeprefix("stage3_"): value for name, value in zero_buckets(plan.zero_buckets).items()}
    return replace(_assumed(hidden, plan), **given)


def _assumed(hidden: int | None, plan: Plan) -> Settings:
    """The settings that a configuration leaves open: DEFAULTS if `hidden` is None or the framework sets none."""
    if hidden is None or not plan.facts.fills_deepspeed_buckets:
        return DEFAULTS
    if stage(plan) < 3:
        return Settings(reduce_bucket_size=hidden * hidden)
    return Settings(
        reduce_bucket_size=hidden * hidden,
        prefetch_bucket_size=int(0.9 * hidden * hidden),
        param_persistence_threshold=10 * hidden,
    )


def hidden_size(profile: Profile) -> int | None:
    """`config.hidden_size`, or the value of the key that the model's family uses for it.

    A configuration that has the defaults of its class lacks the key: then it is the width of the embedding.
    """
    text = profile.config.get("text_config")
    for config in (profile.config, text if isinstance(text, dict) else {}):
        for key in ("hidden_size", "n_embd", "d_model", "n_embed"):
            if isinstance(value := config.get(key), int):
                return value
    return next((p.shape[-1] for p in profile.root.parameters if p.role == "embedding"), None)


def stage(plan: Plan) -> int:
    """The ZeRO stage, 1 to 3. Raises KeyError for a strategy that is no stage of ZeRO."""
    return {"zero1": 1, "zero2": 2, "zero3": 3}[plan.strategy]


def offloads_optimizer(plan: Plan) -> bool:
    """Whether the optimizer is offloaded. Offload of the parameters includes the optimizer."""
    return plan.offload != "none"


def offloads_parameters(plan: Plan) -> bool:
    """Whether parameters are offloaded. Stages 1 and 2 ignore ``offload_param``."""
    return plan.offload == "parameters" and stage(plan) == 3


def master_bytes(plan: Plan) -> int:
    """Bytes per element of the masters, which the optimizer steps: bf16 under ``bf16`` (configured with
    ``bf16_master_weights_and_grads`` and ``bf16_optimizer_states``), else fp32. They are a second copy of the weights, even
    in the model's dtype.

    Source: base_optimizer.py, ZeROOptimizer._configure_master_weights.
    """
    return 2 if plan.precision == "bf16" else 4
