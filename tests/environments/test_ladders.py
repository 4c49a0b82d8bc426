"""Ladders of harder tasks: which rungs stand above an environment, and what is refused."""

import pytest

from mage_async.config import config_file
from mage_async.environments.catalogue import load, names
from mage_async.environments.ladders import harder
from mage_async.environments.reset_step import ResetStep
from mage_async.errors import ConfigError
from mage_services.actor.figures import on, rungs_of, times_as_long

WITH_LADDERS = [name for name in names() if load(name).ladders]


class Locks:
    """Guess the digits."""

    ladders = {"digits": ({"digits": 2}, {"digits": 3}, {"digits": 4, "turns": 9})}  # noqa: RUF012

    def __init__(self, digits: int = 3, turns: int = 6) -> None:
        self.digits, self.turns = digits, turns

    def reset(self, seed: int, task: int) -> str:
        return "closed"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "closed", 0.0, False


def test_some_of_the_shipped_environments_have_ladders() -> None:
    assert {"sokoban", "minesweeper", "maze"} <= set(WITH_LADDERS)


@pytest.mark.parametrize("name", WITH_LADDERS)
def test_every_rung_of_a_ladder_is_an_environment_of_its_own(name: str) -> None:
    for ladder, rungs in load(name).ladders.items():
        assert all(next(iter(rung)) == ladder for rung in rungs)
        above = harder(name, load(name), {}, ladder)
        assert above == [dict(rung) for rung in rungs][-len(above) :]
        for rung in rungs:
            assert load(name, **rung).members("heldout")


def test_rungs_stand_above_the_runs_own_option() -> None:
    boxes = load("sokoban", boxes=3)
    assert harder("sokoban", boxes, {"boxes": 3}, "boxes") == [{"boxes": 4}]
    lock = ResetStep(Locks, {})
    assert harder("lock", lock, {}, "") == [{"digits": 4, "turns": 9}]
    assert len(harder("lock", lock, {"digits": 2}, "digits")) == 2


@pytest.mark.parametrize(
    ("name", "options", "ladder", "sentence"),
    [
        ("rps", {}, "", "environment 'rps' declares no `ladders` of harder tasks"),
        ("sokoban", {}, "walls", "'sokoban' has no ladder 'walls'; there are boxes"),
        ("sokoban", {"boxes": 4}, "", "boxes = 4 has no harder rung; the ladder is 1, 2, 3, 4"),
        ("sokoban", {"boxes": 5}, "", "boxes = 5 has no harder rung"),
    ],
)
def test_what_has_no_harder_rung_is_a_sentence(
    name: str, options: dict[str, int], ladder: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        harder(name, load(name, **options), options, ladder)


def test_a_tiny_policy_plays_rungs_whose_words_it_knows() -> None:
    def rungs(name: str, *more: str) -> list[dict[str, int]]:
        given = [f"environment.name={name}", *more]
        return rungs_of(config_file.load(config_file.find(None), given), "")

    assert rungs("sokoban") == [{"boxes": 3}, {"boxes": 4}]
    with pytest.raises(ConfigError, match="harder tasks need words that the tiny policy was not"):
        rungs("minesweeper")
    pretrained = ("policy.kind=pretrained", "policy.source=none")
    assert len(rungs("minesweeper", *pretrained)) == 4


def test_longer_episodes_ask_for_more_room() -> None:
    config = config_file.load(config_file.find(None), ["environment.name=maze"])
    assert times_as_long(config, [{"size": 5, "turns": 30}]) == 1.5
    assert times_as_long(config, []) == 1.0
    assert on(config, {"size": 5, "turns": 30}).environment.options == {"size": 5, "turns": 30}
