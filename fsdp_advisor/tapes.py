"""Selects a plan's tapes: of the step under fake tensors on a CPU, and of the step with a GPU's kernels.

| function            | whose step                                  | records what is missing                   | returns  |
|---------------------|---------------------------------------------|-------------------------------------------|----------|
| `cpu_tape`          | a CPU's (a GPU's with flash_attention_2)    | yes, and then the tapes of GPUs, too      | key, tape |
| `row_tape`          | as `cpu_tape`, or a GPU's that stands for it | yes                                       | key, tape |
| `search_row_tape`   | as `row_tape`, or the GPU's own             | of a missing step only the GPU's own tape | key, tape |
| `search_gpu_tape`   | the GPU's own                               | as `search_row_tape`                      | tape      |
| `kept_gpu_tape`     | the GPU's own, or the given one             | never                                     | tape      |
| `recorded_gpu_tape` | the GPU's own, or that of `row_tape`        | yes                                       | tape      |

Recording happens only where it is allowed (`Resolved.recording_allowed`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from fsdp_advisor.errors import AdvisorError, MissingExtra, NoSuchAttention, NotPolynomial, NotRecordable
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.attention import mixes_head_widths
from fsdp_advisor.model.experts import has_long_expert_loop
from fsdp_advisor.model.gpu_tape_key import gpu_tape_key, gpu_tape_keys
from fsdp_advisor.model.kernels import has_long_loop, has_loop
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.tape_keys import (
    gpu_sizes_are_not_polynomials,
    gpu_tape_key_of,
    needs_window,
    searched_gpu_tape_key,
    tape_key_of,
    with_available_attention,
)


class SelectedTape(NamedTuple):
    """A tape, and the key for which it was recorded."""

    key: TapeKey
    tape: Tape


def cpu_tape(model: Resolved, plan: Plan, gpu: Gpu | None = None) -> SelectedTape:
    """The plan's tape on a CPU and its key.

    A missing tape is recorded now if that is allowed, and so are the tapes with the kernels of `gpu`, or of every GPU if it is None. The
    profile keeps them.

    If the tape cannot be recorded, returns a similar one. FSDP1 with autocast: the tape without autocast, which counts no casts. Reentrant
    checkpointing, and accelerate's: the tape of the model's non-reentrant checkpointing. ZeRO-3: the tape of linear layers that save no
    input.
    """
    profile = _profile_of(model)
    key = tape_key_of(plan, profile)
    similar = replace(
        key,
        engine="fsdp1" if key.autocasts_fsdp1 else key.engine,
        saves_linear_inputs=False,
        checkpointing="full" if key.checkpointing in ("reentrant", "full-accelerate") else key.checkpointing,
    )
    try:
        return _for_any_batch(model, profile, plan, key, gpu)
    except (MissingExtra, NotRecordable) as error:
        if similar == key or (model.recording_allowed and not isinstance(error, MissingExtra)):
            raise
        return _for_any_batch(model, profile, plan, similar, gpu)


def row_tape(model: Resolved, plan: Plan, gpu: Gpu | None = None) -> SelectedTape:
    """The tape of a row of an estimate, and its key.

    This is the tape of `cpu_tape`, or, if the CPU's tape is valid for a single micro-batch and length, a GPU tape that is valid for all.
    Linear attention runs in chunks. On a CPU the number of its operators depends on the sequence length; on a GPU the number of its
    kernels does not. A loop over chunks, over the tokens of Mamba-1's scan or over many experts can take minutes to record. A model that
    has one needs no tape of a CPU. Raises the error about the GPU's tape if the loop is long.
    """
    profile = _profile_of(model)
    key = tape_key_of(plan, profile)
    takes_long = takes_long_on_cpu(profile, plan)
    not_polynomial = key.at is None and _is_refused(profile, key, NotPolynomial)
    if not (has_loop(profile) or takes_long or not_polynomial):
        return cpu_tape(model, plan, gpu)
    own = replace(key, at=plan.tape_shape)
    needs_own = has_loop(profile) and gpu_sizes_are_not_polynomials(profile, key)
    try:
        return _gpu_tape_for(model, profile, own if needs_own else key, plan, gpu)
    except NotPolynomial:
        if has_loop(profile) and key.at is None and not needs_own:
            return _gpu_tape_for(model, profile, own, plan, gpu)
    except AdvisorError:
        if takes_long:
            raise
    return cpu_tape(model, plan, gpu)


def takes_long_on_cpu(profile: Profile, plan: Plan) -> bool:
    """Whether the step on a CPU has a loop in Python that is too long to record it."""
    return has_long_loop(profile, plan.tape_shape[1]) or has_long_expert_loop(profile, plan.experts_implementation)


def _gpu_tape_for(model: Resolved, profile: Profile, key: TapeKey, plan: Plan, gpu: Gpu | None) -> SelectedTape:
    """The GPU tape that stands for the CPU's, and its key. Raises AdvisorError.

    Only the tape of `gpu` is recorded, or those of all GPUs if it is None.
    """

    def select(key: TapeKey) -> SelectedTape:
        keys = _keys_to_record(profile, key, gpu, window_filled=needs_window(profile, key, plan))
        tapes = [model.tape(each) for each in keys]  # `kept_gpu_tape` finds only recorded tapes
        return SelectedTape(keys[0], tapes[0])

    return _of_available_attention(profile, key, select)


def _of_available_attention(profile: Profile, key: TapeKey, select: Callable[[TapeKey], SelectedTape]) -> SelectedTape:
    """The tape that `select` returns for a key. A model without sdpa gets eager attention instead of it, as transformers gives it; another
    attention that the model does not have raises NoSuchAttention.
    """
    try:
        return select(with_available_attention(profile, key))
    except NoSuchAttention:
        if key.attention != "sdpa":
            raise
        return select(replace(key, attention="eager"))


def _profile_of(model: Resolved) -> Profile:
    """The model's profile. The model is not a bare parameter count, which has none."""
    assert model.profile is not None
    return model.profile


def _is_refused(profile: Profile, key: TapeKey, kind: type[AdvisorError]) -> bool:
    refusal = profile.refusals.get(key.name)
    return refusal is not None and refusal["kind"] == kind.__name__


def _for_any_batch(model: Resolved, profile: Profile, plan: Plan, key: TapeKey, gpu: Gpu | None) -> SelectedTape:
    """The key's tape, which is valid for any micro-batch and length, or else a tape for the plan's own micro-batch and length.

    Recording a tape that is valid for any batch takes three steps or more; recording one for the plan's own batch takes one step. So the
    first request on a code path records its own batch, a repeated request finds it, and a request with another batch records a tape for
    any batch. If the sizes are not polynomials, no tape is valid for any batch.
    """

    def select(key: TapeKey) -> SelectedTape:
        own = replace(key, at=plan.tape_shape)
        if not _needs_own_batch(model, profile, key, own):
            with contextlib.suppress(NotPolynomial):
                return _of_key(model, profile, plan, key, gpu)
        return _of_key(model, profile, plan, own, gpu)

    return _of_available_attention(profile, key, select)


def _needs_own_batch(model: Resolved, profile: Profile, key: TapeKey, own: TapeKey) -> bool:
    """Whether to use a tape for the plan's own micro-batch and length: it is the first of its code path, in this process or an earlier
    one, or no tape is valid for any batch.

    If a model's sizes are not polynomials on one code path (because of linear attention, for example), they are expected not to be
    polynomials on its other code paths either. A code path that has a tape for any batch is the exception.
    """
    if key.name in profile.tapes:
        return False
    not_polynomial = any(refusal["kind"] == NotPolynomial.__name__ for refusal in profile.refusals.values())
    if not_polynomial or own.name in profile.tapes or model.is_new(key):
        return True
    recorded = model.recorded_names
    return own.name in recorded and key.name not in recorded


def _of_key(model: Resolved, profile: Profile, plan: Plan, key: TapeKey, gpu: Gpu | None) -> SelectedTape:
    """The key's tape. A recording also records the tapes with GPU kernels."""
    if model.from_catalog and key.name in profile.tapes:
        return SelectedTape(key, model.tape(key))
    tape = model.tape(key)
    for on_gpu in _keys_to_record(profile, key, gpu, window_filled=needs_window(profile, key, plan)):
        _record_on_gpu(model, on_gpu)
    return SelectedTape(key, tape)


def _keys_to_record(profile: Profile, key: TapeKey, gpu: Gpu | None, *, window_filled: bool) -> tuple[TapeKey, ...]:
    """The keys of the tapes to record with GPU kernels: only those of `gpu`, because each recording takes long, or of every GPU if it
    is None.
    """
    keys = gpu_tape_keys(key, window_filled=window_filled, mixes_head_widths=mixes_head_widths(profile))
    if gpu is None:
        return keys
    recorded = [each.name for each in keys]
    own = gpu_tape_key(key, gpu.compute_capability, window_filled=window_filled, recorded=recorded)
    return (own,) if own in keys else keys


@lru_cache(maxsize=64)  # does not repeat a failed recording
def _record_on_gpu(model: Resolved, key: TapeKey) -> None:
    """Record a GPU tape if possible. Raises NotPolynomial, and any error about compiled code."""
    try:
        model.tape(key)
    except NotPolynomial:
        raise
    except AdvisorError:
        if key.compiles:
            raise


def kept_gpu_tape(profile: Profile, selected: SelectedTape, plan: Plan, gpu: Gpu) -> Tape:
    """The GPU tape of a plan; the selected tape if there is none."""
    return profile.tapes.get(gpu_tape_key_of(profile, selected.key, plan, gpu).name) or selected.tape


def search_gpu_tape(model: Resolved, plan: Plan, gpu: Gpu) -> Tape:
    """The tape of a plan's step with the GPU's kernels, for a search. Raises AdvisorError if there is none."""
    return kept_gpu_tape(_profile_of(model), search_row_tape(model, plan, gpu), plan, gpu)


def search_row_tape(model: Resolved, plan: Plan, gpu: Gpu) -> SelectedTape:
    """The tape of a row in a search, and its key. Raises AdvisorError if there is none.

    It is that of `row_tape` if the catalog has it; if not, only the tape with the GPU's kernels is recorded, because a search needs no
    tape of the CPU.
    """
    profile = _profile_of(model)
    own = with_available_attention(profile, tape_key_of(plan, profile))
    is_catalogued = model.from_catalog and own.name in profile.tapes
    if model.recording_allowed and not is_catalogued:
        with contextlib.suppress(AdvisorError):  # then the CPU's tape is used, or its error raised
            return _recorded_for_search(model, profile, plan, gpu)
    return row_tape(model, plan, gpu)


def records_each_batch(model: Resolved, plan: Plan, gpu: Gpu) -> bool:
    """Whether a search has to record the plan's own micro-batch, because no recording is valid for every one."""
    profile = _profile_of(model)
    key = searched_gpu_tape_key(profile, plan, gpu)
    own = replace(key, at=plan.tape_shape)
    return own.name not in profile.tapes and gpu_sizes_are_not_polynomials(profile, key)


def _recorded_for_search(model: Resolved, profile: Profile, plan: Plan, gpu: Gpu) -> SelectedTape:
    """The tape with the GPU's kernels, and its key. It is recorded if it is missing; the CPU's tape is not. For a micro-batch above 1 the
    recording is valid for every batch, because a search asks for other batches next.
    """
    key = searched_gpu_tape_key(profile, plan, gpu)
    if key.device == "cpu":
        raise NotRecordable(f"the kernels of {gpu.name} are not modelled", hint="the step on a CPU is used instead")
    own = replace(key, at=plan.tape_shape)
    asks_for_others = not key.batch_is_one and own.name not in profile.tapes
    if gpu_sizes_are_not_polynomials(profile, key) or (
        not asks_for_others and _needs_own_batch(model, profile, key, own)
    ):
        return SelectedTape(own, model.tape(own))
    with contextlib.suppress(NotPolynomial):
        return SelectedTape(key, model.tape(key))
    return SelectedTape(own, model.tape(own))


def recorded_gpu_tape(model: Resolved, plan: Plan, gpu: Gpu) -> Tape:
    """The `kept_gpu_tape` of a plan. It is recorded first if it is missing and recording is possible."""
    key, tape = row_tape(model, plan, gpu)
    try:
        return model.tape(gpu_tape_key_of(_profile_of(model), key, plan, gpu))
    except NotRecordable:
        return tape
