"""The options about sharding the states over the ranks: framework, backend, strategy, units, offload."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fsdp_advisor.job.choices import (
    MAX_GPUS,
    STRATEGY_SYNONYMS,
    Backend,
    BackwardPrefetch,
    Framework,
    Offload,
    OffloadDevice,
    StateDictType,
    Strategy,
    Wrap,
    read_word_or_number,
)
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.wrap_policy import WRAP_EXAMPLE, read_wrap
from fsdp_advisor.job.zero_buckets import ZERO_BUCKETS, read_zero_buckets

rule = partial(Rule, group="Strategy")

OFFLOAD = rule(
    "the states that are kept in host memory; parameters means parameters, gradients and optimizer state",
    synonyms={"full": "parameters", "all": "parameters", "params": "parameters", "false": "none", "no": "none"},
    elsewhere={
        "cpu": "offload names the states to offload: parameters or optimizer",
        "nvme": "offload_device nvme, with offload",
    },
)
OFFLOAD_DEVICE = rule("the target of offload")
StrategyOption = Annotated[
    Literal[Strategy, "all"],
    rule(
        "the sharding strategy; FSDP's names work too: full_shard, shard_grad_op, hybrid_shard, no_shard",
        synonyms=STRATEGY_SYNONYMS,
        elsewhere={
            "fsdp1": "strategy zero3 with backend fsdp1",
            "deepspeed": "strategy zero3 with backend deepspeed",
            "hybrid_shard_zero2": "strategy hsdp with reshard_after_forward false",
        },
        not_modelled=("tp", "pp", "cp", "ep", "megatron", "zero++"),
        nearest={"zero++": "zero3"},
    ),
]
BackendOption = Annotated[
    Literal[Backend, "auto"],
    rule(
        "the library that shards; auto is ddp for ddp, deepspeed for zero1 and for --offload optimizer, else fsdp2, or fsdp1 for an "
        "optimizer that does not run on FSDP2 and for local state dicts",
        synonyms={"fsdp": "fsdp2", "ds": "deepspeed", "zero": "deepspeed"},
        not_modelled=("megatron", "xla", "colossalai"),
    ),
]
OffloadOption = Annotated[Offload, OFFLOAD]
OffloadDeviceOption = Annotated[OffloadDevice, OFFLOAD_DEVICE]
BackwardPrefetchOption = Annotated[
    BackwardPrefetch,
    rule("the BackwardPrefetch of FSDP1; accelerate and the Trainer have none unless their configuration sets it"),
]
WrapOption = Annotated[
    Wrap,
    rule(
        "the units that FSDP gathers as a whole: layer, each layer; none, the whole model; size:N, modules of at least N parameters; "
        "class:A,B, layers of these classes; every:N, groups of N layers",
        metavar="POLICY",
        max_length=256,
        word=read_wrap,
        example=WRAP_EXAMPLE,
    ),
]
ForwardPrefetch = Annotated[
    bool,
    rule(
        "all-gather the next layer before a layer's forward: FSDP1's forward_prefetch, FSDP2's "
        "set_modules_to_forward_prefetch"
    ),
]
UseOrigParams = Annotated[
    bool,
    rule(
        "whether the optimizer steps the original parameters (FSDP1's use_orig_params); without it, one flat parameter per "
        "unit, which must be trained as a whole or not at all",
        default="yes",
    ),
]
ReshardAfterForward = Annotated[
    str,
    rule(
        "whether FSDP frees gathered parameters after forward: auto follows the strategy, false keeps them (with hsdp this "
        "is HYBRID_SHARD_ZERO2), a number shards them over this many ranks (FSDP2)",
        metavar="RESHARD",
        max_length=16,
        word=partial(read_word_or_number, words=("auto", "false"), low=2, high=MAX_GPUS),
        example="auto, false or a number such as 8",
    ),
]
ZeroBuckets = Annotated[
    str | None,
    rule(
        "DeepSpeed's sizes in elements, by the keys of zero_optimization: reduce_bucket_size=2e8,sub_group_size=1e8",
        metavar="SIZES",
        default='DeepSpeed\'s defaults; those for "auto" with accelerate and the Trainer',
        max_length=512,
        word=read_zero_buckets,
        example=f"sizes such as reduce_bucket_size=2e8, with the keys {', '.join(ZERO_BUCKETS)}",
    ),
]
StateDictTypeOption = Annotated[
    StateDictType,
    rule(
        "how FSDP saves: full, gathered on rank 0; sharded, each rank's rows by torch.distributed.checkpoint; local, FSDP1's "
        "flat shards; auto: full with FSDP1, sharded with FSDP2"
    ),
]
FrameworkOption = Annotated[
    Framework,
    rule(
        "the library that prepares the model and runs the training loop",
        synonyms={"pytorch": "torch", "transformers": "trainer", "hf_trainer": "trainer"},
        not_modelled=("lightning", "megatron", "nemo"),
    ),
]
