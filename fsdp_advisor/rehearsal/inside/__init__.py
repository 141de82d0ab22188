"""The part of a rehearsal that runs in the processes of the script. It imports only the standard library and what the script uses."""

from __future__ import annotations

from fsdp_advisor.rehearsal.inside import meter
from fsdp_advisor.rehearsal.inside.data import use_random_data
from fsdp_advisor.rehearsal.inside.import_hooks import after_import
from fsdp_advisor.rehearsal.inside.values import answer_values
from fsdp_advisor.rehearsal.inside.weights import use_empty_weights


def start() -> None:
    """Register what happens when the script imports a library. Called once, before the script."""
    after_import("torch", answer_values)
    after_import("torch", meter.install)
    use_empty_weights()
    use_random_data()
