"""Saving: files weighed to the byte after real runs in two processes, and what the source documents say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ranks import RANKS, llama, run_ranks
from test_loading import LLAMA_7B, SMALL, every_plan, near, plan

from fsdp_advisor.engines.loading import loadings
from fsdp_advisor.engines.saving import Files, Saving, pretrained_files, savings, textbook_files
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.program.storages import round_up
from fsdp_advisor.model.profile import Profile

CASES = (
    "fsdp1_full", "fsdp1_full_on_every_rank", "fsdp1_optimizer", "fsdp1_sharded", "fsdp1_local",
    "fsdp2_full", "fsdp2_optimizer", "fsdp2_model", "fsdp2_model_and_optimizer", "save_pretrained",
)  # fmt: skip
PADDING = 2 * SMALL[0] * 4
"""The embedding and the head have 16001 rows. On the CPU a gathered tensor is still a view of its padded storage, which
`torch.save` writes whole; from a GPU it comes to the host without the padding."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: what each case took, and rank 0's files."""
    folder = tmp_path_factory.mktemp("saving")
    run_ranks(Path(__file__).parent / "checkpoint_worker.py", str(folder), *CASES)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def way(profile: Profile, job: Plan, name: str, *, optimizer: bool = False) -> Saving:
    return next(w for w in savings(profile, job, optimizer=optimizer) if w.way == name)


def only_file(saving: Saving) -> Files:
    (file,) = saving.files
    return file


def test_the_source_documents_example() -> None:
    """7B in fp32 on 4 GPUs: one file of 28 GB gathered on rank 0, 4 of 7 GB, 4 of 28 GB."""
    assert textbook_files(7 * 10**9, 4) == {
        "full": (1, 28 * 10**9),
        "sharded": (4, 7 * 10**9),
        "full_on_every_rank": (4, 28 * 10**9),
    }


def test_the_same_of_a_real_7b_model() -> None:
    """PyTorch's LOCAL_STATE_DICT is each rank's flat shard; whole copies come of saving a full state dict on every rank."""
    whole = 4 * LLAMA_7B.parameters
    job = plan("fsdp1", ranks=4, precision="fp32")
    files = {w.way: only_file(w) for w in savings(LLAMA_7B, job)}
    assert {name: (f.count, f.tensor_bytes) for name, f in files.items()} == {
        "full": (1, whole),
        "full_on_every_rank": (4, whole),
        "sharded": (4, whole // 4),
        "local": (4, whole // 4),
    }


def test_fsdp1_files(measured: list[dict[str, Any]]) -> None:
    profile, job, found = llama(*SMALL), plan("fsdp1", optim="adamw_torch"), measured[0]
    assert found["fsdp1_full"]["files"] == {"model.bin": only_file(way(profile, job, "full")).tensor_bytes}
    states = way(profile, job, "full", optimizer=True).files[1]
    assert found["fsdp1_optimizer"]["files"] == {"optimizer.bin": states.tensor_bytes}
    for case in ("full_on_every_rank", "sharded", "local"):
        predicted, files = only_file(way(profile, job, case)), found[f"fsdp1_{case}"]["files"]
        assert len(files) == predicted.count
        assert max(files.values()) == predicted.tensor_bytes


def test_fsdp2_files(measured: list[dict[str, Any]]) -> None:
    profile, job, found = llama(*SMALL), plan("fsdp2", optim="adamw_torch"), measured[0]
    weights, states = way(profile, job, "full", optimizer=True).files
    assert found["fsdp2_full"]["files"] == {"model.pt": weights.tensor_bytes + PADDING}
    assert found["fsdp2_optimizer"]["files"] == {"optimizer.pt": states.tensor_bytes + 2 * PADDING}
    for case, optimizer in (("fsdp2_model", False), ("fsdp2_model_and_optimizer", True)):
        predicted, files = only_file(way(profile, job, "sharded", optimizer=optimizer)), found[case]["files"]
        assert len(files) == predicted.count
        assert max(files.values()) == predicted.tensor_bytes


def test_pretrained_files(measured: list[dict[str, Any]]) -> None:
    files = measured[0]["save_pretrained"]["files"]
    assert tuple(files.values()) == pretrained_files(llama(*SMALL), 4, max_shard_bytes=40 * 10**6)
    assert pretrained_files(llama(*SMALL), 4) == (llama(*SMALL).parameters * 4,)


def test_a_tensor_larger_than_a_file_has_its_own() -> None:
    sizes = pretrained_files(llama(*SMALL), 4, max_shard_bytes=20 * 10**6)
    assert sizes[:2] == (16001 * 512 * 4,) * 2
    assert sum(sizes) == 4 * llama(*SMALL).parameters


def test_memory_of_a_full_state_dict(measured: list[dict[str, Any]]) -> None:
    """On the CPU the device's memory is the host's, so rank 0 has both at the end; rank 1 of FSDP1 keeps nothing."""
    profile = llama(*SMALL)
    fsdp2 = way(profile, plan("fsdp2"), "full")
    assert measured[0]["fsdp2_full"]["high_bytes"] == near(fsdp2.first_rank_host_bytes + fsdp2.gpu_bytes)
    both = way(profile, plan("fsdp2", optim="adamw_torch"), "full", optimizer=True)
    assert measured[0]["fsdp2_optimizer"]["high_bytes"] == near(both.first_rank_host_bytes + both.gpu_bytes)
    fsdp1 = way(profile, plan("fsdp1"), "full")
    assert measured[0]["fsdp1_full"]["high_bytes"] == near(fsdp1.first_rank_host_bytes)
    every = way(profile, plan("fsdp1"), "full_on_every_rank")
    for rank in measured:
        assert rank["fsdp1_full_on_every_rank"]["high_bytes"] == near(every.first_rank_host_bytes)


def test_memory_of_sharded_state_dicts(measured: list[dict[str, Any]]) -> None:
    """FSDP1 gathers each unit even for shards; gloo makes a second copy of a gathered root, which NCCL does not.

    FSDP2's shards are written as they are; on the CPU a last, shorter one is cloned out of its padding.
    """
    profile = llama(*SMALL)
    root = 4 * sum(p.elements for p in profile.root.parameters)
    predicted = way(profile, plan("fsdp1"), "sharded")
    for rank in measured:
        assert rank["fsdp1_sharded"]["high_bytes"] == near(max(predicted.gpu_bytes, 2 * root))
        assert rank["fsdp1_local"]["high_bytes"] < 0.01 * root
    assert measured[0]["fsdp2_model"]["high_bytes"] < 0.01 * root
    assert way(profile, plan("fsdp2"), "sharded").gpu_bytes == 0


def test_against_deepspeed(tmp_path: Path) -> None:
    """Names, counts and bytes of what `save_checkpoint` and `save_16bit_model` write; and what is made before the first step.

    Stages 1, 2: the flat weights, masters and zeros for their gradients. ``zero.Init``: shards, and one module whole.
    """
    if not os.environ.get("CI"):
        pytest.importorskip("deepspeed")
    run_ranks(Path(__file__).parent / "deepspeed_checkpoint_worker.py", str(tmp_path), "1", "2", "3")
    found = json.loads((tmp_path / "files.json").read_text())
    profile = llama(64, 80, 4, 1001)
    for stage in (1, 2, 3):
        job = plan("deepspeed", f"zero{stage}", optim="adamw_torch")
        files = [f for w in savings(profile, job, optimizer=True) for f in w.files]
        expected = {f.name.format(r=r): f.tensor_bytes for f in files for r in range(f.count)}
        expected.pop("model.safetensors", None)
        assert found[str(stage)]["files"] == expected
        ways = {w.way: w.gpu_bytes for w in loadings(profile, job)}
        if stage < 3:
            assert found[str(stage)]["initialize_bytes"] == pytest.approx(ways["every_rank"], abs=2048)
        else:
            shards = sum(round_up(p.elements) for p in profile.in_order())  # bf16, of two ranks
            assert found["3"]["build_bytes"] == pytest.approx(shards + 2 * 1001 * 64, abs=2048)


@pytest.mark.parametrize("job", every_plan(8), ids=lambda p: f"{p.strategy}-{p.backend}-{p.offload}")
def test_every_plan_can_be_saved(job: Plan) -> None:
    for optimizer in (False, True):
        ways = savings(LLAMA_7B, job, optimizer=optimizer)
        assert len({w.way for w in ways}) == len(ways) > 0
        for w in ways:
            assert w.file_count == sum(f.count for f in w.files) > 0
            assert w.gpu_bytes >= 0 <= w.host_bytes_per_node
    with_states = sum(f.count * f.tensor_bytes for f in savings(LLAMA_7B, job, optimizer=True)[0].files)
    assert with_states > sum(f.count * f.tensor_bytes for f in savings(LLAMA_7B, job)[0].files)


def test_tied_weights_are_saved_under_each_name() -> None:
    """By FSDP, which gathers or shards each entry by itself; not where the two share a storage."""
    tied, apart = llama(64, 80, 2, 1000, tied=True), llama(64, 80, 2, 1000)
    assert only_file(way(tied, plan("fsdp2"), "full")) == only_file(way(apart, plan("fsdp2"), "full"))
    head = 1000 * 64 * 4
    ddp = plan("ddp", "ddp")
    assert only_file(way(apart, ddp, "full")).tensor_bytes - only_file(way(tied, ddp, "full")).tensor_bytes == head


def test_replicas_write_once() -> None:
    sharded = only_file(way(LLAMA_7B, plan("fsdp2", ranks=8), "sharded"))
    hsdp = Plan(strategy="hsdp", backend="fsdp2", shard_degree=4, replica_degree=2, nnodes=2, seq_len=1)
    assert only_file(way(LLAMA_7B, hsdp, "sharded")) == sharded
