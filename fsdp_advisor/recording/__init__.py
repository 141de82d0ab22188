"""Record a model's training step: from a transformers configuration, or any `torch.nn.Module`, to a profile with tapes.

`Recorder` records a source, `source_of` makes the source of a configuration, `record_module` records a module. The
package imports torch and transformers, so import it only when a recording is needed.
"""

from __future__ import annotations

from fsdp_advisor.recording.adapted import source_of
from fsdp_advisor.recording.recorder import Recorder, record_module
from fsdp_advisor.recording.transformers_models import TransformersSource

__all__ = ["Recorder", "TransformersSource", "record_module", "source_of"]
