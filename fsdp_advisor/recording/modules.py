"""Any `torch.nn.Module` as a source, for models that are not from transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fsdp_advisor.errors import UsageError
from fsdp_advisor.model.tape_key import TapeCheckpointing
from fsdp_advisor.model.tasks import SAMPLES
from fsdp_advisor.recording.source import LayerStack, RootModules


def _has_lengths(batch: Callable[[int, int], Mapping[str, torch.Tensor]]) -> bool:
    """Whether the tensors of a batch depend on the sequence length."""

    def shapes(seq_len: int) -> dict[str, torch.Size]:
        with torch.device("meta"):
            return {name: tensor.shape for name, tensor in batch(2, seq_len).items()}

    return shapes(64) != shapes(128)


class ModuleSource:
    """A source made of a module builder, a batch builder and a loss. `wrap`: the classes or dotted names of the module's units."""

    max_seq_len: int | None = None
    min_seq_len: int = 1
    needs_values: bool = False
    expert_imbalance: float | None = None
    alike_up_to: int | None = None
    inventory_dtype = torch.float32

    def __init__(
        self,
        builder: Callable[[], nn.Module],
        batch: Callable[[int, int], Mapping[str, torch.Tensor]],
        loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor],
        wrap: tuple[type[nn.Module] | str, ...],
        name: str | None,
    ) -> None:
        self._builder, self._batch, self._loss, self._wrap = builder, batch, loss, wrap
        self.task = "module" if _has_lengths(batch) else SAMPLES
        self.name: str = name or str(getattr(builder, "__name__", "module"))

    def build(self, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return self._builder().to(dtype).train()

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        """The stacks: adjacent units in one container form a stack; any other unit is a stack of one layer."""
        classes = tuple(w for w in self._wrap if not isinstance(w, str))
        names = {w for w in self._wrap if isinstance(w, str)}
        found: dict[str, list[nn.Module]] = {}
        for path, inner in module.named_modules():
            if path and (path in names or (classes and isinstance(inner, classes))):
                parent = path.rpartition(".")[0]
                listed = isinstance(module.get_submodule(parent), (nn.ModuleList, nn.Sequential))
                found.setdefault(parent if listed else path, []).append(inner)
                names.discard(path)
        if names:
            raise UsageError(f"no module is named {sorted(names)[0]!r}", hint="give dotted names as in named_modules()")
        return [LayerStack(path, tuple(layers)) for path, layers in found.items()]

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        """Drop the other layers, if their container is a plain one. Layers of any other module cannot be dropped safely."""
        for stack in self.stacks(module):
            container = module.get_submodule(stack.path)
            if isinstance(container, (nn.ModuleList, nn.Sequential)) and len(container) == len(stack.layers):
                parent = module.get_submodule(stack.path.rpartition(".")[0])
                layers = [stack.layers[i] for i in kept[stack.path]]
                leaf = stack.path.rpartition(".")[2]
                setattr(
                    parent,
                    leaf,
                    type(container)(layers) if isinstance(container, nn.ModuleList) else nn.Sequential(*layers),
                )

    def configure(
        self, module: nn.Module, *, attention: str, checkpointing: TapeCheckpointing, window_filled: bool | None = None
    ) -> None:
        if checkpointing != "none":
            raise UsageError(
                "the recorder cannot add activation checkpointing to a plain module",
                hint="checkpoint in the module's forward",
            )

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(module, batch)

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        return dict(self._batch(micro_batch_size, seq_len))

    def root_modules(self, module: nn.Module) -> RootModules:
        return RootModules()

    def is_added(self, parameter: str) -> bool:
        return False

    def config(self) -> dict[str, object]:
        return {"module": self.name, "wrap": [w if isinstance(w, str) else w.__name__ for w in self._wrap]}
