"""Today's predictions of kept records. As a script, it writes them into the records of `tests/records/without_kernels`:

python tests/validation/repredict.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from fsdp_advisor.hardware.lookup import lookup
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.validation import records
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.records import Record

WITHOUT_KERNELS = Path(__file__).parents[1] / "records" / "without_kernels"
FILES = sorted(WITHOUT_KERNELS.glob("*.jsonl"))


def today(record: Record) -> Record:
    """The record with today's prediction, for a GPU that finishes its work before the host's next allocation."""
    request = make_request({k: v for k, v in record.request.items() if k in fields_of(EstimateRequest)})
    gpu = lookup(record.versions["gpu"])
    assert gpu is not None
    found = predict(request, record.mode, "cuda", gpu=gpu, gpu_keeps_up=True)
    phases = found.predicted["phases"].values()
    peaks = {f"peak_{name}": max(phase[name] for phase in phases) for name in ("reserved_bytes", "requested_bytes")}
    return replace(record, predicted={**found.predicted, **peaks}, fits_predicted=found.fits)


def repredicted(record: Record) -> Record:
    """The record with today's values of the figures that it predicts."""
    now = today(record)
    return replace(now, predicted={name: now.predicted[name] for name in record.predicted if name in now.predicted})


def main() -> None:
    """Rewrite the predictions of every record."""
    for path in FILES:
        kept, notes = records.read(path)
        assert not notes, notes
        lines = [json.dumps(repredicted(record).as_dict(), separators=(",", ":"), allow_nan=False) for record in kept]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
