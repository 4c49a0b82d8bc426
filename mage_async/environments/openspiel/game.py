"""Any two-player game of OpenSpiel: Leduc poker, liar's dice, connect four, goofspiel, hex …

What the agent reads and writes are the engine's own words, so the text is open: it is for models
that read. Kuhn poker and tic-tac-toe have environments of their own, in few words.
"""

import random
from functools import partial
from typing import Any, Literal, get_args

from mage_async.environments.environment import Chance, Environment, Facts, Split
from mage_async.environments.openspiel.duel import OpenSpielDuel
from mage_async.environments.openspiel.engine import engine
from mage_async.environments.openspiel.opponents import (
    TABLES,
    Opponents,
    check_members,
    check_search,
    family,
    is_search,
)
from mage_async.environments.openspiel.play import (
    DRAW,
    INVALID,
    LOSE,
    WIN,
    OpenSpielPlay,
    OpenSpielScript,
    look_at,
    one_line,
)
from mage_async.environments.options import check_one_of, check_whole
from mage_async.environments.scripted_returns import scripted_returns
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.trajectory import Task

Restart = Literal["same", "deal", "new"]

_PERFECT = (("random", "mcts-10", "mcts-100"), ("mcts-30", "mcts-1000"))
_HIDDEN = (("random", "cfr-greedy"), ("cfr", "best-response-random"))
_NUM_REFERENCE_TRIALS = 40
_RULES = """You play {name} against one opponent; moves are written as OpenSpiel writes them.
You see the game as a player of it does, one line after another with a bar between them.
{hint}An invalid action leaves the game as it is. A game that is not over after {turns} of your
turns counts as lost. The result is what you win: from {least:g} to {most:g}.
The opponent has its own way to play, the same in all episodes. {luck}"""
_LUCK = {
    "same": "All luck is the same in all episodes.",
    "deal": "The deal is the same in all episodes.",
    "new": "Each episode is dealt anew.",
}
_HINTS = {
    "breakthrough": "Who first brings a piece to the far row wins; pieces step ahead, straight or "
    "diagonally, and take diagonally.",
    "connect_four": "Who first has four in a line wins; a move is the column to drop a piece in.",
    "goofspiel": "Each point card goes to the higher bid; each bid card can be used once.",
    "hex": "Who first connects its two sides of the board wins.",
    "kuhn_poker": "Cards are 0, 1 and 2; pass also folds, bet also calls.",
    "leduc_poker": "Six cards, two of each rank; a pair with the public card beats all, else the "
    "higher card does.",
    "liars_dice": "Bid how many dice of a face there are, higher than the last bid, or call liar.",
}


class OpenSpielGame(Environment):
    """A game of OpenSpiel; the opponent's way to play is what a trial has to find out.

    Args:
        game: the engine's name for it, with its parameters, such as `hex(board_size=4)`.
        train: opponents to train against, see `openspiel_opponents`; by default some that suit.
        heldout: opponents held out.
        restart: what episodes of a task share: `same`, all luck; `deal`, the deals, while the
            opponent's luck is drawn again (as MAGE does); `new`, nothing.
        turns: most turns of an episode; 0 for as many as the longest game has.
        iterations: of CFR, where an opponent needs it.

    Raises:
        ConfigError: there is no such game, it is not for two, an opponent is unknown or in both
            lists, or OpenSpiel is not installed.
    """

    def __init__(
        self,
        game: str = "leduc_poker",
        train: tuple[str, ...] | list[str] = (),
        heldout: tuple[str, ...] | list[str] = (),
        restart: Restart = "deal",
        turns: int = 0,
        iterations: int = 1000,
    ) -> None:
        check_one_of("openspiel", "restart", restart, get_args(Restart))
        check_whole("openspiel", "turns", turns, 0, 100_000)
        check_whole("openspiel", "iterations", iterations, 1, 10_000_000)
        self._game, self._restart = _load(game), restart
        usual = _PERFECT if _is_perfect(self._game) else _HIDDEN
        self._splits: dict[Split, tuple[str, ...]] = {
            "train": tuple(train) or usual[0],
            "heldout": tuple(heldout) or usual[1],
        }
        _check_splits(self._splits)
        if any(is_search(each) for members in self._splits.values() for each in members):
            check_search(self._game)
        self._opponents = Opponents(self._game, iterations)
        self._look = look_at(self._game)
        self._turns = turns or self._game.max_game_length()
        self.facts = Facts(
            name="openspiel",
            num_seats=2,
            max_turns=self._turns,
            min_return=float(self._game.min_utility()),
            max_return=float(self._game.max_utility()),
            units=1,
            has_chance=True,
            words=(*_first_actions(self._game), WIN, DRAW, LOSE, INVALID),
            has_open_text=True,
        )

    def members(self, split: Split) -> tuple[str, ...]:
        """Names of the opponents, such as `mcts-100` or `cfr-greedy`."""
        return self._splits[split]

    def family(self, member: str) -> str:
        """random, mcts, cfr or best-response."""
        self._check(member)
        return family(member)

    def seats(self) -> tuple[int, ...]:
        """Both."""
        return (0, 1)

    def rules(self) -> str:
        """The rules in plain words."""
        kind = self._game.get_type()
        hint = _HINTS.get(str(self._game).partition("(")[0], "")
        return _RULES.format(
            name=kind.long_name,
            hint=f"{hint}\n" if hint else "",
            turns=self._turns,
            least=self.facts.min_return,
            most=self.facts.max_return,
            luck=_LUCK[self._restart],
        )

    def begin(self, task: Task, episode: int) -> OpenSpielPlay:
        """Deal, and let the opponent move where it is the first to."""
        self._check(task.member)
        deals, luck = self._luck(task, episode)
        move = self._opponents.mover(task.member, luck)
        return OpenSpielPlay(self._game, task.seat, self._turns, self._look, move, deals, luck)

    def duel(self, task: Task, episode: int) -> OpenSpielDuel:
        """Deal to the agent and a rival."""
        deals, luck = self._luck(task, episode)
        return OpenSpielDuel(self._game, task.seat, self._turns, self._look, deals, luck)

    def _luck(self, task: Task, episode: int) -> tuple[Chance, Chance]:
        """Chance for the deals and for the opponent: two streams that share one list of draws."""
        luck = Chance(task.seed, 0 if self._restart == "same" else episode)
        dealt = episode if self._restart == "new" else 0
        return Chance(task.seed, -1 - dealt, luck.draws), luck

    def script(self, source: random.Random) -> OpenSpielScript:
        """Plays as one of the training opponents would, with a care drawn for the trial."""
        member = source.choice(self._splits["train"])
        care = source.choice((0.0, 0.5, 1.0))
        return OpenSpielScript(source, care, partial(self._opponents.mover, member))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """All others of the split, or of both where it has only one."""
        self._check(member)
        others = tuple(each for each in self._splits[split] if each != member)
        return others or tuple(
            each for every in self._splits.values() for each in every if each != member
        )

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Values per episode: `random`, measured in 40 games; where the split's opponents are
        solved ones (and at most `random` beside), `best_response`, exact, which knows the opponent.
        """
        uniform = partial(OpenSpielScript, care=0.0, make=partial(self._opponents.mover, "random"))
        measured = scripted_returns(self, split, 1, uniform, _NUM_REFERENCE_TRIALS)
        values = dict[str, tuple[float, ...]](random=measured.repeated(num_episodes))
        members = self._splits[split]
        if set(members) & set(TABLES) and not any(map(is_search, members)):
            best = sum(map(self._opponents.best_value, members)) / len(members)
            values["best_response"] = (best,) * num_episodes
        return values

    def _check(self, member: str) -> None:
        if not any(member in members for members in self._splits.values()):
            example = self._splits["train"][0]
            raise EnvironmentFault(
                f"openspiel: nobody is called {member!r}, as is e.g. {example!r}"
            )


def _load(name: str) -> Any:
    spiel = engine()
    try:
        game = spiel.load_game_as_turn_based(name)
    except spiel.SpielError as error:
        raise ConfigError(f"openspiel: cannot load the game {name!r}: {error}") from None
    if game.num_players() != 2:
        raise ConfigError(f"openspiel: {name!r} is for {game.num_players()} players, not for two")
    if game.get_type().chance_mode == spiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        raise ConfigError(f"openspiel: {name!r} hides its luck, so it could not be repeated")
    return game


def _is_perfect(game: Any) -> bool:
    return game.get_type().information == engine().GameType.Information.PERFECT_INFORMATION


def _check_splits(splits: dict[Split, tuple[str, ...]]) -> None:
    for members in splits.values():
        check_members(members)
    shared = set(splits["train"]) & set(splits["heldout"])
    if shared:
        raise ConfigError(f"openspiel: {min(shared)!r} cannot be trained on and held out")


def _first_actions(game: Any) -> tuple[str, ...]:
    """Names of the actions at the first decision."""
    state = game.new_initial_state()
    while state.is_chance_node():
        state.apply_action(state.chance_outcomes()[0][0])
    seat = state.current_player()
    return tuple(one_line(state.action_to_string(seat, each)) for each in state.legal_actions())
