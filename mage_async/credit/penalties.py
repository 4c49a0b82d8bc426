"""What a turn is charged beside its return: for an invalid action, and for its length."""

import numpy as np

from mage_async.credit.turn_table import TurnTable


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
        float64 `[number of turns]`, in units of reward
    """
    over = np.clip(2.0 * table.num_tokens / max_tokens - 1.0, 0.0, 1.0)
    return format_penalty * ~table.is_valid + length_penalty * over
