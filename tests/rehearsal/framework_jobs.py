"""Scripts of small jobs: a Llama of four layers under DDP, FSDP2 and ZeRO-3 on two ranks, and a compiled layer on one."""

from __future__ import annotations

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip

HEAD = f"""
import torch._dynamo
import os, torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(**{ {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")} })
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)

def batches():
    for _ in range(4):
        yield torch.randint(0, 32000, (2, 512), device=device)
"""

LOOP = """
model.train()
for ids in batches():
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

DDP = (
    HEAD
    + """
dist.init_process_group("nccl")
model = LlamaForCausalLM(config).to(device)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
"""
    + LOOP
)

FSDP2 = (
    HEAD
    + """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
dist.init_process_group("nccl")
with torch.device("meta"):
    model = LlamaForCausalLM(config)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device=device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
"""
    + LOOP
)

DEEPSPEED = (
    HEAD
    + """
import deepspeed
settings = {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=settings):
    model = LlamaForCausalLM(config)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for ids in batches():
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
"""
)

MUON = """
import os, torch
import deepspeed
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, vocab_size=1000
)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
settings = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
    "zero_optimization": {"stage": STAGE, "reduce_scatter": STAGE < 3, "offload_optimizer": {"device": "DEVICE"}},
    "optimizer": {"type": "Muon", "params": {"lr": 1e-4, "torch_adam": True}},
}
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=settings, enabled=STAGE == 3):
    model = LlamaForCausalLM(config)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for _ in range(4):
    ids = torch.randint(0, 1000, (1, 32), device=device)
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
"""
"""Its peak is at Muon's updates, because the gradients are few."""

COMPILED = """
import torch
layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, device="cuda")
compiled = torch.compile(layer)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
for _ in range(4):
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(torch.randn(4, 512, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
