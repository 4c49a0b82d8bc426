"""Declare the keys, the requirements and the trainer of SAC-GLAM (arXiv 2410.12481).

The method trains on the environment's legal actions, which may have any number of tokens;
`docs/methods/sac_glam.md` has the equations.
"""

from typing import Any, ClassVar

from mage_async.config.schema import Config
from mage_async.config.section import Count, Natural, Positive, Section, Share
from mage_async.environments.environment import Environment
from mage_async.environments.mix import Mix
from mage_async.environments.user_calls import SlowPlay
from mage_async.errors import ConfigError
from mage_async.methods.method import Method, overriding
from mage_async.trajectory import Task

CREDITS = ("single_episode", "cumulative_code")
"""Values of `credit.kind` whose discounts the critic's targets can follow."""


class Settings(Section):
    """Soft actor-critic over the environment's actions (SAC-GLAM, arXiv 2410.12481), instead of
    the policy gradient and `learner.correction`."""

    entropy_coefficient: Positive = 0.02
    """Weight of a nat of the entropy over valid actions, in units of reward; if it is learned, the
    weight that training begins with."""
    target_entropy: Share = 0.0
    """Target entropy, as a share of the largest possible one (the log of the number of valid
    actions). `entropy_coefficient` is learned to reach it, with the learning rate `critic_rate`. 0:
    the coefficient is fixed."""
    target_steps: Count = 1
    """`n` of the critic's n-step targets: rewards of so many recorded steps, then the value of the
    state that follows."""
    batch: Count = 64
    """Trials that an update draws from the replay buffer; a step makes `learner.minibatches`
    updates."""
    capacity: Count = 2048
    """Trials in the replay buffer; the oldest make room. Checkpoints hold them."""
    hindsight: Natural = 4
    """Largest number of copies of a trial in which its goal is replaced by one that it reached; a
    draw takes the trial or one of its copies. 0: no goal is replaced."""
    critic_rate: Positive = 0.002
    """AdamW's learning rate of the Q heads."""
    target_rate: Share = 0.05
    """Part of the way that the target heads move towards the Q heads after each update."""


class SacGlam(Method):
    """Bring a trainer; `check` refuses keys that only the default trainer uses."""

    Settings = Settings
    presets: ClassVar = {
        "sac_glam": {
            "trial.episodes": 1,
            "credit.kind": "single_episode",
            "credit.turn_discount": 0.95,
            "learner.correction.kind": "none",
            "learner.entropy": 0.0,
            "learner.final_entropy": 0.0,
            "learner.max_tokens_per_microbatch": 0,
            "learner.minibatches": 16,
            "transcript.forced_tags": "both",
            "sampling.restricted": True,
            # Set to its default, because a table with any key turns its method on.
            "methods.sac_glam.hindsight": 4,
        }
    }
    metrics: ClassVar = {
        "actor_loss": ("reward", "Mean `sum pi (alpha log pi - Q)` over valid actions."),
        "critic_loss": ("reward²", "Mean half squared error of both Q heads."),
        "entropy_coefficient": ("reward/nat", "Weight of the entropy over valid actions."),
        "soft_value": ("reward", "Mean soft value of drawn states, by the target heads."),
        "replay_trials": ("trials", "In the replay buffer."),
        "replay_age_mean": ("steps", "Version being trained minus version of a drawn trial."),
        "replay_age_max": ("steps", "The largest such age of the step."),
    }

    def check(self) -> None:
        """Refuse keys that would be ignored, and environments whose actions cannot be scored."""
        for key, value, allowed in _restricted_keys(self.config):
            if value not in allowed:
                preset = self.presets["sac_glam"]
                is_preset = key in preset or f"{key}.kind" in preset
                sets = "--method sac_glam sets the key" if is_preset else "set the key to that"
                raise ConfigError(
                    f"methods.sac_glam: {key} must be {' or '.join(map(_shown, allowed))}, got "
                    f"{_shown(value)}: {sets}, or leave the table out"
                )
        ignored = ("horizon", "advisers", "turn_rewards", "loss_term", "self_play_share", "roles")
        others = [name for hook in ignored for name in overriding(self.config, hook)]
        if others:
            raise ConfigError(
                f"methods.sac_glam: it does not work together with methods.{others[0]}: leave one "
                "of the tables out"
            )
        _check_environment(self.environment)

    def trainer(self, model: Any, chat: Any) -> Any:
        """Return the trainer of soft actor-critic."""
        from mage_async.methods.sac_glam.trainer import SacTrainer  # with torch

        return SacTrainer(model, self.config, chat)


def _restricted_keys(config: Config) -> list[tuple[str, object, tuple[object, ...]]]:
    """Return the keys that the method restricts, with their values and the values that they may
    have.
    """
    learner, transcript, trial = config.learner, config.transcript, config.trial
    return [
        # These keys change the policy gradient, which soft actor-critic replaces.
        ("learner.correction", learner.correction.kind, ("none",)),
        ("learner.kl", learner.kl, (0.0,)),
        ("learner.entropy", learner.entropy, (0.0,)),
        ("learner.final_entropy", learner.final_entropy, (0.0,)),
        # The trials of an update go through the model together.
        ("learner.max_tokens_per_microbatch", learner.max_tokens_per_microbatch, (0,)),
        ("credit.kind", config.credit.kind, CREDITS),
        # Only actions are trained: a turn's sampled tokens are its action, without tags, and no
        # turn is a reflection, a note or a strategy.
        ("transcript.forced_tags", transcript.forced_tags, ("both",)),
        ("trial.memory", trial.memory, ("none", "history")),
        ("trial.strategy", trial.strategy, ("none",)),
        # The engine has to sample from the policy of the losses: all legal actions, no others.
        ("sampling.top_p", config.sampling.top_p, (1.0,)),
        ("sampling.top_k", config.sampling.top_k, (0,)),
        ("sampling.restricted", config.sampling.restricted, (True,)),
        # The learner plays each trial again, which it cannot do against a past policy.
        ("population.rivals", config.population.rivals, (0.0,)),
        ("trial.repeats", trial.repeats, ("same",)),
    ]


def _check_environment(environment: Environment) -> None:
    """Refuse actions that are not listed, and episodes that the learner cannot play again."""
    name = environment.facts.name
    if isinstance(environment, Mix):
        raise ConfigError(
            "methods.sac_glam plays one environment, not a mix: name one of its parts"
        )
    task = Task(name, environment.members("train")[0], 0, environment.seats()[0])
    play = environment.begin(task, 0)
    if isinstance(play, SlowPlay):
        raise ConfigError(
            f"methods.sac_glam: the learner plays each trial again, and episodes of {name!r} may "
            "take long: choose an environment that defines `begin`, not `reset` and `step`"
        )
    actions = play.legal_actions()
    pattern: str = getattr(play, "legal_pattern", "")
    # `is_whole` is False if more actions are legal than are listed.
    if not actions or not getattr(actions, "is_whole", True) or pattern:
        raise ConfigError(
            f"methods.sac_glam scores all legal actions, and {name!r} does not list them: choose "
            "an environment with `legal_actions`"
        )


def _shown(value: object) -> str:
    """Return a value as it is written in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
