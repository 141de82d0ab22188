"""Values that several targets write: versions, file names, ports, and the consumers' names for the same settings."""

from __future__ import annotations

from typing import Literal

VERSIONS = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "axolotl": "0.19.0",
    "trl": "1.16.0",
    "llamafactory": "0.9.5",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "liger_kernel": "0.8.5",
    "torchao": "0.18.0",
}
"""The version of each consumer that the exports were checked against.

The tests load and run the exports with these versions, except for those of axolotl and LLaMA-Factory: their keys and types are
compared with the classes of these versions.
"""

Consumer = Literal["torch", "accelerate", "deepspeed", "trainer", "axolotl", "trl", "llamafactory"]
"""The library whose training loop runs a job."""

PACKAGES: dict[Consumer, tuple[str, ...]] = {
    "torch": ("torch", "transformers"),
    "accelerate": ("accelerate", "transformers", "torch"),
    "deepspeed": ("deepspeed", "transformers", "torch"),
    "trainer": ("transformers", "accelerate", "torch"),
    "axolotl": ("axolotl",),
    "trl": ("trl",),
    "llamafactory": ("llamafactory",),
}
"""Consumer -> the packages whose versions its files name."""

# Files, addresses and training values

SCRIPT = "train.py"
LINES_FILE = "lines_to_add.py"
ARGUMENTS_FILE = "training_arguments.py"
AXOLOTL_FILE = "axolotl.yaml"
TRL_FILE = "trl.yaml"
LLAMAFACTORY_FILE = "llamafactory.yaml"
HOST_FILE = "hostfile"
DEEPSPEED_ENVIRONMENT_FILE = ".deepspeed_env"
SLURM_FILE = "train.sbatch"
README_FILE = "README.md"
ACCELERATE_FILE = "accelerate.yaml"
DEEPSPEED_FILE = "ds_config.json"
ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
REGIONS_VARIABLE = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
"""The variable that makes accelerate compile regions. The Trainer's arguments cannot. Source: accelerate 1.15, TorchDynamoPlugin."""
HEAD_NODE = "HEAD_NODE"
"""Placeholder for the host name of the first node."""
ACCELERATE_PORT = 29500
RENDEZVOUS_PORT = 29400
NVME_PATH = "/local_nvme"
NVME_NOTE = f"nvme_path is {NVME_PATH}: replace it with the mount point of a local NVMe drive"

# Settings as PyTorch, accelerate and transformers call them

MIXED = {"fp32": "no", "bf16": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}
"""accelerate's `mixed_precision`, by precision."""

WRAP_POLICY = {
    "layer": "TRANSFORMER_BASED_WRAP", "class": "TRANSFORMER_BASED_WRAP", "none": "NO_WRAP", "size": "SIZE_BASED_WRAP",
}  # fmt: skip
"""The FSDP wrap policy of accelerate, transformers and axolotl, by the kind of the plan's policy."""
