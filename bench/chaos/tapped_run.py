"""The supervisor of a run under attack: the real one, but peers reach the learner by a tap.

`bench.chaos.kills` starts this module as `python -m bench.chaos.tapped_run RUN_DIR --actors N
[--resume]`; the environment variable `MAGE_CHAOS_TAP` says where the tap listens.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

from mage_services.cli import run
from mage_services.processes.child import Spec
from mage_services.processes.supervisor import Supervisor

TAP = "MAGE_CHAOS_TAP"


class Tapped(Supervisor):
    """Gives everyone but the learner the address of the tap."""

    def _specs(self) -> Sequence[Spec]:
        return [spec if spec.name == "learner" else self._tapped(spec) for spec in super()._specs()]

    def _tapped(self, spec: Spec) -> Spec:
        tap = os.environ[TAP]
        words = tuple(tap if word == self.address else word for word in spec.arguments)
        return replace(spec, arguments=words)


if __name__ == "__main__":
    run.Supervisor = Tapped
    run.main()
