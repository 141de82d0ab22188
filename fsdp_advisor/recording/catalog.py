"""Build the catalog: `python -m fsdp_advisor.recording.catalog` records every model of `architectures.yaml` under every tape key.

A work folder keeps finished models, keyed by their configuration, the versions, the tape keys and `RECORDING`. A second run
records only models for which one of these has changed. With `--add` the catalog's tapes and refusals are kept, and only missing
tapes are recorded.
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
from typing import Any, get_args

import yaml

from fsdp_advisor.errors import AdvisorError, to_payload
from fsdp_advisor.model.catalog import INDEX, PATH, find, profile
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import RECORDING, dump, load
from fsdp_advisor.model.tape_key import TapeAttention, TapeCheckpointing, TapeEngine, TapeKey, TapePrecision
from fsdp_advisor.recording.recorder import Recorder, versions
from fsdp_advisor.recording.transformers_models import TransformersSource

ARCHITECTURES = PATH.with_name("architectures.yaml")
ENGINES: tuple[TapeEngine, ...] = ("fsdp2", "plain", "fsdp1", "fsdp1+autocast")
PRECISIONS: tuple[TapePrecision, ...] = ("bf16", "bf16-mixed", "fp32")
ATTENTIONS: tuple[TapeAttention, ...] = ("sdpa", "eager")
ON_CPU = tuple(
    TapeKey(*fields)
    for fields in itertools.product(ENGINES, PRECISIONS, ATTENTIONS, get_args(TapeCheckpointing), (False, True))
    if fields[0] != "fsdp1+autocast" or (fields[1] == "bf16-mixed" and fields[2] != "eager")
)
FLASH = tuple(  # the kernel supports half precision only, and treats every B the same
    replace(k, attention="flash_attention_2", device="gpu")
    for k in ON_CPU
    if k.attention == "sdpa" and k.precision != "fp32" and not k.batch_is_one
)
SDPA = tuple(replace(k, device="gpu") for k in ON_CPU if k.attention == "sdpa")
SDPA_FILLED = tuple(replace(k, window_filled=True) for k in SDPA)
CUDNN = tuple(replace(k, kernel="cudnn") for k in SDPA if k.precision != "fp32")
CUDNN_FILLED = tuple(replace(k, window_filled=True) for k in CUDNN)
EAGER = tuple(replace(k, device="gpu") for k in ON_CPU if k.attention == "eager")
ALL = ON_CPU + FLASH + SDPA + CUDNN + SDPA_FILLED + CUDNN_FILLED + EAGER
UNLIKE_FLASH = ("falcon", "t5", "deepseek_v2", "deepseek_v3")
"""Model types that pass sdpa, in half precision, inputs that the flash kernel does not support: a mask at any length, or values
of another width than the queries."""
IN_HEADS = ("phi3", "deepseek_v2", "deepseek_v3")
"""Model types whose queries are laid out head by head in memory. cuDNN's kernel gives its output the same layout; the
memory-efficient kernel does not."""


def keys_of(profile: Profile, source: TransformersSource) -> tuple[TapeKey, ...]:
    """The keys of the tapes that are recorded for a model.

    A sliding window that no sequence fills has no effect. Eager attention on a GPU differs from the CPU only under autocast and
    with dropout.
    """
    filled = profile.window is not None and profile.window <= (profile.max_seq_len or profile.window)
    kind = profile.config["model_type"]
    drops = source.drops_out
    return (
        *ON_CPU,
        *FLASH,
        *(k for k in SDPA if k.precision == "fp32" or kind in UNLIKE_FLASH),
        *(CUDNN if kind in UNLIKE_FLASH and kind in IN_HEADS else ()),
        *(SDPA_FILLED if filled else ()),
        *(CUDNN_FILLED if filled and kind in IN_HEADS else ()),
        *(k for k in EAGER if drops or (k.engine == "plain" and k.mixed)),
    )


def record(row: dict[str, Any], before: Profile | None = None) -> tuple[bytes, list[str]]:
    """A row's stored profile, and the tapes that the model's code refuses, with the reason. `before`: a profile whose tapes are
    kept.
    """
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
    for key in keys_of(recorder.profile, source):
        if key.name in recorder.profile.tapes or key.name in recorder.profile.refusals:
            continue
        try:
            recorder.profile.tapes[key.name] = recorder.tape(key)
        except AdvisorError as error:  # one refusal must not prevent the other tapes
            refused.append(f"{key.name}: {error.message}")
            recorder.profile.refusals[key.name] = to_payload(error)
    return dump(recorder.profile, small=True), refused


def _key(row: dict[str, Any]) -> str:
    names = [key.name for key in ALL]
    text = json.dumps([row["config"], row["task"], versions(), names, RECORDING], sort_keys=True)
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
    parser.add_argument("--add", action="store_true", help="keep the catalog's tapes, record the tapes it lacks")
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
