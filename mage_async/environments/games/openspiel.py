"""Play any two-player game of OpenSpiel: Leduc poker, liar's dice, connect four, goofspiel, hex …

Rules are the engine's. The agent reads and writes the engine's own words, so the text is open and
needs a language model. The opponent's way to play is hidden, and the same in all episodes. Kuhn
poker and tic-tac-toe have environments of their own with a small vocabulary.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, get_args

from mage_async.environments.environment import (
    AGENT,
    Chance,
    DuelPlay,
    Side,
    Split,
    Splits,
    check_one_of,
    check_texts,
    check_whole,
    named,
)
from mage_async.environments.game_references import scripted_returns
from mage_async.environments.games.game import Game, TrialScript, facts_of
from mage_async.environments.games.openspiel_policies import (
    DRAW,
    INVALID,
    LOSE,
    WIN,
    EngineDuel,
    Mover,
    Table,
    best_response,
    best_value,
    engine,
    equilibrium,
    greedy,
    has_perfect_information,
    searcher,
)
from mage_async.environments.games.text_game import one_line
from mage_async.errors import ConfigError
from mage_async.trajectory import Task

Look = Callable[[Any, int], str]
"""Returns the text that a player sees; called with a state and a seat."""

Restart = Literal["same", "deal", "new"]
"""What the episodes of a task share; see `OpenSpielGame`."""

_PERFECT = (("random", "mcts-10", "mcts-100"), ("mcts-30", "mcts-1000"))
"""Opponents by default, to train on and held out, of games in which both players see everything."""
_HIDDEN = (("random", "cfr-greedy"), ("cfr", "best-response-random"))
"""Opponents by default, to train on and held out, of games with hidden cards."""
_NUM_REFERENCE_TRIALS = 40
"""Number of trials for each measured return."""
_RULES = """You play {name} against one opponent; moves are written as OpenSpiel writes them.
You see the game as a player of it does, one line after another with a bar between them.
{hint}An invalid action leaves the game as it is. A game that is not over after {turns} of your
turns counts as lost. The result is what you win: from {least:g} to {most:g}.
The opponent has its own way to play, the same in all episodes. {restart}"""
_RESTART_RULES = {
    "same": "All luck is the same in all episodes.",
    "deal": "The deal is the same in all episodes.",
    "new": "Each episode is dealt anew.",
}
"""Sentences of the rules about what episodes share, by `Restart`."""
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
"""Sentences that explain games, by OpenSpiel's name of the game."""


class OpenSpielDuel(EngineDuel):
    """Play one game between two policies.

    Args:
        game: The engine's game.
        seat: The agent's seat, 0 or 1.
        turns: Largest number of turns of a side.
        look: Returns what a player sees.
        deals: Draws the outcomes of the game's chance nodes.
        chance: Draws all else, such as the opponent's moves.
        is_scripted: Whether a script plays the opponent; see `EngineDuel`.
    """

    def __init__(
        self,
        game: Any,
        seat: int,
        turns: int,
        look: Look,
        deals: Chance,
        chance: Chance,
        *,
        is_scripted: bool,
    ) -> None:
        super().__init__(game.new_initial_state(), seat, turns, chance, is_scripted=is_scripted)
        self._look, self._deals = look, deals
        self._draw_deal()
        if self.turn is not None:
            self._show_state(self.turn)

    def anchor(self, side: Side) -> str:
        """Return what a side sees."""
        return self._look(self.state, self._seat_of(side))

    def actions(self) -> dict[str, int]:
        """Return OpenSpiel's legal actions of the side to act, by name."""
        if self.turn is None:
            return {}
        return _actions(self.state, self._seat_of(self.turn))

    def _apply(self, side: Side, number: int) -> None:
        """Apply a move, and draw the outcomes of the chance nodes after it."""
        self.state.apply_action(number)
        self._draw_deal()

    def _draw_deal(self) -> None:
        """Draw the outcomes of chance nodes."""
        while self.state.is_chance_node():
            outcomes = self.state.chance_outcomes()
            index = self._deals.choose("deal", [weight for _, weight in outcomes])
            self.state.apply_action(outcomes[index][0])

    def _seat_of(self, side: Side) -> int:
        """Return the seat of a side."""
        return self._seat if side == AGENT else 1 - self._seat


class OpenSpielPlay(DuelPlay):
    """Play one game against a hidden opponent. The anchor, which is equal for equal states, is what
    the agent sees.
    """

    def __init__(self, duel: OpenSpielDuel, move: Mover) -> None:
        self.duel = duel
        super().__init__(duel, lambda: duel.move(move(duel.state)))


def _actions(state: Any, seat: int) -> dict[str, int]:
    """Return the legal actions of the player to act, by name."""
    return {one_line(state.action_to_string(seat, each)): each for each in state.legal_actions()}


@dataclass(slots=True)
class OpenSpielScript(TrialScript[OpenSpielPlay]):
    """Play as one of the opponents would, or move at random."""

    care: float
    """Probability of an imitated move; other moves are random."""
    make: Callable[[Chance], Mover]
    """Returns the imitated opponent for an episode."""
    _move: Mover = field(init=False)

    def begin(self) -> None:
        """Create the imitated opponent for a new episode."""
        self._move = self.make(Chance(self.source.getrandbits(32), 0))

    def action(self, play: OpenSpielPlay) -> str:
        """Return the next action."""
        if self.source.random() >= self.care:
            return self.source.choice(play.legal_actions())
        number = self._move(play.duel.state)
        return next(name for name, each in play.duel.actions().items() if each == number)


def look_at(game: Any) -> Look:
    """Return the function that shows a game's state to a player. The text holds only what this
    player may know, and no earlier moves if the game has such a text.

    Raises:
        ConfigError: the game has no text for it.
    """
    kind = game.get_type()
    if kind.provides_observation_string:
        return lambda state, seat: one_line(state.observation_string(seat))
    if kind.provides_information_state_string:
        return lambda state, seat: one_line(state.information_state_string(seat))
    raise ConfigError(
        f"openspiel: {game} has no text for what a player sees, so no language model can play it"
    )


class OpenSpielGame(Game[str]):
    """Play a game of OpenSpiel; the task variant is the opponent, such as `mcts-100` or
    `cfr-greedy`.

    Args:
        game: Name of the game in OpenSpiel, with its parameters, such as `hex(board_size=4)`.
        train: Opponents to train against: `random`; `mcts-N`, a search with N simulations; `cfr`,
            an equilibrium, which draws from its probabilities; `cfr-greedy`, which always takes the
            equilibrium's most probable action, and so can be beaten; `best-response-random` and
            `best-response-cfr-greedy`. All but the first two need a game small enough to be solved.
            Empty for a choice that suits the game.
        heldout: Opponents held out.
        restart: What the episodes of a task share: `same`, all random events; `deal`, the deals,
            while the opponent's random moves are drawn again (as MAGE does); `new`, nothing.
        turns: Largest number of turns in an episode; 0 for as many as the longest game has.
        iterations: Number of iterations of CFR, for the opponents that need it.

    Raises:
        ConfigError: there is no such game, it is not for two or has no text, an opponent is unknown
            or in both lists, an option has another type, or OpenSpiel is not installed.
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
        check_texts("openspiel", "train", train)
        check_texts("openspiel", "heldout", heldout)
        check_one_of("openspiel", "restart", restart, get_args(Restart))
        check_whole("openspiel", "turns", turns, 0, 100_000)
        check_whole("openspiel", "iterations", iterations, 1, 10_000_000)
        self._game, self._restart = _load(game), restart
        usual = _PERFECT if has_perfect_information(self._game) else _HIDDEN
        train, heldout = tuple(train) or usual[0], tuple(heldout) or usual[1]
        _check_opponents(self._game, train, heldout)
        self._opponents = Opponents(self._game, iterations)
        self._look = look_at(self._game)
        self._turns = turns or self._game.max_game_length()
        # Not the whole vocabulary, because the text is open; the first word is an example of an
        # action.
        first = _first_decision(self._game)
        words = (*_actions(first, first.current_player()), WIN, DRAW, LOSE, INVALID)
        returns = (float(self._game.min_utility()), float(self._game.max_utility()))
        more = {"num_seats": 2, "has_chance": True, "has_open_text": True}
        facts = facts_of("openspiel", self._turns, words, returns, **more)
        splits: Splits[str] = {"train": named(train), "heldout": named(heldout)}
        super().__init__(facts, splits, "opponent")

    def family(self, member: str) -> str:
        """Return the kind of the opponent: random, mcts, cfr or best-response."""
        kind = self.variant(member)
        return "best-response" if kind.startswith("best-response") else kind.partition("-")[0]

    def rules(self) -> str:
        """Return the rules in plain words."""
        kind = self._game.get_type()
        # OpenSpiel wraps a game of simultaneous moves in a game with turns; `inside` is its name.
        inside = str(self._game).removeprefix("turn_based_simultaneous_game(game=")
        hint = _HINTS.get(inside.partition("(")[0], "")
        return _RULES.format(
            name=kind.long_name,
            hint=f"{hint}\n" if hint else "",
            turns=self._turns,
            least=self.facts.min_return,
            most=self.facts.max_return,
            restart=_RESTART_RULES[self._restart],
        )

    def begin(self, task: Task, episode: int) -> OpenSpielPlay:
        """Deal, and let the opponent move if it is first."""
        deals, chance = self._chances(task, episode)
        move = self._opponents.mover(self.variant(task.member), chance)
        return OpenSpielPlay(self._begin_duel(task.seat, deals, chance, is_scripted=True), move)

    def duel(self, task: Task, episode: int) -> OpenSpielDuel:
        """Deal to two policies."""
        return self._begin_duel(task.seat, *self._chances(task, episode), is_scripted=False)

    def _begin_duel(
        self, seat: int, deals: Chance, chance: Chance, *, is_scripted: bool
    ) -> OpenSpielDuel:
        """Return a new game, with `Chance` for the deals and for the opponent's moves."""
        return OpenSpielDuel(
            self._game, seat, self._turns, self._look, deals, chance, is_scripted=is_scripted
        )

    def _chances(self, task: Task, episode: int) -> tuple[Chance, Chance]:
        """Return `Chance` for the deals and for the opponent; both record their draws in one list,
        in order (`Chance.draws`).
        """
        chance = Chance(task.seed, 0 if self._restart == "same" else episode)
        dealt = episode if self._restart == "new" else 0
        # Streams of deals have negative numbers, so that none equals a stream of the opponent.
        return Chance(task.seed, -1 - dealt, chance.draws), chance

    def script(self, source: random.Random) -> OpenSpielScript:
        """Return a script that imitates a training opponent; the share of imitated moves (`care`)
        is drawn for the trial.
        """
        member = source.choice(self.members("train"))
        care = source.choice((0.0, 0.5, 1.0))
        return OpenSpielScript(source, care, partial(self._opponents.mover, member))

    def swaps(self, member: str, split: Split) -> tuple[str, ...]:
        """Return the other members of the split, or of both splits if the split has only one."""
        others = super().swaps(member, split)
        return others or tuple(name for name in self._variants if name != member)

    def references(self, split: Split, num_episodes: int) -> dict[str, tuple[float, ...]]:
        """Return the returns of reference players, by episode.

        `random` is measured in 40 games. `best_response`, which knows the opponent, is exact. It is
        left out if an opponent of the split searches, and if no opponent is a solved table
        (`TABLES`), because then the game may be too large to be solved.
        """
        uniform = partial(OpenSpielScript, care=0.0, make=partial(self._opponents.mover, "random"))
        measured = scripted_returns(self, split, 1, uniform, _NUM_REFERENCE_TRIALS)
        values = dict[str, tuple[float, ...]](random=measured.repeated(num_episodes))
        members = self.members(split)
        if set(members) & set(TABLES) and not any(map(_SEARCH.fullmatch, members)):
            best = sum(map(self._opponents.best_value, members)) / len(members)
            values["best_response"] = (best,) * num_episodes
        return values


def _load(name: str) -> Any:
    """Load a game; raise a `ConfigError` if it is not one for two that can be repeated."""
    spiel = engine()
    if not isinstance(name, str):
        raise ConfigError(f"openspiel: `game` must be the name of a game, as text, got {name!r}")
    try:
        game = spiel.load_game_as_turn_based(name)
    except spiel.SpielError as error:
        raise ConfigError(f"openspiel: cannot load the game {name!r}: {error}") from None
    if game.num_players() != 2:
        raise ConfigError(f"openspiel: {name!r} is for {game.num_players()} players, not for two")
    if game.get_type().chance_mode == spiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        raise ConfigError(
            f"openspiel: {name!r} draws random events by itself, so a game could not be repeated"
        )
    return game


def _first_decision(game: Any) -> Any:
    """Return a state in which a player acts first: take the first outcome of every chance node."""
    state = game.new_initial_state()
    while state.is_chance_node():
        state.apply_action(state.chance_outcomes()[0][0])
    return state


# The code below makes the opponents, by name.


_SEARCH = re.compile(r"mcts-([1-9]\d{0,5})")
"""Name of an opponent that searches, with its number of simulations."""
TABLES = ("cfr", "cfr-greedy", "best-response-random", "best-response-cfr-greedy")
"""Names of the opponents that are tables of probabilities."""
_ADVICE = "write `random`, `mcts-100` (any number of simulations), " + ", ".join(
    f"`{each}`" for each in TABLES
)
"""Advice in errors about the name of an opponent."""


def _check_opponents(game: Any, train: Sequence[str], heldout: Sequence[str]) -> None:
    """Check the names of opponents, and that they can play the game.

    Raises:
        ConfigError: there is no opponent of a name, it is in both splits, or it searches and the
            engine cannot sample the hidden cards of the game.
    """
    for name in (*train, *heldout):
        if name not in ("random", *TABLES) and not _SEARCH.fullmatch(name):
            raise ConfigError(f"openspiel: no opponent is called {name!r}; {_ADVICE}")
    shared = set(train) & set(heldout)
    if shared:
        raise ConfigError(f"openspiel: {min(shared)!r} cannot be trained on and held out")
    if any(map(_SEARCH.fullmatch, (*train, *heldout))):
        # A search of two simulations shows whether the engine can sample the hidden cards.
        try:
            searcher(game, 2, Chance(0, 0))(_first_decision(game))
        except engine().SpielError as error:
            raise ConfigError(f"openspiel: `mcts` cannot play {game}: {error}") from None


class Opponents:
    """Hold the opponents of a game; tables are solved when first needed."""

    def __init__(self, game: Any, iterations: int) -> None:
        self._game, self._iterations = game, iterations
        self._table = cache(self._solve)

    def mover(self, member: str, chance: Chance) -> Mover:
        """Return an opponent's policy for one episode; its random moves are drawn from `chance`."""
        if found := _SEARCH.fullmatch(member):
            return searcher(self._game, int(found[1]), chance)
        table = None if member == "random" else self._table(member)

        def move(state: Any) -> int:
            """Return the opponent's move: drawn uniformly, or by the probabilities of its table."""
            actions: Sequence[tuple[int, float]] = (
                [(action, 1.0) for action in state.legal_actions()]
                if table is None
                else table[state.information_state_string()]
            )
            return actions[chance.choose("opponent", [weight for _, weight in actions])][0]

        return move

    def best_value(self, member: str) -> float:
        """Return the return of a best response to an opponent that does not search, averaged over
        the seats.
        """
        table = {} if member == "random" else self._table(member)  # {} stands for uniform play
        return sum(best_value(self._game, seat, table) for seat in range(2)) / 2

    def _solve(self, member: str) -> Table:
        """Compute the table of an opponent."""
        if member == "cfr":
            return equilibrium(self._game, self._iterations)
        if member == "cfr-greedy":
            return greedy(self._table("cfr"))
        if member == "best-response-random":
            return best_response(self._game, {})  # {} stands for uniform play
        return best_response(self._game, self._table("cfr-greedy"))
