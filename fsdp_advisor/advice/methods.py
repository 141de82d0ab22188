"""Full fine-tuning, LoRA and QLoRA of one model: the recommendation for each, and the first that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.ranking import actual_speed
from fsdp_advisor.advice.result import Advice, Method, Remedy
from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.job.adaptation import LORA_OPTIONS, QUANTIZATION_OPTIONS
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.adapter_targets import NoDefaultTargets
from fsdp_advisor.units import format_gib

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
    fitting = [method for method in methods if method.advice is not None and method.advice.recommendation.fits]
    winner = min(fitting, key=_host_bytes_of) if fitting else None
    chosen = winner.advice if winner is not None and winner.advice is not None else answered[-1]
    found = chosen.recommendation
    notes = []
    if request.use_peft and not found.request.use_peft:
        notes.append("method any compares full fine-tuning, too: use_peft is an option of LoRA and QLoRA only")
    if request.lora_target_modules is None and any(a.recommendation.request.lora_target_modules for a in answered):
        notes.append(
            "PEFT has no default modules for this model, so LoRA and QLoRA have lora_target_modules all-linear"
        )
    found = replace(
        found,
        methods=tuple(methods),
        why_method=_why(winner, methods) if winner is not None else None,
        notes=(*notes, *found.notes),
    )
    return replace(chosen, recommendation=found)


def adapter_remedy(request: RecommendRequest, fit: Callable[[RecommendRequest], Candidate | None]) -> Remedy | None:
    """LoRA or QLoRA, as method any chooses, for a request that trains the whole model; None if neither fits or can be answered.

    `fit`: the plan to recommend for a request whose method is fixed, or None.
    """
    fitting = []
    for name, one in _requests(request):
        if name == FULL:
            continue
        try:
            found = fit(one)
        except AdvisorError:
            continue
        if found is not None:
            fitting.append((name, found))
            if not _unknown_host_bytes(found):
                break
    if not fitting:
        return None
    name, found = min(fitting, key=lambda one: _unknown_host_bytes(one[1]))
    options = {"use_peft": True} | ({"load_in_4bit": True} if name == QLORA else {})
    return Remedy(options=options, because=f"{name} fits with {found.label}: {found.memory_text}")


def _with_targets(request: RecommendRequest, advise: Callable[[RecommendRequest], Advice]) -> Advice:
    """The advice for a request, with adapters on all linear layers if PEFT has no default modules for the model."""
    try:
        return advise(request)
    except NoDefaultTargets:
        return advise(request.but(lora_target_modules="all-linear"))


def _why(chosen: Method, methods: Sequence[Method]) -> str:
    """Why a method is recommended, in one sentence: what is against each of the others."""
    others = (f"{other.name} {_objection(other, chosen)}" for other in methods if other is not chosen)
    return f"{chosen.name} is recommended: {'; '.join(others)}"


def _objection(other: Method, chosen: Method) -> str:
    """Why a method is not the recommended one, with its speed if it is faster."""
    best, winner = (m.advice.recommendation.winner if m.advice else None for m in (other, chosen))
    if other.advice is None:
        return "could not be estimated"
    if best is None or winner is None:
        return "does not fit"
    if on_host := _host_bytes_of(other):
        instead = f" instead of {format_gib(least)}" if (least := _host_bytes_of(chosen)) else ""
        return f"offloads {format_gib(on_host)}{instead} to a host whose memory is unknown"
    cost = "rounds the weights of the base to 4 bits" if other.name == QLORA else "trains adapters alone"
    if not (own := actual_speed(best)) or not (chosen_speed := actual_speed(winner)):
        return cost
    gain = own / chosen_speed - 1
    return f"is {gain:.0%} faster, but {cost}" if gain >= 0.005 else f"{cost} and is not faster"


def _host_bytes_of(method: Method) -> int:
    """The bytes that a method's plan offloads to a host whose memory is unknown."""
    winner = method.advice.recommendation.winner if method.advice is not None else None
    return 0 if winner is None else _unknown_host_bytes(winner)


def _unknown_host_bytes(plan: Candidate) -> int:
    """The bytes that a plan offloads to a host whose memory is unknown."""
    is_known = plan.plan.offload == "none" or plan.host_available_bytes is not None
    return 0 if is_known else plan.host_peak_bytes_per_node


def _requests(request: RecommendRequest) -> Iterator[tuple[str, RecommendRequest]]:
    """The request of each method. Assumed values of a frozen base, such as its dtype, are removed, because each method's request
    assumes its own.
    """
    adapters, quantization = (
        {"use_peft", "lora_kernels", *LORA_OPTIONS.values()},
        {"load_in_4bit", *QUANTIZATION_OPTIONS},
    )
    base = _without(request.but(method="fixed"), request.assumed & {"dtype", *QUANTIZATION_OPTIONS})
    yield FULL, _without(base, adapters | quantization)
    yield LORA, replace(_without(base, quantization), use_peft=True)
    yield QLORA, base.but(use_peft=True, load_in_4bit=True)


def _without(request: RecommendRequest, names: Set[str]) -> RecommendRequest:
    """The request as if these options had been neither given nor assumed."""
    defaults = {name: option.default for name, option in fields_of(RecommendRequest).items() if name in names}
    return replace(request, **defaults, given=request.given - names, assumed=request.assumed - names)
