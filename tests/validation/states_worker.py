"""One rank of a real run over gloo: one step of a tiny model whose shapes do not divide, and the bytes of its states."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from ranks import as_ranks

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import TransformersSource
from fsdp_advisor.recording.fake import materialise
from fsdp_advisor.recording.storages import local_tensor
from fsdp_advisor.validation.engines import mesh_of, optimizer_for, wrap

CONFIG = {
    "model_type": "llama",
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "vocab_size": 101,
    "tie_word_embeddings": True,
}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors' distinct storages."""
    storages = {s._cdata: s.nbytes() for t in tensors if (s := local_tensor(t).untyped_storage()).nbytes()}
    return sum(storages.values())


def main() -> None:
    """The argument is a JSON list of plans. Rank 0 prints one line per plan: the bytes of its states."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for line in json.loads(sys.argv[1]):
        plan = Plan(**{**line, "mesh": Mesh(**line["mesh"])})
        source = TransformersSource(CONFIG, name="odd")
        model = source.build(torch.bfloat16 if plan.precision == "bf16" else torch.float32)
        layers = [layer for stack in source.stacks(model) for layer in stack.layers]
        materialise(model, None)  # real tensors, ties kept
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
        wrapped = wrap(model, layers, plan, mesh_of(plan, "cpu") if plan.backend != "ddp" else None, "cpu")
        optimizer = optimizer_for(wrapped, plan)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=plan.backend == "ddp" and plan.mixed)
        with autocast:
            loss = source.loss(wrapped, source.batch(plan.micro_batch_size, plan.seq_len))
        loss.backward()
        optimizer.step()
        parameters = list(wrapped.parameters())
        states = [
            value
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and (key != "step" or plan.optim == "adamw_torch_fused")
        ]
        kept = {
            "parameters": storage_bytes(parameters),
            "gradients": storage_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": storage_bytes(states),
        }
        if dist.get_rank() == 0:
            print(json.dumps(kept), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    as_ranks(main)
