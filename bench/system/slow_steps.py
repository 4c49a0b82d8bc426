"""Measure how many waiting environments an actor keeps in flight, and what a slow step delays.

    python -m bench.system.slow_steps                  4 minutes

A real actor plays on an engine without a model, with a learner in memory. First it plays 512
concurrent trials whose steps all wait 1 s, in a thread ("plain") or as a coroutine ("async");
figures are steps per second from the first grant to the last result, over the ideal of 512, and
additional memory. Then it plays 64 trials whose steps take no time and whose turns take about
`TURN_S` in the engine, alone and beside 8 trials whose steps sleep 6 s in their first episode;
figures are the 99th percentile of the time from one prompt of one of the 64 trials to its next, and
the longest time between two heartbeats of the actor. These alternate, ROUNDS times.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.system.stall import resident_kib
from mage_async.completion import Completion, Prompt
from mage_async.environments.catalogue import load
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.protocol.messages import GroupDrop, Heartbeat, TrialResult
from mage_async.trials.chat_format import ChatFormat
from tests.helpers.actor_site import Site, grant
from tests.helpers.scripted_engine import ScriptedEngine

NUM_TRIALS, GROUP, EPISODES, STEPS = 512, 8, 3, 4
"""Trials of the first measurement; trials of a group, episodes of a trial, steps of an episode."""
NUM_OTHERS, NUM_SLOW, SLOW_S, TURN_S, ROUNDS = 64, 8, 6.0, 0.1, 5
"""The second measurement: trials whose delay is measured, slow trials, seconds of a slow step, mean
seconds of a turn, and rounds."""
SECONDS = {"none": 0.0, "second": 1.0, "slow": SLOW_S}
"""Seconds that a step waits, by task; those of "slow" only in the first episode."""
WANTED_SHARE, WANTED_DELAY, LONGEST_BEAT_S = 0.9, 1.1, 1.5
"""Bounds: least share of the ideal steps per second, largest ratio of the 99th percentile beside
slow trials to that without, and longest time between two heartbeats."""


# The docstrings of the two environments are the rules in their prompts.


class Waits:
    """Say anything."""

    max_turns = STEPS

    def members(self, split: str) -> tuple[str, ...]:
        return tuple(SECONDS) if split == "train" else ("heldout", "other")

    def reset(self, seed: int, task: str, episode: int) -> str:
        self.wait_s = SECONDS[task] if task != "slow" or episode == 0 else 0.0
        return "rock"

    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(self.wait_s)
        return "paper", 1.0, False


class AwaitsSteps(Waits):
    """Say anything."""

    async def reset(self, seed: int, task: str, episode: int) -> str:
        return super().reset(seed, task, episode)

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self.wait_s)
        return "paper", 1.0, False


# Environment classes by name of the measurement.
KINDS = {"plain": "Waits", "async": "AwaitsSteps"}


class RecordingEngine:
    """Engine that records when each trial sends a prompt."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine, self._complete = engine, engine.complete
        self.prompted_at: dict[str, list[float]] = defaultdict(list)

    async def complete(self, prompt: Prompt) -> Completion:
        self.prompted_at[prompt.context].append(time.perf_counter())
        return await self._complete(prompt)


def chat() -> ChatFormat:
    """Return the chat format of a tiny tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(build_tokenizer(load("rps").facts.words), Path(folder))
        return load_chat(Path(folder))


async def played(
    kind: str, counts: dict[str, int], pace_s: float, known: ChatFormat
) -> dict[str, Any]:
    """Play groups of each task; return their times, and what was measured meanwhile."""
    environment = load(f"bench.system.slow_steps:{KINDS[kind]}")
    source = random.Random(0)
    site = Site(environment, known, lambda trial: pace_s * source.uniform(0.5, 1.5), None)
    recording = RecordingEngine(site.engine)
    site.engine.complete = recording.complete  # type: ignore[method-assign]
    before, began = resident_kib(_own()), time.perf_counter()
    tasks = [task for task, count in counts.items() for _ in range(count // GROUP)]
    for number, task in enumerate(tasks):
        site.say(grant(number, member=task, num_trials=GROUP, num_episodes=EPISODES))
    left, beats = sum(counts.values()), list[float]()
    while left:
        _, message = await site.learner.receive()
        assert not isinstance(message, GroupDrop), message
        if isinstance(message, TrialResult):
            left -= 1
        elif isinstance(message, Heartbeat):
            beats.append(time.perf_counter())
    took_s = time.perf_counter() - began
    grown, num_threads = resident_kib(_own()) - before, threading.active_count()
    await site.goodbye()
    # The name of a context begins with the number of its group.
    slow = {str(number) for number, task in enumerate(tasks) if task == "slow"}
    turns = [
        later - early
        for context, times in recording.prompted_at.items()
        if context.split(".")[0] not in slow
        for early, later in pairwise(times)
    ]
    return {
        "took_s": took_s,
        "grown_mib": grown / 1024,
        "num_threads": num_threads,
        "p99_turn_s": statistics.quantiles(turns, n=100)[98],
        "longest_beat_s": max((later - beat for beat, later in pairwise(beats)), default=0.0),
    }


def _own() -> int:
    return os.getpid()


def in_flight(kind: str, known: ChatFormat) -> dict[str, Any]:
    """Measure many trials whose steps wait 1 s."""
    found = uvloop.run(played(kind, {"second": NUM_TRIALS}, 0.0, known))
    rate = NUM_TRIALS * EPISODES * STEPS / found["took_s"]
    return {
        "steps_per_s": rate,
        "share_of_ideal": rate / NUM_TRIALS,  # ideally each trial makes a step a second
        "grown_mib": found["grown_mib"],
        "num_threads": found["num_threads"],
        "longest_beat_s": found["longest_beat_s"],
    }


def beside_slow(known: ChatFormat) -> dict[str, Any]:
    """Measure trials alone and beside slow ones, in alternation."""
    alone = {"none": NUM_OTHERS}
    ways = {
        f"{kind}, {name}": (kind, counts)
        for kind in KINDS
        for name, counts in (("alone", alone), ("beside slow", alone | {"slow": NUM_SLOW}))
    }
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, (kind, counts) in ways.items():
            found[name].append(uvloop.run(played(kind, counts, TURN_S, known)))
    return {
        name: {
            "p99_turn_s": statistics.median(each["p99_turn_s"] for each in rows),
            "all_p99_turn_s": [each["p99_turn_s"] for each in rows],
            "longest_beat_s": max(each["longest_beat_s"] for each in rows),
        }
        for name, rows in found.items()
    }


def main() -> None:
    """Measure both, and print the verdict."""
    option_parser(__doc__).parse_args()
    known = chat()
    flights = {kind: in_flight(kind, known) for kind in ("async", "plain")}
    for kind, row in flights.items():
        print(
            f"{kind:<8}{row['steps_per_s']:>7.1f} steps/s  {row['share_of_ideal']:.3f} of ideal  "
            f"{row['grown_mib']:>6.1f} MiB more  {row['num_threads']} threads"
        )
    ways = beside_slow(known)
    delays = {
        kind: ways[f"{kind}, beside slow"]["p99_turn_s"] / ways[f"{kind}, alone"]["p99_turn_s"]
        for kind in KINDS
    }
    for name, row in ways.items():
        print(f"{name:<20} p99 {row['p99_turn_s'] * 1000:>6.1f} ms")
    beats = [row["longest_beat_s"] for row in (*flights.values(), *ways.values())]
    print(f"p99 beside slow steps: {delays}; longest between heartbeats {max(beats):.2f} s")
    shape = {
        "trials": NUM_TRIALS,
        "episodes": EPISODES,
        "steps": STEPS,
        "others": NUM_OTHERS,
        "slow": NUM_SLOW,
        "slow_s": SLOW_S,
        "turn_s": TURN_S,
        "rounds": ROUNDS,
    }
    figures = {"in_flight": flights, "beside_slow": ways, "p99_ratio": delays}
    write_baseline("slow_steps", {"shape": shape, **figures})
    is_well = (
        all(row["share_of_ideal"] >= WANTED_SHARE for row in flights.values())
        and all(delay <= WANTED_DELAY for delay in delays.values())
        and max(beats) <= LONGEST_BEAT_S
    )
    print("all bounds are kept" if is_well else "a bound is MISSED")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
