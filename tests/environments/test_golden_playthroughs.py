"""Playthroughs as text: a change of rules, words or luck is a difference that a person reads.

To write them anew after an intended change:

    PYTHONPATH=. python tests/environments/test_golden_playthroughs.py
"""

import random
from pathlib import Path

import pytest

from mage_async.config import config_file
from mage_async.environments import catalogue
from mage_async.environments.environment import Environment, Play, Script
from mage_async.environments.games.family import TRAINED
from mage_async.trajectory import Task

FOLDER = Path(__file__).parent / "golden"
NUM_EPISODES = 3
# Members without a search by sampling: that one's luck is the C++ library's. Nor are there games of
# engines that may not be installed: their text is theirs.
TASKS = {
    "biased_rps": [("opponent-3", 1, 0), ("opponent-300", 2, 0)],
    "bandit": [("red-green-blue-red", 1, 0), ("blue-blue-red-green", 2, 0)],
    "blackjack": [("deck-3", 1, 0), ("deck-300", 4, 0)],
    "blackjack_pick": [("deck-3", 1, 0), ("deck-300", 4, 0)],
    "boxes": [("left-right-left-left", 1, 0), ("left-left-left-left", 2, 0)],
    "rps": [("seq-rock-paper-scissors", 1, 0), ("lose-paper", 2, 0), ("beat-rock", 3, 0)],
    "scout": [("red-blue-gold", 6, 0), ("green-green-red", 4, 0)],
    "hangman": [("frog", 1, 0), ("wind", 5, 0)],
    "kuhn": [("bet-jack-king-call-queen-king", 1, 0), ("bet-none-call-king", 2, 1)],
    "mastermind": [("red-blue-red", 1, 0), ("gold-green-blue", 2, 0)],
    "grid": [("gamma-three", 1, 0), ("beta-six", 4, 0)],
    "family": [
        *((f"train-{name}-{seed}", seed, 0) for seed, name in enumerate(TRAINED)),
        ("train-mapping-0~", 1, 0),
    ],
    "maze": [("maze-3", 1, 0), ("maze-300", 3, 0)],
    "minesweeper": [("cc-dc-fb", 1, 0), ("cc-dc-fb", 4, 0)],
    "numberlock": [("one-three-five", 1, 0), ("five-two-one", 4, 0)],
    "openspiel": [("random", 1, 0), ("random", 2, 1)],
    "shop": [("B00017", 3, 0), ("B00311", 5, 0)],
    "sokoban": [("room-0", 5, 0), ("room-600", 8, 0)],
    "wordle": [("stone", 1, 0), ("tiger", 4, 0)],
    "tictactoe": [("preferred-edges", 1, 0), ("random", 2, 1), ("minimax", 3, 1)],
}


def playthrough(name: str) -> str:
    """All tasks of an environment; each trial has one invalid action, the second of episode 2."""
    environment = catalogue.load(name)
    trials = [_trial(environment, Task(name, *task)) for task in TASKS[name]]
    return "\n".join(line for trial in trials for line in trial) + "\n"


def of_a_paper(name: str) -> str:
    """The rules and a held-out task of each game of a paper's configuration."""
    options = config_file.load(config_file.find(f"papers/{name}")).environment.options
    lines = []
    for part in catalogue.load("mix", **options).parts:
        game, member = part.environment, part.environment.members("heldout")[0]
        lines += [*game.rules().splitlines(), *_trial(game, Task(part.name, member, 1)), ""]
    return "\n".join(lines)


def _trial(environment: Environment, task: Task) -> list[str]:
    lines = [f"task {task.member}, seed {task.seed}, seat {task.seat}"]
    script = environment.script(random.Random(task.seed))
    for episode in range(NUM_EPISODES):
        lines += _episode(environment.begin(task, episode), script, episode)
    return lines


def _episode(play: Play, script: Script, episode: int) -> list[str]:
    lines = [f"  episode {episode + 1}: {play.observation or '(nothing)'}{_luck(play, 0)}"]
    while play.legal_actions():
        seen, is_invalid = len(play.chance.draws), (episode, len(lines)) == (1, 2)
        anchor, action = play.anchor, "nonsense" if is_invalid else script.choose(play)
        outcome = play.act(action)
        lines.append(
            f"    [{anchor}] {action} -> {outcome.reward:+g} {outcome.observation}"
            f"{'' if outcome.is_valid else ' (invalid)'}{_luck(play, seen)}"
        )
    return lines


def _luck(play: Play, seen: int) -> str:
    draws = play.chance.draws[seen:]
    return f"    {{{', '.join(draws)}}}" if draws else ""


@pytest.mark.parametrize("name", catalogue.names())
def test_episodes_go_as_they_are_written_down(name: str) -> None:
    assert playthrough(name) == (FOLDER / f"{name}.txt").read_text()


def test_the_games_of_orbit_go_as_they_are_written_down() -> None:
    assert of_a_paper("orbit") == (FOLDER / "orbit.txt").read_text()


if __name__ == "__main__":
    for each in catalogue.names():
        (FOLDER / f"{each}.txt").write_text(playthrough(each))
    (FOLDER / "orbit.txt").write_text(of_a_paper("orbit"))
