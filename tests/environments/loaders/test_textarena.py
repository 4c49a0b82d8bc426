"""Games of TextArena itself, by `textarena:GAME`."""

import importlib.util
import random

import numpy as np
import pytest

from mage_async.environments import catalogue
from mage_async.environments.loaders.textarena import ACTIONS
from mage_async.errors import ConfigError
from tests.environments.loaders.playing import begin, play, rehearsed

needs_textarena = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="the extra [textarena] is not installed"
)
ANY = ("[0 1]", "[2 3]", "[1]", "[red]", "[hit]", "[stand]", "[up]", "nonsense", "")
OPEN = ("2048-v0", "Bandit-v0", "Blackjack-v0", "Minesweeper-v0-small", "Sudoku-v0", "Secretary-v0")


def own_loop(game: str, seed: int, actions: list[str]) -> float:
    """The return of TextArena's own loop; 0 where the game is not over."""
    import textarena

    random.seed(seed)
    np.random.seed(seed)
    own = textarena.make(f"{game}-raw")
    own.reset(num_players=1, seed=seed)
    for action in actions:
        is_over, _ = own.step(action)
        own.get_observation()
        if is_over:
            return own.close()[0][0]
    return 0.0


@needs_textarena
@pytest.mark.parametrize("game", [*ACTIONS, *OPEN])
def test_returns_are_those_of_the_librarys_own_loop(game: str) -> None:
    environment = catalogue.load(f"textarena:{game}", turns=60)
    returns = []
    for seed in range(4):
        source = random.Random(seed)
        actions = [source.choice(ACTIONS.get(game, ANY[:-1])) for _ in range(60)]
        first, again = (play(environment, str(seed), actions) for _ in range(2))
        assert first == again
        assert len(first.said[0]) > 100
        returns.append(sum(first.rewards))
        assert returns[-1] == pytest.approx(own_loop(game, seed, actions[: len(first.rewards)]))
    assert any(returns) or game in ("FifteenPuzzle-v0", "FrozenLake-v0", "TowerOfHanoi-v0", *OPEN)


@needs_textarena
def test_a_game_leaves_the_luck_of_others_alone() -> None:
    environment, before = catalogue.load("textarena:Mastermind-v0"), random.getstate()
    play(environment, "3", ["[1 2 3 4]"])
    assert random.getstate() == before


@needs_textarena
def test_what_is_not_listed_is_not_told_to_a_game_and_a_game_refuses_too() -> None:
    listed = begin(catalogue.load("textarena:GuessTheNumber-v0"), "3")
    assert not listed.act("seven").is_valid
    script = catalogue.load("textarena:GuessTheNumber-v0").script(random.Random(0))
    assert script.choose(listed) in ACTIONS["GuessTheNumber-v0"]
    open_game = catalogue.load("textarena:Minesweeper-v0-small")
    assert open_game.script(random.Random(0)) is None
    played = play(open_game, "3", ["nonsense", "nonsense", "more"])
    assert (played.is_valid, played.is_done) == ([False, False], True)


@needs_textarena
def test_a_game_is_rehearsed() -> None:
    assert "4 × reset took" in rehearsed("textarena:Mastermind-v0")[1]


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("Wordle-v0", "fetches word lists from the network"),
        ("Debate-v0", "asks a judge over the network"),
        ("Chess-v0", "is not on the list of games for one player that were tried; there are 2048"),
    ],
)
def test_games_that_cannot_be_played_are_refused(game: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        catalogue.load(f"textarena:{game}")
    with pytest.raises(ConfigError, match="say which, such as textarena:Mastermind-v0"):
        catalogue.load("textarena", game=game)
