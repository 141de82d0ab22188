"""The global batch: examples per optimizer step = micro-batch x accumulation x ranks. An example of DPO and reward is a pair."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.request import AnyRequest


def divided(request: AnyRequest) -> AnyRequest:
    """The request with the accumulation that gives its global batch, or with the micro-batch if the accumulation was given.

    Unchanged without a global batch. Raises UsageError if no whole number gives it.
    """
    whole, world = request.global_batch_size, request.gpus
    if whole is None:
        return request
    size = request.micro_batch_size if _fixed(request, "micro_batch_size") else None
    steps = request.gradient_accumulation_steps if _fixed(request, "gradient_accumulation_steps") else None
    if size is None and steps is None:
        size = request.micro_batch_size
    made = (size or 1) * (steps or 1) * world
    if whole % made or (size and steps and whole != made):
        raise batch_refusal(whole, size, steps, world)
    if size and steps:
        return request
    chosen = {"gradient_accumulation_steps" if size else "micro_batch_size": whole // made}
    return request.but(**chosen)


def _fixed(request: AnyRequest, name: str) -> bool:
    """Whether the user gave the field. In a request that was constructed directly, whether its value is above 1."""
    return name in request.given if request.given else getattr(request, name) > 1


def batch_refusal(whole: int, size: int | None, steps: int | None, world: int) -> UsageError:
    """The error for sizes whose product is not the global batch. Its hint names the nearest possible sizes.

    >>> batch_refusal(128, 2, 4, 8).message
    'micro-batch 2 x accumulation 4 x world 8 = 64, not 128'
    """
    b, a = size or 1, steps or 1
    if steps is None:
        a = max(1, whole // (b * world))
    elif size is None:
        b = max(1, whole // (a * world))
    message = f"micro-batch {b} x accumulation {a} x world {world} = {b * a * world}, not {whole}"
    if size and steps:
        if whole % (b * world) == 0:
            return UsageError(message, hint=f"gradient_accumulation_steps {whole // (b * world)} makes it {whole}")
        return UsageError(message, hint=f"global_batch_size {b * a * world}, or another micro-batch")
    part = (b if size else 1) * (a if steps else 1) * world
    below, above = whole // part * part, (whole // part + 1) * part
    near = f"{below} or {above}" if below else str(above)
    return UsageError(message, hint=f"global_batch_size must be a multiple of {part}: {near}")
