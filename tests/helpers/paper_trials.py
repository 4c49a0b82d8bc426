"""Trials from rewards alone, and what a preset computes from them, for the vectors of papers."""

import random

import numpy as np
import pytest

from mage_async.config import config_file
from mage_async.config.schema import Transcript
from mage_async.learning.advantages import turn_advantages
from mage_async.learning.packing import credited
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Group, Kind, Segment, Task, Trial, Turn


def drawn_rewards(*lengths, seed=7):
    """Rewards of as many turns as `lengths` say, between -1 and 2."""
    source = random.Random(seed)
    return [[source.uniform(-1, 2) for _ in range(length)] for length in lengths]


def trial_of(index, *episodes, lengths=None, kinds=None, states="{episode}.{number}"):
    """A trial from the rewards of its episodes' turns."""
    turns, start = [], 0
    flat = [
        (k, t, reward) for k, rewards in enumerate(episodes) for t, reward in enumerate(rewards)
    ]
    for place, (episode, number, reward) in enumerate(flat):
        stop = start + (lengths[place] if lengths else 1)
        kind = kinds[place] if kinds else Kind.ACT
        anchor = states.format(episode=episode, number=number)
        turns.append(Turn(kind, episode, number, 0, start, stop, reward, True, "a", anchor))
        start = stop
    sampled, zeros = np.ones(start, bool), np.zeros(start, np.float32)
    segment = Segment(np.zeros(start, np.int32), sampled, zeros, (VersionRun(0, 0, 0),))
    task = Task("rps", "fixed-rock", 0)
    return Trial(task, index, len(episodes), (segment,), tuple(turns))


def configured(method, *settings):
    """The shipped configuration under a preset."""
    return config_file.load(config_file.find(None), list(settings), method)


def advantages_of(trials, method, *settings):
    """Advantages in float64, by trial."""
    config = configured(method, *settings)
    table = credited([Group(0, 0, tuple(trials))], config)
    limits = Transcript(max_action_tokens=8, max_reflection_tokens=8)
    values = turn_advantages(table, config.advantage, limits, "cpu").tolist()
    return [[values.pop(0) for _ in trial.turns] for trial in trials]


def close(expected):
    return pytest.approx(expected, rel=0, abs=1e-9)
