"""Readers of users' configuration files: accelerate, DeepSpeed, Trainer, TRL, axolotl, LLaMA-Factory, torchtune, torchtitan.

One module per consumer; `fsdp_advisor.export` has the writers. A reader turns a file into options of a request. It reports which keys it
read, which it ignored, which describe something that is not modelled, and what it assumed.

>>> found = from_texts({"ds.json": '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}'})
>>> found.options["strategy"], found.options["micro_batch_size"]
('zero3', 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_advisor.configs.files import from_paths, from_texts
from fsdp_advisor.configs.merge import Configuration, complete
from fsdp_advisor.configs.shell import UNREAD
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job import parsing
from fsdp_advisor.job.fields import fields_of, read_fields
from fsdp_advisor.job.request import AnyRequest

ConfigFiles = str | Path | Sequence[str | Path]
"""Paths of configuration files, or of directories that contain them."""

__all__ = ["ConfigFiles", "Configuration", "complete", "from_paths", "from_texts", "request_with_files"]


def request_with_files(given: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest:
    """A request from its fields, which are text or Python values, and from the files that `config_file` names, if it is given.

    Raises UsageError for the first thing that is wrong.
    """
    fields = dict(given)
    files = fields.pop("config_file", None)
    if not files:
        return parsing.make_request(fields, kind)
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    found = complete(from_paths(paths), read_fields(fields, fields_of(kind)), getattr(kind, "SEARCHED", ()))
    if "model" not in found.options:
        unread = [text for reading in found.readings for text in reading.not_modelled if text.startswith(UNREAD)]
        raise UsageError(
            f"{paths[0]} names no model" if len(paths) == 1 else "no file names a model",
            hint="; ".join(["give --model", *unread]),
        )
    return replace(parsing.make_request(found.options, kind), configs=found.readings)
