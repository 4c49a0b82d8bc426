"""Whether a policy fits this machine's memory at all, and how long a group may take."""

from dataclasses import dataclass

import msgspec

from mage_async.config.schema import Config, Embedded, Pretrained, Tiny
from mage_async.errors import ConfigError

BYTES = {"float32": 4, "bfloat16": 2}
PATIENCE = 5.0
"""A deadline is at least so many times as long as what it is of takes by the first turns."""


@dataclass(frozen=True, slots=True)
class Size:
    """What of a policy fills memory."""

    num_weights: int
    kv_token_bytes: int
    """Bytes of the float32 keys and values of one token; 0 where it is not known."""


def tiny_size(shape: Tiny) -> Size:
    """Of a tiny policy, without its embedding, which has a row for each word of its environment."""
    head_size = shape.hidden_size // shape.heads
    attention = 2 * shape.hidden_size * head_size * (shape.heads + shape.kv_heads)
    block = attention + 3 * shape.hidden_size * shape.mlp_size
    return Size(shape.layers * block, 2 * 4 * shape.layers * shape.kv_heads * head_size)


def check_size(config: Config, size: Size, *, num_actors: int, memory_bytes: int) -> None:
    """Refuse a policy that does not fit beside the contexts of its engines.

    Activations and logits are not counted: `mage plan` does.

    Raises:
        ConfigError: what is needed, what there is, and which key to change.
    """
    num_engines = num_actors + bool(config.evaluation.every)
    tokens = config.engine.max_contexts * config.engine.max_tokens
    learner = size.num_weights * _bytes_a_weight(config)
    engines = 4 * size.num_weights * num_engines
    contexts = size.kv_token_bytes * tokens * num_engines
    needed = learner * (config.learner.device == "cpu")
    needed += (engines + contexts) * isinstance(config.engine, Embedded)
    if needed <= memory_bytes:
        return
    raise ConfigError(
        f"policy of {size.num_weights:,} weights: the learner needs {learner / 1e9:.1f} GB for "
        f"weights, gradients and optimizer, and {num_engines} engines, the evaluator's among them, "
        f"{engines / 1e9:.1f} GB for weights and {contexts / 1e9:.1f} GB for keys and values of "
        f"{config.engine.max_contexts} contexts each, but this machine has "
        f"{memory_bytes / 1e9:.1f} GB; {_advice(config, contexts, learner + engines)}"
    )


def _advice(config: Config, contexts: int, weights: int) -> str:
    if contexts > weights:
        return "lower engine.max_contexts or engine.max_tokens, or take fewer --actors"
    is_smaller = bool(config.policy.lora) or not isinstance(config.policy, Pretrained)
    advice = "take a smaller policy" if is_smaller else "set policy.lora.rank = 16"
    return f"{advice}, or fewer --actors"


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
