"""The rehearsal of a slow environment: its calls are made and timed, and what a run has to expect
is said before anything starts.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from mage_async.config.schema import Config
from mage_async.environments.reset_step import ResetStep
from mage_async.environments.restarts import Rehearsed, rehearsal
from mage_async.errors import CallFault, ConfigError
from mage_services.environments.workers import Workers

CHARS_PER_TOKEN = 4
"""About as many in English text, for the tokenizers of language models."""
TEMPLATE_TOKENS = 12
"""About as many around a turn, in the chat templates of today's models."""


async def rehearse(
    config: Config, name: str, environment: ResetStep, say: Callable[[str], None]
) -> None:
    """Play an environment called `name` a little, restart and compare; `say` is given lines for a
    person.

    Raises:
        ConfigError: the class raised, took too long, returned what it may not, or does not repeat
            itself.
    """
    say(f"rehearsal: playing {name} twice with the same seeds")
    seconds: dict[str, list[float]] = defaultdict(list)
    playing = rehearsal(name, environment, compares=config.trial.repeats == "same")
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
                go_on = partial(playing.send, await workers.perform(call))
            except CallFault as fault:
                go_on = partial(playing.throw, fault)
            seconds[call.request.method].append(time.monotonic() - began)
    say(f"rehearsal: {_times(seconds)}")
    say(f"rehearsal: {_room(config, environment, seen)}")


def _times(seconds: dict[str, list[float]]) -> str:
    parts = [
        f"{len(each)} × {method} took {sum(each) / len(each):.2g} s each, at most {max(each):.2g} s"
        for method, each in seconds.items()
    ]
    return "; ".join(parts)


def _room(config: Config, environment: ResetStep, seen: Rehearsed) -> str:
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
