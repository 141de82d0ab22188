"""How a report writes bytes, seconds and throughput."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_advisor.report import Report
from fsdp_advisor.units import format_bytes, format_gib

NONE = "-"
UNKNOWN = "?"


def format_gb(n_bytes: int) -> str:
    """Bytes in decimal GB (10**9).

    >>> format_gb(28_000_000_000)
    '28.00 GB'
    """
    return f"{n_bytes / 10**9:.2f} GB"


def format_seconds(seconds: float) -> str:
    """Seconds with two or three digits.

    >>> format_seconds(0.0123), format_seconds(1.234), format_seconds(123.4)
    ('12.3 ms', '1.23 s', '123 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def format_rate(per_second: float) -> str:
    """A throughput with three digits, which is the precision of the time model.

    >>> format_rate(3215.4), format_rate(92.13), format_rate(0.4567)
    ('3,220', '92.1', '0.457')
    """
    rounded = float(f"{per_second:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


class Sizes(NamedTuple):
    """Writes bytes in GiB, or in decimal GB if the model is a bare parameter count: the ZeRO paper's tables use GB."""

    decimal: bool

    @classmethod
    def of(cls, report: Report) -> Sizes:
        return cls(decimal=report.model_source == "count")

    @property
    def unit(self) -> str:
        return "GB" if self.decimal else "GiB"

    @property
    def unit_with_meaning(self) -> str:
        return "GB (10^9 bytes)" if self.decimal else "GiB"

    def full(self, n_bytes: int) -> str:
        """Bytes with their unit and two decimals."""
        return format_gb(n_bytes) if self.decimal else format_gib(n_bytes)

    def scaled(self, n_bytes: int) -> str:
        """Bytes in the unit that suits the size, for small amounts."""
        return format_gb(n_bytes) if self.decimal else format_bytes(n_bytes)

    def bare(self, n_bytes: int | None) -> str:
        """Bytes without their unit; `?` if unknown."""
        return UNKNOWN if n_bytes is None else self.full(n_bytes).split()[0]

    def bare_or_none(self, n_bytes: int | None) -> str:
        """Bytes without their unit; `-` if there are none, `?` if they are unknown."""
        if n_bytes is None:
            return UNKNOWN
        return self.bare(n_bytes) if n_bytes else NONE
