"""`PYTORCH_ALLOC_CONF`: the settings of PyTorch's caching allocator that decide what it reserves.

Source: c10/core/AllocatorConfig.cpp, AcceleratorAllocatorConfig::parseArgs (`key:value` pairs, comma-separated, lists in
brackets) and c10/cuda/CUDAAllocatorConfig.h, CUDAAllocatorConfig::getKeys; torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from fsdp_advisor.errors import UsageError

CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables with the settings, in PyTorch's order. Source: c10/core/AllocatorConfig.h (torch 2.13)."""
MIB = 2**20
SMALL_SIZE = MIB
"""The largest allocation of the small pool. Source: c10/core/AllocatorConfig.h, kSmallSize."""
SMALL_BUFFER = 2 * MIB
"""A segment of the small pool (kSmallBuffer)."""
MIN_LARGE_ALLOC = 10 * MIB
"""Allocations below share a segment of `large_segment_bytes` (kMinLargeAlloc)."""
ROUND_LARGE = 2 * MIB
"""Allocations of at least MIN_LARGE_ALLOC get a segment of their own, rounded up to a multiple of this (kRoundLarge)."""

POWER2_INTERVALS = 16
"""Number of size intervals: one per power of two from 1 MiB to 64 GiB (kRoundUpPowerOfTwoIntervals)."""
UNLIMITED = 2**63 - 1

NO_EFFECT = frozenset(
    {
        "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
        "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_free_catch_all",
        "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)  # fmt: skip
"""Valid keys without effect on the model: they concern host memory, locks, graph capture and the text of errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConf:
    """The settings, with sizes in bytes. `parse` reads the syntax of the environment variable."""

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int | None = None  # for a block that is not split; None: large_segment_bytes
    large_segment_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * POWER2_INTERVALS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0

    @property
    def non_split_rounding_bytes(self) -> int:
        return self.max_non_split_rounding_bytes or self.large_segment_bytes

    @classmethod
    def parse(cls, text: str | None) -> AllocatorConf:
        """Parse the syntax of `PYTORCH_ALLOC_CONF`; None or an empty text is PyTorch's default. Raises UsageError.

        >>> conf = AllocatorConf.parse("expandable_segments:True,max_split_size_mb:64")
        >>> conf.expandable_segments, conf.max_split_bytes // 2**20
        (True, 64)
        """
        pairs = _pairs(text or "")
        large = _megabytes(pairs, "large_segment_size_mb", 11, "more than 10") or 20 * MIB
        least = large // MIB
        return cls(
            large_segment_bytes=large,
            max_split_bytes=_megabytes(pairs, "max_split_size_mb", least, f"at least {least}") or UNLIMITED,
            max_non_split_rounding_bytes=_megabytes(pairs, "max_non_split_rounding_mb", least, f"at least {least}"),
            expandable_segments=_boolean(pairs, "expandable_segments"),
            garbage_collection_threshold=_fraction(pairs, "garbage_collection_threshold", 0.0, open_end=True),
            per_process_memory_fraction=_fraction(pairs, "per_process_memory_fraction", 1.0, open_end=False),
            roundup_power2_divisions=_divisions(pairs.get("roundup_power2_divisions")),
        )

    def allowed_bytes(self, device_bytes: int) -> int:
        """The bytes of a device that PyTorch may reserve."""
        return int(self.per_process_memory_fraction * device_bytes)

    @property
    def collects_garbage(self) -> bool:
        """Whether garbage collection runs: it needs a threshold, and a memory fraction below 1.

        Source: malloc, `set_fraction`. A fraction of 1 counts as not set. Not modelled: a fraction that the program sets itself
        (`torch.cuda.set_per_process_memory_fraction`).
        """
        return self.garbage_collection_threshold > 0 and self.per_process_memory_fraction < 1

    def divisions_for(self, n_bytes: int) -> int:
        """The number of steps into which a power of two is divided at this size.

        Source: AcceleratorAllocatorConfig::roundup_power2_divisions(size).
        """
        index = n_bytes.bit_length() - MIB.bit_length()
        return self.roundup_power2_divisions[min(max(index, 0), POWER2_INTERVALS - 1)]


DEFAULT_CONF = AllocatorConf()
"""PyTorch's default settings."""

KEYS = frozenset(
    {
        "expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb",
        "roundup_power2_divisions", "garbage_collection_threshold", "per_process_memory_fraction", "backend",
    }
) | NO_EFFECT  # fmt: skip


def _error(key: str, what: str, value: str, hint: str) -> UsageError:
    return UsageError(f"allocator configuration: {key} must be {what}, not {value!r}", hint=hint)


def _pairs(text: str) -> dict[str, str]:
    """The `key:value` pairs. Blanks are ignored; lists are in brackets. Source: c10/core/AllocatorConfig.h, ConfigTokenizer."""
    pairs: dict[str, str] = {}
    text = re.sub(r"\s", "", text)
    for item in re.split(r",(?![^\[]*\])", text) if text else []:
        key, colon, value = item.partition(":")
        if not key or not colon or not value:
            raise UsageError(
                f"allocator configuration: {item!r} is not key:value",
                hint="for example expandable_segments:True,max_split_size_mb:128",
            )
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"keys: {', '.join(sorted(KEYS - NO_EFFECT))}"
            raise UsageError(f"allocator configuration: unknown key {key!r}", hint=hint)
        pairs[key] = value
    if (backend := pairs.get("backend", "native")) != "native":
        raise _error("backend", "native", backend, "cudaMallocAsync keeps its own pools, which are not modelled")
    return pairs


def _megabytes(pairs: dict[str, str], key: str, least: int, what: str) -> int | None:
    value = pairs.get(key)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise _error(key, f"{what} (MiB)", value, f"the allocator takes no smaller {key}")
    return int(value) * MIB


def _boolean(pairs: dict[str, str], key: str) -> bool:
    value = pairs.get(key, "False")
    if value not in ("True", "False"):
        raise _error(key, "True or False", value, "written with a capital letter")
    return value == "True"


def _fraction(pairs: dict[str, str], key: str, default: float, *, open_end: bool) -> float:
    value = pairs.get(key)
    if value is None:
        return default
    what = "a number above 0 and below 1" if open_end else "a number above 0, at most 1"
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (0 < number < 1 or (number == 1 and not open_end)):
        raise _error(key, what, value, "for example 0.8")
    return number


def _divisions(value: str | None) -> tuple[int, ...]:
    """The divisions by size, from one number for all sizes or `[256:1,512:2,>:8]` by size in MiB. The first entry also applies to
    all smaller sizes.

    Source: AcceleratorAllocatorConfig::parseRoundUpPower2Divisions.
    """
    result = [0] * POWER2_INTERVALS
    if value is None:
        return tuple(result)
    hint = "a power of two, or a list such as [256:1,512:2,1024:4,>:8]"
    if not value.startswith("["):
        return (_power_of_two(value, hint),) * POWER2_INTERVALS
    if not value.endswith("]"):
        raise _error("roundup_power2_divisions", "a closed list", value, hint)
    last: int | None = None
    for item in value[1:-1].split(","):
        boundary, _, divisions = item.partition(":")
        count = 0 if divisions == "0" else _power_of_two(divisions, hint)
        if boundary == ">":
            first = 0 if last is None else last + 1
            result[first:] = [count] * (POWER2_INTERVALS - first)
            continue
        index = min(_power_of_two(boundary, hint).bit_length() - 1, POWER2_INTERVALS - 1)
        if last is None:
            result[:index] = [count] * index
        result[index], last = count, index
    return tuple(result)


def conf_in(variables: Mapping[str, str]) -> str | None:
    """The settings in these environment variables; None if there are none."""
    return next((variables[name] for name in CONF_VARIABLES if variables.get(name)), None)


def _power_of_two(value: str, hint: str) -> int:
    if not value.isdecimal() or int(value) == 0 or int(value) & (int(value) - 1):
        raise _error("roundup_power2_divisions", "powers of two", value, hint)
    return int(value)
