"""LLaMA-Factory's settings for images: the parts of the model that are frozen, the largest image, and the template.

Source: LLaMA-Factory 0.9.5, hparams/{model,finetuning}_args.py, model/adapter.py (`_setup_full_tuning`, `_setup_lora_tuning`),
model/model_utils/{visual,misc,liger_kernel}.py, data/mm_plugin.py (`_preprocess_image`), data/collator.py, extras/constants.py.
"""

from __future__ import annotations

import math
from typing import Any

from fsdp_advisor.configs.llamafactory_towers import ALL_FROZEN, KEYS, Frozen, adapted_modules, frozen_parameters
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.limits import task_limit
from fsdp_advisor.export.llamafactory_templates import chat_template
from fsdp_advisor.job.images import Images
from fsdp_advisor.model.freezing import matching

DATA_SET = "mllm_demo"
"""LLaMA-Factory's own example with one image in each sample."""
_TEMPLATES = {
    "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl_nothink", "qwen3_vl_moe": "qwen3_vl_nothink", "llava": "llava",
    "gemma3": "gemma3",
}  # fmt: skip
"""Type of a model -> its template, which also says how images are read. Only types whose images become the tokens that are estimated."""
_WITH_LIGER = ("qwen2_vl", "qwen2_5_vl", "llava", "gemma3")
"""The types among them that LLaMA-Factory gives Liger's kernels."""
_LEAST_PIXELS = 32 * 32
"""Its default of `image_min_pixels`."""


def images_limit(job: Job) -> str | None:
    """Why LLaMA-Factory cannot train the job's model on its images, or on text alone; None if it can."""
    model, plan = job.image_model, job.plan
    if plan.images is None or model is None:
        if job.task == "image-text-to-text":
            return "it adds an image to each batch of text, which is not estimated; use --images-per-sample"
        return task_limit(job)
    if job.task != "image-text-to-text" or model.model_type not in _TEMPLATES:
        known = ", ".join(sorted(_TEMPLATES))
        return f"the images that it makes for models of type {model.model_type} are not estimated; known types: {known}"
    if plan.task != "sft" or plan.packing != "none":
        return "its files with images are written for supervised fine-tuning without packing"
    if plan.loss_code == "liger" and model.model_type not in _WITH_LIGER:
        return f"it has no kernels of Liger for models of type {model.model_type}; use --loss auto"
    return _size_limit(plan.images) or (_frozen_limit(job) if _frozen(job) is None else None)


def images_keys(job: Job) -> dict[str, Any]:
    """LLaMA-Factory's keys for the images of the job and the frozen parts of its model; empty without images."""
    images, frozen = job.plan.images, _frozen(job)
    if images is None or frozen is None:
        return {}
    largest = images.max_pixels or images.height * images.width
    return {**({"image_max_pixels": largest} if images.height else {}), **dict(zip(KEYS, frozen, strict=True))}


def template(job: Job) -> str | None:
    """The template for the job's model; None if only LLaMA-Factory's default is known."""
    found = chat_template(job.model_name)
    return _TEMPLATES.get(job.image_model.model_type) if found is None and job.image_model is not None else found


def images_notes(job: Job) -> list[str]:
    """Notes on the data, and on what LLaMA-Factory keeps in another dtype."""
    if job.plan.images is None:
        return []
    found = [
        f"the key images of {DATA_SET} names the images of a sample; those of your data set have to be as many and as large as predicted,"
        f" and with their tokens a sample has at most {job.plan.seq_len} (cutoff_len)"
    ]
    if job.image_model is not None and chat_template(job.model_name) is None:
        found.append(f"template is that of models of type {job.image_model.model_type}: check that it is your model's")
    if job.adaptation.freeze and job.plan.mixed and job.plan.backend == "ddp":
        found.append("LLaMA-Factory keeps frozen parts in 16 bits, so it needs less memory than predicted")
    return found


def _size_limit(images: Images) -> str | None:
    """Why LLaMA-Factory changes the size of the images before the processor does, which then makes other tokens of them."""
    given, pixels = (images.width, images.height), images.width * images.height
    if not images.height or _LEAST_PIXELS <= pixels <= (images.max_pixels or pixels):
        return None
    factor = math.sqrt(max(images.max_pixels, _LEAST_PIXELS) / pixels)
    width, height = (int(side * factor) for side in given)
    return (
        f"it resizes images of {images.width} x {images.height} pixels before the processor does; for a prediction of that use --image-size"
        f" {width}x{height} without --image-max-pixels"
    )


def _frozen(job: Job) -> Frozen | None:
    """The values of its three switches with which LLaMA-Factory trains the job's parameters; None if there are none."""
    model = job.image_model
    if model is None:
        return None
    targets = job.adaptation.peft.get("target_modules")
    if job.adaptation.peft:
        if not isinstance(targets, list):
            return None
        wanted = model.named(targets)
        found = (f for f in ALL_FROZEN if adapted_modules(model.model_type, model.modules, targets, f) == wanted)
    else:
        wanted = matching(model.parameters, job.adaptation.freeze)
        found = (f for f in ALL_FROZEN if frozen_parameters(model.model_type, model.parameters, f) == wanted)
    return next(found, None)


def _frozen_limit(job: Job) -> str:
    if job.adaptation.peft:
        return (
            "its lora_target makes adapters in other modules of this model: name projections of the language model with"
            " --lora-target-modules, such as q_proj,v_proj"
        )
    if not job.adaptation.freeze:
        return "it cannot train every parameter of this model"
    return "it freezes the vision tower, the projector and the language model each as a whole"
