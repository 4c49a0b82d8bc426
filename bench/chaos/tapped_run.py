"""Supervise a run whose peers reach the learner through a tap (`bench/chaos/tap.py`).

`bench.chaos.kills` starts this module as `python -m bench.chaos.tapped_run RUN_DIR --actors N`, to
begin a run and to go on with it; the environment variable `MAGE_CHAOS_TAP` says where the tap
listens.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mage_async.config import config_file
from mage_async.errors import MageError
from mage_async.results.run_directory import RunDirectory
from mage_services.api import start_to_report
from mage_services.processes.run_lock import take_lock
from mage_services.processes.supervised_process import ProcessSpec
from mage_services.processes.supervisor import Supervisor

TAP = "MAGE_CHAOS_TAP"
"""Environment variable with the tap's address."""


class Tapped(Supervisor):
    """Supervisor that gives all processes but the learner the tap's address in place of the
    learner's."""

    def _specs(self) -> Sequence[ProcessSpec]:
        return [spec if spec.name == "learner" else self._tapped(spec) for spec in super()._specs()]

    def _tapped(self, spec: ProcessSpec) -> ProcessSpec:
        tap = os.environ[TAP]
        words = tuple(tap if word == self.address else word for word in spec.arguments)
        return replace(spec, arguments=words)


def main() -> int:
    """Supervise the run of the command line to its end; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--actors", type=int, required=True)
    given = parser.parse_args()
    run = RunDirectory(given.run_dir)
    config = config_file.load_recorded(run.config)
    # `run_to_end` makes its supervisor by this name.
    start_to_report.Supervisor = Tapped
    try:
        take_lock(run)
        return start_to_report.run_to_end(run, config, num_actors=given.actors)
    except MageError as error:
        print(f"mage: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
