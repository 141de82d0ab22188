"""The public Python functions other than `estimate` and `recommend`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_advisor import configs
from fsdp_advisor.advice import Advice
from fsdp_advisor.configs import ConfigFiles
from fsdp_advisor.diagnosis import Diagnosis, diagnose_file, job_of
from fsdp_advisor.errors import MissingExtra, UsageError
from fsdp_advisor.export import Exported, Job
from fsdp_advisor.export import export as write
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.hardware import Gpu, list_gpus
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.keywords import EstimateOptions, with_signature_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model import catalog

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fsdp_advisor.recording import Recorder


@with_signature_of(EstimateRequest)
def export(target: str, job: EstimateRequest | Advice | None = None, /, **options: Unpack[EstimateOptions]) -> Exported:
    """The file with which `target` trains a job: a recommendation, a request, or a request's fields as keywords.

    Without a strategy, the fastest plan that fits and that the target supports is exported. Raises AdvisorError with a hint.

    >>> export("torchrun", model="gpt2", gpus=2, gpu="H100", strategy="ddp").target
    'torchrun'
    """
    if isinstance(job, Advice):
        estimate, winner = job.recommendation.estimate, job.recommendation.winner
        if estimate is None or winner is None:
            raise UsageError("the recommendation has no plan to export", hint=job.recommendation.because)
        return write(target, Job.of(job.report, estimate, environment=winner.environment))
    report = report_for(target, job or make_request(with_files_read(options)))
    return write(target, Job.of(report, report.estimates[0]))


@with_signature_of(EstimateRequest)
def diagnose(
    path: str | Path,
    job: EstimateRequest | None = None,
    /,
    *,
    device: int | None = None,
    config_file: ConfigFiles = (),
    **options: Unpack[EstimateOptions],
) -> Diagnosis:
    """Why a GPU ran out of memory: the diagnosis of an error's text, a log or a memory snapshot (`-`: standard input).

    The job, if it is known, is a request, or its fields as keywords, or `config_file`; the diagnosis then says how the memory
    differs from its estimate. `device` chooses the GPU of a snapshot that has several. Raises AdvisorError with a hint.
    """
    if job is None and (options or config_file):
        job = configs.request_with_files({**with_files_read(options), "config_file": config_file}, EstimateRequest)
    return diagnose_file(path, None if job is None else job_of(job), device=device)


def models(pattern: str | None = None) -> list[catalog.Entry]:
    """The models that need no download, or those that `pattern` matches: a part of a name, or a kind such as moe or vision.

    >>> [entry.id for entry in models("llama 3.1 405b")]
    ['meta-llama/Llama-3.1-405B']
    """
    return catalog.search(pattern)


def gpus(pattern: str | None = None) -> list[Gpu]:
    """The GPUs that are known by name, or those whose name, alias or architecture contains `pattern`.

    >>> [gpu.name for gpu in gpus("4090")]
    ['RTX-4090']
    """
    return list(list_gpus(pattern))


def record_module(
    builder: Callable[[], Any],
    batch: Callable[[int, int], Mapping[str, Any]],
    loss: Callable[[Any, dict[str, Any]], Any],
    wrap: Iterable[type | str] = (),
    *,
    name: str | None = None,
) -> Recorder:
    """A recorder of any module. Calls `recording.record_module`, which needs torch.

    `builder()` returns the module, `batch(B, T)` its inputs, `loss(module, batch)` a scalar from one forward. `wrap` names the
    units: classes, or dotted names of single modules. A module without sequences ignores T. Raises MissingExtra without torch.
    """
    try:
        from fsdp_advisor.recording import record_module as record
    except ImportError as error:
        raise MissingExtra("recording a module needs torch and transformers") from error
    return record(builder, batch, loss, wrap, name=name)
