"""TRL's step of GRPO: the model generates completions and scores them before the training forward.

The tape has two forwards of a generation: of the prompts, and of the last token, whose cache of keys and values is the largest. It has the
scoring of one micro-batch. All sequences have the same length. Reward functions are not on the tape.
Source: trl 1.16, trainer/grpo_trainer.py, `_prepare_inputs`, `_generate_and_score_completions`, `_compute_loss` with loss type "dapo".
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.recording.losses.fused import causal_model, fused_loss_of
from fsdp_advisor.recording.scoring import scoring, without_checkpointing

if TYPE_CHECKING:
    from fsdp_advisor.recording.preferences import PreferenceSource

EPSILON = 0.2
"""The limit of the ratio by which an update may change a probability. Source: trl 1.16, trainer/grpo_config.py."""


def batch_of(ids: torch.Tensor, completion_length: int, *, policy: bool, reference: bool) -> dict[str, torch.Tensor]:
    """The batch that TRL makes of the completions of one generation. `ids`: the tokens of prompts and completions."""
    prompts, completions = ids[:, :-completion_length].clone(), ids[:, -completion_length:].clone()
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.zeros(ids.shape[0]),
        "num_items_in_batch": torch.ones((), dtype=torch.long),
    }
    scores = {"old_per_token_logps": policy, "ref_per_token_logps": reference}
    return batch | {name: torch.zeros(completions.shape) for name, needed in scores.items() if needed}


def generate(module: nn.Module, batch: dict[str, torch.Tensor], name: str) -> None:
    """The first forward of transformers' `generate`, and the last one. `name`: the model's, for errors.

    Raises NotRecordable for a model whose class of configuration turns the cache off (MPT).
    """
    prompts, last = batch["prompt_ids"], batch["completion_ids"].shape[1] - 1
    config = causal_model(module, name).config
    if not getattr(type(config)(), "use_cache", True):
        raise NotRecordable(
            f"{name} generates without a cache of keys and values, which is not recorded",
            hint="generate with vLLM: --use-vllm",
        )
    cache = _GrowingCache(config, prompts.shape[1] + last)
    with _generating(module), scoring("prefill"):
        positions = _positions(module, batch["prompt_mask"], name)
        sampled = _sample(module(input_ids=prompts.clone(), past_key_values=cache, **positions))
        torch.clear_autocast_cache()
        del positions
    cache.grow()
    with _generating(module), scoring("decode"):
        ids = torch.cat([prompts, batch["completion_ids"]], dim=1)
        positions = _positions(module, torch.ones_like(ids), name)
        of_last = {key: x[..., -1:].clone() for key, x in positions.items()}
        sampled = _sample(module(input_ids=ids[:, -1:].clone(), past_key_values=cache, **of_last))
        torch.clear_autocast_cache()
        del ids, positions, of_last, cache, sampled


@contextlib.contextmanager
def _generating(module: nn.Module) -> Iterator[None]:
    """Context of a forward within `generate`. PEFT's `generate` calls the model inside the PeftModel. accelerate wraps only the outer
    forward in autocast, so this one computes in the dtype of the weights.

    Source: peft 0.21, peft_model.py, `PeftModelForCausalLM.generate`; accelerate 1.15, accelerator.py, `prepare_model`.
    """
    is_peft = hasattr(module, "get_base_model")
    autocasts = torch.is_autocast_enabled("cpu") and not is_peft
    with without_checkpointing(module), torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        yield


def _positions(module: nn.Module, mask: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """The argument `position_ids` of a forward within `generate`, with one row per sequence; empty if the model has no such argument.

    Without it all sequences share one row of positions, as in training. `mask`: that of the tokens so far.
    Source: transformers 5.23, generation/utils.py, `generate`, `_prepare_position_ids_for_generation`.
    """
    model = causal_model(module, name)
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return {}
    return {"position_ids": model._prepare_position_ids_for_generation(mask, {"attention_mask": mask})}


def _sample(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The next tokens' logits, their probabilities and the tokens, which live until those of the next forward replace them.

    Source: transformers 5.23, generation/utils.py, `_sample`.
    """
    of_last = logits[:, -1, :].to(copy=True, dtype=torch.float32)
    probabilities = nn.functional.softmax(of_last, dim=-1)
    return of_last, probabilities, torch.multinomial(probabilities, num_samples=1).squeeze(1)


class _GrowingCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """transformers' cache of keys and values. `grow` makes it as long as before the last token: one token less than the whole sequence.

    A layer with a sliding window keeps one token less than the window, as a view of a larger tensor. States of linear attention do not
    grow.
    Source: transformers 5.23, cache_utils.py; generation/utils.py, `_prepare_cache_for_generation`.
    """

    def __init__(self, config: PreTrainedConfig, before_last: int) -> None:
        super().__init__(config=config.get_text_config(decoder=True))
        self._before_last = before_last
        self._short: set[int] = set()

    def grow(self) -> None:
        """Make the cache report its length before the last token, from which masks are made. Each layer's tensors grow at its next
        update.
        """
        for position, layer in enumerate(self.layers):
            if not getattr(layer, "is_initialized", False) or not isinstance(layer, DynamicLayer):
                continue  # it shares another layer's keys and values, or has none
            self._short.add(position)
            if layer.is_sliding:
                layer.cumulative_length = self._before_last
            for name in ("keys", "values"):
                held = getattr(layer, name)
                setattr(layer, name, held[:, :, :1].expand(-1, -1, self._length(layer), -1))

    def _length(self, layer: DynamicLayer) -> int:
        """The tokens that a layer keeps."""
        return min(self._before_last, layer.sliding_window - 1) if layer.is_sliding else self._before_last

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self._short:
            self._short.remove(layer_idx)
            layer = self.layers[layer_idx]
            kept = self._length(layer)
            stored = min(self._before_last, layer.sliding_window) if layer.is_sliding else kept
            for name in ("keys", "values"):
                held = getattr(layer, name)
                shape = (*held.shape[:2], stored, held.shape[3])
                del held
                setattr(layer, name, getattr(layer, name).new_empty(shape)[:, :, -kept:])
        found: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found


def loss_of_grpo(source: PreferenceSource, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of the first micro-batch of those whose completions are generated together."""
    key = source.key
    size = batch["advantages"].shape[0] // key.generated
    if key.generates:
        generate(module, batch, source.name)
    fused = fused_loss_of(causal_model(module, source.name))
    gathers = fused.gathered_head
    if key.generates:
        fused.gathered_head = ""  # generation leaves the head's weight gathered
    if key.scores_policy:
        with source.as_scored_policy():
            score(source, module, batch, "policy", size)
    if key.reference != "none":
        with source.as_reference(module):
            score(source, module, batch, "reference", size)
    fused.gathered_head = gathers
    part = {name: x[:size] if x.dim() else x for name, x in batch.items()}
    ids, mask = sequences(part)
    logps, entropies, of_routers = log_probs(module, ids, mask, key.completion_length, with_entropies=True)
    old = part.get("old_per_token_logps")
    old = logps.detach() if old is None else old
    completion_mask, advantages = part["completion_mask"], part["advantages"].unsqueeze(1)
    weights = torch.exp(logps - old)
    if key.reference != "none":
        reference = part["ref_per_token_logps"]
        divergence = (torch.exp(reference - logps) - (reference - logps) - 1) * weights
    clamped = torch.clamp(weights, 1 - EPSILON, 1 + EPSILON)
    per_token = -torch.min(weights * advantages, clamped * advantages)
    if key.reference != "none":
        per_token = per_token + 0.1 * divergence
    normalizer = part["num_items_in_batch"].clamp(min=1.0)
    loss = (per_token * completion_mask).sum() / normalizer
    del entropies
    return loss if of_routers is None else loss + of_routers / normalizer


def score(source: PreferenceSource, module: nn.Module, batch: dict[str, torch.Tensor], phase: Any, size: int) -> None:
    """The log-probabilities of a micro-batch's completions, without gradients."""
    with without_checkpointing(module), scoring(phase):
        ids, mask = sequences(batch)
        log_probs(module, ids[:size], mask[:size], source.key.completion_length)
        del ids, mask


def sequences(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of prompts and completions together."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def log_probs(
    module: nn.Module, ids: torch.Tensor, mask: torch.Tensor, completion_length: int, *, with_entropies: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The log-probabilities of the completions' tokens, their entropies if they are wanted and the model's head computes them, and the
    routers' loss if the forward has one.
    """
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-completion_length] = -100
    outputs = module(input_ids=ids, labels=labels)
    torch.clear_autocast_cache()
    parts = {name: outputs[name][:, -completion_length:] for name in ("log_probs", "entropy") if name in outputs}
    logps = torch.cat([parts["log_probs"]], dim=0)
    entropies = torch.cat([parts["entropy"]], dim=0) if "entropy" in parts and with_entropies else None
    return logps, entropies, outputs.get("router_loss")
