"""A prefix sum, whose kernels CUB chooses by the architecture of the code that the GPU runs."""

from __future__ import annotations

import json

import torch

found = (torch.arange(10, device="cuda") > 4)[None].cumsum(-1)
torch.cuda.synchronize()
print("FOUND", json.dumps({"shape": list(found.shape)}))
