"""GaLore and APOLLO: AdamW or Adafactor whose moments have a low rank, for the weights of linear layers.

Each matrix has a projection. It is computed again every `update_proj_gap` steps: GaLore's from the singular vectors of
the gradient, APOLLO's from random numbers. The estimate is for a step that computes the projection, because its peak is the highest.
All other parameters are stepped by AdamW without projection, one after the other, before the matrices.

Source: galore-torch 1.0, adamw.py, galore_projector.py; apollo-torch 1.0.3, apollo.py, random_projector.py; transformers 5.23,
trainer_optimizer.py, `_setup_low_rank_optimizer`, `_get_galore_optimizer`, `_get_apollo_optimizer`; torch 2.13, `linalg_svd`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.projection import ALL_LINEAR, DEFAULT, Projection, projection_of, settings_of
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.dtypes import FP32_BYTES
from fsdp_advisor.policies.optimizers.interface import (
    WHOLE,
    NamedOptimizer,
    PlainLoop,
    Refusal,
    Shape,
    Shards,
    Stepped,
    without_deepspeed,
)
from fsdp_advisor.policies.optimizers.variables import Variables
from fsdp_advisor.program.storages import NO_STORAGES, Storages

# L = the larger and S = the smaller dimension of a matrix; R = the rank

INFO_BYTES = 4
"""cuSOLVER reports its success in an int32."""
_NOT_LINEAR = ("mlp.gate", "feed_forward.gate", "mixer.gate", "mlp.router", "block_sparse_moe.router")
"""Routers of mixtures of experts. transformers 5.23 computes most of them without nn.Linear."""


def is_linear_weight(parameter: Parameter) -> bool:
    """Whether the parameter is the weight of an nn.Linear, as far as its name, shape and role say.

    A test compares the result with the classes of the catalog's models. GPT-2's Conv1D has the same names but is not an nn.Linear. Routers
    of experts never count, although some are an nn.Linear; they are small.

    >>> is_linear_weight(Parameter("mlp.up_proj.weight", (64, 16))), is_linear_weight(Parameter("mlp.gate.weight", (8, 16)))
    (True, False)
    >>> is_linear_weight(Parameter("image_embed.fc1.weight", (64, 16))), is_linear_weight(Parameter("position_embed.weight", (8, 16)))
    (True, False)
    """
    module, _, leaf = parameter.name.rpartition(".")
    own_name = module.rpartition(".")[2]  # a module called embed may contain a whole encoder
    embeds = "embed" in own_name or own_name in ("wpe", "bias_values")
    return (
        len(parameter.shape) == 2
        and leaf == "weight"
        and parameter.role in ("other", "head", "adapter")
        and not embeds
        and not module.endswith(_NOT_LINEAR)
    )


_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Model types of transformers 5.23 whose layers are Conv1D, which the Trainer does not project."""


@dataclass(frozen=True, kw_only=True)
class LowRank(PlainLoop):
    """AdamW whose moments have at most as many columns or rows as the projection's rank."""

    label: str
    projection: Projection = DEFAULT
    moment_passes: ClassVar[int] = 17
    """Number of tensors of the projected gradient's size that the inner optimizer reads or writes. AdamW's are for both moments and their
    decay, the root and the quotient.
    """

    def model_failure(self, model_type: object) -> str | None:
        if model_type not in _CONV1D_MODELS:
            return None
        return f"{self.name} projects nn.Linear only, and the layers of {model_type} are Conv1D"

    def projection_bytes(self, shape: Shape, element_bytes: int) -> int:
        """Bytes of the projection that the state keeps."""
        return element_bytes * self.rank_of(shape) * min(shape)

    def rank_of(self, shape: Shape) -> int:
        return self.projection.rank

    def projects(self, parameter: Parameter) -> bool:
        """Whether the parameter is the weight of a linear layer that is projected."""
        return is_linear_weight(parameter) and self.projection.takes(parameter.name.rpartition(".")[0])

    def with_settings(self, optim_args: str | None, target_modules: str | None) -> LowRank:
        projection = projection_of(optim_args, target_modules)
        settings = settings_of(optim_args or "") or {}
        assert isinstance(self.transformers, NamedOptimizer)
        named = replace(self.transformers, options=settings, target_modules=projection.targets or ALL_LINEAR)
        return replace(self, projection=projection, transformers=named, notes=_notes(self.label, projection))

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        if not prod(shape):
            return NO_STORAGES
        if not self.projects(parameter):
            return Storages.of(prod(shape) * element_bytes, 2)
        moment = element_bytes * self.rank_of(shape) * max(shape)
        return Storages.of(self.projection_bytes(shape, element_bytes)) + Storages.of(moment, 2)

    def textbook_bytes(self, element_bytes: int) -> int:
        """0, because low-rank moments are negligible."""
        return 0

    def loop(self, tensors: Sequence[Stepped]) -> Variables:
        variables = Variables()
        for _, tensor in self.in_order(tensors):
            variables.drop("grad")
            self.step_tensor(variables, tensor)
        variables.drop_all()
        return variables

    def in_order(self, tensors: Sequence[Stepped]) -> list[tuple[int, Stepped]]:
        """(position in `tensors`, tensor) in the order of the updates: projected matrices come last."""
        return sorted(enumerate(tensors), key=lambda each: self.projects(each[1].parameter))

    def step_tensor(self, variables: Variables, tensor: Stepped) -> None:
        """Record the allocations and frees of one tensor's update in `variables`."""
        if self.projects(tensor.parameter):
            self.step_matrix(variables, tensor.shape, tensor.element_bytes)
        else:
            self._adam(variables, tensor.n_bytes)

    def step_bytes(self, parameter: Parameter, element_bytes: int) -> int:
        """Bytes of a step that reuses the projection."""
        n_bytes = parameter.elements * element_bytes
        if not self.projects(parameter):
            return (self.moment_passes + 3) * n_bytes
        moment = element_bytes * self.rank_of(parameter.shape) * max(parameter.shape)
        return (1 + self.update_passes()) * n_bytes + self.moment_passes * moment

    def step_flops(self, parameter: Parameter, shards: Shards = WHOLE) -> int:
        if not self.projects(parameter):
            return 0
        return self.products() * 2 * self.rank_of(parameter.shape) * parameter.elements

    @abstractmethod
    def step_matrix(self, variables: Variables, shape: Shape, element_bytes: int) -> None:
        """Record the allocations and frees of one matrix's update in `variables`."""

    @abstractmethod
    def update_passes(self) -> int:
        """The number of tensors of the matrix's size that the update reads or writes after AdamW."""

    @abstractmethod
    def products(self) -> int:
        """The number of matrix products of a step: one to project the gradient, others to project the update back."""

    def _adam(self, variables: Variables, n_bytes: int) -> None:
        variables.assign("denom", n_bytes)
        variables.assign("norm_grad", n_bytes)


class Galore(LowRank):
    """GaLore: the projection is the first singular vectors of the gradient, on the side of the smaller dimension.

    In fp32 they are a view of all singular vectors, which the state keeps alive. In 16 bits they are a copy.
    """

    def rank_of(self, shape: Shape) -> int:
        return min(self.projection.rank, *shape)

    def projection_bytes(self, shape: Shape, element_bytes: int) -> int:
        if element_bytes == FP32_BYTES:
            return FP32_BYTES * min(shape) ** 2
        return super().projection_bytes(shape, element_bytes)

    def step_matrix(self, variables: Variables, shape: Shape, element_bytes: int) -> None:
        self.decompose(variables, shape, element_bytes)
        matrix = element_bytes * prod(shape)
        low = element_bytes * self.rank_of(shape) * max(shape)
        variables.assign("grad", low)
        self._adam(variables, low)
        variables.assign("full_rank_grad", matrix)
        variables.assign("norm_grad", matrix)
        variables.drop("full_rank_grad")

    def decompose(self, variables: Variables, shape: Shape, element_bytes: int) -> None:
        """Record the singular value decomposition in fp32: a copy of the matrix, both factors and the values; then a product that is not
        used.
        """
        matrix, smaller, rank = FP32_BYTES * prod(shape), min(shape), self.rank_of(shape)
        factors = (matrix, FP32_BYTES * smaller**2, FP32_BYTES * smaller)
        if element_bytes != FP32_BYTES:
            variables.assign("matrix", matrix)
        variables.use(*factors, INFO_BYTES, matrix)
        variables.assign("factors", *factors)
        variables.use(FP32_BYTES * rank**2, FP32_BYTES * rank * max(shape))
        variables.assign("scaled", FP32_BYTES * rank * max(shape))
        if element_bytes != FP32_BYTES:
            variables.use(element_bytes * rank * smaller)
        variables.drop("matrix", "factors", "scaled")

    def update_passes(self) -> int:
        """6 tensors: the update is written (1), scaled (2) and added (3)."""
        return 6

    def products(self) -> int:
        return 2


class GaloreAdafactor(Galore):
    """Adafactor in fp32 over the projected gradient, without first moment. The projection is always a view of all singular vectors."""

    moment_passes: ClassVar[int] = 15

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """The second moment, factored if it has two dimensions, and the parameter's root mean square."""
        if not prod(shape):
            return NO_STORAGES
        kept = NO_STORAGES
        if self.projects(parameter):
            kept = Storages.of(self.projection_bytes(shape, FP32_BYTES))
            shape = (max(shape), self.rank_of(shape))
        if len(shape) < 2:
            return Storages.of(FP32_BYTES * prod(shape)) + Storages.of(FP32_BYTES)
        rows, columns = prod(shape) // shape[-1], prod(shape) // shape[-2]
        return kept + Storages.of(FP32_BYTES * rows) + Storages.of(FP32_BYTES * columns) + Storages.of(FP32_BYTES)

    def step_tensor(self, variables: Variables, tensor: Stepped) -> None:
        shape, whole = tensor.shape, FP32_BYTES * prod(tensor.shape)
        projects, converts = self.projects(tensor.parameter), tensor.element_bytes != FP32_BYTES
        if converts:
            variables.assign("grad", whole)
        if projects:
            self.decompose(variables, shape, FP32_BYTES)
            shape = (max(shape), self.rank_of(shape))
            variables.assign("grad", FP32_BYTES * prod(shape))
        variables.drop("p_data_fp32")
        if converts:
            variables.assign("p_data_fp32", whole)
        n_bytes = FP32_BYTES * prod(shape)
        variables.assign("square", n_bytes)
        variables.assign("update", n_bytes)
        variables.drop("square")
        if len(shape) > 1:
            variables.assign("factors", n_bytes // shape[-1], n_bytes // shape[-2])
        variables.assign("update", n_bytes)
        variables.drop("factors")
        if projects:
            variables.assign("full_rank_grad", whole)
            variables.assign("update", whole)
            variables.drop("full_rank_grad")
        variables.use(whole)

    def update_passes(self) -> int:
        """9 tensors: the update is written (1), scaled (2), negated (2) and added (3), and the parameter's norm is computed (1)."""
        return 9


class Apollo(LowRank):
    """APOLLO: the projection is random. AdamW's update of the projected gradient only determines a scale for each channel of the
    gradient.
    """

    def state_storages(self, parameter: Parameter, shape: Shape, element_bytes: int) -> Storages:
        """AdamW's state of low rank and the projection; for a matrix also the norm of its last update, a scalar."""
        state = super().state_storages(parameter, shape, element_bytes)
        return state + Storages.of(element_bytes) if prod(shape) and self.projects(parameter) else state

    def step_matrix(self, variables: Variables, shape: Shape, element_bytes: int) -> None:
        e, matrix = element_bytes, element_bytes * prod(shape)
        rank = self.projection.rank
        random, low, norms = rank * min(shape), rank * max(shape) * e, max(shape) * e
        if e != FP32_BYTES:
            variables.assign("matrix", FP32_BYTES * prod(shape))
        variables.use(*(FP32_BYTES * random,) * 2)
        variables.assign("random", FP32_BYTES * random)
        if e != FP32_BYTES:
            variables.use(e * random)
        variables.drop("matrix", "random")
        variables.assign("grad", low)
        self._adam(variables, low)
        variables.use(*(norms,) * 3)
        variables.assign("grad_scaling_factor", norms)
        variables.assign("scaled_grad", matrix)
        variables.assign("scaled_grad_norm", e)
        variables.use(e, e)  # the limiter is a Python number, unless the norm grew by more than 1 %
        variables.assign("scaled_grad", matrix)
        variables.drop("norm_grad")  # the name now refers to scaled_grad

    def update_passes(self) -> int:
        """10 tensors: the gradient is scaled (2), its norm is computed (1), it is limited (2), scaled in place (2) and added (3)."""
        return 10

    def products(self) -> int:
        return 1


_SCRIPT = "{} needs a group of parameters with its own options, which exported scripts do not have"


def _notes(label: str, projection: Projection) -> tuple[str, ...]:
    targets = ", ".join(projection.targets)
    what = f"the linear layers with {targets} in their names" if targets else "all linear layers"
    chosen = (
        f"{label} projects {what} (optim_target_modules) to rank {projection.rank};"
        " the estimated step is one that recomputes the projections"
    )
    if label != "GaLore":
        return (chosen,)
    gap = projection.update_proj_gap
    return (
        chosen,
        f"the singular value decompositions every {gap} steps: the peak counts their tensors but not cuSOLVER's"
        " workspace, and the step time does not count them",
    )


def low_rank(cls: type[LowRank], name: OptimizerName, label: str, *, shared_state: Storages = NO_STORAGES) -> LowRank:
    """An optimizer of this class. Those whose names end in `_layerwise` update each parameter in backward."""
    layerwise = name.endswith("_layerwise")
    return cls(
        name=name,
        label=label,
        transformers=NamedOptimizer(name=name, target_modules=ALL_LINEAR),
        **without_deepspeed(name),
        script=Refusal(_SCRIPT.format(label)),
        backward_update="own gradient" if layerwise else None,
        shared_state=shared_state,
        notes=_notes(label, DEFAULT),
    )


GALORE_ADAMW = low_rank(Galore, "galore_adamw", "GaLore")
GALORE_ADAFACTOR = low_rank(GaloreAdafactor, "galore_adafactor", "GaLore")
APOLLO_ADAMW = low_rank(Apollo, "apollo_adamw", "APOLLO")
GALORE_ADAMW_LAYERWISE = low_rank(Galore, "galore_adamw_layerwise", "GaLore")
APOLLO_ADAMW_LAYERWISE = low_rank(Apollo, "apollo_adamw_layerwise", "APOLLO")
"""The layerwise forms have one optimizer per parameter, which steps as soon as the gradient is complete."""
