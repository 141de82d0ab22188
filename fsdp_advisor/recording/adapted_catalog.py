"""Record usual adapters on well-known models: `python -m fsdp_advisor.recording.adapted_catalog` writes `adapted.zip`.

Tapes in the existing archive are kept, and those that it lacks are recorded: all of a model take about ten minutes. A work folder keeps
finished models, so an interrupted run can be continued.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.job.adaptation import Adaptation, adaptation_of
from fsdp_advisor.job.choices import default_seq_len
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.adapted_catalog import PATH, adapted_profile, member, members, profile_name, profiles_of
from fsdp_advisor.model.attention import mixes_head_widths
from fsdp_advisor.model.gpu_tape_key import gpu_tape_keys
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.store import decompressed, dump
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey

MODELS = (
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-2-7b-hf", "mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3",
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B",
    "Qwen/Qwen2.5-72B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B",
    "google/gemma-2-9b", "google/gemma-3-1b-pt",
)  # fmt: skip
"""Base models that are often adapted and for which PEFT has default targets."""
DORA_MODELS = (
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "mistralai/Mistral-7B-v0.3", "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-8B",
)  # fmt: skip
"""The models of MODELS that are also recorded with DoRA."""
TOWERS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": "visual", "Qwen/Qwen2.5-VL-7B-Instruct": "visual", "Qwen/Qwen3-VL-8B-Instruct": "visual",
}  # fmt: skip
"""Vision-language model -> name of its vision tower, which is often frozen."""
LORA: dict[str, Any] = {"use_peft": True}
QLORA = {**LORA, "load_in_4bit": True}
SHARDED_QLORA = {**QLORA, "bnb_4bit_quant_storage": "bfloat16"}
DORA = {**LORA, "use_dora": True}
ALL_LINEAR = {"lora_target_modules": "all-linear"}
DTYPES: tuple[dict[str, Any], ...] = ({}, {"dtype": "bfloat16"})
"""A frozen base in fp32, as TRL loads it, and in bf16, as transformers does."""
FRAMEWORKS = ("torch", "trainer", "trl")


def methods(model_id: str) -> tuple[dict[str, Any], ...]:
    """Sets of options, one for each usual way to fine-tune the model."""
    if model_id in TOWERS:
        return ({"freeze": (TOWERS[model_id],)},)
    bases = (LORA, QLORA, SHARDED_QLORA, *((DORA,) if model_id in DORA_MODELS else ()))
    return tuple({**base, **dtype} for base in bases for dtype in DTYPES)


def requests(model_id: str) -> Iterator[EstimateRequest]:
    """The usual jobs of a model on one GPU and on eight: those with the defaults of each framework, as an estimate and as a search, and
    each method with full checkpointing and without.
    """
    from fsdp_advisor.assumptions import settled

    if model_id not in TOWERS:
        for base, targets, framework, gpus, kind in product(
            (LORA, QLORA), (ALL_LINEAR, {}), (*FRAMEWORKS, "axolotl", "llamafactory"), (1, 8), (EstimateRequest, RecommendRequest)
        ):  # fmt: skip
            yield settled(_request(kind, model_id, gpus, framework, {**base, **targets}))
    for method, framework, gpus, checkpointing, size in product(
        methods(model_id), FRAMEWORKS, (1, 8), ("none", "full"), (1, 2)
    ):
        if framework == "trl" and checkpointing == "none":
            continue  # TRL checkpoints by default
        options = {"activation_checkpointing": checkpointing, "micro_batch_size": size, **method}
        yield _request(EstimateRequest, model_id, gpus, framework, options)


def _request(
    kind: type[EstimateRequest], model_id: str, gpus: int, framework: str, options: Mapping[str, Any]
) -> EstimateRequest:
    return make_request({"model": model_id, "gpu": "H100-80GB", "gpus": gpus, "framework": framework, **options}, kind)


def _plans(request: EstimateRequest, seq_len: int) -> Iterator[Plan]:
    """The plans of a request. A search tries micro-batch 1 and larger ones, without checkpointing and with."""
    if not isinstance(request, RecommendRequest):
        yield from plans(request, seq_len=seq_len)
        return
    for policy, size in product(("none", "full"), (1, 2)):
        job = request.but(activation_checkpointing=policy, micro_batch_size=size).as_estimate
        yield from plans(job, seq_len=seq_len)


def _keys(request: EstimateRequest, profile: Profile) -> Iterator[TapeKey]:
    """The keys of the tapes that the answer to a request needs. A search needs no tape of a CPU."""
    from fsdp_advisor.tape_keys import needs_window, tape_key_of

    seq_len = default_seq_len(profile.max_seq_len)
    for plan in _plans(request, seq_len):
        key = tape_key_of(plan, profile)
        if not isinstance(request, RecommendRequest):
            yield key
        filled = needs_window(profile, key, plan)
        yield from gpu_tape_keys(key, window_filled=filled, mixes_head_widths=mixes_head_widths(profile))


def _without_storage(adaptation: Adaptation) -> Adaptation:
    """The adaptation with packed weights in uint8. A layer unpacks its weights, so a tape does not depend on the dtype in which they are
    stored. The exception are tapes of FSDP1, which flattens weights that are stored in floats; no usual job has FSDP1.
    """
    storage = {"bnb_4bit_quant_storage": "uint8"} if "bnb_4bit_quant_storage" in adaptation.quantization else {}
    return replace(adaptation, quantization={**adaptation.quantization, **storage})


def record(model_id: str, jobs: Iterable[EstimateRequest]) -> Iterator[tuple[Adaptation, Profile]]:
    """The adaptations of a model's jobs, each with a profile that has the tapes of these jobs and those of the archive."""
    model = resolve(model_id)
    adapted: dict[str, Resolved] = {}
    keys: dict[str, dict[TapeKey, None]] = {}
    for job in jobs:
        adaptation = adaptation_of(job)
        name = profile_name(adaptation)
        if name not in adapted:
            adapted[name] = model.adapted(adaptation)
        profile = adapted[name].profile
        assert profile is not None
        keys.setdefault(profile_name(_without_storage(adaptation)), {}).update(dict.fromkeys(_keys(job, profile)))
    tapes: dict[str, dict[str, Tape]] = {}
    for one in adapted.values():
        assert one.profile is not None
        shared = profile_name(_without_storage(one.adaptation))
        shipped = adapted_profile(model_id, one.adaptation)
        kept = (dict(shipped.tapes) if shipped else {}) | tapes.get(shared, {})
        one = replace(one, profile=replace(one.profile, tapes=kept))
        for key in keys[shared]:
            with contextlib.suppress(AdvisorError):  # the profile keeps the refusal
                one.tape(key)
        tapes[shared] = kept
        assert one.profile is not None
        yield one.adaptation, one.profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/adapted"), help="folder of finished models")
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--partial", action="store_true", help="only write the archive of the models recorded so far")
    options = parser.parse_args()
    for model_id in () if options.partial else (*MODELS, *TOWERS):
        done = options.work / f"{member(model_id)}.done"
        if done.exists():
            continue
        for adaptation, profile in record(model_id, requests(model_id)):
            write(options.work, model_id, adaptation, profile)
            refused = "".join(f"\n    {name}: {payload['message']}" for name, payload in profile.refusals.items())
            print(f"{model_id}: {adaptation.text}, {len(profile.tapes)} tapes{refused}", file=sys.stderr, flush=True)
        done.touch()
    archived = {name: dict(profiles_of(name)) for name in members()}
    for path in options.work.rglob("*.profile"):
        archived.setdefault(path.parent.name, {})[path.name] = decompressed(path.read_bytes())
    written = options.out.with_suffix(".partial")  # the old archive is still being read
    with zipfile.ZipFile(written, "w") as archive:
        for name, profiles in sorted(archived.items()):
            archive.writestr(zipfile.ZipInfo(name), _stored(profiles), zipfile.ZIP_LZMA)
    written.replace(options.out)
    print(f"{options.out.stat().st_size / 1e6:.2f} MB", file=sys.stderr)


def write(work: Path, model_id: str, adaptation: Adaptation, profile: Profile) -> None:
    """Keep a profile in the folder of finished models."""
    target = work / member(model_id) / profile_name(adaptation)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(dump(profile))


def _stored(profiles: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of the profiles, which compresses nothing."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, profile in sorted(profiles.items()):
            archive.writestr(zipfile.ZipInfo(name), profile)
    return data.getvalue()


if __name__ == "__main__":
    main()
