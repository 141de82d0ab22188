"""The published runs as inputs of the time model (profile, tape, plan, GPU, network), or the reason why a run has no such input.

`published.json` has the rows as published, with their sources; `profiles.zip` has the models that the catalog lacks, recorded from their
published architecture by `python tests/timing/record.py`.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from published_split import part_of

from fsdp_advisor.hardware import Gpu, Link, find_gpu, find_interconnect
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model import catalog
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import load
from fsdp_advisor.model.tape import ROOT, Polynomial, Segment, Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.timing.achieved import BUS_SHARE

HERE = Path(__file__).parent
PROFILES = HERE / "profiles.zip"

CATALOG = {
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
    "Llama-2-13B": "meta-llama/Llama-2-13b-hf",
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "CodeLlama-34B (fms's Llama 34b)": "codellama/CodeLlama-34b-hf",
    "ibm-granite/granite-7b-base (Llama-2 7B arch)": "meta-llama/Llama-2-7b-hf",
}
TUTORIAL_GPUS = "deepspeedai/DeepSpeed docs/_tutorials"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run as an input of the time model."""

    id: str
    source: str
    part: str
    model: str
    profile: Profile
    tape: Tape
    plan: Plan
    gpu: Gpu
    between: Link
    checkpointing: str
    measured_seconds: float  # per optimizer step

    @property
    def job(self) -> tuple[str, ...]:
        """A key that is equal for two rows of one source that differ only in strategy or checkpointing."""
        p = self.plan
        sizes = (p.micro_batch_size, p.seq_len, p.world_size, p.gradient_accumulation_steps)
        return (self.source, self.model, self.gpu.name, p.precision, *map(str, sizes))


def published() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((HERE / "published.json").read_text())
    return rows


def why_not_predictable(row: dict[str, Any]) -> str | None:
    """Why a row cannot be an input of the time model; None if it can."""
    measured = row["measured"]
    if not any(measured.get(k) for k in ("tokens_per_s_per_gpu", "seconds_per_step")):
        return "no speed was measured"
    scope = row["scope"]
    if scope.startswith("needs") or scope == "lora":
        return f"another kind of training: {scope}"
    if row["compile"] not in ("none", "unknown"):
        return f"compiled: {row['compile']}"
    if "NO_SHARD" in row["strategy"]:
        return "FSDP1's NO_SHARD is no strategy of this tool"
    if row["micro_batch"] is None or row["seq_len"] is None:
        return "the micro-batch or the length is not stated"
    if "activation checkpoints" in row["offload"]:
        return "activation checkpoints in host memory"
    return None


def predictable_rows() -> tuple[Row, ...]:
    """All rows that can be inputs of the time model."""
    return tuple(_row(row) for row in published() if why_not_predictable(row) is None)


def _row(row: dict[str, Any]) -> Row:
    plan, checkpointing = plan_of(row)
    profile = _profile(row)
    gpu, between = _machine(row, plan)
    tokens = plan.micro_batch_size * plan.seq_len * plan.gradient_accumulation_steps
    measured = row["measured"]
    rate = measured["tokens_per_s_per_gpu"]
    seconds = tokens / rate if rate else measured["seconds_per_step"]
    return Row(
        id=row["id"],
        source=row["source"],
        part=part_of(row),
        model=row["model"],
        profile=profile,
        tape=_tape(profile, plan, checkpointing),
        plan=plan,
        gpu=gpu,
        between=between,
        checkpointing=checkpointing,
        measured_seconds=seconds,
    )


def plan_of(row: dict[str, Any]) -> tuple[Plan, str]:
    """The plan of a row that can be an input, and its checkpointing. `plan` in a row has what the source says of these in prose, or what
    its numbers imply.
    """
    stated = row["plan"]
    strategy, gpus = stated["strategy"], row["n_gpus"]
    first = re.split(r"[ ,(:]", row["precision"])[0]
    precision = {"fp32": "fp32", "fp16": "fp16-mixed", "bf16-weights": "bf16"}.get(first, "bf16-mixed")
    nodes = max(1, gpus // _per_node(row))
    eager = "eager" in row["attention"] or "unfused" in row["attention"] or "Multihead" in row["attention"]
    by_lightning = "pytorch-lightning" in row["source"]
    shards = 1 if strategy == "ddp" else gpus
    checkpointing = stated["activation_checkpointing"]
    plan = Plan(
        strategy=strategy,
        backend=stated["backend"],
        offload=stated["offload"],
        mesh=Mesh(dp_shard=shards, dp_replicate=gpus // shards, nnodes=nodes),
        precision=precision,
        optim="adamw_torch" if by_lightning or gpus == 1 else "adamw_torch_fused",
        micro_batch_size=row["micro_batch"],
        seq_len=row["seq_len"],
        gradient_accumulation_steps=stated["gradient_accumulation_steps"],
        activation_checkpointing="full" if checkpointing == "full" else "none",
        attention="eager" if eager else "flash_attention_2",
    )
    return plan, checkpointing


def _per_node(row: dict[str, Any]) -> int:
    if row["source"].startswith("bigscience"):
        return 4  # Jean Zay: 4 x V100 per node
    return 16 if row["source"].startswith(TUTORIAL_GPUS) else 8  # DGX-2


def _machine(row: dict[str, Any], plan: Plan) -> tuple[Gpu, Link]:
    name = row["gpu"]
    if "V100" in name:
        gpu = find_gpu("V100-16GB" if "16GB" in name else "V100-32GB")
        if row["source"].startswith("bigscience"):
            return gpu, _jean_zay(gpu)
        return gpu, find_interconnect("8x100Gb/s", gpu, 16)  # DGX-2
    if "A100" in name:
        gpu = find_gpu("A100-40GB" if "40" in name else "A100-80GB")
        usual = "200Gb/s"  # llm-foundry: 1600 Gb/s RoCE per node; DGX A100 elsewhere
    else:
        gpu = find_gpu("H100-96GB" if "HBM2e" in name else "H100-80GB")
        usual = "400Gb/s"
    return gpu, find_interconnect(row.get("network", usual), gpu, 8)


def _jean_zay(gpu: Gpu) -> Link:
    """The network of Jean Zay's nodes of 4 V100, at the rate that NCCL reached on it.

    Each GPU has an Omni-Path adapter of 100 Gb/s, but an all-reduce of 4 GB over 16 nodes ran at 55 Gb/s (size * 2 / time; 44 to
    57 over longer runs), because NCCL 2.7 did not use the adapters fully.
    Source: bigscience-workshop/bigscience experiments/bandwidth/README.md, n16_32gb_all_reduce_bench.txt.
    """
    link = find_interconnect("100Gb/s", gpu, 4)
    bus_bytes_per_s = 55e9 / 8 * 63 / 64
    return replace(link, name="Omni-Path, as measured", bytes_per_s=bus_bytes_per_s / 4 / BUS_SHARE[link.kind])


# Models


def config_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """The transformers configuration of a model that the catalog lacks; None if the catalog has the model, or it has no configuration."""
    model, arch = row["model"], row["arch"] or {}
    if model in CATALOG or "lightning" in model or model.startswith("bert"):
        return None
    if model.startswith("Qwen/"):
        small = model.endswith("1_8B")
        return {
            "model_type": "qwen2", "hidden_size": 2048 if small else 4096, "num_hidden_layers": 24 if small else 32,
            "num_attention_heads": 16 if small else 32, "num_key_value_heads": 16 if small else 32,
            "intermediate_size": 5504 if small else 11008, "vocab_size": 151936, "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        }  # fmt: skip
    eager_gpt2 = "MPT" not in model
    return {
        "model_type": "gpt2", "n_embd": arch["hidden"], "n_layer": arch["layers"], "n_head": arch["heads"],
        "n_inner": 4 * arch["hidden"], "vocab_size": arch["vocab"],
        "n_positions": max(row["seq_len"], arch.get("positions", 1024)),
        "activation_function": "gelu_new" if eager_gpt2 else "gelu",
        **({} if eager_gpt2 else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    }  # fmt: skip


def key_of(row: dict[str, Any]) -> str:
    """The name of the row's recorded profile in `profiles.zip`."""
    config = config_of(row)
    if config is None:
        return "bert-large-classification" if row["model"].startswith("bert") else "lightning-transformer"
    return "-".join(str(v) for v in config.values())


def variant_key(plan: Plan, checkpointing: str) -> str:
    engine = plan.backend if plan.backend.startswith("fsdp") else "plain"
    precision = "bf16-mixed" if plan.precision == "fp16-mixed" else plan.precision
    if plan.backend == "deepspeed" and plan.mixed:
        precision = "bf16"
    flash = plan.attention == "flash_attention_2"
    single = plan.micro_batch_size == 1 and not flash
    return TapeKey(engine, precision, plan.attention, checkpointing, single, device="gpu" if flash else "cpu").name


def _profile(row: dict[str, Any]) -> Profile:
    if row["model"] in CATALOG:
        entry = catalog.find(CATALOG[row["model"]])
        assert entry is not None
        return catalog.profile(entry)
    return _recorded(key_of(row))


@lru_cache
def _recorded(key: str) -> Profile:
    with zipfile.ZipFile(PROFILES) as archive:
        return load(archive.read(key + ".profile"))


# Tapes


def _tape(profile: Profile, plan: Plan, checkpointing: str) -> Tape:
    """The plan's tape, and for selective checkpointing one made of the tapes without and with it."""
    if not checkpointing.startswith("selective"):
        return profile.tapes[variant_key(plan, plan.activation_checkpointing)]
    none, full = (profile.tapes[variant_key(plan, name)] for name in ("none", "full"))
    forward = {(s.stack, s.layer): s for s in none.segments if s.phase == "forward"}
    segments = []
    for without, fully in zip(none.segments, full.segments, strict=True):
        if without.phase == "forward" or without.stack == ROOT:
            segments.append(without)
        elif checkpointing == "selective layer":  # every second layer
            segments.append(_mixed(without, fully, 0.5, 0.5, 0.5))
        else:  # per operator: every second product and all of attention are kept, the rest is recomputed
            segments.append(_mixed(without, fully, 0.5, 0.0, 1.0))
    assert forward
    return Tape(none.sizes, tuple(segments))


def _mixed(without: Segment, fully: Segment, matmul: float, attention: float, pointwise: float) -> Segment:
    def between(one: Polynomial, other: Polynomial, share: float) -> Polynomial:
        a, b, c, d, e, f = (round(x + share * (y - x)) for x, y in zip(one, other, strict=True))
        return a, b, c, d, e, f

    return replace(
        without,
        matmul_flops=between(without.matmul_flops, fully.matmul_flops, matmul),
        attention_flops=between(without.attention_flops, fully.attention_flops, attention),
        traffic_bytes=between(without.traffic_bytes, fully.traffic_bytes, pointwise),
        operators=round(without.operators + pointwise * (fully.operators - without.operators)),
    )
