"""From a transformers configuration, or any `torch.nn.Module`, to a profile. Imports torch: load it only when called for."""

from __future__ import annotations

from fsdp_advisor.recording.recorder import Recorder, record_module
from fsdp_advisor.recording.transformers_models import TransformersSource

__all__ = ["Recorder", "TransformersSource", "record_module"]
