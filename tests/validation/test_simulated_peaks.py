"""Predicted peaks against PyTorch's own FSDP2, FSDP1 and DDP, run whole under fake tensors: equal to the byte.

Two allowances. foreach AdamW keeps its step counts on the host, one 512-byte storage per parameter, which a run on fake CPU
tensors counts and a GPU does not hold. FSDP1 under mixed precision casts buffers as well, which spares Gemma the cast of its
embedding scale: one scalar, 512 bytes, in tapes of the catalog that know nothing of it.
"""

from __future__ import annotations

import pytest
from simulated_cases import Case, plan_of

torch = pytest.importorskip("torch")

from fsdp_advisor.estimator import replayed  # noqa: E402  # after the check for torch
from fsdp_advisor.model.resolve import resolve  # noqa: E402
from fsdp_advisor.recording import TransformersSource  # noqa: E402
from fsdp_advisor.tapes import tape_key_of  # noqa: E402  # after the check for torch
from fsdp_advisor.validation.simulate import simulate  # noqa: E402

TINY, L1B, L7B = "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-2-7b-hf"
QWEN2, QWEN3 = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B"
MISTRAL, GEMMA, GEMMA2, GEMMA3, GEMMA3_4B, GEMMA3_12B = (
    "mistralai/Mistral-7B-v0.1",
    "google/gemma-2b",
    "google/gemma-2-2b",
    "google/gemma-3-1b-pt",
    "google/gemma-3-4b-pt",
    "google/gemma-3-12b-pt",
)
PHI3, GPT2, NEOX, OPT = (
    "microsoft/Phi-3-mini-4k-instruct",
    "openai-community/gpt2",
    "EleutherAI/pythia-410m",
    "facebook/opt-125m",
)
GPTJ = "EleutherAI/gpt-j-6b"
BLOOM, BERT, T5 = "bigscience/bloom-560m", "google-bert/bert-base-uncased", "google-t5/t5-small"
MIXTRAL, VIT, WHISPER = "mistralai/Mixtral-8x7B-v0.1", "google/vit-base-patch16-224", "openai/whisper-tiny"

CASES = [
    # few ranks and tokens: backward ends at the peak, with the head's gradient held while the root is reduced
    Case(TINY, "fsdp2", "zero3", 2, 1, 128),
    Case(TINY, "fsdp2", "zero2", 3, 1, 128),
    Case(TINY, "fsdp2", "hsdp", 4, 1, 128, nnodes=2),
    Case(TINY, "fsdp2", "zero3", 8, 4, 2048),
    Case(TINY, "fsdp1", "zero3", 8, 4, 2048, "bf16"),
    Case(TINY, "ddp", "ddp", 8, 2, 1024),
    Case(TINY, "fsdp2", "zero2", 2, 1, 2048, "fp32"),
    Case(L1B, "fsdp2", "zero3", 3, 2, 1024),
    Case(L1B, "fsdp2", "zero3", 256, 1, 8192),
    Case(L1B, "fsdp2", "zero3", 7, 32, 128, "bf16"),
    Case(L1B, "fsdp1", "zero3", 7, 2, 512),
    Case(L1B, "ddp", "ddp", 64, 1, 4096, activation_checkpointing="full"),
    Case(L1B, "fsdp2", "zero3", 8, 2, 2048, gradient_accumulation_steps=2),
    Case(L1B, "ddp", "ddp", 8, 2, 1024, gradient_accumulation_steps=3),
    Case(L7B, "fsdp2", "zero3", 4, 1, 2048),
    Case(L7B, "fsdp2", "zero3", 64, 4, 4096, activation_checkpointing="full"),
    Case(L7B, "fsdp2", "zero2", 8, 1, 2048),
    Case(L7B, "fsdp1", "zero3", 8, 1, 2048, backward_prefetch="post"),
    Case(L7B, "fsdp2", "hsdp", 16, 1, 2048, nnodes=2),
    Case(QWEN2, "fsdp2", "zero3", 8, 8, 1024, optim="adamw_torch"),
    Case(QWEN2, "fsdp2", "zero3", 64, 1, 2048, attention="eager"),
    Case(QWEN2, "ddp", "ddp", 1, 2, 2048, "bf16"),
    Case(QWEN2, "fsdp1", "zero2", 2, 4, 1024, "fp32"),
    Case(QWEN3, "fsdp2", "zero3", 7, 4, 2048),
    Case(QWEN3, "fsdp2", "zero3", 8, 2, 8192, activation_checkpointing="full", attention="eager"),
    Case(QWEN3, "ddp", "ddp", 3, 1, 1024, "fp32", optim="adamw_torch"),
    Case(MISTRAL, "fsdp2", "zero3", 64, 1, 4096, activation_checkpointing="full"),
    Case(MISTRAL, "fsdp2", "zero2", 64, 2, 400, "fp32"),
    Case(MISTRAL, "fsdp1", "zero3", 16, 1, 4096, "bf16"),
    Case(GEMMA, "fsdp2", "zero3", 8, 2, 2048),
    Case(GEMMA, "ddp", "ddp", 2, 1, 512, activation_checkpointing="full", attention="eager"),
    Case(GEMMA2, "fsdp2", "zero3", 8, 1, 2048, attention="eager"),
    Case(GEMMA2, "fsdp1", "zero3", 8, 2, 4096, activation_checkpointing="full", attention="eager"),
    Case(GEMMA3, "fsdp2", "zero3", 2, 2, 1024),
    Case(GEMMA3_4B, "fsdp2", "zero3", 8, 1, 8192, "bf16", "full"),
    Case(GEMMA3_4B, "ddp", "ddp", 8, 2, 2048, activation_checkpointing="full", gradient_accumulation_steps=2),
    Case(GEMMA3_12B, "fsdp2", "zero3", 8, 1, 4096, activation_checkpointing="full", attention="eager"),
    Case(PHI3, "fsdp2", "zero3", 8, 2, 2048),
    Case(PHI3, "fsdp2", "zero3", 1, 1, 512),
    Case(GPT2, "ddp", "ddp", 2, 8, 1024, "fp32"),
    Case(GPT2, "ddp", "ddp", 8, 4, 512),
    Case(GPT2, "fsdp2", "zero3", 4, 8, 1024, attention="eager"),
    Case(GPT2, "fsdp1", "zero3", 3, 16, 512, activation_checkpointing="full"),
    Case(NEOX, "fsdp2", "zero3", 4, 4, 2048, optim="adamw_torch"),
    Case(NEOX, "ddp", "ddp", 7, 1, 128, "bf16"),
    Case(OPT, "fsdp2", "zero3", 8, 4, 1024),
    Case(OPT, "ddp", "ddp", 2, 2, 1024, "fp32", optim="adamw_torch"),
    Case(OPT, "fsdp1", "zero3", 1, 2, 256, "fp32"),
    Case(GPTJ, "fsdp1", "zero3", 8, 2, 512, attention="eager"),
    Case(BLOOM, "fsdp2", "zero3", 4, 2, 1024, attention="eager"),
    Case(BLOOM, "fsdp2", "zero2", 256, 4, 512, "bf16", attention="eager"),
    Case(BERT, "fsdp2", "zero3", 4, 16, 512),
    Case(BERT, "ddp", "ddp", 4, 32, 128, "fp32"),
    Case(BERT, "ddp", "ddp", 4, 8, 512, activation_checkpointing="full", attention="eager"),
    Case(T5, "fsdp2", "zero3", 8, 8, 512),
    Case(T5, "ddp", "ddp", 2, 4, 512),
    Case(T5, "fsdp1", "zero3", 7, 2, 256, "fp32", "full"),
    Case(MIXTRAL, "fsdp2", "zero3", 64, 1, 2048),
    Case(MIXTRAL, "fsdp2", "zero3", 8, 2, 1024, "bf16", "full"),
    Case(MIXTRAL, "fsdp1", "zero3", 8, 2, 512),
    Case(VIT, "fsdp2", "zero2", 64, 8, 197, "fp32"),
    Case(WHISPER, "fsdp2", "zero3", 8, 2, 448),
    Case(WHISPER, "ddp", "ddp", 8, 2, 448),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_peak_is_what_pytorch_does(case: Case) -> None:
    plan = plan_of(case)
    model = resolve(case.model)
    profile = model.profile
    assert profile is not None
    ledger = replayed(profile, model.tape(tape_key_of(plan)), plan)
    found = simulate(TransformersSource(profile.config, name=case.model, task=profile.task), plan)
    layers = sum(len(u.parameters) for u in profile.layers()) + len(profile.root.parameters)
    host_steps = 512 * layers if case.optim == "adamw_torch" else 0
    spared = 512 if case.backend == "fsdp1" and "gemma" in case.model else 0
    for phase, n_bytes in found.phase_peaks.items():
        short = n_bytes - ledger.phase_peaks[phase]
        assert -spared <= short <= host_steps, (phase, n_bytes, ledger.phase_peaks[phase])
    assert ledger.peak == pytest.approx(found.peak_tensor_bytes, rel=0.005)


def test_the_matrix_covers_what_it_must() -> None:
    assert len(CASES) >= 40
    assert {c.gpus for c in CASES} >= {1, 2, 3, 7, 8, 64, 256}
    assert {c.precision for c in CASES} == {"fp32", "bf16", "bf16-mixed"}
    assert {c.micro_batch_size for c in CASES} >= {1, 2, 32}
    assert {c.seq_len for c in CASES} >= {128, 8192}
