"""Records the models of the published runs that the catalog lacks, into `profiles.zip`. Run: python tests/timing/record.py"""

from __future__ import annotations

import zipfile
from typing import Any

import published_runs as rows
import torch
from torch import nn

from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import dump
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording import Recorder, TransformersSource
from fsdp_advisor.recording.modules import ModuleSource


class LightningTransformer(nn.Module):
    """The benchmark model of Lightning's documents: torch.nn.Transformer between an embedding and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33278, 1024)
        self.transformer = nn.Transformer(1024, 64, 32, 32, 4096, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(1024, 33278)

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        source, wanted = self.embedding(inputs), self.embedding(target)
        mask = torch.ones(target.shape[1], target.shape[1], device=source.device, dtype=source.dtype).triu(1)
        out = self.transformer(source, wanted, tgt_mask=mask, tgt_is_causal=True)
        return torch.log_softmax(self.decoder(out), dim=-1).view(-1, 33278)


def lightning() -> ModuleSource:
    def batch(b: int, t: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.zeros(b, t, dtype=torch.long), "target": torch.zeros(b, t, dtype=torch.long)}

    def loss(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.nll_loss(model(data["inputs"], data["target"]), data["target"].view(-1))

    return ModuleSource(
        LightningTransformer, batch, loss, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), "lightning"
    )


class BertSource(TransformersSource):
    """BERT with a classification head, as in the benchmark of transformers' documentation."""

    def build(self, dtype: torch.dtype) -> nn.Module:
        import transformers

        config = self._configuration()
        config.num_labels = 2
        with torch.device("meta"):
            return transformers.BertForSequenceClassification(config).to(dtype).train()

    def batch(self, micro_batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        batch = super().batch(micro_batch_size, seq_len)
        return {**batch, "labels": torch.zeros(micro_batch_size, dtype=torch.long)}


def source_of(row: dict[str, Any]) -> Any:
    config = rows.config_of(row)
    if config is not None:
        return TransformersSource(config, name=row["model"], task="causal-lm")
    if row["model"].startswith("bert"):
        bert = {
            "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "intermediate_size": 4096, "vocab_size": 30522,
        }  # fmt: skip
        return BertSource(bert, name=row["model"], task="masked-lm")
    return lightning()


def main() -> None:
    wanted: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for row in rows.published():
        if rows.why_not_predictable(row) is None and row["model"] not in rows.CATALOG:
            plan, checkpointing = rows.plan_of(row)
            keys = wanted.setdefault(rows.key_of(row), (row, set()))[1]
            keys.add(rows.variant_key(plan, plan.activation_checkpointing))
            assert not checkpointing.startswith("selective")
    with zipfile.ZipFile(rows.PROFILES, "w") as archive:
        for key, (row, variants) in sorted(wanted.items()):
            recorder = Recorder(source_of(row))
            profile: Profile = recorder.profile
            for variant in sorted(variants):
                profile.tapes[variant] = recorder.tape(TapeKey.from_name(variant))
                print(key, variant, flush=True)
            archive.writestr(key + ".profile", dump(profile, small=True))


if __name__ == "__main__":
    main()
