"""The interface of an optimizer: its state, temporaries, memory traffic, the device it runs on, and its names in other tools.

Shapes: `shape` is the shape of the tensor that this rank steps. It is the parameter's own shape under DDP, rank 0's rows under
FSDP2, and a 1-D piece of the flat parameter under FSDP1. `elements` counts the elements of a flat partition of DeepSpeed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.optimizers import LIMITS
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers.variables import Variables
from fsdp_advisor.program.instructions import HostKernel
from fsdp_advisor.program.storages import NO_STORAGES, Storages

Shape = Sequence[int]
Option = bool | float | str
BackwardUpdate = Literal["own gradient", "next gradient"]
STEP_COUNT_BYTES = 4
"""torch counts the steps of each tensor in one fp32 scalar."""
NO_OPTIONS: Mapping[str, Option] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The number of ranks among which FSDP2 splits each parameter, and how many of them a node has."""

    ranks: int
    ranks_per_node: int


WHOLE = Shards(ranks=1, ranks_per_node=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Bytes and number of the collectives of an update: all-gathers and reduce-scatters, and all-reduces."""

    gathered_bytes: float = 0
    gathers: float = 0
    reduced_bytes: float = 0
    reduces: float = 0

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(
            gathered_bytes=self.gathered_bytes + other.gathered_bytes,
            gathers=self.gathers + other.gathers,
            reduced_bytes=self.reduced_bytes + other.reduced_bytes,
            reduces=self.reduces + other.reduces,
        )

    def __mul__(self, count: int) -> Collectives:
        return Collectives(
            gathered_bytes=self.gathered_bytes * count,
            gathers=self.gathers * count,
            reduced_bytes=self.reduced_bytes * count,
            reduces=self.reduces * count,
        )


class Refusal(NamedTuple):
    """A consumer cannot use the optimizer. `reason` is a sentence for the user."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constructor:
    """The class of the optimizer in Python, and its arguments besides the parameters and the learning rate.

    `has_modes`: whether `train()` has to be called before it steps, and `eval()` before the weights are evaluated or saved, as for
    schedule-free optimizers.
    """

    module: str
    name: str
    options: Mapping[str, Option] = field(default_factory=dict)
    has_modes: bool = False

    def call(self) -> str:
        """The call in Python source, over the names `parameters` and `lr`.

        >>> Constructor(module="torch.optim", name="AdamW", options={"fused": True}).call()
        'torch.optim.AdamW(parameters, lr=lr, fused=True)'
        """
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.module}.{self.name}(parameters, lr=lr{options})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """The name of the optimizer in a configuration file, and its arguments besides the learning rate."""

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)
    target_modules: str | tuple[str, ...] | None = None
    """The Trainer's `optim_target_modules`: `all-linear`, or parts of names."""

    @property
    def arguments(self) -> str | None:
        """The options as the Trainer's `optim_args`; None if there are none."""
        return ",".join(f"{name}={value}" for name, value in self.options.items()) or None

    @property
    def targets(self) -> str | list[str] | None:
        """The target modules as a value for a configuration file."""
        return list(self.target_modules) if isinstance(self.target_modules, tuple) else self.target_modules


class Stepped(NamedTuple):
    """A tensor that this rank steps: the parameter, and the tensor's shape and bytes per element."""

    parameter: Parameter
    shape: Shape
    element_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.element_bytes * prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """One optimizer. A field has no default if no value is safe to assume.

    Bytes and storages are those of one rank. `element_bytes` is the size of an element of the tensor that is stepped.
    """

    name: OptimizerName

    # Names, or the reason why there is none

    script: Constructor | Refusal
    """The optimizer in a training script of PyTorch, which `validate` builds too."""
    transformers: NamedOptimizer | Refusal
    """`optim` and `optim_args` of transformers' TrainingArguments, `optimizer` and `optim_args` of axolotl."""
    deepspeed: NamedOptimizer | Refusal
    """The section `optimizer` of DeepSpeed's configuration, with the states on the GPU."""
    deepspeed_offloaded: NamedOptimizer | Refusal
    """As `deepspeed`, with the states on the host."""

    # The step on the host

    host_kernel: HostKernel
    """The update on the CPU under PyTorch's parameter offload."""
    deepspeed_host_kernel: HostKernel
    """The update on the CPU under DeepSpeed's offload."""
    is_cpu_adam: bool
    """Whether DeepSpeed replaces the optimizer with DeepSpeedCPUAdam when it offloads."""

    # Fields with a default that fits most optimizers

    is_deepspeeds: ClassVar[bool] = False
    """Whether DeepSpeed itself makes it, from the section `optimizer` of its configuration: its Muon, which has two groups of parameters
    (`engines.deepspeed.groups`).
    """
    steps_one_by_one: ClassVar[bool] = False
    """Whether the temporaries of one parameter are freed before the next parameter is updated."""
    shared_state: Storages = NO_STORAGES
    """State on the GPU that exists once per process, independent of the number of parameters."""
    host_state_bytes: int = 0
    """State of one tensor on the host while the tensor is on the GPU. Checkpoints contain it."""
    group_state_bytes: int = 0
    """Tensors on the host among the settings of one group of parameters. Checkpoints contain them."""
    measured_zero1: Refusal | None = None
    """Why `validate` cannot build it inside torch's ZeroRedundancyOptimizer. None: it does so wherever it builds it."""
    measured_on_cpu: Refusal | None = None
    """Why a run on the CPU does not show what a GPU allocates. None: it does."""
    simulated: bool = False
    """Whether fake tensors show what a GPU allocates, although a run on the CPU does not."""
    is_paged: bool = False
    """Whether large states are in CUDA's managed memory (`paged_state_storages`)."""
    backward_update: BackwardUpdate | None = None
    """The gradient at which backward updates a parameter and frees its gradient: its own, or the next one. None: the update is
    after backward.
    """
    frees_gradients: bool = False
    """Whether its loop frees gradients before `zero_grad` does (`Variables.release_gradient`)."""
    made_with_state: bool = False
    """Whether its constructor makes the states, also of parameters that never get a gradient. Others make them in the first step."""
    follows_groups: bool = False
    """Whether its loop depends on the groups of parameters. The Trainer's first group has the matrices, its second the norms and biases."""
    notes: tuple[str, ...] = ()
    """Notes on the assumptions of every estimate."""
    deepspeed_notes: tuple[str, ...] = ()
    """Notes on the assumptions of an estimate for DeepSpeed."""

    def with_settings(self, optim_args: str | None, target_modules: str | None) -> Optimizer:
        """The optimizer with the Trainer's `optim_args` and `optim_target_modules`, in their canonical spelling."""
        return self

    def made_by_trainer(self) -> Optimizer:
        """The optimizer as transformers' Trainer makes it."""
        return self

    def made_by_deepspeed(self) -> Optimizer:
        """The optimizer that runs under DeepSpeed, which has implementations of its own."""
        return self

    def shard_failure(self, parameter: Parameter, shards: Shards) -> str | None:
        """Why the optimizer cannot step the parameter under FSDP2 on these ranks; None if it can."""
        return None

    def model_failure(self, model_type: object) -> str | None:
        """Why this description of the optimizer is wrong for models of this type; None if it is right."""
        return None

    # State

    def keeps_state_of(self, parameter: Parameter) -> bool:
        """Whether it has state of the parameter."""
        return parameter.trainable or (parameter.idle and self.made_with_state)

    def on_host(self, elements: int) -> bool:
        """Whether a tensor of `elements` elements is updated on the host although it is on the GPU. The host then has its state
        (`all_state_storages`) and pinned copies of the tensor and of its gradient. Backward copies the gradient there.
        """
        return False

    def host_state(self, elements: int, element_bytes: int) -> int:
        """Bytes of a tensor's state in pageable host memory that each update copies to the GPU and back. The tensor itself is on the
        GPU.
        """
        return 0

    @abstractmethod
    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The state of one trainable parameter. `shape`: the tensor that this rank steps. Nothing for an empty tensor."""

    @abstractmethod
    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        """The state of one flat partition under DeepSpeed, on the GPU, without the masters."""

    def all_state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The state of one trainable parameter, including state in managed memory. A checkpoint, or the host with offload, has to store
        it.
        """
        return self.state_storages(parameter, shape, element_bytes) + self.paged_state_storages(parameter, shape)

    def paged_state_storages(self, parameter: Parameter, shape: Shape) -> Storages:
        """The state of one trainable parameter that is in CUDA's managed memory. `state_storages` does not count it.

        cudaMallocManaged allocates it, not PyTorch. CUDA moves its pages to the GPU when they are used, and to the host when the
        GPU is full.
        """
        return NO_STORAGES

    def flat_paged_state_storages(self, elements: int) -> Storages:
        """The state of one flat partition under DeepSpeed that is in CUDA's managed memory. `flat_state_storages` does not count it."""
        return NO_STORAGES

    @abstractmethod
    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        """Bytes of each state tensor of one flat partition when DeepSpeed offloads it. They are pageable."""

    def saved_flat_bytes(self, elements: int, element_bytes: int) -> int:
        """Bytes in a checkpoint of the state of one flat partition under DeepSpeed."""
        on_gpu = self.flat_state_storages(elements, element_bytes) + self.flat_paged_state_storages(elements)
        return on_gpu.exact + self.host_state_bytes

    @abstractmethod
    def textbook_bytes(self, element_bytes: int) -> int:
        """Bytes of state per parameter element. Factored moments and scalars are neglected."""

    # Temporaries of the step

    @abstractmethod
    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The temporaries of one parameter's update at their peak.

        The temporaries of all parameters live at the same time, unless the optimizer `steps_one_by_one`.
        """

    def shard_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int, shards: Shards) -> Storages:
        """The temporaries of one parameter's update at their peak, for rank 0's rows of it under FSDP2."""
        return self.step_temporaries(parameter, shape, element_bytes)

    def loop(self, tensors: Sequence[Stepped]) -> Variables | None:
        """The allocations of the optimizer's loop over all tensors, which are in the order of `model.parameters()`.

        None if no loop has to be followed, because the peak is the largest or the sum of the tensors' temporaries.
        """
        return None

    @abstractmethod
    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        """The temporaries of the update of one flat partition under DeepSpeed at their peak, without the gradient."""

    # Cost of the step

    @abstractmethod
    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes of GPU memory that the update of the whole parameter reads and writes."""

    def quantized_states(self, parameter: Parameter) -> int:
        """The values of the parameter's state that an update looks up in bitsandbytes' table of 256 values to store them in 8 bits."""
        return 0

    def step_flops(self, parameter: Parameter, shards: Shards = WHOLE) -> int:
        """Floating-point operations of matrix products that a rank computes for the parameter's update."""
        return 0

    def step_collectives(self, parameter: Parameter, shards: Shards = WHOLE) -> Collectives:
        """Collectives that the parameter's update needs in addition to those of the engine."""
        return Collectives()


class NotForDeepSpeed(Optimizer):
    """An optimizer that DeepSpeed cannot step. `job.optimizers` refuses such jobs before anything asks for flat partitions."""

    def flat_state_storages(self, elements: int, element_bytes: int) -> Storages:
        raise NotImplementedError(f"DeepSpeed does not step {self.name}")

    def deepspeed_host_states(self, elements: int, element_bytes: int) -> tuple[int, ...]:
        raise NotImplementedError(f"DeepSpeed does not step {self.name}")

    def flat_step_temporaries(self, elements: int, element_bytes: int) -> Storages:
        raise NotImplementedError(f"DeepSpeed does not step {self.name}")


class PlainLoop(NotForDeepSpeed):
    """An optimizer written in plain PyTorch that updates one parameter after the other. `loop` follows its local variables."""

    steps_one_by_one: ClassVar[bool] = True

    @abstractmethod
    def loop(self, tensors: Sequence[Stepped]) -> Variables: ...

    def step_temporaries(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        return self.loop([Stepped(parameter, shape, element_bytes)]).peak


def without_deepspeed(name: OptimizerName, *, host_kernel: HostKernel = "many_passes") -> dict[str, Any]:
    """The fields about DeepSpeed and the host of an optimizer that DeepSpeed cannot step, for the reason in `job.optimizers.LIMITS`."""
    refusal = Refusal(LIMITS[name]["deepspeed"].reason)
    return {
        "deepspeed": refusal,
        "deepspeed_offloaded": refusal,
        "host_kernel": host_kernel,
        "deepspeed_host_kernel": host_kernel,
        "is_cpu_adam": False,
    }
