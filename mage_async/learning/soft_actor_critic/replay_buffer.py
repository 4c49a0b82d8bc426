"""The trials that updates draw from: those a run has committed, newest last.

The journal holds the same trials, and every draw is seeded by the run, the version and the update;
so a replay from the journal draws what the run drew. A checkpoint holds the buffer, as the journal
behind it may be gone.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from mage_async.learning.soft_actor_critic.experience import Copy, Experience, SoftSequence

ARRAYS = tuple(each.name for each in fields(SoftSequence) if each.name != "version")


class ReplayBuffer:
    """A first-in, first-out buffer of trials with their relabelled copies."""

    def __init__(self) -> None:
        self._trials: deque[Experience] = deque()

    def __len__(self) -> int:
        return len(self._trials)

    def add(self, trials: Sequence[Experience], capacity: int) -> None:
        """Take trials in, and drop the oldest beyond the capacity."""
        self._trials.extend(trials)
        while len(self._trials) > capacity:
            self._trials.popleft()

    def draw(self, count: int, source: random.Random) -> list[Copy]:
        """Trials with replacement, all equally likely, each as one of its copies."""
        return [source.choice(source.choice(self._trials)) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: all arrays joined, and the sizes by which they are cut again."""
        copies = [copy for trial in self._trials for copy in trial]
        segments = [segment for copy in copies for segment in copy]
        return {
            "copies": [len(trial) for trial in self._trials],
            "segments": [len(copy) for copy in copies],
            "tokens_each": [len(segment.tokens) for segment in segments],
            "actions_each": [len(segment.actions) for segment in segments],
            "versions": [segment.version for segment in segments],
            **{name: _joined([getattr(each, name) for each in segments]) for name in ARRAYS},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        cuts = {name: state["actions_each"] for name in ARRAYS} | {"tokens": state["tokens_each"]}
        columns = [_cut(state[name], cuts[name]) for name in ARRAYS]
        rows = zip(*columns, state["versions"], strict=True)
        segments = iter([SoftSequence(*row) for row in rows])
        copies = iter([tuple(next(segments) for _ in range(n)) for n in state["segments"]])
        trials = (tuple(next(copies) for _ in range(n)) for n in state["copies"])
        self._trials = deque(trials)


def _joined(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.empty(0)


def _cut(joined: torch.Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(joined.numpy(), np.cumsum(lengths)[:-1]) if lengths else []
