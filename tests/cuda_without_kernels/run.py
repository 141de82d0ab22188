"""Run Python on simulated GPUs without reports: `run.py --gpu H100-80GB -m fsdp_advisor ...`. See README.md in this folder."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal.build import find_installation, libraries_for
from fsdp_advisor.rehearsal.environment import Machine, environment

CONTEXT_BYTES = 500 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, usage="run.py [--gpu NAME] PYTHON-ARGUMENTS...")
    parser.add_argument("--gpu", default="H100-80GB", help="a GPU of `fsdp-advisor gpus`")
    options, arguments = parser.parse_known_args()
    machine = Machine(gpu=find_gpu(options.gpu), gpus_per_node=1, context_bytes=CONTEXT_BYTES)
    libraries = libraries_for(find_installation(Path(sys.executable)))
    os.execve(sys.executable, [sys.executable, *arguments], environment(machine, libraries, os.environ))


if __name__ == "__main__":
    main()
