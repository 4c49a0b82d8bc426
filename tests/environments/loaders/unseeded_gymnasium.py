"""An environment of Gymnasium that ignores its seed, as some do."""

import itertools
from typing import Any

import gymnasium

_COUNT = itertools.count()


class Unseeded(gymnasium.Env):
    """Counts its resets."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[int, dict]:
        return next(_COUNT), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        return action, 0.0, True, False, {}


gymnasium.register("Unseeded-v0", Unseeded)
