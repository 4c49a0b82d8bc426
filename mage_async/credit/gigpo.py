"""GiGPO's estimator (arXiv 2505.10978) as LaMer and MAGE run it: score against group, return
against state.

    A = (s - mean s over the episode cell) + w (G - mean G over the state cell)

s is the episode's score minus the turn's penalties, G the return. With the defaults it is the
reference's code to rounding (recorded in the tests), and so are these of its habits:

- Means are over turns, so long trials weigh more, and a reflection enters the first one with score
  0: in groups that do well a reflection is pushed down, whatever it says. ("group", "kind") and
  weight "trial" repair both.
- Seats share a mean, though they are different games. "seat" in both keys keeps them apart.
- Penalties reach the first term only. `penalise_returns` takes them from both.
- A turn alone in its episode cell keeps its whole score. `keep_lone_scores=False` gives it zero.

Shapes: `N` turns of the batch.
"""

from collections.abc import Sequence

import numpy as np

from mage_async.config.sections.credit import Key
from mage_async.credit.advantages import Weight, minus_mean
from mage_async.credit.turn_table import TurnTable

EPSILON = 1e-6
"""The reference's, beside a standard deviation."""


def gigpo(
    table: TurnTable,
    penalties: np.ndarray | None = None,
    *,
    episode_key: Sequence[Key] = ("group",),
    anchor_key: Sequence[Key] = ("group", "member", "anchor"),
    weight: Weight = "sample",
    anchor_weight: float = 1.0,
    divides: bool = False,
    keep_lone_scores: bool = True,
    penalise_returns: bool = False,
) -> np.ndarray:
    """MAGE's agent-specific normalisation: nothing is compared across opponents.

    Args:
        penalties: `[N]`, in units of reward, taken from each turn's own score; see `penalties_of`.
        anchor_key: without "member" it is LaMer's; with "episode" in it, anchors are local.
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
    states = table.cells(anchor_key)
    term = minus_mean(returns, states, table.trial, weight)
    if divides:
        level, term = _divided(level, scores, cells), _divided(term, returns, states)
    return level + anchor_weight * term


def penalties_of(
    table: TurnTable,
    *,
    format_penalty: float,
    length_penalty: float,
    max_tokens: np.ndarray | int,
) -> np.ndarray:
    """What a turn is charged for an invalid action, and for a completion over half its limit.

    The second grows linearly from 0 at `max_tokens / 2` to `length_penalty` at `max_tokens`, which
    may differ by turn (MAGE, `apply_length_penalty`).

    Returns:
        float64 `[N]`, in units of reward
    """
    over = np.clip(2.0 * table.num_tokens / max_tokens - 1.0, 0.0, 1.0)
    return format_penalty * ~table.is_valid + length_penalty * over


def _divided(centred: np.ndarray, values: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Divide by the unbiased standard deviation of each cell's turns; alone in one, by 1."""
    counts = np.bincount(cells)
    spread = values - (np.bincount(cells, values) / counts)[cells]
    variance = np.bincount(cells, spread**2) / np.maximum(1, counts - 1)
    deviation = np.where(counts == 1, 1.0, np.sqrt(variance))
    return centred / (deviation + EPSILON)[cells]
