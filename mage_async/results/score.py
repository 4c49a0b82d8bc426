"""The score of a set of trials: the return of each episode with its interval, and behaviour."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_

import msgspec

from mage_async.environments.environment import Environment, Facts
from mage_async.environments.mix.parts import Mixed, part_of
from mage_async.results.intervals import half_width, wilson
from mage_async.tasks.population import ITSELF, is_policy
from mage_async.trajectory import Kind, Trial

MOST_MEMBERS = 64
"""With more of them, members are boards or rooms, and a family says how hard they are."""


ENVIRONMENT = "environment"
"""The key of `Score.parts` for the parts of a mix."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One trial by episode."""

    returns: list[float]
    """Per unit."""
    won: list[bool]
    lost: list[bool]


class Part(msgspec.Struct, frozen=True):
    """The trials against one opponent, in one seat, of one difficulty, or of one part of a mix."""

    num_trials: int
    return_by_episode: list[float]
    ci95_by_episode: list[float]
    won_by_episode: list[float]
    won_within: list[float]
    lost_by_episode: list[float]


class Score(msgspec.Struct, frozen=True):
    """Returns are per unit of the environment (round, hand, dial); intervals are half-widths at 95
    %. Of a mix they are means over the trials of all parts, each per unit of its own.

    A trial that outgrew the engine's context, or had a call that failed, counts: its unfinished
    episodes, and those that it could not begin, earn the least that the environment can pay.
    """

    num_trials: int
    return_by_episode: list[float]
    ci95_by_episode: list[float]
    best_within: list[float]
    """Mean over trials of the best return so far; like `won_within` it can only grow."""
    won_by_episode: list[float]
    """Share of trials that won the episode, each episode by itself."""
    won_bounds_by_episode: list[tuple[float, float]]
    """Wilson's 95 % interval of that share."""
    won_within: list[float]
    """Share that won at least one episode so far: what LaMer and MAGE report. It can only grow,
    also where nothing is learned from one episode for the next: the `blind` set says how much a
    policy gains by independent retries.
    """
    lost_by_episode: list[float]
    """What is neither won nor lost is drawn."""
    by_family: dict[str, list[float]]
    """Returns, as in the next."""
    by_member: dict[str, list[float]]
    parts: dict[str, dict[str, Part]]
    """By "family" (which says the difficulty where there is one), "seat", "member" where there are
    at most `MOST_MEMBERS`, and "environment" where several are mixed.
    """
    invalid_actions_per_trial: float
    probes_by_episode: list[float]
    """Share of an episode's actions that only gather information, where the environment knows such.
    """
    cut_short: float
    """Share of trials that outgrew the engine's context (raise `engine.max_tokens`), or had a call
    that failed (the evaluator's log says which).
    """


def score(trials: Sequence[Trial], environment: Environment) -> Score:
    """Score trials of equal length that were played independently of each other."""
    rows = _rows(trials, environment)
    members = [trial.task.member for trial in trials]
    names = {
        "family": [family_of(member, environment) for member in members],
        "seat": [str(trial.task.seat) for trial in trials],
        "member": members,
    }
    if isinstance(environment, Mixed):
        names[ENVIRONMENT] = [environment.part(member)[0].label for member in members]
    parts = {kind: _parts(each, rows) for kind, each in names.items()}
    by_member = _returns(parts["member"])
    if len(by_member) > MOST_MEMBERS:
        del parts["member"]
    whole = _part(rows)
    counts = [round(share * len(trials)) for share in whole.won_by_episode]
    return Score(
        **msgspec.structs.asdict(whole),
        best_within=_means([list(accumulate(row.returns, max)) for row in rows]),
        won_bounds_by_episode=[wilson(count, len(trials)) for count in counts],
        by_family=_returns(parts["family"]),
        by_member=by_member,
        parts=parts,
        invalid_actions_per_trial=_mean([trial.num_invalid() for trial in trials]),
        probes_by_episode=_probes(trials, environment),
        cut_short=_mean([trial.cut_at is not None for trial in trials]),
    )


def _rows(trials: Sequence[Trial], environment: Environment) -> list[_Row]:
    """A row a trial, each by the facts of the environment that it played."""
    facts = [part_of(environment, trial.task.member).facts for trial in trials]
    alike: dict[Facts, list[Trial]] = defaultdict(list)
    for trial, each in zip(trials, facts, strict=True):
        alike[each].append(trial)
    least = {each: _least(own, each) for each, own in alike.items()}
    return [
        _row(_rewards(trial, least[each]), each) for trial, each in zip(trials, facts, strict=True)
    ]


def _row(rewards: Sequence[float], facts: Facts) -> _Row:
    return _Row(
        [reward / facts.units for reward in rewards],
        [facts.is_won(reward) for reward in rewards],
        [facts.is_lost(reward) for reward in rewards],
    )


def _least(trials: Sequence[Trial], facts: Facts) -> float:
    """What an episode that was not finished counts: the declared minimum; where none is declared,
    the least that any finished episode earned, and no more than 0.
    """
    if facts.min_return is not None:
        return facts.min_return
    finished = (trial.episode_rewards()[: trial.cut_at] for trial in trials)
    return min((0.0, *(reward for row in finished for reward in row)))


def _rewards(trial: Trial, least: float) -> list[float]:
    """Undiscounted reward of every episode; `least` for what was not finished."""
    rewards = trial.episode_rewards()
    if trial.cut_at is None:
        return rewards
    return rewards[: trial.cut_at] + [least] * (trial.num_episodes - trial.cut_at)


def _parts(names: Sequence[str], rows: Sequence[_Row]) -> dict[str, Part]:
    grouped: dict[str, list[_Row]] = defaultdict(list)
    for name, row in zip(names, rows, strict=True):
        grouped[name].append(row)
    return {name: _part(grouped[name]) for name in sorted(grouped)}


def _part(rows: Sequence[_Row]) -> Part:
    returns = [row.returns for row in rows]
    return Part(
        num_trials=len(rows),
        return_by_episode=_means(returns),
        ci95_by_episode=[half_width(column) for column in zip(*returns, strict=True)],
        won_by_episode=_means([row.won for row in rows]),
        won_within=_means([list(accumulate(row.won, or_)) for row in rows]),
        lost_by_episode=_means([row.lost for row in rows]),
    )


def _returns(parts: Mapping[str, Part]) -> dict[str, list[float]]:
    return {name: part.return_by_episode for name, part in parts.items()}


def environment_returns(score: Score) -> dict[str, list[float]]:
    """Returns by environment; empty where nothing is mixed."""
    return _returns(score.parts.get(ENVIRONMENT, {}))


def family_of(member: str, environment: Environment) -> str:
    """The kind a member belongs to; all versions of the policy are of one."""
    return ITSELF if is_policy(member) else environment.family(member)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [_mean(column) for column in zip(*rows, strict=True)]


def _probes(trials: Sequence[Trial], environment: Environment) -> list[float]:
    acts = [0] * trials[0].num_episodes
    probes = [0] * trials[0].num_episodes
    for trial in trials:
        played = part_of(environment, trial.task.member)
        for turn in trial.turns:
            if turn.kind is Kind.ACT:
                acts[turn.episode] += 1
                probes[turn.episode] += played.is_probe(turn.action)
    return [probe / max(1, count) for probe, count in zip(probes, acts, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
