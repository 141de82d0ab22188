"""Whatever a file contains, reading it either gives options or raises an error with a hint."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import examples

import fsdp_advisor.configs
from fsdp_advisor.configs import from_texts
from fsdp_advisor.errors import AdvisorError

SOURCES = Path(fsdp_advisor.configs.__file__).parent.glob("*.py")
KEYS = sorted({key for path in SOURCES for key in re.findall(r'"([a-z_][a-z0-9_.]*)"', path.read_text())})
"""Every word in the readers' sources: the keys that they know, and more."""
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from([*KEYS, "auto", "3"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
)
ANCHORS = st.sampled_from(
    ["base_model", "distributed_type", "zero_optimization", "cutoff_len", "bf16", "training", "fsdp_config"]
)
FILES = st.dictionaries(st.one_of(st.sampled_from(KEYS), ANCHORS), VALUES, min_size=1, max_size=6)


@settings(max_examples=examples(300), deadline=None)
@given(FILES)
def test_any_values_are_read_or_refused_and_every_key_is_accounted_for(keys: dict[str, object]) -> None:
    try:
        found = from_texts({"a.json": json.dumps(keys)})
    except AdvisorError as error:
        assert error.hint
        return
    (reading,) = found.readings
    items = (*reading.read, *reading.ignored, *reading.unknown, *reading.not_modelled)
    accounted = {re.split(r"[:. ]", item)[0] for item in items}
    missing = {key.partition(".")[0] for key in keys} - accounted
    assert all(isinstance(keys.get(key), dict) for key in missing), "only a section's own name may be left out"


WORDS = r"torchrun accelerate launch train.py -m --nnodes $X ${Y:-2} 2 ' --fsdp trl sft = deepspeed A=1 #"


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from([*WORDS.split(), "\\\n", "\n"]), max_size=12))
def test_any_command_line_is_read_or_refused(words: list[str]) -> None:
    try:
        assert from_texts({"run.sh": " ".join(words)}).readings
    except AdvisorError as error:
        assert error.hint
