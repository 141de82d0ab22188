"""The search space: every combination that a request leaves open of strategy, backend, offload, loss, checkpointing and activation
offload.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from fsdp_advisor.job.choices import Backend, Checkpointing, Framework, Offload, OffloadDevice, OptimizerName, Strategy
from fsdp_advisor.job.compatibility import OFFLOADS, check_request, label, mesh_of, shared_fields
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.losses import LossCode, loss_code, loss_words
from fsdp_advisor.job.optimizers import optimizer_refusal, unable_backends
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.refusals import combination_refusal
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.job.tiled_mlp import tiling_backends

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""The policies that a search chooses from, the fastest first."""
DEVICES: tuple[OffloadDevice, ...] = ("cpu", "nvme")
SIMPLEST_FIRST: tuple[tuple[Backend, Strategy], ...] = (
    ("ddp", "ddp"),
    ("fsdp2", "zero2"),
    ("fsdp2", "zero3"),
    ("fsdp2", "hsdp"),
    ("fsdp1", "zero2"),
    ("fsdp1", "zero3"),
    ("fsdp1", "hsdp"),
    ("deepspeed", "zero1"),
    ("deepspeed", "zero2"),
    ("deepspeed", "zero3"),
)
"""Backends and strategies, the simplest first: PyTorch's own before DeepSpeed, which is one more dependency with its own configuration;
less sharding before more.
"""


class ActivationChoice(NamedTuple):
    """How a step saves the memory of activations and logits: its loss, checkpointing, and offload of activations."""

    loss_code: LossCode = "full"
    activation_checkpointing: Checkpointing = "none"
    activation_offload: bool = False

    @property
    def rank(self) -> tuple[int, ...]:
        """Sort key, the least costly first: another loss, then selective checkpointing, then all layers, then offload."""
        policy = self.activation_checkpointing
        checkpointing = CHECKPOINTING.index(policy) if policy in CHECKPOINTING else 1
        return (int(self.activation_offload), checkpointing, int(self.loss_code != "full"))

    @property
    def parts(self) -> tuple[str, ...]:
        """The differences from a plain step, in words."""
        policy = self.activation_checkpointing
        checkpointing = {"none": (), "full": ("checkpointing",)}.get(policy, (f"checkpointing {policy}",))
        return (
            *((words,) if (words := loss_words(self.loss_code)) else ()),
            *checkpointing,
            *(("activation offload",) if self.activation_offload else ()),
        )

    def is_beyond(self, other: ActivationChoice) -> bool:
        """Whether this choice saves more than another: its loss, checkpointing and offload each save at least as much, and one of them
        more.
        """
        return self != other and all(mine >= its for mine, its in zip(self.rank, other.rank, strict=True))


PLAIN_STEP = ActivationChoice()


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """A strategy, backend, offload and `ActivationChoice`. With a micro-batch and accumulation it makes a plan."""

    strategy: Strategy
    backend: Backend
    offload: Offload = "none"
    offload_device: OffloadDevice = "cpu"
    activations: ActivationChoice = PLAIN_STEP

    @classmethod
    def of(cls, plan: Plan) -> StrategyChoice:
        """The choice that a plan has made."""
        return cls(
            strategy=plan.strategy,
            backend=plan.backend,
            offload=plan.offload,
            offload_device=plan.offload_device if plan.offload != "none" else "cpu",
            activations=ActivationChoice(plan.loss_code, plan.activation_checkpointing, plan.activation_offload),
        )

    @property
    def activation_checkpointing(self) -> Checkpointing:
        return self.activations.activation_checkpointing

    @property
    def host_level(self) -> int:
        """How much the choice uses the host: 0 not at all, 1 for activations, 2 for states."""
        return 2 if self.offload != "none" else int(self.activations.activation_offload)

    @cached_property
    def simplicity_rank(self) -> tuple[int, ...]:
        """Sort key, the simplest first: no offload, then the order of SIMPLEST_FIRST, then `ActivationChoice.rank`."""
        return (
            self.host_level,
            tuple(OFFLOADS).index(self.offload),
            DEVICES.index(self.offload_device),
            SIMPLEST_FIRST.index((self.backend, self.strategy)),
            *self.activations.rank,
        )

    @property
    def label(self) -> str:
        """The choice in words: `ZeRO-3 + optimizer offload (deepspeed), checkpointing`."""
        to = " to NVMe" if self.offload_device == "nvme" else ""
        return ", ".join((f"{label(self.strategy, self.offload)}{to} ({self.backend})", *self.activations.parts))

    def plan(self, base: Plan, micro_batch_size: int, accumulation: int = 1) -> Plan:
        """The plan `base` with this choice, on the same ranks."""
        return replace(
            base,
            strategy=self.strategy,
            backend=self.backend,
            offload=self.offload,
            offload_device=self.offload_device,
            **self.activations._asdict(),
            mesh=mesh_of(self.strategy, base.world_size, base.nnodes),
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation,
        )


def base_plan(request: RecommendRequest, *, gpus: int, nnodes: int, seq_len: int) -> Plan:
    """The part of a job that all its plans on these ranks share, as a DDP plan; `StrategyChoice.plan` replaces the rest."""
    request = replace(request, gpus=gpus, nnodes=nnodes)
    check_request(request, seq_len)
    return Plan(
        strategy="ddp",
        backend="ddp",
        mesh=mesh_of("ddp", gpus, nnodes),
        seq_len=seq_len,
        **shared_fields(request),
    )


def search_space(request: RecommendRequest, *, gpus: int, nnodes: int) -> tuple[StrategyChoice, ...]:
    """Every choice that the request leaves open on `gpus` ranks, the simplest first.

    Left out unless the request names them: HSDP on one node, which equals ZeRO-3; sharding without offload on one GPU, which shards
    nothing; FSDP1 unless FSDP2 cannot step the optimizer, because `auto` means FSDP2; NVMe, because
    its host memory is unknown. Also left out is whatever the framework cannot do.
    """
    return tuple(
        sorted(
            (
                choice
                for offload, strategies in OFFLOADS.items()
                for strategy, backends in strategies.items()
                for backend in backends
                for device in (_devices(request) if offload != "none" else ("cpu",))
                for activations in _activations(request)
                if _is_open(
                    request,
                    choice := StrategyChoice(
                        strategy=strategy,
                        backend=backend,
                        offload=offload,
                        offload_device=device,
                        activations=activations,
                    ),
                    gpus,
                    nnodes,
                )
            ),
            key=lambda choice: choice.simplicity_rank,
        )
    )


def _activations(request: RecommendRequest) -> tuple[ActivationChoice, ...]:
    """The choices of loss, checkpointing and offload that the request and its framework leave open.

    Activation offload is combined only with checkpointing of all layers, and moves their inputs.
    """
    facts, asked, usual = FRAMEWORKS[request.framework], request.activation_checkpointing, loss_code(request)
    is_open = request.loss == "auto" and request.task == "sft" and usual == facts.default_loss
    policies = CHECKPOINTING if facts.takes_functions else ("none", "full")
    return tuple(
        ActivationChoice(loss, policy, offloads)
        for loss in (usual, *(facts.other_losses if is_open else ()))
        for policy in (policies if asked == "auto" else (asked,))
        for offloads in _offloads(request, policy)
    )


def _offloads(request: RecommendRequest, policy: Checkpointing) -> tuple[bool, ...]:
    """The possible values of activation offload. If the request rules out offload of states, activations are not offloaded either."""
    is_fixed = request.activation_offload or "activation_offload" in request.given or request.offload == "none"
    if is_fixed or policy != "full" or FRAMEWORKS[request.framework].own_models:
        return (request.activation_offload,)
    return (False, True)


def _devices(request: RecommendRequest) -> tuple[OffloadDevice, ...]:
    return ("cpu" if request.offload_device == "auto" else request.offload_device,)


def _automatic(optim: OptimizerName, framework: Framework) -> frozenset[Backend]:
    """The backends of `auto`: DDP, DeepSpeed, and FSDP2, or FSDP1 if FSDP2 cannot step the optimizer."""
    unable = unable_backends(optim, framework)
    backends: tuple[Backend, ...] = ("ddp", "fsdp1" if "fsdp2" in unable else "fsdp2", "deepspeed")
    return frozenset(backends) - unable


def _is_pointless(request: RecommendRequest, choice: StrategyChoice, gpus: int, nnodes: int) -> bool:
    """Whether a simpler choice is equivalent on this number of ranks."""
    if choice.strategy == "hsdp":
        return nnodes == 1
    ddp_is_open = request.backend == "auto" and "ddp" in FRAMEWORKS[request.framework].backends
    return gpus == 1 and ddp_is_open and choice.strategy != "ddp" and choice.offload == "none"


def _is_open(request: RecommendRequest, choice: StrategyChoice, gpus: int, nnodes: int) -> bool:
    """Whether the request allows the choice, and backend and framework support it."""
    strategy_open = request.strategy != "all" or not _is_pointless(request, choice, gpus, nnodes)
    return (
        request.strategy in ("all", choice.strategy)
        and strategy_open
        and request.offload in ("auto", choice.offload)
        and (
            request.backend == choice.backend
            or (request.backend == "auto" and choice.backend in _automatic(request.optim, request.framework))
        )
        and choice.backend in FRAMEWORKS[request.framework].backends
        and (request.tiled_mlp == "none" or choice.backend in tiling_backends(request.framework, gpus))
        and optimizer_refusal(request.optim, choice.backend, choice.offload, request.framework) is None
        and (choice.offload_device == "cpu" or choice.backend == "deepspeed")
        and combination_refusal(choice.strategy, choice.backend, request.framework, _with(choice.activations, request))
        is None
    )


@lru_cache(maxsize=64)
def _with(activations: ActivationChoice, request: RecommendRequest) -> RecommendRequest:
    """The request with these choices about activations."""
    return replace(
        request,
        activation_checkpointing=activations.activation_checkpointing,
        activation_offload=activations.activation_offload,
    )
