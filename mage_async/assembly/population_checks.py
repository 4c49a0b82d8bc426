"""What a population of members, past versions and the policy itself cannot be."""

from mage_async.config.schema import Config, Embedded
from mage_async.environments.environment import Environment
from mage_async.environments.mix.parts import Mixed
from mage_async.errors import ConfigError
from mage_async.tasks.population import is_policy, name_of
from mage_async.trajectory import Task


def check(config: Config, environment: Environment) -> None:
    """No train member is held out; versions have a seat, weights and an engine; both seats of
    self-play are compared each with itself.

    Raises:
        ConfigError: with the key, what was got and what to write.
    """
    _check_members(config, environment)
    rules = config.population
    if not rules.rivals and not rules.both_seats:
        return
    name, seat = environment.facts.name, environment.seats()[0]
    if environment.duel(Task(name, name_of(0), 0, seat), 0) is None:
        key = "rivals" if rules.rivals else "both_seats"
        raise ConfigError(f"{name}: nobody can play the opponent's seat: set population.{key} = 0")
    if rules.rivals and (
        not isinstance(config.engine, Embedded) or config.transport.weights != "disk"
    ):
        raise ConfigError(
            "population.rivals: versions are held by the embedded engine and kept on disk: set "
            'engine.kind = "embedded" and transport.weights = "disk"'
        )
    if rules.rivals and config.credit.information_bonus:
        raise ConfigError(
            "credit.information_bonus: the environment's filter knows its members and no versions "
            "of the policy: set population.rivals = 0 or credit.information_bonus = 0"
        )
    has_two = rules.rivals_remember or rules.both_seats > 0
    if config.curriculum and config.curriculum.turns and has_two:
        raise ConfigError(
            "curriculum.turns ends an episode for the agent alone, and here both sides go on to "
            "the next: leave curriculum.turns out, or set population.rivals_remember = false and "
            "population.both_seats = 0"
        )
    if rules.both_seats:
        _check_both_seats(config)


def _check_members(config: Config, environment: Environment) -> None:
    name, rules = environment.facts.name, config.population
    train, heldout = (environment.members(split) for split in ("train", "heldout"))
    is_asked = rules.rivals or rules.both_seats or rules.matchmaker != "decks"
    if isinstance(environment, Mixed) and is_asked:
        raise ConfigError(
            "a mix has no population: its parts are not rated against each other; set "
            'population.rivals = 0, population.both_seats = 0 and population.matchmaker = "decks"'
        )
    if shared := set(train) & set(heldout):
        raise ConfigError(f"{name}: {min(shared)!r} cannot be trained on and held out")
    if taken := [each for each in (*train, *heldout) if is_policy(each)]:
        raise ConfigError(f"{name}: {taken[0]!r} is the name of a version of the policy")
    places = round((1 - rules.rivals) * config.admission.groups_per_step)
    if rules.matchmaker == "fixed" and len(train) > places:
        raise ConfigError(
            f'population.matchmaker = "fixed" has {places} places in a step for {len(train)} '
            "members, so some would never be met: raise admission.groups_per_step"
        )


def _check_both_seats(config: Config) -> None:
    """What training on both seats of one play needs."""
    rules, size = config.population, config.admission.trials_per_group
    if rules.rivals + rules.both_seats > 1:
        raise ConfigError(
            f"population.rivals + population.both_seats are shares of all groups: got "
            f"{rules.rivals:g} + {rules.both_seats:g}, at most 1"
        )
    if size % 2 or size < 4:
        raise ConfigError(
            "population.both_seats plays a group in pairs of trials, and compares those of a seat: "
            f"admission.trials_per_group must be even and at least 4, got {size}"
        )
    if "seat" not in config.advantage.baseline:
        raise ConfigError(
            "population.both_seats: the seats of a group are different games, so each needs a "
            'baseline of its own: add "seat" to advantage.baseline, got '
            f"{config.advantage.baseline}"
        )
    for key, got, wanted in (
        ("trial.stop_on_success", config.trial.stop_on_success, False),
        ("graph_memory.strategies", config.graph_memory.strategies, 0),
        ("credit.information_bonus", config.credit.information_bonus, 0.0),
    ):
        if got != wanted:
            raise ConfigError(
                f"population.both_seats: {key} is for one agent against the environment: set it to "
                f"{str(wanted).lower()}, or population.both_seats = 0"
            )
