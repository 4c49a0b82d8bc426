"""Populations, and the groups that they are rated by."""

import numpy as np

from mage_async.config.components import MATCHMAKERS
from mage_async.config.schema import Keep, Population
from mage_async.environments.games.kuhn import Kuhn
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Group, Kind, Segment, Task, Trial, Turn

KUHN = Kuhn("contrasts", hands=2, redeals=False)


def population(
    matchmaker: str = "decks",
    rivals: float = 0.5,
    every: int = 2,
    kept: int = 3,
    keep: Keep = "spread",
) -> Population:
    rule = MATCHMAKERS.load(matchmaker)()
    return Population(matchmaker=rule, rivals=rivals, every=every, kept=kept, keep=keep)


def trial(member: str, rewards: list[float], index: int = 0) -> Trial:
    part = Segment(
        np.ones(len(rewards), np.int32),
        np.ones(len(rewards), bool),
        np.zeros(len(rewards), np.float32),
        (VersionRun(0, 0, 0),),
    )
    turns = tuple(
        Turn(Kind.ACT, episode, 0, 0, episode, episode + 1, reward, True, "bet")
        for episode, reward in enumerate(rewards)
    )
    return Trial(Task("kuhn", member, 5), index, len(rewards), (part,), turns)


def group(member: str, *rewards: float) -> Group:
    return Group(0, 0, (trial(member, list(rewards)),))
