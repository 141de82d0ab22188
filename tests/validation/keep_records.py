"""Reduce records made without kernels to what is kept of them: `keep_records.py RECORDS.jsonl KEPT.jsonl`.

The long lists of segments are removed, and each GPU has the name of the table of GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.validation import records, report

KEPT_FIGURES = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_requested_bytes",
    "peak_active_bytes",
    "phases",
    "allocator_retries",
)
KEPT_COUNTS = ("segments", "modelled_segments", "equal_segments")


def reduced(figures: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: figures[name] for name in KEPT_FIGURES if name in figures}
    if "snapshot" in figures:
        found["snapshot"] = {name: figures["snapshot"][name] for name in KEPT_COUNTS}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("made", type=Path)
    parser.add_argument("kept", type=Path)
    options = parser.parse_args()
    made, notes = records.read(options.made)
    for note in notes:
        print(note)
    options.kept.unlink(missing_ok=True)
    for record in report.latest(made):
        gpu = find_gpu(record.versions["gpu"]).name
        detail = {"gpu_memory_bytes": record.detail.get("gpu_memory_bytes", record.measured.get("device_memory_bytes"))}
        measured, predicted = reduced(record.measured), reduced(record.predicted)
        kept = replace(
            record,
            request={**record.request, "gpu": gpu},
            versions={**record.versions, "gpu": gpu},
            measured=measured,
            predicted=predicted,
            message="",
            detail=detail,
            seconds=0.0,
        )
        records.append(options.kept, kept)


if __name__ == "__main__":
    main()
