"""Costs of recording pasted configurations through the command line: `recording_costs.py`.

Each configuration is that of a model of the catalog with another vocabulary, or one made here, so that it has to be recorded. `estimate`
runs in a process of its own with an empty cache. Its CPU time and its peak of resident memory are written to recording_costs.csv, one
line each; a test compares them with the limits of 60 s and 2 GB. `recording_costs.py NAME...` measures these again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fsdp_advisor.model import catalog

RESULTS = Path(__file__).with_name("recording_costs.csv")
IMAGES = ("--images-per-sample", "2", "--image-size", "1024x768")
LLAMA = "meta-llama/Llama-3.1-8B"
CASES: dict[str, tuple[str | dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "llama-3.1-8b": (LLAMA, {}, ()),
    "llama with 512 layers": (LLAMA, {"num_hidden_layers": 512}, ()),
    "llama with 512 layers, 131072 tokens": (LLAMA, {"num_hidden_layers": 512}, ("--seq-len", "131072")),
    "llama-3.1-8b, batch 64": (LLAMA, {}, ("--micro-batch-size", "64", "--seq-len", "8192")),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2", {}, ()),
    "deepseek-v3.2, 131072 tokens": ("deepseek-ai/DeepSeek-V3.2", {}, ("--seq-len", "131072")),
    "deepseek-v4-flash": ("deepseek-ai/DeepSeek-V4-Flash", {}, ()),
    "deepseek-v4-flash, 131072 tokens": ("deepseek-ai/DeepSeek-V4-Flash", {}, ("--seq-len", "131072")),
    "deepseek-v4-pro": ("deepseek-ai/DeepSeek-V4-Pro", {}, ()),
    "glm-5": ("zai-org/GLM-5", {}, ()),
    "kimi-k2.5": ("moonshotai/Kimi-K2.5", {}, ()),
    "kimi-linear-48b": ("moonshotai/Kimi-Linear-48B-A3B-Base", {}, ()),
    "nemotron-3-ultra": ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", {}, ()),
    "qwen3.5-397b": ("Qwen/Qwen3.5-397B-A17B", {}, ()),
    "qwen3.5-397b with images": ("Qwen/Qwen3.5-397B-A17B", {}, IMAGES),
    "qwen3.5-397b, batch 64, 131072 tokens": (
        "Qwen/Qwen3.5-397B-A17B", {}, ("--micro-batch-size", "64", "--seq-len", "131072"),
    ),
    "llama-4-maverick": ("meta-llama/Llama-4-Maverick-17B-128E", {}, ()),
    "qwen3-vl-235b with images": ("Qwen/Qwen3-VL-235B-A22B-Instruct", {}, IMAGES),
    "gemma-4-31b with images": ("google/gemma-4-31B", {}, IMAGES),
    "bamba-9b": ("ibm-ai-platform/Bamba-9B-v2", {}, ()),
    "falcon-h1-34b": ("tiiuae/Falcon-H1-34B-Base", {}, ()),
    "jamba": ("ai21labs/Jamba-v0.1", {}, ()),
    "mamba-2.8b, 131072 tokens": ("state-spaces/mamba-2.8b-hf", {}, ("--seq-len", "131072")),
    "longcat-flash under ZeRO-3": (
        "meituan-longcat/LongCat-Flash-Chat", {"vocab_size": 131264}, ("--gpus", "1024", "--strategy", "zero3"),
    ),
    "recurrent-gemma-2b under ZeRO-3": ({"model_type": "recurrent_gemma"}, {}, ("--strategy", "zero3")),
    "dbrx": ("databricks/dbrx-base", {}, ()),
    "zamba2": ({"model_type": "zamba2", "num_hidden_layers": 54}, {}, ()),
    "xlstm-7b": ({"model_type": "xlstm"}, {}, ()),
    "rwkv-4-7b": ({"model_type": "rwkv", "num_hidden_layers": 32}, {}, ()),
    "gemma-4-e4b": ("google/gemma-4-E4B", {}, ()),
    "lora of kimi-k2.5": ("moonshotai/Kimi-K2.5", {}, ("--use-peft", "--lora-target-modules", "all-linear", "--framework", "trl")),
    "qlora of qwen3.5-397b": (
        "Qwen/Qwen3.5-397B-A17B", {}, ("--use-peft", "--load-in-4bit", "--lora-target-modules", "all-linear"),
    ),
    "bloom": ("bigscience/bloom", {}, ()),
    "whisper-large-v3": ("openai/whisper-large-v3", {}, ()),
    "t5-11b": ("google-t5/t5-11b", {}, ()),
}  # fmt: skip
"""By name: a model of the catalog or a configuration, the values that differ from it, and options of `estimate`."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What `estimate` took for one configuration: seconds of CPU time, bytes of resident memory."""

    name: str
    exit_status: int
    cpu_seconds: float
    peak_bytes: int


def configuration(base: str | dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a case, with a vocabulary that no model of the catalog has."""
    if isinstance(base, dict):
        return base | values
    entry = catalog.find(base)
    assert entry is not None
    config = dict(catalog.profile(entry).config)
    text = config.get("text_config")
    part: dict[str, Any] = config if not isinstance(text, dict) else dict(text)
    if part is not config:
        config["text_config"] = part
    part |= {"vocab_size": part.get("vocab_size", 0) + 192} if "vocab_size" in part else {}
    return config | values


def measured(name: str) -> Line:
    """Run `estimate` for one case."""
    base, values, options = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(configuration(base, values)))
        command = [sys.executable, "-m", "fsdp_advisor", "estimate", "--model", str(path), "--gpus", "64", *options]
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        with Path(folder, "output").open("w") as output:
            child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(child.pid, 0)
        if "-v" in sys.argv or os.waitstatus_to_exitcode(status) not in (0, 1):
            print(Path(folder, "output").read_text()[-3000:])
    return Line(
        name=name,
        exit_status=os.waitstatus_to_exitcode(status),
        cpu_seconds=round(usage.ru_utime + usage.ru_stime, 1),
        peak_bytes=usage.ru_maxrss * 1024,
    )


def read() -> list[Line]:
    """The kept costs."""
    kinds = {"exit_status": int, "cpu_seconds": float, "peak_bytes": int}
    with RESULTS.open(newline="") as file:
        return [Line(**{key: kinds.get(key, str)(value) for key, value in row.items()}) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; all without any")
    parser.add_argument("-v", action="store_true", help="print what estimate printed")
    names = parser.parse_args().names
    lines = {line.name: line for line in (read() if RESULTS.exists() else [])}
    for name in CASES:
        if names and name not in names:
            continue
        begin = time.monotonic()
        lines[name] = measured(name)
        print(*asdict(lines[name]).values(), f"{time.monotonic() - begin:.1f}", sep=" | ", flush=True)
        with RESULTS.open("w", newline="") as file:
            rows = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
            rows.writeheader()
            rows.writerows(asdict(lines[name]) for name in CASES if name in lines)


if __name__ == "__main__":
    main()
