"""Counts the published measurements: `PYTHONPATH=. python tests/published/published_census.py FILE` writes `census.csv`.

FILE has all measurements, of which `measurements.json` has those that may state a job for `estimate`. A line of the census is one
source and one outcome: a figure is predicted (`results.csv`), the run is rehearsed alone (`rehearsed.csv`, `operators.csv`), or
neither, and why.
`ids` are the numbers of its rows: `p0526` of `measurements.json` is row 0526.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operator_campaign import read_results as operator_results
from published_campaign import Result, read_results
from rehearsed_campaign import RESULTS as REHEARSED

CENSUS = Path(__file__).with_name("census.csv")
PREDICTED, WITHOUT, ONLY_REHEARSED = "predicted", "not predicted", "rehearsed"
COLUMNS = ("source", "outcome", "reason", "rows", "ids")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Rows of one source with one outcome. `reason`: the feature or fact that is missing; empty if the rows are predicted."""

    source: str
    outcome: str
    reason: str
    ids: tuple[str, ...]

    def cells(self) -> dict[str, str]:
        return {
            "source": self.source, "outcome": self.outcome, "reason": self.reason,
            "rows": str(len(self.ids)), "ids": " ".join(self.ids),
        }  # fmt: skip


def outcome_of(results: Iterable[Result]) -> tuple[str, str]:
    """(outcome, reason) of the results of one row: whether a figure is compared with a prediction, and if none is, why."""
    found = list(results)
    if any(result.error is not None for result in found):
        return PREDICTED, ""
    return WITHOUT, found[0].note.removeprefix("not mapped: ")


def predicted() -> dict[str, tuple[str, str]]:
    """The outcome of each row of `results.csv`, by its number."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in read_results():
        groups[result.id[1:]].append(result)
    return {number: outcome_of(results) for number, results in groups.items()}


def census(rows: Iterable[Mapping[str, Any]]) -> list[Line]:
    """The lines for all published measurements, in the order of their first rows."""
    stated, rehearsed = predicted(), rehearsed_ids()
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        number = row["id"].rpartition("-")[2]
        if number in stated:
            outcome, reason = stated[number]
        elif number in rehearsed:
            outcome, reason = ONLY_REHEARSED, rehearsed[number]
        else:
            outcome, reason = WITHOUT, missing(row)
        groups[source_of(row), outcome, reason].append(number)
    return [
        Line(source=source, outcome=outcome, reason=reason, ids=tuple(sorted(ids)))
        for (source, outcome, reason), ids in groups.items()
    ]


def source_of(row: Mapping[str, Any]) -> str:
    """The repository or paper of a row; for large repositories also the page.

    >>> source_of({"source": "pytorch/ao@36027d82d torchao/optim/README.md (CPU offload)"})
    'pytorch/ao: torchao/optim/README.md'
    """
    repository, _, rest = row["source"].partition("@")
    if not rest:
        return str(row["source"])
    page = rest.partition(" ")[2].partition(" (")[0].partition(" row ")[0]
    if page.endswith(".json"):
        page = page.rpartition("/")[0]
    return f"{repository}: {page}" if page and not page.startswith("(") else str(repository)


def rehearsed_ids() -> dict[str, str]:
    """Number of a row that is rehearsed -> why it is not predicted."""
    with REHEARSED.open(newline="") as file:
        runs = [line["id"][1:] for line in csv.DictReader(file)]
    return {
        **dict.fromkeys(runs, "the model's code is litgpt's own: its command is rehearsed"),
        **dict.fromkeys((result.id[1:] for result in operator_results()), "one operator by itself: it is rehearsed"),
    }


def missing(row: Mapping[str, Any]) -> str:
    """The reason why `estimate` cannot describe the job of a row, derived from the facts that the source states."""
    for found in _REASONS:
        if reason := found(row):
            return reason
    raise ValueError(f"{row['id']} has neither a mapping nor a reason: {row['source']}")


def _by_row(row: Mapping[str, Any]) -> str:
    return _OF_ROWS.get(row["id"].rpartition("-")[2], "")


def _by_source(row: Mapping[str, Any]) -> str:
    return next((reason for name, reason in _OF_SOURCES.items() if row["source"].startswith(name)), "")


def _parallelism(row: Mapping[str, Any]) -> str:
    """The axes of parallelism in a row that `estimate` lacks. `ep`: experts are divided among ranks."""
    axes = [name for name in ("tp", "pp", "cp", "ep") if (row.get("parallel") or {}).get(name, 1) > 1]
    if not axes:
        return ""
    words = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    return f"{' and '.join(words[axis] for axis in axes)} parallelism is not modelled"


def _megatron(row: Mapping[str, Any]) -> str:
    if "Megatron" not in row["strategy"]:
        return ""
    axes = _parallelism(row)
    also = f"; {axes}" if axes else ""
    eight = str(row.get("precision")).upper()
    low = "; fp8 and fp4 of Transformer Engine are not modelled" if "FP8" in eight or "FP4" in eight else ""
    return f"Megatron-Core's kernels and optimizer are not modelled{also}{low}"


def _kernel(row: Mapping[str, Any]) -> str:
    if row["model"] == "kernel embedding" and "torch_compile" not in row["strategy"]:
        return "the figure counts 12 to 14 GB of the benchmark's other tensors"
    return "one operator by itself, which is no training job" if row.get("scope") == "kernel" else ""


def _graph(row: Mapping[str, Any]) -> str:
    whole = "graph_trainer" in row["strategy"] or row.get("compile") == "aot_fx_trace"
    return "the whole step is traced and compiled, which is not modelled" if whole else ""


def _litgpt(row: Mapping[str, Any]) -> str:
    if not row["source"].startswith("Lightning-AI/litgpt"):
        return ""
    if "Adapter" in row["strategy"]:
        return "litgpt's adapters in front of attention: the model's code is litgpt's own, and this command is not rehearsed"
    if "devices=4" in row["strategy"]:
        return "the table repeats the figures of one GPU for four"
    if row["measured"].get("oom"):
        return "the model's code is litgpt's own; a run that ran out of memory is not rehearsed"
    return "the model's code is litgpt's own; this row of October 2023 is not rehearsed"


_REASONS = (_by_row, _by_source, _kernel, _megatron, _litgpt, _parallelism, _graph)
_OWN_CODE = "the model's code is in its checkpoint's repository, which is not at hand"
_TWO_GPUS = "the layers are divided between two GPUs (device_map), which is not modelled"
_SIZES = "the source does not state the micro-batch or the length of the sequences"
_IMAGES = "the source does not state the sizes of its images, or how many a step has"
_ADAPTED_EXPERTS = "adapters on experts that axolotl packs, or experts that it packs in 8 bits, are not modelled"
_VIT = "the model is timm's"
_OF_SOURCES = {
    "modelscope/ms-swift@b40f31df7": _OWN_CODE,
    "pytorch/ao@36027d82d torchao/prototype/moe_training": "expert parallelism is not modelled",
    "pytorch/ao@36027d82d torchao/prototype/quantized_training": "the benchmark's model is its own code; its optimizer is not stated",
    "pytorch/torchtune": "the source does not state which settings of a recipe ran: one recipe takes 16.2 and 30.3 GiB",
    "pytorch/torchtitan@ab5ed59f8": "the source does not state the model and its sizes",
    "pytorch/torchtitan@aa1d37414": "expert parallelism (HybridEP) is not modelled",
    "pytorch/torchtitan@c4e229115": "expert parallelism is not modelled",
    "deepspeedai/DeepSpeed@edaa72212 blogs/muon-optimizer": "the source does not state the lengths of its sequences, which are padded",
    "deepspeedai/DeepSpeed@edaa72212 examples/sdma_allgather": "the model is a script's own",
    "foundation-model-stack/fms-acceleration issue": "the source does not state the lengths of its sequences, which are padded",
    "arXiv 2506.13996": "sequence parallelism (Ulysses) is not modelled",
    "HF dataset": "the source does not state the GPU, the modules with adapters, or which memory it means",
    "fitscout": _SIZES,
    "axolotl-ai-cloud/axolotl@067b021c8 examples/glm47": _ADAPTED_EXPERTS,
    "axolotl-ai-cloud/axolotl@067b021c8 examples/gemma4/26b": _ADAPTED_EXPERTS,
    "axolotl-ai-cloud/axolotl@067b021c8 examples/qwen3-next": _SIZES,
    "axolotl-ai-cloud/axolotl@067b021c8 examples/internvl3_5": _IMAGES,
    "axolotl-ai-cloud/axolotl@067b021c8 examples/kimi-linear": "the model's code is axolotl's own",
    "axolotl-ai-cloud/axolotl@067b021c8 examples/gpt-oss": "activation offload of axolotl's own kind is not modelled",
    "axolotl-ai-cloud/axolotl@067b021c8 examples/gemma4-unified": "axolotl's kernels of adapters are not modelled",
    "linkedin/Liger-Kernel@9e3f2618": "the sizes of the reduced model are not stated",
    "NVIDIA-NeMo/Automodel@5353d5f37": _IMAGES,
    "NVIDIA-NeMo/Automodel@44ffa5d25": _IMAGES,
    "NVIDIA-NeMo/Automodel@c75d9cfe7": "the source does not state the lengths of its sequences, which are padded",
    "NVIDIA-NeMo/Automodel@263fcb145": "expert and pipeline parallelism are not modelled",
    "NVIDIA-NeMo/Automodel@77f112399": "expert parallelism (HybridEP) is not modelled",
}
"""First words of `source` -> what is missing in all rows of that source."""
_OF_ROWS = {
    "0422": "experts in Transformer Engine with DeepEP, which are not modelled",
    "0476": _TWO_GPUS,
    **dict.fromkeys(("0439", "0440", "0441"), _OWN_CODE),
    **dict.fromkeys(
        ("0457", "0458", "0459", "0460", "0461", "0501", "0502", "0503", "0504", "0505", "0506"), _TWO_GPUS
    ),
    "1065": _IMAGES,
    "1066": "of 2025, when each expert had linear layers of its own, in 8 bits; transformers 5 has one parameter, which is not packed",
    "1105": _IMAGES,
    **dict.fromkeys(("1127", "1128", "1129", "1130"), _SIZES),
    **dict.fromkeys(("1131", "1132", "1133", "1134", "1135", "1136"), f"{_VIT}, compiled as a whole"),
    **dict.fromkeys(("1137", "1138", "1139", "1140"), _VIT),
    **dict.fromkeys(("1503", "1504"), "its command is not published: that of the page trains another model"),
    **dict.fromkeys(("1563", "1564"), "the source does not state the GPU; Megatron-Core's optimizer is not modelled"),
}
"""What is missing in single rows."""


def read_census(path: Path = CENSUS) -> list[Line]:
    with path.open(newline="") as file:
        return [
            Line(**{name: line[name] for name in ("source", "outcome", "reason")}, ids=tuple(line["ids"].split()))
            for line in csv.DictReader(file)
        ]


def write_census(lines: Iterable[Line], path: Path = CENSUS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(line.cells() for line in lines)


def summary(lines: Iterable[Line]) -> str:
    """Rows by outcome, for each source."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for line in lines:
        counts[line.source][line.outcome] += len(line.ids)
        counts["all"][line.outcome] += len(line.ids)
    names = (PREDICTED, ONLY_REHEARSED, WITHOUT)
    table = [f"{'source':<64} " + " ".join(f"{name:>13}" for name in names)]
    for source, found in counts.items():
        table.append(f"{source:<64} " + " ".join(f"{found[name]:>13}" for name in names))
    return "\n".join(table)


if __name__ == "__main__":
    made = census(json.loads(Path(sys.argv[1]).read_text()))
    write_census(made)
    print(summary(made))
