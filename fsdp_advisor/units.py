"""Format and parse bytes and other quantities, and list words. No other module divides by 2**30."""

from __future__ import annotations

import re

GIB = 2**30
MAX_BYTES = 10**19
MOST_LISTED = 20
"""The largest number of possible words that a message lists in full."""
_SUFFIX = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\+?\d{1,3})?)\s*([a-z]*)\s*$", re.IGNORECASE)


def format_gib(n_bytes: int) -> str:
    """Bytes in GiB (2**30) with two decimals.

    >>> format_gib(24_953_760_072)
    '23.24 GiB'
    """
    return f"{n_bytes / GIB:.2f} GiB"


def format_bytes(n_bytes: int) -> str:
    """Bytes with two decimals in the largest binary unit that gives at least 1; plain bytes below 1 KiB.

    >>> format_bytes(512), format_bytes(3 * 2**20), format_bytes(-2**31)
    ('512 B', '3.00 MiB', '-2.00 GiB')
    """
    size = abs(n_bytes)
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"


def parse_bytes(text: str) -> int | None:
    """Bytes of a size such as `24GiB`, `80 GB` (10**9) or `512MiB`, at most MAX_BYTES; None if `text` is not a size.

    >>> parse_bytes("24GiB"), parse_bytes("80 GB"), parse_bytes("H100")
    (25769803776, 80000000000, None)
    """
    match = _NUMBER.match(text)
    if match is None or match[2].lower() not in _SUFFIX:
        return None
    return round(min(float(match[1]) * _SUFFIX[match[2].lower()], MAX_BYTES))


def exact_size(n_bytes: int) -> str:
    """Bytes without rounding, in the largest unit of which they are a multiple, for a command line.

    >>> exact_size(128 * 2**30), exact_size(64 * 10**9), exact_size(1001)
    ('128GiB', '64GB', '1001')
    """
    for unit in ("GiB", "GB", "MiB", "MB"):
        if n_bytes % _SUFFIX[unit.lower()] == 0:
            return f"{n_bytes // _SUFFIX[unit.lower()]}{unit}"
    return str(n_bytes)


def format_gpus(n: int) -> str:
    """A number of GPUs with its noun.

    >>> format_gpus(1), format_gpus(8)
    ('1 GPU', '8 GPUs')
    """
    return f"{n} GPU" if n == 1 else f"{n} GPUs"


def format_tokens(n: int) -> str:
    """A number of tokens with its noun.

    >>> format_tokens(1), format_tokens(2048)
    ('1 token', '2048 tokens')
    """
    return f"{n} token" if n == 1 else f"{n} tokens"


def parse_count(text: str) -> int | None:
    """A count such as `7e9`, `7B` or `350M`; None if `text` is not a count.

    >>> parse_count("7e9"), parse_count("7B"), parse_count("0.5b"), parse_count("gpt2")
    (7000000000, 7000000000, 500000000, None)
    """
    match = _NUMBER.match(text)
    if match is None or match[2].lower() not in _COUNT:
        return None
    value = float(match[1]) * _COUNT[match[2].lower()]
    return round(value) if value < 1e18 else None


def parse_fraction(text: str) -> float | None:
    """A fraction such as `8%` or `0.08`; None if `text` is not a number.

    >>> parse_fraction("8%"), parse_fraction("0.08"), parse_fraction("half")
    (0.08, 0.08, None)
    """
    text = text.strip()
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def format_count(n: int) -> str:
    """A count with three significant digits and the suffix K, M, B or T.

    >>> format_count(6_738_415_616), format_count(124_439_808), format_count(999_885_952), format_count(512)
    ('6.74B', '124M', '1.00B', '512')
    """
    for suffix, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= 0.9995 * scale:  # 999.9 million rounds to 1.00B
            value = n / scale
            return (
                f"{value:.2f}{suffix}"
                if value < 10
                else f"{value:.1f}{suffix}"
                if value < 100
                else f"{value:.0f}{suffix}"
            )
    return str(n)


def format_speed(per_second: float, counted: str = "tokens") -> str:
    """A rate per second with three significant digits, which is the precision of the time model. `counted`: the plural noun.

    >>> format_speed(3215.4), format_speed(9.04, "images")
    ('3,220 tokens/s', '9.04 images/s')
    """
    rounded = float(f"{per_second:.3g}")
    return f"{rounded:,.0f} {counted}/s" if rounded >= 100 else f"{rounded:g} {counted}/s"


def list_words(words: tuple[str, ...]) -> str:
    """The possible words as text; if there are many, their number and the first three.

    >>> list_words(("ddp", "zero2", "zero3"))
    'ddp, zero2 or zero3'
    >>> list_words(tuple(f"optimizer{number}" for number in range(40)))
    'one of 40 names that the help lists, such as optimizer0, optimizer1 or optimizer2'
    """
    if len(words) > MOST_LISTED:
        return f"one of {len(words)} names that the help lists, such as {list_words(words[:3])}"
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
