"""Engines of others: TextWorld and ALFWorld, where they are installed."""

import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from mage_async.environments import catalogue
from mage_async.environments.environment import Environment
from mage_async.environments.games.alfworld import (
    NEEDS,
    Household,
    Room,
    kinds_of_splits,
    listed_problems,
)
from mage_async.environments.games.text_game import TextPlay
from mage_async.environments.loaders.loader import IsolatedRandomState
from mage_async.errors import ConfigError
from mage_async.trajectory import Task


def needs(engine: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(engine) is None
    return pytest.mark.skipif(missing, reason=f"{engine} is not installed: the extra [{engine}]")


def begin(environment: Environment, member: str = "game-3") -> TextPlay:
    play = environment.begin(Task(environment.facts.name, member, 0), 0)
    assert isinstance(play, TextPlay)
    return play


def finish(play: TextPlay, seed: int) -> list[str]:
    source, said = random.Random(seed), []
    while legal := play.legal_actions():
        said.append(play.act(source.choice(legal)).observation)
    return said


@pytest.mark.parametrize("name", tuple(catalogue.EXTRAS))
def test_an_engine_that_is_not_there_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'mage_async\[{name}\]'"):
        catalogue.load(name)


def test_an_engine_has_luck_of_its_own() -> None:
    luck, drawn = IsolatedRandomState(3), []
    outside = random.getstate()
    for _ in range(3):
        with luck:
            drawn.append(random.random())
        assert random.getstate() == outside
    with IsolatedRandomState(3):
        assert [random.random() for _ in range(3)] == drawn


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_calls_that_overran_leave_the_random_state_as_it_was_before_the_first(order) -> None:
    outside, calls = random.getstate(), [IsolatedRandomState(number) for number in range(3)]
    for call in calls:
        call.__enter__()
    last_one_draws = random.Random(2)
    for number in order:
        calls[number].__exit__()
        if 2 not in order[: order.index(number) + 1]:
            assert random.random() == last_one_draws.random(), "the last call goes on undisturbed"
    assert random.getstate() == outside
    with calls[2]:
        assert random.random() == last_one_draws.random()
    assert random.getstate() == outside


@needs("textworld")
def test_a_text_adventure_pays_each_step_of_its_score_once() -> None:
    environment = catalogue.load("textworld", games=8)
    play = begin(environment)
    assert "-= Bedroom =-" in play.observation
    assert "$" not in play.observation
    first = play.act("open chest drawer")
    assert first.reward == pytest.approx(1 / 7)
    play.act("close chest drawer")
    assert play.act("open chest drawer").reward == 0.0


@needs("textworld")
@pytest.mark.slow
@pytest.mark.parametrize("challenge", ["tw-coin_collector", "tw-treasure_hunter", "tw-cooking"])
def test_every_challenge_is_made_and_played(challenge: str) -> None:
    environment = catalogue.load("textworld", challenge=challenge, games=8)
    assert finish(begin(environment), 2) == finish(begin(environment), 2)


@needs("alfworld")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_kind_of_household_task_is_made_and_solved_as_the_planner_says(tmp_path) -> None:
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    household, solved = Household(), {}
    plans = household.plans()
    for number in range(300):
        source = random.Random(number)
        problem = household.problem(source.choice(plans), source, tuple(NEEDS))
        if problem["kind"] in solved:
            continue
        file = tmp_path / f"{number}.tw-pddl"
        file.write_text(json.dumps(problem))
        wanted = textworld.EnvInfos(won=True, policy_commands=True)
        game = textworld.start(str(file), wanted, wrappers=[AlfredDemangler()])
        state = game.reset()
        commands = state["policy_commands"]
        for command in commands:
            state, _, _ = game.step(command)
        solved[problem["kind"]] = bool(commands) and state["won"]
    assert solved == dict.fromkeys(NEEDS, True)


def test_no_goal_is_about_an_object_that_nothing_in_the_room_holds() -> None:
    household = Household.__new__(Household)  # without the files of the package
    household._holds, household._fit = {"Desk": {"Book"}, "Fridge": {"Egg"}}, {}
    room = Room({"Desk_bar_1": "Desk"}, ("Book", "Egg"), has_lamp=True)
    goals = [
        household._draw_goal(room, "look_at_obj_in_light", random.Random(seed))
        for seed in range(20)
    ]
    assert {goal.thing for goal in goals if goal is not None} == {"Book"}


@needs("alfworld")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_household_begins_again_alike_and_rooms_of_the_splits_differ() -> None:
    environment = catalogue.load("alfworld", games=8, turns=3)
    first, again = begin(environment), begin(environment)
    assert first.observation == again.observation
    assert "Your task is to: " in first.observation
    assert finish(first, 1) == finish(again, 1)
    assert environment.family("game-3") in NEEDS


@needs("alfworld")
@pytest.mark.slow
def test_a_folder_of_ones_own_is_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"fewer than two solvable game.tw-pddl .* in train"):
        catalogue.load("alfworld", data=str(tmp_path))
    household = Household()
    for number, part in enumerate(("train", "train", "valid_seen", "valid_unseen")):
        folder = tmp_path / part / f"pick_and_place_simple-{number}" / "trial"
        folder.mkdir(parents=True)
        problem = household.problem("FloorPlan1", random.Random(number), tuple(NEEDS))
        (folder / "game.tw-pddl").write_text(json.dumps(problem | {"solvable": True}))
    environment = catalogue.load("alfworld", data=str(tmp_path), turns=2)
    member = environment.members("heldout")[0]
    assert member == "valid_seen/pick_and_place_simple-2/trial"
    assert environment.family(member) == "pick_and_place_simple"
    assert "Your task is to: " in begin(environment, member).observation


def test_kinds_that_are_held_out_are_in_no_problem_of_training(tmp_path) -> None:
    cool, simple = "pick_cool_then_place_in_recep", "pick_and_place_simple"
    for part in ("train", "valid_seen", "valid_unseen"):
        for number in range(2):
            for kind in (cool, simple):
                folder = tmp_path / part / f"{kind}-{number}" / "trial"
                folder.mkdir(parents=True)
                (folder / "game.tw-pddl").write_text('{"solvable": true}')
    found = listed_problems(tmp_path, kinds_of_splits([cool]))
    assert {Path(each).parts[1].partition("-")[0] for each in found["train"]} == {simple}
    assert {Path(each).parts[1].partition("-")[0] for each in found["heldout"]} == {cool}
    assert len(found["heldout"]) == 4
    assert len(listed_problems(tmp_path, kinds_of_splits([]))["train"]) == 4
    with pytest.raises(ConfigError, match="`heldout_kinds` has 'cool'; known kinds: pick_and"):
        kinds_of_splits(["cool"])
    with pytest.raises(ConfigError, match="leaves no kind to train on"):
        kinds_of_splits(tuple(NEEDS))
