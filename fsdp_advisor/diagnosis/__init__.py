"""Explains why a GPU ran out of memory: the tensors that were alive, the moment in the step, and changes that make the job fit.

It reads the text of an error, or a snapshot of PyTorch's caching allocator. It needs no torch.
"""

from fsdp_advisor.diagnosis.diagnose import diagnose_file, diagnose_text
from fsdp_advisor.diagnosis.facts import CATEGORIES, Diagnosis
from fsdp_advisor.diagnosis.prediction import DiagnosedJob, job_of

__all__ = ["CATEGORIES", "DiagnosedJob", "Diagnosis", "diagnose_file", "diagnose_text", "job_of"]
