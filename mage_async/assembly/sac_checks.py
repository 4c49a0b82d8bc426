"""What soft actor-critic cannot do, and the keys that it has no use for."""

from mage_async.config.schema import Config
from mage_async.environments.calls import SlowPlay
from mage_async.environments.environment import Environment
from mage_async.environments.mix.parts import Mixed
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

CREDITS = ("single_episode", "cumulative_code")


def check(config: Config, environment: Environment) -> None:
    """Refuse what would be ignored, or would train on something else than what was played.

    Raises:
        ConfigError: with the key, what was got and what to write.
    """
    if config.sac is None:
        return
    for key, got, wanted in _wanted(config):
        if got not in wanted:
            said = " or ".join(_said(value) for value in wanted)
            raise ConfigError(
                f"sac: {key} must be {said}, got {_said(got)}: --method sac_glam sets what is "
                "needed, or leave the section sac out"
            )
    _check_environment(environment)


def _wanted(config: Config) -> list[tuple[str, object, tuple[object, ...]]]:
    """Keys, what they are, and what they may be."""
    learner, transcript, trial = config.learner, config.transcript, config.trial
    return [
        ("learner.correction", learner.correction.kind, ("none",)),
        ("learner.tokens_per_pass", learner.tokens_per_pass, (0,)),
        ("learner.kl", learner.kl, (0.0,)),
        ("learner.entropy", learner.entropy, (0.0,)),
        ("learner.final_entropy", learner.final_entropy, (0.0,)),
        ("credit.kind", config.credit.kind, CREDITS),
        ("credit.information_bonus", config.credit.information_bonus, (0.0,)),
        ("transcript.forced_tags", transcript.forced_tags, ("both",)),
        ("transcript.max_action_tokens", transcript.max_action_tokens, (1,)),
        ("trial.memory", trial.memory, ("none", "history")),
        ("trial.strategy", trial.strategy, ("none",)),
        ("sampling.top_p", config.sampling.top_p, (1.0,)),
        ("sampling.top_k", config.sampling.top_k, (0,)),
        ("population.rivals", config.population.rivals, (0.0,)),
        ("population.both_seats", config.population.both_seats, (0.0,)),
        ("expert", config.expert and "there", (None,)),
        ("curriculum", config.curriculum and "there", (None,)),
    ]


def _check_environment(environment: Environment) -> None:
    """Actions are words, and an episode can be played again by the learner."""
    name = environment.facts.name
    if isinstance(environment, Mixed):
        raise ConfigError("sac plays one environment, not a mix: name one of its parts")
    task = Task(name, environment.members("train")[0], 0, environment.seats()[0])
    play = environment.begin(task, 0)
    if isinstance(play, SlowPlay):
        raise ConfigError(
            f"sac: the learner plays each trial of {name!r} again, and its episodes may take long: "
            "sac needs an environment of the whole protocol, with `begin`"
        )
    if long := [action for action in play.legal_actions() if " " in action or "[" in action]:
        raise ConfigError(
            f"sac scores actions of one word, and {name!r} has {long[0]!r}: choose an environment "
            "whose `legal_actions` are words, or an option that makes them so"
        )


def _said(value: object) -> str:
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else f"{value:g}"
