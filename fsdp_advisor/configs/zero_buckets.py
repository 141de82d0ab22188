"""The sizes of DeepSpeed's buckets in users' files, of which those that an estimate has anyway are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_advisor.engines.deepspeed.settings import DEFAULTS
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.zero_buckets import ZERO_BUCKETS, written_buckets, zero_buckets

DEFAULT_SIZES: dict[str, int] = {name: getattr(DEFAULTS, name.removeprefix("stage3_")) for name in ZERO_BUCKETS}
"""DeepSpeed's key -> its default, in elements."""
_FILLED = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""The sizes that accelerate and the Trainer fill in for "auto"."""


def set_buckets(options: dict[str, Any], sizes: Mapping[str, int]) -> None:
    """Set the option to the sizes that the job's ZeRO stage reads."""
    read = ZERO_BUCKETS if options.get("strategy") == "zero3" else ("reduce_bucket_size",)
    options["zero_buckets"] = written_buckets({name: sizes[name] for name in read if name in sizes})


def resolve_buckets(options: dict[str, Any]) -> None:
    """Drop the sizes that the estimate has without the option, once engine and framework are known."""
    sizes = zero_buckets(options.pop("zero_buckets", None))
    if options.get("backend") != "deepspeed":
        return
    fills = FRAMEWORKS[options.get("framework", "torch")].fills_deepspeed_buckets
    own = {name: n for name, n in sizes.items() if n != DEFAULT_SIZES[name] or (fills and name in _FILLED)}
    if own:
        options["zero_buckets"] = written_buckets(own)
