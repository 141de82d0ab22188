"""Exports of vision-language jobs with images, and their way back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from export_jobs import job, plan

from fsdp_advisor.configs import complete, from_texts
from fsdp_advisor.export import TARGETS, Job, export
from fsdp_advisor.job.adaptation import Adaptation, launched
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.images import Images
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model import catalog
from fsdp_advisor.model.multimodal import ImageModel

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct"
ONE = Images(1, 768, 1024, 0)
GIVEN = {"gpus": 8, "images_per_sample": 1, "image_size": "1024x768"}
"""What no consumer's file contains."""
LLAVA_FIRST_STAGE = ("language_model", "lm_head", "vision_tower")


def lora(*modules: str) -> Adaptation:
    return Adaptation(peft={"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(modules)})


def of_model(
    model: str = QWEN, adaptation: Adaptation | None = None, images: Images | None = ONE, **changes: Any
) -> Job:
    """A job of LLaMA-Factory under ZeRO-3 with images."""
    entry = catalog.find(model)
    assert entry is not None
    values = {"framework": "llamafactory", "images": images, **changes}
    return job(
        plan("zero3", "deepspeed", **values),
        model_name=model,
        task=entry.task,
        image_model=ImageModel.of(catalog.profile(entry)),
        adaptation=adaptation or Adaptation(),
    )


@pytest.mark.parametrize(
    ("model", "adaptation", "frozen"),
    [
        (QWEN, Adaptation(freeze=("visual",)), (True, True, False)),
        (QWEN, Adaptation(freeze=("visual.blocks", "visual.patch_embed")), (True, False, False)),
        (QWEN, Adaptation(freeze=("visual.merger",)), (False, True, False)),
        (QWEN, Adaptation(), (False, False, False)),
        (QWEN, lora("q_proj", "v_proj"), (True, True, False)),
        (QWEN, lora("qkv"), (False, True, False)),
        ("Qwen/Qwen3-VL-8B-Instruct", Adaptation(freeze=("visual",)), (True, True, False)),
        ("llava-hf/llava-1.5-7b-hf", Adaptation(freeze=("multi_modal_projector", "vision_tower")), (True, True, False)),
        ("llava-hf/llava-1.5-7b-hf", Adaptation(freeze=LLAVA_FIRST_STAGE), (True, False, True)),
    ],
)  # fmt: skip
def test_llamafactory_freezes_the_parts_of_the_job_and_reads_back(
    model: str, adaptation: Adaptation, frozen: tuple[bool, ...]
) -> None:
    of = of_model(model, adaptation)
    exported = export("llamafactory", of)
    keys = yaml.safe_load(exported.text)
    switches = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
    assert tuple(keys[key] for key in switches) == frozen
    assert (keys["dataset"], keys["image_max_pixels"]) == ("mllm_demo", 1024 * 768)
    request = make_request(complete(from_texts({exported.file_name: exported.text}), GIVEN).options)
    read = launched(request)
    (found,) = plans(request, seq_len=request.seq_len or 0)
    assert (read.freeze, {k: v for k, v in read.peft.items() if v}) == (
        adaptation.freeze,
        {k: v for k, v in adaptation.peft.items() if v},
    )
    assert (found.images, found.framework, found.backend, found.strategy) == (ONE, "llamafactory", "deepspeed", "zero3")


@pytest.mark.parametrize(
    ("model", "template"),
    [
        (QWEN, "qwen2_vl"), ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl_nothink"), ("Qwen/Qwen3-VL-8B-Thinking", "qwen3_vl"),
        ("llava-hf/llava-1.5-7b-hf", "llava"),
    ],
)  # fmt: skip
def test_llamafactory_s_template_reads_the_model_s_images(model: str, template: str) -> None:
    found = export("llamafactory", of_model(model))
    assert yaml.safe_load(found.text)["template"] == template
    assert any("mllm_demo" in note and "2048" in note for note in found.notes)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (of_model(adaptation=Adaptation(freeze=("visual.blocks",))), "each as a whole"),
        (of_model(adaptation=Adaptation(freeze=("embed_tokens",))), "each as a whole"),
        (of_model(adaptation=lora("proj")), "--lora-target-modules"),  # "proj" is also a part of o_proj
        (of_model(images=None), "use --images-per-sample"),
        (of_model(images=Images(1, 768, 1024, 589_824)), "use --image-size 886x665"),
        (of_model("OpenGVLab/InternVL3-1B-hf"), "type internvl"),
        (of_model("Qwen/Qwen3-VL-8B-Instruct", loss_code="liger"), "no kernels of Liger"),
    ],
)
def test_what_llamafactory_does_not_do_with_images_is_refused(of: Job, reason: str) -> None:
    assert reason in (TARGETS["llamafactory"].unsupported(of) or "")


@pytest.mark.parametrize("adaptation", [Adaptation(), lora("q_proj", "v_proj")])
def test_trl_s_images_read_back(adaptation: Adaptation) -> None:
    of = of_model(adaptation=adaptation, framework="trl", loss_code="trl")
    exported = export("trl", of)
    assert yaml.safe_load(exported.text)["dataset_name"] == "trl-lib/llava-instruct-mix"
    assert any("a column images" in note and "2048" in note for note in exported.notes)
    request = make_request(complete(from_texts({exported.file_name: exported.text}), GIVEN).options)
    (found,) = plans(request, seq_len=request.seq_len or 0)
    assert {k: v for k, v in launched(request).peft.items() if v} == {k: v for k, v in adaptation.peft.items() if v}
    assert (request.model, found.images, found.framework, found.loss_code) == (QWEN, ONE, "trl", "trl")


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (of_model(adaptation=Adaptation(freeze=("visual",))), "no option for the parameters to freeze"),
        (of_model(images=Images(1, 768, 1024, 589_824)), "leave --image-max-pixels out"),
        (of_model(task="dpo"), "its dpo script trains only causal language models"),
    ],
)
def test_what_trl_s_script_does_not_do_with_images_is_refused(of: Job, reason: str) -> None:
    of = replace(of, plan=replace(of.plan, framework="trl", loss_code="trl"))
    assert reason in (TARGETS["trl"].unsupported(of) or "")


@pytest.mark.parametrize(
    ("model", "adaptation"),
    [
        (QWEN, Adaptation(freeze=("visual",))),
        (QWEN, Adaptation()),
        (QWEN, lora("q_proj", "v_proj")),
        ("llava-hf/llava-1.5-7b-hf", Adaptation(freeze=("multi_modal_projector", "vision_tower"))),
    ],
)
def test_axolotl_s_images_and_frozen_towers_read_back(model: str, adaptation: Adaptation) -> None:
    exported = export("axolotl", of_model(model, adaptation, framework="axolotl"))
    keys = yaml.safe_load(exported.text)
    assert (keys["processor_type"], keys["skip_prepare_dataset"], keys["remove_unused_columns"]) == (
        "AutoProcessor",
        True,
        False,
    )
    assert (keys["sample_packing"], keys.get("freeze_mm_modules", False)) == (False, bool(adaptation.freeze))
    given = {"gpus": 8, "images_per_sample": 1}
    request = make_request(complete(from_texts({exported.file_name: exported.text}), given).options)
    (found,) = plans(request, seq_len=request.seq_len or 0)
    read = launched(request)
    assert (read.freeze, {k: v for k, v in read.peft.items() if v}) == (
        adaptation.freeze,
        {k: v for k, v in adaptation.peft.items() if v},
    )
    assert (request.model, found.images, found.framework, found.backend) == (model, ONE, "axolotl", "deepspeed")


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (of_model(adaptation=Adaptation(freeze=("visual.blocks",))), "together, and nothing else"),
        (of_model(adaptation=Adaptation(peft={"peft_type": "LORA", "target_modules": "all-linear"})), "the last part"),
        (of_model(images=Images(2, 768, 1024, 0)), "use --images-per-sample 1"),
        (of_model(images=Images(1, 768, 1024, 589_824)), "leave --image-max-pixels out"),
        (of_model(images=None), "with images alone"),
        (of_model("OpenGVLab/InternVL3-1B-hf"), "type internvl"),
        (of_model(loss_code="liger"), "use --loss full"),
    ],
)
def test_what_axolotl_does_not_do_with_images_is_refused(of: Job, reason: str) -> None:
    of = replace(of, plan=replace(of.plan, framework="axolotl"))
    assert reason in (TARGETS["axolotl"].unsupported(of) or "")
