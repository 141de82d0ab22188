"""Reduce records made without kernels to what such a run can tell: `keep.py RECORDS.jsonl KEPT.jsonl`.

Times, the CUDA context and the long lists of segments are removed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_advisor.validation import records, report

KEPT_FIGURES = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_requested_bytes",
    "peak_active_bytes",
    "phases",
    "allocator_retries",
)
KEPT_COUNTS = ("segments", "modelled_segments", "alike")


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
        gpu = record.versions["gpu"].removesuffix(" without kernels")
        detail = {"gpu_memory_bytes": record.detail.get("gpu_memory_bytes", record.measured.get("device_memory_bytes"))}
        measured, predicted = reduced(record.measured), reduced(record.predicted)
        kept = replace(
            record,
            request={**record.request, "gpu": gpu},
            device=records.WITHOUT_KERNELS,
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
