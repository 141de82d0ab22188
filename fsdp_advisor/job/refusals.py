"""Which combinations of options a framework or a backend refuses, or has no model here."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Backend, Checkpointing, Framework, Strategy
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES, FRAMEWORKS, TORCHTITAN_CHUNKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.wrap_policy import WrapPolicy, wrap_policy


def combination_refusal(
    strategy: Strategy, backend: Backend, framework: Framework, job: EstimateRequest | Plan
) -> UsageError | None:
    """Why a combination is refused: the framework fails at it, or the backend is not modelled with it. None if it works. The other options
    are those of `job`.
    """
    facts = FRAMEWORKS[framework]
    if job.activation_offload and (refused := _offload_refusal(framework, job.activation_checkpointing)) is not None:
        return refused
    policy = wrap_policy(job.wrap)
    assert policy is not None
    if backend in ("fsdp1", "fsdp2") and policy.kind != "layer":
        refused = _wrap_refusal(policy, backend, facts.uses_accelerate, job.activation_checkpointing)
        if refused is not None:
            return refused
    if facts.fsdp1_shards_fully and backend == "fsdp1" and strategy != "zero3":
        return UsageError(
            f"framework {framework} with backend fsdp1 has no {strategy}: transformers 5.23 always shards everything with FSDP1",
            hint="--backend fsdp2, or --framework accelerate",
        )
    return None


def _offload_refusal(framework: Framework, checkpointing: Checkpointing) -> UsageError | None:
    """Why activations cannot be offloaded; None if they can. A user's own training script can use PyTorch's save_on_cpu without
    checkpointing.
    """
    facts = FRAMEWORKS[framework]
    if facts.uses_trainer and not facts.offloads_saved_tensors and checkpointing == "none":
        return UsageError(
            f"{FRAMEWORK_NAMES[framework]} offloads the inputs of checkpointed layers, and no layer is checkpointed",
            hint="add --activation-checkpointing full, or use --framework trl",
        )
    return None


def _wrap_refusal(
    policy: WrapPolicy, backend: Backend, uses_accelerate: bool, checkpointing: Checkpointing
) -> UsageError | None:
    """Why a wrap policy other than `layer` cannot be used. None if it can.

    Source: accelerate 1.15, accelerator.py, prepare_model; utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy.
    """
    if policy.kind == "every" and backend == "fsdp1":
        return UsageError(
            "FSDP1 wraps single modules, and a group of layers is not a module",
            hint="--backend fsdp2 has --wrap every:N",
        )
    if not uses_accelerate:
        return None
    if policy.kind == "every":
        return UsageError(
            "accelerate has no wrap policy for groups of layers", hint="--framework torch has --wrap every:N"
        )
    if policy.kind == "size" and backend == "fsdp2":
        return UsageError(
            "accelerate's SIZE_BASED_WRAP fails with FSDP2: it also shards the list of layers, which fully_shard refuses",
            hint="use --wrap layer, --backend fsdp1 or --framework torch",
        )
    if checkpointing == "full" and policy.kind != "class":
        return UsageError(
            f"accelerate checkpoints the modules that it wraps, and with --wrap {policy} these are not the layers",
            hint="use --wrap layer",
        )
    return None


def check_fsdp_options(plan: Plan) -> None:
    """Raises UsageError if FSDP cannot use the plan's `forward_prefetch` or `reshard_after_forward`; other backends ignore them."""
    if plan.backend not in ("fsdp1", "fsdp2"):
        return
    if plan.forward_prefetch and plan.wrap != "layer":
        raise UsageError("forward prefetch is modelled only with one unit per layer", hint="use --wrap layer")
    if plan.forward_prefetch and plan.backend == "fsdp2" and plan.uses_accelerate:
        raise UsageError(
            "accelerate does not prefetch in forward with FSDP2", hint="use --framework torch, or --backend fsdp1"
        )
    if plan.reshard_after_forward == "false" and plan.strategy == "zero3":
        raise UsageError("ZeRO-3 that keeps parameters after forward is ZeRO-2", hint="use --strategy zero2")
    ranks = plan.post_forward_ranks
    if ranks is None:
        return
    if plan.backend != "fsdp2" or plan.uses_accelerate:
        raise UsageError(
            "only FSDP2 in plain PyTorch reshards to a number of ranks", hint="use --backend fsdp2 --framework torch"
        )
    if not 1 < ranks < plan.shard_degree or plan.shard_degree % ranks:
        raise UsageError(
            f"reshard_after_forward {ranks} is not a proper factor of the {plan.shard_degree} ranks that share a copy",
            hint="give a smaller number of ranks that divides them",
        )


def check_torchtitan(plan: Plan) -> None:
    """Raises UsageError for options that torchtitan 0.3 does not support."""
    if not plan.facts.own_models:
        return
    if plan.loss_code == "torchtitan" and plan.seq_len % TORCHTITAN_CHUNKS:
        raise UsageError(
            f"torchtitan divides each sequence into {TORCHTITAN_CHUNKS} equal chunks for the loss, and {plan.seq_len} is not"
            f" a multiple of {TORCHTITAN_CHUNKS}",
            hint=f"--seq-len {plan.seq_len - plan.seq_len % TORCHTITAN_CHUNKS}, or --loss full",
        )
    if plan.checkpointing in ("every", "reentrant") or plan.activation_offload:
        what = "activation offload" if plan.activation_offload else f"checkpointing {plan.activation_checkpointing}"
        raise UsageError(
            f"torchtitan 0.3 has no {what}", hint="--activation-checkpointing selective (its default), full or none"
        )
    if plan.precision == "fp16-mixed":
        raise UsageError("torchtitan does not train in fp16", hint="--precision bf16-mixed")
    if plan.attention != "sdpa":
        raise UsageError(
            f"torchtitan has no attention {plan.attention}",
            hint="leave --attention out: the estimate has torchtitan's usual FlexAttention",
        )
    if plan.wrap != "layer" or plan.forward_prefetch or plan.post_forward_ranks is not None:
        raise UsageError(
            "torchtitan fixes prefetching and the units: each layer, the embedding, and the norm with the head",
            hint="leave --wrap, --forward-prefetch and --reshard-after-forward out, or use --framework torch",
        )


def replica_refusal(plan: Plan) -> UsageError | None:
    """Why HSDP cannot replicate over its ranks; None if it can."""
    if not (plan.uses_accelerate and has_whole_replicas(plan)):
        return None
    return UsageError(
        "accelerate 1.15 refuses HSDP with FSDP2 whose replicas have one GPU each: no rank has a shard",
        hint="use --strategy ddp, more GPUs per node, or --framework torch",
    )


def saving_refusal(plan: Plan) -> UsageError | None:
    """Why the backend has no state dicts of the plan's type; None if it has. DTensors of FSDP2 have no local state dict."""
    if plan.backend != "fsdp2" or plan.saves_as != "local":
        return None
    return UsageError(
        "backend fsdp2 has no local state dicts", hint="--state-dict-type sharded or full, or --backend fsdp1"
    )


def has_whole_replicas(plan: Plan) -> bool:
    """Whether each of HSDP's replicas is one GPU, which accelerate refuses with FSDP2. Source: accelerate/parallelism_config.py,
    ParallelismConfig.
    """
    return plan.backend == "fsdp2" and plan.strategy == "hsdp" and plan.shard_degree == 1 < plan.replica_degree
