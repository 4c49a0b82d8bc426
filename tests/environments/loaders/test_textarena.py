"""Games of TextArena itself, by `textarena:GAME`."""

import copy
import importlib.util
import random

import numpy as np
import pytest

from mage_async.environments import catalogue
from mage_async.environments.environment import Environment, Outcome
from mage_async.environments.loaders.textarena import ACTIONS
from mage_async.environments.user_calls import make_pending_calls
from mage_async.environments.user_class import ResetStepPlay
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


def taken(play: ResetStepPlay, action: str) -> Outcome:
    """Take an action, and return what the game answers."""
    answered = play.act(action)
    return make_pending_calls(play) or answered


def drawn(environment: Environment, seed: int) -> list[str]:
    """Return the actions of one episode, drawn from the legal ones, or from `ANY` if none are."""
    source, own, actions = random.Random(seed), begin(environment, str(seed)), []
    while not own.is_done and len(actions) < 60:
        actions.append(source.choice(own.legal_actions() or ANY[:-1]))
        taken(own, actions[-1])
    return actions


@needs_textarena
@pytest.mark.parametrize("game", [*ACTIONS, *OPEN])
def test_returns_are_those_of_the_librarys_own_loop(game: str) -> None:
    environment = catalogue.load(f"textarena:{game}", turns=60)
    returns = []
    for seed in range(2):
        actions = drawn(environment, seed)
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
    open_game = catalogue.load("textarena:Minesweeper-v0-small")
    assert not begin(open_game, "3").legal_actions()
    played = play(open_game, "3", ["nonsense", "nonsense", "more"])
    assert (played.is_valid, played.is_done) == ([False, False], True)


@needs_textarena
@pytest.mark.parametrize("game", ACTIONS)
def test_a_game_accepts_every_action_that_is_listed_as_legal(game: str) -> None:
    environment, source = catalogue.load(f"textarena:{game}"), random.Random(0)
    for seed in range(3):
        play = begin(environment, str(seed))
        while not play.is_done:
            assert taken(play, source.choice(play.legal_actions())).is_valid


@needs_textarena
@pytest.mark.parametrize("game", ["FifteenPuzzle-v0", "GuessTheNumber-v0", "TowerOfHanoi-v0"])
def test_the_library_refuses_what_is_not_listed_any_more(game: str) -> None:
    import textarena

    play = begin(catalogue.load(f"textarena:{game}"), "3")
    random.seed(3)
    np.random.seed(3)
    own = textarena.make(f"{game}-raw")
    own.reset(num_players=1, seed=3)
    first = play.legal_actions()[0]
    taken(play, first)
    own.step(first)
    own.get_observation()
    refused = set(ACTIONS[game]) - set(play.legal_actions())
    assert refused
    for action in refused:
        tried = copy.deepcopy(own)
        tried.step(action)
        kinds = [kind for _, _, kind in tried.get_observation()[1]]
        assert textarena.ObservationType.GAME_ADMIN in kinds


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
    with pytest.raises(
        ConfigError, match="add a name after the colon, such as textarena:Mastermind-v0"
    ):
        catalogue.load("textarena", game=game)
