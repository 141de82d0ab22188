"""The sizes of buckets and sub-groups in DeepSpeed's configuration, as an option."""

from __future__ import annotations

from collections.abc import Mapping

ZERO_BUCKETS = (
    "reduce_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""The keys of ``zero_optimization`` that decide memory, in elements. Source: deepspeed 0.19.8, zero/config.py, DeepSpeedZeroConfig."""
_MOST_ELEMENTS = 10**19
"""More than `sys.maxsize`, which stands for no limit."""


def read_zero_buckets(text: str) -> str | None:
    """The canonical spelling of the option: in the order of `ZERO_BUCKETS`, whole numbers. None if a key or a number is not known.

    >>> read_zero_buckets("sub_group_size=1e9, reduce_bucket_size=2e8"), read_zero_buckets("bucket=1")
    ('reduce_bucket_size=200000000,sub_group_size=1000000000', None)
    """
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            return None
        least = 1 if name == "reduce_bucket_size" else 0
        if name not in ZERO_BUCKETS or not least <= value <= _MOST_ELEMENTS or not value.is_integer():
            return None
        sizes[name] = int(value)
    return written_buckets(sizes)


def written_buckets(sizes: Mapping[str, int]) -> str:
    """The option's canonical spelling of sizes by DeepSpeed's key."""
    return ",".join(f"{name}={sizes[name]}" for name in ZERO_BUCKETS if name in sizes)


def zero_buckets(text: str | None) -> dict[str, int]:
    """The sizes that an option in its canonical spelling gives, by DeepSpeed's key."""
    pairs = (part.partition("=") for part in text.split(",")) if text else ()
    return {name: int(number) for name, _, number in pairs}
