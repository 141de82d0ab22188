"""Batches with images, as the processors of transformers 5.23 make them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_advisor.job.images import Images
from fsdp_advisor.model.image_layouts import Layout
from fsdp_advisor.model.images import layout_of
from fsdp_advisor.recording import flash
from fsdp_advisor.recording.source import Source, WrappedSource


class ImageSource(WrappedSource):
    """A model with images in its samples.

    The placeholder tokens of each image follow one token of text; the rest of a sample is text. All tokens have labels. There is no
    attention mask.
    """

    def __init__(self, base: Source, images: Images) -> None:
        super().__init__(base)
        self._images = images
        self.needs_values = True
        self._layout: Layout = layout_of(base.config(), images)
        self.min_seq_len = self._layout.least_seq_len(images)

    def configure(self, module: nn.Module, **code_path: Any) -> None:
        self._base.configure(module, **code_path)
        config: Any = module.config
        names = ("image_token_id", "image_token_index")
        self._placeholder: int = next(v for name in names if (v := getattr(config, name, None)) is not None)

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        batch = self._base.batch(micro_batch_size, seq_len)
        is_image = torch.zeros(micro_batch_size, seq_len, dtype=torch.long)
        for n in range(self._images.per_sample):
            start = n * (self._layout.tokens + 1) + 1
            is_image[:, start : start + self._layout.tokens] = 1
        batch["input_ids"] = is_image * self._placeholder
        if (marker := _TOKEN_TYPES.get(str(self.config()["model_type"]))) is not None:
            batch[marker] = is_image
        return batch | self._pixels(micro_batch_size)

    def _pixels(self, micro_batch_size: int) -> dict[str, torch.Tensor]:
        layout, number = self._layout, micro_batch_size * self._images.per_sample
        height, width = self._images.height, self._images.width
        match layout.format:
            case "grid":
                grids = torch.tensor([[1, *layout.grid]] * number, dtype=torch.long)
                pixels = torch.rand(number * layout.pixels[0], *layout.pixels[1:])
                return {"pixel_values": pixels, "image_grid_thw": grids}
            case "fixed":
                return {"pixel_values": torch.rand(number, *layout.pixels)}
            case "tiles":
                return {"pixel_values": torch.rand(number * layout.pixels[0], *layout.pixels[1:])}
            case "nested-tiles":
                tiles = (micro_batch_size, self._images.per_sample * layout.pixels[0])
                mask = torch.ones(*tiles, *layout.pixels[2:], dtype=torch.long)
                return {"pixel_values": torch.rand(*tiles, *layout.pixels[1:]), "pixel_attention_mask": mask}
            case "any-resolution":
                sizes = torch.tensor([[height, width]] * number, dtype=torch.long)
                batch = {"pixel_values": torch.rand(number, *layout.pixels), "image_sizes": sizes}
                if self.config()["model_type"] == "llava_onevision":
                    batch["batch_num_images"] = torch.tensor([self._images.per_sample] * micro_batch_size)
                return batch
            case "padded":
                sizes = torch.tensor([layout.pixels[1:]] * number, dtype=torch.long)
                return {"pixel_values": torch.rand(number, *layout.pixels), "image_sizes": sizes}
            case "positions":
                return {
                    "pixel_values": torch.rand(number, *layout.pixels),
                    "image_position_ids": _positions(*layout.grid, layout.pixels[0]).repeat(number, 1, 1),
                }


_MM = "mm_token_type_ids"
_TOKEN_TYPES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _MM),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "gemma4"), _MM),
    **dict.fromkeys(("gemma3", "paligemma"), "token_type_ids"),
}
"""Model type -> name of the input that marks the tokens of images. Only models that read such an input are listed."""


def _positions(rows: int, columns: int, padded: int) -> torch.Tensor:
    """The positions (column, row) of an image's patches and of padding, shape (1, padded, 2). Source: gemma4/image_processing_gemma4.py."""
    row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    positions = torch.stack([column, row], dim=-1)
    return torch.nn.functional.pad(positions, (0, 0, 0, padded - rows * columns), value=-1)[None]


@contextlib.contextmanager
def with_rows_of_images(model: nn.Module) -> Iterator[None]:
    """Context in which vision towers run the recorded flash attention over all images at once, as transformers runs flash attention.
    With other kernels transformers runs attention over one image after the other.
    """
    from transformers.utils import generic

    asked = generic.is_flash_attention_requested

    def requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        return getattr(config, "_attn_implementation", None) == flash.NAME or bool(asked(config, *args, **kwargs))

    modules = {sys.modules[type(module).__module__] for module in model.modules()} | {generic}
    with contextlib.ExitStack() as patches:
        for module in modules:
            if hasattr(module, asked.__name__):
                patches.enter_context(mock.patch.object(module, asked.__name__, requested))
        yield


def with_images(source: Source, images: Images | None) -> Source:
    """The source with these images in each sample. Raises UsageError if its model reads no images."""
    return source if images is None else ImageSource(source, images)
