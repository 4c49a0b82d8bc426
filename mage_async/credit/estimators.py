"""The advantage estimators a configuration may name, and where each takes its penalties.

Shapes: `N` turns of the batch.
"""

from dataclasses import replace

import numpy as np

from mage_async.config.schema import Advantage, Transcript
from mage_async.credit.advantages import advantages, minus_mean, minus_mean_of_others
from mage_async.credit.gigpo import gigpo, penalties_of
from mage_async.credit.turn_table import TurnTable
from mage_async.errors import ConfigError
from mage_async.trajectory import Kind

AS_CODED = ("group",)
"""The reference's episode cell; in it a turn without company keeps its score."""


def turn_advantages(
    table: TurnTable, rules: Advantage, *, max_action_tokens: int, max_reflection_tokens: int
) -> np.ndarray:
    """Advantages of all turns, penalties included: float64 `[N]`."""
    acts = table.kind == Kind.ACT
    taken = penalties_of(
        table,
        format_penalty=rules.format_penalty,
        length_penalty=rules.length_penalty,
        max_tokens=np.where(acts, max_action_tokens, max_reflection_tokens),
    )
    if rules.estimator == "gigpo":
        return _gigpo(table, rules, taken)
    return _compared(table, rules, taken)


def check(rules: Advantage, transcript: Transcript) -> None:
    """What an estimator cannot do, before any process starts.

    Raises:
        ConfigError: with the key, what was got and what to write.
    """
    if rules.estimator == "gigpo" and rules.scale not in ("none", rules.baseline):
        raise ConfigError(
            'advantage.scale must be "none" or equal to advantage.baseline with the estimator '
            f'"gigpo", which divides by the deviation inside each cell; got {rules.scale}'
        )
    if rules.estimator != "gigpo" and rules.penalise == "score":
        raise ConfigError(
            'advantage.penalise = "score" needs the estimator "gigpo", the only one with a score '
            f'beside the return; with {rules.estimator!r} write "return" or "advantage"'
        )
    if rules.length_penalty and transcript.max_action_tokens < 2:
        raise ConfigError(
            "advantage.length_penalty punishes completions over half their limit, and limits of "
            "one token have no half: set it to 0, or raise transcript.max_action_tokens"
        )


def check_group(rules: Advantage, trials_per_group: int) -> None:
    """Refuse groups in which nothing is compared with anything, so that nothing is learned.

    Raises:
        ConfigError: with the key, what was got and what to write.
    """
    alone = rules.estimator == "leave_one_out" or {"kind", "episode", "index"} <= set(
        rules.baseline
    )
    if trials_per_group == 1 and alone and "group" in rules.baseline and not rules.anchor_weight:
        raise ConfigError(
            "admission.trials_per_group must be at least 2 with advantage.baseline = "
            f"{rules.baseline} and the estimator {rules.estimator!r}, got 1: a turn is compared "
            "with turns of other trials of its group, and every advantage would be 0"
        )


def _compared(table: TurnTable, rules: Advantage, taken: np.ndarray) -> np.ndarray:
    is_inside = rules.penalise == "return"
    rows = replace(table, returns=table.returns - taken) if is_inside else table
    values = advantages(
        rows,
        baseline=tuple(rules.baseline),
        scale=None if rules.scale == "none" else tuple(rules.scale),
        weight=rules.weight,
        epsilon=rules.epsilon,
        anchor_weight=rules.anchor_weight,
        centre=minus_mean_of_others if rules.estimator == "leave_one_out" else minus_mean,
    )
    return values if is_inside else values - taken


def _gigpo(table: TurnTable, rules: Advantage, taken: np.ndarray) -> np.ndarray:
    is_inside = rules.penalise != "advantage"
    values = gigpo(
        table,
        taken if is_inside else None,
        episode_key=tuple(rules.baseline),
        weight=rules.weight,
        anchor_weight=rules.anchor_weight,
        divides=rules.scale != "none",
        keep_lone_scores=tuple(rules.baseline) == AS_CODED,
        penalise_returns=rules.penalise == "return",
    )
    return values if is_inside else values - taken
