"""What a policy with an explorer and an exploiter cannot be."""

from mage_async.config.schema import Config, Embedded
from mage_async.errors import ConfigError


def check(config: Config) -> None:
    """Two roles are two adapters, routed token by token by engines that can.

    Raises:
        ConfigError: with the key, what was got and what to write.
    """
    if not config.policy.separate_exploration:
        return
    for key, is_there, remedy in _refused(config):
        if is_there:
            raise ConfigError(
                f"policy.separate_exploration: {key}: {remedy}, or set "
                "policy.separate_exploration = false"
            )


def _refused(config: Config) -> list[tuple[str, bool, str]]:
    """What is wrong, whether it is so, and what to do."""
    population, stages = config.population, config.curriculum
    longest = max(stages.episodes) if stages and stages.episodes else config.trial.episodes
    return [
        (
            "the explorer and the exploiter are low-rank adapters, and policy.lora is absent",
            config.policy.lora is None,
            "set policy.lora.rank = 16",
        ),
        (
            "SGLang cannot compute the tokens of one context by two adapters",
            not isinstance(config.engine, Embedded),
            'set engine.kind = "embedded"',
        ),
        (
            "a trial of one episode has nothing before its last",
            longest == 1,
            "set trial.episodes to at least 2",
        ),
        (
            "a version of the policy in the opponent's seat has one role",
            population.rivals > 0 or population.both_seats > 0,
            "set population.rivals = 0 and population.both_seats = 0",
        ),
        (
            "soft actor-critic trains all weights",
            config.sac is not None,
            "leave the section sac out",
        ),
        (
            'transport.weights = "nccl" has not been tried with two adapters',
            config.transport.weights == "nccl",
            'set transport.weights = "disk" or "tensor"',
        ),
    ]
