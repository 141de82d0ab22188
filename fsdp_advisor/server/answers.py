"""The answers to estimate, recommend and export requests, as finished documents. Worker processes run these functions."""

from __future__ import annotations

import gzip
import hashlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Concatenate, Literal, ParamSpec

from pydantic_core import to_json

from fsdp_advisor.advice import Advice, recommend_resolved, with_adapter_remedy, with_vllm_started
from fsdp_advisor.advice.methods import advice_of_methods
from fsdp_advisor.assumptions import DEFAULT_GPU, settled
from fsdp_advisor.comparison import compare_resolved
from fsdp_advisor.diagnosis import diagnose_text, job_of
from fsdp_advisor.errors import AdvisorError, NotRecordable
from fsdp_advisor.estimator import estimate_resolved, lazy_report
from fsdp_advisor.export import Job, export, find
from fsdp_advisor.export.bundle import Bundle, bundle
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.job.request import AnyRequest, EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.config import parse_config
from fsdp_advisor.model.resolve import resolve, resolve_config
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.render.check_line import check_result
from fsdp_advisor.report import Report
from fsdp_advisor.server.config_paths import refuse_paths
from fsdp_advisor.tape_keys import needs_recording

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Document:
    """A finished response body, compressed, with its entity tag."""

    gzipped: bytes
    etag: str
    media_type: str = "application/json"
    file_name: str | None = None
    """The name under which browsers save the body as a file; None: they show it."""
    lasting: bool = True
    """Whether the document changes only with this program's version. A model on the hub may change at any time."""

    @classmethod
    def of(
        cls, body: bytes, *, media_type: str = "application/json", file_name: str | None = None, lasting: bool = True
    ) -> Document:
        """Compress `body` and compute its tag."""
        return cls(gzip.compress(body, compresslevel=6, mtime=0), entity_tag(body), media_type, file_name, lasting)


def entity_tag(body: bytes) -> str:
    """A weak entity tag: the same for every content coding."""
    return f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A request's model: a name, or the bytes of a config.json that was pasted or is on the hub."""

    name: str
    config: bytes | None = None
    origin: Literal["config", "hub"] = "config"
    must_record: bool = False
    """Whether the request's steps have to be recorded even if the model is in the catalog."""

    @property
    def key(self) -> tuple[str, bytes | None]:
        """A short key that is equal for equal sources, even if the configuration is large."""
        return self.name, None if self.config is None else hashlib.sha256(self.config).digest()


def answer(
    source: ModelSource, make: Callable[Concatenate[Resolved, P], Document], *args: P.args, **kwargs: P.kwargs
) -> Document:
    """The result of `make(model)` for the model that `source` names. Steps of a pasted configuration are recorded as `make` asks for them.

    Raises AdvisorError; UnknownModel if the model is not in the catalog.
    """
    if source.config is None:
        model = resolve(source.name, allow_hub=False, allow_paths=False, allow_recording=source.must_record)
        return make(model, *args, **kwargs)
    try:
        return make(_recorded(source.config, source), *args, **kwargs)
    except AdvisorError:
        raise
    except Exception as error:  # transformers builds models of unforeseen configurations
        hint = "check the configuration's sizes"
        raise NotRecordable(f"{source.name}: {type(error).__name__}", hint=hint) from error


def _recorded(config: bytes, source: ModelSource) -> Resolved:
    refuse_paths(parse_config(config, source.name), source.name)
    model = resolve_config(config, source.name, source.origin)
    # it is about the server's cache folder, not the user's
    notes = tuple(note for note in model.notes if "cache folder" not in note)
    return replace(model, notes=notes)


def estimate_document(model: Resolved, request: EstimateRequest, explain: bool) -> Document:
    """An estimate as JSON. `explain` adds timelines."""
    report = estimate_resolved(decided(request), model, explain=explain)
    return _json_document(_with_gpu_note(request, report), timeline=explain)


def check_document(model: Resolved, request: EstimateRequest) -> Document:
    """Whether a job fits, as JSON."""
    report = estimate_resolved(decided(request), model)
    return Document.of(to_json(check_result(report)), lasting=model.source != "hub")


def compare_document(model: Resolved, a: EstimateRequest, b: EstimateRequest) -> Document:
    """Two jobs of catalogued models, and their differences, as JSON. `model` is the model of job `a`."""
    a, b, other = decided(a), decided(b), model
    if b.model != a.model:
        other = resolve(b.model, allow_hub=False, allow_paths=False, allow_recording=needs_recording(b))
    found = compare_resolved((a, model), (b, other))
    return Document.of(to_json(found.as_dict(), inf_nan_mode="null"), lasting=model.source != "hub")


def diagnose_document(text: str, request: EstimateRequest | None) -> Document:
    """Why a GPU ran out of memory, from an error's text and the job, if it is known, as JSON."""
    job = None
    if request is not None:
        model = resolve(request.model, allow_hub=False, allow_paths=False, allow_recording=False)
        job = job_of(decided(request), model)
    return Document.of(to_json(diagnose_text(text, job).as_dict(), inf_nan_mode="null"))


def recommend_document(model: Resolved, request: RecommendRequest, explain: bool) -> Document:
    """A recommendation as JSON. `explain` adds timelines."""
    return _json_document(advise(model, request, explain=explain), timeline=explain)


def export_document(model: Resolved, request: EstimateRequest, target: str, whole: bool) -> Document:
    """The file that launches the requested plan, or the recommended one if the request leaves the strategy open.

    `whole`: a zip archive of every file that a launch needs.
    """
    report = report_for(target, decided(request), model)
    job = Job.of(report, report.estimates[0])
    lasting = model.source != "hub"
    if whole:
        archive = _zipped(bundle(find(target), job))
        return Document.of(archive, media_type="application/zip", file_name=f"{target}.zip", lasting=lasting)
    exported = export(target, job)
    return Document.of(
        exported.text.encode(), media_type=exported.media_type, file_name=exported.file_name, lasting=lasting
    )


def _zipped(files: Bundle) -> bytes:
    """The files as a zip archive, the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files.files:
            entry = zipfile.ZipInfo(file.name)
            entry.external_attr = (0o755 if file.executable else 0o644) << 16
            archive.writestr(entry, file.text)
    return buffer.getvalue()


def advise(model: Resolved, request: RecommendRequest, *, explain: bool = False) -> Advice:
    """The recommendation for a request."""
    if request.method == "any":
        return advice_of_methods(request, lambda one: _advice(model, one, explain=explain))
    return with_adapter_remedy(_advice(model, request, explain=explain), decided(request), model)


def _advice(model: Resolved, request: RecommendRequest, *, explain: bool) -> Advice:
    with_gpu = with_vllm_started(decided(request), model)
    report = _with_gpu_note(request, lazy_report(with_gpu.as_estimate, model, explain=explain))
    return Advice(report=report, recommendation=recommend_resolved(report, model, with_gpu))


def _json_document(found: Report | Advice, *, timeline: bool) -> Document:
    report = found if isinstance(found, Report) else found.report
    body = to_json(found.as_dict(timeline=timeline), inf_nan_mode="null")
    return Document.of(body, lasting=report.model_source != "hub")


def decided(request: AnyRequest) -> AnyRequest:
    """The request with the default GPU if it names none (the server's own GPU must not matter), and with the values that
    `assumptions.settled` assumes.
    """
    return settled(request if request.gpu is not None else replace(request, gpu=DEFAULT_GPU))


def _with_gpu_note(request: EstimateRequest, report: Report) -> Report:
    if request.gpu is not None:
        return report
    return replace(report, notes=(*report.notes, f"GPU: {DEFAULT_GPU} is assumed; name another with gpu"))
