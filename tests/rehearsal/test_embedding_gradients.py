"""The workspace of an embedding's gradient, compared with PyTorch's own on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fsdp_advisor.program.embedding_workspace import embedding_workspace_bytes

SHAPES = (
    (3072, 1000, 64),
    (3073, 1000, 64),
    (4096, 1000, 256),
    (8192, 32000, 100),
    (16384, 32000, 4096),
    (262144, 128256, 64),
)
"""(indices, rows, columns): no more than are added without a workspace, fewer rows than indices, and more of them."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_workspace_is_what_pytorch_requests(dtype: str, run: Callable[..., dict[str, int]]) -> None:
    found = run("embeddings.py", json.dumps([[*shape, dtype] for shape in SHAPES]))
    expected = {str([*shape, dtype]): sum(embedding_workspace_bytes(*shape)) for shape in SHAPES}
    assert found == expected
