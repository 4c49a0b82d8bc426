"""The supervisor of a run under attack: the real one, but peers reach the learner by a tap.

Started by `bench/chaos.py` as `python bench/chaos_run.py RUN_DIR --actors N [--resume]`; the
environment says where the tap listens.
"""

import os

from mage_services import run
from mage_services.child import Spec
from mage_services.supervisor import Supervisor

TAP = "MAGE_CHAOS_TAP"


class Tapped(Supervisor):
    """Gives everyone but the learner the address of the tap."""

    def _spec(self, name: str, module: str, threads: int) -> Spec:
        learner, tap = self.address, os.environ.get(TAP)
        try:
            if tap and name != "learner":
                self.address = tap
            return super()._spec(name, module, threads)
        finally:
            self.address = learner


if __name__ == "__main__":
    run.Supervisor = Tapped
    run.main()
