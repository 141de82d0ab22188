"""A base model in 4 or 8 bits: its layers are those that transformers loads, its step allocates what bitsandbytes does on a GPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from matrix import in_turn, of_today, taken

torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdp_advisor import estimate, export
from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.model.quantization import PACKED_NOTE, Quantization
from fsdp_advisor.model.store import dump, load
from fsdp_advisor.model.tape import Category, Op, Staging, value_at
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.program.reduction_workspace import reduction_workspace_bytes
from fsdp_advisor.recording import quantized, source_of
from fsdp_advisor.recording.fake import materialise
from fsdp_advisor.recording.on_gpu import as_on_gpu
from fsdp_advisor.recording.recorder import Recorder
from fsdp_advisor.recording.storages import StorageWatch
from fsdp_advisor.recording.transformers_models import TransformersSource

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 500,
}  # fmt: skip
REHEARSED = LLAMA | {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip

BF16, FP32 = 2, 4
NESTED = Quantization(method="bnb_4bit", nested=True)
EIGHT = Quantization(method="bnb_8bit")


class QuantizedSource(TransformersSource):
    """A transformers model with LoRA adapters on a quantized base."""

    def __init__(
        self, config: Mapping[str, Any], settings: Quantization, *, prepare: bool, use_dora: bool = False
    ) -> None:
        super().__init__(config, name="quantized")
        self._settings, self._prepare, self._use_dora = settings, prepare, use_dora

    def build(self, dtype: torch.dtype) -> nn.Module:
        model = super().build(torch.bfloat16)
        quantized.quantize(model, self._settings)
        if self._prepare:
            quantized.prepare_for_training(model)
        with torch.device("meta"):
            lora = peft.LoraConfig(r=16, target_modules="all-linear", use_dora=self._use_dora, task_type="CAUSAL_LM")
            return peft.get_peft_model(model, lora).train()

    def root_modules(self, module: Any) -> Any:
        return super().root_modules(module.get_base_model())

    def configure(self, module: Any, **options: Any) -> None:
        super().configure(module.get_base_model(), **options)


def built(config: Mapping[str, Any], settings: Quantization) -> nn.Module:
    model = TransformersSource(config, name="quantized").build(torch.bfloat16)
    quantized.quantize(model, settings)
    return model


def described(tensors: Any) -> dict[str, tuple[object, ...]]:
    return {name: (type(t).__name__, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors}


@in_turn(0, of=2)
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, Quantization(method="bnb_4bit")),
        (LLAMA, Quantization(method="bnb_4bit", quant_type="fp4", nested=True, storage_dtype="bfloat16")),
        (QWEN, NESTED),
        (GPT2, NESTED),
        (LLAMA, EIGHT),
        (QWEN, EIGHT),
    ],
    ids=["nf4", "fp4-in-bf16", "tied", "conv1d", "8bit", "tied-8bit"],
)
def test_layers_are_those_that_transformers_loads(
    config: dict[str, Any], settings: Quantization, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    made = TransformersSource(config, name="plain").build(torch.bfloat16).to_empty(device="cpu")
    for parameter in made.parameters():
        parameter.data.normal_()
    made.tie_weights()
    made.save_pretrained(tmp_path / "plain")
    is_4bit = settings.method == "bnb_4bit"
    keywords = BitsAndBytesConfig(
        load_in_4bit=is_4bit, load_in_8bit=not is_4bit, bnb_4bit_quant_type=settings.quant_type,
        bnb_4bit_use_double_quant=settings.nested, bnb_4bit_quant_storage=settings.storage_dtype,
        bnb_4bit_compute_dtype=settings.compute_dtype,
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, quantization_config=keywords, device_map="cpu"
    )
    model = built(config, settings)

    trained = {
        name: False for name, parameter in loaded.named_parameters() if type(parameter).__name__ in quantized.PACKED
    }
    assert trained
    expected, found = described(loaded.named_parameters()), described(model.named_parameters())
    assert {n: d[:3] for n, d in found.items()} == {n: d[:3] for n, d in expected.items()}
    assert {n: found[n][3] for n in trained} == trained
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in loaded.named_modules()}
    assert described(quantized.state_tensors(model)) == described(quantized.state_tensors(loaded))


def test_prepare_stores_what_is_not_quantized_in_fp32() -> None:
    model = built(QWEN, Quantization(method="bnb_4bit", storage_dtype="bfloat16"))
    quantized.prepare_for_training(model)

    parameters = dict(model.named_parameters())
    assert not any(p.requires_grad for p in parameters.values())
    assert parameters["model.embed_tokens.weight"].dtype == torch.float32
    assert parameters["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert parameters["model.layers.0.self_attn.q_proj.bias"].dtype == torch.bfloat16  # of the first forward


@pytest.mark.parametrize("settings", [NESTED, EIGHT], ids=["4bit", "8bit"])
def test_inventory_lists_packed_weights_and_their_scales(settings: Quantization) -> None:
    profile = Recorder(QuantizedSource(LLAMA, settings, prepare=True)).profile
    layer = profile.stacks[0].units[0]
    weights = {p.name: p for p in layer.parameters}
    scales = {b.name: (b.shape, b.dtype, b.registered) for b in layer.buffers if b.name.startswith("self_attn.q_proj")}

    name = "self_attn.q_proj.base_layer."
    if settings is EIGHT:
        assert weights[f"{name}weight"].shape == (128, 128)
        assert scales == {f"{name}SCB": ((128,), "float32", False)}
    else:
        assert weights[f"{name}weight"].shape == (128 * 128 // 2, 1)
        assert scales == {
            f"{name}weight.absmax": ((128 * 128 // 64,), "uint8", False),
            f"{name}weight.quant_map": ((16,), "float32", False),
            f"{name}weight.nested_offset": ((), "float32", False),
            f"{name}weight.nested_absmax": ((1,), "float32", False),
            f"{name}weight.nested_quant_map": ((256,), "float32", False),
        }
    assert load(dump(profile)).stacks == profile.stacks


# The operators


def events_of(run: Callable[[], object], *inputs: torch.Tensor) -> list[tuple[int, int]]:
    """(bytes before, bytes after) of every allocation and free, in order. `inputs` exist before."""
    events: list[tuple[int, int]] = []
    watch = StorageWatch(lambda _key, before, after, _name, _args: events.append((before, after)))
    for tensor in inputs:
        watch.ignore(tensor)
    with watch:
        result = run()
        del result
    return events


@dataclass
class Nested:
    """A weight of shape (N, K) in 4 bits whose scales are quantized too."""

    n: int
    k: int

    def tensors(self) -> dict[str, Any]:
        blocks = self.n * self.k // 64
        return {
            "B": torch.empty(self.n * self.k // 2, 1, dtype=torch.uint8), "shapeB": [self.n, self.k],
            "absmax": torch.empty(-(-blocks // 256)), "blocksize": 64, "quant_type": "nf4",
            "absmax_8bit": torch.empty(blocks, dtype=torch.uint8), "absmax_code": torch.empty(256),
            "absmax_offset": torch.empty(()),
        }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_product_in_4_bits_allocates_as_the_cuda_code_of_bitsandbytes(
    dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)  # PyTorch's CPU build lacks it
    ops = importlib.import_module("bitsandbytes.backends.cuda.ops")
    for kernel in ("_dequantize_blockwise_impl", "_dequantize_4bit_impl"):
        monkeypatch.setattr(ops, kernel, lambda *_, **__: None)  # they fill a tensor that exists
    with as_on_gpu(), FakeTensorMode():
        weight = Nested(256, 128).tensors()
        inputs = torch.empty(2, 1024, 128, dtype=dtype)
        bias = torch.empty(256, dtype=dtype) if has_bias else None
        expected = events_of(lambda: ops._dequant_linear_fallback(inputs, bias=bias, **weight), inputs)
        found = events_of(lambda: torch.ops.bitsandbytes.gemm_4bit.default(inputs, bias=bias, **weight), inputs)
    assert found == expected
    assert (0, 256 * 128 * dtype.itemsize) in found


def test_product_in_8_bits_allocates_as_on_cuda() -> None:
    m, n, k = 2048, 352, 128
    layer = built(LLAMA, EIGHT).model.layers[0].mlp.gate_proj
    with as_on_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
        materialise(layer, torch.float32)
        x = torch.empty(2, 1024, k, dtype=torch.bfloat16, requires_grad=True)
        events = events_of(lambda: layer(x), x)
    assert [after for before, after in events if not before] == [
        2 * m * k, 4 * m, m * k, 2 * m * k, m * k, 1,  # in fp16, its rows' scales, quantized; its size, which is large, any
        4 * m * n, 2 * m * n, 2 * m * n,  # the product, scaled in fp16, in the input's dtype
    ]  # fmt: skip
    assert layer.weight.dtype == torch.int8


# The step


@dataclass(frozen=True)
class Rehearsed:
    """Requested bytes above those before the step of a job with B = 2 and T = 1,024 on a simulated H100."""

    settings: Quantization
    prepare: bool
    key: TapeKey
    forward: int
    backward: int
    use_dora: bool = False


def gpu_key(precision: Any, checkpointing: Any = "none") -> TapeKey:
    kernel: Any = "default" if precision == "fp32" else "cudnn"
    return TapeKey("plain", precision, "sdpa", checkpointing, device="gpu", kernel=kernel)


HALF = TapeKey("plain", "fp32", "sdpa", "none", device="gpu", kernel="cudnn")
"""Of a model that is stored in bf16 and runs without autocast."""

REHEARSALS = {
    "4bit": Rehearsed(NESTED, True, gpu_key("bf16-mixed", "full"), 124837888, 213590040),
    "4bit, another dtype": Rehearsed(
        Quantization(method="bnb_4bit", nested=True, compute_dtype="float32"), False, HALF, 450150448, 451190840
    ),
    "8bit": Rehearsed(EIGHT, False, HALF, 490012720, 506765368),
    "dora on 4bit": Rehearsed(NESTED, True, gpu_key("bf16-mixed"), 814129200, 809667728, use_dora=True),
    "dora on 4bit, another dtype": Rehearsed(
        Quantization(method="bnb_4bit", nested=True, compute_dtype="float32"),
        False,
        HALF,
        849377328,
        847996048,
        use_dora=True,
    ),
    "dora on 8bit": Rehearsed(EIGHT, False, HALF, 889223216, 903570576, use_dora=True),
    "dora on 8bit, autocast": Rehearsed(EIGHT, True, gpu_key("bf16-mixed"), 893820976, 920816784, use_dora=True),
}
SEEDS = 16
"""Bytes of a kernel's two random seeds, which are not recorded. They live as long as the layer's tensors."""
COUNTERS = 88
"""Bytes of the counters of the blocks that sum 2,816 columns for the gradient of a magnitude. They are not counted either."""


def peaks(recorder: Recorder, key: TapeKey, b: int, t: int) -> dict[str, int]:
    """The highest sum of live tensors and scratch in forward and backward on an H100, without the batch."""

    def bytes_of(size: Any) -> int:
        if isinstance(size, Staging):
            rows, columns = value_at(size.rows, b, t), value_at(size.columns, b, t)
            return reduction_workspace_bytes(rows, columns, find_gpu("H100-80GB").resident_threads)
        return value_at(size, b, t)

    tape = recorder.tape(replace(key, at=(b, t)))
    live, found = 0, {"forward": 0, "backward": 0}
    born: list[list[int]] = []
    for segment in tape.segments:
        born.append([])
        for op, first, second in segment.events:
            if op == Op.ALLOC:
                born[-1].append(0 if second == Category.INPUT else bytes_of(tape.sizes[first]))
                live += born[-1][-1]
            elif op == Op.FREE:
                live -= born[first][second]
            found[segment.phase] = max(found[segment.phase], live)
    return found


@pytest.mark.parametrize("name", taken(["8bit", "dora on 4bit"], [*REHEARSALS], days=2))
def test_step_allocates_what_a_rehearsal_allocates(name: str) -> None:
    row = REHEARSALS[name]
    recorder = Recorder(QuantizedSource(REHEARSED, row.settings, prepare=row.prepare, use_dora=row.use_dora))
    found = peaks(recorder, row.key, 2, 1024)
    layers = 1 if row.key.checkpointing == "full" else 3
    not_recorded = layers * SEEDS + row.use_dora * COUNTERS
    assert 0 <= row.forward - found["forward"] <= not_recorded
    assert 0 <= row.backward - found["backward"] <= not_recorded


SHAPES = [(128, 128), (64, 128), (352, 128), (128, 352)]
"""The shapes of the weights in a layer of LLAMA."""


def in_bytes(element_bytes: int) -> set[int]:
    return {element_bytes * rows * columns for rows, columns in SHAPES}


@pytest.mark.parametrize(
    ("settings", "use_dora", "expected"),
    of_today(
        [
            (NESTED, False, in_bytes(BF16)),
            (Quantization(method="bnb_4bit", compute_dtype="float32"), False, in_bytes(BF16) | in_bytes(FP32)),
            # in 8 bits backward multiplies in the dtype of the input, which autocast does not cast
            (EIGHT, False, in_bytes(FP32)),
            (EIGHT, True, in_bytes(FP32)),
        ],
        days=2,
    ),
)
def test_a_tape_tells_unpacked_weights_from_other_temporaries(
    settings: Quantization, use_dora: bool, expected: set[int]
) -> None:
    recorder = Recorder(QuantizedSource(LLAMA, settings, prepare=True, use_dora=use_dora))
    assert unpacked(recorder, gpu_key("bf16-mixed")) == expected


def unpacked(recorder: Recorder, key: TapeKey) -> set[int]:
    """The bytes of the copies of packed weights in a step of two sequences of 16 tokens."""
    tape = recorder.tape(key)
    births = (birth for born in tape.births for birth in born)
    return {value_at(tape.sizes[size], 2, 16) for size, category in births if category == Category.DEQUANTIZED}


@in_turn(0, of=2)
@pytest.mark.parametrize(("engine", "nested"), [("plain", True), ("fsdp2", False)])
def test_tapes_do_not_depend_on_the_dtype_of_packed_weights(engine: Literal["plain", "fsdp2"], nested: bool) -> None:
    """`recording.adapted_catalog` therefore records them once."""
    key = TapeKey(engine, "bf16-mixed", "sdpa", "none", device="gpu", at=(2, 16))
    floats, integers = (
        Recorder(QuantizedSource(LLAMA, replace(NESTED, nested=nested, storage_dtype=dtype), prepare=True)).tape(key)
        for dtype in ("bfloat16", "uint8")
    )
    assert (floats.segments, floats.births) == (integers.segments, integers.births)


@in_turn(1, of=2)
def test_fsdp1_makes_gradients_of_packed_weights_too() -> None:
    """Weights packed in floats are parts of the flat parameter. Autograd fills their part of its gradient with zeros."""
    settings = Quantization(method="bnb_4bit", storage_dtype="bfloat16")
    recorder = Recorder(QuantizedSource(LLAMA, settings, prepare=False))
    tape = recorder.tape(TapeKey("fsdp1", "bf16-mixed", "sdpa", "none", device="gpu", kernel="cudnn", at=(1, 16)))
    gradients = {
        value_at(tape.sizes[size], 1, 1)
        for births in tape.births
        for size, category in births
        if Category.GRADIENT <= category < Category.DEQUANTIZED
        and (category - Category.GRADIENT) % 2 == 0  # the layer's
    }
    assert gradients == {2 * recorder.profile.stacks[0].units[0].elements}


# GPTQ and AWQ


def packed_source(method: str, config: Mapping[str, Any] = LLAMA, **settings: Any) -> Any:
    """A model with LoRA of rank 16 on queries and values. Its base is a 4-bit checkpoint with groups of 128 inputs."""
    quantization = {"quant_method": method, "bits": 4, "group_size": 128, **settings}
    adaptation = Adaptation(
        peft={"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"]}, quantization=quantization
    )
    return source_of({**config, CONFIG_KEY: adaptation.as_dict()}, name="packed", task="causal-lm")


@pytest.mark.parametrize(
    ("method", "tensors"),
    [
        (
            "gptq",
            {
                "qweight": ((16, 352), "int32"), "qzeros": ((1, 44), "int32"), "scales": ((1, 352), "float16"),
                "g_idx": ((128,), "int32"), "wf_unsqueeze_zero": ((8,), "int32"), "wf_unsqueeze_neg_one": ((8,), "int32"),
            },
        ),
        ("awq", {"qweight": ((128, 44), "int32"), "qzeros": ((1, 44), "int32"), "scales": ((1, 352), "float16")}),
    ],
)  # fmt: skip
def test_packed_checkpoints_have_the_tensors_of_gptqmodel(method: str, tensors: dict[str, Any]) -> None:
    profile = Recorder(packed_source(method)).profile
    layer = profile.stacks[0].units[0]
    found = {b.name: (b.shape, b.dtype) for b in layer.buffers if b.name.startswith("mlp.gate_proj")}
    assert found == {f"mlp.gate_proj.{name}": value for name, value in tensors.items()}
    assert {b.matrix for b in layer.buffers if b.name == "mlp.gate_proj.qweight"} == {(352, 128)}
    assert load(dump(profile)).stacks == profile.stacks

    dtypes = {p.role: p.dtype for p in layer.parameters}
    assert dtypes == {"adapter": "float32", "norm": "bfloat16" if method == "gptq" else "float32"}
    assert "lm_head.weight" in {p.name.rpartition("model.")[2] for p in profile.root.parameters}


def test_modules_that_a_checkpoint_leaves_unpacked_stay_linear() -> None:
    gptq = packed_source("gptq", modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"]])
    awq = packed_source("awq", modules_to_not_convert=["gate_proj", "up_proj", "down_proj"])
    for source, expected in ((gptq, {"q_proj", "k_proj"}), (awq, {"q_proj", "k_proj", "v_proj", "o_proj"})):
        layer = Recorder(source).profile.stacks[0].units[0]
        assert {b.name.split(".")[1] for b in layer.buffers if b.matrix} == expected


@pytest.mark.parametrize("method", taken(["gptq"], ["awq"]))
def test_packed_step_allocates_what_gptqmodel_allocates_in_a_rehearsal(method: str) -> None:
    """gptqmodel 7.7's own layers, with its compiled dequantization, on a simulated H100 at B = 2 and T = 1,024."""
    forward, backward = {"gptq": (302358576, 318537784), "awq": (386506800, 385384504)}[method]
    found = peaks(Recorder(packed_source(method, REHEARSED)), gpu_key("bf16-mixed"), 2, 1024)
    assert (forward - found["forward"], backward - found["backward"]) == (3 * SEEDS, 3 * SEEDS)


@pytest.mark.parametrize("method", of_today(["gptq", "awq"], days=2))
def test_a_tape_tells_unpacked_weights_of_packed_checkpoints(method: str) -> None:
    assert unpacked(Recorder(packed_source(method)), gpu_key("bf16-mixed")) == in_bytes(BF16)


def test_packed_experts_are_refused() -> None:
    mixtral = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}
    with pytest.raises(UsageError, match="mixture of experts"):
        Recorder(packed_source("gptq", mixtral))


@in_turn(2, of=5)
def test_a_packed_checkpoint_stays_packed_under_adapters(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}))
    whole = estimate(model=str(path), gpus=2, strategy="ddp", seq_len=64)
    adapters = estimate(model=str(path), gpus=2, strategy="zero3", seq_len=64, use_peft=True)
    assert PACKED_NOTE in whole.notes and PACKED_NOTE not in adapters.notes
    assert "LoRA r=16 on a 4-bit GPTQ base" in str(adapters)
    assert adapters.parameters == whole.parameters + adapters.trainable_parameters
    assert any("are buffers, which are not sharded" in warning for warning in adapters.estimates[0].warnings)
    with pytest.raises(UsageError, match="GPTQ checkpoint with gptqmodel's kernels"):
        export("accelerate", model=str(path), gpus=2, strategy="zero3", seq_len=64, use_peft=True)
    with pytest.raises(UsageError, match="does not support DoRA"):
        estimate(model=str(path), gpus=2, strategy="ddp", use_peft=True, use_dora=True)


@in_turn(0, of=5)
def test_a_step_in_8_bits_is_slower_than_in_16_and_a_few_times_slower_than_in_4(tmp_path: Path) -> None:
    """Its forward has as many FLOPs as the others. Its backward multiplies in fp32."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(REHEARSED))

    def step(**base: bool) -> Any:
        job = {
            "gpus": 1,
            "gpu": "A100",
            "strategy": "ddp",
            "framework": "trainer",
            "micro_batch_size": 8,
            "seq_len": 4096,
        }
        (row,) = estimate(model=str(path), use_peft=True, **job, **base).estimates
        return row.step

    whole, four, eight = step(), step(load_in_4bit=True), step(load_in_8bit=True)
    assert four.seconds < eight.seconds < 5 * four.seconds
    assert whole.seconds < eight.seconds
    assert eight.model_flops == pytest.approx(whole.model_flops, rel=0.01) and eight.mfu > 0.05


def test_units_of_adapters_that_cannot_be_recorded_are_named_without_an_option(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    (row,) = estimate(
        model=str(path), gpus=2, strategy="zero3", seq_len=64, use_peft=True, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16",
        framework="axolotl", activation_checkpointing="every-2",
    ).estimates  # fmt: skip
    reasons = " ".join(item.reason for item in row.omissions)
    assert "axolotl makes FSDP units of the adapters" in reasons and "--wrap" not in reasons


@in_turn(0, of=3)
@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_adapters_that_are_units_within_checkpointed_layers_have_a_peak(backend: str) -> None:
    """The Trainer's usual LoRA under FSDP."""
    (row,) = estimate(
        model="openai-community/gpt2", gpus=2, framework="trainer", use_peft=True, strategy="zero3", backend=backend,
        activation_checkpointing="full", seq_len=64,
    ).estimates  # fmt: skip
    assert row.peak_allocated_bytes is not None
