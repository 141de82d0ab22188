"""Builds the catalog: `python -m fsdp_advisor.tracing.catalog` records every model of `architectures.yaml` in every variant.

Finished models are kept in a work folder, keyed by their configuration, the versions and `RECORDING`, so
that a second run records only what has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.models.catalog import INDEX, PATH
from fsdp_advisor.models.profile import FSDP1_UNDER_AUTOCAST, Variant
from fsdp_advisor.models.store import RECORDING, dump
from fsdp_advisor.tracing.recorder import Recorder, versions
from fsdp_advisor.tracing.transformers_models import TransformersSource

ARCHITECTURES = PATH.with_name("architectures.yaml")
VARIANTS = tuple(
    Variant(*v)
    for v in itertools.product(
        ("fsdp2", "plain", "fsdp1", FSDP1_UNDER_AUTOCAST),
        ("bf16", "bf16-mixed", "fp32"),
        ("sdpa", "eager", "flash_attention_2"),
        ("none", "full"),
        (False, True),
    )
    if (v[2] != "flash_attention_2" or (v[1] != "fp32" and not v[4]))  # the kernel takes half precision, any B alike
    and (v[0] != FSDP1_UNDER_AUTOCAST or v[1] == "bf16-mixed")
)


def record(row: dict[str, Any]) -> tuple[bytes, list[str]]:
    """A row's stored profile, and the variants that the model's own code refuses, with the reason."""
    recorder = Recorder(TransformersSource(row["config"], name=row["id"], task=row["task"]))
    if recorder.profile.parameters != row["parameters"]:
        raise SystemExit(f"{row['id']}: {recorder.profile.parameters} parameters, not {row['parameters']}")
    refused = []
    for variant in VARIANTS:
        try:
            recorder.profile.tapes[variant.key] = recorder.tape(variant)
        except AdvisorError as error:  # noqa: PERF203  # one refusal must not cost the other variants
            refused.append(f"{variant.key}: {error}")
    return dump(recorder.profile, small=True), refused


def _key(row: dict[str, Any]) -> str:
    text = json.dumps([row["config"], row["task"], versions(), RECORDING], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _work(job: tuple[dict[str, Any], Path]) -> tuple[str, list[str]]:
    row, target = job
    data, refused = record(row)
    partial = target.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(target)
    return row["id"], refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--work", type=Path, default=Path("build/catalog"))
    parser.add_argument("--only", default="", help="models whose id contains this; the catalog is then not written")
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--partial", action="store_true", help="write what is recorded so far and stop")
    options = parser.parse_args()
    rows = yaml.safe_load(ARCHITECTURES.read_text())
    options.work.mkdir(parents=True, exist_ok=True)
    targets = [(row, options.work / f"{_key(row)}.profile") for row in rows if options.only in row["id"]]
    missing = [] if options.partial else [job for job in targets if not job[1].exists()]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=4) as pool:
        for done, (name, refused) in enumerate(pool.imap_unordered(_work, missing), start=1):
            print(f"{done}/{len(missing)} {name}", *(f"\n    {r}" for r in refused), file=sys.stderr, flush=True)
    if options.only:
        return
    index = []
    with zipfile.ZipFile(options.out, "w", zipfile.ZIP_DEFLATED) as archive:
        for row, target in targets:
            if not target.exists():
                continue
            source = TransformersSource(row["config"], name=row["id"], task=row["task"])
            member = row["id"].replace("/", "--") + ".profile"
            index.append(
                {
                    "id": row["id"],
                    "aliases": row.get("aliases", []),
                    "task": row["task"],
                    "parameters": row["parameters"],
                    "max_seq_len": source.max_seq_len,
                    "model_type": row["config"]["model_type"],
                    "source": row["source"],
                    "member": member,
                }
            )
            archive.writestr(zipfile.ZipInfo(member), target.read_bytes(), zipfile.ZIP_STORED)
        archive.writestr(zipfile.ZipInfo(INDEX), json.dumps(index), zipfile.ZIP_DEFLATED)
    print(f"{len(index)} models, {options.out.stat().st_size / 1e6:.2f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
