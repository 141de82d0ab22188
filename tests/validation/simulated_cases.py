"""Jobs that are both simulated and predicted, one line each.

TORCH and FRAMEWORKS have every setting of the whole matrix, on its cheaper models. The tests take them; `CASES=all` adds the
rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from matrix import ALL

from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile


@dataclass(frozen=True)
class Case:
    model: str
    backend: str
    strategy: str
    gpus: int
    micro_batch_size: int
    seq_len: int
    precision: str = "bf16-mixed"
    activation_checkpointing: str = "none"
    attention: str = "sdpa"
    optim: str = "adamw_torch_fused"
    gradient_accumulation_steps: int = 1
    backward_prefetch: str = "pre"
    nnodes: int = 1
    framework: str = "torch"
    wrap: str = "layer"
    forward_prefetch: bool = False
    reshard_after_forward: str = "auto"
    use_orig_params: bool = True

    @property
    def settings(self) -> dict[str, Hashable]:
        """The values, by name, that decide which code runs. Sizes and world size are left out."""
        return {
            "engine": (self.backend, self.strategy),
            "precision": self.precision,
            "activation_checkpointing": self.activation_checkpointing,
            "attention": self.attention,
            "wrap": self.wrap.partition(":")[0],
            "framework": self.framework,
            "optim": self.optim,
            "accumulates": self.gradient_accumulation_steps > 1,
            "backward_prefetch": self.backward_prefetch,
            "forward_prefetch": self.forward_prefetch,
            "reshard_after_forward": self.reshard_after_forward,
            "use_orig_params": self.use_orig_params,
        }

    def __str__(self) -> str:
        return "-".join(str(v) for v in vars(self).values()).replace("/", "_")


def plan_of(case: Case) -> Plan:
    request = make_request(vars(case))
    (plan,) = plans(request, seq_len=case.seq_len)
    return plan


DEEP = 13
"""Models with at least this many layers are simulated with fewer of their equal layers, because the time grows with the layers. With
`CASES=all` they keep all.
"""


def of_case(profile: Profile) -> Profile:
    """The profile and configuration to simulate: the model's own, or of a deep model, with most of its repeated layers left out."""
    if ALL or max(stack.depth for stack in profile.stacks) < DEEP:
        return profile
    (stack,) = profile.stacks
    runs = tuple(run._replace(repeats=min(run.repeats, 2 if len(run.pattern) == 1 else 1)) for run in stack.runs)
    short = replace(stack, runs=runs)
    (name,) = {"num_hidden_layers", "n_layer"} & set(profile.config)
    return replace(profile, stacks=(short,), config={**profile.config, name: short.depth})


TINY, L1B, L7B = "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-2-7b-hf"
QWEN2, QWEN3, PHI3 = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "microsoft/Phi-3-mini-4k-instruct"
GEMMA, GEMMA2, GEMMA3 = "google/gemma-2b", "google/gemma-2-2b", "google/gemma-3-1b-pt"
GEMMA3_4B, GEMMA3_12B = "google/gemma-3-4b-pt", "google/gemma-3-12b-pt"
MISTRAL, MIXTRAL, GPT2, GPTJ = (
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "openai-community/gpt2",
    "EleutherAI/gpt-j-6b",
)
PYTHIA, NEOX, OPT, BLOOM = (
    "EleutherAI/pythia-70m",
    "EleutherAI/pythia-410m",
    "facebook/opt-125m",
    "bigscience/bloom-560m",
)
BERT, T5 = "google-bert/bert-base-uncased", "google-t5/t5-small"
VIT, WHISPER = "google/vit-base-patch16-224", "openai/whisper-tiny"
OF_A_MODULE, OF_A_LAYER, OF_THE_BASE_MODEL = "size:800K", "size:2M", "size:15M"

TORCH = [
    Case(L7B, "fsdp1", "zero3", 8, 1, 2048, backward_prefetch="post"),
    Case(QWEN3, "ddp", "ddp", 3, 1, 1024, "fp32", optim="adamw_torch"),
    Case(PYTHIA, "fsdp1", "zero2", 4, 2, 256, wrap=OF_A_LAYER),
    Case(PYTHIA, "fsdp2", "hsdp", 8, 2, 256, wrap="every:4", nnodes=2, activation_checkpointing="full"),
    Case(PYTHIA, "fsdp2", "zero2", 4, 2, 256, wrap=OF_A_MODULE, activation_checkpointing="full"),
    Case(PYTHIA, "fsdp1", "zero2", 8, 2, 256, "fp32", forward_prefetch=True),
    Case(PYTHIA, "fsdp1", "hsdp", 16, 2, 256, nnodes=2, reshard_after_forward="false"),
    Case(PYTHIA, "fsdp1", "zero3", 7, 2, 256, use_orig_params=False),
    Case(PYTHIA, "fsdp1", "zero2", 1, 2, 256, activation_checkpointing="full"),
    Case(PYTHIA, "fsdp1", "hsdp", 2, 2, 256, nnodes=2, reshard_after_forward="false"),
    Case(PYTHIA, "fsdp2", "hsdp", 16, 2, 256, nnodes=2, reshard_after_forward="4", activation_checkpointing="full"),
    Case(PYTHIA, "fsdp2", "zero3", 8, 2, 256, "fp32", reshard_after_forward="2"),
    Case(PYTHIA, "ddp", "ddp", 2, 2, 256, "bf16", optim="rmsprop"),
    Case(PYTHIA, "fsdp1", "zero3", 3, 2, 256, "bf16", optim="adagrad"),
    Case(PYTHIA, "ddp", "ddp", 2, 2, 256, "fp32", optim="schedule_free_adamw"),
    Case(PYTHIA, "fsdp2", "zero3", 3, 2, 256, "bf16", optim="schedule_free_sgd"),
    Case(PYTHIA, "ddp", "ddp", 2, 2, 256, optim="adamw_bnb_8bit"),
    Case(PYTHIA, "fsdp1", "zero3", 3, 2, 256, optim="paged_adamw_8bit"),
    Case(PYTHIA, "ddp", "ddp", 1, 2, 256, "bf16", optim="lion_8bit"),
    Case(GPT2, "ddp", "ddp", 2, 2, 256, optim="paged_ademamix_8bit"),
]
"""Cases of PyTorch's own engines."""

FRAMEWORKS = [
    Case(TINY, "fsdp2", "zero2", 7, 2, 512, "bf16", framework="accelerate"),
    Case(TINY, "fsdp2", "zero3", 8, 1, 256, gradient_accumulation_steps=2, wrap="none", framework="trainer"),
    Case(WHISPER, "fsdp1", "zero3", 64, 4, 448, activation_checkpointing="full", framework="trainer"),
    Case(GPTJ, "fsdp1", "zero3", 8, 2, 512, attention="eager", framework="accelerate"),
    Case(WHISPER, "ddp", "ddp", 2, 2, 448, "fp32", framework="trainer"),
    Case(BERT, "ddp", "ddp", 2, 4, 512, attention="eager", framework="accelerate"),
    Case(PYTHIA, "fsdp1", "zero3", 1, 2, 256, gradient_accumulation_steps=2, framework="accelerate"),
    Case(TINY, "ddp", "ddp", 2, 2, 256, optim="paged_adamw_32bit", framework="trainer"),
]
"""Cases of the engines under accelerate and the Trainer, and of wrapping the whole model."""

MORE_TORCH = [
    Case(TINY, "fsdp2", "zero3", 2, 1, 128),
    Case(GPT2, "fsdp1", "zero2", 3, 2, 256, "fp32", use_orig_params=False),
    Case(T5, "fsdp1", "zero3", 7, 2, 256, activation_checkpointing="full", use_orig_params=False),
    Case(
        BLOOM,
        "fsdp1",
        "zero3",
        5,
        2,
        128,
        "bf16",
        attention="eager",
        gradient_accumulation_steps=2,
        use_orig_params=False,
    ),
    Case(GEMMA3, "fsdp1", "zero3", 6, 1, 256, use_orig_params=False),
    Case(PYTHIA, "fsdp1", "zero3", 3, 2, 256, "fp32", wrap=OF_A_MODULE, use_orig_params=False),
    Case(GPT2, "fsdp1", "hsdp", 14, 2, 256, nnodes=2, use_orig_params=False),
    Case(QWEN2, "ddp", "ddp", 1, 2, 2048, "bf16"),
    Case(MISTRAL, "fsdp1", "zero3", 16, 1, 4096, "bf16"),
    Case(GEMMA, "ddp", "ddp", 2, 1, 512, activation_checkpointing="full", attention="eager"),
    Case(GEMMA2, "fsdp2", "zero3", 8, 1, 2048, attention="eager"),
    Case(GEMMA3, "fsdp2", "zero3", 2, 2, 1024),
    Case(PHI3, "fsdp2", "zero3", 1, 1, 512),
    Case(GPT2, "ddp", "ddp", 8, 4, 512),
    Case(OPT, "ddp", "ddp", 2, 2, 1024, "fp32", optim="adamw_torch"),
    Case(BLOOM, "fsdp2", "zero2", 256, 4, 512, "bf16", attention="eager"),
    Case(BERT, "ddp", "ddp", 4, 32, 128, "fp32"),
    Case(T5, "fsdp1", "zero3", 7, 2, 256, "fp32", "full"),
    Case(MIXTRAL, "fsdp2", "zero3", 8, 2, 1024, "bf16", "full"),
    Case(VIT, "fsdp2", "zero2", 64, 8, 197, "fp32"),
    Case(WHISPER, "ddp", "ddp", 8, 2, 448),
    Case(PYTHIA, "fsdp2", "zero3", 4, 2, 256, wrap=OF_A_MODULE),
    Case(PYTHIA, "fsdp1", "zero3", 3, 2, 256, "fp32", wrap=OF_A_MODULE, backward_prefetch="post"),
    Case(GPT2, "fsdp1", "zero3", 3, 2, 256, wrap="none", gradient_accumulation_steps=2),
    Case(T5, "fsdp2", "zero3", 3, 2, 256, wrap="every:4"),
    Case(PYTHIA, "fsdp2", "zero3", 8, 2, 256, forward_prefetch=True),
    Case(PYTHIA, "fsdp1", "zero3", 3, 2, 256, optim="rmsprop"),
    Case(PYTHIA, "fsdp2", "zero3", 3, 2, 256, optim="rmsprop"),
    Case(PYTHIA, "ddp", "ddp", 2, 2, 256, optim="adagrad"),
    Case(PYTHIA, "fsdp2", "zero3", 3, 2, 256, optim="adagrad"),
    Case(PYTHIA, "fsdp1", "zero3", 3, 2, 256, "bf16", optim="schedule_free_adamw"),
    Case(PYTHIA, "fsdp2", "zero3", 3, 2, 256, optim="schedule_free_adamw"),
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
    Case(L7B, "fsdp2", "hsdp", 16, 1, 2048, nnodes=2),
    Case(QWEN2, "fsdp2", "zero3", 8, 8, 1024, optim="adamw_torch"),
    Case(QWEN2, "fsdp2", "zero3", 64, 1, 2048, attention="eager"),
    Case(QWEN2, "fsdp1", "zero2", 2, 4, 1024, "fp32"),
    Case(QWEN3, "fsdp2", "zero3", 7, 4, 2048),
    Case(QWEN3, "fsdp2", "zero3", 8, 2, 8192, activation_checkpointing="full", attention="eager"),
    Case(MISTRAL, "fsdp2", "zero3", 64, 1, 4096, activation_checkpointing="full"),
    Case(MISTRAL, "fsdp2", "zero2", 64, 2, 400, "fp32"),
    Case(GEMMA, "fsdp2", "zero3", 8, 2, 2048),
    Case(GEMMA2, "fsdp1", "zero3", 8, 2, 4096, activation_checkpointing="full", attention="eager"),
    Case(GEMMA3_4B, "fsdp2", "zero3", 8, 1, 8192, "bf16", "full"),
    Case(GEMMA3_4B, "ddp", "ddp", 8, 2, 2048, activation_checkpointing="full", gradient_accumulation_steps=2),
    Case(GEMMA3_12B, "fsdp2", "zero3", 8, 1, 4096, activation_checkpointing="full", attention="eager"),
    Case(PHI3, "fsdp2", "zero3", 8, 2, 2048),
    Case(GPT2, "ddp", "ddp", 2, 8, 1024, "fp32"),
    Case(GPT2, "fsdp2", "zero3", 4, 8, 1024, attention="eager"),
    Case(GPT2, "fsdp1", "zero3", 3, 16, 512, activation_checkpointing="full"),
    Case(NEOX, "fsdp2", "zero3", 4, 4, 2048, optim="adamw_torch"),
    Case(NEOX, "ddp", "ddp", 7, 1, 128, "bf16"),
    Case(OPT, "fsdp2", "zero3", 8, 4, 1024),
    Case(OPT, "fsdp1", "zero3", 1, 2, 256, "fp32"),
    Case(GPTJ, "fsdp1", "zero3", 8, 2, 512, attention="eager"),
    Case(BLOOM, "fsdp2", "zero3", 4, 2, 1024, attention="eager"),
    Case(BERT, "fsdp2", "zero3", 4, 16, 512),
    Case(BERT, "ddp", "ddp", 4, 8, 512, activation_checkpointing="full", attention="eager"),
    Case(T5, "fsdp2", "zero3", 8, 8, 512),
    Case(T5, "ddp", "ddp", 2, 4, 512),
    Case(MIXTRAL, "fsdp2", "zero3", 64, 1, 2048),
    Case(MIXTRAL, "fsdp1", "zero3", 8, 2, 512),
    Case(WHISPER, "fsdp2", "zero3", 8, 2, 448),
    Case(PYTHIA, "fsdp1", "zero3", 4, 2, 256, wrap=OF_THE_BASE_MODEL),
    Case(GPT2, "fsdp2", "zero3", 3, 2, 256, wrap="every:5", gradient_accumulation_steps=3),
]

MORE_FRAMEWORKS = [
    Case(TINY, "fsdp2", "hsdp", 16, 1, 1024, nnodes=2, framework="accelerate"),
    Case(L1B, "fsdp2", "zero3", 2, 2, 512, "fp32", "full", framework="accelerate"),
    Case(GPT2, "fsdp2", "zero3", 4, 8, 1024, attention="eager", framework="trainer"),
    Case(VIT, "fsdp2", "zero2", 3, 4, 197, "fp32", "full", framework="trainer"),
    Case(TINY, "fsdp2", "zero3", 8, 2, 512, activation_checkpointing="full", wrap="none"),
    Case(GPT2, "fsdp2", "zero2", 3, 2, 512, gradient_accumulation_steps=2, wrap="none"),
    Case(T5, "fsdp1", "zero2", 8, 2, 512, "bf16", framework="accelerate"),
    Case(GPT2, "fsdp1", "zero2", 7, 2, 256, framework="accelerate", use_orig_params=False),
    Case(
        TINY, "fsdp1", "zero3", 3, 2, 256, activation_checkpointing="full", framework="trainer", use_orig_params=False
    ),
    Case(PYTHIA, "fsdp1", "hsdp", 16, 4, 512, nnodes=2, framework="accelerate"),
    Case(PYTHIA, "fsdp1", "hsdp", 2, 2, 256, nnodes=2, gradient_accumulation_steps=2, framework="accelerate"),
    Case(PYTHIA, "fsdp2", "zero3", 3, 2, 256, optim="schedule_free_adamw", framework="accelerate"),
    Case(PYTHIA, "fsdp2", "zero3", 3, 2, 256, optim="schedule_free_adamw", framework="trainer"),
    Case(PYTHIA, "ddp", "ddp", 4, 2, 256, optim="adamw_bnb_8bit", framework="trainer"),
    Case(TINY, "fsdp2", "zero3", 8, 2, 512, framework="accelerate"),
    Case(TINY, "fsdp2", "zero3", 64, 1, 2048, activation_checkpointing="full", framework="trainer"),
    Case(GPT2, "fsdp2", "zero3", 4, 1, 512, gradient_accumulation_steps=3, framework="trainer"),
    Case(L1B, "fsdp2", "zero3", 256, 1, 4096, framework="trainer"),
    Case(QWEN2, "fsdp2", "zero3", 3, 4, 512, gradient_accumulation_steps=2, framework="accelerate"),
    Case(GEMMA, "fsdp2", "zero3", 8, 2, 1024, activation_checkpointing="full", framework="accelerate"),
    Case(OPT, "fsdp2", "zero2", 8, 4, 512, activation_checkpointing="full", framework="trainer"),
    Case(WHISPER, "fsdp2", "zero3", 8, 2, 448, framework="accelerate"),
    Case(VIT, "fsdp2", "zero3", 8, 4, 197, "bf16", framework="accelerate"),
    Case(TINY, "fsdp1", "zero3", 8, 2, 512, activation_checkpointing="full", framework="accelerate"),
    Case(QWEN2, "fsdp1", "zero2", 8, 2, 512, gradient_accumulation_steps=3, framework="accelerate"),
    Case(GPT2, "fsdp1", "hsdp", 16, 4, 512, nnodes=2, framework="accelerate"),
    Case(GPT2, "fsdp1", "zero3", 3, 4, 512, framework="trainer"),
    Case(T5, "fsdp1", "zero3", 8, 4, 512, framework="accelerate"),
    Case(T5, "fsdp1", "zero3", 2, 2, 256, activation_checkpointing="full", framework="trainer"),
    Case(WHISPER, "fsdp1", "zero3", 8, 2, 448, framework="accelerate"),
    Case(BERT, "fsdp1", "zero3", 8, 4, 512, framework="accelerate"),
    Case(VIT, "fsdp1", "zero2", 8, 4, 197, framework="accelerate"),
    Case(GPT2, "ddp", "ddp", 8, 4, 512, framework="accelerate"),
    Case(TINY, "ddp", "ddp", 8, 2, 512, framework="trainer"),
    Case(GPT2, "ddp", "ddp", 8, 4, 512, "fp32", framework="trainer"),
    Case(T5, "ddp", "ddp", 8, 4, 512, framework="trainer"),
    Case(WHISPER, "ddp", "ddp", 8, 4, 448, framework="trainer"),
    Case(OPT, "ddp", "ddp", 2, 4, 512, activation_checkpointing="full", framework="trainer"),
]


def settings_of(cases: Iterable[Case]) -> set[tuple[str, Hashable]]:
    """The settings that occur in the cases."""
    return {setting for case in cases for setting in case.settings.items()}
