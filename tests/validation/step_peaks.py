"""Simulates jobs with other losses, checkpointing, batches and tiled MLPs and keeps their peaks and the predicted ones in
step_peaks.csv: `step_peaks.py`.

A job takes five to twenty seconds. Jobs that have no line yet are simulated; `step_peaks.py --all` simulates all again.
A test compares today's predictions with the kept simulations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import test_simulated_batches as batches
import test_simulated_checkpointing as checkpointing
import test_simulated_losses as losses
import test_simulated_tiled_mlp as tiled
from adapter_peaks import Line, read, write
from small_models import Case, name_of, options_of

from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest

RESULTS = Path(__file__).with_name("step_peaks.csv")
TILED = "tiled MLP"


def _tiled(case: Case, folder: Path) -> EstimateRequest:
    return make_request(options_of(tiled.CONFIGS, case, folder))


def _checkpointed(case: Case, folder: Path) -> EstimateRequest:
    return make_request(options_of(checkpointing.CONFIGS, case, folder))


KINDS: Mapping[str, tuple[list[Case], Callable[[Case, Path], EstimateRequest]]] = {
    "loss": ([*losses.FEW, *losses.MORE], losses.asked),
    "checkpointing": ([*checkpointing.FEW, *checkpointing.MORE], _checkpointed),
    "batch": ([*batches.FEW, *batches.MORE], batches.asked),
    TILED: ([*tiled.FEW, *tiled.MORE], _tiled),
}
"""By kind, the jobs of its test, and the request of a job whose model's configuration is in a file of the folder."""


def jobs() -> Iterator[tuple[str, str, Case]]:
    """The name, the kind and the case of every job; kinds take turns, and so do the models of each."""
    turns = []
    for kind, (cases, _) in KINDS.items():
        spread = [case for offset in range(7) for case in cases[offset::7]]
        turns.append([(f"{kind}: {name_of(case)}", kind, case) for case in spread])
    yield from (job for turn in zip_longest(*turns) for job in turn if job is not None)


def main() -> None:
    from compared_peaks import predicted_and_simulated

    from fsdp_advisor.validation import simulate

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="simulate the jobs that have a line, too")
    again = parser.parse_args().all
    simulate.tile_mlps = tiled.by_deepspeed
    lines = read(RESULTS)
    for name, kind, case in jobs():
        if name in lines and not again:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                predicted, simulated = predicted_and_simulated(KINDS[kind][1](case, Path(folder)))
        except Exception as error:  # one that fails must not end the others
            print(f"FAILS {type(error).__name__}: {str(error)[:200]}", name, flush=True)
            continue
        lines[name] = Line(simulated=simulated, predicted=predicted)
        print("equal" if predicted == simulated else f"DIFFERS {predicted} {simulated}", name, flush=True)
        write(lines, RESULTS)


if __name__ == "__main__":
    main()
