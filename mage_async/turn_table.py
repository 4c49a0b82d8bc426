"""All turns of a batch as columns, so that baselines are a few array operations.

Shapes: `N` turns of all trials of all groups, in the order of `group.trials`, then `trial.turns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from mage_async.credit import Credit
from mage_async.trajectory import Group, Kind, Trial, Turn

Key = Literal["group", "member", "seat", "kind", "episode", "index", "anchor"]


@dataclass(frozen=True, slots=True, eq=False)
class TurnTable:
    """One row per turn; every column is an array `[N]`.

    Group, trial, member and anchor are numbered anew in every batch.
    """

    group: np.ndarray
    """int64: which group of the batch"""
    trial: np.ndarray
    """int64: which trial, counted over the batch"""
    member: np.ndarray
    """int64: whom the trial faced"""
    seat: np.ndarray
    """int64"""
    kind: np.ndarray
    """int64: `Kind`"""
    episode: np.ndarray
    """int64"""
    index: np.ndarray
    """int64: position among the turns of its kind in its episode"""
    anchor: np.ndarray
    """int64: the state it was taken in; all reflections share one"""
    returns: np.ndarray
    """float64"""
    episode_score: np.ndarray
    """float64: undiscounted sum of what its episode's turns are paid; 0 for a reflection"""
    is_valid: np.ndarray
    """bool"""
    num_tokens: np.ndarray
    """int64: length of the completion"""

    def __len__(self) -> int:
        return len(self.returns)

    def cells(self, key: Sequence[Key]) -> np.ndarray:
        """Number the cells of a key, from 0: rows that agree in all its columns are in one cell.

        Returns:
            int64 `[N]`; an empty key makes a single cell.
        """
        cells = np.zeros(len(self), np.int64)
        for name in key:
            cells = joint_cells(cells, getattr(self, name))
        return cells

    def by_trial(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut values `[N]` into one piece per trial, in the order of its turns."""
        return np.split(values, np.flatnonzero(np.diff(self.trial)) + 1)


def joint_cells(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Number the distinct pairs of two id columns, from 0: int64 `[N]`."""
    distinct, ids = np.unique(second, return_inverse=True)
    return np.unique(first * len(distinct) + ids, return_inverse=True)[1]


def build_table(
    groups: Sequence[Group], credit: Credit, *, turn_discount: float, episode_discount: float
) -> TurnTable:
    """Credit every trial of a batch and lay out its turns as columns."""
    trials = [(number, trial) for number, group in enumerate(groups) for trial in group.trials]
    worth = [
        _worth(trial, credit, turn_discount=turn_discount, episode_discount=episode_discount)
        for _, trial in trials
    ]
    turns = list(chain.from_iterable(trial.turns for _, trial in trials))
    counts = [len(trial.turns) for _, trial in trials]
    members = _ids([(trial.task.environment, trial.task.member) for _, trial in trials])
    return TurnTable(
        group=np.repeat(_integers([number for number, _ in trials]), counts),
        trial=np.repeat(np.arange(len(trials)), counts),
        member=np.repeat(members, counts),
        seat=np.repeat(_integers([trial.task.seat for _, trial in trials]), counts),
        **_turn_columns(turns),
        returns=np.array([value for values, _ in worth for value in values], np.float64),
        episode_score=np.array([score for _, scores in worth for score in scores], np.float64),
    )


def _turn_columns(turns: Sequence[Turn]) -> dict[str, np.ndarray]:
    """The columns that a turn says by itself."""
    return {
        "kind": _integers([turn.kind for turn in turns]),
        "episode": _integers([turn.episode for turn in turns]),
        "index": _integers([turn.index for turn in turns]),
        "anchor": _ids([turn.anchor if turn.kind is Kind.ACT else None for turn in turns]),
        "is_valid": np.array([turn.is_valid for turn in turns], bool),
        "num_tokens": _integers([turn.stop - turn.start for turn in turns]),
    }


def _worth(
    trial: Trial, credit: Credit, *, turn_discount: float, episode_discount: float
) -> tuple[list[float], list[float]]:
    """Return and episode score of every turn of a trial, in order."""
    credited = credit(
        *_played(trial), turn_discount=turn_discount, episode_discount=episode_discount
    )
    returns: list[float] = []
    scores: list[float] = []
    for opening, acts, score in zip(
        credited.reflections, credited.acts, credited.scores, strict=True
    ):
        if opening is not None:
            returns.append(opening)
            scores.append(0.0)
        returns += acts
        scores += [score] * len(acts)
    return returns, scores


def _played(trial: Trial) -> tuple[list[list[float]], list[bool]]:
    """Rewards of every episode that was played, and whether a reflection opens it.

    A reflection looks back on one episode and opens the next: that of the act after it.
    """
    rewards: dict[int, list[float]] = {}
    for turn in trial.turns:
        if turn.kind is Kind.ACT:
            rewards.setdefault(turn.episode, []).append(turn.reward)
    opened = {after.episode for turn, after in pairwise(trial.turns) if turn.kind is Kind.REFLECT}
    return list(rewards.values()), [episode in opened for episode in rewards]


def _ids(names: Sequence[object]) -> np.ndarray:
    """Number names by first appearance: int64 `[len(names)]`."""
    numbers: dict[object, int] = {}
    return _integers([numbers.setdefault(name, len(numbers)) for name in names])


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)
