"""Survey of every architecture that transformers registers for causal language modelling: `architecture_survey.py`.

A small model of each, with two layers, is recorded. The predicted peak of each phase of a step under FSDP2 on two ranks is compared
with PyTorch's own step under fake tensors (`fsdp_advisor/validation/simulate.py`). The outcome is written to
architecture_survey.csv, one line each:

- `equal`: all phases agree to the byte.
- `no-gradient`: all phases agree once the parameters that get no gradient in this step, which the reason counts, are frozen. The
  estimate counts their gradients and optimizer state.
- `different`: a phase differs; the reason names it, with the bytes.
- `refused`: the estimate or PyTorch's step is refused; the reason is the message.

Widths are the defaults of the configuration's class, because fake tensors cost nothing. `architecture_survey.py NAME...` surveys
these architectures again and leaves the other lines as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdp_advisor.errors import AdvisorError, NoSuchAttention, NotPolynomial
from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording import Recorder, TransformersSource, source_of
from fsdp_advisor.recording.fake import fake_tensors, materialise
from fsdp_advisor.rows import peak_of_step
from fsdp_advisor.tapes import tape_key_of
from fsdp_advisor.validation.simulate import simulate
from fsdp_advisor.validation.steps import batch_of

RESULTS = Path(__file__).with_name("architecture_survey.csv")
SECONDS = 240
"""The time limit of one architecture."""
PLAN = Plan(
    strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=2), precision="bf16-mixed", micro_batch_size=2, seq_len=96
)
SMALL = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "n_group", "topk_group"), 2),
    "first_k_dense_replace": 1,
}
"""The values that are set where the configuration's class has them."""
EXTRA: dict[str, dict[str, Any]] = {
    "dbrx": {"n_layers": 2},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}
"""What single architectures need besides."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The outcome for one architecture. `tape`: valid for any batch and length, or for the survey's alone."""

    model_type: str
    outcome: str
    attention: str = ""
    tape: str = ""
    parameters: int = 0
    peak_bytes: int = 0
    reason: str = ""


def architectures() -> list[str]:
    """The model types, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(model_type: str) -> dict[str, Any]:
    """The values of a small configuration of two layers."""
    defaults = transformers.AutoConfig.for_model(model_type)
    kind = type(defaults)
    names = set(defaults.to_dict()) | set(getattr(kind, "attribute_map", {}))
    values: dict[str, Any] = {"model_type": model_type}
    for name, value in SMALL.items():
        own = getattr(kind, "attribute_map", {}).get(name, name)
        if name in names and isinstance(getattr(defaults, own, None), int) and getattr(defaults, own) > value:
            values[own] = value
    for name, nested in defaults.to_dict().items():
        if name in ("text_config", "decoder") and isinstance(nested, dict):
            kind_known = nested.get("model_type") in CONFIG_MAPPING_NAMES
            small = {key: value for key, value in SMALL.items() if isinstance(nested.get(key), int)}
            values[name] = small_config(nested["model_type"]) if kind_known else small
    return (
        values
        | {"is_decoder": True, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]}
        | EXTRA.get(model_type, {})
    )


def survey(model_type: str) -> Line:
    """The outcome for one architecture."""
    try:
        with _time_limit():
            return _compared(model_type)
    except TimeoutError:
        return Line(model_type=model_type, outcome="refused", reason=f"took longer than {SECONDS} s")
    except AdvisorError as error:
        return Line(model_type=model_type, outcome="refused", reason=_line(error.message))
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        return Line(model_type=model_type, outcome="refused", reason=_line(f"{type(error).__name__}: {error}"))


def _compared(model_type: str) -> Line:
    source = TransformersSource(small_config(model_type), name=model_type, task="causal-lm")
    recorder, plan = Recorder(source), PLAN
    try:
        tape, any_batch = _tape(recorder, plan)
    except NoSuchAttention:
        plan = replace(plan, attention="eager")
        tape, any_batch = _tape(recorder, plan)
    off, peak = _differences(recorder, tape, plan)
    outcome, reason = "equal", ""
    if off:
        outcome, reason = "different", ", ".join(f"{phase} {n_bytes:+d} B" for phase, n_bytes in off.items())
        if unused := _without_gradient(source, plan):
            frozen = Adaptation(freeze=tuple(unused)).as_dict()
            again = Recorder(source_of({**source.config(), CONFIG_KEY: frozen}, name=model_type, task="causal-lm"))
            if not _differences(again, _tape(again, plan)[0], plan)[0]:
                outcome, reason = "no-gradient", f"{len(unused)} parameters, such as {unused[0]}"
    return Line(
        model_type=model_type,
        outcome=outcome,
        attention=plan.attention,
        tape="any" if any_batch else "one",
        parameters=recorder.profile.parameters,
        peak_bytes=peak,
        reason=reason,
    )


def _differences(recorder: Recorder, tape: Tape, plan: Plan) -> tuple[dict[str, int], int]:
    """Predicted less simulated bytes of each phase that differs, and the simulated peak."""
    predicted = peak_of_step(recorder.profile, tape, plan).phase_peaks
    found = simulate(recorder.source, plan).phase_peaks
    off = {phase: predicted[phase] - n_bytes for phase, n_bytes in found.items() if predicted[phase] != n_bytes}
    return off, max(found.values())


def _without_gradient(source: TransformersSource, plan: Plan) -> list[str]:
    """The names of the parameters that get no gradient in a step."""
    model = source.build(torch.bfloat16)
    source.configure(model, attention=plan.attention, checkpointing="none")
    with fake_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        materialise(model, None)
        source.loss(model, batch_of(source, plan, model, real=False)).backward()
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]


def _tape(recorder: Recorder, plan: Plan) -> tuple[Tape, bool]:
    """The plan's tape, and whether it is valid for any micro-batch and length."""
    key = tape_key_of(plan, recorder.profile)
    try:
        return recorder.tape(key), True
    except NotPolynomial:
        return recorder.tape(replace(key, at=(plan.micro_batch_size, plan.seq_len))), False


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line(text: str) -> str:
    return " ".join(text.split())[:240]


def read() -> list[Line]:
    """The kept outcomes."""
    with RESULTS.open(newline="") as file:
        return [
            Line(**{k: int(v) if k in ("parameters", "peak_bytes") else v for k, v in row.items()})
            for row in csv.DictReader(file)
        ]


def write(lines: list[Line]) -> None:
    with RESULTS.open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(line) for line in sorted(lines, key=lambda line: line.model_type))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all without any")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the stack of an unforeseen error")
    wanted = parser.parse_args().names or architectures()
    lines = {line.model_type: line for line in (read() if RESULTS.exists() else [])}
    for name in wanted:
        lines[name] = survey(name)
        print(*asdict(lines[name]).values(), sep=" | ", flush=True)
        write([line for line in lines.values() if line.model_type in architectures()])
        gc.collect()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
