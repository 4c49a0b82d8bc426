"""Both seats of a game, played from outside."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.environments.catalogue import load
from mage_async.environments.environment import AGENT, OPPONENT, Duel, Environment, Outcome
from mage_async.trajectory import Task

ENVIRONMENTS = {name: load(name) for name in ("kuhn", "rps", "tictactoe", "openspiel")}
ENVIRONMENTS["tictactoe-news"] = load("tictactoe", view="news")
PAGE = Path(__file__).parents[2] / "docs" / "examples" / "game_for_two.md"
EXAMPLE: dict[str, Any] = {"__name__": "nim"}
exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], EXAMPLE)
ENVIRONMENTS["nim"] = EXAMPLE["Nim"]()
NAMES = tuple(ENVIRONMENTS)


def begin(environment: Environment, seed: int, seat: int, episode: int = 0) -> Duel:
    duel = environment.duel(Task(environment.facts.name, "policy-0", seed, seat), episode)
    assert duel is not None
    return duel


def played(duel: Duel, source: random.Random) -> tuple[list[list[str]], list[float], int]:
    """Random play, one action in eight invalid: what each side heard, earned; and turns."""
    heard: list[list[str]] = [[], []]
    earned, turns, asked = [0.0, 0.0], 0, {AGENT: False, OPPONENT: False}

    def hear(side: int) -> Outcome:
        outcome = duel.observe(AGENT if side == 0 else OPPONENT)
        heard[side].append(outcome.observation)
        earned[side] += outcome.reward
        return outcome

    while (side := duel.turn) is not None:
        outcome = hear(side)
        assert not outcome.is_done
        asked[side] = True
        legal = duel.legal_actions()
        assert legal
        duel.act("nonsense" if source.random() < 1 / 8 else source.choice(list(legal)))
        turns += 1
    for side in (0, 1):
        assert hear(side).is_done
    assert all(asked.values())
    assert not duel.legal_actions()
    return heard, earned, turns


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**40), episode=st.integers(0, 3), play=st.integers(0, 999))
def test_a_duel_ends_within_its_facts_and_says_only_known_words(
    name: str, seed: int, episode: int, play: int
) -> None:
    environment = ENVIRONMENTS[name]
    facts = environment.facts
    for seat in environment.seats():
        duel = begin(environment, seed, seat, episode)
        heard, earned, turns = played(duel, random.Random(play))
        assert turns <= 2 * facts.max_turns
        assert all(facts.min_return <= each <= facts.max_return for each in earned)
        if not facts.has_open_text:
            words = {word for side in heard for said in side for word in said.split()}
            assert words <= set(facts.words)
        again = played(begin(environment, seed, seat, episode), random.Random(play))
        assert again == (heard, earned, turns)


@pytest.mark.parametrize("name", ["kuhn", "tictactoe", "tictactoe-news", "openspiel", "nim"])
def test_what_one_side_wins_the_other_loses(name: str) -> None:
    for seed in range(50):
        _, earned, _ = played(begin(ENVIRONMENTS[name], seed, seed % 2), random.Random(seed))
        assert sum(earned) == 0


def test_both_seats_of_rock_paper_scissors_see_each_other() -> None:
    duel = begin(ENVIRONMENTS["rps"], 0, 0)
    for mine, theirs in (("rock", "paper"), ("nonsense", "rock"), ("rock", "lizard")):
        assert duel.turn == OPPONENT  # who is asked first does not see what the other does
        duel.act(theirs)
        assert duel.observe(AGENT).observation == ""
        duel.act(mine)
        outcomes = duel.observe(AGENT), duel.observe(OPPONENT)
        said = tuple((each.observation, each.reward, each.is_valid) for each in outcomes)
        if mine == "nonsense":
            wanted = ("opp rock invalid", -1.0, False), ("opp invalid win", 1.0, True)
        elif theirs == "lizard":
            wanted = ("opp invalid win", 1.0, True), ("opp rock invalid", -1.0, False)
        else:
            wanted = ("opp paper lose", -1.0, True), ("opp rock win", 1.0, True)
        assert said == wanted


def test_an_environment_without_a_second_seat_has_no_duel() -> None:
    assert load("scout").duel(Task("scout", "x", 0), 0) is None
