"""Write image_layouts.csv: the tokens and pixels of images by the processors of transformers themselves. Needs torchvision and pillow.

The limits of pixels are those of the published checkpoints; the processors' classes lack them.
"""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

RESULTS = Path(__file__).with_suffix(".csv")
SIZES = ((1024, 1024), (640, 480), (333, 1200), (2560, 1440), (4000, 300), (60, 50), (5000, 4000))
"""Width and height."""
LIMITS = {"qwen2_5_vl": (3136, 12_845_056), "qwen3_vl": (65_536, 16_777_216), "glm46v": (12_544, 9_633_792)}


def layout(model_type: str, width: int, height: int, max_pixels: int) -> tuple[int, tuple[int, ...]]:
    """The number of placeholders of an image, and the shape of its pixels."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    match model_type:
        case "qwen2_5_vl" | "qwen3_vl" | "glm46v":
            least, most = LIMITS[model_type]
            kind: Any = (
                transformers.Glm46VImageProcessor if model_type == "glm46v" else transformers.Qwen2VLImageProcessor
            )
            processor = kind(
                size={"shortest_edge": least, "longest_edge": max_pixels or most},
                patch_size=16 if model_type == "qwen3_vl" else 14,
            )
            pixels = processor(image, return_tensors="pt")["pixel_values"]
            return len(pixels) // 4, tuple(pixels.shape)
        case "kimi_k25":
            pixels = transformers.Kimi_K25ImageProcessor()(image, return_tensors="pt")["pixel_values"]
            return len(pixels) // 4, tuple(pixels.shape)
        case "gemma4":
            found = transformers.Gemma4ImageProcessor()(image, return_tensors="pt")
            return int(found["num_soft_tokens_per_image"][0]), tuple(found["pixel_values"].shape[1:])
        case "internvl":
            processor = transformers.GotOcr2ImageProcessor(size={"height": 448, "width": 448}, crop_to_patches=True)
            pixels = processor(image, return_tensors="pt")["pixel_values"]
            return len(pixels) * 256, tuple(pixels.shape)
        case "smolvlm":
            processor = transformers.SmolVLMImageProcessor(
                size={"longest_edge": 4 * 384}, max_image_size={"longest_edge": 384}
            )
            pixels = processor(image, return_tensors="pt")["pixel_values"][0]
            return len(pixels) * (384 // 16) ** 2 // 16, tuple(pixels.shape)
        case "llama4":
            pixels = transformers.Llama4ImageProcessor()(image, return_tensors="pt")["pixel_values"]
            return len(pixels) * 144, tuple(pixels.shape)
        case "mistral3":
            processor = transformers.PixtralImageProcessor(
                size={"longest_edge": 1540}, patch_size={"height": 28, "width": 28}
            )
            pixels = processor(image, return_tensors="pt")["pixel_values"][0]
            return pixels.shape[1] * pixels.shape[2] // 28**2, tuple(pixels.shape)
        case "llava_next":
            tile = {"height": 336, "width": 336}
            kind = transformers.LlavaNextImageProcessor
            found = kind(size={"shortest_edge": 336}, crop_size=tile)(image, return_tensors="pt")
            processor = object.__new__(LlavaNextProcessor)
            processor.image_processor = transformers.LlavaNextImageProcessor()
            processor.patch_size, processor.num_additional_image_tokens = 14, 1
            return processor._get_number_of_features(height, width, 336, 336) - 1, tuple(
                found["pixel_values"].shape[1:]
            )
        case "llava_onevision":
            found = transformers.LlavaOnevisionImageProcessor()(image, return_tensors="pt")
            processor = object.__new__(LlavaOnevisionProcessor)
            processor.image_processor = transformers.LlavaOnevisionImageProcessor()
            processor.num_image_tokens, processor.vision_aspect_ratio = 27**2, "anyres_max_9"
            tokens = processor._get_number_of_features(height, width, 384, 384)
            return tokens, tuple(found["pixel_values"].shape[1:])
    raise ValueError(model_type)


TYPES = (
    "qwen2_5_vl", "qwen3_vl", "glm46v", "kimi_k25", "gemma4", "internvl", "smolvlm", "llama4", "mistral3", "llava_next",
    "llava_onevision",
)  # fmt: skip


def main() -> None:
    with RESULTS.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["model_type", "width", "height", "max_pixels", "tokens", "pixels"])
        for model_type, (width, height) in itertools.product(TYPES, SIZES):
            limits = (0, 500_000) if model_type in LIMITS and model_type != "glm46v" else (0,)
            for max_pixels in limits:
                try:
                    tokens, pixels = layout(model_type, width, height, max_pixels)
                except ValueError as error:  # an image too flat for the processor
                    print(model_type, width, height, error, file=sys.stderr)
                    continue
                rows.writerow([model_type, width, height, max_pixels, tokens, "x".join(map(str, pixels))])


if __name__ == "__main__":
    main()
