"""Models whose layers call kernels of packages that PyTorch and transformers do not install."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Attention, Fp8, Framework
from fsdp_advisor.job.fp8 import converts_head
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.kernel_packages import pip_install
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import AnyRequest, EstimateRequest
from fsdp_advisor.model.liger import LIGER_MODEL_TYPES, LIGER_VERSION
from fsdp_advisor.model.profile import Profile

TORCHAO_VERSION = "0.18"
"""The version whose float8 training is recorded."""

GATED_DELTA_RULE = frozenset({"lara_mini", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"})
"""Model types that call flash-linear-attention and causal-conv1d, and no other such package. transformers' folders have the same names.
"""
KIMI_DELTA_ATTENTION = frozenset({"bailing_hybrid", "glm5_next", "kimi_linear"})
"""Model types with Kimi delta attention, which call flash-linear-attention and causal-conv1d, and no other such package."""
STATE_SPACE_DUALITY = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"})
"""Model types with Mamba-2 layers, which call mamba-ssm and causal-conv1d, and no other such package."""
SELECTIVE_SCAN = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Model types with Mamba-1 layers, which call mamba-ssm and causal-conv1d. transformers' own code runs each token of a sequence in turn."""
WKV = frozenset({"rwkv"})
"""Model types that call the kernel of RWKV-4. transformers' own code runs each token of a sequence in turn."""
RG_LRU = frozenset({"recurrent_gemma"})
"""Model types with gated linear recurrent units. There are no kernels: transformers' code runs each token in turn on a GPU too."""
RUNS_TOKENS_ON_GPU = RG_LRU | {"qwen4_exp"}
"""Model types whose code runs each token of a sequence in turn on a GPU too, so that the number of operators depends on the length.

Source: transformers 5.23, modeling_recurrent_gemma.py, `RecurrentGemmaRglru._rnn_scan`; modeling_qwen4_exp.py, `Qwen4ExpTextQSAIndexer`.
"""
CLAMPS_FP16 = frozenset({
    "audioflamingo3", "autoformer", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "informer", "led", "longt5", "m2m_100",
    "marian", "mbart", "moss_transcribe_diarize", "mt5", "mvp", "nllb-moe", "pegasus", "pix2struct", "plbart", "pop2piano",
    "qwen2_5_omni", "qwen2_audio", "qwen3_asr", "qwen3_omni_moe", "speech_to_text", "switch_transformers", "t5",
    "time_series_transformer", "udop", "umt5", "voxtral", "whisper",
})  # fmt: skip
"""Model types whose layers clamp hidden states that are in float16 (`hidden_states.dtype == torch.float16`, transformers 5.23)."""
TOKENS_OF_ITERATION = {
    **dict.fromkeys(GATED_DELTA_RULE | KIMI_DELTA_ATTENTION, 64),
    **dict.fromkeys(SELECTIVE_SCAN | WKV | RG_LRU, 1),
}
"""Model type -> tokens of one iteration of the loop in Python that transformers runs where kernels are missing, as on a CPU."""
MOST_ITERATIONS = 64
"""The longest loop that is recorded for a CPU. An iteration takes about a tenth of a second for each tape of Qwen3.5-397B."""
MOST_ITERATIONS_ON_GPU = 2048
"""The longest loop that is recorded for a GPU without the kernels. A recording of this length takes 15 s (Mamba-1) to 70 s (Qwen3.5)."""
_ASSUMED = (
    " are assumed to be installed (kernel_packages); without them transformers runs its own code in PyTorch, which needs more memory"
    " and time"
)
_NO_SCAN_KERNELS = (
    "the figures of state-space layers are those of transformers' code in PyTorch: the kernels of mamba-ssm, flash-linear-attention and"
    " causal-conv1d, which transformers calls if they are installed, need less memory and time and are not modelled"
)


def _has_state_space(profile: Profile) -> bool:
    """Whether the model has a state-space layer, which is recognized by the name of its decay parameter."""
    return any(p.name.endswith("A_log") for p, _ in profile.counted_parameters())


def has_loop(profile: Profile) -> bool:
    """Whether the model's code runs chunks or tokens of a sequence in turn where kernels are missing, as on a CPU."""
    return _model_type(profile) in TOKENS_OF_ITERATION


def has_long_loop(profile: Profile, seq_len: int) -> bool:
    """Whether such a loop over `seq_len` tokens is too long to record the step on a CPU."""
    return has_loop(profile) and seq_len > MOST_ITERATIONS * TOKENS_OF_ITERATION[_model_type(profile)]


def runs_tokens_on_gpu(profile: Profile) -> bool:
    """Whether the model's code runs each token of a sequence in turn on a GPU too."""
    return _model_type(profile) in RUNS_TOKENS_ON_GPU


def iteration_tokens(config: Mapping[str, object]) -> int:
    """The tokens of one iteration of the loop that a model of this configuration runs where kernels are missing; 0 if it has none."""
    return TOKENS_OF_ITERATION.get(_type_of(config), 0)


def _type_of(config: Mapping[str, object]) -> str:
    return str(config.get("model_type")).removesuffix("_text")


def _model_type(profile: Profile) -> str:
    return _type_of(profile.config)


def called_packages(profile: Profile) -> tuple[str, ...]:
    """The packages whose kernels the model's layers call if they are installed."""
    model_type = _model_type(profile)
    if model_type in STATE_SPACE_DUALITY | SELECTIVE_SCAN and not _has_state_space(profile):
        return ()
    return packages_of(model_type)


def packages_of(model_type: str) -> tuple[str, ...]:
    """The `called_packages` of models of a type; some models of a type with state-space layers have none of these and call none."""
    model_type = model_type.removesuffix("_text")
    if model_type in GATED_DELTA_RULE | KIMI_DELTA_ATTENTION:
        return ("fla", "causal-conv1d")
    if model_type in WKV:
        return ("kernels",)
    return ("mamba-ssm", "causal-conv1d") if model_type in STATE_SPACE_DUALITY | SELECTIVE_SCAN else ()


def missing_packages(profile: Profile, installed: str) -> tuple[str, ...]:
    """Those of `called_packages` that are not among the `installed` ones (`--kernel-packages`)."""
    if installed == "all":
        return ()
    return tuple(package for package in called_packages(profile) if package not in installed.split(","))


def loops_without(profile: Profile, missing: Sequence[str]) -> bool:
    """Whether the model's code runs a loop on a GPU too if these packages are missing. The convolution's code has none."""
    return has_loop(profile) and any(package != "causal-conv1d" for package in missing)


def kernels_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why a plan cannot run, or is not estimated, without the packages that it lacks: a loop that is too long to record, or the failure of
    mamba-ssm's fused layers without causal-conv1d. Zamba's layers are not fused.

    Source: mamba-ssm 2.3, ops/selective_scan_interface.py, `MambaInnerFn`; ops/triton/ssd_combined.py, `MambaSplitConv1dScanCombinedFn`.
    """
    missing, (_, seq_len) = missing_packages(profile, plan.kernel_packages), plan.tape_shape
    if loops_without(profile, missing):
        tokens = TOKENS_OF_ITERATION[_model_type(profile)]
        if seq_len <= MOST_ITERATIONS_ON_GPU * tokens:
            return None
        return UsageError(
            f"without {missing[0]} transformers runs {'each token' if tokens == 1 else f'chunks of {tokens} tokens'} in turn, which is"
            f" estimated for at most {MOST_ITERATIONS_ON_GPU * tokens:,} tokens",
            hint=pip_install(missing),
        )
    if missing != ("causal-conv1d",) or "mamba-ssm" not in called_packages(profile) or _model_type(profile) == "zamba":
        return None
    return UsageError(
        "mamba-ssm's fused layers call causal-conv1d, and fail where it is not installed",
        hint=f"{pip_install(['causal-conv1d'])}, or --kernel-packages none for a run without both",
    )


def kernel_notes(request: EstimateRequest, profile: Profile | None) -> list[str]:
    """A note on the packages whose kernels the figures for a GPU have or do not have."""
    called = called_packages(profile) if profile is not None else ()
    if request.kernel_packages != "all" and not called:
        return ["kernel_packages is ignored: the model is not known to call kernels of these packages"]
    if profile is None:
        return []
    if missing := missing_packages(profile, request.kernel_packages):
        return [
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} taken as not installed, so transformers runs its own code in"
            f" PyTorch, which needs more memory and time; to have the kernels: {pip_install(missing)}"
        ]
    model_type = _model_type(profile)
    if model_type in GATED_DELTA_RULE | KIMI_DELTA_ATTENTION:
        return [f"flash-linear-attention and causal-conv1d{_ASSUMED}"]
    if model_type in WKV:
        return [f"kernels and ninja, with which transformers loads RWKV's kernel,{_ASSUMED}"]
    if not _has_state_space(profile):
        return []
    if model_type in STATE_SPACE_DUALITY | SELECTIVE_SCAN:
        return [
            f"mamba-ssm and causal-conv1d{_ASSUMED}; the time of mamba-ssm's kernels is estimated only from their FLOPs and memory traffic"
        ]
    return [_NO_SCAN_KERNELS]


def compile_notes(compile: str, attention: Attention, micro_batch_size: int) -> list[str]:
    """Notes on figures of compiled code."""
    if compile == "none":
        return []
    if attention == "flash_attention_2":
        divided = (
            "transformers reads in each layer whether the only row of a micro-batch is packed, which divides the layer's compiled code,"
            " and leaves a layer in a checkpoint uncompiled; with larger micro-batches it does not"
        )
        notes = [divided] * (micro_batch_size == 1)
    else:
        masked = "compiled code cannot check whether sequences are packed, so decoders of transformers make a mask of all pairs of tokens"
        notes = [
            *[masked] * (compile == "model"),
            f"--compile {compile}: simulated_peak_bytes is of the uncompiled code on a CPU; all other figures are of Inductor's compiled"
            " code",
        ]
    return [
        *notes,
        "Inductor chooses the number of partial sums for a GPU with the 132 multiprocessors of an H100; the first step, which compiles, is"
        " not included",
    ]


def fp16_notes(profile: Profile) -> list[str]:
    """A note on a model's step with hidden states in float16."""
    if profile.config.get("model_type") not in CLAMPS_FP16:
        return []
    return ["the masks with which the model's layers clamp hidden states in float16; in bf16 they do not"]


def fp8_notes(fp8: Fp8, compile: str, framework: Framework) -> list[str]:
    """Notes on figures with linear layers in fp8."""
    if fp8 == "none":
        return []
    if fp8 == "mxfp8":
        all_but = "" if converts_head(fp8, own_models=FRAMEWORKS[framework].own_models) else ", but the head"
        converted = (
            f"fp8 mxfp8: MXFP8Linear of torchao {TORCHAO_VERSION}'s prototype (moe_training) replaces the linear layers in which both "
            f"dimensions are multiples of 32{all_but}; experts in one parameter multiply in bf16, and FSDP2 gathers weights in bf16"
        )
        casts = "a cast to MXFP8 is one kernel, but two more copy its scales into blocks"
    else:
        converted = (
            f"fp8 {fp8}: torchao {TORCHAO_VERSION} converts the linear layers in which both dimensions are multiples of 16, but the head;"
            " FSDP2 gathers their weights in the compute dtype (enable_fsdp_float8_all_gather is not modelled)"
        )
        casts = "the casts to fp8 are several operators each, which need memory and time"
    return [converted] if compile != "none" else [converted, f"{casts}; torchao means them to be compiled"]


def without_unknown_liger(request: AnyRequest, profile: Profile | None) -> AnyRequest:
    """The request without Liger's kernels if Liger does not know the model, which it then leaves as it is."""
    if not request.use_liger_kernel or profile is None or _is_known_to_liger(profile):
        return request
    return request.but(use_liger_kernel=False)


def _is_known_to_liger(profile: Profile) -> bool:
    return profile.config.get("model_type") in LIGER_MODEL_TYPES


def liger_notes(request: EstimateRequest, profile: Profile | None) -> list[str]:
    """A note on figures with Liger's kernels."""
    if not request.use_liger_kernel or profile is None:
        return []
    if not _is_known_to_liger(profile):
        return [
            f"Liger {LIGER_VERSION} has no kernels for models of type {profile.config.get('model_type')}: use_liger_kernel changes"
            " nothing, and the loss is transformers' own"
        ]
    return [
        f"Liger {LIGER_VERSION}'s kernels run only on GPUs: simulated_peak_bytes is of transformers' own code, except for the"
        " loss; the other figures are of the kernels"
    ]
