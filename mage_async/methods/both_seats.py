"""Play some groups from both seats, by the policy against itself, and train on both seats.

Each such play yields two trials of its group, one of each seat, with separate memories and returns;
`mage_async/trials/duels.py` plays them. The preset `mage_population` adds past versions of the
policy that remember the trial. Both go beyond MAGE (arXiv 2603.03680), whose population is a pool
of fixed opponents: `docs/methods/mage_population.md`.
"""

from typing import ClassVar

from mage_async.config.section import Section, Share
from mage_async.errors import ConfigError
from mage_async.methods.method import Method, overriding
from mage_async.tasks.league import name_of
from mage_async.trajectory import Task


class Settings(Section):
    """Self-play in which the policy plays both seats, each with a memory of its own, and is trained
    on both: each play yields two of the group's trials."""

    share: Share = 0.33
    """Share of groups that are self-play."""


BOTH_SEATS = {
    "methods.both_seats.share": 0.33,
    # Two pairs of trials at least; on cores a group has three trials by default.
    "admission.trials_per_group": 8,
    "advantage.baseline": ["group", "seat", "kind", "episode", "index"],
    "advantage.scale": ["member", "seat"],
}
"""Keys of a preset: a third of the groups is self-play, in pairs of trials, and the advantages of
each seat are normalised by themselves."""


class BothSeats(Method):
    """Let the policy play a share of the groups against itself."""

    Settings = Settings
    presets: ClassVar = {
        "both_seats": BOTH_SEATS,
        "mage_population": BOTH_SEATS
        | {
            "population.rivals": 0.17,
            "population.every": 5,
            "population.rivals_remember": True,
            "population.matchmaker": "progress",
        },
    }

    def self_play_share(self) -> float:
        """Return the configured share."""
        return float(self.settings.share)

    def check(self) -> None:
        """Refuse groups that cannot be played in pairs, and keys for one agent alone."""
        config, environment = self.config, self.environment
        rivals, size = config.population.rivals, config.admission.trials_per_group
        # Any past policy will do: this only tests whether one can take the opponent's seat.
        task = Task(environment.facts.name, name_of(0), 0, environment.seats()[0])
        if environment.duel(task, 0) is None:
            raise ConfigError(
                f"{environment.facts.name}: nobody can play the opponent's seat: leave "
                "methods.both_seats out"
            )
        if rivals + self.settings.share > 1:
            raise ConfigError(
                "population.rivals and methods.both_seats.share are shares of all groups, so "
                f"together they must be at most 1: got {rivals:g} + {self.settings.share:g}"
            )
        if size % 2 or size < 4:
            raise ConfigError(
                "methods.both_seats plays a group in pairs of trials, one of each seat, and "
                "compares trials of the same seat, so it needs two pairs: "
                f"admission.trials_per_group must be even and at least 4, got {size}"
            )
        if "seat" not in config.advantage.baseline:
            raise ConfigError(
                "methods.both_seats: the seats of a group are different games, so each needs a "
                'baseline of its own: add "seat" to advantage.baseline, got '
                f"{config.advantage.baseline}"
            )
        if config.trial.stop_on_success:
            raise ConfigError(
                "methods.both_seats: trial.stop_on_success is for one agent against the "
                "environment: set it to false, or leave methods.both_seats out"
            )
        if others := overriding(config, "guidance"):
            raise ConfigError(
                f"methods.both_seats: methods.{others[0]} is for one agent against the "
                "environment: leave one of the two out"
            )
