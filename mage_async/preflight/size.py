"""Whether a policy fits this machine's memory at all, and how long a group may take."""

import msgspec

from mage_async.config.schema import Config, Embedded
from mage_async.errors import ConfigError

BYTES = {"float32": 4, "bfloat16": 2}
PATIENCE = 5.0
"""A deadline is at least so many times as long as what it is of takes by the first turns."""


def check_size(config: Config, *, num_weights: int, num_actors: int, memory_bytes: int) -> None:
    """Refuse a policy whose weights alone do not fit.

    Activations, keys and values are not counted: what passes here may still be too large.

    Raises:
        ConfigError: what is needed, what there is, and which key to change.
    """
    learner = num_weights * _bytes_a_weight(config)
    engines = 4 * num_weights * (num_actors + bool(config.evaluation.every))
    needed = learner * (config.learner.device == "cpu")
    needed += engines * isinstance(config.engine, Embedded)
    if needed > memory_bytes:
        advice = "take a smaller policy" if config.policy.lora else "set policy.lora.rank = 16"
        raise ConfigError(
            f"policy of {num_weights:,} weights: the learner needs {learner / 1e9:.1f} GB for "
            f"weights, gradients and optimizer and {num_actors} engines with the evaluator's "
            f"{engines / 1e9:.1f} GB, but this machine has {memory_bytes / 1e9:.1f} GB; "
            f"{advice}, or fewer --actors"
        )


def _bytes_a_weight(config: Config) -> int:
    """Of the learner: a trained weight has a gradient and AdamW's two moments beside it."""
    own = BYTES[config.policy.dtype]
    if config.policy.lora:
        return own
    return 2 * own + 2 * (1 if config.learner.optimizer_state == "8bit" else own)


def with_deadlines(config: Config, *, turn_s: float, num_turns: int) -> tuple[Config, list[str]]:
    """Raise deadlines that the policy would not keep on this machine.

    Args:
        turn_s: seconds of a turn of as many trials as a group has.
        num_turns: of a trial.

    Returns:
        The configuration, and a sentence for each key that was raised.
    """
    groups_at_once = max(1, config.engine.max_contexts // config.admission.trials_per_group)
    slowest_turn_s = turn_s * groups_at_once
    group_s = slowest_turn_s * num_turns
    engine, admission = config.engine, config.admission
    notes = []
    if engine.turn_deadline_s < PATIENCE * slowest_turn_s:
        engine = msgspec.structs.replace(engine, turn_deadline_s=PATIENCE * slowest_turn_s)
        notes.append(_raised("engine.turn_deadline_s", engine.turn_deadline_s, "turn"))
    if admission.grant_deadline_s < PATIENCE * group_s:
        admission = msgspec.structs.replace(admission, grant_deadline_s=PATIENCE * group_s)
        notes.append(_raised("admission.grant_deadline_s", admission.grant_deadline_s, "group"))
    return msgspec.structs.replace(config, engine=engine, admission=admission), notes


def _raised(key: str, seconds: float, what: str) -> str:
    return f"{key} is raised to {seconds:.0f}: a {what} may take {seconds / PATIENCE:.0f} s here"
