"""Finished groups, made up: what each trial did, earned and was told."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.methods.graph_memory import GraphMemory, Settings
from mage_async.trajectory import Group, Guidance, Kind, Task, Trial, Turn

Steps = Sequence[tuple[str, str, float]]
"""State, action and reward of each turn of an episode."""


@pytest.fixture
def config() -> Callable[..., Config]:
    """The tiny quickstart with groups of two, a memory of one strategy, and more changes."""

    def made(**changes: Any) -> Config:
        settings = {"strategies": 1, "rate": 0.5} | changes
        given = [f"methods.graph_memory.{key}={value}" for key, value in settings.items()]
        given.append("admission.trials_per_group=2")
        return config_file.load(config_file.find("quickstart"), given)

    return made


@pytest.fixture
def memory_of() -> Callable[[Config], GraphMemory]:
    """The memory of a configuration."""

    def made(config: Config) -> GraphMemory:
        settings = msgspec.convert(config.methods["graph_memory"], Settings)
        return GraphMemory(settings, config)

    return made


@pytest.fixture
def group_of() -> Callable[..., Group]:
    """A group of trials; `told` are shown its guidance."""

    def made(
        trials: Sequence[Sequence[Steps]], told: Guidance | None = None, seat: int = 0
    ) -> Group:
        return Group(0, 0, tuple(_trial(i, t, told, seat) for i, t in enumerate(trials)), told)

    return made


def _trial(index: int, episodes: Sequence[Steps], told: Guidance | None, seat: int) -> Trial:
    turns = tuple(
        Turn(Kind.ACT, number, place, 0, 0, 1, reward, bool(action), action, state)
        for number, episode in enumerate(episodes)
        for place, (state, action, reward) in enumerate(episode)
    )
    memory = told.version if told is not None and index < told.num_guided else None
    return Trial(Task("rps", "m", 1, seat), index, len(episodes), (), turns, memory=memory)
