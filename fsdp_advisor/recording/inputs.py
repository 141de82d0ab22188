"""The inputs of a micro-batch of each task, as processors and collators of transformers 5.23 make them. Values are zero."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.model.tasks import FRAMES_PER_LABEL, SOUND_SECONDS

# B = micro-batch, T = tokens of text, or frames of sound after an audio encoder

Batch = dict[str, torch.Tensor]

SAMPLES_PER_SECOND = 16_000
FRAMES_PER_SECOND = 100
"""A spectrogram has one frame per 10 ms."""
CODES_PER_SECOND = 44_100 / 512
"""Frames per second of Dia's codec (DAC at 44.1 kHz). Each frame has one code per channel. Source: dac/configuration_dac.py,
`hop_length`.
"""
PIANO_FRAMES_PER_SECOND = 22_050 / 1024
"""Source: pop2piano/feature_extraction_pop2piano.py, `sampling_rate` and `hop_length`; each frame has `d_model` mel filters."""
USUAL_IMAGE_SIZE = 224
"""Pixels of an image's sides, for models whose configuration does not fix them, such as ResNet."""
FLATTENED_PATCHES = 2048
"""Patches of an image whose processor flattens it to a fixed number of patches. Source: pix2struct/image_processing_pix2struct.py,
`max_patches`.
"""


def batch_of_task(task: str, config: Any, names: Collection[str], b: int, t: int) -> Batch:
    """Inputs and labels of one micro-batch, on the current default device. `names`: the parameters of the model's forward."""
    match task:
        # ShieldGemma 2 answers yes or no to a text
        case "image-classification" if {"input_ids", "pixel_values"} <= set(names):
            return {"input_ids": _tokens(b, t), "labels": _tokens(b, t)}
        case "image-classification":
            return {**_image(config, names, b), "labels": _labels(b)}
        case "speech-seq2seq" | "seq2seq-lm" if config.model_type == "voxtral_realtime":
            return _speech_as_it_comes(config, b, t)
        case "speech-seq2seq" if config.model_type == "dia":
            return _speech_to_make(config, b, t)
        case "speech-seq2seq" if config.model_type == "kyutai_speech_to_text":
            # each frame has a token of text and codes of sound
            return {"input_ids": torch.zeros(b, t, 1 + config.num_codebooks, dtype=torch.long), "labels": _tokens(b, t)}
        case "speech-seq2seq":
            return {**_sound(config, names, b), "labels": _tokens(b, t)}
        case "ctc":
            return {**_frames(config, names, b, t), "labels": _tokens(b, max(1, t // FRAMES_PER_LABEL))}
        case "audio-classification":
            return {**_frames(config, names, b, t), "labels": _labels(b)}
        case "sequence-classification":
            return {
                "input_ids": _tokens(b, t),
                "attention_mask": torch.ones(b, t, dtype=torch.long),
                "labels": _labels(b),
            }
    batch = {
        "inputs" if "inputs" in names and "input_ids" not in names else "input_ids": _tokens(b, t),
        "labels": _tokens(b, t),
    }
    if config.model_type in _ASKS_FOR_KINDS:
        batch["mm_token_type_ids"] = _tokens(b, t)
    return (
        _with_image(batch, config, names, b, t) if task in _MAY_SHOW_IMAGES and _needs_image(config, names) else batch
    )


_ASKS_FOR_KINDS = ("molmo2",)
"""Model types that train only if the type of each token (text or image) is an input. Source: molmo2/modeling_molmo2.py,
Molmo2Model.forward.
"""
_MAY_SHOW_IMAGES = ("causal-lm", "image-text-to-text")


def _needs_image(config: Any, names: Collection[str]) -> bool:
    """Whether every sample must have an image: the model reads images, and has no placeholder token that a sample could leave out."""
    placeholders = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return ("pixel_values" in names or "flattened_patches" in names) and not any(p is not None for p in placeholders)


def _with_image(batch: Batch, config: Any, names: Collection[str], b: int, t: int) -> Batch:
    """The batch with an image in each sample. If the encoder reads only the image, the labels are the only tokens."""
    vision = _vision(config)
    if "flattened_patches" in names:  # each patch begins with its row and column
        patches = getattr(vision, "max_num_patches", FLATTENED_PATCHES)
        image = {"flattened_patches": torch.zeros(b, patches, 2 + vision.patch_embed_hidden_size)}
    else:
        image = _image(config, names, b)
    if "image_attention_mask" in names:  # IDEFICS: samples may have several images
        image = {
            "pixel_values": image["pixel_values"][:, None],
            "image_attention_mask": torch.ones(b, t, 1, dtype=torch.long),
        }
    if "image_embeds_position_mask" in names:
        at = torch.arange(t) < config.latent_query_num
        image["image_embeds_position_mask"] = at.long().repeat(b, 1)
    if "bbox" in names:  # UDOP: its processor reads the position of each word in the image
        image["bbox"] = torch.zeros(b, t, 4)
    return {**{name: tokens for name, tokens in batch.items() if name in names}, **image}


def _vision(config: Any) -> Any:
    """The configuration of the part that reads images."""
    return getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config


def _tokens(b: int, t: int) -> torch.Tensor:
    return torch.zeros(b, t, dtype=torch.long)


def _labels(b: int) -> torch.Tensor:
    return torch.zeros(b, dtype=torch.long)


def _image(config: Any, names: Collection[str], b: int) -> Batch:
    if "pixel_values" not in names:  # ImageGPT: its tokens are pixels
        return {"input_ids": _tokens(b, config.n_positions)}
    vision = _vision(config)
    channels = getattr(vision, "num_channels", 3)
    if "spatial_shapes" in names:
        side = int(vision.num_patches**0.5)
        return {
            "pixel_values": torch.zeros(b, side * side, channels * vision.patch_size**2),
            "pixel_attention_mask": torch.ones(b, side * side, dtype=torch.long),
            "spatial_shapes": torch.tensor([[side, side]] * b, dtype=torch.long),
        }
    height, width = _pair(getattr(vision, "image_size", USUAL_IMAGE_SIZE))
    return {"pixel_values": torch.zeros(b, channels, height, width)}


def _speech_as_it_comes(config: Any, b: int, t: int) -> Batch:
    """T tokens, and the frames of the sound that is heard meanwhile: a convolution and the projector join several to a token."""
    audio = config.audio_config
    frames = torch.zeros(b, audio.num_mel_bins, _CONVOLUTION_STRIDE * config.downsample_factor * t)
    return {"input_ids": _tokens(b, t), "input_features": frames, "labels": _tokens(b, t)}


_CONVOLUTION_STRIDE = 2
"""Frames that Voxtral's encoder joins. Source: voxtral_realtime/modeling_voxtral_realtime.py, VoxtralRealtimeEmbedder, `conv2`."""


def _speech_to_make(config: Any, b: int, t: int) -> Batch:
    """Text of T tokens, and the codes of the speech to be generated from it; each channel's codes are a row of labels."""
    channels, frames = config.decoder_config.num_channels, int(SOUND_SECONDS * CODES_PER_SECOND)
    return {
        "input_ids": _tokens(b, t),
        "decoder_input_ids": torch.zeros(b, frames, channels, dtype=torch.long),
        "labels": _tokens(b * channels, frames),
    }


def _sound(config: Any, names: Collection[str], b: int) -> Batch:
    """Sound of `SOUND_SECONDS` for the encoder of an encoder-decoder model: samples, or a spectrogram."""
    if "input_values" in names:
        return {"input_values": torch.zeros(b, SOUND_SECONDS * SAMPLES_PER_SECOND)}
    if config.model_type == "pop2piano":
        return {"input_features": torch.zeros(b, int(SOUND_SECONDS * PIANO_FRAMES_PER_SECOND), config.d_model)}
    frames = SOUND_SECONDS * FRAMES_PER_SECOND
    if (width := getattr(config, "feature_projection_input_dim", None)) is not None:  # two frames are joined
        return {"input_features": torch.zeros(b, frames // 2, width)}
    if (width := getattr(config, "input_feat_per_channel", None)) is not None:
        return {"input_features": torch.zeros(b, frames, width)}
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):  # Whisper
        return {"input_features": torch.zeros(b, config.num_mel_bins, 2 * config.max_source_positions)}
    encoder = getattr(config, "encoder_config", config)
    if "input_features" not in names or not hasattr(encoder, "num_mel_bins"):
        raise NotRecordable(
            f"there is no batch for {config.model_type}: what its encoder reads is neither sound nor a spectrogram",
            hint="record it as a module with batches of your own (fsdp_advisor.record_module)",
        )
    return {"input_features": torch.zeros(b, frames, encoder.num_mel_bins)}


def _frames(config: Any, names: Collection[str], b: int, t: int) -> Batch:
    """Sound that the encoder turns into T frames. Models for a fixed length get that length."""
    encoder = getattr(config, "encoder_config", config)
    if hasattr(config, "max_length") and hasattr(config, "frequency_stride"):  # the spectrogram transformer
        return {"input_values": torch.zeros(b, config.max_length, config.num_mel_bins)}
    if "input_values" in names:
        samples = t * getattr(config, "squeeze_factor", 1)
        for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
            samples = (samples - 1) * stride + kernel
        return {"input_values": torch.zeros(b, samples)}
    if (width := getattr(config, "feature_projection_input_dim", None)) is not None:
        return {"input_features": torch.zeros(b, t, width)}
    if hasattr(encoder, "max_source_positions"):  # Whisper
        return {"input_features": torch.zeros(b, encoder.num_mel_bins, 2 * encoder.max_source_positions)}
    if (
        halvings := getattr(encoder, "subsample_layers", None)
    ) is not None:  # Granite Speech, whose processor joins four frames
        factor, width = 2 ** len(halvings), 4 * encoder.num_mel_bins
    else:
        factor = getattr(encoder, "subsampling_factor", None) or encoder.subsampling_conv_stride**2
        width = encoder.num_mel_bins
    mask = torch.ones(b, t * factor, dtype=torch.bool)
    return {"input_features": torch.zeros(b, t * factor, width), "attention_mask": mask}


def _pair(value: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
