"""Score a set of trials: return of each episode with its interval, wins, and behaviour. Returns are
divided by `Facts.units` of the environment, such as the rounds of an episode.

The file also has the diversity of trajectories, and the reference returns of an environment, with
which a score is compared (random play, the best response, exact inference). A *member* is the
hidden part of a task: an opponent, a code, a room or a goal; members of one kind form a *family*. A
*mix* is an environment whose tasks come from several environments.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import or_
from typing import Any

import msgspec

from mage_async.environments.environment import Environment, Facts, Split
from mage_async.environments.game_references import half_widths_of
from mage_async.environments.mix import Mix, References, component_of
from mage_async.environments.user_calls import as_config_error
from mage_async.results.intervals import half_width, wilson
from mage_async.tasks.league import ITSELF, is_policy
from mage_async.trajectory import Kind, Trial

MOST_MEMBERS = 64
"""Largest number of members for which `Score.parts` has scores by "member". If there are more, they
are boards or rooms rather than opponents: their family, the difficulty, tells more, and
`Score.by_member` still has their returns.
"""
ENVIRONMENT = "environment"
"""Key of `Score.parts` for the environments of a mix."""


@dataclass(frozen=True, slots=True)
class _TrialReturns:
    """Hold the results of one trial by episode; returns are per unit of the environment."""

    returns: list[float]
    won: list[bool]
    lost: list[bool]
    span: float
    """Range of the returns of an episode: as declared, else that of the set's finished episodes."""


class PartScore(msgspec.Struct, frozen=True):
    """Score the trials of one member, seat, family, or environment of a mix.

    Returns are per unit of the environment (round, hand, dial). For a mix they are means over the
    trials of all its environments, each per unit of its own.
    """

    num_trials: int
    return_by_episode: list[float]
    ci95_by_episode: list[float]
    """Half-widths of 95 % intervals of the means over trials, with the tasks of these trials fixed.
    If all trials earned the same, the declared range of returns gives a bound (`half_width`). The
    intervals say nothing about other tasks: those of 9 held-out members that are played 1,024 times
    are narrow, even if the policy earns much less on a tenth member. The intervals of `mage adapt`
    are at least as wide as those over the means of members.
    """
    won_by_episode: list[float]
    """Share of trials that won the episode, each episode by itself."""
    won_within: list[float]
    """Share of trials that won at least one episode so far, as LaMer and MAGE report. It never
    decreases, even if nothing is learned from one episode for the next: the `blind` set shows how
    much a policy gains by independent retries.
    """
    lost_by_episode: list[float]
    """Share of trials that lost the episode; the rest is drawn."""


class Score(PartScore, frozen=True):
    """Score a set of trials.

    A trial that outgrew the engine's context, or whose environment or engine failed in every try,
    counts too. Each of its episodes that were not finished or not begun earns the `min_return` that
    the environment declares. If none is declared, it earns the least that a finished episode of
    this set earned, and at most 0, so the score of a trial then depends on the other trials of the
    set.
    """

    best_within: list[float]
    """Mean over trials of the best return so far; like `won_within` it never decreases."""
    won_bounds_by_episode: list[tuple[float, float]]
    """Wilson's 95 % interval of `won_by_episode`, with the tasks fixed as in `ci95_by_episode`."""
    by_family: dict[str, list[float]]
    """Return of each episode by family of members."""
    by_member: dict[str, list[float]]
    """Return of each episode by member."""
    parts: dict[str, dict[str, PartScore]]
    """Scores by "family" (the difficulty, if tasks have one), by "seat", by "member" if there
    are at most `MOST_MEMBERS`, and by "environment" if several are mixed.
    """
    invalid_actions_per_trial: float
    probes_by_episode: list[float]
    """Share of an episode's actions that only gather information; 0 if the environment knows none.
    """
    cut_short: float
    """Share of trials that outgrew the engine's context (raise `engine.max_tokens`), or whose
    environment or engine failed in every try (see the evaluator's log).
    """


def score(trials: Sequence[Trial], environment: Environment) -> Score:
    """Return the score of trials of equal length that were played independently of each other."""
    rows = _rows(trials, environment)
    members = [trial.task.member for trial in trials]
    names = {
        "family": [family_of(member, environment) for member in members],
        "seat": [str(trial.task.seat) for trial in trials],
        "member": members,
    }
    if isinstance(environment, Mix):
        names[ENVIRONMENT] = [environment.part(member)[0].label for member in members]
    parts = {kind: _parts(each, rows) for kind, each in names.items()}
    by_member = _returns(parts["member"])
    if len(by_member) > MOST_MEMBERS:
        del parts["member"]
    whole = _part(rows)
    # Numbers of trials that won, recovered from their shares.
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


def _rows(trials: Sequence[Trial], environment: Environment) -> list[_TrialReturns]:
    """Return the results of each trial, by the facts of the environment that it played."""
    played = [(trial, component_of(environment, trial.task.member).facts) for trial in trials]
    finished: dict[Facts, list[float]] = defaultdict(list)
    for trial, facts in played:
        finished[facts] += trial.episode_rewards()[: trial.cut_at]
    spans = dict[Facts, float]()
    for facts, rewards in finished.items():
        low, high = facts.min_return, facts.max_return
        if low is None or high is None:
            low, high = min(rewards, default=0.0), max(rewards, default=0.0)
        spans[facts] = high - low
    rows = []
    for trial, facts in played:
        rewards, by_turn = trial.episode_rewards(), trial.turn_rewards()
        if trial.cut_at is not None:
            # The declared least return of a whole episode, not yet divided by its units.
            known = facts.min_return
            least = min([0.0, *finished[facts]]) if known is None else known
            num_unfinished = trial.num_episodes - trial.cut_at
            rewards = rewards[: trial.cut_at] + [least] * num_unfinished
            by_turn = by_turn[: trial.cut_at] + [[least]] * num_unfinished
        rows.append(
            _TrialReturns(
                [reward / facts.units for reward in rewards],
                [facts.is_won(each) for each in by_turn],
                [facts.is_lost(each) for each in by_turn],
                spans[facts] / facts.units,
            )
        )
    return rows


def _parts(names: Sequence[str], rows: Sequence[_TrialReturns]) -> dict[str, PartScore]:
    """Return the scores of the trials that have the same name, by name.

    Args:
        names: Name of each trial, in the order of `rows`.
    """
    grouped: dict[str, list[_TrialReturns]] = defaultdict(list)
    for name, row in zip(names, rows, strict=True):
        grouped[name].append(row)
    return {name: _part(grouped[name]) for name in sorted(grouped)}


def _part(rows: Sequence[_TrialReturns]) -> PartScore:
    """Return the score of some trials."""
    returns, span = [row.returns for row in rows], max(row.span for row in rows)
    return PartScore(
        num_trials=len(rows),
        return_by_episode=_means(returns),
        ci95_by_episode=[half_width(column, span) for column in zip(*returns, strict=True)],
        won_by_episode=_means([row.won for row in rows]),
        won_within=_means([list(accumulate(row.won, or_)) for row in rows]),
        lost_by_episode=_means([row.lost for row in rows]),
    )


def _returns(parts: Mapping[str, PartScore]) -> dict[str, list[float]]:
    """Return the returns by episode of each part, by its name."""
    return {name: part.return_by_episode for name, part in parts.items()}


def environment_returns(score: Score) -> dict[str, list[float]]:
    """Return the returns of each episode by environment of a mix; empty without a mix."""
    return _returns(score.parts.get(ENVIRONMENT, {}))


def family_of(member: str, environment: Environment) -> str:
    """Return the family of a member; all versions of the policy form one family.

    Raises:
        ConfigError: a user's `family` raised.
    """
    if is_policy(member):
        return ITSELF
    with as_config_error(environment.facts.name):
        return environment.family(member)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each column."""
    return [_mean(column) for column in zip(*rows, strict=True)]


def _probes(trials: Sequence[Trial], environment: Environment) -> list[float]:
    """Return the share of each episode's actions that only gather information.

    Raises:
        ConfigError: a user's `is_probe` raised.
    """
    acts, probes = Counter[int](), Counter[int]()
    for trial in trials:
        played = component_of(environment, trial.task.member)
        for turn in trial.turns:
            if turn.kind is Kind.ACT:
                acts[turn.episode] += 1
                with as_config_error(played.facts.name, f"is_probe({turn.action!r:.60})"):
                    probes[turn.episode] += played.is_probe(turn.action)
    return [probes[k] / max(1, acts[k]) for k in range(trials[0].num_episodes)]


def _mean(values: Sequence[float]) -> float:
    """Return the mean of one value or more."""
    return sum(values) / len(values)


class Rung(msgspec.Struct, frozen=True):
    """Hold the score on held-out tasks of one difficulty."""

    label: str
    options: dict[str, Any]
    """Options of the environment that differ from the run's; empty for the tasks as trained."""
    score: Score


class Harder(msgspec.Struct, frozen=True):
    """Hold the scores on a ladder of tasks, from the tasks as trained to the hardest.

    LaMer (arXiv 2512.16848, figure 4) measures policies on more boxes of Sokoban and more mines of
    MineSweeper than they were trained on.
    """

    ladder: str
    rungs: list[Rung]


def rung_label(options: Mapping[str, Any]) -> str:
    """Return the name of a rung, such as `boxes 3`."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def references(environment: Environment, num_episodes: int) -> dict[str, Any]:
    """Return the reference returns of both splits, as `with_errors` lays them out."""
    splits: tuple[Split, Split] = ("train", "heldout")
    return with_errors({split: environment.references(split, num_episodes) for split in splits})


def with_errors(known: Mapping[str, References]) -> dict[str, Any]:
    """Return `references` by split and, if any were sampled, `reference_ci95`: the half-widths of
    their 95 % intervals.
    """
    errors = {split: half_widths_of(values) for split, values in known.items()}
    found = {"references": dict(known)}
    return found | ({"reference_ci95": errors} if any(errors.values()) else {})


def by_environment(environment: Environment, num_episodes: int) -> dict[str, Any]:
    """Return references and facts of each environment of a mix; empty without a mix."""
    if not isinstance(environment, Mix):
        return {}
    known = {
        split: environment.own_references(split, num_episodes) for split in ("train", "heldout")
    }
    parts = {
        part.label: {
            "is_trained_on": part.share > 0,
            **with_errors({split: values[part.label] for split, values in known.items()}),
            "environment": asdict(part.environment.facts),
        }
        for part in environment.parts
    }
    return {"environments": parts}


# Trajectory diversity: how differently a policy plays one and the same task.
#
# LaMer (arXiv 2512.16848, figures 1 and 3) compares policies by the entropy of the distinct
# trajectories that each samples for a task. Here a task is played R times: the environment repeats
# its random seed, the policy samples with other seeds. The trajectory of an episode is its sequence
# of (state, action) pairs, with states named by the environment's anchors. With p the shares of the
# distinct trajectories among the R plays of an episode,
#
#     H = - sum p ln p   nats, from 0 (always the same) to ln R (never twice the same),
#
# and the mean over tasks is reported. H is the entropy of the sample. It lies below the entropy of
# the policy unless R is much larger than the number of trajectories, so compare only values that
# were measured with the same R.


class Diversity(msgspec.Struct, frozen=True):
    """Hold the diversity of the trajectories in a set of tasks, by episode."""

    num_tasks: int
    repeats: int
    """Number of plays of each task."""
    entropy_by_episode: list[float]
    """Mean entropy over tasks, nats."""
    ci95_by_episode: list[float]
    """Half-widths of 95 % intervals of that mean."""
    distinct_by_episode: list[float]
    """Mean number of distinct trajectories of a task."""
    most: float
    """Largest possible entropy in nats, ln(repeats)."""


def diversity(plays: Sequence[Sequence[Trial]]) -> Diversity:
    """Compute the diversity of repeated plays.

    All episodes that were not played count as the same trajectory.

    Args:
        plays: `plays[task][repeat]`, at least one task; all tasks have the same number of plays,
            and all trials the same number of episodes.
    """
    repeats, num_episodes = len(plays[0]), plays[0][0].num_episodes
    counts = [
        [Counter(trajectory(trial, episode) for trial in trials) for trials in plays]
        for episode in range(num_episodes)
    ]
    entropies = [[_entropy(each.values()) for each in tasks] for tasks in counts]
    return Diversity(
        num_tasks=len(plays),
        repeats=repeats,
        entropy_by_episode=[math.fsum(row) / len(row) for row in entropies],
        ci95_by_episode=[half_width(row) for row in entropies],
        distinct_by_episode=[sum(map(len, tasks)) / len(tasks) for tasks in counts],
        most=math.log(repeats),
    )


def trajectory(trial: Trial, episode: int) -> Hashable:
    """Return the (state, action) pairs of an episode; the environment names its states by
    `anchor`.
    """
    return tuple(
        (turn.anchor, turn.action)
        for turn in trial.turns
        if turn.episode == episode and turn.kind is Kind.ACT
    )


def _entropy(counts: Iterable[int]) -> float:
    """Return the entropy of a sample by the counts of its values, nats."""
    counts = list(counts)
    total = sum(counts)
    return math.fsum(count / total * math.log(total / count) for count in counts)
