"""Estimate a job: from a request and a model to a report. The interfaces call this module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdp_advisor.assumption_notes import (
    adapted_expert_notes,
    assumption_notes,
    backend_notes,
    batch_notes,
    image_notes,
    memory_notes,
    unquantized_notes,
)
from fsdp_advisor.assumptions import gpu_of, sequence_length, settled
from fsdp_advisor.engines.deepspeed.settings import hidden_size
from fsdp_advisor.engines.registry import model_refusal
from fsdp_advisor.errors import UsageError
from fsdp_advisor.gpu_support import backend_refusal, check_gpu, support_notes
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.adaptation import Adaptation, adaptation_of
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.batch import divided
from fsdp_advisor.job.compatibility import label, plans, plans_and_refusals
from fsdp_advisor.job.compilation import check_compiled_base
from fsdp_advisor.job.ignored import ignored_in_estimate
from fsdp_advisor.job.keywords import EstimateOptions, with_signature_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import AnyRequest, EstimateRequest
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.model.experts import expert_notes
from fsdp_advisor.model.kernels import compile_notes, fp8_notes, kernel_notes, liger_notes, without_unknown_liger
from fsdp_advisor.model.lora_kernels import lora_kernel_notes
from fsdp_advisor.model.multimodal import ImageModel, trained_on_text
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved, split_recorder
from fsdp_advisor.report import Adapters, Report, Rows
from fsdp_advisor.rows import estimate_plan
from fsdp_advisor.strategy_estimate import StrategyEstimate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fsdp_advisor.configs import ConfigFiles


@with_signature_of(EstimateRequest)
def estimate(
    request: EstimateRequest | None = None,
    /,
    *,
    explain: bool = False,
    config_file: ConfigFiles = (),
    **options: Unpack[EstimateOptions],
) -> Report:
    """The report of one job under one strategy or all of them.

    Takes an `EstimateRequest`, or its fields as keywords; `model` may also be what `record_module` returns. `config_file` names
    configuration files of other tools; keywords win over them. `explain` adds the peak with a fused loss, which only
    `--explain` shows. Raises AdvisorError with a hint.
    """
    fields, model = split_recorder({**options, "config_file": config_file})
    request = settled(request or requested(fields, EstimateRequest))
    return estimate_resolved(request, model or resolve(request.model), explain=explain)


def requested(fields: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest:
    """The request of these fields, and of the configuration files that they name. Raises UsageError."""
    fields = with_files_read(fields)
    if not fields.get("config_file"):
        return make_request({name: value for name, value in fields.items() if name != "config_file"}, kind)
    from fsdp_advisor import configs  # most jobs need none of its readers

    return configs.request_with_files(fields, kind)


def estimate_resolved(request: EstimateRequest, model: Resolved, *, explain: bool = False) -> Report:
    """`estimate` for a model that is already resolved."""
    report = lazy_report(request, model, explain=explain)
    for _ in report.estimates:  # estimates each row, so that errors are raised here
        pass
    return report


def lazy_report(request: EstimateRequest, model: Resolved, *, explain: bool = False) -> Report:
    """`estimate_resolved` with rows that are estimated when they are first read. That read may raise AdvisorError."""
    of_liger = liger_notes(request, model.profile)
    request = without_unknown_liger(divided(request), model.profile)
    adaptation = adaptation_of(request)
    gpu, notes = gpu_of(request)
    _check(request, model, adaptation, gpu)
    model = model.adapted(adaptation)
    conf = AllocatorConf.parse(request.allocator_conf)
    seq_len, length_notes = sequence_length(request, model.profile)
    profile = model.profile
    wanted, refused = plans_and_refusals(request, seq_len=seq_len)
    if gpu.unified_memory:
        wanted = [plan for plan in wanted if plan.offload == "none"]
    possible, unable = _possible(wanted, profile, gpu)

    def row(plan: Plan) -> StrategyEstimate:
        return estimate_plan(model, plan, gpu, explain=explain, conf=conf, host_memory_bytes=request.host_memory)

    return Report(
        request=request,
        seq_len=seq_len,
        model_name=model.name,
        weights=model.weights or model.name,
        model_source=model.source,
        parameters=model.parameters,
        trainable_parameters=model.trainable_parameters,
        gpu_name=gpu.name,
        gpu_memory_bytes=gpu.memory_bytes,
        estimates=Rows(possible, row),
        task=profile.task if profile else None,
        layer_classes=profile.layer_classes if profile else (),
        image_model=ImageModel.of(profile) if profile and request.images_per_sample else None,
        largest_parameter_elements=profile.largest_parameter_elements if profile else None,
        hidden_size=hidden_size(profile) if profile else None,
        adapters=Adapters(method=method, parameters=profile.adapter_parameters)
        if profile and (method := model.adaptation.method)
        else None,
        adapted_modules=profile.adapted_modules if profile and not model.adaptation.names_modules else (),
        packed=model.packed,
        notes=_notes(
            request,
            model,
            gpu,
            of_gpu=notes,
            of_liger=of_liger,
            of_length=length_notes,
            of_plans=[
                *backend_notes(request, possible),
                *(lora_kernel_notes(profile.config, profile.parameter_names(), possible) if profile else ()),
                *_left_out([*refused, *unable]),
                *ignored_in_estimate(request, possible),
            ],
        ),
    )


def _notes(
    request: EstimateRequest,
    model: Resolved,
    gpu: Gpu,
    *,
    of_gpu: Sequence[str],
    of_liger: Sequence[str],
    of_length: Sequence[str],
    of_plans: Sequence[str],
) -> tuple[str, ...]:
    """The notes of a report, in order. A note that a model is trained on text alone is left out if the job has images."""
    profile = model.profile
    images = image_notes(request, profile)
    text_note = trained_on_text(str(profile.config.get("model_type"))) if profile else ""
    return (
        *(note for note in model.notes if not (images and note == text_note)),
        *of_gpu,
        *memory_notes(gpu),
        *support_notes(request, gpu),
        *kernel_notes(request, profile),
        *expert_notes(request, profile),
        *unquantized_notes(request, profile),
        *adapted_expert_notes(profile),
        *of_liger,
        *compile_notes(request.compile, request.attention, request.micro_batch_size),
        *fp8_notes(request.fp8, request.compile, request.framework),
        *assumption_notes(request, gpu, is_packed=bool(model.adaptation.packed_by)),
        *of_length,
        *batch_notes(request),
        *images,
        *of_plans,
    )


def _check(request: EstimateRequest, model: Resolved, adaptation: Adaptation, gpu: Gpu) -> None:
    """Refuse a job before its adapted model is recorded, which takes long. Raises UsageError."""
    check_gpu(request, gpu)
    plans(request, seq_len=sequence_length(request, model.profile)[0])
    _check_layer_classes(request, model.profile)
    check_compiled_base(request, adaptation.on_checkpoint(model.packed))


def _check_layer_classes(request: EstimateRequest, profile: Profile | None) -> None:
    """Raises UsageError for a file that makes FSDP units of a class of layers that the model does not have.

    Source: accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_auto_wrap_policy`; utils/dataclasses.py, `set_auto_wrap_policy`.
    """
    if profile is None or request.wrap != "layer" or request.strategy == "ddp":
        return
    for reading in request.configs:
        for name in reading.layer_classes:
            if name not in profile.layer_classes:
                raise UsageError(
                    f"{reading.file}: {profile.name} has no class {name}; accelerate then raises ValueError: Could not find the transformer"
                    f" layer class {name} in the model",
                    hint=f"its layer classes: {', '.join(profile.layer_classes) or 'none'}",
                )


def _possible(
    wanted: Sequence[Plan], profile: Profile | None, gpu: Gpu
) -> tuple[list[Plan], list[tuple[str, UsageError]]]:
    """The plans that can train the model on the GPU, and the labels of the others with the reasons. Raises UsageError if there is none."""
    refusals = {
        plan: backend_refusal(plan, gpu) or (model_refusal(profile, plan) if profile else None) for plan in wanted
    }
    left_out = [(label(plan.strategy, plan.offload), error) for plan, error in refusals.items() if error is not None]
    if left_out and len(left_out) == len(wanted):
        raise left_out[-1][1]
    return [plan for plan in wanted if refusals.get(plan) is None], left_out


def _left_out(refusals: Iterable[tuple[str, UsageError]]) -> list[str]:
    """Notes on the rows that are left out, one for each reason."""
    rows: dict[str, list[str]] = {}
    for name, error in refusals:
        rows.setdefault(f"{error.message}; {error.hint}", []).append(name)
    return [
        f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {'is' if len(names) == 1 else 'are'} left out: {reason}"
        for reason, names in rows.items()
    ]
