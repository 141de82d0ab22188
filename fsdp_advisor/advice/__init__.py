"""Recommends a plan and explains the choice: a search over plans, sweeps, a decision tree, and a comparison with rules of thumb.

>>> from fsdp_advisor.advice import recommend
>>> advice = recommend(model="openai-community/gpt2", gpus=2, gpu="24GiB", strategy="ddp", micro_batch_size=1)
>>> advice.recommendation.winner.label
'DDP (ddp)'
"""

from fsdp_advisor.advice.answer import recommend, recommend_resolved, with_adapter_remedy
from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.result import Advice, Recommendation, Remedy
from fsdp_advisor.advice.search import Rejection
from fsdp_advisor.advice.vllm_settings import with_vllm_started

__all__ = [
    "Advice",
    "Candidate",
    "Recommendation",
    "Rejection",
    "Remedy",
    "recommend",
    "recommend_resolved",
    "with_adapter_remedy",
    "with_vllm_started",
]
