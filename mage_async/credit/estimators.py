"""What the advantage estimators that a configuration may name cannot do.

`mage_async/learning/advantages.py` computes them.
"""

from mage_async.config.schema import Advantage, Transcript
from mage_async.errors import ConfigError


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
