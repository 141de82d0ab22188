"""Runs scripts of this folder in forked processes, which have the libraries imported already.

Each line of the input is a script, its arguments, a folder to run in and the environment variables of each rank, as JSON; a line of
the output is the exit status of each rank. What rank n prints goes to the files n.out and n.err of the folder.
"""

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch._dynamo
import torch.utils._triton

# A process that has initialized CUDA cannot use it after a fork, and some libraries initialize it when they are imported.
CAPABILITY = int(os.environ["REHEARSAL_MAJOR"]), int(os.environ["REHEARSAL_MINOR"])
with (
    mock.patch.dict(os.environ, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
    mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
    mock.patch.object(torch.utils._triton, "has_triton", lambda: True),
):
    import datasets  # noqa: F401  # imported for the scripts, as are the others
    import peft  # noqa: F401
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer  # noqa: F401


def start(script: str, words: list[str], folder: str, variables: dict[str, str], rank: int) -> int:
    """The process that runs the script as this rank."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(variables)
        os.chdir(folder)
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            with Path(f"{rank}.{name}").open("w") as file:
                os.dup2(file.fileno(), stream.fileno())
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    gc.freeze()  # collections in the forked processes leave these objects alone
    for line in sys.stdin:
        script, words, folder, ranks = json.loads(line)
        started = [start(script, words, folder, variables, rank) for rank, variables in enumerate(ranks)]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]), flush=True)


if __name__ == "__main__":
    main()
