"""The rehearsal of an environment that may be slow: its calls are made and timed, and what a run
has to expect is said before anything starts.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from mage_async.config.schema import Config
from mage_async.environments.calls import Call
from mage_async.environments.environment import Environment
from mage_async.environments.hosted.user_object import Answered
from mage_async.environments.rehearsal import Rehearsal, Rehearsed, whole_rehearsal
from mage_async.environments.reset_step import ResetStep
from mage_async.environments.restarts import rehearsal
from mage_async.errors import CallFault, ConfigError
from mage_services.environments.workers import Workers

QUIET_S = 5.0
"""A rehearsal that takes longer says how far it is."""
CHARS_PER_TOKEN = 4
"""About as many in English text, for the tokenizers of language models."""
TEMPLATE_TOKENS = 12
"""About as many around a turn, in the chat templates of today's models."""


async def rehearse(
    config: Config, name: str, environment: Environment, say: Callable[[str], None]
) -> None:
    """Play an environment called `name` a little, restart and compare; `say` is given lines for a
    person.

    Raises:
        ConfigError: the class raised, took too long, returned what it may not, or does not repeat
            itself.
    """
    say(f"rehearsal: playing {name} twice with the same seeds")
    seconds: dict[str, list[float]] = defaultdict(list)
    playing = _playing(config, name, environment)
    news = _News(say)
    async with Workers.of(config.environment) as workers:
        go_on = partial(playing.send, None)
        while True:
            try:
                call = go_on()
            except StopIteration as end:
                seen = end.value
                break
            except CallFault as fault:
                raise ConfigError(f"environment {name!r}: {fault}") from fault
            began = time.monotonic()
            try:
                go_on = partial(playing.send, await _performed(call, workers, news))
            except CallFault as fault:
                go_on = partial(playing.throw, fault)
            if call.name:
                seconds[call.name].append(time.monotonic() - began)
    say(f"rehearsal: {_times(seconds)}")
    say(f"rehearsal: {_room(config, environment, seen)}")


def _playing(config: Config, name: str, environment: Environment) -> Rehearsal:
    if isinstance(environment, ResetStep):
        return rehearsal(name, environment, compares=config.trial.repeats == "same")
    return whole_rehearsal(name, environment)


class _News:
    """Says how far a rehearsal is, wherever nothing has been said for `QUIET_S`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._num_calls = say, 0
        self._said_at = time.monotonic()

    def left_s(self) -> float:
        """Until there is something to say."""
        return max(0.0, self._said_at + QUIET_S - time.monotonic())

    def waits(self, call: Call, since_s: float) -> None:
        """A call has not returned yet."""
        if not self.left_s():
            self._say(
                f"rehearsal: {self._num_calls} calls made; {call.name} has taken "
                f"{since_s:.0f} s so far"
            )
            self._said_at = time.monotonic()

    def returned(self) -> None:
        """A call has returned."""
        self._num_calls += 1


async def _performed(call: Call, workers: Workers, news: _News) -> Answered:
    """What a call returned. Cancellation abandons the call."""
    began = time.monotonic()
    performing = asyncio.ensure_future(workers.perform(call))
    try:
        while not performing.done():
            await asyncio.wait([performing], timeout=news.left_s())
            news.waits(call, time.monotonic() - began)
    finally:
        performing.cancel()
    news.returned()
    return performing.result()


def _times(seconds: dict[str, list[float]]) -> str:
    parts = [
        f"{len(each)} × {method} took {sum(each) / len(each):.2g} s each, at most {max(each):.2g} s"
        for method, each in seconds.items()
    ]
    return "; ".join(parts)


def _room(config: Config, environment: Environment, seen: Rehearsed) -> str:
    """What the longest context needs, by the longest observation that was seen."""
    episodes = config.trial.episodes if "history" in config.trial.memory else 1
    facts, room = environment.facts, config.engine.max_tokens
    turn = _tokens(seen.longest) + config.transcript.max_action_tokens + TEMPLATE_TOKENS
    opening = _tokens(environment.rules()) if config.transcript.rules else 0
    needed = opening + episodes * facts.max_turns * turn
    said = (
        f"the longest trial, {episodes} × {facts.max_turns} turns, needs up to about {needed:,} "
        f"tokens of engine.max_tokens = {room:,}"
    )
    if needed <= room:
        return said
    return f"{said}: groups of longer trials are dropped; lower the class's max_turns, or raise it"


def _tokens(text: str) -> int:
    return max(len(text.split()), len(text) // CHARS_PER_TOKEN)
