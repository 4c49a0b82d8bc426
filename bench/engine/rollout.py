"""Measure what the prefix cache saves in trials of three episodes of six turns, by cache rule.

    python -m bench.engine.rollout [--engine sglang] [--size tiny|0.6b|4b | --policy DIR]
        [--trials 8]

All trials begin with the same rules, and each turn appends some tokens and samples some. Trials are
concurrent and do not wait for each other; new weights are loaded every `turns_a_version` turns. The
same work, token by token, is done in several ways:

    cache off             no prefix is reused: every turn computes its whole prompt
    isolate               keys and values that older weights computed are never read
    refresh_at_episode    they are read until the next episode begins
    keep                  they are read to the end of the trial
    as MAGE does          all trials play a turn, then all the next one; weights are loaded before
                          every turn, and no prefix is reused

For each way the program prints trials and sampled tokens per second, the time to a turn's first
token (in the same contexts with turns of one token), and the share of prompt tokens reused after
the first turn. The ways alternate on one engine. The exit status is 1 if `keep` is not 3 times as
fast as MAGE's way, or reuses less than 95 %.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import uvloop

from bench.engine.serving import engine_of, machine_of_figures, random_model
from bench.lib.baseline import verdict, write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Prompt, Sampling
from mage_services.engines.engine import Engine

EPISODES, TURNS = 3, 6
"""Episodes of a trial, and turns of an episode."""
# Rules for cached keys and values (`engine.cache_rule`), and two ways without them.
WAYS = ("cache off", "isolate", "refresh_at_episode", "keep", "as MAGE does")


@dataclass(frozen=True)
class Work:
    """Hold the sizes of the work, in tokens."""

    trials: int
    rules: int
    """Tokens with which every trial begins."""
    told: int
    """Tokens that a turn appends, as an environment would."""
    drawn: int
    """Tokens that a turn samples."""
    vocabulary: int
    turns_a_version: int
    """Turns of all trials together from one load of weights to the next."""

    def longest(self) -> int:
        """Return the tokens of a whole trial."""
        return self.rules + EPISODES * TURNS * (self.told + self.drawn) + 1

    def answered_in_one(self) -> "Work":
        """Return the same work with turns of one sampled token, which measures the time to the
        first token."""
        return replace(self, told=self.told + self.drawn - 1, drawn=1)


@dataclass
class WayFigures:
    """Hold the figures of one way in one round."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_prompt: int = 0
    num_reused: int = 0
    """Tokens of prompts, and reused ones among them, after a trial's first turn."""
    turn_s: list[float] = field(default_factory=list)
    """Seconds of each turn."""


class Weights:
    """Load the same weights again and again, as successive versions."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine, self._file, self._version = engine, file, 0
        self._num_turns = 0

    async def load(self) -> None:
        """Load the weights as the next version."""
        self._version += 1
        await self._engine.load(self._version, self._file)

    def count_turn(self, turns_a_version: int) -> bool:
        """Count a turn; return whether new weights are due."""
        self._num_turns += 1
        return self._num_turns % turns_a_version == 0


class Trial:
    """Play one trial, whose context grows."""

    def __init__(self, work: Work, way: str, name: str, number: int) -> None:
        self._work, self._way, self._name = work, way, name
        self._source = np.random.default_rng(number)
        rules = np.random.default_rng(0).integers(3, work.vocabulary, work.rules, np.int32)
        self._tokens, self._turn, self._number = rules, 0, number

    async def turn(self, engine: Engine, found: WayFigures) -> None:
        """Append tokens, and sample a completion."""
        work, is_fresh_prompt = self._work, self._way in ("cache off", "as MAGE does")
        told = self._source.integers(3, work.vocabulary, work.told, np.int32)
        self._tokens = np.concatenate([self._tokens, told])
        tokens, context = self._tokens, self._name
        if is_fresh_prompt:
            context = f"{self._name}.{self._turn}"
            nonce = _nonce(work, self._number * EPISODES * TURNS + self._turn)
            tokens = np.concatenate([nonce, tokens])
        sampling = Sampling(max_tokens=work.drawn)
        prompt = Prompt(context, tokens, sampling, self._turn, refresh_kv=self._refreshes_kv())
        began = time.perf_counter()
        drawn = await engine.complete(prompt)
        found.turn_s.append(time.perf_counter() - began)
        found.num_tokens += len(drawn.tokens)
        if self._turn:
            found.num_prompt += len(tokens)
            found.num_reused += drawn.num_reused
        self._tokens = np.concatenate([self._tokens, drawn.tokens])
        self._turn += 1
        if is_fresh_prompt or self._turn == EPISODES * TURNS:
            engine.release(context)

    def _refreshes_kv(self) -> bool:
        """Return whether the turn recomputes keys and values that older weights have computed."""
        begins_episode = self._turn % TURNS == 0
        return self._way == "isolate" or (self._way == "refresh_at_episode" and begins_episode)


def _nonce(work: Work, number: int) -> np.ndarray:
    """Return two tokens that make a prompt different from all others, so that no prefix is
    reused."""
    usable = work.vocabulary - 3
    return np.array([3 + number % usable, 3 + number // usable % usable], np.int32)


async def play(engine: Engine, work: Work, way: str, name: str, weights: Weights) -> WayFigures:
    """Play all trials in one way."""
    found = WayFigures()
    # Plays with different names have trials with different numbers, and so different tokens.
    first = sum(name.encode()) * work.trials
    trials = [Trial(work, way, f"{name}.{n}", first + n) for n in range(work.trials)]
    began = time.perf_counter()
    if way == "as MAGE does":
        for _ in range(EPISODES * TURNS):
            await weights.load()
            await asyncio.gather(*(trial.turn(engine, found) for trial in trials))
    else:
        await asyncio.gather(*(_alone(engine, trial, work, weights, found) for trial in trials))
    found.seconds = time.perf_counter() - began
    return found


async def _alone(
    engine: Engine, trial: Trial, work: Work, weights: Weights, found: WayFigures
) -> None:
    """Play one trial to its end. If new weights are due after its turn, this trial loads them."""
    for _ in range(EPISODES * TURNS):
        await trial.turn(engine, found)
        if weights.count_turn(work.turns_a_version):
            await weights.load()


async def measure(
    make: Callable[[], Engine], file: Path, work: Work, repeats: int
) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """Measure all ways in alternation; the first round warms up and is not counted."""
    names = ("trials_s", "tokens_s", "reused", "first_token_s", "first_token_p90_s")
    found = {way: {name: [] for name in names} for way in WAYS}
    async with make() as engine:
        facts = await engine.describe()
        print(facts, flush=True)
        weights = Weights(engine, file)
        await play(engine, replace(work, trials=2), "keep", "warm", weights)
        for repeat in range(repeats):
            for way in WAYS:
                whole = await play(engine, work, way, f"{way} {repeat}", weights)
                short = work.answered_in_one()
                first = await play(engine, short, way, f"{way} {repeat} first", weights)
                figures = found[way]
                figures["trials_s"].append(work.trials / whole.seconds)
                figures["tokens_s"].append(whole.num_tokens / whole.seconds)
                figures["reused"].append(whole.num_reused / whole.num_prompt)
                figures["first_token_s"].append(float(np.median(first.turn_s)))
                figures["first_token_p90_s"].append(float(np.percentile(first.turn_s, 90)))
                print(f"{repeat} {way}: {figures['trials_s'][-1]:.3g} trials/s", flush=True)
    return facts, found


def report(found: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    """Print the table; return the figures."""
    print(f"{'':20}{'trials/s':>10}{'tokens/s':>10}{'reused':>9}{'first token':>13}{'p90':>10}")
    medians = {
        way: {name: float(np.median(values)) for name, values in figures.items()}
        for way, figures in found.items()
    }
    for way, one in medians.items():
        print(
            f"{way:20}{one['trials_s']:10.3g}{one['tokens_s']:10.4g}{one['reused']:9.3f}"
            f"{1000 * one['first_token_s']:10.1f} ms{1000 * one['first_token_p90_s']:7.0f} ms"
        )
    mage = np.array(found["as MAGE does"]["trials_s"])
    ratios = {
        way: round(float(np.median(np.array(found[way]["trials_s"]) / mage)), 2) for way in WAYS
    }
    print("trials/s over MAGE's way:", ratios)
    return {"ratio_to_mages_way": ratios, "medians": medians, "all": found}


def main() -> int:
    """Measure, print and write the figures; return 1 if a bound is missed."""
    parser = option_parser(__doc__)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--size", choices=("tiny", "0.6b", "4b"), default="tiny")
    parser.add_argument("--policy", type=Path, metavar="DIR", help="a model directory instead")
    parser.add_argument("--trials", type=int, default=8, metavar="N")
    parser.add_argument("--rules", type=int, default=600, metavar="TOKENS")
    parser.add_argument("--told", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--drawn", type=int, default=8, metavar="TOKENS")
    parser.add_argument("--turns-a-version", type=int, default=24, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        policy, vocabulary = _policy(given, Path(folder))
        work = Work(
            given.trials, given.rules, given.told, given.drawn, vocabulary, given.turns_a_version
        )
        rules: dict[str, object] = {
            "max_contexts": 2 * work.trials,
            "max_tokens": work.longest() + 16,
        }
        if torch.cuda.is_available():
            room = 4 * work.trials * work.longest()
            rules["server"] = {"mem_fraction_static": 0.6, "max_total_tokens": room}
        facts, found = uvloop.run(
            measure(lambda: engine_of(given.engine, policy, rules), policy, work, given.repeats)
        )
    figures = report(found)
    size = policy.name if given.policy else given.size
    shape = {"episodes": EPISODES, "turns": TURNS} | vars(work)
    head = {"engine_kind": given.engine, "engine": facts, "policy": size, "work": shape}
    write_baseline(f"rollout_{given.engine}_{size}", head | machine_of_figures() | figures)
    missed = []
    if figures["ratio_to_mages_way"]["keep"] < 3.0:
        missed.append("keep over MAGE's way, at least 3")
    if figures["medians"]["keep"]["reused"] < 0.95:
        missed.append("reused share of keep, at least 0.95")
    return verdict(missed)


def _policy(given: argparse.Namespace, folder: Path) -> tuple[Path, int]:
    """Return the model directory, which is made if none is given, and its vocabulary size."""
    if given.policy:
        return given.policy, json.loads((given.policy / "config.json").read_text())["vocab_size"]
    model = random_model(given.size, is_tied=given.size != "tiny")
    model.save_pretrained(folder / given.size)
    return folder / given.size, model.config.vocab_size


if __name__ == "__main__":
    sys.exit(main())
