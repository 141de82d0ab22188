"""Derives from a stack the phase of the step, the category of the allocated memory, and the module.

Source of the names: torch 2.4 to 2.13, torch/distributed/fsdp/_fully_shard (before 2.6 torch/distributed/_composable/fsdp),
torch/distributed/fsdp/_flat_param.py and _runtime_utils.py, torch/optim, torch/utils/checkpoint.py, torch/nn/modules/module.py;
deepspeed 0.14 to 0.19, deepspeed/runtime/zero. Autograd runs backward in a thread without Python frames
(torch/csrc/autograd/engine.cpp, Engine::thread_main), so an empty Python stack means backward if others have frames.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_advisor.diagnosis.facts import Category, MomentPhase
from fsdp_advisor.diagnosis.snapshot import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSite:
    """The kind of memory that one stack allocates, and where.

    `kept` is the category of an allocation that outlives its phase. `code` are the frames outside of PyTorch, innermost first;
    `module` is the nearest module of PyTorch's that computes. `recomputes`: activation checkpointing repeats a forward here.
    `casts`: autocast casts an input or a weight.
    """

    phase: MomentPhase
    category: Category
    kept: Category
    code: tuple[Frame, ...] = ()
    module: str = ""
    recomputes: bool = False
    casts: bool = False

    @property
    def where(self) -> str:
        """The line of code in words."""
        if not self.code:
            return self.module or "autograd" if self.phase == "backward" else self.module
        place = f"{_file(self.code[0])}:{self.code[0].line} {self.code[0].name}"
        return f"{place} ({self.module})" if self.module else place


@dataclass(frozen=True, slots=True)
class _Rule:
    """A site for stacks with a frame whose file and function match. `phase` None: the other frames decide the phase."""

    file: re.Pattern[str]
    function: re.Pattern[str]
    phase: MomentPhase | None
    category: Category
    kept: Category


def _rule(
    file: str, function: str, phase: MomentPhase | None, category: Category, kept: Category | None = None
) -> _Rule:
    return _Rule(re.compile(file), re.compile(function), phase, category, kept or category)


_OPTIMIZER_FILES = (
    r"/torch/optim/|deepspeed/ops/|bitsandbytes/optim/|apex/optimizers/|torchao/optim/|transformers/optimization\.py"
)
_FSDP2 = r"(_fully_shard|_composable/fsdp)/"
_RULES = (
    _rule(_OPTIMIZER_FILES, r"^_?init_(group|state)|^_new_buffer|get_state_buffer|initialize_state", "optimizer", "optimizer"),
    _rule(_OPTIMIZER_FILES, r"^(?!__init__)", "optimizer", "temporaries", "optimizer"),
    _rule(r"deepspeed/runtime/zero/", r"initialize_optimizer_states|_create_fp32|_setup_for_real_optimizer|create_fp32",
        "loading", "optimizer"),
    _rule(r"deepspeed/runtime/zero/(partition|parameter_offload|partitioned_param)", r"gather|fetch", None, "unsharded_parameters"),
    _rule(r"deepspeed/runtime/zero/", r"reduce|ipg|bucket", "backward", "communication", "gradients"),
    _rule(r"deepspeed/runtime/zero/", r"^_?(optimizer_)?step$|unscale|overflow", "optimizer", "temporaries", "optimizer"),
    _rule(r"nn/utils/clip_grad\.py|clip_grad", r"", "optimizer", "temporaries"),
    _rule(_FSDP2, r"^(_init_sharded_param|_move_states_to_device|reset_sharded_param)$", "loading", "parameters"),
    _rule(_FSDP2, r"^(init_all_gather_outputs|alloc_all_gather_outputs|init_unsharded_param|alloc_storage)$", None, "unsharded_parameters"),
    _rule(_FSDP2, r"^foreach_reduce", "backward", "communication", "gradients"),
    _rule(_FSDP2, r"accumulate|^to_accumulated", "backward", "unsharded_gradients"),
    _rule(_FSDP2, r"all_gather|^unshard$", None, "communication"),
    _rule(r"distributed/fsdp/", r"_alloc_padded_unsharded|_use_unsharded|_get_padded_unsharded", None, "unsharded_parameters"),
    _rule(r"distributed/fsdp/", r"^(_post_backward_hook|_reduce_grad\w*|_get_reduce_scatter_tensors)$", "backward",
        "communication", "gradients"),
    _rule(r"distributed/fsdp/", r"_use_low_precision_shard|^_all_gather", None, "communication"),
    _rule(r"distributed/fsdp/", r"^(_init_flat_param\w*|shard|flatten_tensors\w*|_get_shard|_init_param_handle\w*|_move_\w+)$",
        "loading", "parameters"),
    _rule(r"nn/parallel/distributed\.py", r"_ddp_init_helper|^__init__$", "loading", "communication"),
    _rule(r"bitsandbytes/|gptqmodel/", r"dequantize_(4bit|weight)", None, "dequantization"),
    _rule(r"", r"^c10d::Reducer", None, "communication"),
    _rule(r"", r"CUDABlasLtWorkspace|getNewWorkspace|getCurrentCUDABlasHandle|getCublasWorkspace", None, "libraries"),
    _rule(r"loss_utils\.py|/loss(es)?/|nn/modules/loss\.py|cut_cross_entropy", r"", "loss", "loss"),
    _rule(r"", r"(?i)cross_?entropy|nll_loss|log_softmax|logprobs|CausalLMLoss", "loss", "loss"),
)  # fmt: skip
"""The rules in order of priority: if several match a stack, the first decides."""
_LOADING = re.compile(
    r"^(_apply|to_empty|from_pretrained|load_state_dict|_load_state_dict\w*|load_file|_load_pretrained_model|dispatch_model|"
    r"reset_parameters|init_weights|_init_weights|materialize\w*|set_module_tensor_to_device)$"
)
_LOADING_FILES = re.compile(
    r"safetensors|torch/serialization\.py|torch/nn/init\.py|core_model_loading\.py|distributed/checkpoint/"
)
_BACKWARD = re.compile(
    r"^(_engine_run_backward|_make_grads|pre_backward|post_backward|_root_post_backward\w*|_backward_prefetch|_pre_backward\w*|_post_backward\w*|backward)$"
)
_CHECKPOINT = re.compile(r"^(recompute_fn|unpack_hook|backward|inner_unpack\w*)$")
_MODULE_FRAMES = re.compile(r"/torch/nn/modules/(?!module\.py)(\w+)\.py$")
_NOT_CODE = re.compile(
    r"/torch/|/torch/_|<frozen|<string>|/deepspeed/|/accelerate/|transformers/(utils|modeling_layers|activations|integrations)|/functools\.py|/contextlib\.py|/peft/|/fsdp_advisor/rehearsal/"
)
_ENGINE = "torch::autograd::Engine"
_AUTOCAST = "at::autocast::cached_cast"
"""The function that casts under autocast and caches casts of fp32 parameters until autocast ends. Source:
aten/src/ATen/autocast_mode.cpp.
"""


def classify(stacks: Sequence[tuple[Frame, ...]]) -> list[AllocationSite]:
    """The allocation site of each stack: its category, and its part of the step (forward, backward, loss, optimizer, loading and others).

    An empty stack belongs to backward if other stacks have Python frames.
    """
    recorded = any(_is_python(frame) for frames in stacks for frame in frames)
    return [_site(frames, recorded) for frames in stacks]


def site_of(frames: Sequence[Frame]) -> AllocationSite:
    """The allocation site of one stack, such as a traceback."""
    return _site(frames, recorded=True)


def _site(frames: Sequence[Frame], recorded: bool) -> AllocationSite:
    python = [frame for frame in frames if _is_python(frame)]
    base = _base(frames, python, recorded)
    for rule in _RULES:
        frame = next((f for f in frames if rule.file.search(f.filename) and rule.function.search(f.name)), None)
        if frame is None:
            continue
        if rule.category == "loss":
            phase: MomentPhase = "backward" if base.phase == "backward" else "loss"
            return replace(base, phase=phase, category="loss", kept="loss")
        code = (frame,) if _is_python(frame) else base.code
        phase = base.phase if rule.phase is None else rule.phase
        return replace(base, phase=phase, category=rule.category, kept=rule.kept, code=code)
    return base


def _base(frames: Sequence[Frame], python: Sequence[Frame], recorded: bool) -> AllocationSite:
    """The site of a stack that matches no rule: a module's forward, backward, loading, or the script's own tensors."""
    code = tuple(frame for frame in python if not _NOT_CODE.search(frame.filename))
    in_module = next((m[1] for frame in python if (m := _MODULE_FRAMES.search(frame.filename))), "")
    module = {"linear": "Linear", "sparse": "Embedding", "normalization": "Norm", "conv": "Conv"}.get(in_module, "")
    casts = any(frame.name.startswith(_AUTOCAST) for frame in frames)
    site = AllocationSite(phase="unknown", category="other", kept="other", code=code, module=module, casts=casts)
    if not python:
        if recorded or any(_ENGINE in frame.name for frame in frames):
            return replace(site, phase="backward", category="temporaries", kept="gradients")
        return replace(site, category="unattributed", kept="unattributed")
    if any("torch/utils/checkpoint.py" in frame.filename and _CHECKPOINT.match(frame.name) for frame in python):
        return replace(site, phase="backward", category="activations", kept="activations", recomputes=True)
    if any(_BACKWARD.match(frame.name) for frame in python) or any(_ENGINE in frame.name for frame in frames):
        return replace(site, phase="backward", category="temporaries", kept="gradients")
    if any(_LOADING.match(f.name) or _LOADING_FILES.search(f.filename) for f in python):
        return replace(site, phase="loading", category="parameters", kept="parameters")
    if any(frame.name == "_call_impl" or frame.name == "forward" for frame in python):
        return _forward(site, python)
    if any(frame.name == "__init__" and "/torch/nn/" in frame.filename for frame in python):
        return replace(site, phase="loading", category="parameters", kept="parameters")
    return site


def _forward(site: AllocationSite, python: Sequence[Frame]) -> AllocationSite:
    """The site of an allocation in a module's forward. If a model's root calls a linear layer directly, the result is taken for logits."""
    calls = [at for at, frame in enumerate(python) if frame.name == "_call_impl"]
    modules = python[: calls[-1]] if calls else python  # a script may have functions of that name, too
    depth = sum(frame.name == "forward" and not _NOT_CODE.search(frame.filename) for frame in modules)
    if site.module == "Linear" and depth == 1:
        return replace(site, phase="loss", category="loss", kept="loss", module="logits")
    return replace(site, phase="forward", category="activations", kept="activations")


def _is_python(frame: Frame) -> bool:
    return frame.filename.endswith(".py") or frame.filename.startswith("<")


def _file(frame: Frame) -> str:
    return frame.filename.rsplit("/", 1)[-1]
