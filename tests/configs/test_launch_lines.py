"""Launch lines and batch scripts as users write them."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from fsdp_advisor.configs import complete, from_paths, from_texts
from fsdp_advisor.configs.launchers import FLAGS
from fsdp_advisor.errors import UsageError

ARGUMENTS = "train.py --model_name_or_path gpt2 --bf16"
READ = {"model": "gpt2", "precision": "bf16-mixed", "framework": "trainer", "strategy": "ddp"}
"""What the arguments say, and no launcher contradicts."""


def said(text: str, kind: str, **files: str) -> str:
    named = {name.replace("__", "."): content for name, content in files.items()}
    found = from_texts({"run.sh": text, **named})
    return "\n".join(item for reading in found.readings for item in getattr(reading, kind))


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("python -u {}", {}),
        ("python3.11 -X dev -u {}", {}),
        ("uv run {}", {}),
        ("poetry run python {}", {}),
        ("conda run -n trl python {}", {}),
        ("accelerate launch {}", {}),
        ("accelerate launch --num_processes 4 --quiet {}", {"gpus": 4}),
        ("accelerate launch --quiet --num_processes 4 {}", {"gpus": 4}),
        ("accelerate launch --multi-gpu --num-processes=4 {}", {"gpus": 4, "backend": "ddp"}),
        ("python -m accelerate.commands.launch --num_processes 2 --debug {}", {"gpus": 2}),
        ("deepspeed --no_local_rank {}", {}),
        ("deepspeed --num_gpus 8 --num_nodes 2 --force_multi {}", {"gpus": 16, "nnodes": 2}),
        ("deepspeed --include localhost:0,1,2,3 --master_port 60000 {}", {"gpus": 4}),
        ("torchrun --nproc_per_node 4 {}", {"gpus": 4, "nnodes": 1}),
        ("torchrun {}", {"gpus": 1, "nnodes": 1}),
        ("torchrun --standalone --nproc-per-node=8 -r 3 --tee 3 {}", {"gpus": 8}),
        ("torchrun --nnodes=1:2 --nproc_per_node=8 --max-restarts 3 {}", {"gpus": 16, "nnodes": 2}),
        ("python -m torch.distributed.run --nproc_per_node 4 {}", {"gpus": 4}),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=8 {}", {"gpus": 8}),
        ("CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=8 torchrun --nproc_per_node gpu {}", {"gpus": 2}),
        ("export CUDA_VISIBLE_DEVICES=0,1,2\ndeepspeed {}", {"gpus": 3}),
        ("CUDA_VISIBLE_DEVICES=4,5 accelerate launch {}", {"gpus": 2}),
        ("nohup torchrun --nproc_per_node 8 {} > train.log 2>&1 &", {"gpus": 8}),
        ("torchrun --nproc_per_node 8 {} 2>&1 | tee -a train.log", {"gpus": 8}),
        ("cd /src && time torchrun --nproc_per_node 8 {}; echo done", {"gpus": 8}),
        ("if [ -n \"$RANK\" ]; then torchrun --nproc_per_node 8 {}; fi", {"gpus": 8}),
        ("bash -c 'torchrun --nproc_per_node 8 {}'", {"gpus": 8}),
        ("srun --label bash -lc \"torchrun --nproc_per_node 8 {} --output_dir \\$OUT\"", {"gpus": 8}),
        ("eval \"torchrun --nproc_per_node 8 {}\"", {"gpus": 8}),
        ("docker run --gpus all -v $PWD:/src nvcr.io/nvidia/pytorch:25.01-py3 torchrun --nproc_per_node=8 {}", {"gpus": 8}),
        ("pip install deepspeed accelerate\npython prepare.py --out x\ntorchrun \\\n  --nproc_per_node 8 \\\n  {}", {"gpus": 8}),
        ("G=8\nN=2\ntorchrun --nnodes $N --nproc_per_node ${{G:-4}} {}", {"gpus": 16, "nnodes": 2}),
        ("G=8\naccelerate launch --num_processes $((G * 2)) --num_machines 2 {}", {"gpus": 16, "nnodes": 2}),
        ("ARGS=\"--nproc_per_node 8 \\\n  --nnodes 2 --master_addr $HOST\"\ntorchrun $ARGS {}", {"gpus": 16, "nnodes": 2}),
        ("L=(--nproc_per_node 8  # all\n  --standalone)\ntorchrun \"${{L[@]}}\" {}", {"gpus": 8}),
        ("cat <<EOF > notes\ntorchrun --nproc_per_node 2 other.py\nEOF\ntorchrun --nproc_per_node 8 {}", {"gpus": 8}),
    ],
)  # fmt: skip
def test_the_arguments_of_the_script_are_read_under_any_launcher(command: str, options: dict[str, Any]) -> None:
    found = from_texts({"run.sh": command.format(ARGUMENTS)})
    assert found.options.items() >= (READ | options).items()
    assert ("gpus" in found.options) is ("gpus" in options)


def test_flags_are_those_of_the_launchers_own_parsers() -> None:
    sources = {
        "torchrun": "torch/distributed/run.py",
        "accelerate": "accelerate/commands/launch.py",
        "deepspeed": "deepspeed/launcher/runner.py",
    }
    for program, path in sources.items():
        package, _, inner = path.partition("/")
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / inner).read_text())
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("add_argument")]
        flags = {
            str(ast.literal_eval(option)).lstrip("-").replace("-", "_")
            for call in calls
            for keyword in call.keywords
            if keyword.arg == "action"
            and ast.unparse(keyword.value) in ("'store_true'", "'store_false'", "check_env", "'help'")
            for option in call.args
        }
        assert flags <= FLAGS[program] | {"h", "help"}, program
        assert FLAGS[program] - flags <= {"h", "help", "use_env"}, program


SLURM = "#!/bin/bash\n#SBATCH --job-name=sft\n{}\n{}\n"


@pytest.mark.parametrize(
    ("directives", "command", "ranks"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8", "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 {}", (32, 4)),
        ("#SBATCH -N 4\n#SBATCH --gres=gpu:a100:8,tmp:1",
            "srun torchrun --nnodes ${{SLURM_JOB_NUM_NODES}} --nproc_per_node gpu {}", (32, 4)),
        ("#SBATCH -N4 -G 16", "N=$(scontrol show hostnames | wc -l)\nsrun torchrun --nnodes $N --nproc_per_node 4 {}", (16, 4)),
        ("#SBATCH --nodes 2 --gpus-per-node=h100:8 # two", "srun bash -c 'torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 {}'", (16, 2)),
        ("#SBATCH --nodes=2 --ntasks-per-node=8\n#SBATCH --gpus-per-task=1", "srun python -u {}", (16, 2)),
        ("#SBATCH -n 16\n#SBATCH --ntasks-per-node=8\n#SBATCH --gres=gpu:8", "srun python {}", (16, 2)),
        ("#SBATCH --nodes=2 --gpus-per-node=8", 
            "srun accelerate launch --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * 8)) {}", (16, 2)),
        ("#SBATCH --nodes=2 --gpus-per-node=8", "export LAUNCHER=\"accelerate launch --num_processes $N --machine_rank \\$SLURM_PROCID\"\n"
            "srun bash -c \"$LAUNCHER {}\"", (16, 2)),
        ("#SBATCH --nodes=1\n#SBATCH --gres=gpu:4", "deepspeed {}", (4, 1)),
        ("#SBATCH --gres=gpu:4", "torchrun --nproc_per_node auto {}", (4, 1)),
        ("#SBATCH --nodes=4 --gres=gpu:8", "srun torchrun --nproc_per_node 8 {}", (8, 1)),  # each node has a job of its own
    ],
)  # fmt: skip
def test_ranks_are_those_of_all_nodes_of_a_batch_script(directives: str, command: str, ranks: tuple[int, int]) -> None:
    found = from_texts({"run.sbatch": SLURM.format(directives, command.format(ARGUMENTS))})
    assert (found.options["gpus"], found.options["nnodes"]) == ranks
    assert found.options.items() >= READ.items()


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        ("torchrun --nnodes $N --nproc_per_node 8 {}", "nnodes: $N (the number of nodes is not known)"),
        ("torchrun --nproc_per_node $G {}", "nproc_per_node: $G (the number of ranks is not known: give --gpus)"),
        ("accelerate launch --num_processes ${{N}} {}", "num_processes: ${N} (a variable whose value is not known)"),
        ("torchrun $DISTRIBUTED {}", "$DISTRIBUTED: options of the launcher"),
        ("torchrun --nproc_per_node 8 {} --optim $OPTIM", "optim: $OPTIM (a variable whose value is not known)"),
        ("#SBATCH --nodes=2-4\ntorchrun --nproc_per_node 8 {}", "--nodes=2-4: not a number of nodes"),
        ("CUDA_VISIBLE_DEVICES=0,1 python {}", "nn.DataParallel, which is not modelled"),
    ],
)
def test_what_a_command_leaves_open_is_reported(command: str, reported: str) -> None:
    assert reported in said(command.format(ARGUMENTS), "not_modelled")


def test_a_second_training_is_reported() -> None:
    text = "torchrun --nproc_per_node 8 sft.py --output_dir a\ntorchrun --nproc_per_node 4 dpo.py --output_dir b\n"
    assert from_texts({"run.sh": text}).options["gpus"] == 8
    assert "the first command that launches a training; the script has 1 more" in said(text, "assumed")


@pytest.mark.parametrize(
    "text",
    ["pip install deepspeed accelerate", "python -m pip install trl", "python -c 'import torch'", "which torchrun"],
)
def test_commands_that_train_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no command that launches a training"):
        from_texts({"run.sh": text})


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("lora_dpo_single_device", "preference and"), ("knowledge_distillation_distributed", "knowledge distillation")],
)
def test_torchtunes_recipes_of_another_task_are_refused(recipe: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"{recipe} .{reason}"):
        complete(from_texts({"run.sh": f"tune run {recipe} --config llama3_1/8B batch_size=4"}), {})


def test_a_script_that_runs_another_is_followed(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text("#SBATCH --nodes=2 --gpus-per-node=4\nsrun ./launch.sh\n")
    (tmp_path / "launch.sh").write_text(f"torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 {ARGUMENTS}\n")
    found = from_paths([tmp_path / "job.sbatch"])
    assert found.options.items() >= {**READ, "gpus": 8, "nnodes": 2}.items()


def test_files_are_found_from_the_root_of_a_repository(tmp_path: Path) -> None:
    for folder in (".git", "scripts", "configs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs/ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    (tmp_path / "scripts/run.sh").write_text(f"deepspeed --num_gpus 8 {ARGUMENTS} --deepspeed configs/ds.json\n")
    found = from_paths([tmp_path / "scripts/run.sh"])
    assert (found.options["strategy"], found.options["backend"], found.options["gpus"]) == ("zero3", "deepspeed", 8)


ZERO3 = """
    compute_environment: LOCAL_MACHINE
    distributed_type: DEEPSPEED
    deepspeed_config: {deepspeed_multinode_launcher: standard, offload_optimizer_device: none, zero3_init_flag: true, zero_stage: 3}
    mixed_precision: bf16
    num_machines: 1
    num_processes: 8
"""
RECIPE = """
    model_name_or_path: Qwen/Qwen2.5-7B
    dtype: bfloat16
    attn_implementation: flash_attention_2
    dataset_name: open-r1/Mixture-of-Thoughts
    gradient_accumulation_steps: 8
    gradient_checkpointing: true
    gradient_checkpointing_kwargs: {use_reentrant: false}
    max_length: 32768
    packing: true
    per_device_train_batch_size: 2
"""
OF_RECIPE = {
    "model": "Qwen/Qwen2.5-7B", "attention": "flash_attention_2", "gradient_accumulation_steps": 8, "micro_batch_size": 2,
    "activation_checkpointing": "full", "seq_len": 32768, "packing": "bfd", "framework": "trl", "precision": "bf16-mixed",
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("accelerate launch --config_file recipes/zero3.yaml scripts/sft.py --config recipes/recipe.yaml",
            {"gpus": 8, "strategy": "zero3"}),
        ("ACCELERATE_LOG_LEVEL=info accelerate launch --config_file=zero3.yaml --num_processes=4 -m trl.scripts.sft recipe.yaml"
            " --per_device_train_batch_size 1", {"gpus": 4, "strategy": "zero3", "micro_batch_size": 1}),
        ("trl sft --config recipe.yaml --accelerate_config zero2 --num_processes 4",
            {"gpus": 4, "strategy": "zero2", "backend": "deepspeed"}),
        ("trl sft --config recipe.yaml --accelerate_config fsdp2 --no_gradient_checkpointing",
            {"gpus": 8, "strategy": "zero3", "backend": "fsdp2", "wrap": "layer", "activation_checkpointing": "none"}),
        ("trl sft --config recipe.yaml", {"strategy": "ddp", "precision": "bf16"}),
    ],
)  # fmt: skip
def test_a_recipe_of_trl_and_its_command_are_read_together(command: str, options: dict[str, Any]) -> None:
    files = {"zero3.yaml": dedent(ZERO3)} if "zero3.yaml" in command else {}
    found = from_texts({**files, "recipe.yaml": dedent(RECIPE), "run.sh": command})
    assert found.options.items() >= (OF_RECIPE | options).items()
    assert not [reading.missing for reading in found.readings if reading.missing]


@pytest.mark.parametrize(
    ("command", "options", "missing"),
    [
        ("NNODES=2 NPROC_PER_NODE=8 FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml per_device_train_batch_size=2",
            {"gpus": 16, "nnodes": 2, "micro_batch_size": 2, "strategy": "ddp", "framework": "llamafactory"}, "lf.yaml"),
        ("deepspeed --num_gpus 4 src/train.py --deepspeed ds.json --stage sft --finetuning_type full --cutoff_len 4096 --bf16"
            " --model_name_or_path gpt2",
            {"gpus": 4, "seq_len": 4096, "backend": "deepspeed", "activation_checkpointing": "reentrant"}, "ds.json"),
        ("axolotl train lora.yml --micro-batch-size 4 --launcher torchrun -- --nproc_per_node=8 --nnodes=2",
            {"gpus": 16, "nnodes": 2, "micro_batch_size": 4}, "lora.yml"),
        ("accelerate launch --num_processes 8 -m axolotl.cli.train examples/fft.yml --sequence_len=8192", {"gpus": 8, "seq_len": 8192},
            "examples/fft.yml"),
        ("tune run --nproc_per_node 4 full_finetune_distributed --config llama3_1/8B_full batch_size=4 tokenizer.max_seq_len=4096",
            {"gpus": 4, "micro_batch_size": 4, "seq_len": 4096, "model": "meta-llama/Llama-3.1-8B", "strategy": "zero3"},
            "llama3_1/8B_full, which `tune cp llama3_1/8B_full .` copies"),
        ("NGPU=4 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --training.local-batch-size 2",
            {"gpus": 4, "framework": "torchtitan", "micro_batch_size": 2, "model": "meta-llama/Llama-3.1-8B", "strategy": "zero3"},
            "torchtitan/models/llama3/config_registry.py:llama3_8b"),
        ("NGPU=8 MODULE=llama3 CONFIG=llama3_8b_mxfp8 ./run_train.sh", {"framework": "torchtitan", "fp8": "mxfp8", "compile": "layer"},
            "torchtitan/models/llama3/config_registry.py:llama3_8b_mxfp8"),
        ("CONFIG_FILE=./train_configs/llama3_8b.toml NGPU=8 ./run_train.sh", {"gpus": 8, "framework": "torchtitan"},
            "./train_configs/llama3_8b.toml"),
        ("accelerate launch --mixed_precision bf16 --num_machines 1 --num_processes 8 --use_deepspeed"
            " --deepspeed_config_file ds/stage3.conf open_instruct/finetune.py"
            " --model_name_or_path allenai/OLMo-2-1124-7B --use_flash_attn --max_seq_length 4096"
            " --per_device_train_batch_size 1 --gradient_checkpointing --dataset_mixer_list a/b 1.0 data/x.json 0.5",
            {"gpus": 8, "framework": "accelerate", "backend": "deepspeed", "attention": "flash_attention_2", "seq_len": 4096,
             "activation_checkpointing": "full", "precision": "bf16-mixed"}, "ds/stage3.conf"),
    ],
)  # fmt: skip
def test_commands_of_other_trainers_are_read(command: str, options: dict[str, Any], missing: str) -> None:
    found = from_texts({"run.sh": command})
    assert found.options.items() >= options.items()
    assert [name for reading in found.readings for name in reading.missing] == [missing]


def test_the_configuration_function_that_a_command_of_torchtitan_names_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "torchtitan/models/llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(
        "def llama3_8b():\n    return Trainer.Config(loss=ChunkedLossWrapper.Config(), activation_checkpoint=FullAC.Config(),\n"
        "        training=TrainingConfig(local_batch_size=1, seq_len=8192, disable_cuda_graphs=True))\n"
    )
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b\n"
    )
    options = from_paths([tmp_path / "run.sh"]).options
    expected = {
        "model": "meta-llama/Llama-3.1-8B",
        "seq_len": 8192,
        "activation_checkpointing": "full",
        "micro_batch_size": 1,
        "cuda_graphs": False,
    }
    assert options.items() >= expected.items()


@pytest.mark.parametrize(
    ("command", "gpus", "conf"),
    [
        ("NGPU=8 CONFIG=llama3_8b ./run_train.sh", 8, None),  # the framework's own setting is assumed later
        ("torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b", 8, "expandable_segments:False"),
        ("export PYTORCH_ALLOC_CONF=max_split_size_mb:64\ntorchrun --nproc_per_node 8 -m torchtitan.train --config a", 8,
            "max_split_size_mb:64"),
        ("axolotl train qlora.yml", 8, None),
        ("accelerate launch --num_processes 8 -m axolotl.cli.train qlora.yml", 8, "expandable_segments:False"),
        ("llamafactory-cli train --finetuning_type lora --cutoff_len 2048", 8, "expandable_segments:True"),
        ("llamafactory-cli train --finetuning_type lora --cutoff_len 2048", 1, None),
        ("torchrun --nproc_per_node 8 -m llamafactory.launcher --finetuning_type lora --cutoff_len 9", 8, "expandable_segments:False"),
        ("torchrun --nproc_per_node 8 train.py", 8, None),
    ],
)  # fmt: skip
def test_allocator_settings_of_launchers_are_read(command: str, gpus: int, conf: str | None) -> None:
    found = complete(from_texts({"run.sh": command}), {"gpus": gpus})
    assert found.options.get("allocator_conf") == conf
