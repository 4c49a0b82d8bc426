"""One play of the whole protocol, called where it may take long: in a thread.

All that a trial needs to know of the play is read there too, and comes back by value.
"""

from collections.abc import Callable

from mage_async.environments.environment import Outcome, Play
from mage_async.environments.hosted.user_object import Answered, Method, Request
from mage_async.errors import CallFault

PLAY = ("chance", "observation", "anchor", "legal_actions", "act")
"""What a play has."""


class HostedPlay:
    """A play, made by its first call.

    Args:
        begin: makes the play.
        turn_of: calls of all plays with this name are made one after another, unless it is empty.
    """

    def __init__(self, begin: Callable[[], Play], turn_of: str = "") -> None:
        self._begin, self._play, self.turn_of = begin, None, turn_of

    @property
    def play(self) -> Play:
        """The play itself, once it has begun."""
        assert self._play is not None, "begun"
        return self._play

    def is_async(self, method: Method) -> bool:
        """No method of the whole protocol is a coroutine function."""
        return False

    def named(self, method: Method) -> str:
        """What the protocol calls a method; empty where there is nothing to call."""
        return {"reset": "begin", "step": "act", "close": ""}[method]

    def owed(self) -> None:
        """A play is never closed by a coroutine."""

    def asked(self, request: Request) -> Answered:
        """Make a call.

        Raises:
            CallFault: the value is not what the protocol asks for; else whatever the class raises.
        """
        if request.method == "close":
            return Answered()
        if request.method == "reset":
            return self._begun(request.place)
        return self._acted(request)

    def _begun(self, place: str) -> Answered:
        play = self._begin()
        if not all(hasattr(play, each) for each in PLAY):
            raise CallFault(f"{place} must be a `Play`, with {', '.join(PLAY)}, got {_kind(play)}")
        self._play = play
        return Answered(play.observation, anchor=play.anchor)

    def _acted(self, request: Request) -> Answered:
        outcome = self.play.act(request.action)
        if not isinstance(outcome, Outcome):
            raise CallFault(f"{request.place} must be an `Outcome`, got {_kind(outcome)}")
        return Answered(
            outcome.observation,
            outcome.reward,
            outcome.is_valid,
            outcome.is_done,
            outcome.tool_answers,
            outcome.info,
            None if outcome.is_done else self.play.anchor,
        )


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
