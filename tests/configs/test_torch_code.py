"""Training loops in plain PyTorch: with FSDP2, FSDP1, DDP, DeepSpeed, and on one GPU."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from fsdp_advisor.configs import Configuration, complete, from_texts
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.parsing import make_request

LOOP = """
model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32)
{sharding}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
loader = DataLoader(data, 4, shuffle=True)
for batch in loader:
    {step}
"""
STEP = "loss = model(**batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()"


def read(sharding: str = "", step: str = STEP) -> Configuration:
    return from_texts({"train.py": LOOP.format(sharding=dedent(sharding), step=step)})


FSDP2 = """
from torch.distributed.fsdp import fully_shard as shard
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.transformer.h:
    shard(layer, mp_policy=policy{more})
shard(model, mp_policy=policy)
"""
FSDP1 = """
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={GPT2Block})
halves = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
model = FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=halves, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
"""
WRAPPED = "model = FullyShardedDataParallel(model{})"


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (FSDP2.replace("{more}", ""), {"strategy": "zero3", "backend": "fsdp2", "wrap": "layer", "precision": "bf16-mixed"}),
        (FSDP2.replace("{more}", ", reshard_after_forward=False"), {"strategy": "zero2", "backend": "fsdp2"}),
        (
            FSDP2.replace("{more}", "").replace("shard(model,", "shard(model, reshard_after_forward=False,"),
            {"strategy": "zero3", "backend": "fsdp2", "wrap": "layer"},
        ),
        ("fully_shard(model.a)\nfully_shard(model, reshard_after_forward=False)", {"strategy": "zero3", "wrap": "layer"}),
        ("fully_shard(model, reshard_after_forward=False)", {"strategy": "zero2", "wrap": "none"}),
        (FSDP2.replace("{more}", ", reshard_after_forward=4"), {"strategy": "zero3", "reshard_after_forward": "4"}),
        (FSDP2.replace("{more}", ", offload_policy=CPUOffloadPolicy()"), {"offload": "parameters"}),
        ("fully_shard(model)", {"wrap": "none", "precision": "fp32"}),
        (
            "for module in model.modules():\n    if isinstance(module, (GPT2Block, GPT2Attention)):\n        fully_shard(module)",
            {"wrap": "class:GPT2Block,GPT2Attention"},
        ),
        (
            "for module in model.modules():\n    if isinstance(module, GPT2Block | GPT2Attention):\n        fully_shard(module)",
            {"wrap": "class:GPT2Block,GPT2Attention"},
        ),
        (
            "mesh = init_device_mesh('cuda', (2, 8), mesh_dim_names=('replicate', 'shard'))\nfully_shard(model, mesh=mesh)",
            {"strategy": "hsdp", "nnodes": 2, "gpus": 16},
        ),
        (
            FSDP1,
            {"strategy": "zero2", "backend": "fsdp1", "wrap": "layer", "precision": "bf16-mixed", "use_orig_params": False},
        ),
        (WRAPPED.format(", use_orig_params=True"), {"strategy": "zero3", "wrap": "none", "use_orig_params": True}),
        (WRAPPED.format(", auto_wrap_policy=size_based_auto_wrap_policy"), {"wrap": "size:100000000"}),
        (WRAPPED.format(", cpu_offload=CPUOffload(offload_params=True)"), {"offload": "parameters"}),
        (WRAPPED.format(", cpu_offload=CPUOffload(True)"), {"offload": "parameters"}),
        (WRAPPED.format(", sharding_strategy=ShardingStrategy.NO_SHARD"), {"strategy": "ddp", "backend": "ddp"}),
        ("model = DistributedDataParallel(model)", {"strategy": "ddp", "backend": "ddp"}),
        ("", {"strategy": "ddp", "gpus": 1}),
        ("model = torch.compile(model)", {"compile": "model"}),
        ("model.to(torch.bfloat16)", {"precision": "bf16"}),
        ("model = checkpoint_wrapper(model.h)", {"activation_checkpointing": "full"}),
        (
            "apply_activation_checkpointing(model, partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT))",
            {"activation_checkpointing": "reentrant"},
        ),
    ],
)  # fmt: skip
def test_a_loop_is_read(sharding: str, expected: dict[str, Any]) -> None:
    found = read(sharding).options
    usual = {"framework": "torch", "model": "gpt2", "micro_batch_size": 4, "optim": "adamw_torch_fused"}
    assert found.items() >= (usual | expected).items()
    assert make_request(found).backend == found["backend"]


def test_the_number_of_ranks_is_assumed_until_it_is_given() -> None:
    found = read("fully_shard(model)")
    said = "1 GPU, because nothing says how many ranks there are (--gpus)"
    assert said in found.readings[0].assumed
    given = complete(found, {"gpus": 8})
    assert given.options["gpus"] == 8
    assert said not in given.readings[0].assumed


def test_the_batch_of_a_search_is_that_of_the_given_ranks() -> None:
    given = complete(read("fully_shard(model)"), {"gpus": 8}, ("micro_batch_size", "strategy"))
    assert given.options["global_batch_size"] == 4 * 8


def test_a_launch_line_gives_the_number_of_ranks() -> None:
    texts = {
        "run.sh": "torchrun --nproc-per-node 8 train.py",
        "train.py": LOOP.format(sharding="fully_shard(model)", step=STEP),
    }
    assert from_texts(texts).options["gpus"] == 8


@pytest.mark.parametrize(
    ("sharding", "step", "note"),
    [
        (
            "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
            STEP,
            "reduce_dtype bfloat16",
        ),
        ("", "loss = model(**batch).loss; clip_grad_norm_(parameters, 1.0); loss.backward()", "clip_grad_norm_"),
        ("", "loss = model(**batch).loss\n    optimizer.zero_grad()\n    loss.backward()", "zero_grad between"),
    ],
)
def test_what_the_estimate_leaves_out_is_reported(sharding: str, step: str, note: str) -> None:
    assert any(text.startswith(note) for text in read(sharding, step).readings[0].not_modelled)


def test_gradients_cleared_after_the_step_are_as_estimated() -> None:
    assert read().readings[0].not_modelled == ()


@pytest.mark.parametrize(
    "call", ["parallelize_module(model, mesh, plan)", "context_parallel(mesh)", "PipelineStage(model)"]
)
def test_other_parallelism_is_refused(call: str) -> None:
    found = read(f"fully_shard(model)\n{call}")
    with pytest.raises(UsageError, match="parallelism"):
        complete(found, {})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("SEQ_LEN = 4096", {"seq_len": 4096}),
        ("MODEL, SEQ_LEN = 'gpt2', 4096\nMICRO_BATCH_SIZE = 4", {"seq_len": 4096}),
        ("MODEL = 'gpt2'\nMICRO_BATCH_SIZE = 4", {}),
        (
            "def main(max_length: int = 1024, grad_accum: int = 8):\n    pass",
            {"seq_len": 1024, "gradient_accumulation_steps": 8},
        ),
        ("class Settings:\n    block_size: int = 256\n\nsettings = Settings()", {"seq_len": 256}),
        ("max_len, block_size = 128, 512", {}),
    ],
)
def test_usual_names_of_variables_are_read(code: str, expected: dict[str, int]) -> None:
    found = read(code)
    assert found.options.items() >= (expected | {"micro_batch_size": 4, "model": "gpt2"}).items()
    nothing = "because nothing limits the length of samples"
    assert any(nothing in text for text in found.readings[0].assumed) == ("seq_len" not in expected)


@pytest.mark.parametrize(
    "sharding",
    [
        "for module in model.modules():\n    if isinstance(module, layer_class):\n        fully_shard(module)",
        "model = FullyShardedDataParallel(model, auto_wrap_policy={layer_class})",
        "model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy([layer_class]))",
    ],
)
def test_layers_are_units_where_a_variable_has_the_classes(sharding: str) -> None:
    found = read(sharding)
    assert found.options["wrap"] == "layer"
    assert any("computes the classes of the units (layer_class)" in text for text in found.readings[0].assumed)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("main()", (1024, 8)),
        ("main(grad_accum=2)", (1024, 2)),
        ("main(4096, grad_accum=2)", (4096, 2)),
        ("main(compute(), grad_accum=2)", (None, 2)),
        ("trainer.main(4096)", (1024, 8)),
    ],
)
def test_what_a_call_gives_a_function_replaces_its_defaults(call: str, expected: tuple[int | None, int]) -> None:
    options = read(f"def main(max_length: int = 1024, grad_accum: int = 8):\n    pass\n\n{call}").options
    assert (options.get("seq_len"), options["gradient_accumulation_steps"]) == expected


@pytest.mark.parametrize(
    ("condition", "steps"),
    [
        ("(i + 1) % 8 == 0", 8),
        ("not (i + 1) % 8", 8),
        ("i % EVERY == EVERY - 1", 16),
        ("(i + 1) % 8 == 0 or i + 1 == len(loader)", 8),
        ("(i + 1) % compute() == 0", None),
        ("(i + 1) % 8 != 0", None),
        ("not ((i + 1) % 8 == 0)", None),
    ],
)
def test_accumulation_is_read_from_the_condition_of_the_update(condition: str, steps: int | None) -> None:
    step = f"model(**batch).loss.backward()\n    if {condition}:\n        scaler.step(optimizer); optimizer.zero_grad()"
    assert read("EVERY = 16", step=step).options.get("gradient_accumulation_steps") == steps
    other = read("EVERY = 16\nif 1 % 4 == 0: optimizer.step()", step=step).options
    assert "gradient_accumulation_steps" not in other  # two conditions differ, or one is not known
    logging = f"{STEP}\n    if {condition}: profiler.step()"
    assert "gradient_accumulation_steps" not in read(step=logging).options


BACKWARD, UPDATE = "model(**batch).loss.backward()", "optimizer.step(); optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("step", "steps"),
    [
        (f"{BACKWARD}\n    if (i + 1) % 8: continue\n    {UPDATE}", 8),
        (f"{BACKWARD}\n    if (i + 1) % 8 != 0 and not last:\n        continue\n    {UPDATE}", 8),
        (f"if (i + 1) % 8: continue\n    {BACKWARD}\n    {UPDATE}", None),  # batches that are not trained
        (f"{BACKWARD}\n    if (i + 1) % 8: print(i)\n    {UPDATE}", None),
        (f"if i % 8 == 0:\n        {BACKWARD}\n        {UPDATE}", None),
        (f"if i % 8:\n        {BACKWARD}\n    else:\n        {BACKWARD}\n        {UPDATE}", 8),
        (f"if batch % 2 == 0:\n        for part in batch:\n            {BACKWARD}\n            {UPDATE}", None),
        (f"for part in batch:\n        {BACKWARD}\n        if batch % 2 == 0: {UPDATE}", None),  # of an outer loop
        (f"{BACKWARD}\n    if (i + 1) % 8 == 0: self.optimizerG.step()", 8),
        (f"{BACKWARD}\n    {UPDATE}\n    if (i + 1) % 8 == 0: options.step()", None),
        (f"{BACKWARD}\n    if (i + 1) % 8 == 0: optimizer.step()\n    options.step()", 8),
    ],
)
def test_accumulation_is_that_of_the_step_alone(step: str, steps: int | None) -> None:
    assert read(step=step).options.get("gradient_accumulation_steps") == steps


def test_fields_of_a_configuration_class_are_read() -> None:
    code = """
    @dataclass
    class Settings:
        name: str = "gpt2"
        size: int = 4

    settings = Settings(size=6)
    model = AutoModel.from_pretrained(settings.name)
    loader = DataLoader(data, batch_size=settings.size)
    loss.backward()
    """
    options = from_texts({"train.py": dedent(code)}).options
    assert (options["model"], options["micro_batch_size"]) == ("gpt2", 6)


def test_weights_without_a_dtype_are_said_to_be_in_fp32() -> None:
    loop = LOOP.format(sharding=FSDP2.replace("{more}", ""), step=STEP).replace(", dtype=torch.float32", "")
    (reading,) = from_texts({"train.py": loop}).readings
    assert any("--precision bf16-mixed --dtype bfloat16" in text for text in reading.assumed)


def test_a_loop_of_deepspeed_is_read_with_its_dictionary() -> None:
    code = """
    settings = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.backward(engine(**batch).loss)
    """
    options = from_texts({"train.py": dedent(code)}).options
    assert (options["strategy"], options["backend"], options["framework"]) == ("zero3", "deepspeed", "deepspeed")
    assert (options["micro_batch_size"], options["precision"]) == (2, "bf16-mixed")


def test_a_loop_of_deepspeed_is_read_with_the_file_that_it_names() -> None:
    code = "model = AutoModel.from_pretrained('gpt2')\nengine = deepspeed.initialize(model=model, config='ds.json')"
    texts = {"train.py": code, "ds.json": '{"zero_optimization": {"stage": 2}}'}
    assert from_texts(texts).options["strategy"] == "zero2"
    assert from_texts({"train.py": code}).readings[0].missing == ("ds.json",)


def test_code_that_trains_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match="no loop that trains a model it loads"):
        from_texts({"train.py": "print('hello')"})


def test_a_model_without_a_head_is_reported() -> None:
    code = "model = AutoModel.from_pretrained('gpt2')\nloss(model(**batch).last_hidden_state).backward()"
    (reading,) = from_texts({"train.py": code}).readings
    assert any(text.startswith("AutoModel, a model without a head") for text in reading.not_modelled)


def test_losses_of_sentence_transformers_are_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="compare embeddings of several texts") as refused:
        from_texts({"train.py": "trainer = SentenceTransformerTrainer(model=model, args=args, loss=loss)"})
    assert "rehearse -- python train.py" in refused.value.hint


@pytest.mark.parametrize(
    "line", ["isinstance()", "fully_shard()", "fully_shard(*layers)", "fully_shard(layer, **settings)"]
)
def test_calls_without_usual_arguments_are_read(line: str) -> None:
    found = read(f"for layer in model.h:\n    {line}\n    fully_shard(layer)")
    assert (found.options["backend"], found.options["wrap"]) == ("fsdp2", "layer")
