"""What people reported to fit, to run out of memory, or to be the largest batch, against this package's verdict.

These are the published rows that state a verdict and whose job is fully described and expressible: model, GPUs, strategy,
precision, attention, checkpointing, micro-batch and tokens. Not expressible are selective checkpointing, torch.compile,
float8, tensor, pipeline and context parallelism, LoRA, Megatron-LM's and llm-foundry's own models, a model's own remote code,
fairscale, and offloaded checkpoints. Not described are unknown checkpointing or precision, batches padded to varying lengths
(t5-large in the seq2seq example), and the block size of the tables on GPT-2 with 2 x 24 GB (printed as 12). Of those last,
the rows whose verdict does not depend on the length are included, and their batches are checked at 128 tokens.

torchtitan's rows are in `tests/memory/test_published_memory.py`, which records torchtitan's own Llama: with transformers' its
13B did not fit at batch 2, because of the fp32 copies that transformers' norms save (12.7 GiB) and torchtitan's fused norm
does not.

A row fits if the device's memory holds what the allocator reserves, if need be by freeing cached memory again and again, and
what CUDA and NCCL take. There is no margin: what ran, ran.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matrix import of_today

from fsdp_advisor.estimator import estimate
from fsdp_advisor.job.parsing import make_request

pytestmark = pytest.mark.slow

TITAN, V100_16 = "23.65GiB", "15.78GiB"
"""As the rows' own out-of-memory messages give them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    source: str
    described: str
    fits: bool
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.source.split()[0]}: {self.described}"


def bigscience(described: str, fits: bool, size: int, offload: str = "none", **more: Any) -> Row:
    """HF GPT-2 on V100-32GB, DeepSpeed fp16 with checkpointing; the Trainer's buckets (`auto`: hidden^2)."""
    return Row(
        source="bigscience-workshop/bigscience experiments/gpt2.md",
        described=described,
        fits=fits,
        options={
            "model": "52B", "gpus": 64, "nnodes": 16, "gpu": "V100-32GB", "strategy": "zero3", "backend": "deepspeed",
            "offload": offload, "precision": "fp16-mixed", "optim": "adamw_torch", "attention": "eager",
            "micro_batch_size": size, "seq_len": 1024, "activation_checkpointing": "full", "framework": "trainer", **more,
        },
    )  # fmt: skip


def two_titans(described: str, fits: bool, model: str, strategy: str, size: int, **more: Any) -> Row:
    """run_clm on Titan RTX, eager attention, fp32 unless said."""
    return Row(
        source="huggingface/blog pytorch-fsdp.md, tables 1 and 2",
        described=described,
        fits=fits,
        options={
            "model": f"openai-community/{model}", "gpus": 2, "gpu": TITAN, "strategy": strategy, "precision": "fp32",
            "optim": "adamw_torch", "attention": "eager", "micro_batch_size": size, "seq_len": 128,
            "backend": "ddp" if strategy == "ddp" else "fsdp1", **more,
        },
    )  # fmt: skip


def bert(described: str, size: int, precision: str = "fp32", checkpointing: str = "none") -> Row:
    return Row(
        source="huggingface/transformers docs/source/en/perf_train_gpu_one.mdx (2022-23)",
        described=described,
        fits=True,
        options={
            "model": "google-bert/bert-large-uncased", "gpu": V100_16, "strategy": "ddp", "precision": precision,
            "optim": "adamw_torch", "attention": "eager", "micro_batch_size": size, "seq_len": 512,
            "activation_checkpointing": checkpointing,
        },
    )  # fmt: skip


NONE_OF_2021 = "optimizer"
"""What `"offload_optimizer": {"device": "none"}` meant to DeepSpeed 0.3.17, which bigscience ran: it asked whether the section was
there at all, so the optimizer's states and gradients went to the host (runtime/zero/stage3.py and runtime/engine.py of 0.3.16 and
0.4.0, `offload_optimizer_config is not None`; mended in August 2022, DeepSpeed pull 2208)."""

ROWS = (
    Row(
        source="huggingface/blog ram-efficient-pytorch-fsdp.md",
        described="16 x A100 80GB, max_seq_len 2048, per_device_train_batch_size 1: completed",
        fits=True,
        options={  # FSDP1's flat parameters were stepped one by one in 2023: no foreach lists, as in the fused optimizer
            "model": "meta-llama/Llama-2-70b-hf", "gpus": 16, "nnodes": 2, "gpu": "A100-80GB", "strategy": "zero3",
            "backend": "fsdp1", "optim": "adamw_torch_fused", "attention": "flash_attention_2", "micro_batch_size": 1,
            "seq_len": 2048, "activation_checkpointing": "full",
        },
    ),
    bigscience("64 | 52B | 3 | N | N | 8", True, 8, NONE_OF_2021),
    bigscience("64 | 52B | 3 | N | N | 10 ('10 is 99% gpu')", True, 10, NONE_OF_2021),
    bigscience("64 | 52B | 3 | Y | N | 12", True, 12, "optimizer"),
    bigscience("MICRO_BATCH_SIZE=12 # OOMs at 14", False, 14, "optimizer"),
    bigscience("64 | 52B | 3 | Y | Y | 12", True, 12, "parameters"),
    bigscience("64 | 52B | 2 | Y | N | OOM, even BS=4 (for want of host memory)", False, 4, "optimizer", strategy="zero2"),
    bigscience("16 | 25B | 4, full offload", True, 4, "parameters", model="25B", gpus=16, nnodes=4),
    bigscience("64 | 97B | 4, full offload", True, 4, "parameters", model="97B"),
    two_titans("gpt2-xl DDP | 1 | OOM", False, "gpt2-xl", "ddp", 1),
    two_titans("gpt2-xl DDP + FP16 | 1 | one GPU | OOM", False, "gpt2-xl", "ddp", 1, gpus=1, precision="fp16-mixed"),
    two_titans("gpt2-large DDP | 7", True, "gpt2-large", "ddp", 7),
    two_titans("gpt2-large DDP + FP16 | 7", True, "gpt2-large", "ddp", 7, precision="fp16-mixed"),
    two_titans("gpt2-large SHARD_GRAD_OP | 11", True, "gpt2-large", "zero2", 11),
    two_titans("gpt2-large FULL_SHARD | 15", True, "gpt2-large", "zero3", 15),
    two_titans("gpt2-large FULL_SHARD + Offload | 20", True, "gpt2-large", "zero3", 20, offload="parameters"),
    two_titans("gpt2-xl FSDP | 5", True, "gpt2-xl", "zero3", 5),
    two_titans("gpt2-xl FSDP + Offload | 10 | one GPU", True, "gpt2-xl", "zero3", 10, gpus=1, offload="parameters"),
    two_titans("gpt2-xl FSDP + Offload | 14", True, "gpt2-xl", "zero3", 14, offload="parameters"),
    Row(
        source="huggingface/blog accelerate-deepspeed.md, table 3",
        described="gpt2-xl DeepSpeed ZeRO-3, both offloaded | 16",
        fits=True,
        options={
            "model": "openai-community/gpt2-xl", "gpu": TITAN, "strategy": "zero3", "backend": "deepspeed",
            "offload": "parameters", "precision": "fp16-mixed", "optim": "adamw_torch", "attention": "eager",
            "micro_batch_size": 16, "seq_len": 128,
        },
    ),
    Row(
        source="huggingface/blog zero-deepspeed-fairscale.md",
        described="t5-3b fp16, batch 1, one RTX 3090: OOM, 21.37 GiB already allocated of 23.70",
        fits=False,
        options={
            "model": "google-t5/t5-3b", "gpu": "23.7GiB", "strategy": "ddp", "precision": "fp16-mixed",
            "optim": "adamw_torch", "attention": "eager", "micro_batch_size": 1, "seq_len": 128,
        },
    ),
    bert("bs 4: 14949 MB", 4),
    bert("bs 1: 8681 MB", 1),
    bert("bs 1 + gradient checkpointing: 6775 MB", 1, checkpointing="full"),
    bert("bs 4 + fp16: 13939 MB", 4, "fp16-mixed"),
    bert("bs 1 + gc + fp16: 7275 MB", 1, "fp16-mixed", "full"),
)  # fmt: skip

OF_SIZE = {"25B": (7168, 40), "52B": (8192, 64), "97B": (11264, 64)}
"""bigscience's GPT-2: hidden size and layers, 32 heads each."""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("configs")
    for name, (hidden, layers) in OF_SIZE.items():
        config = {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024,
            "n_embd": hidden, "n_layer": layers, "n_head": 32,
        }  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(config))
    return {name: str(folder / f"{name}.json") for name in OF_SIZE}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the rows record: rows of one model share it."""
    return tmp_path_factory.mktemp("recordings")


@pytest.mark.parametrize("row", of_today(ROWS, 6), ids=lambda row: row.name)
def test_published_verdict(
    row: Row, configs: dict[str, str], recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_ADVISOR_CACHE", str(recordings))
    model = row.options["model"]
    request = make_request({**row.options, "model": configs.get(model, model)})
    [found] = estimate(request).estimates
    assert found.needed_bytes is not None
    assert found.fits is row.fits
