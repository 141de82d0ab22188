"""Small models on a simulated GPU: plain training, mixtures of experts, generation. Prints one JSON object."""

import json
import sys

import torch

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def train(model, loss_of, steps=2):
    """Peaks allocated and reserved, and the last loss and norm."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), loss.item(), norm.item()]


def plain_loss(model):
    x = torch.randn(8, 128, 256, device="cuda")
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), torch.randint(0, 1000, (1024,), device="cuda"))


layer = torch.nn.TransformerEncoderLayer(256, 8, 512, batch_first=True, norm_first=True)
plain = torch.nn.Sequential(
    torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.nn.Linear(256, 1000)
)
found = {"plain": train(plain.cuda(), plain_loss)}
if "all" in sys.argv:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    ids = torch.randint(5, 1000, (3, 128)).cuda()
    mask = torch.ones_like(ids)
    mask[:, :16] = 0
    llama = LlamaForCausalLM(LlamaConfig(**SMALL)).cuda()
    found["generated"] = [
        list(llama.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0, **how).shape)
        for how in ({}, {"do_sample": True, "top_p": 0.9})
    ]
    for implementation in ("grouped_mm", "eager"):
        config = MixtralConfig(
            **SMALL, num_key_value_heads=4, num_local_experts=8, experts_implementation=implementation
        )
        mixtral = MixtralForCausalLM(config).cuda()
        found[implementation] = train(mixtral, lambda model: model(input_ids=ids, labels=ids, attention_mask=mask).loss)
        del mixtral
    from fsdp_advisor.rehearsal.inside.decisions import decisions

    found["experts"] = [
        [each["value"], each["count"]]
        for each in decisions()
        if "mixtral" in each["place"] and each["operation"] == "nonzero"
    ]
print("FOUND " + json.dumps(found))
