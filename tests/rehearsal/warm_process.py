"""A process with the libraries of rehearsed scripts imported. Its forks run scripts on simulated GPUs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal.environment import environment
from fsdp_advisor.rehearsal.inside.launchers import free_port, variables_of

SCRIPTS = Path(__file__).parent / "scripts"


class Warm:
    """A process that has PyTorch, transformers and TRL imported, and runs scripts in forks of itself."""

    def __init__(self, python: Path, gpu: str = "H100-80GB") -> None:
        self.python, self.gpu = python, gpu
        self.process = subprocess.Popen(
            [python, SCRIPTS / "warm.py"],
            env=self._machine(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, script: str, words: Sequence[str], folder: Path, ranks: Sequence[Mapping[str, str]] = ({},), gpus: int = 1
    ) -> str:
        """The output of the ranks of a script. They run in `folder` and see `gpus` GPUs."""
        assert self.process.stdin is not None and self.process.stdout is not None
        machine = self._machine(gpus) | {"HF_HOME": str(folder)}
        job = [str(SCRIPTS / script), words, str(folder), [{**machine, **variables} for variables in ranks]]
        print(json.dumps(job), file=self.process.stdin, flush=True)
        statuses = json.loads(self.process.stdout.readline())
        assert not any(statuses), "\n".join((folder / f"{rank}.err").read_text()[-3000:] for rank in range(len(ranks)))
        return "".join((folder / f"{rank}.out").read_text() for rank in range(len(ranks)))

    def run_ranks(self, script: str, words: Sequence[str], folder: Path, gpus: int) -> str:
        """The output of the ranks of a script, one rank for each of `gpus` GPUs of one node."""
        port = free_port()
        return self.run(script, words, folder, [variables_of(rank, gpus, gpus, port) for rank in range(gpus)], gpus)

    def _machine(self, gpus: int) -> dict[str, str]:
        return environment(self.python, find_gpu(self.gpu), gpus, outside=os.environ | {"HF_HUB_OFFLINE": "1"})
