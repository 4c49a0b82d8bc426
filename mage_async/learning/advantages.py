"""Returns to advantages: which turns a turn is compared with, and on which scale.

A *key* says which turns are compared. It is a list of columns of the `TurnTable`: rows that agree
in all of them form a cell and share a baseline. ("group",) is GRPO's; ("group", "kind", "episode",
"index") compares the same turn of trials on the same task, reflections with reflections; "seat" and
"member" keep apart what is not the same game. A turn alone in its cell has nothing to be compared
with and gets zero. Equal returns give exactly zero.

Keys become numbers of cells on the host; means, deviations and scales are computed by
`mage_kernels` where the learner's model lies, in float64.

Shapes: `N` turns of the batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mage_async.config.schema import Advantage
from mage_async.config.sections.credit import Key
from mage_async.credit.penalties import penalties_of
from mage_async.credit.turn_table import TurnTable, joint_cells
from mage_async.trajectory import Kind
from mage_kernels import Cells, minus_baseline, over_rms

Weight = Literal["trial", "sample"]
"""How a mean counts: each trial once however many turns it has in the cell, or each turn once."""

AS_CODED = ("group",)
"""The episode cell of GiGPO's reference; in it a turn without company keeps its score."""


def turn_advantages(
    table: TurnTable,
    rules: Advantage,
    *,
    max_action_tokens: int,
    max_reflection_tokens: int,
    device: torch.device | str,
) -> Tensor:
    """Advantages of all turns, penalties included: float64 `[N]` on `device`."""
    acts = table.kind == Kind.ACT
    taken = penalties_of(
        table,
        format_penalty=rules.format_penalty,
        length_penalty=rules.length_penalty,
        max_tokens=np.where(acts, max_action_tokens, max_reflection_tokens),
    )
    inside = _penalised(table, rules, taken)
    values = _estimated(inside, rules, device)
    return values - _on(device, taken) if rules.penalise == "advantage" else values


def compared(
    table: TurnTable,
    *,
    baseline: Sequence[Key],
    scale: Sequence[Key] | None,
    weight: Weight,
    epsilon: float,
    anchor_weight: float = 0.0,
    leave_one_out: bool = False,
    device: torch.device | str,
) -> Tensor:
    """Return minus baseline, plus the anchor term, divided by how much their sum varies.

    The anchor term is GiGPO's step level: a turn's return against those of turns that were taken in
    the same state of the group, whatever the episode (MAGE's global anchor). A state met once gives
    zero.

    Args:
        baseline: the key whose cells share a baseline.
        scale: the key over which the root mean square is pooled: () the whole batch, ("group",)
            GRPO, ("member",) agent-specific. None leaves advantages in units of reward.
        weight: how turns count in both means.
        epsilon: added to the root mean square, in units of reward.
        anchor_weight: how much of the anchor term is added before scaling.
        leave_one_out: the baseline is the mean of the *other* trials of the cell (RLOO).

    Returns:
        float64 `[N]` on `device`
    """
    returns = _on(device, table.returns)
    cells = _cells(table, baseline, weight, device, has_parts=leave_one_out)
    values = minus_baseline(returns, cells, leave_one_out=leave_one_out)
    if anchor_weight:
        states = _cells(table, ("group", "anchor"), "sample", device)
        values = values + anchor_weight * minus_baseline(returns, states)
    if scale is None:
        return values
    return over_rms(values, _cells(table, scale, weight, device), returns, epsilon)


def gigpo(
    table: TurnTable,
    *,
    episode_key: Sequence[Key] = AS_CODED,
    anchor_key: Sequence[Key] = ("group", "member", "anchor"),
    weight: Weight = "sample",
    anchor_weight: float = 1.0,
    divides: bool = False,
    keep_lone_scores: bool = True,
    device: torch.device | str,
) -> Tensor:
    """GiGPO (arXiv 2505.10978) as LaMer and MAGE run it: score against group, return against state.

        A = (s - mean s over the episode cell) + w (G - mean G over the state cell)

    s is the episode's score, G the return. With the defaults, and the turn's penalties taken from
    its score, it is MAGE's code to rounding (recorded in the tests): nothing is compared across
    opponents. So are these of its habits:

    - Means are over turns, so long trials weigh more, and a reflection enters the first one with
      score 0: in groups that do well a reflection is pushed down, whatever it says. ("group",
      "kind") and weight "trial" repair both.
    - Seats share a mean, though they are different games. "seat" in both keys keeps them apart.
    - A turn alone in its episode cell keeps its whole score. `keep_lone_scores=False` gives it
      zero.

    Args:
        anchor_key: without "member" it is LaMer's; with "episode" in it, anchors are local.
        divides: divide each term by its cell's standard deviation (`mean_std_norm`).

    Returns:
        float64 `[N]` on `device`; in units of reward unless divided
    """
    episodes = _cells(table, episode_key, weight, device)
    states = _cells(table, anchor_key, weight, device)
    level = minus_baseline(
        _on(device, table.episode_score),
        episodes,
        keep_lone=keep_lone_scores,
        divide_by_std=divides,
    )
    term = minus_baseline(_on(device, table.returns), states, divide_by_std=divides)
    return level + anchor_weight * term


def _penalised(table: TurnTable, rules: Advantage, taken: np.ndarray) -> TurnTable:
    """The table with penalties where they are taken before anything is compared."""
    if rules.penalise == "return":
        return replace(
            table, returns=table.returns - taken, episode_score=table.episode_score - taken
        )
    if rules.penalise == "score":
        return replace(table, episode_score=table.episode_score - taken)
    return table


def _estimated(table: TurnTable, rules: Advantage, device: torch.device | str) -> Tensor:
    key = tuple(rules.baseline)
    if rules.estimator == "gigpo":
        return gigpo(
            table,
            episode_key=key,
            weight=rules.weight,
            anchor_weight=rules.anchor_weight,
            divides=rules.scale != "none",
            keep_lone_scores=key == AS_CODED,
            device=device,
        )
    return compared(
        table,
        baseline=key,
        scale=None if rules.scale == "none" else tuple(rules.scale),
        weight=rules.weight,
        epsilon=rules.epsilon,
        anchor_weight=rules.anchor_weight,
        leave_one_out=rules.estimator == "leave_one_out",
        device=device,
    )


def _cells(
    table: TurnTable,
    key: Sequence[Key],
    weight: Weight,
    device: torch.device | str,
    *,
    has_parts: bool = False,
) -> Cells:
    """The cells of a key; parts, a trial's turns in a cell, where they are needed."""
    ids = table.cells(key)
    by_trial = weight == "trial"
    parts = joint_cells(ids, table.trial) if by_trial or has_parts else None
    return Cells(
        torch.from_numpy(ids),
        _count(ids),
        None if parts is None else torch.from_numpy(parts),
        0 if parts is None else _count(parts),
        counts_parts=by_trial,
    ).to(device)


def _count(ids: np.ndarray) -> int:
    return int(ids.max(initial=-1)) + 1


def _on(device: torch.device | str, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
