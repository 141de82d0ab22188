"""Measures the allocations of PEFT's `merge_and_unload` for a model with adapters. Prints one JSON object.

Arguments: the path of the model's config.json, the targets of the adapters, and JSON of {name: [bits of the base, whether its scales are
quantized, dtype of the adapters, whether it is DoRA]}. Result by name: the most bytes that merging allocates in addition. The base has
4 or 8 bits of bitsandbytes, or bf16.
"""

import gc
import json
import sys
import warnings

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

PATH, TARGETS = sys.argv[1], sys.argv[2].split(",")
RANK = 16
WORKSPACES = [torch.mm(*[torch.ones(8, 8, device="cuda", dtype=d)] * 2) for d in (torch.float32, torch.bfloat16)]
warnings.filterwarnings("ignore")


def quantized(linear: torch.nn.Linear, bits: int, nested: bool) -> torch.nn.Module:
    shape = linear.in_features, linear.out_features
    if bits == 8:
        return bnb.nn.Linear8bitLt(*shape, bias=False, has_fp16_weights=False).cuda()
    layer = bnb.nn.Linear4bit(*shape, bias=False, compress_statistics=nested, quant_type="nf4")
    return layer.to(torch.bfloat16).cuda()


def merged(bits: int | None, nested: bool, adapters: str, dora: bool) -> int:
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PATH), dtype=torch.bfloat16)
    for name, module in list(model.model.layers.named_modules()):
        if bits is not None and isinstance(module, torch.nn.Linear):
            model.model.layers.set_submodule(name, quantized(module, bits, nested))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    config = LoraConfig(r=RANK, target_modules=TARGETS, use_dora=dora)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=adapters == "float32")
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    adapted.merge_and_unload()
    return torch.cuda.max_memory_allocated() - before


print("FOUND " + json.dumps({name: merged(*each) for name, each in json.loads(sys.argv[3]).items()}))
