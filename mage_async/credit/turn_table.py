"""Lay out all turns of a batch as columns, so that baselines are a few array operations.

A table holds each turn's return, computed by the configured credit
(`mage_async/credit/returns.py`), and the columns that penalties read. A turn is an act (an action
of the environment), a reflection (a remark between two episodes), a strategy (a remark before an
action, on what to do) or notes (a remark that replaces a full context).

Shapes: `N` turns of all trials of all groups, in the order of `group.trials`, then `trial.turns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from mage_async.credit.returns import Credit
from mage_async.trajectory import Group, Kind, Trial, Turn

Key = Literal[
    "group", "component", "member", "seat", "kind", "episode", "index", "anchor", "memory"
]
"""Name of a column that may decide which turns are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnTable:
    """Hold one row per turn; every column is an array `[N]`.

    Numbers of groups, trials, components, members and anchors begin at 0 in every batch.
    """

    group: np.ndarray
    """int64: index of the group in the batch"""
    trial: np.ndarray
    """int64: index of the trial in the batch"""
    component: np.ndarray
    """int64: number of the trial's environment, or of its component of a mix"""
    member: np.ndarray
    """int64: number of the trial's member, its hidden opponent or task variant"""
    seat: np.ndarray
    """int64: the seat that the policy plays"""
    kind: np.ndarray
    """int64: `Kind`"""
    episode: np.ndarray
    """int64: number of the episode in its trial, from 0"""
    index: np.ndarray
    """int64: position among the turns of its kind in its episode"""
    anchor: np.ndarray
    """int64: number of the turn's state. The state of an act is the one in which it was taken.
    Strategies and notes have the state of the next act, and a reflection has the number of its
    episode as its state. Turns of different kinds never share a number"""
    returns: np.ndarray
    """float64: return that the credit assigns to the turn, bonuses included"""
    episode_score: np.ndarray
    """float64: score of the turn's episode: the undiscounted sum of the amounts that the credit
    pays for the episode's turns (`Credit.paid`), times `exploration_share` before the last episode,
    plus its bonuses; 0 for reflections, strategies and notes
    """
    is_valid: np.ndarray
    """bool: whether the completion held a valid action or remark"""
    num_tokens: np.ndarray
    """int64: length of the completion"""
    num_sampled: np.ndarray
    """int64: number of sampled tokens of the completion; only these have a loss. A training step
    sets 0 for turns that it does not train on"""
    memory: np.ndarray
    """int64: 1 if the trial's prompt holds strategies of earlier tasks, else 0"""

    def __len__(self) -> int:
        return len(self.returns)

    def cells(self, key: Sequence[Key]) -> np.ndarray:
        """Group the rows that agree in all columns of `key`, and return the number of each row's
        group, from 0: int64 `[N]`. With an empty key, all rows are one group.
        """
        cells = np.zeros(len(self), np.int64)
        for name in key:
            cells = joint_cells(cells, getattr(self, name))
        return cells

    def trial_scores(self) -> np.ndarray:
        """Return for each turn the score of its trial, the sum of `episode_score` over the trial's
        episodes: float64 `[N]`.
        """
        # Every act of an episode has the episode's score, so one act of each episode is summed.
        acts = np.flatnonzero(self.kind == Kind.ACT)
        episodes = joint_cells(self.trial, self.episode)[acts]
        one_of_each = acts[np.unique(episodes, return_index=True)[1]]
        # `minlength` is large enough: there are at most as many trials as turns.
        scores = np.bincount(
            self.trial[one_of_each], self.episode_score[one_of_each], minlength=len(self)
        )
        by_turn: np.ndarray = scores[self.trial]
        return by_turn


def joint_cells(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Number the distinct pairs of two id columns, from 0: int64 `[N]`."""
    distinct, ids = np.unique(second, return_inverse=True)
    return np.unique(first * len(distinct) + ids, return_inverse=True)[1]


def build_table(
    groups: Sequence[Group],
    credit: Credit,
    *,
    exploration_share: float = 1.0,
    bonuses: Sequence[Sequence[float]] | None = None,
) -> TurnTable:
    """Credit every trial of a batch and lay out its turns as columns.

    Args:
        exploration_share: Factor of the returns and episode scores of turns before the last
            planned episode; bonuses are added after it.
        bonuses: For each trial, the bonus that is added to the reward of each turn; only those of
            acts count. Unlike a reward, a bonus counts only in the returns of its own episode and
            of the remarks before the episode's acts.
    """
    trials = [(number, trial) for number, group in enumerate(groups) for trial in group.trials]
    bonuses = bonuses or [[0.0] * len(trial.turns) for _, trial in trials]
    credited = [
        _credited(trial, credit, own, exploration_share)
        for (_, trial), own in zip(trials, bonuses, strict=True)
    ]
    turns = list(chain.from_iterable(trial.turns for _, trial in trials))
    counts = [len(trial.turns) for _, trial in trials]
    members = _ids([(trial.task.environment, trial.task.member) for _, trial in trials])
    components = _ids([trial.task.component for _, trial in trials])
    return TurnTable(
        component=np.repeat(components, counts),
        group=np.repeat(_integers([number for number, _ in trials]), counts),
        trial=np.repeat(np.arange(len(trials)), counts),
        member=np.repeat(members, counts),
        seat=np.repeat(_integers([trial.task.seat for _, trial in trials]), counts),
        memory=np.repeat(_integers([trial.memory is not None for _, trial in trials]), counts),
        num_sampled=np.concatenate(
            [_integers([]), *(each.sampled_by_turn() for _, each in trials)]
        ),
        **_turn_columns(turns),
        returns=np.array([value for values, _ in credited for value in values], np.float64),
        episode_score=np.array([score for _, scores in credited for score in scores], np.float64),
    )


def _turn_columns(turns: Sequence[Turn]) -> dict[str, np.ndarray]:
    """Return the columns that depend on a turn alone."""
    return {
        "kind": _integers([turn.kind for turn in turns]),
        "episode": _integers([turn.episode for turn in turns]),
        "index": _integers([turn.index for turn in turns]),
        "anchor": _ids(_states(turns)),
        "is_valid": np.array([turn.is_valid for turn in turns], bool),
        "num_tokens": _integers([turn.stop - turn.start for turn in turns]),
    }


def _states(turns: Sequence[Turn]) -> list[object]:
    """Return an object for each turn's state: equal for equal states (see `TurnTable.anchor`)."""
    states: list[object] = []
    next_anchor = ""
    # Backwards, so that the anchor of the next act is known.
    for turn in reversed(turns):
        if turn.kind is Kind.ACT:
            next_anchor = turn.anchor
            states.append(next_anchor)
        else:
            state = turn.episode if turn.kind is Kind.REFLECT else next_anchor
            states.append((turn.kind, state))
    return states[::-1]


def _credited(
    trial: Trial, credit: Credit, bonus: Sequence[float], share: float
) -> tuple[list[float], list[float]]:
    """Return the return and the episode score of every turn of a trial, in order.

    A reflection, a strategy or notes get the return of the next act. The turns of all but the last
    planned episode get `share` times their return; bonuses are added after that.
    """
    rewards = _rewards(trial)
    credited = credit.checked(list(rewards.values()))
    values = list(chain.from_iterable(credited.acts))
    scores = {
        episode: score * (share if trial.is_before_last(episode) else 1.0)
        for episode, score in zip(rewards, credited.scores, strict=True)
    }
    for turn, amount in zip(trial.turns, bonus, strict=True):
        if turn.kind is Kind.ACT:
            scores[turn.episode] += amount
    bonuses_to_go = _bonus_to_go(trial, bonus, credit.turn_discount)
    returns: list[float] = []
    act_return = bonus_to_go = 0.0  # of the next act
    for turn in reversed(trial.turns):
        if turn.kind is Kind.ACT:
            act_return, bonus_to_go = values.pop(), bonuses_to_go.pop()
        factor = share if trial.is_before_last(turn.episode) else 1.0
        returns.append(act_return * factor + bonus_to_go)
    own_scores = [scores[turn.episode] if turn.kind is Kind.ACT else 0.0 for turn in trial.turns]
    return returns[::-1], own_scores


def _bonus_to_go(trial: Trial, bonus: Sequence[float], discount: float) -> list[float]:
    """Return, for each act, the discounted sum of bonuses from it to the end of its episode."""
    acts = [
        (turn.episode, amount)
        for turn, amount in zip(trial.turns, bonus, strict=True)
        if turn.kind is Kind.ACT
    ]
    sums: list[float] = []
    next_episode = -1
    for episode, amount in reversed(acts):
        sums.append(amount + (discount * sums[-1] if episode == next_episode else 0.0))
        next_episode = episode
    return sums[::-1]


def _rewards(trial: Trial) -> dict[int, list[float]]:
    """Return the rewards of the acts of each episode with at least one act, in order."""
    rewards: dict[int, list[float]] = {}
    for turn in trial.turns:
        if turn.kind is Kind.ACT:
            rewards.setdefault(turn.episode, []).append(turn.reward)
    return rewards


def _ids(names: Sequence[object]) -> np.ndarray:
    """Number names by first appearance: int64 `[len(names)]`."""
    numbers: dict[object, int] = {}
    return _integers([numbers.setdefault(name, len(numbers)) for name in names])


def _integers(values: Sequence[int]) -> np.ndarray:
    """Return integers as an int64 array."""
    return np.array(values, np.int64)
