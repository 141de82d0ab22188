"""LoRA runs of litgpt that its repository publishes (26857050): config_hub/finetune/README.md with the YAML files next to it, and
tutorials/resource-tables.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "litgpt_lora.py"
_TABLES = "https://github.com/Lightning-AI/litgpt/blob/26857050/tutorials/resource-tables.md"
_SOURCE = "https://github.com/Lightning-AI/litgpt/blob/26857050/config_hub/finetune/README.md"
_QUERY_AND_VALUE = ("query", "value")
_ALL = ("query", "key", "value", "projection", "mlp", "head")


@dataclass(frozen=True, kw_only=True)
class LitgptRun:
    """One row: bf16-true, AdamW, Alpaca. `model` is a name of litgpt; `gigabytes` are 10^9 bytes. `length`: tokens of the longest
    sample, which the first micro-batch has.
    """

    id: str
    model: str
    quantize: str | None
    rank: int
    targets: tuple[str, ...]
    global_batch: int
    micro_batch: int
    gigabytes: float
    length: int = 512
    source: str = _SOURCE
    gpu: str = "A10G"
    gpus: int = 1
    random_data: bool = True

    def command(self, python: Path, folder: Path) -> list[str]:
        """The command, which makes its checkpoint in the folder that it runs in."""
        return [str(python), str(SCRIPT), self.model, *self.words]

    @property
    def name(self) -> str:
        return f"{self.model} {'QLoRA' if self.quantize else 'LoRA'}, 1 x {self.micro_batch} x {self.length}"

    @property
    def measured_bytes(self) -> int:
        return round(self.gigabytes * 10**9)

    @property
    def words(self) -> list[str]:
        """The arguments of `litgpt finetune_lora` after the checkpoint, from the YAML file."""
        return [
            "--precision", "bf16-true",
            *(["--quantize", self.quantize] if self.quantize else []), "--lora_r", str(self.rank),
            *(word for each in _ALL for word in (f"--lora_{each}", str(each in self.targets).lower())),
            "--data", "Alpaca2k", "--data.num_workers", "0", "--train.max_seq_length", str(self.length),
            "--train.global_batch_size", str(self.global_batch), "--train.micro_batch_size", str(self.micro_batch),
            "--train.epochs", "1", "--train.lr_warmup_steps", "10",
        ]  # fmt: skip


_ROWS = (
    ("n1022", "falcon-7b", None, 32, _QUERY_AND_VALUE, 8, 1, 16.69),
    ("n1024", "falcon-7b", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 1, 9.44),
    ("n1025", "Gemma-2b", None, 8, _ALL, 6, 2, 12.62),
    ("n1027", "Gemma-2b", "bnb.nf4", 16, _ALL, 6, 2, 11.58),
    ("n1030", "Gemma-7b", "bnb.nf4", 16, _ALL, 6, 1, 17.18),
    ("n1031", "Gemma-2-2b", None, 8, _ALL, 6, 2, 14.31),
    ("n1032", "Gemma-2-2b", "bnb.nf4", 16, _ALL, 6, 2, 13.52),
    ("n1035", "Gemma-2-9b", "bnb.nf4", 16, _ALL, 6, 1, 20.92),
    ("n1036", "Llama-2-7b-hf", None, 32, _QUERY_AND_VALUE, 8, 2, 19.77),
    ("n1038", "Llama-2-7b-hf", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 2, 13.68),
    ("n1039", "Llama-3-8B", None, 32, _QUERY_AND_VALUE, 8, 1, 19.73),
    ("n1041", "Llama-3-8B", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 2, 17.41),
    ("n1042", "Llama-3.1-8B", None, 32, _QUERY_AND_VALUE, 8, 1, 19.73),
    ("n1043", "Llama-3.1-8B", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 2, 17.41),
    ("n1044", "Llama-3.2-1B", None, 32, _QUERY_AND_VALUE, 8, 1, 4.49),
    ("n1045", "Llama-3.2-1B", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 2, 5.53),
    ("n1046", "Llama-3.2-3B", None, 32, _QUERY_AND_VALUE, 8, 1, 9.67),
    ("n1047", "Llama-3.2-3B", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 2, 10.30),
    ("n1048", "Mistral-7B-v0.2", None, 32, _QUERY_AND_VALUE, 8, 2, 20.66),
    ("n1050", "Mistral-7B-v0.2", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 2, 14.29),
    ("n1051", "Mistral-7B-v0.1", None, 32, _QUERY_AND_VALUE, 8, 2, 20.66),
    ("n1053", "Mistral-7B-v0.1", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 2, 14.29),
    ("n1054", "phi-2", None, 8, _ALL, 8, 4, 13.98),
    ("n1056", "phi-2", "bnb.nf4", 8, _ALL, 8, 4, 14.27),
    ("n1057", "Phi-3-mini-4k-instruct", None, 8, _ALL, 8, 4, 19.75),
    ("n1058", "Phi-3-mini-4k-instruct", "bnb.nf4", 8, _ALL, 8, 4, 19.13),
    ("n1059", "stablelm-base-alpha-3b", None, 32, _QUERY_AND_VALUE, 8, 1, 8.58),
    ("n1061", "stablelm-base-alpha-3b", "bnb.nf4", 32, _QUERY_AND_VALUE, 8, 1, 5.24),
    ("n1062", "tiny-llama-1.1b", None, 32, _ALL, 8, 8, 13.50),
    ("n1063", "tiny-llama-1.1b", "bnb.nf4", 32, _ALL, 8, 8, 16.24),
)
_TABLE_ROWS = (
    ("n0980", "stablelm-base-alpha-3b", None, 1, 1034, 9.69),
    ("n0981", "stablelm-base-alpha-3b", "bnb.nf4", 1, 1034, 6.35),
    ("n0982", "stablelm-base-alpha-3b", "bnb.nf4-dq", 1, 1034, 6.19),
    ("n0983", "stablelm-base-alpha-3b", None, 2, 1034, 12.10),
    ("n0984", "stablelm-base-alpha-3b", None, 4, 1034, 16.92),
    ("n0985", "Llama-2-7b-hf", None, 1, 1304, 21.30),
    ("n0986", "Llama-2-7b-hf", "bnb.nf4", 1, 1304, 14.14),
    ("n0987", "Llama-2-7b-hf", "bnb.nf4-dq", 1, 1304, 13.84),
    ("n0988", "Llama-2-7b-hf", None, 2, 1304, 29.07),
    ("n0990", "Llama-2-13b-hf", None, 1, 1304, 38.12),
    ("n0991", "Llama-2-13b-hf", "bnb.nf4", 1, 1304, 23.14),
    ("n0992", "Llama-2-13b-hf", "bnb.nf4-dq", 1, 1304, 22.55),
)
"""Rows of the table of October 2023, on an A100: id, model, quantization, micro-batch, length, gigabytes."""
LITGPT = (
    *(
        LitgptRun(
            id=name, model=model, quantize=quantize, rank=rank, targets=targets, global_batch=global_batch,
            micro_batch=micro_batch, gigabytes=gigabytes,
        )
        for name, model, quantize, rank, targets, global_batch, micro_batch, gigabytes in _ROWS
    ),
    *(
        LitgptRun(
            id=name, model=model, quantize=quantize, rank=8, targets=_QUERY_AND_VALUE, global_batch=8, micro_batch=micro_batch,
            gigabytes=gigabytes, length=length, source=_TABLES, gpu="A100-40GB",
        )
        for name, model, quantize, micro_batch, length, gigabytes in _TABLE_ROWS
    ),
)  # fmt: skip
"""All runs of LoRA and QLoRA on one GPU that did not run out of memory, without Falcon 40B and Adapter."""
