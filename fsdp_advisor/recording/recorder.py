"""Record a model's training step on tapes.

The model, reduced to a few representative layers, runs one step under `FakeTensorMode`: it computes nothing and uses no memory,
but allocates and frees every storage as in a real run. The step is recorded at three points (B, T); if these do not determine the
sizes, at a grid and at one more point, which checks the fit. The order of events must be the same at all points, and every size must be a
polynomial in B, T and the number of chunks of a sequence. A model for which this does not hold raises NotPolynomial; it is
recorded only at the requested (B, T).
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, get_args

import torch
from torch import nn

from fsdp_advisor.errors import AdvisorError, NotPolynomial, NotRecordable
from fsdp_advisor.job.frameworks import TORCHTITAN_CHUNKS
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import ScoringPhase, Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.compiled_flash import COMPILED, flash_attention_in_graphs
from fsdp_advisor.recording.convolution import with_copies_of_inputs
from fsdp_advisor.recording.cuda import softmax_scratch
from fsdp_advisor.recording.engines import checkpoint_layers
from fsdp_advisor.recording.fake import fake_tensors, materialise, steady
from fsdp_advisor.recording.fp8 import convert_linears, on_fake_tensors
from fsdp_advisor.recording.host import RecordedOnHost, save_inputs_on_host
from fsdp_advisor.recording.images import with_rows_of_images
from fsdp_advisor.recording.inventory import inventory_of, kinds_of_layers
from fsdp_advisor.recording.kinds import most_passes, representatives
from fsdp_advisor.recording.liger_kernels import check_kernels, with_liger_kernels
from fsdp_advisor.recording.linear_attention import CHUNK
from fsdp_advisor.recording.lora_kernels import use_lora_kernels
from fsdp_advisor.recording.on_gpu import as_on_gpu
from fsdp_advisor.recording.package_kernels import with_kernels
from fsdp_advisor.recording.quantized import is_packed
from fsdp_advisor.recording.raw_steps import (
    Fitted,
    RawStep,
    check_order,
    constant,
    fit_confirmed,
    fit_raw_steps,
    storages_of,
    tape_of,
)
from fsdp_advisor.recording.remembered import Operators
from fsdp_advisor.recording.replaced_buffers import replaced_buffers
from fsdp_advisor.recording.selective_scan import CHUNK as SCAN_CHUNK
from fsdp_advisor.recording.short_sequences import LOOPS, spans, step_of_short_sequences, tokens_of_loop
from fsdp_advisor.recording.source import Source, is_of_torchtitan
from fsdp_advisor.recording.state_space import USUAL_CHUNKS
from fsdp_advisor.recording.step import Step
from fsdp_advisor.recording.tiled_mlp import tile_mlps
from fsdp_advisor.recording.trainers import source_of_step
from fsdp_advisor.recording.values import needs_values
from fsdp_advisor.recording.wrapping import units_to_record, with_whole_gradients
from fsdp_advisor.recording.zero3_linear import saving_inputs

GRID_B = (2, 3)
GRID_T = (48, 80, 112)
BRIEF_T = 8
CHUNK_CHECK_B = 5
CHECK_B, CHECK_T = 7, 5003  # primes, so that different sizes are not equal by chance


class Recorder:
    """Makes the `Profile` of a source, and records the tape of any key on demand."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._fits: list[tuple[object, Fitted]] = []
        self._operators = Operators()
        self._chunks = tuple(dict.fromkeys([*spans(source.config(), "chunk"), CHUNK, *USUAL_CHUNKS, SCAN_CHUNK]))
        self._has_run = False
        model = source.build(source.inventory_dtype)
        stacks = source.stacks(model)
        self._replaced = replaced_buffers(model, [layer for stack in stacks for layer in stack.layers])
        kinds = kinds_of_layers(model, stacks)
        self._recorded_layers = {path: representatives(of_stack) for path, of_stack in kinds.items()}
        self.recorded_kinds = [[kinds[path][layer] for layer in kept] for path, kept in self._recorded_layers.items()]
        """The kinds of the recorded layers of each stack, as numbers."""
        self.profile = inventory_of(model, source, stacks, kinds, self._recorded_layers, self._replaced)
        self._passes = most_passes(model)
        source.keep_layers(model, self._recorded_layers)
        self._models = {source.inventory_dtype: model}

    def tape(self, key: TapeKey) -> Tape:
        """Record the tape of one key. On a GPU tape, gradients are summed in place, as autograd does without a dispatch mode.

        All layers may use one tensor, as a decoder's layers use the encoder's output. They add to its gradient one after the other, and
        the last layers do so in a different way. One recorded layer then cannot represent several. In that case the tape is recorded with
        a separate sum in each layer.

        Raises NotRecordable for a model that runs layers several times in one forward: on a tape each runs once.
        """
        if self._passes > 1:
            raise NotRecordable(
                f"{self.source.name} runs some of its layers {self._passes} times in one forward, which is not modelled",
                hint="fsdp-advisor rehearse counts the memory of its training script",
            )
        if key.device == "gpu":
            tape = self._tape(key, sums_in_place=True)
            if repeats_are_alike(self.profile, tape, self.recorded_kinds):
                return tape
        return self._tape(key, sums_in_place=False)

    def _tape(self, key: TapeKey, *, sums_in_place: bool) -> Tape:
        source = source_of_step(self.source, key)
        grid = _grid(source, key)
        try:
            with self._prepared_step(source, key, sums_in_place=sums_in_place) as step:
                tokens = tokens_of_loop(source, key)
                self._create_tensors(step, key, grid, tokens)
                if key.at is not None:
                    raw_step = (step_of_short_sequences(step, key.at, tokens) if tokens else None) or step.run(*key.at)
                    tape = tape_of(raw_step, constant(raw_step))
                else:
                    tape = self._fit(step, key, grid)
        except AdvisorError:
            raise
        except Exception as error:
            if needs_values(error) and not self.source.needs_values:
                self.source.needs_values = True
                return self._tape(key, sums_in_place=sums_in_place)
            raise NotRecordable(
                f"{self.source.name} could not be run to record it: {type(error).__name__}: {str(error)[:200]}",
                hint="the recorder runs the model's own code under fake tensors, which this code does not support",
            ) from error
        return with_whole_gradients(tape, self.profile, key)

    def _create_tensors(self, step: Step, key: TapeKey, grid: _Grid, tokens_of_loop: int) -> None:
        """Run an extra first step, which creates the tensors that torch and transformers create only once (adaptive ropes: per model)."""
        first = key.at or grid.points[0]
        if tokens_of_loop:
            first = (first[0], tokens_of_loop * LOOPS[0])
        if self.source.alike_up_to or self._replaced or key.compiles:
            step.run(*first)
        elif not self._has_run:
            _run_briefly(step, first, grid.brief_t)
        self._has_run = True

    def _fit(self, step: Step, key: TapeKey, grid: _Grid) -> Tape:
        """The tape of a step for any (B, T): of three steps if they confirm the usual sizes, else of all of the grid."""
        points, check = grid.points, grid.check
        corner = step.run(*points[-1])
        first = step.run(*points[0])
        check_order([first, corner])
        checked = step.run(*check)
        check_order([checked, corner])
        if (known := self._matching_tape({check: checked, points[-1]: corner})) is not None:
            return known
        fitted = fit_confirmed({points[0]: first, points[-1]: corner, check: checked})
        if fitted is None:
            raw_steps = {
                **{point: step.run(*point) for point in points[1:-1]},
                points[0]: first,
                points[-1]: corner,
            }
            fitted = fit_confirmed({**raw_steps, check: checked}, self._chunks) or fit_raw_steps(
                [raw_steps[point] for point in points], checked, grid.bs, grid.ts, check
            )
            if fitted.chunks:
                self._confirm(step, key, fitted, corner, check[1])
        self._fits.append((storages_of(corner), fitted))
        return tape_of(corner, fitted)

    def _confirm(self, step: Step, key: TapeKey, fitted: Fitted, known: RawStep, longest: int) -> None:
        """Check quantities that depend on chunks against two more recordings: one whose last chunk is full, because code may then skip
        the padding, and one whose last chunk is not. Raises NotPolynomial if one differs.
        """
        b = 1 if key.batch_is_one else CHUNK_CHECK_B
        whole = longest - longest % max(fitted.chunks)
        for t in (longest // 3 | 1, whole):
            raw_step = step.run(b, t)
            check_order([raw_step, known])
            if fitted.at(b, t) != raw_step.totals:
                raise NotPolynomial(f"sizes at B = {b}, T = {t} are not those fitted to others")

    def _matching_tape(self, raw_steps: dict[tuple[int, int], RawStep]) -> Tape | None:
        """A tape with the sizes fitted for an earlier key, if all `raw_steps` agree with them; else None.

        Many keys have equal steps, or steps that differ only in the marks of modules.
        """
        last = list(raw_steps.values())[-1]
        storages = storages_of(last)
        for known, fitted in self._fits:
            if known == storages and all(fitted.at(*point) == raw_step.totals for point, raw_step in raw_steps.items()):
                return tape_of(last, fitted)
        return None

    # One step

    def _model(self, dtype: torch.dtype) -> nn.Module:
        """A copy of the model with the recorded layers only. Packed parameters cannot be copied, so the copies share them."""
        if dtype not in self._models:
            model = self.source.build(dtype)
            self.source.keep_layers(model, self._recorded_layers)
            self._models[dtype] = model
        model = self._models[dtype]
        return copy.deepcopy(model, {id(p): p for p in model.parameters() if is_packed(p)})

    @contextlib.contextmanager
    def _prepared_step(self, source: Source, key: TapeKey, *, sums_in_place: bool) -> Iterator[Step]:
        """Context with the model on fake tensors, ready to run steps of this key."""
        model = self._configured(source, key)
        units = units_to_record(self.source, self.profile, key)
        with contextlib.ExitStack() as entered:
            for context in _contexts(source, key, model):
                entered.enter_context(context)
            if key.tiled_mlp:
                tile_mlps(source.stacks(model), key.tiled_mlp, source.name)
            if key.lora_kernels:
                use_lora_kernels(model, key.lora_kernels.split(","), source.name)
            entered.enter_context(
                fake_tensors(
                    values=source.needs_values, expert_imbalance=source.expert_imbalance, operators=self._operators
                )
            )
            casts = (key.mixed and key.engine != "plain") or (key.engine == "plain+cast" and key.weights_in_half)
            half = torch.bfloat16 if casts else None
            materialise(model, half, half if key.uses_flat_parameter else None)
            if key.compiles:
                _compile(source, key, model)
            yield Step(source, model, key, units, self._replaced, self._operators, sums_in_place=sums_in_place)

    def _configured(self, source: Source, key: TapeKey) -> nn.Module:
        """The model with the key's attention, checkpointing, offload, dtypes and kernels."""
        model = self._model(torch.bfloat16 if key.weights_in_half else torch.float32)
        by_plugin = key.wrap not in ("peft", "lora") and key.activation_offload == "none"
        by_accelerate = key.checkpointing == "full" and key.autocasts_fsdp1 and by_plugin
        source.configure(
            model,
            attention=_attention(key),
            checkpointing="none" if by_accelerate else key.checkpointing,
            window_filled=key.window_filled if key.device == "gpu" and key.attention == "sdpa" else None,
        )
        if key.input_gradients:
            model.enable_input_require_grads()  # type: ignore[operator]  # of every PreTrainedModel
        if key.activation_offload == "inputs":
            save_inputs_on_host(model, RecordedOnHost)
        if by_accelerate:
            checkpoint_layers(layer for stack in self.source.stacks(model) for layer in stack.layers)
        if key.fp8 != "none":
            convert_linears(model, source, key.fp8)
        if key.liger_kernels:
            check_kernels(model, source.name)
        return model


class _Grid(NamedTuple):
    """The micro-batches and lengths at which a step is recorded to fit its sizes, and one more with which they are checked. `brief_t`: the
    length of a brief step.
    """

    bs: tuple[int, ...]
    ts: tuple[int, ...]
    check: tuple[int, int]
    brief_t: int

    @property
    def points(self) -> list[tuple[int, int]]:
        return [(b, t) for b in self.bs for t in self.ts]


def _grid(source: Source, key: TapeKey) -> _Grid:
    """The points of a fit. They are lengths that the model takes and that run the same code, and B is 1 if the key's is. The point that
    checks the fit is as long as possible, and a multiple of the chunks of torchtitan's loss.
    """
    least = source.min_seq_len - 1
    limit = min(source.max_seq_len or CHECK_T + least, source.alike_up_to or CHECK_T + least)
    ts = tuple(least + t for t in GRID_T)
    if limit < max(ts):
        more = limit - least
        ts = (least + max(1, more // 4), least + max(2, more // 2), least + max(3, more))
    longest = min(CHECK_T + least, limit)
    if key.loss == "torchtitan":  # so that all chunks of a sequence are equal
        longest -= longest % TORCHTITAN_CHUNKS
    if key.batch_is_one:
        return _Grid((1,), ts, (1, longest), least + BRIEF_T)
    return _Grid(GRID_B, ts, (CHECK_B, longest), least + BRIEF_T)


def _contexts(source: Source, key: TapeKey, model: nn.Module) -> Iterator[AbstractContextManager[object]]:
    """The contexts of a step, except for fake tensors. Enter each before asking for the next."""
    yield _without_warnings()
    yield steady()
    yield softmax_scratch()
    if key.saves_linear_inputs:
        yield saving_inputs()
    if key.compiles:  # Inductor takes a second to import
        from fsdp_advisor.recording.compiled import compiler
        from fsdp_advisor.recording.graph_functions import functions_of_graphs

        yield compiler(
            key.memory_budget,
            by_accelerate=key.compiles_regions and key.engine == "fsdp2",
            # torchtitan 0.3.0, components/quantization/float8.py
            emulates_casts=key.fp8 == "rowwise" and is_of_torchtitan(source),
        )
    yield on_fake_tensors(key.fp8)
    if key.device == "gpu":
        # compiled code cannot read whether sequences are packed, so transformers assumes that they are
        packed = key.batch in ("flattened", "flattened-trl") or key.compiles_whole
        yield as_on_gpu(by_cudnn=key.kernel == "cudnn", packed=packed)
        yield with_kernels(model, key.without_packages.split(","))
        if key.without_packages:
            yield with_copies_of_inputs()
        if key.images is not None and key.attention == "flash_attention_2":
            yield with_rows_of_images(model)
        if key.liger_kernels:
            yield with_liger_kernels(model, source.name)
    if key.compiles:
        yield functions_of_graphs(by_cudnn=key.kernel == "cudnn")
        if key.attention == "flash_attention_2":
            yield flash_attention_in_graphs()


def _attention(key: TapeKey) -> str:
    """The attention with which the model is configured: in compiled code, transformers' own over recorded operators."""
    return COMPILED if key.compiles and key.attention == "flash_attention_2" else key.attention


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Context without the warnings that code under fake tensors causes, such as those of slices of a cache of keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _compile(source: Source, key: TapeKey, model: nn.Module) -> None:
    """Compile the key's parts of the model."""
    from fsdp_advisor.recording.compiled import compile_modules, regions
    from fsdp_advisor.recording.losses.compiled import leave_uncompiled

    if key.compiles_whole and key.loss == "trl":
        leave_uncompiled(source.root_modules(model).head, source.name)
    layers = [layer for stack in source.stacks(model) for layer in stack.layers]
    parts = regions(model, layers) if key.compiles_regions else layers
    if key.checkpointing == "full-accelerate":
        parts = [part for part in parts if part not in layers]
        for layer in layers:
            layer.forward = torch._dynamo.disable(layer.forward)
    compile_modules(
        (model,) if key.compiles_whole else parts,
        in_ddp=key.compile.endswith("-ddp"),
        in_one_graph=is_of_torchtitan(source),
    )


def _run_briefly(step: Step, point: tuple[int, int], seq_len: int) -> None:
    """Run a step with a sequence length of at most `seq_len`, as loops over tokens or experts take minutes with a long one. A model that
    cannot run it runs the step of `point`.
    """
    micro_batch_size, longest = point
    try:
        step.run(micro_batch_size, min(seq_len, longest))
    except Exception:  # code for chunks, for example, that takes only whole ones
        if seq_len >= longest:
            raise
        step.run(*point)


def record_module(
    builder: Callable[[], nn.Module],
    batch: Callable[[int, int], Mapping[str, torch.Tensor]],
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    wrap: Iterable[type[nn.Module] | str] = (),
    *,
    name: str | None = None,
) -> Recorder:
    """A recorder of any module. Its `profile` is the inventory; its `tape(key)` records a step.

    `builder()` returns the module, `batch(B, T)` its inputs, `loss(module, batch)` a scalar from one forward. `wrap` names the
    units: classes, or dotted names of single modules. A module without sequences ignores T.
    """
    from fsdp_advisor.recording.modules import ModuleSource

    return Recorder(ModuleSource(builder, batch, loss, tuple(wrap), name))


def repeats_are_alike(profile: Profile, tape: Tape, kinds: Sequence[Sequence[int]]) -> bool:
    """Whether each recorded layer that stands for several allocates as many storages as the nearest layers of its kind: the one before
    it in forward, the one after it in backward. If not, its events cannot be replayed for the layers that it stands for. `kinds`: of the
    recorded layers of each stack.
    """
    births = {
        (segment.phase, segment.stack, segment.layer): len(made)
        for segment, made in zip(tape.segments, tape.births, strict=True)
    }
    forwards = ("forward", *get_args(ScoringPhase))
    for s, (stack, of) in enumerate(zip(profile.stacks, kinds, strict=True)):
        for layer, count in Counter(stack.recorded_order).items():
            if count == 1:
                continue
            same = [other for other, kind in enumerate(of) if kind == of[layer]]
            before = max((other for other in same if other < layer), default=layer)
            after = min((other for other in same if other > layer), default=layer)
            for phase, other in (*((phase, before) for phase in forwards), ("backward", after)):
                own = births.get((phase, s, layer))
                if births.get((phase, s, other), own) != own:
                    return False
    return True
