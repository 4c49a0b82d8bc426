"""Populations that cannot be are refused before anything runs."""

from dataclasses import replace

import pytest

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.environments.catalogue import load
from mage_async.environments.games.rps import Rps
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

SEATS = 'advantage.baseline=["group", "seat", "kind", "episode", "index"]'


def test_who_is_trained_on_is_not_held_out_and_nobody_has_a_versions_name() -> None:
    options = '{train = ["random"], heldout = ["random", "cfr"]}'
    changes = ["environment.name=openspiel", f"environment.options={options}"]
    with pytest.raises(ConfigError, match="'random' cannot be trained on and held out"):
        check(config_file.load(config_file.find("kuhn"), changes))
    for shared, sentence in (
        (f"{__name__}:Shared", "'fixed-paper' cannot be trained on and held out"),
        (f"{__name__}:Named", "'policy-3' is the name of a version of the policy"),
        (f"{__name__}:Joined", r"must not have ' \| ' in it, .+ and 'ls \| wc' has"),
    ):
        changes = [f"environment.name={shared}", "environment.options={}"]
        with pytest.raises(ConfigError, match=sentence):
            check(config_file.load(config_file.find("quickstart"), changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["population.rivals=0.5"], "nobody can play .+, or give the environment `duel`"),
        (["population.matchmaker=fixed", "admission.groups_per_step=4"], "has 4 places in a step"),
        # Past policies meet round(0.5 * 7) = 4 groups of a step.
        (
            [
                "population.matchmaker=fixed",
                "population.rivals=0.5",
                "admission.groups_per_step=7",
            ],
            "has 3 places in a step",
        ),
        (
            [
                "population.matchmaker=fixed",
                "population.rivals=0.01",
                "admission.groups_per_step=48",
            ],
            "at most half a group, .+ none would ever be met",
        ),
    ],
)
def test_what_a_population_cannot_do_is_said_before_anything_runs(
    changes: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(config_file.load(config_file.find("scout"), changes))


@pytest.mark.parametrize("changes", [["transport.weights=tensor"], ["engine.kind=sglang"]])
def test_versions_are_held_by_our_engine_and_kept_on_disk(changes: list[str]) -> None:
    with pytest.raises(ConfigError, match="only the embedded engine serves past policies"):
        check(config_file.load(config_file.find("kuhn"), ["population.rivals=0.5", *changes]))


def test_a_filter_of_members_is_not_asked_about_versions() -> None:
    changes = ["population.rivals=0.5", "methods.metacure.information_bonus=0.1"]
    with pytest.raises(ConfigError, match="but no version of the policy as the opponent"):
        check(config_file.load(config_file.find("kuhn"), changes))


@pytest.mark.parametrize(
    "change",
    ["population.rivals=0.5", "population.matchmaker=progress", "methods.both_seats.share=0.5"],
)
@pytest.mark.parametrize("kind", ["Unbounded", "UnboundedSteps"])
def test_returns_without_bounds_are_not_rated(kind: str, change: str) -> None:
    own = [f"environment.name={__name__}:{kind}", "environment.options={}", SEATS]
    with pytest.raises(ConfigError, match="between `min_return` and `max_return`: declare both"):
        check(config_file.load(config_file.find("quickstart"), [*own, change]))


class Few(Rps):
    """Whoever is not met takes the other's place."""

    def swaps(self, member: str, split: str) -> tuple[str, ...]:
        return tuple(each for each in self.members(split) if each != member)


class Unbounded(Few):
    """It declares no bounds of its returns."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = replace(self.facts, min_return=None, max_return=None)


class UnboundedSteps:
    """Its returns have no bounds, and it has `reset` and `step`."""

    words = legal_actions = ("rock", "paper")

    def reset(self, seed: int, task: int) -> str:
        return "rock"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "paper", 1.0, True


class Shared(Few):
    """Its opponents are in both splits."""

    def members(self, split: str) -> tuple[str, ...]:
        return ("fixed-rock", "fixed-paper")


class Named(Few):
    """An opponent has a version's name."""

    def members(self, split: str) -> tuple[str, ...]:
        return ("fixed-rock", "policy-3") if split == "train" else ("fixed-paper", "fixed-scissors")

    def family(self, member: str) -> str:
        return "fixed"


class Joined(Named):
    """A task reads like those of a mixed group."""

    def members(self, split: str) -> tuple[str, ...]:
        return ("fixed-rock", "ls | wc") if split == "train" else ("fixed-paper", "fixed-scissors")


def test_the_catalogue_says_who_has_a_second_seat() -> None:
    seated = {
        name
        for name in ("kuhn", "rps", "tictactoe", "openspiel", "scout", "sokoban", "minesweeper")
        if load(name).duel(Task(name, "policy-0", 0, 0), 0) is not None
    }
    assert seated == {"kuhn", "rps", "tictactoe", "openspiel"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([], 'add "seat" to advantage.baseline'),
        ([SEATS, "admission.trials_per_group=2"], "must be even and at least 4, got 2"),
        ([SEATS, "admission.trials_per_group=7"], "must be even and at least 4, got 7"),
        ([SEATS, "population.rivals=0.7"], r"at most 1: got 0.7 \+ 0.5"),
        ([SEATS, "trial.stop_on_success=true"], "trial.stop_on_success is for one agent"),
        ([SEATS, "methods.graph_memory.strategies=1"], "methods.graph_memory is for one agent"),
        ([SEATS, "methods.metacure.information_bonus=0.1"], "information_bonus is for one agent"),
        ([SEATS, "methods.scaling_inter.turns=[2, 4]"], "turns ends an episode for the agent"),
    ],
)
def test_both_seats_are_compared_each_with_itself(changes: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(
            config_file.load(config_file.find("kuhn"), ["methods.both_seats.share=0.5", *changes])
        )


def test_both_seats_need_no_weights_of_the_past() -> None:
    changes = ["methods.both_seats.share=1.0", SEATS, "transport.weights=tensor"]
    check(config_file.load(config_file.find("kuhn"), changes))
    with pytest.raises(ConfigError, match=r"scout: .* leave methods\.both_seats out"):
        check(config_file.load(config_file.find("scout"), ["methods.both_seats.share=0.5"]))
