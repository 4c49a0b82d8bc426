"""Compare programs that call the policy over HTTP with a class in the actor: speed, prefix reuse.

    python -m bench.system.gateway MODEL --name gateway              rates, with a model
    python -m bench.system.gateway --turn-s 1 --name gateway_waits   added time, without one

The gateway is the HTTP server at which a user's program finds the policy. The same trials of three
episodes are played in two ways, in alternation, on one engine in this process: by a class with
`reset` and `step`, and by a program with its own loop that calls the gateway. The conversation
grows from call to call, and the history is carried from episode to episode. All trials are played
at once. A completion has 4 to 12 tokens in both ways, and the program writes the tags of an action
that the class's transcript has, so that both do the same work.

turns a second       of wall time, and of processor time of this process, which other work on the
                     machine disturbs less
milliseconds inside  from the last byte of a request to its prompt's arrival at the engine, and from
                     the completion to the last byte of the answer
processor ms a turn  of the thread that plays the trials, in which the gateway is; the programs,
                     with their clients, run in another one
added milliseconds   from an observation to the action behind it, less the engine's time: by the
                     program as its HTTP client sees it, and by the class
reuse                prompt tokens that came from the engine's prefix cache, as a share of those
                     that an earlier call of the same sequence has computed

MODEL is a model directory, such as SmolLM2-135M-Instruct; without it the tiny model plays, whose
turns cost about as much as an HTTP request. With `--turn-s` the model is not asked: turns take that
many seconds in the mean, log-normally, as with an engine that computes elsewhere, and trials begin
one after another within one such time (`--together`: in the same instant). The exit status is 1 if,
with a MODEL that is asked, the program plays less than 0.9 of the class's turns per processor
second, or less than 0.99 is reused; and if, with `--turn-s`, the 99th percentile of the
milliseconds inside is over 5. Other work on the machine is in all figures but those of
processor time: on a busy one, run it with a priority (`chrt --fifo 50`).
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.assembly import trial_config_of
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.config.schema import Environment as EnvironmentConfig
from mage_async.environments.agent import AgentProgram, AgentTasks
from mage_async.environments.user_class import ResetStep
from mage_async.inference.chat_files import load_chat
from mage_async.policy.initial_policy import prepare_policy
from mage_async.trajectory import Task, Trial
from mage_services.actor.rollout import Stage, play_trial
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.environments.call_runner import CallRunner
from mage_services.gateway.gateway import Gateway
from tests.helpers.scripted_engine import Answer, LogNormalPace, ScriptedEngine

EPISODES = 3
LENGTHS = range(4, 13)
"""Tokens of a completion."""
WORDS = ("and", "is", "on", "paper", "rock", "the")
"""Words of the observations; the tiny tokenizer has a token for each."""
LEAST_RATE, MOST_INSIDE_MS, LEAST_REUSE = 0.9, 5.0, 0.99
"""Bounds: turns per processor second of the program over the class's, the 99th percentile of the
milliseconds inside, and the reuse."""
SETTINGS = (
    "warm_start=none",
    "environment.name=rps",
    f"trial.episodes={EPISODES}",
    "trial.memory=history",
    "transcript.forced_tags=both",
    "transcript.rules=false",
    f"transcript.max_action_tokens={LENGTHS[-1]}",
)


def observation_of(task: int, episode: int, turn: int, num_words: int) -> str:
    """Return an observation: random words, which task, episode and turn determine."""
    source = random.Random(f"{task} {episode} {turn}")
    return " ".join(source.choices(WORDS, k=num_words))


@dataclass
class CallTimes:
    """Hold the times at which a request passed the borders of the gateway, in seconds."""

    arrived: float
    """Its last byte."""
    submitted: float = 0.0
    """Its prompt reached the engine."""
    completed: float = 0.0
    """Its completion left the engine."""
    answered: float = 0.0
    """The last byte of its answer."""

    def inside_ms(self) -> tuple[float, float]:
        """Return the milliseconds in the gateway before the engine, and behind it."""
        return (self.submitted - self.arrived) * 1e3, (self.answered - self.completed) * 1e3


CURRENT: ContextVar[CallTimes | None] = ContextVar("current", default=None)
"""The call that the current task answers; the engine's wrapper notes its times there."""


@contextmanager
def observed(calls: list[CallTimes]) -> Iterator[None]:
    """Add the times of each call that a gateway answers to `calls`, as a context manager.

    Methods of aiohttp and of the gateway are replaced meanwhile.
    """
    arrived: dict[RequestHandler, float] = {}
    under_way: dict[RequestHandler, CallTimes] = {}
    receive, finish = RequestHandler.data_received, RequestHandler.finish_response

    def data_received(self: RequestHandler, data: bytes) -> None:
        arrived[self] = time.perf_counter()
        receive(self, data)

    async def finish_response(self: RequestHandler, *given: Any) -> Any:
        done = await finish(self, *given)
        if (call := under_way.pop(self, None)) is not None:
            call.answered = time.perf_counter()
            calls.append(call)
        return done

    async def reply(
        self: Gateway, handle: Callable[..., Awaitable[web.Response]], request: web.Request
    ) -> web.Response:
        await request.read()
        call = CallTimes(arrived[request.protocol])
        under_way[request.protocol] = call
        CURRENT.set(call)
        return await own_reply(self, handle, request)

    own_reply = Gateway._reply
    RequestHandler.data_received, RequestHandler.finish_response = data_received, finish_response
    Gateway._reply = reply
    try:
        yield
    finally:
        RequestHandler.data_received, RequestHandler.finish_response = receive, finish
        Gateway._reply = own_reply


@dataclass
class Clock:
    """Collect milliseconds between an observation and the action that follows it, without the
    engine's."""

    engine_s: dict[str, float] = field(default_factory=dict)
    """Engine's seconds of the last completion of each trial."""
    added_ms: list[float] = field(default_factory=list)

    def note(self, task: int, since: float) -> None:
        """Record an action that follows an observation of time `since`."""
        self.added_ms.append((time.perf_counter() - since - self.engine_s[str(task)]) * 1e3)


class FixedLengths:
    """An engine whose completions have as many tokens as the prompt's seed says.

    Args:
        clock: is told the engine's seconds.
    """

    def __init__(self, engine: Any, clock: Clock) -> None:
        self._engine, self._clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def complete(self, prompt: Prompt) -> Completion:
        """Sample a completion that no stop token ends."""
        length = LENGTHS[prompt.seed % len(LENGTHS)]
        sampling = replace(prompt.sampling, max_tokens=length, stop_tokens=())
        began, call = time.perf_counter(), CURRENT.get()
        completion = await self._engine.complete(replace(prompt, sampling=sampling))
        if call is not None:
            call.submitted, call.completed = began, time.perf_counter()
        self._clock.engine_s[prompt.context.partition(".")[0]] = time.perf_counter() - began
        return completion


def as_class(clock: Clock, turns: int, num_words: int) -> ResetStep:
    """Return the environment as a class with `reset` and `step`."""

    episodes: dict[int, int] = {}

    class RandomWords:
        max_turns = turns

        def reset(self, seed: int, task: int) -> str:
            self.task, self.turn = task, 0
            self.episode = episodes[task] = episodes.get(task, -1) + 1
            return self._observation()

        def step(self, action: str) -> tuple[str, float, bool]:
            clock.note(self.task, self.since)
            self.turn += 1
            return self._observation(), 1.0, self.turn == turns

        def _observation(self) -> str:
            self.since = time.perf_counter()
            return observation_of(self.task, self.episode, self.turn, num_words)

    return ResetStep(RandomWords, {})


def as_program(clock: Clock, turns: int, num_words: int) -> AgentTasks:
    """Return the environment as a program with its own loop, and an HTTP client for each
    episode."""

    async def run(
        self: Any, task: int, episode: int, seed: int, base_url: str, api_key: str
    ) -> float:
        messages, url = [], f"{base_url}/chat/completions"
        async with aiohttp.ClientSession() as http:
            for turn in range(turns):
                since = time.perf_counter()
                own = observation_of(task, episode, turn, num_words)
                # As in the class's transcript, the policy's last answer has no closing tag yet.
                text = f"{'</action>' if turn else ''} {own} <action>"
                messages.append({"role": "user", "content": text})
                async with http.post(url, json={"messages": messages}) as response:
                    answer = await response.json()
                messages.append(answer["choices"][0]["message"])
                clock.note(task, since)
        return float(turns)

    return AgentTasks(type("own", (AgentProgram,), {"run": run, "max_turns": turns}), {})


@dataclass
class Played:
    """Hold the figures of one round of one way."""

    num_turns: int
    wall_s: float
    processor_s: float
    own_s: float
    """Processor seconds of the thread that plays the trials."""
    added_ms: list[float]
    calls: list[CallTimes]
    reuse: float
    tokens: float
    """Mean number of tokens of a trial."""


async def play(
    environment: ResetStep,
    config: Config,
    folder: Path,
    engine: Any,
    clock: Clock,
    n: int,
    spread_s: float,
) -> Played:
    """Play `n` trials concurrently, which begin within `spread_s` seconds."""
    chat = load_chat(folder)
    limits = trial_config_of(config, environment, chat, EPISODES)
    timed: Any = FixedLengths(engine, clock)
    calls: list[CallTimes] = []
    with observed(calls):
        async with CallRunner(EnvironmentConfig(step_deadline_s=600.0)) as workers:
            stage = Stage(environment, limits, chat, timed, workers)
            runs = [stage.begin(Task("own", str(task), task), 0, f"{task}.") for task in range(n)]

            async def play_later(run: Any, number: int) -> Trial:
                await asyncio.sleep(spread_s * number / n)
                return await play_trial(run, timed, workers)

            began, used, own = time.perf_counter(), time.process_time(), time.thread_time()
            trials = await asyncio.gather(*(play_later(run, i) for i, run in enumerate(runs)))
            seconds, used = time.perf_counter() - began, time.process_time() - used
            own = time.thread_time() - own
    num_turns = sum(len(trial.turns) for trial in trials)
    tokens = sum(len(each.tokens) for trial in trials for each in trial.segments) / n
    reuse = reuse_of(trials)
    return Played(num_turns, seconds, used, own, clock.added_ms, calls, reuse, tokens)


def reuse_of(trials: list[Trial]) -> float:
    """Return the share of prompt tokens that were reused, of those that earlier turns of the
    segment computed."""
    num_reused = num_reusable = 0
    for trial in trials:
        ends: dict[int, int] = {}
        for turn in trial.turns:
            if turn.segment in ends:
                # No forward pass has read the last token of a completion, so it is not cached.
                num_reusable += ends[turn.segment] - 1
                num_reused += turn.num_reused
            ends[turn.segment] = turn.stop
    return num_reused / num_reusable


async def measure(
    config: Config, folder: Path, given: argparse.Namespace
) -> dict[str, list[Played]]:
    """Play rounds of both ways in alternation; the first of each warms up and is not counted."""
    found: dict[str, list[Played]] = {"class": [], "program": []}
    n, rounds, shape = given.trials, given.rounds, (given.turns, given.words)
    # In a training run, trials begin as others end.
    spread_s = 0.0 if given.together else given.turn_s
    async with engine_of(config, folder, given.turn_s) as engine:
        for number in range(rounds + 1):
            clock = Clock()
            one = await play(as_class(clock, *shape), config, folder, engine, clock, n, spread_s)
            clock = Clock()
            other = await play(
                as_program(clock, *shape), config, folder, engine, clock, n, spread_s
            )
            if number:
                found["class"].append(one)
                found["program"].append(other)
    return found


def engine_of(config: Config, folder: Path, turn_s: float) -> EmbeddedEngine | ScriptedEngine:
    """Return the engine of a model directory, or one without a model whose turns take `turn_s`."""
    if not turn_s:
        return EmbeddedEngine(folder, config.engine)
    # Always the same tokens, as many as the longest completion has, of log-prob -1.
    tokens = load_chat(folder).encode(" rock" * LENGTHS[-1])
    return ScriptedEngine(lambda prompt, turn: Answer(tokens, -1.0), LogNormalPace(turn_s, 0.5))


def figures_of(found: dict[str, list[Played]]) -> dict[str, Any]:
    """Return medians over rounds, and the spread of the ratios."""

    def rates(way: str, seconds: str) -> list[float]:
        return [each.num_turns / getattr(each, seconds) for each in found[way]]

    figures: dict[str, Any] = {}
    for kind, seconds in (("wall", "wall_s"), ("processor", "processor_s")):
        one, other = rates("class", seconds), rates("program", seconds)
        ratios = [b / a for a, b in zip(one, other, strict=True)]
        figures[kind] = {
            "class_turns_per_s": statistics.median(one),
            "program_turns_per_s": statistics.median(other),
            "ratio": statistics.median(ratios),
            "ratios": [min(ratios), max(ratios)],
        }
    for way, played in found.items():
        turns = sum(each.num_turns for each in played)
        figures[f"{way}_processor_ms_per_turn"] = sum(each.own_s for each in played) / turns * 1e3
        added = np.concatenate([each.added_ms for each in played])
        figures[f"{way}_added_ms"] = percentiles(added)
        figures[f"{way}_reuse"] = min(each.reuse for each in played)
        figures[f"{way}_tokens_per_trial"] = statistics.mean(each.tokens for each in played)
    inside = np.array([call.inside_ms() for each in found["program"] for call in each.calls])
    for name, values in zip(("before", "behind"), inside.T, strict=True):
        figures[f"inside_{name}_engine_ms"] = percentiles(values)
    figures["inside_ms"] = percentiles(inside.sum(1))
    return figures


def percentiles(values: np.ndarray) -> dict[str, float]:
    """Return two percentiles, the largest value and the number of values."""
    p50, p99, most = np.percentile(values, [50, 99, 100]).tolist()
    return {"p50": p50, "p99": p99, "most": most, "calls": len(values)}


def main() -> None:
    """Measure, print and judge."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "model", nargs="?", type=Path, help="model directory; default: the tiny one"
    )
    parser.add_argument("--trials", type=int, default=64, help="at once (64)")
    parser.add_argument("--turns", type=int, default=4, help="of an episode (4)")
    parser.add_argument("--words", type=int, default=8, help="of an observation (8)")
    parser.add_argument("--rounds", type=int, default=4, help="of each way (4)")
    parser.add_argument("--turn-s", type=float, default=0.0, help="seconds of a turn; 0: a model's")
    parser.add_argument(
        "--together", action="store_true", help="all trials begin in the same instant"
    )
    parser.add_argument("--name", help="write the figures as this baseline")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config, policy = policy_of(given, Path(folder))
        found = asyncio.run(measure(config, policy, given))
    figures = figures_of(found)
    for key, value in figures.items():
        print(f"{key:18} {value}")
    if given.name:
        what = {
            "model": given.model.name if given.model else "tiny",
            "trials": given.trials,
            "turns": given.turns,
            "words": given.words,
            "turn_s": given.turn_s,
            "together": given.together,
        }
        write_baseline(given.name, what | figures)
    ratio, reuse = figures["processor"]["ratio"], figures["program_reuse"]
    inside, is_asked = figures["inside_ms"]["p99"], bool(given.model and not given.turn_s)
    rows = [
        (is_asked, ratio >= LEAST_RATE, f"{ratio:.2f} of the turns, wanted {LEAST_RATE}"),
        (is_asked, reuse >= LEAST_REUSE, f"{reuse:.3f} reused, wanted {LEAST_REUSE}"),
        (bool(given.turn_s), inside <= MOST_INSIDE_MS, f"{inside:.1f} ms, wanted {MOST_INSIDE_MS}"),
    ]
    missed = [text for is_judged, is_met, text in rows if is_judged and not is_met]
    print(f"missed: {'; '.join(missed)}" if missed else "no bound is missed")
    sys.exit(bool(missed))


def policy_of(given: argparse.Namespace, folder: Path) -> tuple[Config, Path]:
    """Return the configuration of the trials, and the model directory."""
    kind = [f"policy.source={given.model}"] if given.model else ["policy.kind=tiny"]
    # In the tiny model's tokens a word that is none of its own has one for each letter.
    room = max(1024, EPISODES * given.turns * (5 * given.words + 60))
    limits = [f"engine.max_contexts={given.trials}", f"engine.max_tokens={room}"]
    changes = [*kind, *SETTINGS, *limits]
    config = config_file.load(config_file.find(None), changes)
    if given.model:
        return config, given.model
    prepare_policy(config, folder / "policy", lambda progress: None)
    return config, folder / "policy"


if __name__ == "__main__":
    main()
