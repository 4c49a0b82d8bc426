"""One episode of a game of OpenSpiel, in text."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.environments.environment import Chance, Outcome, Play
from mage_async.environments.openspiel.engine import Mover
from mage_async.errors import EnvironmentFault

INVALID, WIN, DRAW, LOSE = "invalid", "win", "draw", "lose"
Look = Callable[[Any, int], str]
"""What a player sees of a state."""


class OpenSpielPlay:
    """One game. The anchor is what the agent sees."""

    __slots__ = (
        *("_deals", "_is_done", "_least", "_look", "_move", "_seat", "_turns_left"),
        *("chance", "observation", "state"),
    )

    def __init__(
        self,
        game: Any,
        seat: int,
        turns: int,
        look: Look,
        move: Mover,
        deals: Chance,
        chance: Chance,
    ) -> None:
        self._seat, self._turns_left, self._look, self._move = seat, turns, look, move
        self._deals, self.chance = deals, chance
        self._least = float(game.min_utility())
        self._is_done = False
        self.state = game.new_initial_state()
        """OpenSpiel's; the agent's turn, or over."""
        self.observation = self._go_on()

    @property
    def anchor(self) -> str:
        """What the agent sees."""
        return self._look(self.state, self._seat)

    def actions(self) -> dict[str, int]:
        """OpenSpiel's actions by name."""
        if self._is_done:
            return {}
        state, seat = self.state, self._seat
        return {
            one_line(state.action_to_string(seat, each)): each for each in state.legal_actions()
        }

    def legal_actions(self) -> Sequence[str]:
        """Names of the actions, until the game is over."""
        return tuple(self.actions())

    def act(self, action: str) -> Outcome:
        """Make a move; an invalid one makes none but uses up the turn."""
        assert not self._is_done, "the episode is done"
        self._turns_left -= 1
        number = self.actions().get(action)
        if number is None:
            return self._outcome(f"{INVALID} {self.anchor}", is_valid=False)
        self.state.apply_action(number)
        return self._outcome(self._go_on(), is_valid=True)

    def _go_on(self) -> str:
        """Deal and let the opponent move until it is the agent's turn; what the agent then sees."""
        state = self.state
        while not state.is_terminal() and state.current_player() != self._seat:
            if state.is_chance_node():
                outcomes = state.chance_outcomes()
                index = self._deals.choose("deal", [weight for _, weight in outcomes])
                state.apply_action(outcomes[index][0])
            else:
                state.apply_action(self._move(state))
        return self.anchor

    def _outcome(self, said: str, *, is_valid: bool) -> Outcome:
        is_over = self.state.is_terminal()
        self._is_done = is_over or not self._turns_left
        if not self._is_done:
            return Outcome(said, 0.0, is_valid)
        earned = float(self.state.returns()[self._seat]) if is_over else self._least
        return Outcome(f"{said} {result_words(earned)}", earned, is_valid, True)


@dataclass(slots=True)
class OpenSpielScript:
    """Plays as one of the opponents would, or moves anyhow."""

    source: random.Random
    care: float
    make: Callable[[Chance], Mover]
    """Begins an episode of the opponent that is imitated."""
    _play: Play | None = None
    _move: Mover | None = None

    def choose(self, play: Play) -> str:
        """The next action."""
        assert isinstance(play, OpenSpielPlay)
        if self._move is None or self._play is not play:
            self._play, self._move = play, self.make(Chance(self.source.getrandbits(32), 0))
        if self.source.random() >= self.care:
            return self.source.choice(play.legal_actions())
        number = self._move(play.state)
        return next(name for name, each in play.actions().items() if each == number)


def result_words(earned: float) -> str:
    """How a game ended, and what it was worth where that is no single point."""
    result = WIN if earned > 0 else LOSE if earned < 0 else DRAW
    return result if abs(earned) in (0, 1) else f"{result} {abs(earned):g}"


def one_line(text: str) -> str:
    """The same in one line of single spaces, a bar where a line ended."""
    return " | ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def look_at(game: Any) -> Look:
    """What a player sees of a game: no more than it may know, and no earlier moves where the game
    can do without.

    Raises:
        EnvironmentFault: the game cannot say it.
    """
    kind = game.get_type()
    if kind.provides_observation_string:
        return lambda state, seat: one_line(state.observation_string(seat))
    if kind.provides_information_state_string:
        return lambda state, seat: one_line(state.information_state_string(seat))
    raise EnvironmentFault(f"openspiel: {game} has no text for what a player sees")
