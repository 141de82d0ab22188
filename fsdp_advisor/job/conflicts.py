"""Options that are not modelled together."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_advisor.errors import UsageError


def check_conflicts(what: str, others: Mapping[str, bool]) -> None:
    """Raises UsageError if one of the `others` is asked for (True), none of which is modelled with `what`."""
    for other, is_asked in others.items():
        if is_asked:
            raise UsageError(f"{what} is not modelled with {other}", hint="leave one of the two out")
