"""Build the catalog: `python -m fsdp_advisor.recording.catalog` records every model of `architectures.yaml` under every tape key.

A work folder keeps finished models, keyed by their configuration, the versions, the tape keys and `RECORDING`. A second run records only
models for which one of these has changed. With `--add`, tapes and refusals of this version of the recorder are kept, and only missing tapes
are recorded. With `--add --retry`, refused tapes are tried again. Models of types that the installed transformers lacks are not recorded;
with `--add` they stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
import yaml

from fsdp_advisor.errors import AdvisorError, NoSuchAttention, NotPolynomial, to_payload
from fsdp_advisor.job.choices import Attention, default_seq_len
from fsdp_advisor.model.attention import mixes_head_widths
from fsdp_advisor.model.catalog import CONFIGS, INDEX, PATH, configurations, find, profile, stored
from fsdp_advisor.model.gpu_tape_key import gpu_tape_keys
from fsdp_advisor.model.kernels import has_long_loop
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import RECORDING, dump, load
from fsdp_advisor.model.tape_key import TapeCheckpointing, TapeEngine, TapeKey, TapePrecision
from fsdp_advisor.recording.inventory import versions
from fsdp_advisor.recording.recorder import Recorder
from fsdp_advisor.recording.transformers_models import TransformersSource

ARCHITECTURES = PATH.with_name("architectures.yaml")
ENGINES: tuple[TapeEngine, ...] = ("fsdp2", "plain", "fsdp1", "fsdp1+autocast")
PRECISIONS: tuple[TapePrecision, ...] = ("bf16", "bf16-mixed", "fp32")
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "eager")
CHECKPOINTING: tuple[TapeCheckpointing, ...] = ("none", "full")
ON_CPU = tuple(
    TapeKey(*fields)
    for fields in itertools.product(ENGINES, PRECISIONS, ATTENTIONS, CHECKPOINTING, (False, True))
    if TapeKey(*fields).is_in_catalog("all")
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
USUAL = tuple(k for k in ON_CPU if k.is_in_catalog("usual"))
UNLIKE_FLASH = ("falcon", "t5", "deepseek_v2", "deepseek_v3")
"""Model types that pass sdpa, in half precision, inputs that the flash kernel does not support: a mask at any length, or values
of another width than the queries.
"""
IN_HEADS = ("phi3", "deepseek_v2", "deepseek_v3")
"""Model types whose queries are laid out head by head in memory. cuDNN's kernel gives its output the same layout; the
memory-efficient kernel does not.
"""


def keys_of(profile: Profile, source: TransformersSource) -> tuple[TapeKey, ...]:
    """The keys of the tapes that are recorded for a model.

    A sliding window that no sequence fills has no effect. Eager attention on a GPU differs from the CPU only under autocast and
    with dropout. sdpa's flash kernel differs from flash_attention_2 only under autocast, which casts the inputs in another order.
    """
    filled = profile.window is not None and profile.window <= (profile.max_seq_len or profile.window)
    kind = profile.config["model_type"]
    drops = source.drops_out
    return (
        *ON_CPU,
        *FLASH,
        *(k for k in SDPA if k.precision == "fp32" or (k.engine == "plain" and k.mixed) or kind in UNLIKE_FLASH),
        *(CUDNN if kind in UNLIKE_FLASH and kind in IN_HEADS else ()),
        *(SDPA_FILLED if filled else ()),
        *(CUDNN_FILLED if filled and kind in IN_HEADS else ()),
        *(k for k in EAGER if drops or (k.engine == "plain" and k.mixed)),
    )


def usual_keys(profile: Profile) -> tuple[TapeKey, ...]:
    """The keys of the most usual steps, on a CPU and on a GPU: FSDP2, DDP and DeepSpeed in mixed precision.

    They depend on the profile's refusals: eager attention for a model without sdpa, and a single sequence of the default length for a
    model whose sizes are not polynomials. A loop in Python over that sequence, which only a CPU runs, takes long and has no tape.
    """
    kinds = {refusal["kind"] for refusal in profile.refusals.values()}
    keys: Iterable[TapeKey] = USUAL
    if NoSuchAttention.__name__ in kinds:
        keys = [replace(k, attention="eager") for k in keys]
    length = default_seq_len(profile.max_seq_len)
    not_polynomial = {name for name, refusal in profile.refusals.items() if refusal["kind"] == NotPolynomial.__name__}
    kept: dict[TapeKey, None] = {}
    for key in keys:
        one = key.batch_is_one and key.checkpointing == "none"
        lengths = {False, profile.window is not None and profile.fills_window(profile.max_seq_len or profile.window)}
        mixes = mixes_head_widths(profile)
        on_gpu = [k for f in sorted(lengths) for k in gpu_tape_keys(key, window_filled=f, mixes_head_widths=mixes)]
        for k in (key, *on_gpu):
            if k.name not in not_polynomial:
                kept[k] = None
            elif k.device == "cpu" and has_long_loop(profile, length):
                pass
            elif one and k.window_filled in (False, profile.fills_window(length)):
                kept[replace(k, at=(1, length))] = None
    return tuple(kept)


def record(row: dict[str, Any], before: Profile | None = None, *, retry: bool = False) -> tuple[bytes, list[str]]:
    """The stored profile of a row of `architectures.yaml`, and one line for each tape that the model's code refuses, with the reason.

    `before`: a profile whose tapes and refusals are kept, or with `retry` only its tapes.
    """
    source = _source(row)
    recorder = Recorder(source)
    made = recorder.profile
    if made.parameters != row["parameters"]:
        raise SystemExit(f"{row['id']}: {made.parameters} parameters, not {row['parameters']}")
    if before is not None:
        if (before.root, before.stacks, before.versions) != (made.root, made.stacks, made.versions):
            raise SystemExit(f"{row['id']}: the catalog's tapes are of another model or other versions")
        made.tapes.update(before.tapes)
        made.refusals.update({} if retry else before.refusals)
    refused = []
    while missing := _missing(row, made, source):
        if why := _add_tape(recorder, missing[0]):
            refused.append(why)
    return dump(made, small=True), refused


def _add_tape(recorder: Recorder, key: TapeKey) -> str | None:
    """Record a tape into the profile. If recording fails, store the error as a refusal and return one line about it."""
    try:
        recorder.profile.tapes[key.name] = recorder.tape(key)
    except AdvisorError as error:
        recorder.profile.refusals[key.name] = to_payload(error)
        return f"{key.name}: {error.message}"
    return None


def _source(row: dict[str, Any]) -> TransformersSource:
    return TransformersSource(row["config"], name=row["id"], task=row["task"])


def _missing(row: dict[str, Any], profile: Profile, source: TransformersSource) -> list[TapeKey]:
    """The keys of a row's tapes that `profile` neither has nor refuses."""
    if row.get("tapes") == "none":
        return []
    known = profile.tapes.keys() | profile.refusals.keys()
    keys = usual_keys(profile) if row.get("tapes") == "usual" else keys_of(profile, source)
    return [key for key in keys if key.name not in known]


def _key(row: dict[str, Any]) -> str:
    names = [key.name for key in (USUAL if row.get("tapes") == "usual" else ALL)]
    text = json.dumps(
        [row["config"], row["task"], row.get("tapes", "all"), versions(), names, RECORDING], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _work(job: tuple[dict[str, Any], Path, bool, bool]) -> tuple[str, list[str]]:
    row, target, add, retry = job
    entry = find(row["id"]) if add else None
    before = profile(entry) if entry and entry.recording == RECORDING else None
    refused: list[str] = []
    if entry is not None and before is not None and _is_whole(row, before, retry=retry):
        data = stored(entry)
    else:
        data, refused = record(row, before, retry=retry)
    partial = target.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(target)
    return row["id"], refused


def _is_whole(row: dict[str, Any], before: Profile, *, retry: bool) -> bool:
    """Whether a profile of the catalog has every tape of its row."""
    if retry and any(refusal["kind"] != NoSuchAttention.__name__ for refusal in before.refusals.values()):
        return False
    source = _source(row)
    return (before.config, before.versions) == (source.config(), versions()) and not _missing(row, before, source)


def _configurations(rows: list[dict[str, Any]], known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The configurations of all rows, and the defaults of their classes. `model.same_shapes` recognizes configurations by them.

    `known`: defaults for types that the installed transformers lacks.
    """
    return {
        "configs": {row["id"]: row["config"] for row in rows},
        "defaults": {t: _defaults(t) or known.get(t, {}) for row in rows for t in _model_types(row["config"])},
    }


def _model_types(config: dict[str, Any]) -> list[str]:
    """The model types of a configuration and of the nested ones."""
    inner = [t for value in config.values() if isinstance(value, dict) for t in _model_types(value)]
    return [*([config["model_type"]] if "model_type" in config else []), *inner]


def _defaults(model_type: str) -> dict[str, Any]:
    """The default values of a configuration class, for fields that JSON can represent."""
    try:
        fields = dataclasses.fields(transformers.CONFIG_MAPPING[model_type])
    except KeyError:
        return {}
    plain = (str, int, float, bool, list)
    return {f.name: f.default for f in fields if isinstance(f.default, plain) and not f.name.startswith("_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--work", type=Path, default=Path("build/catalog"))
    parser.add_argument("--only", default="", help="models whose id contains this; the catalog is then not written")
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument(
        "--partial",
        action="store_true",
        help="write what is recorded so far and stop; with --add, other models stay as they are",
    )
    parser.add_argument("--add", action="store_true", help="keep this recorder's tapes, record what is missing")
    parser.add_argument("--retry", action="store_true", help="with --add: also record refused tapes again")
    options = parser.parse_args()
    rows = yaml.safe_load(ARCHITECTURES.read_text())
    options.work.mkdir(parents=True, exist_ok=True)
    targets = [(row, options.work / f"{_key(row)}.profile") for row in rows if options.only in row["id"]]
    if not options.partial:
        _record(
            [
                (row, target, options.add, options.retry)
                for row, target in targets
                if row["config"]["model_type"] in transformers.CONFIG_MAPPING and not target.exists()
            ],
            options.jobs,
        )
    if not options.only:
        _write(rows, targets, options.out, keeps_others=options.add)


def _record(jobs: list[tuple[dict[str, Any], Path, bool, bool]], processes: int) -> None:
    """Record models in parallel, each into its file."""
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=4) as pool:
        for done, (name, refused) in enumerate(pool.imap_unordered(_work, jobs), start=1):
            print(f"{done}/{len(jobs)} {name}", *(f"\n    {r}" for r in refused), file=sys.stderr, flush=True)


def _write(
    rows: list[dict[str, Any]], targets: list[tuple[dict[str, Any], Path]], out: Path, *, keeps_others: bool
) -> None:
    """Write the archive with its index. `keeps_others`: models without a recording in `targets` stay as they are in the old archive."""
    index = []
    written = out.with_suffix(".partial")  # the old catalog is still being read
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for row, target in targets:
            entry = find(row["id"]) if keeps_others else None
            if target.exists():
                data, recording, length = target.read_bytes(), RECORDING, _source(row).max_seq_len
            elif entry is not None:
                data, recording, length = stored(entry), entry.recording, entry.max_seq_len
            else:
                continue
            index.append(_entry(row, data, recording, length))
            archive.writestr(zipfile.ZipInfo(index[-1]["member"]), data, zipfile.ZIP_STORED)
        archive.writestr(zipfile.ZipInfo(INDEX), json.dumps(index), zipfile.ZIP_DEFLATED)
        known = configurations()["defaults"] if keeps_others else {}
        archive.writestr(zipfile.ZipInfo(CONFIGS), json.dumps(_configurations(rows, known)), zipfile.ZIP_DEFLATED)
    written.replace(out)
    print(f"{len(index)} models, {out.stat().st_size / 1e6:.2f} MB", file=sys.stderr)


def _entry(row: dict[str, Any], data: bytes, recording: int, max_seq_len: int | None) -> dict[str, Any]:
    """A model in the index of the archive."""
    return {
        "id": row["id"],
        "aliases": row.get("aliases", []),
        "task": row["task"],
        "parameters": row["parameters"],
        "max_seq_len": max_seq_len,
        "model_type": row["config"]["model_type"],
        "source": row["source"],
        "member": row["id"].replace("/", "--") + ".profile",
        "experts": load(data).experts,
        "tapes": row.get("tapes", "all"),
        "recording": recording,
    }


if __name__ == "__main__":
    main()
