"""Recording a model's training step into tapes.

The model, with a few representative layers, takes one step under `FakeTensorMode`: nothing is computed and no memory is used,
but every storage is born and dies as in a real run. The step is recorded at a small grid of (B, T) points; the order of events
must be the same at all of them, and every size must be a polynomial, checked at a point the fit has not seen.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from fsdp_advisor.errors import AdvisorError, NotRecordable
from fsdp_advisor.models.profile import (
    ROOT,
    Buffer,
    Category,
    Op,
    Parameter,
    Polynomial,
    Profile,
    Segment,
    Stack,
    Tape,
    Unit,
    Variant,
    evaluate,
)
from fsdp_advisor.tracing import kinds
from fsdp_advisor.tracing.engines import FlatUnit, cast_floating, watch_input_gradients
from fsdp_advisor.tracing.fit import fit
from fsdp_advisor.tracing.flash import in_scratch
from fsdp_advisor.tracing.operators import Work, work_of
from fsdp_advisor.tracing.source import LayerStack, Source
from fsdp_advisor.tracing.storages import StorageWatch

GRID_B = (2, 3)
GRID_T = (48, 80, 112)
CHECK_B, CHECK_T = 7, 5003  # primes: no size meets another one's by chance


class Recorder:
    """Makes a `Profile` of a source, and tapes of any variant on demand."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._models: dict[torch.dtype, nn.Module] = {}
        self._kept: dict[str, list[int]] = {}
        self._made: list[tuple[object, _Fitted]] = []
        self._warm = False
        full = self._build(torch.float32)
        stacks = source.stacks(full)
        self._kinds = {}
        for stack in stacks:
            signatures = [kinds.signature(layer) for layer in stack.layers]
            numbers = {s: i for i, s in enumerate(dict.fromkeys(signatures))}
            self._kinds[stack.path] = [numbers[s] for s in signatures]
            self._kept[stack.path] = kinds.representatives(self._kinds[stack.path])
        self.profile = self._inventory(full, stacks)
        source.keep_layers(full, self._kept)
        self._models[torch.float32] = full

    def tape(self, variant: Variant) -> Tape:
        """The tape of one variant, recorded now."""
        limit = self.source.max_seq_len or CHECK_T
        ts = GRID_T if limit >= max(GRID_T) else (max(1, limit // 4), max(2, limit // 2), max(3, limit))
        bs = (1,) if variant.single else GRID_B
        check = (1 if variant.single else CHECK_B, min(CHECK_T, limit))
        points = [(b, t) for b in bs for t in ts]
        try:
            with self._step(variant) as step:
                if not self._warm:  # what transformers and torch make once and keep is made here
                    step.run(*points[0])
                    self._warm = True
                checked = step.run(*check)
                corner = step.run(*points[-1])
                if (known := self._alike({check: checked, points[-1]: corner})) is not None:
                    return known
                takes = [step.run(*point) for point in points[:-1]] + [corner]
        except AdvisorError:
            raise
        except Exception as error:
            raise NotRecordable(
                f"{self.source.name} could not be run to record it: {type(error).__name__}: {str(error)[:200]}",
                hint="the recorder runs the model's own code under fake tensors; this code cannot run so",
            ) from error
        fitted = _fit(takes, checked, bs, ts, check)
        self._made.append((_storages(corner), fitted))
        return _tape(corner, fitted)

    def _alike(self, takes: dict[tuple[int, int], _Take]) -> Tape | None:
        """A tape with sizes known from another variant: many differ in nothing, or in the engine's marks alone."""
        last = list(takes.values())[-1]
        storages = _storages(last)
        for known, fitted in self._made:
            if known == storages and all(fitted.at(*point) == take.totals for point, take in takes.items()):
                return _tape(last, fitted)
        return None

    # What the model holds

    def _build(self, dtype: torch.dtype) -> nn.Module:
        return self.source.build(dtype)

    def _model(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self._models:
            model = self._build(dtype)
            self.source.keep_layers(model, self._kept)
            self._models[dtype] = model
        return copy.deepcopy(self._models[dtype])

    def _inventory(self, model: nn.Module, stacks: list[LayerStack]) -> Profile:
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        modules = {id(m): n for n, m in model.named_modules()}
        seen: set[int] = set()
        recorded = []
        prefixes = []
        for stack in stacks:
            units = []
            for index, layer in enumerate(stack.layers):
                prefix = modules[id(layer)] + "."
                prefixes.append(prefix)
                seen |= {id(p) for p in layer.parameters()}
                if index in self._kept[stack.path]:
                    units.append(_unit(layer, prefix, names))
            recorded.append(
                Stack(stack.path, tuple(units), kinds.runs(self._kinds[stack.path], self._kept[stack.path]))
            )
        starts = tuple(prefixes)
        root = tuple(
            Parameter(
                n,
                tuple(p.shape),
                p.requires_grad,
                tuple(m for m in names[id(p)] if m != n and not m.startswith(starts)),
            )
            for n, p in model.named_parameters()
            if id(p) not in seen
        )
        buffers = tuple(_buffer(n, b) for n, b in model.named_buffers() if not n.startswith(starts))
        order: list[int] = []
        firsts = [f"{modules[id(s.layers[0])]}." for s in stacks]
        count = 0
        for name, parameter in model.named_parameters():
            if len(order) < len(firsts) and name.startswith(firsts[len(order)]):
                order.append(count)
            count += id(parameter) not in seen
        order += [count] * (len(firsts) - len(order))
        return Profile(
            name=self.source.name,
            task=self.source.task,
            root=Unit(type(model).__name__, root, buffers),
            stacks=tuple(recorded),
            order=tuple(order),
            max_seq_len=self.source.max_seq_len,
            config=self.source.config(),
            versions=versions(),
        )

    # One step

    @contextlib.contextmanager
    def _step(self, variant: Variant) -> Iterator[_Step]:
        """The model on fake tensors, ready to take steps of this variant."""
        dtype = torch.bfloat16 if variant.precision == "bf16" else torch.float32
        model = self._model(dtype)
        self.source.configure(model, attention=variant.attention, checkpointing=variant.checkpointing == "full")
        with _steady(), FakeTensorMode(allow_non_fake_inputs=True):
            mixed = variant.precision.endswith("-mixed") and variant.engine != "plain"
            materialise(model, torch.bfloat16 if mixed else None)
            yield _Step(self.source, model, variant)


def record_module(
    builder: Callable[[], nn.Module],
    batch: Callable[[int, int], Mapping[str, torch.Tensor]],
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    wrap: Iterable[type[nn.Module] | str] = (),
    *,
    name: str | None = None,
) -> Recorder:
    """A recorder of any module; its `profile` is the inventory, its `tape(variant)` records a step.

    `builder()` makes the module, `batch(B, T)` its inputs, `loss(module, batch)` one forward to a scalar; `wrap` names what
    becomes a unit: classes, or dotted names of single modules. A module without sequences ignores T.
    """
    from fsdp_advisor.tracing.modules import ModuleSource

    return Recorder(ModuleSource(builder, batch, loss, tuple(wrap), name))


def versions() -> dict[str, str]:
    """The versions that decide what a recording holds."""
    import transformers

    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def _unit(layer: nn.Module, prefix: str, names: dict[int, list[str]]) -> Unit:
    parameters = tuple(
        Parameter(
            n, tuple(p.shape), p.requires_grad, tuple(m[len(prefix) :] for m in names[id(p)] if m != prefix + n and m.startswith(prefix))
        )
        for n, p in layer.named_parameters()
    )  # fmt: skip
    return Unit(type(layer).__name__, parameters, tuple(_buffer(n, b) for n, b in layer.named_buffers()))


def _buffer(name: str, buffer: torch.Tensor) -> Buffer:
    return Buffer(name, tuple(buffer.shape), str(buffer.dtype).removeprefix("torch."), buffer.dtype.itemsize)


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """No cyclic garbage collection in the middle of a step: it would end storages at a moment of its own choosing."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # a refusal is raised as well
    gc.freeze()  # what is there already need not be looked at by the collections between steps
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def materialise(model: nn.Module, parameter_dtype: torch.dtype | None) -> None:
    """Replace meta tensors by fake ones on the CPU, ties kept, floating-point parameters in `parameter_dtype` if given."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in memo:
                dtype = parameter_dtype if parameter_dtype and parameter.is_floating_point() else parameter.dtype
                data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
                memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = memo[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, name, torch.empty(value.shape, dtype=value.dtype, device="cpu"))


@dataclass
class _RawSegment:
    phase: str
    stack: int
    layer: int
    events: list[tuple[int, int, int]] = field(default_factory=list)  # ALLOC: (storage, 0); FREE: (storage, 0)
    work: Work = field(default_factory=Work)


@dataclass
class _Take:
    """One recorded step at one point."""

    segments: list[_RawSegment]
    sizes: list[int]  # by storage, in order of birth
    categories: list[int]  # by storage

    @property
    def totals(self) -> list[int]:
        """Everything that a polynomial must meet."""
        work = [s.work for s in self.segments]
        return self.sizes + [n for w in work for n in (w.matmul_flops, w.attention_flops, w.traffic_bytes)]


class _Step:
    """Runs the model's step under hooks and writes down what happens."""

    def __init__(self, source: Source, model: nn.Module, variant: Variant) -> None:
        self._source, self._model, self._variant = source, model, variant
        self._units: list[tuple[nn.Module, int, int]] = [(model, ROOT, 0)]
        for s, stack in enumerate(source.stacks(model)):
            self._units += [(layer, s, i) for i, layer in enumerate(stack.layers)]
        self._last = {s: i for _, s, i in self._units}
        self._parameters = self._assign()
        self._cast = torch.bfloat16 if variant.precision.endswith("-mixed") else None
        for module, stack_index, layer in self._units:
            self._hook_unit(module, stack_index, layer)
        if (head := source.head(model)) is not None:
            head.register_forward_pre_hook(self._head_begins, with_kwargs=True)
        self._reset()

    def _assign(self) -> dict[int, tuple[int, int, int]]:
        """Each leaf parameter's (stack, layer, index in its unit), and hooks that tell when its gradient is there."""
        flat = self._variant.engine == "fsdp1"
        self._flat: dict[tuple[int, int], FlatUnit] = {}
        taken: set[int] = set()
        assigned = {}
        for module, stack, layer in sorted(self._units, key=lambda u: u[1] == ROOT):
            parameters = [p for p in module.parameters() if id(p) not in taken]
            taken |= {id(p) for p in parameters}
            if not parameters:
                continue
            if flat:
                mine = {id(p) for p in parameters}
                owners = [(m, n) for m in module.modules() for n, p in m._parameters.items() if id(p) in mine]
                self._flat[stack, layer] = unit = FlatUnit(owners, parameters)
                parameters = [unit.flat]
            for index, parameter in enumerate(parameters):
                assigned[id(parameter)] = (stack, layer, index)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient_ready)
            self._leaves = [*getattr(self, "_leaves", ()), *parameters]
        return assigned

    def _reset(self) -> None:
        self._phase, self._recording = "forward", False
        self._segments = [_RawSegment("forward", ROOT, 0)]
        self._sizes: list[int] = []
        self._category: list[int | None] = []
        self._born_in: list[str] = []
        self._died_in: list[str | None] = []
        self._alive: dict[int, int] = {}
        self._in_loss = False
        self._seen: set[tuple[str, int, int]] = set()

    def run(self, micro_batch_size: int, seq_len: int) -> _Take:
        """One step: forward, backward, and the gradients dropped."""
        self._reset()
        watch = StorageWatch(self._resized)
        watch.on_operator = self._operator
        for tensor in tree_iter([self._leaves, list(self._model.buffers())]):
            watch.ignore(tensor)
        autocast = self._variant.engine == "plain" and self._variant.precision.endswith("-mixed")
        gc.collect()
        with watch:
            batch = self._source.batch(micro_batch_size, seq_len)
            if self._variant.precision == "bf16":  # a trainer hands pixels and sound over in the model's dtype
                batch = cast_floating(batch, torch.bfloat16)
            self._reset()
            self._recording = True
            self._inputs(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = self._source.loss(self._model, batch)
            self._phase = "backward"
            self._begin("backward", ROOT, 0)
            loss.backward()
            take = self._take()
            self._recording = False
            for leaf in self._leaves:
                leaf.grad = None
            del loss, batch
        return take

    # Storages

    def _inputs(self, batch: dict[str, torch.Tensor]) -> None:
        for tensor in batch.values():
            key = tensor.untyped_storage()._cdata
            if key not in self._alive:
                self._resized(key, 0, tensor.untyped_storage().nbytes(), "input", ())
                self._category[-1] = Category.INPUT

    def _resized(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        if not self._recording:
            return
        events = self._segments[-1].events
        if before and key in self._alive:
            storage = self._alive.pop(key)
            self._died_in[storage] = self._phase
            events.append((Op.FREE, storage, 0))
        if after:
            storage = len(self._sizes)
            self._alive[key] = storage
            self._sizes.append(after)
            self._born_in.append(self._phase)
            self._died_in.append(None)
            self._category.append(self._category_at_birth(operator, args))
            events.append((Op.ALLOC, storage, 0))

    def _category_at_birth(self, operator: str, args: tuple[Any, ...]) -> int | None:
        if in_scratch():
            return Category.SCRATCH
        if (
            operator == "aten::_to_copy"
            and args
            and isinstance(args[0], torch.Tensor)
            and id(args[0]) in self._parameters
        ):
            return Category.CAST_PARAMETER
        if self._phase == "backward" and _weight_gradient_shape(operator, args) in self._tied_shapes:
            return Category.UNSHARDED_GRADIENT
        return Category.LOSS if self._in_loss else None

    @property
    def _tied_shapes(self) -> set[tuple[int, ...]]:
        """Shapes of shared parameters: autograd sums their gradients, which are gradients before they are `param.grad`."""
        if not hasattr(self, "_tied"):
            uses: dict[int, int] = {}
            for _, p in self._model.named_parameters(remove_duplicate=False):
                uses[id(p)] = uses.get(id(p), 0) + 1
            self._tied = {tuple(p.shape) for p in self._model.parameters() if uses[id(p)] > 1}
        return self._tied

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._recording:
            self._segments[-1].work += work_of(func, args, kwargs, result)

    def _take(self) -> _Take:
        for leaf in self._leaves:
            if leaf.grad is not None and (storage := self._alive.get(leaf.grad.untyped_storage()._cdata)) is not None:
                stack, _, index = self._parameters[id(leaf)]
                self._category[storage] = Category.GRADIENT + 2 * index + (stack == ROOT)
        categories = []
        for born, died, category in zip(self._born_in, self._died_in, self._category, strict=True):
            if category is None:
                category = Category.TEMPORARY if born == died else Category.ACTIVATION
            categories.append(int(category))
        return _Take(self._segments, self._sizes, categories)

    # Boundaries

    def _begin(self, phase: str, stack: int, layer: int) -> None:
        self._segments.append(_RawSegment(phase, stack, layer))

    def _mark(self, op: Op, a: int, b: int = 0) -> None:
        self._segments[-1].events.append((op, a, b))

    def _hook_unit(self, module: nn.Module, stack: int, layer: int) -> None:
        root = stack == ROOT
        engine = self._variant.engine

        def post_backward() -> None:
            if ("post", stack, layer) not in self._seen:
                self._seen.add(("post", stack, layer))
                self._mark(Op.POST_BACKWARD, int(root))

        def pre_backward(grad: torch.Tensor) -> None:
            if ("pre", stack, layer) in self._seen:
                return
            self._seen.add(("pre", stack, layer))
            if not root:
                self._begin("backward", stack, layer)
            self._mark(Op.PRE_BACKWARD, int(root))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            again = self._phase == "backward"
            if not again:
                if not root:
                    self._begin("forward", stack, layer)
                self._mark(Op.PRE_FORWARD, int(root))
            if self._cast is not None and (engine == "fsdp2" or (engine == "fsdp1" and root)):
                args, kwargs = cast_floating((args, kwargs), self._cast)
            if not again:
                if (unit := self._flat.get((stack, layer))) is not None:
                    unit.use_views(self._view_gradient)
                if engine == "fsdp2":
                    args, kwargs = watch_input_gradients(args, kwargs, post_backward)
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase == "backward":
                return
            self._mark(Op.POST_FORWARD, int(root))
            if not root and layer == self._last[stack]:
                self._begin("forward", ROOT, stack + 1)
            for leaf in tree_iter(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(pre_backward)

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        stack, _, index = self._parameters[id(parameter)]
        self._mark(Op.GRAD_READY, index, int(stack == ROOT))
        if self._variant.engine == "fsdp1":
            self._mark(Op.POST_BACKWARD, int(stack == ROOT))

    def _view_gradient(self, grad: torch.Tensor) -> None:
        if (storage := self._alive.get(grad.untyped_storage()._cdata)) is not None:
            self._category[storage] = Category.UNSHARDED_GRADIENT

    def _head_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._phase != "forward":
            return
        self._in_loss = True
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._loss_ends)

    def _loss_ends(self, grad: torch.Tensor) -> None:
        self._in_loss = False


def _weight_gradient_shape(operator: str, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The shape of what an operator that makes gradients of shared weights has made."""
    match operator:
        case "aten::mm":
            return (args[0].shape[0], args[1].shape[1])
        case "aten::embedding_dense_backward":
            return (args[2], args[0].shape[-1])
        case "aten::_to_copy":
            return tuple(args[0].shape)
    return None


def _storages(take: _Take) -> object:
    """A take's storages in order of birth and death, without sizes and without marks."""
    return take.categories, [
        (s.phase, s.stack, s.layer, [e for e in s.events if e[0] <= Op.FREE], s.work.operators) for s in take.segments
    ]


@dataclass(frozen=True)
class _Fitted:
    """Polynomials of all storages in order of birth, and of each segment's work."""

    storages: tuple[Polynomial, ...]
    work: tuple[tuple[Polynomial, Polynomial, Polynomial], ...]

    def at(self, b: int, t: int) -> list[int]:
        return [evaluate(p, b, t) for p in (*self.storages, *(p for w in self.work for p in w))]


def _fit(takes: list[_Take], check: _Take, bs: tuple[int, ...], ts: tuple[int, ...], at: tuple[int, int]) -> _Fitted:
    """Polynomials through recordings at the grid points; the recording at `at` must be met exactly."""
    for take in [*takes, check]:
        if _storages(take) != _storages(takes[0]):
            raise NotRecordable(
                "the order of allocations depends on batch or length", hint="this model cannot be put on a tape"
            )
    t0, t1, t2 = ts
    polynomials = [fit(bs, (t0, t1, t2), values) for values in zip(*(t.totals for t in takes), strict=True)]
    births = len(takes[0].sizes)
    rest = polynomials[births:]
    fitted = _Fitted(tuple(polynomials[:births]), tuple(zip(rest[0::3], rest[1::3], rest[2::3], strict=True)))
    for expected, found in zip(check.totals, fitted.at(*at), strict=True):
        if expected != found:
            raise NotRecordable(
                f"{expected} at B = {at[0]}, T = {at[1]} is not met by the polynomial, which gives {found}",
                hint="this model's tensors depend on batch or length in a way the recorder does not know",
            )
    return fitted


def _tape(take: _Take, fitted: _Fitted) -> Tape:
    """The events of a take with fitted sizes."""
    table = {p: i for i, p in enumerate(dict.fromkeys(fitted.storages))}
    home: dict[int, tuple[int, int]] = {}
    segments = []
    for number, (raw, work) in enumerate(zip(take.segments, fitted.work, strict=True)):
        events = []
        births = 0
        for op, a, b in raw.events:
            if op == Op.ALLOC:
                home[a] = (number, births)
                births += 1
                events.append((int(op), table[fitted.storages[a]], take.categories[a]))
            elif op == Op.FREE:
                events.append((int(op), *home[a]))
            else:
                events.append((int(op), a, b))
        segments.append(Segment(raw.phase, raw.stack, raw.layer, tuple(events), *work, raw.work.operators))
    return Tape(tuple(table), tuple(segments))
