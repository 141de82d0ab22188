"""TRL's loss in a compiled model."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.recording.losses.trl import TILE_VOCABULARY


def leave_uncompiled(loss: Any, name: str) -> None:
    """Make a compiled model run TRL's loss, a `FusedLoss`, without compiling it, as Dynamo does.

    The selection of tokens with labels breaks the graph ("Dynamic shape operator"). So does the product into the last tile of the
    vocabulary, which is a part of a buffer ("Attempted to call op with non-contiguous `out=` tensor"), and a break in a loop leaves its
    function uncompiled. Raises NotRecordable if the last tile fills its buffer: the loss then becomes compiled code.
    Source: trl 1.16, trainer/utils.py, `_fused_forward`, and kernels/chunked_logprob.py; torch 2.13, _dynamo/variables/torch.py.
    """
    if loss.weight.shape[0] % TILE_VOCABULARY == 0:
        raise NotRecordable(
            f"{name}: TRL's loss over {loss.weight.shape[0]} entries of a vocabulary, a multiple of its tile of {TILE_VOCABULARY}, becomes "
            "compiled code, which is not modelled",
            hint="use --compile layer (accelerate's dynamo_use_regional_compilation), which leaves the loss as it is",
        )
    loss.forward = torch._dynamo.disable(loss.forward)
