"""Rehearse an environment of a user's own before a run: make and time its calls, and check that
equal seeds give equal results. `mage_async/environments/rehearsal.py` chooses the calls.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from mage_async.assembly import environment_of, named_parts
from mage_async.config.schema import Config, Pretrained, Tiny
from mage_async.environments.agent import AgentTasks
from mage_async.environments.catalogue import LOADERS
from mage_async.environments.environment import Environment
from mage_async.environments.legal_pattern import matching_texts
from mage_async.environments.rehearsal import (
    Longest,
    Rehearsal,
    check_vocabulary,
    is_rehearsed,
    rehearsal,
    whole_rehearsal,
)
from mage_async.environments.user_calls import Call, MethodResult
from mage_async.environments.user_class import ResetStep
from mage_async.errors import CallFault, ConfigError, EnvironmentFault, NoRoom
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.results.progress import PLAYED_AGAIN
from mage_async.trajectory import Kind
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.allowed_tokens import action_tokens
from mage_services.actor.rollout import Retries
from mage_services.environments.call_runner import CallRunner
from mage_services.processes.process import Runner, watched

QUIET_S = 5.0
"""Seconds without a printed line after which a line of progress is printed."""
MOST_RETRIES = 3
"""Largest number of retries of a rehearsal; small, because the user waits for its end."""
CHARS_PER_TOKEN = 4
"""Approximate number of characters of a token, for English text and a language model's tokenizer.
"""
TEMPLATE_TOKENS, TINY_TEMPLATE_TOKENS = 12, 4
"""Tokens of the chat template and the tags around a turn: roughly those of a language model, and
exactly those of the tiny one."""
FULL = (
    "; a run opens many objects at once: set environment.most_open to what the server holds, or "
    "environment.wait_for_room_s to the seconds for which to wait"
)
"""What to do if a `reset` found no room."""
EPISODE_TOKENS = 2
"""Tokens of the words before the first observation of an episode, such as "episode 2"."""


def rehearse_all(config: Config, say: Callable[[str], None], run: Runner = asyncio.run) -> None:
    """Rehearse the environments that are a user's own, or whose calls may take long.

    Args:
        say: called with lines for the user.
        run: runs each rehearsal, and may cancel it.

    Raises:
        ConfigError: as `rehearse`.
        PolicyError: the chat format of a model on this machine cannot be read.
    """
    source = config.policy.source if isinstance(config.policy, Pretrained) else ""
    model = Path(source).absolute()  # a class may change the folder
    chat = cache(lambda: load_chat(model))  # read once, however many parts there are
    for name, part in named_parts(config):
        if isinstance(part, AgentTasks):
            # A program needs a policy to play, so the program is loaded and checked, not rehearsed.
            run(part.make().check())
        elif is_rehearsed(name, part):
            characters = run(rehearse(config, name, part, say))
            if source and model.is_dir():
                lost = chat().lost("".join(characters), f"an observation of {name!r}")
                if lost:
                    say(f"rehearsal: {lost}")


async def rehearse(
    config: Config, name: str, environment: Environment, say: Callable[[str], None]
) -> set[str]:
    """Play a few trials of an environment twice with the same seeds, and compare them. Return the
    characters of their observations.

    Args:
        name: as the configuration names the environment.
        say: called with lines for the user.

    Raises:
        ConfigError: the class raised, took too long, returned a wrong value, or did not repeat
            itself.
    """
    say(f"rehearsal: playing {name} twice with the same seeds")
    seconds: dict[str, list[float]] = defaultdict(list)
    legal = _LegalActions(config, name, environment)
    most = min(MOST_RETRIES, config.environment.retries)

    def say_again(text: str) -> None:
        """Print the note on a retry, without its end, which is about the retries of a run."""
        reason, played_again, _ = text.partition(PLAYED_AGAIN)
        say(f"rehearsal: {reason}{played_again}")

    retries = Retries(most, say_again)
    deadline_s, before = config.environment.step_deadline_s, CallFault("")
    # At most one worker process is used, because objects can disturb one another only within a
    # process.
    characters = set[str]()
    limits = msgspec.structs.replace(config.environment, workers=min(1, config.environment.workers))
    try:
        async with CallRunner(limits) as workers:
            progress = _Progress(workers, deadline_s, say)
            for num_retries in count():
                playing = _playing(config, name, environment)
                try:
                    longest = await _played(playing, progress, legal, seconds, characters, say)
                    break
                except CallFault as fault:
                    # After a fault of a network or a server the rehearsal is played again, as in a
                    # run. Mistakes of the class and calls that hang would only come back.
                    hangs = max(chain(*seconds.values()), default=0.0) >= deadline_s
                    if hangs or fault.mistake or str(fault) == str(before):
                        raise
                    await retries.wait(fault, num_retries, before)
                    before = fault
    except CallFault as fault:
        cure = FULL if isinstance(fault, NoRoom) else ""
        raise ConfigError(f"environment {name!r}: {fault}{cure}") from fault
    say(f"rehearsal: {_times(seconds)}")
    say(f"rehearsal: {_context_needed(config, name, environment, longest, legal.longest)}")
    return characters


def _next(go_on: Callable[[], Call]) -> Call | Longest:
    """Return the next call of a rehearsal, or at its end the longest observations."""
    try:
        return go_on()
    except StopIteration as end:
        longest: Longest = end.value
        return longest


async def _played(
    playing: Rehearsal,
    progress: "_Progress",
    legal: "_LegalActions",
    seconds: dict[str, list[float]],
    characters: set[str],
    say: Callable[[str], None],
) -> Longest:
    """Make the calls of a rehearsal, and return its longest observations.

    Args:
        playing: yields a call, and is sent the call's result or thrown its fault.
        seconds: receives the duration of each call by the name of its method.
        characters: receives the characters of the observations.
        say: takes a line about a script that has not chosen an action.

    Raises:
        CallFault: a call failed.
        ConfigError: the class did not repeat itself.
    """
    go_on = partial(playing.send, None)  # starts the generator
    while True:
        # In a thread, because the class's script chooses actions, and may never return.
        call = await watched(partial(_next, go_on), progress.deadline_s, say)
        if isinstance(call, Longest):
            return call
        began = time.monotonic()
        try:
            answered = await progress.perform(call)
            legal.check(call.place, answered)
            characters.update(answered.outcome.observation)
            go_on = partial(playing.send, answered)
        except CallFault as fault:
            go_on = partial(playing.throw, fault)
        if call.name:  # "" if the class has no such method, and nothing was called
            seconds[call.name].append(time.monotonic() - began)


def _playing(config: Config, name: str, environment: Environment) -> Rehearsal:
    """Return the generator that chooses the calls of a rehearsal, and compares their results."""
    if isinstance(environment, ResetStep):
        # With "fresh" the user says that episodes of a task begin differently.
        compares = config.trial.repeats == "same"
        # The number of episodes that another library's server, or one that may be full, can hold at
        # once is not known.
        limits, is_library = config.environment, name.partition(":")[0] in LOADERS
        takes_turns = is_library or limits.most_open == 1 or limits.wait_for_room_s > 0
        return rehearsal(
            name, environment, compares=compares, takes_turns=takes_turns, now=time.monotonic
        )
    return whole_rehearsal(name, environment)


class _LegalActions:
    """Refuse legal actions that a tiny policy cannot write, and measure the length of the others.

    Does nothing where actions are not restricted, or for a pretrained policy: the preflight plays
    turns with its tokenizer.
    """

    def __init__(self, config: Config, name: str, environment: Environment) -> None:
        self._name, self._environment, self._chat = name, environment, None
        self._parser = ActionParser(config.transcript.forced_tags, bool(environment.tools))
        self.longest: int | None = None
        """Tokens of the longest legal action so far, without its tag; `None` where any text is an
        action."""
        # Actions are restricted only where the transcript writes the opening tag (`prefill`).
        if not (config.sampling.restricted and self._parser.prefill(Kind.ACT)):
            return
        if isinstance(config.policy, Tiny):
            with TemporaryDirectory() as folder:
                tokenizer = build_tokenizer(environment_of(config).facts.words)
                save_tokenizer(tokenizer, Path(folder))
                self._chat = load_chat(Path(folder))

    def check(self, place: str, answered: MethodResult) -> None:
        """Check the actions that a class lists after a call.

        Raises:
            ConfigError: the tiny policy cannot have a word of the environment as a token.
        """
        if self._chat is None:
            return
        if answered.legal_pattern is not None:
            words = self._environment.facts.words
            for text in matching_texts(answered.legal_pattern, words):
                self.longest = max(self.longest or 0, len(self._chat.encode(f" {text}")))
            return
        for action in answered.legal_actions or ():
            try:
                tokens = action_tokens(action, self._chat, self._parser)
            except EnvironmentFault as fault:
                raise ConfigError(f"environment {self._name!r}: {place}: {fault}") from fault
            self.longest = max(self.longest or 0, len(tokens) - 1)  # the last token is the tag's
        listed = [(f"{place}, legal_actions", each) for each in answered.legal_actions or ()]
        check_vocabulary(self._name, self._environment, listed)


class _Progress:
    """Make the calls of a rehearsal; print a line whenever none was printed for `QUIET_S`."""

    def __init__(self, workers: CallRunner, deadline_s: float, say: Callable[[str], None]) -> None:
        self._workers, self.deadline_s, self._say, self._num_calls = workers, deadline_s, say, 0
        self._said_at = time.monotonic()

    async def perform(self, call: Call) -> MethodResult:
        """Make a call and return its result. Cancellation abandons the call."""
        began = time.monotonic()
        performing = asyncio.ensure_future(self._workers.perform(call))
        try:
            while not performing.done():
                left_s = max(0.0, self._said_at + QUIET_S - time.monotonic())
                await asyncio.wait([performing], timeout=left_s)
                self._say_if_quiet(call, began)
        finally:
            performing.cancel()
        self._num_calls += 1
        return performing.result()

    def _say_if_quiet(self, call: Call, began: float) -> None:
        """Print a line on the call that is being made, if none was printed for `QUIET_S`."""
        now = time.monotonic()
        if now >= self._said_at + QUIET_S:
            self._say(
                f"rehearsal: {self._num_calls} calls made; {call.name} has taken "
                f"{now - began:.0f} s so far, of environment.step_deadline_s = "
                f"{self.deadline_s:g} s"
            )
            self._said_at = time.monotonic()


def _times(seconds: dict[str, list[float]]) -> str:
    """Return how often each method was called, and how long the calls took, in words."""
    parts = [
        f"{len(each)} × {method} took {sum(each) / len(each):.2g} s each, at most {max(each):.2g} s"
        for method, each in seconds.items()
    ]
    return "; ".join(parts)


def _context_needed(
    config: Config,
    name: str,
    environment: Environment,
    longest: Longest,
    longest_action: int | None,
) -> str:
    """Estimate from the longest observations of the rehearsal how many tokens the longest trial
    needs, and say what happens if the engine's context has fewer.

    Args:
        longest: longest observations of the rehearsal, as texts.
        longest_action: tokens of the longest legal action; `None` if the policy may write any
            action: then it is as long as the configuration allows.

    Raises:
        ConfigError: an observation alone is too long for a prompt.
    """
    trial, facts, max_tokens = config.trial, environment.facts, config.engine.max_tokens
    episodes = trial.episodes if trial.keeps_history else 1
    is_tiny = isinstance(config.policy, Tiny)
    action = config.transcript.max_action_tokens if longest_action is None else longest_action
    template = TINY_TEMPLATE_TOKENS if is_tiny else TEMPLATE_TOKENS
    opening = EPISODE_TOKENS + _tokens(longest.opening, is_tiny)
    turn = action + template + _tokens(longest.answer, is_tiny)
    rules = _tokens(environment.rules(), is_tiny) if config.transcript.rules else 0
    needed = rules + episodes * (opening + facts.max_turns * turn)
    num_remarks = trial.context_bounds(facts.max_turns).num_remarks_held
    needed += num_remarks * (config.transcript.max_reflection_tokens + template)
    rules_words = len(environment.rules().split()) if config.transcript.rules else 0
    for call, text in (("reset", longest.opening), ("step", longest.answer)):
        # A lower bound: each word has at least one token, and the action has at least one (+ 1).
        num_words = len(text.split())
        least = rules_words + num_words + 1
        if call == "reset":
            least += EPISODE_TOKENS
        if is_tiny:
            least += TINY_TEMPLATE_TOKENS
        if least > max_tokens:
            raise ConfigError(
                f"environment {name!r}: {call} returns an observation of {num_words:,} "
                f"words, so a prompt has at least {least:,} tokens and does not fit into "
                f"engine.max_tokens = {max_tokens:,}: shorten the observation, or set "
                f"engine.max_tokens={max(needed, least)}"
            )
    remarks = f" and {num_remarks} remarks" if num_remarks else ""
    need = (
        f"the longest trial, {episodes} × {facts.max_turns} turns{remarks}, needs about {needed:,} "
        f"tokens of engine.max_tokens = {max_tokens:,}"
    )
    if needed <= max_tokens:
        return need
    if trial.compaction != "none":
        rest = "notes" if trial.compaction == "notes" else "the newest turns"
        most = trial.room or max_tokens
        return f"{need}: {rest} replace a context that outgrows {most:,} tokens"
    # The name of a library's environment has a ":", such as "gymnasium:Taxi-v4".
    turns = "environment.options.turns" if ":" in facts.name else "the class's max_turns"
    return (
        f"{need}: episodes share the context evenly, and one that has used its share is cut; "
        f"raise engine.max_tokens, or lower {turns}"
    )


def _tokens(text: str, is_tiny: bool) -> int:
    """Return the number of tokens of a text: the words for a tiny model, otherwise an estimate."""
    words = len(text.split())
    return words if is_tiny else max(words, len(text) // CHARS_PER_TOKEN)
