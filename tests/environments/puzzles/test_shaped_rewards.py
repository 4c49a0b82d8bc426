"""Games that pay for progress count an episode as won only where its goal is reached."""

import random
from typing import Any

import pytest

from mage_async.environments.games.game import Game
from mage_async.environments.games.minesweeper import WON, MineSweeper
from mage_async.environments.games.sokoban import SOLVED, Sokoban
from mage_async.trajectory import Task


@pytest.mark.parametrize(
    ("game", "goal"),
    [
        (MineSweeper(size=6, mines=3, turns=7), WON),
        (MineSweeper(size=4, mines=4, turns=7), WON),
        (MineSweeper(size=5, mines=5, wins_only=True), WON),
        (Sokoban(boxes=2, turns=7, steps_per_turn=3), SOLVED),
    ],
)
def test_won_are_the_episodes_that_reach_the_goal(game: Game[Any], goal: str) -> None:
    found = set()
    for number in range(150):
        source = random.Random(number)
        members = game.members("train")
        script = game.script(source)
        task = Task(game.facts.name, members[number % len(members)], number)
        for episode in range(2):
            play, earned, shown = game.begin(task, episode), 0.0, ""
            while play.legal_actions():
                outcome = play.act(script.choose(play))
                earned, shown = earned + outcome.reward, outcome.observation
            is_solved = goal in shown.split()
            assert game.facts.is_won(earned) == is_solved
            found.add((is_solved, earned > 0))
    # All kinds occur: without its goal an episode may earn nothing, and more than nothing.
    assert {(True, True), (False, False)} <= found
