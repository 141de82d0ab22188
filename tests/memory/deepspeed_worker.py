"""One process of a real DeepSpeed run on the CPU: ``deepspeed_worker.py CASES OUT``; rank 0 writes what it keeps.

Every live tensor storage is found through the garbage collector; storages that belong to no known attribute are listed as unknown.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # DeepSpeed compiles Muon's update

import deepspeed  # type: ignore[import-untyped]  # ships no types
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import optimization  # now, because packages that it imports keep tensors

from fsdp_advisor.validation.deepspeed_on_cpu import skip_shm_operator

HIDDEN, WIDTH, VOCABULARY, LAYERS = 13, 29, 37, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Odd(nn.Module):
    """Shapes that no number of ranks divides."""

    def __init__(self, *, tied: bool, frozen: bool, trains_embedding: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for block in self.layers if frozen else ():
            block.up.requires_grad_(False)
        self.embed.requires_grad_(trains_embedding)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits.float().logsumexp(-1).mean()


def storages() -> dict[int, int]:
    """Every live tensor storage: its identity and its bytes."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.Tensor) and thing.device.type != "meta":
                for tensor in (thing, thing.grad, thing._base):
                    if tensor is not None and (storage := tensor.untyped_storage()).nbytes():
                        found[storage._cdata] = storage.nbytes()
        except (ReferenceError, RuntimeError, NotImplementedError):  # noqa: PERF203  # what the collector holds may be half dead
            continue
    return found


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Bytes of live storages, and the highest; `engine` counts those that DeepSpeed's own code allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.known: dict[int, tuple[Any, int, bool]] = {}
        self.live = self.high = self.engine = self.engine_high = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            frame, ours = sys._getframe(2), False
            while frame is not None and not ours:
                ours = "/deepspeed/runtime/zero/part" in frame.f_code.co_filename
                frame = frame.f_back  # type: ignore[assignment]
            self.known[key] = (weakref.ref(storage, functools.partial(self.dead, key)), storage.nbytes(), ours)
            self.add(storage.nbytes(), ours)

    def dead(self, key: int, _: object) -> None:
        _, n_bytes, ours = self.known.pop(key)
        self.add(-n_bytes, ours)

    def add(self, n_bytes: int, ours: bool) -> None:
        self.live, self.engine = self.live + n_bytes, self.engine + ours * n_bytes
        self.high, self.engine_high = max(self.high, self.live), max(self.engine_high, self.engine)

    def restart(self) -> None:
        self.high, self.engine_high = self.live, self.engine


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors(value)


def classify(engine: Any, case: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The tensors in DeepSpeed's attributes, by category."""
    zero = engine.optimizer
    offloaded = case["offload"] != "none"
    steps = [s["step"] for s in zero.optimizer.state.values() if isinstance(s.get("step"), torch.Tensor)]
    state = [t for s in zero.optimizer.state.values() for t in tensors(s) if all(t is not step for step in steps)]
    scalars = [zero._global_grad_norm]
    if case["stage"] < 3:
        masters = zero.single_partition_of_fp32_groups
        names = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")
        pinned = [t for name in (*names, "accumulated_grads_in_cpu") for t in tensors(getattr(zero, name, None))]
        pinned += [*masters, *(p.grad for p in masters if p.grad is not None)]
        frozen = [p.data for p in engine.module.parameters() if not p.requires_grad]
        groups = {
            "parameters": [*zero.bit16_groups_flat, *frozen],
            "gradients": [],
            "optimizer": [*masters, *state, *steps, *scalars, *tensors(list(zero._muon_pending_momentum.values()))],
            "communication": [
                *tensors(getattr(zero, "temp_grad_buffer_for_gpu_offload", None)),
                *tensors(list(zero._muon_allgather_buffers.values())),
            ],
        }
        if offloaded:
            groups |= {"pinned": pinned, "pageable": state, "optimizer": [], "scalars": [*steps, *scalars]}
        return groups
    masters = zero.fp32_partitioned_groups_flat
    everything = list(engine.module.parameters())
    shards = [*tensors(getattr(zero, "lp_param_buffer", None)), *zero.param_groups_fp16_flat_cpu_memory]
    shards += [p.ds_tensor for p in everything if not p.requires_grad]
    whole = [p.data for p in everything if p.data.numel()]
    scalars.append(zero.inf_or_nan_tracker)
    groups = {
        "parameters": [*shards, *whole],
        "gradients": [zero.grad_partitions_flat_buffer],
        "optimizer": [*masters, *state, *steps, *scalars],
        "communication": [
            *(bucket.buffer for bucket in zero.ipg_buckets.values()),
            *tensors(list(zero._muon_allgather_buffers.values())),
        ],
    }
    if offloaded:
        pinned = [*groups["gradients"], *(p.grad for p in masters if p.grad is not None)]
        groups |= {"gradients": [], "optimizer": [], "scalars": [*steps, *scalars], "pageable": [*masters, *state]}
        if case["offload"] == "parameters":
            groups["parameters"], pinned = whole, [*pinned, *shards]
        groups["pinned"] = pinned
    return groups


def optimizer(name: str, framework: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the framework gives DeepSpeed."""
    match name:
        case "adamw_torch_fused":
            return torch.optim.AdamW(parameters, fused=True)
        case "adamw_torch":
            return torch.optim.AdamW(parameters, foreach=True)
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.1)
        case "sgd_momentum":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, foreach=True)
        case "adafactor" if framework == "trainer":
            options = {"scale_parameter": False, "relative_step": False, "lr": 1e-3}
            return optimization.Adafactor(parameters, **options)  # type: ignore[no-untyped-call]  # transformers' own
        case "adafactor":
            return torch.optim.Adafactor(parameters)
    raise ValueError(name)


def settle() -> None:
    """Wait, because gloo's threads keep the tensors of a collective alive for a moment after it is done."""
    gc.collect()
    time.sleep(0.02)


def run(case: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case["stage"], **case["zero"]}
    if case["offload"] != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if case["offload"] == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    bf16: dict[str, Any] = {"enabled": case["precision"] != "fp32"}
    if case["precision"] == "bf16":
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["accumulation"],
        "zero_optimization": zero,
        "bf16": bf16,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    shards_first = case["optim"] == "muon" and case["stage"] == 3  # the order of Muon's matrices depends on it
    if shards_first:
        zero["reduce_scatter"] = False
    gc.collect()
    gc.freeze()  # remaining objects belong to earlier cases: do not collect or list them again
    before = set(storages())
    watch = Watch()
    with watch:
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=shards_first):
            model = Odd(tied=case["tied"], frozen=case["frozen"], trains_embedding=case["trains_embedding"])
        if case["optim"] == "muon":
            config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True}}
            made: dict[str, Any] = {"model_parameters": model.parameters()}
        else:
            made = {"optimizer": optimizer(case["optim"], case["framework"], model.parameters())}
        engine, *_ = deepspeed.initialize(model=model, config=config, **made)
        del made
        ids = torch.randint(0, VOCABULARY, (2, 5))
        gathered, afterwards, steps = [], [], []
        for _ in range(4):
            settle()
            kept = watch.engine
            for _ in range(case["accumulation"]):
                watch.restart()
                loss = engine(ids)
                gathered.append(watch.engine_high - kept)
                afterwards.append(watch.engine - kept)
                engine.backward(loss)
                del loss
                settle()
                watch.restart()
                engine.step()
            settle()
            steps.append(watch.high - watch.live)
    del ids
    gc.collect()
    now = {key: n for key, n in storages().items() if key not in before}
    # skip the first micro-batch, which records the trace of modules; take the minimum, because gloo releases tensors late
    result: dict[str, Any] = {"step_high": min(steps[1:]), "gathered": (min(gathered[1:]), min(afterwards[1:]))}
    for name, group in classify(engine, case).items():
        keys = {t.untyped_storage()._cdata for t in group if isinstance(t, torch.Tensor)}
        result[name] = sorted(now.pop(key) for key in keys if key in now)
    result["unknown"] = sorted(now.values())
    engine.destroy()
    return result


def main() -> None:
    logging.disable(logging.WARNING)
    cases = json.loads(Path(sys.argv[1]).read_text())
    skip_shm_operator()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    # imports the compiler, as DeepSpeed's first engine would; frozen objects are skipped by collections
    torch.compile(len)
    results = [run(case) for case in cases]
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
