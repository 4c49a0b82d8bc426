"""Ladders of harder tasks: which rungs stand above an environment, and what is refused."""

from typing import Any

import pytest

from mage_async.assembly import environment_of, rungs_out_of_reach
from mage_async.config import config_file
from mage_async.environments.catalogue import load, names
from mage_async.environments.ladders import curriculum, harder
from mage_async.environments.user_class import ResetStep
from mage_async.errors import ConfigError
from mage_async.tasks.task_stream import TaskStream
from mage_services.actor.evaluator import Ladder, ladder_of, length_factor, with_rung

PRETRAINED = ("policy.kind=pretrained", "policy.source=none")
CORRIDORS = {"shapes": [[6, 6]], "shortest": [4, 12]}
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
    guessing = {"mastermind", "numberlock", "wordle"}
    others = {"boxes", "hangman", "maze", "minesweeper", "sokoban"}
    assert set(WITH_LADDERS) == guessing | others


@pytest.mark.parametrize("name", WITH_LADDERS)
def test_every_rung_of_a_ladder_is_an_environment_of_its_own(name: str) -> None:
    for ladder, rungs in load(name).ladders.items():
        assert all(next(iter(rung)) == ladder for rung in rungs)
        above = harder(name, load(name), {}, ladder)
        assert above == [dict(rung) for rung in rungs][-len(above) :]
        for rung in rungs:
            heldout = set(load(name, **rung).members("heldout"))
            assert heldout
            assert not heldout & set(load(name).members("train"))


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
        ("sokoban", {"boxes": 5}, "", "boxes = 5 is on no rung of the ladder 1, 2, 3, 4"),
        # `lives` and `size`, the ladders of these games, change nothing with these options.
        ("hangman", {"says_word": True}, "", "environment 'hangman' declares no `ladders`"),
        ("maze", CORRIDORS, "size", "environment 'maze' declares no `ladders`"),
        ("minesweeper", {"size": 4, "mines": 4}, "", "mines = 4 has no harder rung"),
    ],
)
def test_what_has_no_harder_rung_is_a_sentence(
    name: str, options: dict[str, Any], ladder: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        harder(name, load(name, **options), options, ladder)


def test_a_ladder_may_have_another_name_than_the_option_that_its_rungs_set() -> None:
    class Levels(Locks):
        """Guess the digits."""

        ladders = {"level": Locks.ladders["digits"]}  # noqa: RUF012

    levels = ResetStep(Levels, {})
    assert harder("lock", levels, {}, "level") == [{"digits": 4, "turns": 9}]
    labels = [each["label"] for each in curriculum("lock", levels, {}, "level")]
    assert labels == ["digits-2", "digits-3"]


@pytest.mark.parametrize("rungs", [(), ({},), ({"digits": 2}, {"turns": 9})])
def test_rungs_that_set_no_common_option_are_refused(rungs: tuple[dict[str, int], ...]) -> None:
    lock = ResetStep(type("Broken", (Locks,), {"ladders": {"digits": rungs}}), {})
    with pytest.raises(ConfigError, match="'digits' needs rungs that all set 'digits', such as"):
        harder("lock", lock, {}, "digits")


def test_a_tiny_policy_plays_rungs_whose_words_it_knows() -> None:
    def rungs(name: str, *more: str) -> list[dict[str, int]]:
        given = [f"environment.name={name}", *more]
        return ladder_of(config_file.load(config_file.find(None), given), "").rungs

    assert rungs("sokoban") == [{"boxes": 3}, {"boxes": 4}]
    more = "environment.options={size=4,mines=2,most_mines=4}"
    assert rungs("minesweeper", more) == [{"mines": 3}, {"mines": 4}]
    with pytest.raises(ConfigError, match="harder tasks need words that the tiny policy was not"):
        rungs("minesweeper")
    assert len(rungs("minesweeper", *PRETRAINED)) == 4


def test_longer_episodes_ask_for_more_room() -> None:
    config = config_file.load(config_file.find(None), ["environment.name=maze"])
    assert length_factor(config, Ladder("size", config, [{"size": 5, "turns": 30}])) == 1.5
    assert length_factor(config, None) == 1.0
    assert with_rung(config, {"size": 5, "turns": 30}).environment.options == {
        "size": 5,
        "turns": 30,
    }


MIX = (
    "environment.name=mix",
    'environment.options.parts=[{name = "rps"}, {name = "wordle"}, {name = "maze", share = 0}]',
)


def test_a_ladder_of_a_mix_is_that_of_a_part() -> None:
    config = config_file.load(config_file.find(None), MIX)
    fewer = ladder_of(config, "wordle/turns")
    assert (fewer.name, fewer.part, fewer.rungs[0]) == ("wordle/turns", "wordle", {"turns": 5})
    assert fewer.config.environment.name == "wordle"
    with pytest.raises(ConfigError, match="environment 'maze': harder tasks need words"):
        ladder_of(config, "maze")
    config = config_file.load(config_file.find(None), [*MIX, *PRETRAINED])
    assert ladder_of(config, "maze").rungs[0] == {"size": 5, "turns": 30}
    assert length_factor(config, ladder_of(config, "maze")) == 42 / 20
    for name in ("", "chess"):
        with pytest.raises(ConfigError, match=f"called '{name}': write .* do: wordle, maze$"):
            ladder_of(config, name)
    with pytest.raises(ConfigError, match="environment 'rps' declares no `ladders`"):
        ladder_of(config, "rps")


def test_a_curriculum_trains_on_one_rung_after_another_and_stays_on_the_own_options() -> None:
    keys = ("environment.name=boxes", "environment.options.boxes=5", "environment.ladder=boxes")
    few = ("environment.rung_steps=2", "admission.groups_per_step=4")
    config = config_file.load(config_file.find(None), [*keys, *few])
    environment = environment_of(config)
    # Nine groups a step are granted, of which five are dropped.
    tasks = [TaskStream(environment, seed=0).task(number, number // 9) for number in range(54)]
    rungs = [task.member.partition("/")[0] for task in tasks]
    assert rungs == ["boxes-3"] * 18 + ["boxes-4"] * 18 + ["boxes-5"] * 18
    alone = TaskStream(load("boxes", boxes=4), seed=0)
    assert [task.member.partition("/")[2] for task in tasks[18:36]] == [
        alone.task(number).member for number in range(18, 36)
    ]
    pretrained = config_file.load(config_file.find(None), [*keys, "policy.source=none"])
    assert ladder_of(pretrained, "boxes").rungs == [{"boxes": 6}]


def test_a_run_that_ends_before_its_curriculum_is_told_so() -> None:
    def said(*changes: str) -> str:
        keys = ("environment.name=boxes", "environment.options.boxes=5", *changes)
        return rungs_out_of_reach(config_file.load(config_file.find(None), list(keys)))

    ladder = "environment.ladder=boxes"
    assert not said("learner.steps=20")
    assert not said(ladder, "learner.steps=21")
    assert not said(ladder, "learner.steps=0")
    assert "the 2 rungs before the last take 20 steps, and the run has 20" in said(
        ladder, "learner.steps=20"
    )


def test_a_curriculum_needs_an_easier_rung() -> None:
    keys = ("environment.name=boxes", "environment.options.boxes=3", "environment.ladder=boxes")
    with pytest.raises(ConfigError, match="boxes = 3 is the easiest rung of the ladder"):
        environment_of(config_file.load(config_file.find(None), list(keys)))
