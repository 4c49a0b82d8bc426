"""Compute the penalties of a turn: for an invalid action and for a long completion."""

import numpy as np

from mage_async.credit.turn_table import TurnTable


def penalties_of(
    table: TurnTable,
    *,
    format_penalty: float,
    length_penalty: float,
    max_tokens: np.ndarray | int,
) -> np.ndarray:
    """Return each turn's penalty for an invalid action and for a long completion, summed.

    The penalty for length grows linearly from 0 at half of `max_tokens` to `length_penalty` at
    `max_tokens`, which may differ by turn (MAGE, `apply_length_penalty`).

    Returns:
        float64 `[N]`, in units of reward.
    """
    over = np.clip(2.0 * table.num_tokens / max_tokens - 1.0, 0.0, 1.0)
    return format_penalty * ~table.is_valid + length_penalty * over
