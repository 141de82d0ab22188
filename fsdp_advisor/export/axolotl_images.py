"""axolotl's settings for images, and for a vision tower that is not trained.

Source: axolotl 0.19.0, train.py (`setup_model_and_tokenizer`), utils/freeze.py, utils/collators/mm_chat.py, processing_strategies.py,
loaders/adapter.py (`find_all_linear_names`), core/builders/causal.py, utils/schemas/{multimodal,validation}.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.configs.axolotl import frozen_modules
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.limits import task_limit
from fsdp_advisor.model.freezing import matching

_TEMPLATES = {"qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "llava": "llava", "gemma3": "gemma3"}
"""Type of a model -> axolotl's chat template for it."""


def images_limit(job: Job) -> str | None:
    """Why axolotl cannot train the job's model on its images, or on text alone; None if it can."""
    model, plan = job.image_model, job.plan
    if plan.images is None or model is None:
        if job.task == "image-text-to-text":
            return "its files for such models are written with images alone; use --images-per-sample"
        return task_limit(job)
    if model.model_type not in _TEMPLATES:
        return f"its chat template for models of type {model.model_type} is not known; known types: {', '.join(sorted(_TEMPLATES))}"
    if plan.images.per_sample > 1:
        return "it reads the first of a sample's images only; use --images-per-sample 1"
    if plan.images.max_pixels:
        return "its files set the size of every image; leave --image-max-pixels out"
    if plan.loss_code != "full" or plan.use_liger_kernel:
        return "its kernels for models with images are not estimated; use --loss full without Liger's kernels"
    if job.adaptation.peft.get("target_modules") == "all-linear":
        return (
            "its lora_target_linear takes the last part of each layer's name, which other modules of this model share; name them with"
            " --lora-target-modules"
        )
    towers = {name for name in model.parameters if frozen_modules([name])}
    if job.adaptation.freeze and matching(model.parameters, job.adaptation.freeze) != towers:
        return "its freeze_mm_modules freezes the vision tower and the projector together, and nothing else"
    return None


def images_keys(job: Job) -> dict[str, Any]:
    """axolotl's keys for the images of the job and for frozen towers; empty without images."""
    images, model = job.plan.images, job.image_model
    if images is None or model is None:
        return {}
    return {
        "datasets": [
            {"path": "HuggingFaceH4/llava-instruct-mix-vsft", "type": "chat_template", "field_messages": "messages"}
        ],
        "processor_type": "AutoProcessor",
        "chat_template": _TEMPLATES[model.model_type],
        "skip_prepare_dataset": True,
        "remove_unused_columns": False,
        "pad_to_sequence_len": False,
        **({"image_size": [images.width, images.height]} if images.height else {}),
        **({"freeze_mm_modules": True} if job.adaptation.freeze else {}),
    }


def images_notes(job: Job) -> list[str]:
    if job.plan.images is None:
        return []
    return [
        "axolotl neither cuts nor pads samples with images to sequence_len: a sample of the data set has at most"
        f" {job.plan.seq_len} tokens, those of its image included"
    ]
