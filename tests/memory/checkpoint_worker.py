"""One rank of real loading and saving over gloo: ``checkpoint_worker.py FOLDER CASE...``. Each rank writes its measurements.

A second process samples the private memory in /proc/PID/status while a case loads. Memory from before the case is subtracted.
Each case runs first on a tiny model, so that imports and caches do not count.
"""

from __future__ import annotations

import functools
import gc
import io
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
from ranks import as_ranks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_advisor.validation.meter import StorageMeter

SMALL = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 16001, "tie_word_embeddings": False,
}  # fmt: skip
TINY = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 101,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

LOADINGS = 3
"""Runs of each load case, of which the highest counts: on a busy machine the sampler may miss a peak, but never adds one."""
DEVICE: dict[str, int] = {}
"""Peak of the bytes that would be on a GPU, measured by the current case."""
ON_DEVICE = ("fsdp1_rank0", "fsdp2_every_rank", "fsdp2_scattered")
"""Cases that measure DEVICE. It is the same in each run, and the memory of the process is not measured meanwhile."""
POLICY = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


SAMPLER = """
import os, sys, time
path, high = f"/proc/{sys.argv[1]}/status", 0
os.set_blocking(0, False)
print("ready", flush=True)
while True:
    with open(path) as status:
        high = max(high, next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")))
    try:
        if not os.read(0, 1):
            break
    except BlockingIOError:
        time.sleep(0.0003)
print(high)
"""
"""Runs in its own process, so the measured interpreter cannot delay it."""


class Host:
    """Private memory added since the context was entered: its peak and what is left at exit."""

    def __enter__(self) -> Host:
        gc.collect()
        command = [sys.executable, "-S", "-c", SAMPLER, str(os.getpid())]
        self._sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._sampler.stdout is not None
        self._sampler.stdout.readline()
        self._start, self._file = status("RssAnon"), status("RssFile")
        return self

    def __exit__(self, *_: object) -> None:
        end = status("RssAnon")
        high = int(self._sampler.communicate()[0]) * 1024
        self.high_bytes = max(high, end) - self._start
        self.left_bytes = end - self._start
        self.file_bytes = status("RssFile") - self._file


class HighWaterMark:
    """Peak memory added since the context was entered. The kernel tracks this peak exactly, but includes mapped pages of files."""

    def __enter__(self) -> HighWaterMark:
        gc.collect()
        self._start = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak
        return self

    def __exit__(self, *_: object) -> None:
        self.high_bytes = status("VmHWM") - self._start


def config(folder: Path) -> LlamaConfig:
    return LlamaConfig(**(SMALL if folder.name == "small" else TINY))


def meta(folder: Path) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config(folder))
    return model


def empty(folder: Path) -> nn.Module:
    """The model with zeros as its weights, which takes less time than random ones."""
    model = meta(folder).to_empty(device="cpu")
    for p in model.parameters():
        p.data.zero_()
    return model


def loaded(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.float32)
    return model


def to_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def fsdp1(model: nn.Module, **options: Any) -> FSDP:
    """Wrap on the CPU, where moving to the device does nothing."""
    usual = {"auto_wrap_policy": POLICY, "use_orig_params": True, "device_id": torch.device("cpu")}
    return FSDP(model, **(usual | options))


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:  # type: ignore[union-attr]  # a ModuleList
        fully_shard(layer)
    fully_shard(model)
    return model


# Loading: each is called with the folder of the checkpoint and returns the loaded model


def every_rank(folder: Path) -> nn.Module:
    return loaded(folder)


def every_rank_mapped(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.bfloat16)
    for p in model.parameters():
        p.sum()  # reads every page
    return model


def cpu_ram_efficient_loading(folder: Path) -> nn.Module:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    try:
        return loaded(folder)
    finally:
        del os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]


def fsdp1_without_device_id(folder: Path) -> nn.Module:
    return fsdp1(loaded(folder))


def fsdp1_rank0(folder: Path) -> nn.Module:
    """Load on rank 0, without the broadcast, which FSDP1 refuses for CPU modules. The storages that rank 1 allocates represent the
    GPU's memory.
    """
    model = loaded(folder) if dist.get_rank() == 0 else meta(folder)
    with StorageMeter() as meter:
        meter.begin("load")
        wrapped = fsdp1(model, param_init_fn=to_empty)
        DEVICE["high_bytes"] = meter.end().peaks["tensor_bytes"]
    return wrapped


def fsdp2_rank0(folder: Path) -> nn.Module:
    full = loaded(folder).state_dict() if dist.get_rank() == 0 else {}
    whole = list(full.values())  # alive until it is measured: the call below replaces the dictionary's values
    model = fsdp2(meta(folder)).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    model.full = whole  # type: ignore[assignment]
    return model


def fsdp2_sharded(folder: Path) -> nn.Module:
    model = fsdp2(meta(folder)).to_empty(device="cpu")
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "bf16")))
    set_model_state_dict(model, state)
    return model


def fsdp2_every_rank(folder: Path) -> nn.Module:
    """Load on every rank. Cloning represents the move to the GPU, and all storages allocated from then on the GPU's memory."""
    model = loaded(folder)

    def move(parameters: list[nn.Parameter], buffers: list[torch.Tensor], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            tensor.data = tensor.data.clone()

    before, _fsdp_init._move_states_to_device = _fsdp_init._move_states_to_device, move
    try:
        with StorageMeter() as meter:
            for tensor in (*model.parameters(), *model.buffers()):
                meter.ignore(tensor)
            meter.begin("load")
            fsdp2(model)
            DEVICE["high_bytes"] = meter.end().peaks["tensor_bytes"]
    finally:
        _fsdp_init._move_states_to_device = before
    return model


def fsdp2_scattered(folder: Path) -> nn.Module:
    """Load by accelerate's code for `cpu_ram_efficient_loading`. Cloning represents rank 0's move to the GPU."""
    full = loaded(folder).state_dict()
    model = fsdp2(meta(folder))
    accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0)
    to = torch.Tensor.to

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.clone() if args == ("cpu",) else to(tensor, *args, **kwargs)

    with StorageMeter() as meter, mock.patch.object(torch.Tensor, "to", moved):
        for tensor in full.values():
            meter.ignore(tensor)
        meter.begin("load")
        fsdp2_load_full_state_dict(accelerator, model, full)
        DEVICE["high_bytes"] = meter.end().peaks["tensor_bytes"]
    return model


# Saving: each is called with a wrapped model, its optimizer after a step (None: save the weights alone) and an empty folder

Optimizer = torch.optim.Optimizer | None


def fsdp1_states(model: FSDP, optimizer: Optimizer) -> dict[str, Any]:
    """State dicts of the current type. LOCAL_STATE_DICT has no state dict of the optimizer, so each rank saves its own states.

    Cloning represents the move to the host, which copies each gathered state.
    """
    states = {"model": model.state_dict()}
    if optimizer is not None:
        local = FSDP.get_state_dict_type(model).state_dict_type == StateDictType.LOCAL_STATE_DICT
        with mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone):
            states["optimizer"] = optimizer.state_dict() if local else FSDP.optim_state_dict(model, optimizer)
    return states


def save_fsdp1_full(model: FSDP, optimizer: Optimizer, out: Path) -> None:
    """Save a full state dict without `offload_to_cpu`, which would free tensors in use because the model is on the CPU already."""
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, FullOptimStateDictConfig(rank0_only=True)):
        states = fsdp1_states(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(states, out / "model.bin")


def save_fsdp1_full_on_every_rank(model: FSDP, optimizer: Optimizer, out: Path) -> None:
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    ):
        torch.save(fsdp1_states(model, optimizer), out / f"model_rank{dist.get_rank()}.bin")


def save_fsdp1_sharded(model: FSDP, optimizer: Optimizer, out: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)):
        dcp.save(fsdp1_states(model, optimizer), checkpoint_id=out)


def save_fsdp1_local(model: FSDP, optimizer: Optimizer, out: Path) -> None:
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(offload_to_cpu=False)):
        torch.save(fsdp1_states(model, optimizer), out / f"model_rank{dist.get_rank()}.bin")


def fsdp2_states(model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    states = {"model": get_model_state_dict(model, options=options)}
    if optimizer is not None:
        states["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    return states


def save_fsdp2_full(model: nn.Module, optimizer: Optimizer, out: Path) -> None:
    states = fsdp2_states(model, optimizer, StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(states, out / "model.pt")


def save_fsdp2_sharded(model: nn.Module, optimizer: Optimizer, out: Path) -> None:
    dcp.save(fsdp2_states(model, optimizer), checkpoint_id=out)


def save_ddp_save_pretrained(model: nn.Module, optimizer: Optimizer, out: Path) -> None:
    if dist.get_rank() == 0:
        model.save_pretrained(out)  # type: ignore[operator]  # of transformers
        if optimizer is not None:
            torch.save(optimizer.state_dict(), out / "optimizer.pt")


def save_ddp_full(model: nn.Module, optimizer: Optimizer, out: Path) -> None:
    if dist.get_rank() == 0:
        states = {"model": model.state_dict()} | ({"optimizer": optimizer.state_dict()} if optimizer else {})
        torch.save(states, out / "model.pt")


LOADING: dict[str, Callable[[Path], nn.Module]] = {
    f.__name__: f
    for f in (
        every_rank, every_rank_mapped, cpu_ram_efficient_loading, fsdp1_without_device_id, fsdp1_rank0,
        fsdp2_rank0, fsdp2_sharded, fsdp2_every_rank, fsdp2_scattered,
    )
}  # fmt: skip
SAVING: dict[str, Callable[[Any, Optimizer, Path], None]] = {
    f.__name__: f
    for f in (
        save_fsdp1_full, save_fsdp1_full_on_every_rank, save_fsdp1_sharded, save_fsdp1_local,
        save_fsdp2_full, save_fsdp2_sharded, save_ddp_save_pretrained, save_ddp_full,
    )
}  # fmt: skip


def tensor_bytes(path: Path) -> dict[str, int]:
    """Bytes of tensors in each file of a folder, by file name."""
    found = {}
    for file in sorted(path.iterdir()):
        if file.suffix in (".pt", ".bin"):
            with zipfile.ZipFile(file) as archive:
                found[file.name] = sum(i.file_size for i in archive.infolist() if "/data/" in i.filename)
        elif file.suffix == ".safetensors":
            with file.open("rb") as stream:
                (header,) = struct.unpack("<Q", stream.read(8))
            found[file.name] = file.stat().st_size - 8 - header
    if (path / ".metadata").exists():
        for info in FileSystemReader(path).read_metadata().storage_data.values():
            with (path / info.relative_path).open("rb") as stream:
                stream.seek(info.offset)
                item = torch.load(io.BytesIO(stream.read(info.length)), weights_only=False)
            size = item.numel() * item.element_size() if isinstance(item, torch.Tensor) else 0
            found[info.relative_path] = found.get(info.relative_path, 0) + size
    return found


def load(name: str, folder: Path) -> dict[str, Any]:
    if name in ON_DEVICE:
        dist.barrier()
        LOADING[name](folder)
        return {"device_bytes": DEVICE.pop("high_bytes")}
    LOADING[name](folder.parent / "tiny")
    runs = []
    for _ in range(LOADINGS):
        dist.barrier()
        with Host() as host:
            model = LOADING[name](folder)
        del model
        runs.append(host)
    host = max(runs, key=lambda run: run.high_bytes)
    return {"high_bytes": host.high_bytes, "left_bytes": host.left_bytes, "file_bytes": host.file_bytes}


def stepped_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save(name: str, folder: Path) -> dict[str, Any]:
    """Save the weights, and, if the name ends in `_resumable`, the optimizer's state."""
    for place in (folder.parent / "tiny", folder):
        model = empty(place)
        if name.startswith("save_fsdp1"):
            model = fsdp1(model, use_orig_params="flat" not in name)
        elif name.startswith("save_fsdp2"):
            model = fsdp2(model)
        out = place / name
        if dist.get_rank() == 0:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
        dist.barrier()
        optimizer = stepped_optimizer(model) if name.endswith("_resumable") else None
        with HighWaterMark() as host:
            SAVING[name.replace("flat", "").removesuffix("_resumable")](model, optimizer, out)
        del model, optimizer
        dist.barrier()
    files = tensor_bytes(out) if dist.get_rank() == 0 else {}
    if dist.get_rank() == 0:
        shutil.rmtree(out)
    return {"high_bytes": host.high_bytes, "files": files}  # no file is mapped


def main() -> None:
    folder, *cases = sys.argv[1:]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("tiny", "small"):
        place = Path(folder) / name
        if dist.get_rank() == 0:
            place.mkdir(exist_ok=True)
            AutoModelForCausalLM.from_config(config(place)).to(torch.bfloat16).save_pretrained(place / "bf16")
    dist.barrier()
    gc.collect()
    gc.freeze()  # collections skip what the imports left
    measured = {}
    for case in cases:
        run = load if case in LOADING else save
        measured[case] = run(case, Path(folder) / "small")
        gc.collect()
        dist.barrier()
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    as_ranks(main)
