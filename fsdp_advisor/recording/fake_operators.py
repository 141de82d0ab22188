"""Operators that exist only for fake tensors. They represent GPU kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def fake_operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that makes a function the operator `fsdp_advisor::NAME`, which dispatch modes see as one call.

    The function allocates the operator's results and returns them. With real tensors the operator raises NotImplementedError.
    `mutates`: the arguments that it writes.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{name} runs only on fake tensors")

        operator = torch.library.custom_op(f"fsdp_advisor::{name}", refuse, mutates_args=mutates)
        operator.register_fake(function)
        return cast(Callable[P, R], operator)

    return declare
