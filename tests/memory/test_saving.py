"""Save methods: files compared to the byte with those of real runs of two processes, and properties of all methods."""

from __future__ import annotations

import importlib
import io
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, with_all_cases
from ranks import RESUMABLE, llama, run_ranks
from test_loading import GIB, LLAMA_7B, SMALL, every_plan, measures, near, plan

from fsdp_advisor import estimate
from fsdp_advisor.engines.loading import load_methods
from fsdp_advisor.engines.saving import choose_save_method, save_methods
from fsdp_advisor.engines.transfer import Files, SaveMethod, pretrained_files
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.choices import Framework, OptimizerName
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import Constructor
from fsdp_advisor.program.storages import round_up

pytestmark = pytest.mark.slow

WEIGHTS = {"optim": "adamw_torch", "save_only_model": True}
RESUMED = {"optim": "adamw_torch"}
PADDING = 2 * SMALL[0] * 4
"""The embedding and the head have 16001 rows. On the CPU a gathered tensor is a view of its padded storage, which `torch.save`
writes whole. From a GPU it is copied to the host without the padding."""


def save_method(profile: Profile, job: Plan, way: str) -> SaveMethod:
    return next(m for m in save_methods(profile, job) if m.way == way)


def only_files(method: SaveMethod) -> Files:
    (files,) = method.files
    return files


def test_fsdp1_files_of_a_7b_model() -> None:
    """In fp32 on 4 GPUs: one file gathered on rank 0, a whole file per rank, or a quarter per rank."""
    whole = 4 * LLAMA_7B.parameters
    files = {m.way: only_files(m) for m in save_methods(LLAMA_7B, plan("fsdp1", ranks=4, precision="fp32", **WEIGHTS))}
    assert {way: (f.count, f.tensor_bytes) for way, f in files.items()} == {
        "full": (1, whole),
        "full_on_every_rank": (4, whole),
        "sharded": (4, whole // 4),
        "local": (4, whole // 4),
    }


@pytest.mark.parametrize(
    ("backend", "asked", "files"),
    [
        ("fsdp1", "auto", (4, 7)), ("fsdp1", "full", (1, 27)), ("fsdp1", "sharded", (4, 7)), ("fsdp1", "local", (4, 7)),
        ("fsdp2", "auto", (4, 7)), ("fsdp2", "full", (1, 27)), ("fsdp2", "sharded", (4, 7)),
    ],
)  # fmt: skip
def test_the_asked_type_of_state_dicts_decides_on_the_files(backend: str, asked: str, files: tuple[int, int]) -> None:
    """The weights of Llama-2-7B in fp32 on 4 GPUs, in GB. The host has no room for a full one: only `auto` takes another type."""
    row = estimate(
        model="meta-llama/Llama-2-7b-hf", gpus=4, precision="fp32", strategy="zero3", backend=backend, save_only_model=True,
        state_dict_type=asked, host_memory="8GiB",
    ).estimates[0]  # fmt: skip
    assert row.job_peaks is not None
    saved = only_files(row.job_peaks.save_method)
    assert (saved.count, round(saved.tensor_bytes / 1e9)) == files


def test_local_state_dicts_need_fsdp1() -> None:
    options = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "state_dict_type": "local"}
    with pytest.raises(UsageError, match="backend fsdp2 has no local state dicts"):
        estimate(**options, backend="fsdp2")
    assert [row.backend for row in estimate(**options, strategy="zero3").estimates] == ["fsdp1"]


@pytest.mark.parametrize("way", ["full", "full_on_every_rank", "sharded", "local"])
@measures
def test_fsdp1_files_match_a_real_run(measured: list[dict[str, Any]], way: str) -> None:
    predicted, files = (
        only_files(save_method(llama(*SMALL), plan("fsdp1", **WEIGHTS), way)),
        measured[0][f"save_fsdp1_{way}"]["files"],
    )
    assert len(files) == predicted.count
    assert max(files.values()) == predicted.tensor_bytes


@pytest.mark.parametrize(("way", "padding"), [("full", PADDING), ("sharded", 0)])
@measures
def test_fsdp2_files_match_a_real_run(measured: list[dict[str, Any]], way: str, padding: int) -> None:
    predicted, files = (
        only_files(save_method(llama(*SMALL), plan("fsdp2", **WEIGHTS), way)),
        measured[0][f"save_fsdp2_{way}"]["files"],
    )
    assert len(files) == predicted.count
    assert max(files.values()) == predicted.tensor_bytes + padding


@pytest.mark.parametrize("way", ["save_pretrained", "full"])
@measures
def test_ddp_files_match_a_real_run(measured: list[dict[str, Any]], way: str) -> None:
    predicted = only_files(save_method(llama(*SMALL), plan("ddp", "ddp", **WEIGHTS), way))
    assert measured[0][f"save_ddp_{way}"]["files"] == {predicted.name: predicted.tensor_bytes}


@pytest.mark.parametrize("case", RESUMABLE)
@measures
def test_files_with_optimizer_states_match_a_real_run(measured: list[dict[str, Any]], case: str) -> None:
    _, backend, way, _ = case.split("_")
    job = plan(
        backend.removesuffix("flat"),
        "ddp" if backend == "ddp" else "zero3",
        use_orig_params="flat" not in backend,
        **RESUMED,
    )
    (predicted,), files = save_method(llama(*SMALL), job, way).files, measured[0][case]["files"]
    padding = 3 * PADDING if (backend, way) == ("fsdp2", "full") else 0
    assert len(files) == predicted.count
    assert max(files.values()) == predicted.tensor_bytes + padding


def test_a_checkpoint_has_three_times_the_bytes_of_fp32_weights() -> None:
    """AdamW's two moments are as large as the weights."""
    for backend in ("ddp", "fsdp1", "fsdp2"):
        for method in save_methods(LLAMA_7B, plan(backend, "ddp" if backend == "ddp" else "zero3", precision="fp32")):
            weights = save_method(
                LLAMA_7B, plan(backend, "ddp" if backend == "ddp" else "zero3", precision="fp32", **WEIGHTS), method.way
            )
            ratio = sum(f.count * f.tensor_bytes for f in method.files) / sum(
                f.count * f.tensor_bytes for f in weights.files
            )
            assert ratio == pytest.approx(3, rel=1e-4), (backend, method.way)


@measures
def test_full_state_dicts_with_optimizer_states_need_the_memory_of_a_real_run(measured: list[dict[str, Any]]) -> None:
    """On the CPU device and host memory are the same, so rank 0 holds both at the end."""
    profile = llama(*SMALL)
    fsdp2 = save_method(profile, plan("fsdp2", **RESUMED), "full")
    assert measured[0]["save_fsdp2_full_resumable"]["high_bytes"] == near(fsdp2.first_rank_host_bytes + fsdp2.gpu_bytes)
    fsdp1 = save_method(profile, plan("fsdp1", **RESUMED), "full")
    high = measured[0]["save_fsdp1_full_resumable"]["high_bytes"]
    assert fsdp1.first_rank_host_bytes <= high <= fsdp1.first_rank_host_bytes + fsdp1.gpu_bytes


def test_a_checkpoint_of_flat_parameters_gathers_all_states_of_a_unit_at_once() -> None:
    """AdamW's two moments, and with a sharded state dict this rank's rows of them."""
    root, shards = 4 * sum(p.elements for p in LLAMA_7B.root.parameters), LLAMA_7B.parameters  # bytes, of four ranks
    found = {
        (m.way, original): m.gpu_bytes
        for original in (True, False)
        for m in save_methods(LLAMA_7B, plan("fsdp1", ranks=4, precision="fp32", use_orig_params=original))
    }
    assert found["full", True] == root * 5 // 4
    assert found["full", False] == 2 * root
    assert found["sharded", False] == shards + 2 * root * 5 // 4


@pytest.mark.parametrize(
    "profile", [llama(*SMALL), llama(8192, 28672, 80, 32000), llama(8192, 28672, 8, 4_000_000)],
    ids=["one file", "several files", "tensors larger than a file"],
)  # fmt: skip
def test_save_pretrained_splits_files_as_huggingface_hub_does(profile: Profile) -> None:
    hub = pytest.importorskip("huggingface_hub")
    sizes = {str(i): p.elements * 4 for i, p in enumerate(profile.in_order())}
    split = hub.split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="{suffix}", max_shard_size="50GB"
    )
    expected = [sum(sizes[name] for name in names) for names in split.filename_to_tensors.values()]
    files = pretrained_files(profile, lambda _: 4)
    assert (files.count, files.tensor_bytes) == (len(expected), max(expected))


@measures
def test_full_state_dicts_need_the_memory_of_a_real_run(measured: list[dict[str, Any]]) -> None:
    """On the CPU device and host memory are the same, so rank 0 holds both at the end."""
    profile = llama(*SMALL)
    fsdp2 = save_method(profile, plan("fsdp2", **WEIGHTS), "full")
    assert measured[0]["save_fsdp2_full"]["high_bytes"] == near(fsdp2.first_rank_host_bytes + fsdp2.gpu_bytes)
    fsdp1 = save_method(profile, plan("fsdp1", **WEIGHTS), "full")
    assert measured[0]["save_fsdp1_full"]["high_bytes"] == near(fsdp1.first_rank_host_bytes)
    every = save_method(profile, plan("fsdp1", **WEIGHTS), "full_on_every_rank")
    for rank in measured:
        assert rank["save_fsdp1_full_on_every_rank"]["high_bytes"] == near(every.first_rank_host_bytes)


@measures
def test_sharded_state_dicts_need_the_memory_of_a_real_run(measured: list[dict[str, Any]]) -> None:
    """FSDP1 gathers each unit even for shards. gloo makes a second copy of a gathered root, NCCL does not.

    FSDP2 writes its shards as they are. On the CPU the last, shorter shard is cloned out of its padding.
    """
    profile = llama(*SMALL)
    root = 4 * sum(p.elements for p in profile.root.parameters)
    predicted = save_method(profile, plan("fsdp1", **WEIGHTS), "sharded")
    for rank in measured:
        assert rank["save_fsdp1_sharded"]["high_bytes"] == near(max(predicted.gpu_bytes, 2 * root))
        assert rank["save_fsdp1_local"]["high_bytes"] < 0.01 * root
    assert measured[0]["save_fsdp2_sharded"]["high_bytes"] < 0.01 * root
    assert save_method(profile, plan("fsdp2", **WEIGHTS), "sharded").gpu_bytes == 0


@pytest.mark.parametrize(
    "optim",
    ["adamw_torch_fused", "adamw_torch", "sgd_momentum", "adafactor", "adagrad", "rmsprop"],
)
def test_a_file_of_optimizer_states_has_the_bytes_of_a_real_one(optim: Any) -> None:
    torch = pytest.importorskip("torch")
    made, profile = optimizer_named(optim).script, llama(32, 48, 2, 101)
    assert isinstance(made, Constructor)
    parameters = [torch.nn.Parameter(torch.zeros(p.shape)) for p in profile.in_order()]
    optimizer = getattr(importlib.import_module(made.module), made.name)(parameters, lr=1e-3, **made.options)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    found = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist() if "/data/" in entry.filename)
    _, states = save_method(profile, plan("ddp", "ddp", optim=optim), "save_pretrained").files
    assert (states.name, states.tensor_bytes) == ("optimizer.pt", found)


DEEPSPEED_CASES = [
    "1-AdamW-none",
    "2-AdamW-none",
    "3-AdamW-none",
    "1-Muon-none",
    "2-Muon-cpu",
    "3-Muon-none",
    "3-Muon-cpu",
]
"""Stage, optimizer, and the device of its offload."""


@with_all_cases
def test_deepspeed_files_and_loading_match_a_real_run(tmp_path: Path) -> None:
    """Names, counts and bytes of the files of `save_checkpoint` and `save_16bit_model`, and peaks before the first step.

    Stages 1, 2: flat weights, masters, and zeros as the masters' gradients. ``zero.Init``: shards, and one module whole.
    """
    if not os.environ.get("CI"):
        pytest.importorskip("deepspeed")
    run_ranks(Path(__file__).parent / "deepspeed_checkpoint_worker.py", str(tmp_path), *DEEPSPEED_CASES)
    found = json.loads((tmp_path / "files.json").read_text())
    profile = llama(64, 80, 4, 1001)
    for case in DEEPSPEED_CASES:
        stage, optimizer, device = case.split("-")
        optim = {"AdamW": "adamw_torch", "Muon": "muon"}[optimizer]
        job = plan("deepspeed", f"zero{stage}", optim=optim, offload="none" if device == "none" else "optimizer")
        jobs = (job, replace(job, save_only_model=True))
        files = [f for each in jobs for m in save_methods(profile, each) for f in m.files]
        expected = {f.name.format(r=r): f.tensor_bytes for f in files for r in range(f.count)}
        expected.pop("model.safetensors", None)
        assert found[case]["files"] == expected, case
        if optim == "muon":
            continue
        gpu_bytes = {m.way: m.gpu_bytes for m in load_methods(profile, job)}
        if stage != "3":
            assert found[case]["initialize_bytes"] == pytest.approx(gpu_bytes["every_rank"], abs=2048)
        else:
            shards = sum(round_up(p.elements) for p in profile.in_order())  # bf16, of two ranks
            assert found[case]["build_bytes"] == pytest.approx(shards + 2 * 1001 * 64, abs=2048)


@pytest.mark.parametrize("job", every_plan(8), ids=lambda p: f"{p.strategy}-{p.backend}-{p.offload}")
def test_every_plan_can_be_saved(job: Plan) -> None:
    """Each method writes every weight, in at least two bytes per element."""
    methods = save_methods(LLAMA_7B, job)
    assert len({m.way for m in methods}) == len(methods) > 0
    for method in methods:
        assert sum(f.count * f.tensor_bytes for f in method.files) >= 2 * LLAMA_7B.parameters


ADAPTED = {"model": "meta-llama/Llama-3.2-1B", "gpus": 8, "strategy": "zero3", "use_peft": True, "dtype": "bfloat16"}


def adapted(framework: str, backend: str) -> dict[str, SaveMethod]:
    """The methods of saving LoRA adapters, by way."""
    request = make_request({**ADAPTED, "framework": framework, "backend": backend, "save_only_model": True})
    profile = resolve(request.model).adapted(adaptation_of(request)).profile
    assert profile is not None
    (job,) = plans(request, seq_len=128)
    return {method.way: method for method in save_methods(profile, job)}


@pytest.mark.parametrize(
    ("framework", "backend"), [("trainer", "fsdp1"), ("trainer", "fsdp2"), ("torch", "fsdp1"), ("torch", "fsdp2")]
)
def test_a_file_of_adapters_does_not_show_what_is_gathered(framework: str, backend: str) -> None:
    """FSDP1 gathers the whole model, and so does accelerate under FSDP2. With
    `ignore_frozen_params` PyTorch leaves out frozen parameters.
    """
    methods = adapted(framework, backend)
    adapters = only_files(methods["full"]).tensor_bytes
    assert adapters == only_files(methods["sharded"]).tensor_bytes * 8 == 4 * 1_703_936
    base, embedding = 2 * 1_498_482_688, 2 * 128_256 * 2048  # bf16; the head is tied to the embedding and is saved too
    full = methods["full"]
    if (framework, backend) == ("torch", "fsdp2"):
        assert full.first_rank_host_bytes == adapters and full.gpu_bytes < adapters
    else:
        assert full.first_rank_host_bytes >= base + adapters
        assert full.gpu_bytes >= embedding


@in_turn(2, of=3)
def test_peft_does_not_find_adapters_in_units_of_fsdp1() -> None:
    """In two processes over gloo, `get_peft_model_state_dict` returned no tensor of a model with units, and all of one without."""
    in_units = {"backend": "fsdp1", "framework": "trainer"}
    in_one = {"backend": "fsdp1", "dtype": "float32", "wrap": "none"}
    for options, warned in ((in_units, True), (in_one, False), ({"backend": "fsdp2"}, False)):
        (row,) = estimate(**{**ADAPTED, "seq_len": 128, **options}).estimates
        assert any("saves an empty file of adapters" in warning for warning in row.warnings) == warned


def test_fsdp_saves_tied_weights_once_per_name() -> None:
    tied, untied = llama(64, 80, 2, 1000, tied=True), llama(64, 80, 2, 1000)
    job = plan("fsdp2", **WEIGHTS)
    assert save_method(tied, job, "full").files == save_method(untied, job, "full").files


def test_ddp_saves_tied_weights_once() -> None:
    """The two names share a storage."""
    tied, untied = llama(64, 80, 2, 1000, tied=True), llama(64, 80, 2, 1000)
    job, head_bytes = plan("ddp", "ddp", **WEIGHTS), 1000 * 64 * 4
    sizes = [only_files(save_method(profile, job, "full")).tensor_bytes for profile in (tied, untied)]
    assert sizes[1] - sizes[0] == head_bytes


@pytest.mark.parametrize(("optim", "framework", "n_bytes"), [
    ("adamw_torch_8bit", "torch", 18_696), ("adamw_torch_8bit", "trainer", 18_700), ("adamw_torch_4bit", "torch", 8_584),
])  # fmt: skip
def test_torchaos_optimizers_save_the_learning_rate_of_each_group(
    optim: OptimizerName, framework: Framework, n_bytes: int
) -> None:
    """Bytes of tensors in `torch.save` of AdamW8bit's and AdamW4bit's state after a step of a 64 x 128 matrix, in one group or two."""
    profile = Profile("matrix", "causal-lm", Unit("Linear", (Parameter("weight", (64, 128)),)), (), (), None, {}, {})
    method = save_method(profile, plan("ddp", "ddp", optim=optim, framework=framework), "save_pretrained")
    assert [f.tensor_bytes for f in method.files if f.name == "optimizer.pt"] == [n_bytes]


def test_hsdp_replicas_share_the_writing() -> None:
    hsdp = Plan(strategy="hsdp", backend="fsdp2", mesh=Mesh(dp_shard=4, dp_replicate=2, nnodes=2), seq_len=1)
    zero3 = plan("fsdp2", ranks=8)
    assert save_method(LLAMA_7B, hsdp, "sharded").files == save_method(LLAMA_7B, zero3, "sharded").files


def test_the_first_save_method_that_fits_is_chosen() -> None:
    methods = save_methods(LLAMA_7B, plan("fsdp1", ranks=8, **WEIGHTS))
    assert choose_save_method(methods, gpu_memory_bytes=80 * GIB).way == "full"
    assert choose_save_method(methods, gpu_memory_bytes=80 * GIB, host_memory_bytes=8 * GIB).way == "sharded"
    assert choose_save_method(methods, gpu_memory_bytes=0).way == "local"
    assert choose_save_method(methods, gpu_memory_bytes=0, host_memory_bytes=0).way == "full"
