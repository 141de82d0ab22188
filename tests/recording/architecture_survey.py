"""Survey of the architectures that transformers registers for the tasks that this tool knows: `architecture_survey.py`.

A small model of each, with two layers or as many as show every kind of layer, is recorded. The predicted peak of each phase of a step
under FSDP2 on two ranks, or under DDP if FSDP2 refuses the model, is compared with PyTorch's own step under fake tensors
(`fsdp_advisor/validation/simulate.py`). Of a multimodal model that needs images, the text part is recorded, as the tool does. The outcome
is written to architecture_survey.csv, one line each:

- `equal`: all phases agree to the byte.
- `different`: a phase differs; the reason names it, with the bytes.
- `refused`: the estimate or PyTorch's step is refused; the reason is the message.

Widths are the defaults of the configuration's class, because fake tensors cost nothing. Code that fails in bf16-mixed is surveyed in
fp32. `architecture_survey.py NAME...` surveys these architectures again (NAME or TASK/NAME) and leaves the other lines as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from fsdp_advisor.errors import AdvisorError, NoSuchAttention, NotPolynomial, NotRecordable, UnreadableConfig
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.config import trained_part
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import Recorder, TransformersSource
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.validation.simulate import simulate

RESULTS = Path(__file__).with_name("architecture_survey.csv")
SECONDS = 240
"""The limit of CPU time for one architecture."""
PLAN = Plan(
    strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=2), precision="bf16-mixed", micro_batch_size=2, seq_len=96
)
ON_DDP = replace(PLAN, strategy="ddp", backend="ddp", mesh=Mesh(dp_replicate=2))
REFUSED_BY_FSDP2 = ("fully_shard doesn't support", "already managed by another FSDP group")
"""Parts of the errors with which PyTorch's `fully_shard` refuses a model: a scalar parameter, or one that several layers share."""
SMALL = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "n_group", "topk_group"), 2),
    "first_k_dense_replace": 1,
}
"""Values that are set if the configuration's class has their keys."""
HEAD = {"head_dim": 128}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GLM_ROPE = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
EXTRA: dict[str, dict[str, Any]] = {
    "reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"n_layers": 2, "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {
        "topk_method": "greedy", "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408,
    },
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 896, "mlp_layer_types": ["dense", "sparse"],
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 704},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "emu3": {"vocabulary_map": {"<image>": 151655}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "glm4v_text": {"rope_parameters": GLM_ROPE},
    "glm4v_moe_text": {**HEAD, "rope_parameters": GLM_ROPE},
    "granite4_vision": {
        "downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1],
    },
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": HEAD,
    "hunyuan_vl_text": {**HEAD, "rope_parameters": {**ROPE, "mrope_section": [16, 16, 16, 16]}},
    "kosmos-2.5": {"latent_query_num": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": HEAD,
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 8},
    "perceiver": {"max_position_embeddings": PLAN.seq_len},
    "qwen3_omni_moe_text": {**HEAD, "num_attention_heads": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 4,
    },
    "step3p5": {"sliding_window": 512},
    "udop": {"decoder_start_token_id": 0},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"]},
}  # fmt: skip
"""Further values for single architectures: values that their classes do not set, or that contradict having two layers."""
REGISTERED = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech-seq2seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "ctc": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "audio-classification": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
"""Task -> model type -> class."""
_PARTS = (
    "text_config",
    "decoder",
    "encoder",
    "vision_config",
    "audio_config",
    "encoder_config",
    "decoder_config",
    "speech_config",
)
_BERT = {"model_type": "bert", "num_hidden_layers": 2}
_DECODER = {**_BERT, "is_decoder": True, "add_cross_attention": True}
_TOKENS = {"decoder_start_token_id": 1, "pad_token_id": 0}
COMPOSED: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"encoder": _BERT, "decoder": _DECODER, **_TOKENS},
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2", "num_hidden_layers": 2},
        "decoder": _DECODER,
        **_TOKENS,
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit", "num_hidden_layers": 2},
        "decoder": _DECODER,
        **_TOKENS,
    },
}
"""Configurations of models that are made of two others, which have no defaults."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The outcome for one architecture. `tape`: valid for any batch and length, or for the survey's alone."""

    task: str
    model_type: str
    outcome: str
    attention: str = ""
    precision: str = ""
    backend: str = ""
    tape: str = ""
    parameters: int = 0
    peak_bytes: int = 0
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.task}/{self.model_type}"


def architectures(task: str) -> list[str]:
    """The model types of a task, in alphabetical order."""
    return sorted(REGISTERED[task])


def small_config(model_type: str) -> dict[str, Any]:
    """The values of a small configuration: two layers, or the fewest with every kind of layer, and few experts."""
    if model_type in COMPOSED:
        return {"model_type": model_type, **COMPOSED[model_type]}
    defaults = transformers.AutoConfig.for_model(model_type)
    kind = type(defaults)
    plain = defaults.to_dict()
    names = set(plain) | set(getattr(kind, "attribute_map", {}))
    values: dict[str, Any] = {"model_type": model_type}
    for name, value in SMALL.items():
        own = getattr(kind, "attribute_map", {}).get(name, name)
        is_depth = own != "num_stages"  # ConvNeXt's stages have lists of widths
        if name in names and is_depth and isinstance(plain.get(own), int) and plain[own] > value:
            values[own] = value
    kinds = plain.get("layer_types")
    if isinstance(kinds, list) and "num_hidden_layers" in values:
        values["num_hidden_layers"] = max(2, next(n for n in range(len(kinds) + 1) if set(kinds[:n]) == set(kinds)))
    for name, nested in plain.items():
        if name in _PARTS and isinstance(nested, dict):
            known = nested.get("model_type") in CONFIG_MAPPING_NAMES
            small = {key: value for key, value in SMALL.items() if isinstance(nested.get(key), int)}
            values[name] = small_config(nested["model_type"]) if known else small
    return values | EXTRA.get(model_type, {})


def task_config(task: str, model_type: str) -> dict[str, Any]:
    """`small_config` with the class of the task."""
    values = small_config(model_type) | {"architectures": [_class(task, model_type)]}
    if "seq2seq" in task and model_type not in COMPOSED:  # their code needs special tokens that some classes do not set
        defaults = transformers.AutoConfig.for_model(model_type)
        values |= {name: token for name, token in _TOKENS.items() if getattr(defaults, name, None) is None}
    return values | {"is_decoder": True} if task == "causal-lm" else values


def _class(task: str, model_type: str) -> str:
    found = REGISTERED[task][model_type]
    return found if isinstance(found, str) else found[0]


def survey(task: str, model_type: str, *, any_batch: bool = True) -> Line:
    """The outcome for one architecture. `any_batch`: try to record a causal model for any micro-batch and length."""
    try:
        with _time_limit():
            return _compared(task, model_type, any_batch=any_batch and task == "causal-lm")
    except TimeoutError:
        reason = f"took longer than {SECONDS} s of CPU time"
    except AdvisorError as error:
        reason = _line(error.message)
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        reason = _line(f"{type(error).__name__}: {error}")
    return Line(task=task, model_type=model_type, outcome="refused", reason=reason)


def _compared(task: str, model_type: str, *, any_batch: bool) -> Line:
    config = task_config(task, model_type)
    if task != "causal-lm":
        part, _ = trained_part(config, model_type)
        can_be_built = part["model_type"] in {*REGISTERED[task], *REGISTERED["causal-lm"]}
        config = part if can_be_built else config
    recorder = _recorder(config, task, model_type)
    try:
        for_any, plan, off, peak = _step(recorder, PLAN, any_batch=any_batch)
    except ValueError as error:
        if not any(part in str(error) for part in REFUSED_BY_FSDP2):
            raise
        for_any, plan, off, peak = _step(recorder, ON_DDP, any_batch=any_batch)
    return Line(
        task=task,
        model_type=model_type,
        outcome="different" if off else "equal",
        attention=plan.attention,
        precision=plan.precision,
        backend=plan.backend,
        tape="any" if for_any else "one",
        parameters=recorder.profile.parameters,
        peak_bytes=peak,
        reason=", ".join(f"{phase} {n_bytes:+d} B" for phase, n_bytes in off.items()),
    )


def _step(recorder: Recorder, plan: Plan, *, any_batch: bool) -> tuple[bool, Plan, dict[str, int], int]:
    """Whether the step's tape is valid for any batch, its plan, the phases that differ, and the simulated peak."""
    try:
        tape, for_any, plan = _tape_of_attention(recorder, plan, any_batch=any_batch)
    except NotRecordable:
        tape, for_any, plan = _tape_of_attention(recorder, replace(plan, precision="fp32"), any_batch=any_batch)
    return for_any, plan, *_differences(recorder, tape, plan)


def _recorder(config: dict[str, Any], task: str, model_type: str) -> Recorder:
    """A recorder of the model; of its text part if it is a multimodal model that cannot be built as a language model."""
    try:
        return Recorder(TransformersSource(config, name=model_type, task=_task_of(config, task)))
    except UnreadableConfig:
        if task != "causal-lm" or model_type not in REGISTERED["image-text-to-text"]:
            raise
        config, _ = trained_part(config, model_type)
        return Recorder(TransformersSource(config, name=model_type, task=_task_of(config, task)))


def _task_of(config: Mapping[str, Any], task: str) -> str:
    """The task, or that of the text part to which a multimodal configuration was reduced."""
    return task if config["model_type"] in REGISTERED[task] else "causal-lm"


def _differences(recorder: Recorder, tape: Tape, plan: Plan) -> tuple[dict[str, int], int]:
    """(phase that differs -> predicted minus simulated bytes, simulated peak bytes)."""
    predicted = peak_of_step(recorder.profile, tape, plan).phase_peaks
    found = simulate(recorder.source, plan).phase_peaks
    off = {phase: predicted[phase] - n_bytes for phase, n_bytes in found.items() if predicted[phase] != n_bytes}
    return off, max(found.values())


def _tape_of_attention(recorder: Recorder, plan: Plan, *, any_batch: bool) -> tuple[Tape, bool, Plan]:
    """The plan's tape, whether it is valid for any batch, and the plan; with eager attention for a model without sdpa."""
    try:
        return *_tape(recorder, plan, any_batch=any_batch), plan
    except NoSuchAttention:
        plan = replace(plan, attention="eager")
        return *_tape(recorder, plan, any_batch=any_batch), plan


def _tape(recorder: Recorder, plan: Plan, *, any_batch: bool) -> tuple[Tape, bool]:
    """The plan's tape, and whether it is valid for any micro-batch and length, if that is asked for."""
    key = tape_key_of(plan, recorder.profile)
    if any_batch and key.at is None:
        with contextlib.suppress(NotPolynomial):
            return recorder.tape(key), True
    return recorder.tape(replace(key, at=(plan.micro_batch_size, plan.seq_len))), False


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _line(text: str) -> str:
    return " ".join(text.split())[:240]


def read() -> list[Line]:
    """The kept outcomes."""
    with RESULTS.open(newline="") as file:
        return [
            Line(**{k: int(v) if k in ("parameters", "peak_bytes") else v for k, v in row.items()})
            for row in csv.DictReader(file)
        ]


def write(lines: Iterable[Line]) -> None:
    tasks = list(REGISTERED)
    with RESULTS.open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(
            asdict(line) for line in sorted(lines, key=lambda line: (tasks.index(line.task), line.model_type))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all without any")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the stack of an unforeseen error")
    parser.add_argument("--task", choices=REGISTERED, help="only architectures of this task")
    parser.add_argument("--missing", action="store_true", help="only architectures without a line")
    options = parser.parse_args()
    lines = {line.name: line for line in (read() if RESULTS.exists() else [])}
    gc.collect()
    gc.freeze()  # each step collects garbage: skip the objects of imported modules
    for task in REGISTERED:
        for model_type in architectures(task):
            name = f"{task}/{model_type}"
            wanted = not options.names or model_type in options.names or name in options.names
            if not wanted or options.task not in (None, task) or (options.missing and name in lines):
                continue
            lines[name] = survey(task, model_type)
            print(*asdict(lines[name]).values(), sep=" | ", flush=True)
            write(lines.values())
            gc.collect()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
