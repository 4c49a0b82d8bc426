"""What a learner of several ranks cannot do."""

from mage_async.config.schema import Config
from mage_async.errors import ConfigError


def check(config: Config) -> None:
    """Refuse what ranks would compute otherwise than one process.

    Raises:
        ConfigError: with the key, what was got and what to write.
    """
    if config.learner.ranks == 1:
        return
    for key, is_there, remedy in _refused(config):
        if is_there:
            raise ConfigError(
                f"learner.ranks = {config.learner.ranks}: {key} works in one process alone: "
                f"{remedy}, or set learner.ranks = 1"
            )


def _refused(config: Config) -> list[tuple[str, bool, str]]:
    """Keys, whether they are set, and what to do."""
    expert = config.expert
    return [
        ("policy.lora", config.policy.lora is not None, "leave the section out"),
        (
            'learner.optimizer_state = "8bit"',
            config.learner.optimizer_state == "8bit",
            "leave the key out",
        ),
        ("the section sac", config.sac is not None, "leave it out"),
        (
            'expert.form = "implicit"',
            expert is not None and expert.form == "implicit",
            'set expert.form = "irl"',
        ),
    ]
