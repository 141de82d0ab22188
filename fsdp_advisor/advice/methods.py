"""Full fine-tuning, LoRA and QLoRA of one model: the recommendation for each, and the first that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.result import Advice, Method, Remedy
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.job.adaptation import LORA_OPTIONS, QUANTIZATION_OPTIONS
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.adapter_targets import NoDefaultTargets

FULL, LORA, QLORA = "full fine-tuning", "LoRA", "QLoRA"


def advice_of_methods(request: RecommendRequest, advise: Callable[[RecommendRequest], Advice]) -> Advice:
    """The advice for the first method that fits without offload to a host whose memory is unknown. If none does: for the one that fits
    with the least host memory. If none fits: for the last one. Its `methods` has the results of all.

    `advise` answers a request whose method is fixed. A method that cannot be answered is listed with the reason. Adapters are on all
    linear layers if PEFT has no default modules for the model. Raises the error of full fine-tuning if that cannot be answered.
    """
    if request.peft_config is not None or request.freeze or request.load_in_8bit:
        raise UsageError(
            "method any compares full fine-tuning, LoRA and QLoRA",
            hint="leave out peft_config, freeze and load_in_8bit",
        )
    answered: list[Advice] = []
    methods: list[Method] = []
    for name, one in _requests(request):
        try:
            advice = _with_targets(one, advise)
        except AdvisorError as error:
            if name == FULL:
                raise
            methods.append(Method(name=name, advice=None, reason=error.message))
            continue
        answered.append(advice)
        methods.append(Method(name=name, advice=advice, reason=None))
    fitting = [advice for advice in answered if advice.recommendation.fits]
    chosen = min(fitting, key=_unknown_host_bytes) if fitting else answered[-1]
    found = chosen.recommendation
    notes = []
    if request.use_peft and not found.request.use_peft:
        notes.append("method any compares full fine-tuning, too: use_peft is an option of LoRA and QLoRA only")
    if request.lora_target_modules is None and any(a.recommendation.request.lora_target_modules for a in answered):
        notes.append(
            "PEFT has no default modules for this model, so LoRA and QLoRA have lora_target_modules all-linear"
        )
    return replace(chosen, recommendation=replace(found, methods=tuple(methods), notes=(*notes, *found.notes)))


def adapter_remedy(request: RecommendRequest, fit: Callable[[RecommendRequest], Candidate | None]) -> Remedy | None:
    """LoRA if it fits, else QLoRA, for a request that trains the whole model; None if neither fits or can be answered.

    `fit`: a plan that fits a request whose method is fixed, or None.
    """
    for name, one in _requests(request):
        if name == FULL:
            continue
        try:
            found = fit(one)
        except AdvisorError:
            continue
        if found is not None:
            options = {"use_peft": True} | ({"load_in_4bit": True} if name == QLORA else {})
            return Remedy(options=options, because=f"{name} fits with {found.label}: {found.memory_text}")
    return None


def _with_targets(request: RecommendRequest, advise: Callable[[RecommendRequest], Advice]) -> Advice:
    """The advice for a request, with adapters on all linear layers if PEFT has no default modules for the model."""
    try:
        return advise(request)
    except NoDefaultTargets:
        return advise(request.but(lora_target_modules="all-linear"))


def _unknown_host_bytes(advice: Advice) -> int:
    """The bytes that the recommended plan offloads to a host whose memory is unknown."""
    found = advice.recommendation
    if found.winner is None or found.winner.plan.offload == "none" or found.request.host_memory is not None:
        return 0
    return found.winner.host_peak_bytes_per_node


def _requests(request: RecommendRequest) -> Iterator[tuple[str, RecommendRequest]]:
    """The request of each method. Assumed values of a frozen base, such as its dtype, are removed, because each method's request
    assumes its own.
    """
    adapters, quantization = (
        {"use_peft", "lora_kernels", *LORA_OPTIONS.values()},
        {"load_in_4bit", *QUANTIZATION_OPTIONS},
    )
    base = _without(request.but(method="fixed"), request.assumed & {"dtype", "bnb_4bit_quant_storage"})
    yield FULL, _without(base, adapters | quantization)
    yield LORA, replace(_without(base, quantization), use_peft=True)
    yield QLORA, base.but(use_peft=True, load_in_4bit=True)


def _without(request: RecommendRequest, names: Set[str]) -> RecommendRequest:
    """The request as if these options had been neither given nor assumed."""
    defaults = {name: option.default for name, option in fields_of(RecommendRequest).items() if name in names}
    return replace(request, **defaults, given=request.given - names, assumed=request.assumed - names)
