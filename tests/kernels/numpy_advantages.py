"""Advantages in numpy: the truth that the learner's, by torch or Triton, are held against.

A *key* says which turns are compared. It is a tuple of columns of the `TurnTable`: rows that agree
in all of them form a cell and share a baseline. ("group",) is GRPO's; ("group", "kind", "episode",
"index") compares the same turn of trials on the same task, reflections with reflections; "seat" and
"member" keep apart what is not the same game. A turn alone in its cell has nothing to be compared
with and gets zero.

Equal returns give exactly zero: values are taken relative to one of their cell before any mean is
formed, so that a mean's rounding cannot become a gradient.

Shapes: `N` turns of the batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import msgspec
import numpy as np

from mage_async.config.schema import Transcript
from mage_async.credit.turn_table import Key, TurnTable, joint_cells
from mage_async.learning.advantages import Advantage
from mage_async.trajectory import Kind

Weight = Literal["trial", "sample"]
"""How a mean counts: each turn once, or each trial once however many turns it has in the cell."""

ROUNDING = 1e-12
"""Spread below this share of the largest return is rounding of equal returns, and not scaled up."""


EPSILON = 1e-6
"""Of GiGPO's reference, beside a standard deviation."""

AS_CODED = ("group",)
"""The reference's episode cell; in it a turn without company keeps its score."""


class Centre(Protocol):
    """A way to subtract a baseline inside each cell."""

    def __call__(
        self, values: np.ndarray, cells: np.ndarray, trials: np.ndarray, weight: Weight
    ) -> np.ndarray:
        """Values `[N]` minus their baseline; `cells` and `trials` number each row's own."""
        ...


def turn_advantages(table: TurnTable, rules: Advantage, limits: Transcript) -> np.ndarray:
    """Advantages of all turns, penalties included: float64 `[N]`."""
    acts = table.kind == Kind.ACT
    longest = np.where(acts, limits.max_action_tokens, limits.max_reflection_tokens)
    taken = rules.penalties(table, longest)
    if rules.value == "trial_score":
        return _by_trial_score(table, rules, taken)
    if rules.kind == "gigpo":
        return _gigpo(table, rules, taken)
    return _compared(table, rules, taken)


def advantages(
    table: TurnTable,
    *,
    baseline: Sequence[Key],
    scale: Sequence[Key] | None,
    weight: Weight,
    epsilon: float,
    anchor_weight: float = 0.0,
    states: np.ndarray | None = None,
    centre: Centre | None = None,
    over_tokens: bool = False,
) -> np.ndarray:
    """Return minus baseline, plus the anchor term, divided by how much their sum varies.

    Args:
        baseline: the key whose cells share a baseline.
        scale: the key over which the root mean square is pooled: () the whole batch, ("group",)
            GRPO, ("member",) agent-specific. None leaves advantages in units of reward.
        weight: how turns count in both means.
        epsilon: added to the root mean square, in units of reward.
        anchor_weight: how much of the comparison within states is added before scaling.
        states: `[N]`, the state that each turn was taken in; those of a global anchor unless given.
        centre: `minus_mean` unless told; or `minus_mean_of_others`.
        over_tokens: subtract another mean before scaling, over the tokens that share a scale, and
            scale over tokens too: REINFORCE++.

    Returns:
        float64 `[N]`
    """
    centre = centre or minus_mean
    centred = centre(table.returns, table.cells(baseline), table.trial, weight)
    if anchor_weight:
        states = table.cells(("group", "anchor")) if states is None else states
        centred = centred + anchor_weight * minus_mean(table.returns, states, table.trial, "sample")
    if scale is None:
        return centred
    cells = table.cells(scale)
    if not over_tokens:
        return _scaled(centred, table, cells, _row_weights(cells, table.trial, weight), epsilon)
    rows = table.num_sampled.astype(float)
    rows[np.bincount(cells, rows)[cells] == 0] = 1.0  # turns without a sampled token have no loss
    relative = _relative(centred, cells)
    means = np.bincount(cells, rows * relative) / np.bincount(cells, rows)
    return _scaled(relative - means[cells], table, cells, rows, epsilon)


def minus_mean(
    values: np.ndarray, cells: np.ndarray, trials: np.ndarray, weight: Weight
) -> np.ndarray:
    """Subtract the mean of each cell."""
    relative, rows = _relative(values, cells), _row_weights(cells, trials, weight)
    means = np.bincount(cells, rows * relative) / np.bincount(cells, rows)
    return relative - means[cells]


def minus_mean_of_others(
    values: np.ndarray, cells: np.ndarray, trials: np.ndarray, weight: Weight
) -> np.ndarray:
    """Subtract the mean over the *other* trials of each cell: RLOO.

    The baseline is independent of the own trial, and so unbiased. A trial alone in its cell gets
    zero.
    """
    relative, rows = _relative(values, cells), _row_weights(cells, trials, weight)
    own = joint_cells(cells, trials)
    sums = np.bincount(cells, rows * relative)[cells] - np.bincount(own, rows * relative)[own]
    counts = np.bincount(cells)[cells] - np.bincount(own)[own]
    totals = np.bincount(cells, rows)[cells] - np.bincount(own, rows)[own]
    means = np.divide(sums, totals, out=np.zeros_like(sums), where=counts > 0)
    return np.where(counts > 0, relative - means, 0.0)


def gigpo(
    table: TurnTable,
    penalties: np.ndarray | None = None,
    *,
    episode_key: Sequence[Key] = ("group",),
    states: np.ndarray | None = None,
    weight: Weight = "sample",
    anchor_weight: float = 1.0,
    divides: bool = False,
    keep_lone_scores: bool = True,
    penalise_returns: bool = False,
) -> np.ndarray:
    """MAGE's agent-specific normalisation: nothing is compared across opponents.

    Args:
        penalties: `[N]`, in units of reward, taken from each turn's own score.
        states: `[N]`, the state that each turn was taken in; unless given, MAGE's, which are of
            one member.
        divides: divide each term by its cell's standard deviation (`mean_std_norm`).

    Returns:
        float64 `[N]`; in units of reward unless divided
    """
    taken = np.zeros(len(table)) if penalties is None else penalties
    cells = table.cells(episode_key)
    scores = table.episode_score - taken
    level = minus_mean(scores, cells, table.trial, weight)
    if keep_lone_scores:
        level = np.where(np.bincount(cells)[cells] == 1, scores, level)
    returns = table.returns - taken if penalise_returns else table.returns
    if states is None:
        states = table.cells(("group", "member", "anchor"))
    term = minus_mean(returns, states, table.trial, "sample")
    if divides:
        level, term = _divided(level, scores, cells), _divided(term, returns, states)
    return level + anchor_weight * term


def _scaled(
    centred: np.ndarray, table: TurnTable, cells: np.ndarray, rows: np.ndarray, epsilon: float
) -> np.ndarray:
    """Divide by each cell's root mean square plus `epsilon`; where nothing varies, zero."""
    rms = np.sqrt(np.bincount(cells, rows * centred**2) / np.bincount(cells, rows))
    largest = np.zeros(len(rms))
    np.maximum.at(largest, cells, np.abs(table.returns))
    varies = rms > ROUNDING * largest
    factors = np.divide(1.0, rms + epsilon, out=np.zeros_like(rms), where=varies)
    return centred * factors[cells]


def _relative(values: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Values minus the first one of their cell: exactly zero where all are equal."""
    first = np.unique(cells, return_index=True)[1]
    return values - values[first][cells]


def _row_weights(cells: np.ndarray, trials: np.ndarray, weight: Weight) -> np.ndarray:
    """What each row counts in the means of its cell: float64 `[N]`."""
    if weight == "sample":
        return np.ones(len(cells))
    own = joint_cells(cells, trials)
    return 1.0 / np.bincount(own)[own]


def _divided(centred: np.ndarray, values: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Divide by the unbiased standard deviation of each cell's turns; alone in one, by 1."""
    counts = np.bincount(cells)
    spread = values - (np.bincount(cells, values) / counts)[cells]
    variance = np.bincount(cells, spread**2) / np.maximum(1, counts - 1)
    deviation = np.where(counts == 1, 1.0, np.sqrt(variance))
    return centred / (deviation + EPSILON)[cells]


def _states(table: TurnTable, rules: Advantage, key: Sequence[Key]) -> np.ndarray:
    """Number the states of turns by the kind of anchor: int64 `[N]`."""
    if rules.anchor == "coded":  # all reflections of a group are in one state
        key = [each for each in key if each != "seat"]
        anchors = np.where(table.kind == Kind.REFLECT, -1, table.anchor)
        table = replace(table, anchor=anchors)
    local = ("episode",) if rules.anchor == "local" else ()
    return table.cells((*key, *local))


def _by_trial_score(table: TurnTable, rules: Advantage, taken: np.ndarray) -> np.ndarray:
    """Give each turn its trial's advantage: the sum of its episodes' scores, compared."""
    scores = np.zeros(len(table))
    for trial in np.unique(table.trial):
        own = table.trial == trial
        acts = own & (table.kind == Kind.ACT)
        rows = np.flatnonzero(acts)[::-1]
        episodes = {table.episode[row]: table.episode_score[row] for row in rows}
        charge = sum(taken[own]) if rules.penalise == "return" else 0.0
        scores[own] = sum(episodes[episode] for episode in sorted(episodes)) - charge
    rules = msgspec.structs.replace(rules, value="return")
    return _compared(replace(table, returns=scores), rules, taken, is_charged=True)


def _compared(
    table: TurnTable, rules: Advantage, taken: np.ndarray, *, is_charged: bool = False
) -> np.ndarray:
    is_inside = rules.penalise == "return"
    subtracts = is_inside and not is_charged
    rows = replace(table, returns=table.returns - taken) if subtracts else table
    values = advantages(
        rows,
        baseline=tuple(rules.baseline),
        scale=None if rules.scale == "none" else tuple(rules.scale),
        weight=rules.weight,
        epsilon=rules.epsilon,
        anchor_weight=rules.anchor_weight,
        states=_states(table, rules, ("group", "seat", "anchor")),
        centre=minus_mean_of_others if rules.kind == "leave_one_out" else minus_mean,
        over_tokens=rules.kind == "token_normalised",
    )
    return values if is_inside else values - taken


def _gigpo(table: TurnTable, rules: Advantage, taken: np.ndarray) -> np.ndarray:
    is_inside = rules.penalise != "advantage"
    values = gigpo(
        table,
        taken if is_inside else None,
        episode_key=tuple(rules.baseline),
        states=_states(table, rules, ("group", "member", "seat", "anchor")),
        weight=rules.weight,
        anchor_weight=rules.anchor_weight,
        divides=rules.scale != "none",
        keep_lone_scores=tuple(rules.baseline) == AS_CODED,
        penalise_returns=rules.penalise == "return",
    )
    return values if is_inside else values - taken
