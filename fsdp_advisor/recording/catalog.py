"""Builds the catalog: `python -m fsdp_advisor.recording.catalog` records every model of `architectures.yaml` in every variant.

Finished models are kept in a work folder, keyed by their configuration, the versions, the variants and `RECORDING`, so that a
second run records only what has changed. With `--add` the tapes and refusals that the catalog holds are taken over and only variants that
it lacks are recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fsdp_advisor.errors import AdvisorError, to_payload
from fsdp_advisor.model.catalog import INDEX, PATH, find, profile
from fsdp_advisor.model.profile import (
    EAGER_ON_GPU,
    FSDP1_UNDER_AUTOCAST,
    SDPA_BY_CUDNN,
    SDPA_BY_CUDNN_WINDOWED,
    SDPA_ON_GPU,
    SDPA_ON_GPU_WINDOWED,
    Profile,
    Variant,
)
from fsdp_advisor.model.store import RECORDING, dump, load
from fsdp_advisor.recording.recorder import Recorder, versions
from fsdp_advisor.recording.transformers_models import TransformersSource

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
    and (v[0] != FSDP1_UNDER_AUTOCAST or (v[1] == "bf16-mixed" and v[2] != "eager"))
)
ON_GPU = tuple(replace(v, attention=SDPA_ON_GPU) for v in VARIANTS if v.attention == "sdpa")
WINDOWED = tuple(replace(v, attention=SDPA_ON_GPU_WINDOWED) for v in ON_GPU)
BY_CUDNN = tuple(replace(v, attention=SDPA_BY_CUDNN) for v in ON_GPU if v.precision != "fp32")
BY_CUDNN_WINDOWED = tuple(replace(v, attention=SDPA_BY_CUDNN_WINDOWED) for v in BY_CUDNN)
EAGER = tuple(replace(v, attention=EAGER_ON_GPU) for v in VARIANTS if v.attention == "eager")
UNLIKE_FLASH = ("falcon", "t5", "deepseek_v2", "deepseek_v3")
"""Of which sdpa is handed in half precision what the flash kernel does not take: a mask at any length, values of another width."""
IN_HEADS = ("phi3", "deepseek_v2", "deepseek_v3")
"""Whose queries lie in memory head by head, and with them the output of cuDNN's kernel, but not that of the memory-efficient one."""


def variants_of(profile: Profile, source: TransformersSource) -> tuple[Variant, ...]:
    """What is recorded of a model. A window that no sequence fills makes no difference, nor is eager attention another on a GPU
    but under autocast and with dropout."""
    filled = profile.window is not None and profile.window <= (profile.max_seq_len or profile.window)
    kind = profile.config["model_type"]
    drops = source.drops_out
    return (
        *VARIANTS,
        *(v for v in ON_GPU if v.precision == "fp32" or kind in UNLIKE_FLASH),
        *(BY_CUDNN if kind in UNLIKE_FLASH and kind in IN_HEADS else ()),
        *(WINDOWED if filled else ()),
        *(BY_CUDNN_WINDOWED if filled and kind in IN_HEADS else ()),
        *(v for v in EAGER if drops or (v.engine == "plain" and v.mixed)),
    )


def record(row: dict[str, Any], before: Profile | None = None) -> tuple[bytes, list[str]]:
    """A row's stored profile, and the variants that the model's own code refuses, with the reason. `before` is what is kept."""
    source = TransformersSource(row["config"], name=row["id"], task=row["task"])
    recorder = Recorder(source)
    if recorder.profile.parameters != row["parameters"]:
        raise SystemExit(f"{row['id']}: {recorder.profile.parameters} parameters, not {row['parameters']}")
    refused = []
    if before is not None:
        if (before.root, before.stacks, before.versions) != (
            recorder.profile.root,
            recorder.profile.stacks,
            recorder.profile.versions,
        ):
            raise SystemExit(f"{row['id']}: the catalog's tapes are of another model or other versions")
        recorder.profile.tapes.update(before.tapes)
        recorder.profile.refusals.update(before.refusals)
    for variant in variants_of(recorder.profile, source):
        if variant.key in recorder.profile.tapes or variant.key in recorder.profile.refusals:
            continue
        try:
            recorder.profile.tapes[variant.key] = recorder.tape(variant)
        except AdvisorError as error:  # one refusal must not cost the other variants
            refused.append(f"{variant.key}: {error}")
            recorder.profile.refusals[variant.key] = to_payload(error)
    return dump(recorder.profile, small=True), refused


def _key(row: dict[str, Any]) -> str:
    variants = [v.key for v in VARIANTS + ON_GPU + BY_CUDNN + WINDOWED + BY_CUDNN_WINDOWED + EAGER]
    text = json.dumps([row["config"], row["task"], versions(), variants, RECORDING], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _work(job: tuple[dict[str, Any], Path, bool]) -> tuple[str, list[str]]:
    row, target, add = job
    entry = find(row["id"]) if add else None
    data, refused = record(row, profile(entry) if entry else None)
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
    parser.add_argument("--add", action="store_true", help="keep the catalog's tapes, record the variants it lacks")
    options = parser.parse_args()
    rows = yaml.safe_load(ARCHITECTURES.read_text())
    options.work.mkdir(parents=True, exist_ok=True)
    targets = [(row, options.work / f"{_key(row)}.profile") for row in rows if options.only in row["id"]]
    missing = [] if options.partial else [(*job, options.add) for job in targets if not job[1].exists()]
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
            stored = target.read_bytes()
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
                    "experts": load(stored).experts,
                }
            )
            archive.writestr(zipfile.ZipInfo(member), stored, zipfile.ZIP_STORED)
        archive.writestr(zipfile.ZipInfo(INDEX), json.dumps(index), zipfile.ZIP_DEFLATED)
    print(f"{len(index)} models, {options.out.stat().st_size / 1e6:.2f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
