"""A model prepared by accelerate's or the Trainer's own code, as rank 0 of a fake process group.

Both read the rank and the world size from accelerate's `PartialState`, which a launcher fills. Here it is filled as on GPUs, but with
the CPU as the device. Wrapping, casts, loss normalization and gradient clipping are then the frameworks' own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_advisor.engines.fsdp1.sharding import PREFETCH_NAMES, sharding_name
from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.export.constants import WRAP_POLICY
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Refusal
from fsdp_advisor.recording.source import Source
from fsdp_advisor.validation import engines
from fsdp_advisor.validation.failures import ModeUnavailable

MAX_STEPS = 10


@dataclass
class AccelerateTrainer:
    """The loop of accelerate's guide: `accumulate`, `loss = model(**batch).loss`, `backward`, `step`."""

    source: Source
    accelerator: Any
    model: nn.Module
    optimizer: Any
    batch: dict[str, torch.Tensor]
    _synced: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def forward(self) -> torch.Tensor:
        self._synced.enter_context(self.accelerator.accumulate(self.model))
        return self.source.loss(self.model, self.batch)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)
        self._synced.close()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@dataclass
class TransformersTrainer:
    """The phases of one optimizer step as in `Trainer._run_epoch` and `Trainer.training_step`."""

    trainer: Any
    model: nn.Module
    batch: dict[str, torch.Tensor]
    micro_batches: int
    _done: int = 0
    _items: Any = None
    _synced: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def optimizer(self) -> Any:
        return self.trainer.optimizer

    def forward(self) -> torch.Tensor:
        trainer = self.trainer
        if self._done == 0:
            batches = [self.batch] * self.micro_batches
            self._items = trainer._get_num_items_in_batch(batches, trainer.args.device)
            trainer.current_gradient_accumulation_steps = self.micro_batches
        self._done += 1
        last = self._done == self.micro_batches
        trainer.accelerator.gradient_state._set_sync_gradients(last)
        if not last:
            self._synced.enter_context(trainer.accelerator.no_sync(model=self.model))
        self.model.train()
        self.optimizer.train()
        inputs = trainer._prepare_inputs(dict(self.batch))
        with trainer.compute_loss_context_manager():
            loss: torch.Tensor = trainer.compute_loss(self.model, inputs, num_items_in_batch=self._items)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        trainer = self.trainer
        scaled = loss
        if not (trainer.model_accepts_loss_kwargs and self._items is not None):
            scaled = loss / trainer.current_gradient_accumulation_steps
        trainer.accelerator.backward(scaled)
        self._synced.close()
        loss.detach_()  # training_step returns the loss without its graph

    def step(self) -> None:
        trainer = self.trainer
        trainer._get_grad_norm(self.model, grad_norm=trainer._clip_grad_norm(self.model))
        self.optimizer.step()
        self._done, self._items = 0, None

    def zero_grad(self) -> None:
        self.model.zero_grad()


def check(plan: Plan) -> None:
    """Raises ModeUnavailable for a plan that the framework cannot run without a GPU."""
    if plan.precision == "fp16-mixed":
        raise ModeUnavailable(
            "accelerate does not run fp16 without a GPU",
            hint="bf16-mixed needs the same memory, except for the loss scaler",
        )
    if plan.world_size == 1 and plan.backend != "ddp" and plan.facts.uses_trainer:
        raise ModeUnavailable("the Trainer does not run FSDP on one GPU", hint="--gpus 2 or more, or --strategy ddp")
    if plan.framework == "axolotl" and plan.backend == "fsdp2" and importlib.util.find_spec("axolotl") is None:
        raise ModeUnavailable(
            "axolotl prepares a model for FSDP2 by its own code, which is not installed",
            hint="pip install --no-deps axolotl==0.19.0 addict, or --framework trainer",
        )
    if importlib.util.find_spec("accelerate") is None:
        raise ModeUnavailable(
            f"framework {plan.framework} needs accelerate, which is not installed", hint="pip install accelerate"
        )


@contextlib.contextmanager
def as_launched(plan: Plan, mesh: DeviceMesh | None) -> Iterator[Any]:
    """Context with accelerate's state as a launcher would fill it, but on the CPU. Yields accelerate's ParallelismConfig; None without
    replicas.

    `mesh` replaces the mesh that FSDP2 makes over all ranks, because its rank numbers must be real tensors.
    """
    state: Any = importlib.import_module("accelerate.state")
    kinds: Any = importlib.import_module("accelerate.utils").DistributedType
    environment = dict(os.environ)
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP on the CPU accepts no device ids
    state.AcceleratorState._reset_state(reset_partial_state=True)
    alone = plan.world_size == 1 and plan.backend == "ddp"
    state.PartialState._shared_state.update(
        _cpu=False, backend=None if alone else "nccl", device=torch.device("cpu"), debug=False, fork_launched=False,
        distributed_type=kinds.NO if alone else kinds.MULTI_GPU, num_processes=plan.world_size, process_index=0,
        local_process_index=0,
    )  # fmt: skip
    try:
        with (
            # accelerate identifies parameters by their addresses
            patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
            patch.object(nn.Module, "to", lambda module, *_, **__: module),  # all tensors are on their device already
            patch.object(DistributedDataParallel, "__init__", _ddp_on_fake_group),
            patch("torch.distributed.fsdp._fully_shard._fully_shard._init_default_mesh", lambda: mesh),
            patch("torch.distributed.fsdp._init_utils._init_intra_and_inter_node_groups", _node_groups(plan)),
            _as_axolotl() if plan.framework == "axolotl" and plan.backend == "fsdp2" else contextlib.nullcontext(),
        ):
            yield _parallelism(plan)
    finally:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(environment)


def _as_axolotl() -> Any:
    """Context in which accelerate prepares a model for FSDP2 by axolotl's code (monkeypatch/accelerate/fsdp2.py)."""
    code: Any = importlib.import_module("axolotl.monkeypatch.accelerate.fsdp2")
    return patch("accelerate.accelerator.fsdp2_prepare_model", code.fsdp2_prepare_model)


def _node_groups(plan: Plan) -> Callable[..., Any]:
    """FSDP1's function that makes the groups of HSDP, with the plan's ranks per node instead of the GPUs of this machine."""
    module: Any = importlib.import_module("torch.distributed.fsdp._init_utils")
    original: Callable[..., Any] = module._init_intra_and_inter_node_groups

    def groups(group: Any, _: int) -> Any:
        return original(group, plan.ranks_per_node)

    return groups


_INIT_DDP = DistributedDataParallel.__init__


def _ddp_on_fake_group(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """Make DDP on the fake group. Its search for unused parameters reads flags from tensors, so it is switched on only afterwards.

    The search then still clones the outputs; only its flags, a few bytes per parameter, are missing.
    """
    unused = kwargs.get("find_unused_parameters", False)
    _INIT_DDP(ddp, *args, **{**kwargs, "init_sync": False, "find_unused_parameters": False})
    ddp.find_unused_parameters = unused
    engines.adapt_ddp_to_fake_group(ddp, fake_tensors=True)


def accelerate_trainer(
    source: Source, model: nn.Module, plan: Plan, batch: dict[str, torch.Tensor], parallel: Any
) -> AccelerateTrainer:
    """The model, its optimizer and the batch as accelerate prepares them. `parallel` is what `as_launched` gives."""
    accelerate: Any = importlib.import_module("accelerate")
    _name_packed_weights(model)
    accelerator = accelerate.Accelerator(
        mixed_precision="bf16" if plan.mixed else "no",
        fsdp_plugin=_plugin(plan, _layer_classes(source, model, plan)),
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        parallelism_config=parallel,
    )
    if plan.steps_flat_parameters:
        prepared = accelerator.prepare(model)
        optimizer = accelerator.prepare(engines.optimizer_for(prepared, plan, training=False))
    else:
        optimizer = engines.optimizer_for(model, plan, training=False)
        prepared, optimizer = accelerator.prepare(model, optimizer)
    optimizer.train()
    return AccelerateTrainer(source, accelerator, prepared, optimizer, batch)


def _name_packed_weights(model: nn.Module) -> None:
    """Prepare packed 4-bit weights for accelerate's `fsdp2_prepare_model`: give them a class of the name by which it recognizes them, and
    let the fake offsets of doubly quantized scales be saved, because it makes a state dict.
    """
    named = type("Params4bit", (FakeTensor,), {})
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.weight.__class__ = named
        if (state := getattr(module, "quant_state", None)) is not None:
            state.as_dict = functools.partial(_saved, state)


def _saved(state: Any, packed: bool = False) -> Any:
    """`QuantState.as_dict` of bitsandbytes 0.50 (functional.py), which reads the value of the offset."""
    with patch.object(state, "offset", SimpleNamespace(item=float)):
        return type(state).as_dict(state, packed)


def _layer_classes(source: Source, model: nn.Module, plan: Plan) -> list[str]:
    """The names of the layer classes to wrap, as in exported configurations."""
    if plan.wrap_policy.kind == "class":
        return list(plan.wrap_policy.classes)
    return sorted({type(layer).__name__ for stack in source.stacks(model) for layer in stack.layers})


def _wrap_settings(plan: Plan) -> tuple[str, int]:
    """accelerate's wrap policy and `min_num_params`."""
    policy = plan.wrap_policy
    return WRAP_POLICY[policy.kind], policy.number if policy.kind == "size" else 0


def _plugin(plan: Plan, classes: list[str]) -> Any:
    """The FSDP section of an accelerate configuration; None for DDP."""
    if plan.backend == "ddp":
        return None
    plugin: Any = importlib.import_module("accelerate").FullyShardedDataParallelPlugin
    policy, number = _wrap_settings(plan)
    common = {
        "auto_wrap_policy": policy.lower(),
        "min_num_params": number,
        "transformer_cls_names_to_wrap": classes,
        "activation_checkpointing": plan.checkpointing == "full",
        "cpu_ram_efficient_loading": False,
    }
    if plan.backend == "fsdp2":
        return plugin(fsdp_version=2, reshard_after_forward=plan.reshards, **common)
    return plugin(
        fsdp_version=1, sharding_strategy=sharding_name(plan), backward_prefetch=PREFETCH_NAMES[plan.backward_prefetch],
        forward_prefetch=plan.forward_prefetch,
        use_orig_params=plan.use_orig_params, sync_module_states=False, **common,
    )  # fmt: skip


def _parallelism(plan: Plan) -> Any:
    """accelerate's ParallelismConfig for HSDP, with its mesh; None without replicas."""
    if plan.strategy != "hsdp" or plan.backend != "fsdp2":
        return None
    make: Any = importlib.import_module("accelerate").ParallelismConfig
    config = make(dp_replicate_size=plan.replica_degree, dp_shard_size=plan.shard_degree)
    config.get_device_mesh("cpu")
    return config


def _fsdp_config(plan: Plan, classes: list[str], *, checkpointing: bool) -> dict[str, Any]:
    """The Trainer's `fsdp_config`; empty for DDP. `checkpointing`: whether FSDP's plugin checkpoints."""
    if plan.backend == "ddp":
        return {}
    policy, number = _wrap_settings(plan)
    common = {
        "auto_wrap_policy": policy,
        "min_num_params": number,
        "transformer_layer_cls_to_wrap": classes,
        "activation_checkpointing": checkpointing,
    }
    if plan.backend == "fsdp2":
        return {"version": 2, "reshard_after_forward": plan.reshards, **common}
    return {
        "version": 1,
        "reshard_after_forward": "full_shard",
        "backward_prefetch": PREFETCH_NAMES[plan.backward_prefetch].lower(),
        "use_orig_params": plan.use_orig_params,
        "sync_module_states": False,
        **common,
    }


def plugin_checkpoints(model: nn.Module, plan: Plan) -> bool:
    """Whether accelerate's FSDP plugin, not the model, checkpoints the layers, as in exported files."""
    partly_frozen = not all(p.requires_grad for p in model.parameters())
    return plan.uses_accelerate and plan.plugin_checkpoints(
        adapters=hasattr(model, "peft_config"), partly_frozen=partly_frozen
    )


def transformers_trainer(
    source: Source, model: nn.Module, plan: Plan, batch: dict[str, torch.Tensor], parallel: Any
) -> TransformersTrainer:
    """The model and its optimizer as the Trainer prepares them. `parallel` is what `as_launched` gives."""
    transformers: Any = importlib.import_module("transformers")
    optimizer = optimizer_of(plan).transformers
    if isinstance(optimizer, Refusal):
        raise MeasurementError(optimizer.reason, hint="try another --optim")
    _name_packed_weights(model)
    # axolotl 0.19.0, loaders/adapter.py, `load_adapter`
    if plan.framework == "axolotl" and hasattr(model, "peft_config"):
        model.enable_input_require_grads()  # type: ignore[operator]  # of every PreTrainedModel
    by_plugin = plugin_checkpoints(model, plan)
    fsdp = _fsdp_config(plan, _layer_classes(source, model, plan), checkpointing=by_plugin)
    by_model = plan.checkpointing in ("full", "reentrant") and not by_plugin
    with tempfile.TemporaryDirectory() as scratch:  # the Trainer creates its output directory, but writes nothing
        arguments = transformers.TrainingArguments(
            output_dir=scratch,
            accelerator_config={"use_configured_state": True},
            use_cpu=True,
            bf16=plan.mixed,
            optim=optimizer.name,
            optim_args=optimizer.arguments,
            learning_rate=1e-6,
            per_device_train_batch_size=plan.micro_batch_size,
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
            gradient_checkpointing=by_model,
            gradient_checkpointing_kwargs={"use_reentrant": plan.checkpointing == "reentrant"} if by_model else None,
            ddp_find_unused_parameters=_searches_unused(model, plan),
            fsdp=bool(fsdp),
            fsdp_config=fsdp or None,
            parallelism_config=parallel,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=_NeverRead())
        trainer.state.max_steps = MAX_STEPS
        prepared, _ = trainer._prepare_for_training(MAX_STEPS, None, None)
    return TransformersTrainer(trainer, prepared, batch, plan.gradient_accumulation_steps)


def _searches_unused(model: nn.Module, plan: Plan) -> bool | None:
    """The Trainer's `ddp_find_unused_parameters`; None if the framework leaves it open. DDP fails with it and reentrant checkpoints."""
    facts = plan.facts
    open = facts.finds_unused_with_adapters if hasattr(model, "peft_config") else facts.finds_unused_parameters
    return None if open and plan.checkpointing != "reentrant" else False


class _NeverRead(torch.utils.data.Dataset[Any]):
    """A data set of length 1 that is never read; the Trainer needs one when it is made."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)
