"""The DeepSpeed configurations that LLaMA-Factory ships, which its files name without anyone having written them.

Source: LLaMA-Factory 0.9.5, examples/deepspeed/ds_z{0,2,3}_config.json and ds_z{2,3}_offload_config.json: what they set besides "auto",
DeepSpeed's defaults and settings without effect on memory and time.
"""

from __future__ import annotations

import json
import re

_NAME = re.compile(r"(?:.*/)?examples/deepspeed/ds_z([023])(_offload)?_config\.json")


def shipped(name: str) -> str | None:
    """The text of the configuration at the path `name`; None if LLaMA-Factory has none of this name.

    >>> shipped("examples/deepspeed/ds_z3_config.json")
    '{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}'
    """
    found = _NAME.fullmatch(name.replace("\\", "/"))
    if found is None or found.groups() == ("0", "_offload"):
        return None
    stage, offload = found.groups()
    zero: dict[str, object] = {"stage": int(stage), "reduce_bucket_size": "auto" if stage == "3" else 500_000_000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload and stage == "3":
        zero["offload_param"] = {"device": "cpu"}
    auto = {"enabled": "auto"}
    return json.dumps({"bf16": auto, "fp16": auto, "zero_optimization": zero})
