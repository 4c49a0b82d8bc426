"""The global random state, isolated for engines that draw from it."""

import random
from typing import Any, ClassVar

import numpy as np


class IsolatedRandomState:
    """Context manager that gives an engine its own global random state.

    Wrap every call of an engine that draws from `random` or `numpy.random`. The previous state is
    restored on exit. Calls are made one after another (`called = "in_turn"`); a call that overran
    its deadline, and returns while another call is under way, leaves the state to that call.
    """

    _current: "ClassVar[IsolatedRandomState | None]" = None

    def __init__(self, seed: int) -> None:
        numbers = np.random.RandomState(seed)
        self._own: tuple[Any, Any] = random.Random(seed).getstate(), numbers.get_state()
        self._outside: tuple[Any, Any] | None = None
        self._outer: IsolatedRandomState | None = None

    def __enter__(self) -> None:
        self._outside = random.getstate(), np.random.get_state()
        self._outer = IsolatedRandomState._current
        IsolatedRandomState._current = self
        _set_random_states(self._own)

    def __exit__(self, *_: object) -> None:
        assert self._outside is not None, "entered"
        if IsolatedRandomState._current is not self:
            return
        IsolatedRandomState._current = self._outer
        self._own = random.getstate(), np.random.get_state()
        _set_random_states(self._outside)


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
