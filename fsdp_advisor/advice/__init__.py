"""Which strategy, and why: a decision tree over bytes, a search over configurations, and what rules of thumb would have said.

>>> from fsdp_advisor.advice import recommend
>>> advice = recommend(model="openai-community/gpt2", gpus=2, gpu="24GiB", strategy="ddp", micro_batch_size=1)
>>> advice.recommendation.winner.label
'DDP (ddp)'
"""

from fsdp_advisor.advice.answer import recommend, recommend_resolved
from fsdp_advisor.advice.fragmentation import Fragmentation
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.result import Advice, Recommendation, Remedy

__all__ = ["Advice", "Candidate", "Fragmentation", "Recommendation", "Remedy", "recommend", "recommend_resolved"]
