"""Short and long tasks whose steps fail now and then: the environment of `selection.py`, and of
many short runs in `kills.py`.

Actors import this file alone, so it imports nothing that is slow.
"""

import os
import random
import sys

SHARE_VARIABLE = "UNEVEN_SHARE"
"""Environment variable: the share of the calls of `step` that raise, in actors; 0 without it."""
TURNS = {"short": 2, "long": 20}
"""Turns of an episode by kind of task."""
SETTINGS = (
    "environment.name=bench.chaos.uneven:Uneven",
    "warm_start=none",
    "trial.episodes=2",
    "engine.max_tokens=1024",
    "learner.max_tokens_per_microbatch=16384",
    "admission.trials_per_group=4",
    "evaluation.every=0",
    "evaluation.final_trials=4",
)
"""Settings with which a quickstart plays this environment."""


class Uneven:
    """Say a or b. Some tasks take two turns, others twenty."""

    legal_actions = ("a", "b")
    words = ("a", "b", "yes", "no", "begin")
    max_turns = max(TURNS.values())

    def __init__(self) -> None:
        is_actor = "mage_services.actor.actor" in sys.orig_argv
        self._share = float(os.environ.get(SHARE_VARIABLE, "0")) if is_actor else 0.0
        self._source = random.Random(os.urandom(8))

    def family(self, task: int) -> str:
        """Return the kind of a task."""
        return "long" if task % 2 else "short"

    def reset(self, seed: int, task: int) -> str:
        """Begin an episode."""
        self._right = random.Random(task).choice("ab")
        self._left = TURNS[self.family(task)]
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Answer a turn, or raise."""
        if self._source.random() < self._share:
            raise ConnectionError("the server did not answer")
        self._left -= 1
        is_right = action == self._right
        return "yes" if is_right else "no", float(is_right), not self._left
