"""What a set of trials says: return of each episode with its confidence interval, by family, and
behaviour.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import or_

import msgspec

from mage_async.environments.environment import Environment
from mage_async.trajectory import Kind, Trial


class Score(msgspec.Struct, frozen=True):
    """Returns are per unit of the environment (round, hand, dial); intervals are half-widths at 95
    %.
    """

    num_trials: int
    return_by_episode: list[float]
    ci95_by_episode: list[float]
    won_by_episode: list[float]
    """Share of trials that won the episode, each episode by itself."""
    won_within: list[float]
    """Share that won at least one episode so far: what LaMer and MAGE report. It can only grow,
    also where nothing is learned from one episode for the next.
    """
    lost_by_episode: list[float]
    """What is neither won nor lost is drawn."""
    by_family: dict[str, list[float]]
    by_member: dict[str, list[float]]
    invalid_actions_per_trial: float
    probes_by_episode: list[float]
    """Share of an episode's actions that only gather information, where the environment knows such.
    """


def score(trials: Sequence[Trial], environment: Environment) -> Score:
    """Score trials of equal length that were played independently of each other."""
    units = environment.facts.units
    rewards = [trial.episode_rewards() for trial in trials]
    rows = [[reward / units for reward in row] for row in rewards]
    won = [[environment.facts.is_won(reward) for reward in row] for row in rewards]
    lost = [[environment.facts.is_lost(reward) for reward in row] for row in rewards]
    members = [trial.task.member for trial in trials]
    families = [environment.family(member) for member in members]
    columns = list(zip(*rows, strict=True))
    return Score(
        num_trials=len(rows),
        return_by_episode=[_mean(column) for column in columns],
        ci95_by_episode=[_half_width(column) for column in columns],
        won_by_episode=_shares(won),
        won_within=_shares([list(accumulate(row, or_)) for row in won]),
        lost_by_episode=_shares(lost),
        by_family=_by(families, rows),
        by_member=_by(members, rows),
        invalid_actions_per_trial=_mean([trial.num_invalid() for trial in trials]),
        probes_by_episode=_probes(trials, environment),
    )


def _shares(rows: Sequence[Sequence[bool]]) -> list[float]:
    return [_mean(column) for column in zip(*rows, strict=True)]


def _by(names: Sequence[str], rows: Sequence[list[float]]) -> dict[str, list[float]]:
    grouped: dict[str, list[list[float]]] = defaultdict(list)
    for name, row in zip(names, rows, strict=True):
        grouped[name].append(row)
    return {
        name: [_mean(column) for column in zip(*grouped[name], strict=True)]
        for name in sorted(grouped)
    }


def _probes(trials: Sequence[Trial], environment: Environment) -> list[float]:
    acts = [0] * trials[0].num_episodes
    probes = [0] * trials[0].num_episodes
    for trial in trials:
        for turn in trial.turns:
            if turn.kind is Kind.ACT:
                acts[turn.episode] += 1
                probes[turn.episode] += environment.is_probe(turn.action)
    return [probe / max(1, count) for probe, count in zip(probes, acts, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _half_width(values: Sequence[float]) -> float:
    """1.96 standard errors of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return 1.96 * math.sqrt(variance / len(values))
