"""Predicted peaks with selective and layer-wise checkpointing against PyTorch's engines around the same model.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase but for scalars of a framework. transformers'
own code checkpoints the layers.
`tests/rehearsal/test_checkpointing.py` compares the policies with torchtitan's and TRL's code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from adapter_peaks import SCALARS_BYTES
from matrix import taken
from small_models import Case, name_of, options_of, small_models

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor.engines.host import host_memory  # after the check
from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape import ROOT, value_at
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.tape_keys import tape_key_of

pytestmark = pytest.mark.slow

CONFIGS = small_models(vocabulary=1024, layers=7, gpt2={"vocab_size": 515}, t5={"num_layers": 5})
MODELS = ("llama", "qwen3", "mixtral", "phi3", "gpt2", "bert", "t5")
ENGINES: dict[str, dict[str, str]] = {
    "ddp": {"strategy": "ddp", "gpus": "4"},
    "fsdp2": {"strategy": "zero3", "backend": "fsdp2", "gpus": "4"},
    "fsdp1": {"strategy": "zero3", "backend": "fsdp1", "gpus": "4"},
}


def _case(model: str, engine: str, checkpointing: str, **more: str) -> Case:
    attention = {"attention": "eager"} if model == "t5" else {}
    return {"model": model, **ENGINES[engine], "activation_checkpointing": checkpointing, **attention, **more}


FEW: list[Case] = [
    _case("llama", "fsdp2", "selective"),
    _case("qwen3", "ddp", "every-3", precision="bf16"),
    _case("llama", "ddp", "selective", framework="trl"),
    _case("llama", "fsdp2", "reentrant"),
    _case("qwen3", "fsdp1", "reentrant", gradient_accumulation_steps="2"),
]
MORE: list[Case] = [
    _case(model, engine, checkpointing, **more)
    for model in MODELS
    for engine in ENGINES
    for checkpointing, more in (
        ("selective", {}),
        ("every-2", {"gradient_accumulation_steps": "2"}),
        ("every-3", {"framework": "accelerate"}),
        ("reentrant", {}),
        ("reentrant", {"framework": "trainer"}),
    )
    if (model, checkpointing) != ("mixtral", "selective")
    and not (model in ("bert", "t5") and more.get("framework") == "trainer")
] + [
    _case("llama", "ddp", "selective", use_peft="true"),
    _case("llama", "fsdp2", "every-2", use_peft="true", dtype="bfloat16"),
    _case("qwen3", "fsdp2", "selective", precision="fp32"),
    _case("llama", "fsdp2", "every-2", framework="trainer"),
    _case("qwen3", "ddp", "selective", loss="liger"),
    _case("llama", "ddp", "reentrant", use_peft="true"),
    _case("llama", "fsdp2", "reentrant", use_peft="true", dtype="bfloat16"),
    _case("qwen3", "ddp", "reentrant", precision="bf16", gradient_accumulation_steps="2"),
]


def _request(case: Case, folder: Path) -> EstimateRequest:
    return make_request(options_of(CONFIGS, case, folder))


@pytest.mark.parametrize("case", taken(FEW, MORE, days=8), ids=name_of)
def test_predicted_peaks_equal_pytorch_with_partial_checkpointing(case: Case, tmp_path: Path) -> None:
    request = _request(case, tmp_path)
    predicted, simulated = predicted_and_simulated(request)
    scalars = 0 if request.framework == "torch" else SCALARS_BYTES
    for phase, n_bytes in simulated.items():
        assert 0 <= n_bytes - predicted[phase] <= scalars, (phase, n_bytes, predicted[phase])


def test_a_model_that_changes_a_kept_tensor_is_refused(tmp_path: Path) -> None:
    """Mixtral divides the experts' weights in place, which PyTorch refuses of a tensor that a policy keeps."""
    request = _request(_case("mixtral", "fsdp2", "selective"), tmp_path)
    (plan,) = plans(request, seq_len=128)
    with pytest.raises(NotRecordable, match="has been mutated"):
        resolve(request.model).tape(tape_key_of(plan))


def test_selective_checkpointing_repeats_every_second_matrix_product(tmp_path: Path) -> None:
    key = TapeKey("fsdp2", "bf16-mixed", "sdpa", "selective", at=(3, 100))
    tape = resolve(_request(FEW[0], tmp_path).model).tape(key)
    hidden, width, keys = 128, 256, 64
    for segment in tape.segments:
        if segment.recomputed is None:
            continue
        products = (hidden * keys, hidden * hidden, hidden * width)  # keys, attention's output, up
        assert value_at(segment.recomputed.matmul_flops, 3, 100) == 2 * 300 * sum(products)
    assert sum(segment.recomputed is not None for segment in tape.segments) == 5


def test_one_of_n_layers_repeats_its_forward(tmp_path: Path) -> None:
    request = _request(_case("llama", "fsdp2", "every-3"), tmp_path)
    model = resolve(request.model).adapted(adaptation_of(request))
    tape = model.tape(TapeKey("fsdp2", "bf16-mixed", "sdpa", "every", at=(2, 64)))
    assert model.profile is not None
    (stack,) = model.profile.stacks
    repeated = {s.layer: s.recomputed.operators > 0 for s in tape.segments if s.recomputed is not None}
    order = [repeated[layer] for layer in stack.recorded_order]
    assert order == [True, False, False, True, False, False, True]


def test_activation_offload_copies_the_input_of_each_layer(tmp_path: Path) -> None:
    """In fp32, of 7 layers. Pinned memory is rounded up to a power of two."""
    case = _case("llama", "ddp", "full", activation_offload="true", precision="fp32", micro_batch_size="3")
    request = _request(case, tmp_path)
    model = resolve(request.model)
    assert model.profile is not None
    (plan,) = plans(request, seq_len=100)
    tape = model.tape(replace(tape_key_of(plan, model.profile), at=(3, 100)))
    for segment in tape.segments:
        copies = [value_at(n_bytes, 3, 100) for n_bytes in segment.host_copies]
        assert copies == ([] if segment.stack == ROOT else [3 * 100 * 128 * 4])
    assert host_memory(model.profile, plan, tape).pinned == 4 * 7 * 2**18
