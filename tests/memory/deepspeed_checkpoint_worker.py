"""One rank of a real DeepSpeed run on the CPU that saves: ``deepspeed_checkpoint_worker.py FOLDER CASE...``.

A case is `STAGE-OPTIMIZER-DEVICE`: an optimizer of DeepSpeed's configuration, and the device of its offload. Rank 0 writes the bytes of
tensors of every file, and the peaks of the storages that `deepspeed.initialize` and ``zero.Init`` allocate.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # DeepSpeed compiles Muon's update

import deepspeed  # type: ignore[import-untyped]  # ships no types
import torch
import torch.distributed as dist
from checkpoint_worker import TINY
from ranks import as_ranks
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_advisor.validation.deepspeed_on_cpu import skip_shm_operator
from fsdp_advisor.validation.meter import StorageMeter

MODEL = TINY | {"hidden_size": 64, "intermediate_size": 80, "vocab_size": 1001}


def tensor_bytes(file: Path) -> int:
    """Bytes of the storages in a file that `torch.save` wrote."""
    with zipfile.ZipFile(file) as archive:
        return sum(i.file_size for i in archive.infolist() if "/data/" in i.filename)


def save(stage: int, optimizer: str, offload: str, out: Path) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "reduce_bucket_size": 100_000,
        "stage3_gather_16bit_weights_on_model_save": True,
        "reduce_scatter": optimizer != "Muon",
        "offload_optimizer": {"device": offload},
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3, "torch_adam": True}},
    }
    built = 0
    if stage == 3:
        with StorageMeter() as meter, deepspeed.zero.Init(config_dict_or_path=config):
            meter.begin("build")
            AutoModelForCausalLM.from_config(LlamaConfig(**MODEL), dtype=torch.bfloat16)
            built = meter.end().peaks["tensor_bytes"]
    model = AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).to(torch.bfloat16)
    with StorageMeter() as meter:
        for p in model.parameters():
            meter.ignore(p)
        meter.begin("initialize")
        engine, *_ = deepspeed.initialize(model=model, config=config)
        made = meter.end().peaks["tensor_bytes"]
    ids = torch.randint(0, 100, (1, 4))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(str(out), tag="tag")
    if stage == 3:
        engine.save_16bit_model(str(out))
    dist.barrier()
    files = {f.name: tensor_bytes(f) for f in sorted(out.rglob("*")) if f.suffix in (".pt", ".bin")}
    return {"files": files, "initialize_bytes": made, "build_bytes": built}


def main() -> None:
    folder, *cases = sys.argv[1:]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    skip_shm_operator()
    deepspeed.init_distributed("gloo")
    found = {}
    for case in cases:
        stage, optimizer, offload = case.split("-")
        out = Path(folder) / case
        if dist.get_rank() == 0:
            shutil.rmtree(out, ignore_errors=True)
        dist.barrier()
        found[case] = save(int(stage), optimizer, offload, out)
    if dist.get_rank() == 0:
        (Path(folder) / "files.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # at a normal exit DeepSpeed's threads sometimes abort


if __name__ == "__main__":
    as_ranks(main)
