"""Simulates every job of `adapter_cases.py` and keeps its peaks and the predicted ones in adapter_peaks.csv: `adapter_peaks.py`.

A job takes five to twenty seconds. Jobs that have no line yet are simulated; `adapter_peaks.py --all` simulates all again.
A test compares today's predictions with the kept simulations.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_advisor.program.accounts import PHASES

RESULTS = Path(__file__).with_name("adapter_peaks.csv")
SCALARS_BYTES = 16 * 512
"""Scalars of accelerate and the Trainer: the loss divided by the number of micro-batches, the gradient norm and others."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes by phase of one steady step of rank 0: simulated by PyTorch's own code around PEFT's model, and predicted."""

    simulated: Mapping[str, int]
    predicted: Mapping[str, int]

    def agrees(self, framework: str) -> bool:
        """Whether the peaks of all phases are equal, but for the scalars of a framework."""
        allowed = 0 if framework == "torch" else SCALARS_BYTES
        return all(abs(self.predicted[phase] - self.simulated[phase]) <= allowed for phase in PHASES)


def read(path: Path = RESULTS) -> dict[str, Line]:
    """The kept lines by the name of the case."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            row["case"]: Line(
                simulated={phase: int(row[f"simulated {phase}"]) for phase in PHASES},
                predicted={phase: int(row[f"predicted {phase}"]) for phase in PHASES},
            )
            for row in csv.DictReader(file)
        }


def write(lines: Mapping[str, Line], path: Path = RESULTS) -> None:
    """Write the lines in the order of their names."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", *(f"{kind} {phase}" for kind in ("simulated", "predicted") for phase in PHASES)])
        for name, line in sorted(lines.items()):
            writer.writerow([name, *(line.simulated[p] for p in PHASES), *(line.predicted[p] for p in PHASES)])


def main() -> None:
    from adapter_cases import CONFIGS, FEW, MORE
    from compared_peaks import predicted_and_simulated
    from small_models import name_of, options_of

    from fsdp_advisor.job.parsing import make_request

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="simulate the jobs that have a line, too")
    again = parser.parse_args().all
    lines = read()
    for case in [*FEW, *MORE]:
        name = name_of(case)
        if name in lines and not again:
            continue
        with tempfile.TemporaryDirectory() as folder:
            predicted, simulated = predicted_and_simulated(make_request(options_of(CONFIGS, case, Path(folder))))
        lines[name] = Line(simulated=simulated, predicted=predicted)
        print("equal" if predicted == simulated else f"DIFFERS {predicted} {simulated}", name, flush=True)
        write(lines)


if __name__ == "__main__":
    main()
