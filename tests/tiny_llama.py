"""A tiny model that is fast to record, and helpers of the tests of model look-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from fsdp_advisor.model import cache, catalog
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64
PARAMETERS = 2 * 1000 * 64 + 64 + LAYER
SHIPPED = TapeKey("plain", "bf16", "sdpa", "none", False)
OTHER = TapeKey("plain", "bf16", "eager", "none", True)
CONFIG_HINT = "use the config.json that transformers saves with a model"
NAMES_HINT = (
    "a model is an id listed by `fsdp-advisor models`, a hub id, a config.json or its directory, or a count such as 7B"
)
NETWORK_HINT = "check the network and HF_ENDPOINT, or pass a directory that contains the model's config.json"


def with_tapes(profile: Profile, tapes: dict) -> Profile:
    return replace(profile, tapes=tapes)


def keep(profile: Profile, variant: TapeKey, task: str | None = None) -> None:
    """Put one of the profile's tapes into the cache."""
    assert cache.keep(with_tapes(profile, {variant.name: profile.tapes[variant.name]}), task)


def flat(tape: Tape) -> list[object]:
    """The segments of a tape with the sizes filled in, to compare tapes."""
    return [
        (s.phase, s.stack, s.layer, s.matmul_flops, [(op, tape.sizes[a] if op == 0 else a, b) for op, a, b in s.events])
        for s in tape.segments
    ]


def write(path: Path, config: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def written(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "cache").rglob("*") if p.is_file())


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter with the catalog of the test and these environment variables."""
    first = f"from pathlib import Path; from fsdp_advisor.model import catalog; catalog.PATH = Path({str(catalog.PATH)!r})\n"
    dropped = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    kept = {k: v for k, v in os.environ.items() if k.upper() not in dropped}
    return subprocess.run(
        [sys.executable, "-c", first + code],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=600,  # a busy machine takes minutes to import PyTorch
        check=False,
    )
