"""Any game of OpenSpiel: what is dealt again, who plays, and what it is worth."""

import json
import os
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyspiel
import pytest

from mage_async.environments.catalogue import load
from mage_async.environments.games.kuhn import UNIFORM, best_response
from mage_async.environments.games.openspiel import (
    OpenSpielGame,
    OpenSpielPlay,
    OpenSpielScript,
    look_at,
)
from mage_async.environments.games.openspiel_policies import (
    _store,
    best_value,
    equilibrium,
    greedy,
    searcher,
)
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

SEARCHED = (
    "leduc_poker",
    "connect_four",
    "hex(board_size=4)",
    "breakthrough(rows=5,columns=5)",
    "othello",
    "pig",
    "oware",
)
UNSEARCHED = (
    "liars_dice",
    "goofspiel(num_cards=4)",
    "phantom_ttt",
    "repeated_game(stage_game=matrix_rps(),num_repetitions=5)",
)


def play_out(play: OpenSpielPlay, source: random.Random) -> list[str]:
    said = [play.observation]
    while legal := play.legal_actions():
        said.append(play.act(source.choice(legal)).observation)
    return said


@pytest.mark.parametrize("game", SEARCHED + UNSEARCHED)
def test_every_two_player_game_is_played_to_its_end(game: str) -> None:
    members = ["random", "mcts-2"] if game in SEARCHED else ["random"]
    environment = OpenSpielGame(game, train=members, heldout=["cfr"])
    for number, member in enumerate(members):
        task = Task("openspiel", member, 7, number)
        said = play_out(environment.begin(task, 0), random.Random(1))
        assert set(said[-1].split()) & {"win", "lose", "draw"}
        assert said == play_out(environment.begin(task, 0), random.Random(1))


@pytest.mark.parametrize("game", UNSEARCHED)
def test_a_search_that_the_engine_cannot_run_is_refused(game: str) -> None:
    with pytest.raises(ConfigError, match=r"openspiel: `mcts` cannot play .*not implemented"):
        OpenSpielGame(game, train=["mcts-2"])


@pytest.mark.parametrize(
    ("restart", "same_deal", "same_luck"),
    [("same", True, True), ("deal", True, False), ("new", False, False)],
)
def test_a_restart_repeats_what_the_switch_says(
    restart: str, same_deal: bool, same_luck: bool
) -> None:
    environment = OpenSpielGame("leduc_poker", restart=restart)  # type: ignore[arg-type]
    deals, lucks = set(), set()
    for seed in range(12):
        for episode in range(4):
            play = environment.begin(Task("openspiel", "random", seed), episode)
            while legal := play.legal_actions():
                play.act(legal[-1])  # always raises, or else calls: luck alone makes a difference
            drawn = play.chance.draws
            deals.add((seed, *[each for each in drawn if each.startswith("deal")][:2]))
            lucks.add((seed, *drawn))
    assert (len(deals) == 12) == same_deal
    assert (len(lucks) == 12) == (same_deal and same_luck)


@pytest.mark.parametrize(
    ("game", "hint"), [("leduc_poker", "Six cards"), ("goofspiel(num_cards=3)", "Each point card")]
)
def test_a_hint_explains_a_game_of_turns_and_one_of_simultaneous_moves(
    game: str, hint: str
) -> None:
    assert f"\n{hint}" in load("openspiel", game=game).rules()


def test_an_equilibrium_is_solved_once_and_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    game = pyspiel.load_game("kuhn_poker")
    table = equilibrium(game, 321)
    files = list((Path(os.environ["XDG_CACHE_HOME"]) / "mage_async" / "openspiel").glob("*.json"))
    assert any(json.loads(file.read_text()) == json.loads(json.dumps(table)) for file in files)
    monkeypatch.setattr(pyspiel, "CFRSolver", None)
    again = equilibrium(game, 321)
    assert {known: [tuple(each) for each in row] for known, row in again.items()} == table


def test_kuhn_poker_is_worth_minus_one_eighteenth_to_who_speaks_first() -> None:
    game = pyspiel.load_game("kuhn_poker")
    table = equilibrium(game, 5000)
    assert best_value(game, 0, table) == pytest.approx(-1 / 18, abs=2e-3)
    assert best_value(game, 1, table) == pytest.approx(1 / 18, abs=2e-3)


def test_the_greedy_equilibrium_can_be_exploited() -> None:
    game = pyspiel.load_game("kuhn_poker")
    likeliest = greedy(equilibrium(game, 1000))
    assert [best_value(game, seat, likeliest) for seat in range(2)] == pytest.approx([1 / 6, 1 / 6])


def test_the_engine_and_our_own_values_agree_on_best_responses() -> None:
    values = OpenSpielGame("kuhn_poker").references("train", 2)  # random, cfr-greedy
    expected = (best_response((UNIFORM,)) + 1 / 6) / 2
    assert values["best_response"] == pytest.approx((expected, expected))
    assert values["best_response"][0] > values["random"][0]


def test_uniform_play_loses_to_what_answers_it_best() -> None:
    environment = OpenSpielGame("kuhn_poker", restart="new")
    best = best_value(pyspiel.load_game("kuhn_poker"), 0, {})
    total, num = 0.0, 2000
    for seed in range(num):
        play = environment.begin(Task("openspiel", "best-response-random", seed, 1), 0)
        source = random.Random(seed)
        while legal := play.legal_actions():
            total -= play.act(source.choice(legal)).reward
    assert total / num == pytest.approx(best, abs=0.12)


def test_who_searches_more_wins_more() -> None:
    environment = OpenSpielGame("hex(board_size=4)", train=["random"], heldout=["mcts-1"])
    game, earned = pyspiel.load_game("hex(board_size=4)"), 0.0
    for seed in range(20):
        script = OpenSpielScript(random.Random(seed), 1.0, partial(searcher, game, 200))
        play = environment.begin(Task("openspiel", "mcts-1", seed, seed % 2), 0)
        while play.legal_actions():
            earned += play.act(script.choose(play)).reward
    assert earned > 10


def test_an_invalid_move_leaves_the_game_and_a_game_without_end_is_lost() -> None:
    environment = OpenSpielGame("connect_four", turns=2)
    play = environment.begin(Task("openspiel", "random", 0), 0)
    before = play.observation
    outcome = play.act("x9")
    assert (outcome.observation, outcome.reward) == (f"invalid {before}", 0.0)
    assert not outcome.is_valid
    outcome = play.act("x3")
    assert outcome.is_done
    assert outcome.reward == -1.0
    assert outcome.observation.endswith(" lose")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": 3}, r"openspiel: `game` must be the name of a game, as text, got 3"),
        ({"train": "random"}, r"openspiel: `train` must be a list of texts, got 'random'"),
        ({"heldout": [3]}, r"openspiel: `heldout` must be a list of texts, got \[3\]"),
        ({"game": "nochess"}, r"openspiel: cannot load the game 'nochess': "),
        ({"game": "kuhn_poker(players=3)"}, r"is for 3 players, not for two"),
        ({"game": "negotiation"}, r"'negotiation' draws random events by itself"),
        ({"train": ["mcts-0"]}, r"no opponent is called 'mcts-0'; write `random`, `mcts-100`"),
        ({"train": ["cfr"]}, r"'cfr' cannot be trained on and held out"),
        ({"restart": "again"}, r"`restart` must be 'same' or 'deal' or 'new', got 'again'"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenSpielGame(**options)


def test_a_game_without_text_is_refused() -> None:
    shows = {"provides_observation_string": False, "provides_information_state_string": False}
    game = SimpleNamespace(get_type=lambda: SimpleNamespace(**shows))
    with pytest.raises(ConfigError, match="has no text for what a player sees"):
        look_at(game)


def test_nobody_else_can_be_met() -> None:
    with pytest.raises(EnvironmentFault, match="no opponent is called 'cheat'"):
        OpenSpielGame().begin(Task("openspiel", "cheat", 0), 0)


@pytest.mark.parametrize("name", ["kuhn", "tictactoe", "openspiel"])
def test_without_openspiel_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    with pytest.raises(ConfigError, match=r'pip install "mage_async\[games\]"'):
        load(name)


def test_a_game_is_solved_where_its_table_cannot_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert len(equilibrium(pyspiel.load_game("kuhn_poker"), 2)) == 12  # states with a decision


def test_a_table_stays_whole_if_a_process_of_the_same_id_stores_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, rename = tmp_path / "table.json", Path.replace

    def renamed(draft: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", rename)
        _store(file, {"s": [(0, 1.0)]})
        return rename(draft, target)

    monkeypatch.setattr(Path, "replace", renamed)
    _store(file, {"s": [(0, 1.0)]})
    assert json.loads(file.read_text()) == {"s": [[0, 1.0]]}
    assert list(tmp_path.iterdir()) == [file]
