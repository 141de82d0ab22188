"""Files of trainers that are not read are refused: a plain job in their place would be another one."""

from __future__ import annotations

import pytest

from fsdp_advisor.configs import from_texts
from fsdp_advisor.errors import UsageError


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=gpt2", "verl"),
        ("python3 recipe/dapo/main_dapo.py +actor_rollout_ref.model.path=gpt2", "verl"),
        ("deepspeed --module openrlhf.cli.train_sft --bf16 --pretrain gpt2", "OpenRLHF"),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24", "Megatron-LM"),
        ("python /opt/NeMo/examples/megatron_gpt_pretraining.py model.micro_batch_size=4", "NeMo"),
    ],
)
def test_a_launch_of_a_trainer_that_is_not_read_is_refused(text: str, trainer: str) -> None:
    with pytest.raises(UsageError, match=rf"run\.sh is for {trainer}, whose settings are not read"):
        from_texts({"run.sh": text})


def test_code_of_nemo_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"recipe\.py is for NeMo"):
        from_texts({"recipe.py": "from nemo.collections import llm\nllm.llama3_8b.pretrain_recipe(num_nodes=1)\n"})


@pytest.mark.parametrize(
    "script",
    ["train.py --lr 1", "pretrain_bert.py --model_name_or_path bert-base-uncased --per_device_train_batch_size 8"],
)
def test_other_scripts_are_read(script: str) -> None:
    assert from_texts({"run.sh": f"torchrun --nproc_per_node 8 {script}"}).options["gpus"] == 8
