"""Peaks of training steps of vision-language models with images, in a plain loop under DDP's autocast, or in half precision.

Argument: for each job the model's configuration, the precision, the images, the micro-batch, the length, and whether Liger's kernels are
applied as the Trainer does, as JSON. The batch is made as a processor makes it (`fsdp_advisor.recording.images`), and moved to the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from training import print_peaks
from transformers import AutoConfig, AutoModelForImageTextToText

from fsdp_advisor.job.images import Images
from fsdp_advisor.recording import TransformersSource
from fsdp_advisor.recording.images import with_images


def measured(job: list[Any]) -> int:
    config, precision, images, batch, length, by_liger = job
    half = precision == "bf16"
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(**config), dtype=torch.bfloat16 if half else torch.float32
    )
    if by_liger:
        # imported here, because it initializes CUDA, after which a process cannot fork
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    model.cuda().train()
    source = with_images(TransformersSource(config, name="model", task="image-text-to-text"), Images(*images))
    source.configure(model, attention="sdpa", checkpointing="none")
    inputs = {name: tensor.cuda() for name, tensor in source.batch(batch, length).items()}
    if half:
        inputs = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=not half):
            loss = source.loss(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    print_peaks(measured)
