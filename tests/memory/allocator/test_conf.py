"""The settings as the allocator's own parser takes them (c10/core/AllocatorConfig.cpp), and what it refuses."""

from __future__ import annotations

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.memory.allocator.conf import UNLIMITED

MIB = 2**20


def test_an_empty_conf_has_pytorchs_defaults() -> None:
    conf = AllocatorConf.parse("")
    assert conf == AllocatorConf()
    assert conf.max_split_bytes == UNLIMITED and conf.large_segment_bytes == 20 * MIB
    assert conf.non_split_rounding_bytes == 20 * MIB


def test_every_key_of_the_conf_is_read() -> None:
    conf = AllocatorConf.parse(
        "backend:native, max_split_size_mb:128,max_non_split_rounding_mb:32, garbage_collection_threshold:0.6,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:24,per_process_memory_fraction:0.9,"
        "expandable_segments:True,pinned_use_background_threads:True"
    )
    assert (conf.max_split_bytes, conf.non_split_rounding_bytes) == (128 * MIB, 32 * MIB)
    assert (conf.garbage_collection_threshold, conf.per_process_memory_fraction) == (0.6, 0.9)
    assert conf.large_segment_bytes == 24 * MIB and conf.expandable_segments


@pytest.mark.parametrize(("mib", "divisions"), [(1, 1), (255, 1), (256, 1), (600, 2), (1024, 4), (2048, 8), (10**6, 8)])
def test_roundup_divisions_hold_for_their_interval_of_sizes(mib: int, divisions: int) -> None:
    """parseRoundUpPower2Divisions: the first entry holds for all below it, `>` for all above the last."""
    conf = AllocatorConf.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert conf.divisions_for(mib * MIB) == divisions


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("max_split_size_mb:10", "max_split_size_mb must be at least 20", "no smaller"),
        ("max_split_size_mb:much", "max_split_size_mb must be", "no smaller"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be more than 10", "no smaller"),
        ("large_segment_size_mb:40,max_non_split_rounding_mb:30", "at least 40", "no smaller"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold must be", "0.8"),
        ("garbage_collection_threshold:x", "garbage_collection_threshold must be", "0.8"),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction must be", "0.8"),
        ("expandable_segments:true", "expandable_segments must be True or False", "capital"),
        ("roundup_power2_divisions:3", "powers of two", "a power of two"),
        ("roundup_power2_divisions:[100:2]", "powers of two", "a power of two"),
        ("roundup_power2_divisions:[256:2", "a closed list", "a power of two"),
        ("backend:cudaMallocAsync", "backend must be native", "not modelled"),
        ("expandable_segment:True", "unknown key 'expandable_segment'", "did you mean expandable_segments?"),
        ("zzz:1", "unknown key 'zzz'", "keys:"),
        ("expandable_segments", "is not key:value", "for example"),
    ],
)
def test_a_malformed_conf_is_refused_with_a_hint(text: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        AllocatorConf.parse(text)
    assert says in str(error.value) and hint in error.value.hint
