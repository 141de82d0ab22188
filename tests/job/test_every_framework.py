"""Each framework has facts, a name and a consumer; where files are merged, it replaces a less specific one."""

from __future__ import annotations

from typing import get_args

import pytest

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.merge import merge
from fsdp_advisor.export.launch import consumer_of
from fsdp_advisor.job.choices import Framework
from fsdp_advisor.job.compatibility import mesh_of
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES, FRAMEWORKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.server.page_words import choice


@pytest.mark.parametrize("framework", get_args(Framework))
def test_every_framework_has_facts_a_name_and_a_consumer(framework: Framework) -> None:
    facts = FRAMEWORKS[framework]
    plan = Plan(
        strategy="zero3", backend=facts.backends[-1], framework=framework, mesh=mesh_of("zero3", 8, 1), seq_len=64
    )
    assert consumer_of(plan)
    assert not facts.uses_trainer or facts.uses_accelerate
    assert choice("framework", framework) in (FRAMEWORK_NAMES[framework], "Trainer")


@pytest.mark.parametrize("framework", get_args(Framework))
def test_a_framework_of_one_file_replaces_less_specific_ones(framework: Framework) -> None:
    plain, specific = Collector("a", "a", {}), Collector("b", "b", {})
    plain.options["framework"], specific.options["framework"] = "torch", framework
    for parts in ((plain, specific), (specific, plain)):
        assert merge(parts).options.get("framework", "torch") == framework
