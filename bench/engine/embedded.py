"""Compare the embedded engine's speed with transformers' `generate`, on growing contexts.

    python -m bench.engine.embedded [--repeats 7]

All variants have the same model (of the quickstart's shape), the same 64 growing contexts with the
same tokens, and one thread. In each of 12 turns, some tokens are appended to each context, and one
is sampled. The variants alternate:

    engine           the embedded engine's `Scheduler`, which pads nothing
    generate         one `model.generate` for all contexts in each turn, with one DynamicCache kept
                     over the turns. This is its fastest form, but all contexts must answer at the
                     same time, and turns of unequal length are padded on the left in the cache too
    forward          the model's forward on such a cache, without the work that `generate` does
                     around it (turns of equal length only)
    generate, alone  one cache for each context, and one call for each turn of a context: the form
                     for trials that proceed independently, as an actor's do
    async            `EmbeddedEngine` with 72 concurrent trials

Turns of `even` contexts append 7 tokens, those of `ragged` ones 4 to 10. The program prints a table
and writes a baseline. The exit status is 1 if a bound is missed: engine / generate >= 3 on ragged
turns, because environments' texts differ in length; async >= 8,000 turns per CPU-second.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import uvloop
from transformers import DynamicCache, Qwen3ForCausalLM

from bench.engine.growing_contexts import (
    CONTEXTS,
    FIRST,
    FORCED,
    MAX_TOKENS,
    SHAPE,
    TURNS,
    Turns,
    by_engine,
    make_model,
    make_turns,
    rates,
)
from bench.lib.baseline import verdict, write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Prompt, Sampling
from mage_async.config.schema import Embedded
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler
from mage_services.engines.embedded import EmbeddedEngine

TRIALS, TRIAL_TURNS = 72, 18
"""Concurrent trials of `async`, and turns of each."""
# Configuration of the engine of `async`.
ENGINE = Embedded(
    arithmetic="float32",
    max_contexts=96,
    max_tokens=MAX_TOKENS,
    cache_rule="keep",
    threads=1,
    in_flight="in_place",
    turn_deadline_s=300.0,
    devices=[],
)
# Least figures.
BOUNDS = {"engine / generate, ragged": 3.0, "async turns per processor-second": 8000.0}


def by_generate(model: Qwen3ForCausalLM, turns: Turns) -> None:
    """Call `generate` once in each turn for all contexts, with one cache kept over the turns."""
    cache = DynamicCache()
    one = torch.ones(len(turns.padded[0]), 1, dtype=torch.int64)  # the mask of a sampled token
    tokens = mask = one[:, :0]  # no tokens yet
    for words, exists in zip(turns.padded, turns.masks, strict=True):
        mask = torch.cat([mask, exists], 1)
        tokens = model.generate(
            torch.cat([tokens, words], 1),
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=1,
            do_sample=True,
            top_k=0,
        )
        mask = torch.cat([mask, one], 1)


def by_generate_alone(model: Qwen3ForCausalLM, alone: list[Turns]) -> None:
    """Call `generate` for each context by itself, with a cache of its own kept over the turns."""
    for turns in alone:
        by_generate(model, turns)


@torch.inference_mode()
def by_forward(model: Qwen3ForCausalLM, turns: Turns) -> None:
    """Do what `by_generate` does with the model's forward and a sampler of its own."""
    cache = DynamicCache()
    sampled = turns.padded[0][:, :0]
    for words in turns.padded:
        new = torch.cat([sampled, words], 1)
        logits = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        sampled = torch.multinomial(torch.softmax(logits[:, -1], -1), 1)


async def play(engine: EmbeddedEngine, name: str, turns: list[np.ndarray]) -> None:
    """Play one trial."""
    tokens = np.zeros(0, np.int32)
    for number, turn in enumerate(turns):
        tokens = np.concatenate([tokens, turn])
        completion = await engine.complete(Prompt(name, tokens, Sampling(), number))
        tokens = np.append(tokens, completion.tokens)
    engine.release(name)


async def async_rates(directory: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Return turns per second, and per CPU-second, of concurrent trials; one of each a repeat."""
    source, walls, processors = np.random.default_rng(0), [], []
    vocabulary = SHAPE["vocab_size"]
    first = source.integers(0, vocabulary, FIRST, np.int32)
    turns = [
        [first, *source.integers(0, vocabulary, (TRIAL_TURNS - 1, FORCED), np.int32)]
        for _ in range(TRIALS)
    ]
    async with EmbeddedEngine(directory, ENGINE) as engine:
        print(await engine.describe())
        for repeat in range(repeats + 1):
            began, began_processor = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as trials:
                for number in range(TRIALS):
                    name = f"{repeat}.{number}"
                    trials.create_task(play(engine, name, turns[number]), name=name)
            walls.append(TRIALS * TRIAL_TURNS / (time.perf_counter() - began))
            processors.append(TRIALS * TRIAL_TURNS / (time.process_time() - began_processor))
    return walls[1:], processors[1:]  # the first warms up


def measure(directory: Path, repeats: int) -> dict[str, list[float]]:
    """Return all rates, by variant: sampled tokens per CPU-second, one for each repeat."""
    model = make_model(directory)
    scheduler = Scheduler(Model.load(directory, slots=CONTEXTS, max_tokens=MAX_TOKENS))
    even, ragged = make_turns(is_ragged=False), make_turns(is_ragged=True)
    alone = ragged.alone()
    found = rates(
        {
            "engine, ragged": lambda: by_engine(scheduler, ragged),
            "generate, ragged": lambda: by_generate(model, ragged),
            "generate, alone, ragged": lambda: by_generate_alone(model, alone),
            "engine, even": lambda: by_engine(scheduler, even),
            "generate, even": lambda: by_generate(model, even),
            "forward, even": lambda: by_forward(model, even),
        },
        repeats,
    )
    walls, processors = uvloop.run(async_rates(directory, repeats))
    return found | {"async": processors, "async, per second": walls}


def report(found: dict[str, list[float]]) -> dict[str, float]:
    """Print the table; return the ratios and the async engine's rate."""
    medians = {name: float(np.median(values)) for name, values in found.items()}
    print(f"{'sampled tokens / processor-s':32} {'median':>10} {'least':>10} {'most':>10}")
    for name, values in found.items():
        print(f"{name:32} {medians[name]:10,.0f} {min(values):10,.0f} {max(values):10,.0f}")
    figures = {
        "engine / generate, ragged": _ratio(found, "engine, ragged", "generate, ragged"),
        "engine / generate, alone": _ratio(found, "engine, ragged", "generate, alone, ragged"),
        "engine / generate, even": _ratio(found, "engine, even", "generate, even"),
        "engine / forward, even": _ratio(found, "engine, even", "forward, even"),
        "async turns per processor-second": medians["async"],
    }
    for name, value in figures.items():
        bound = f"   at least {BOUNDS[name]:,g}" if name in BOUNDS else ""
        print(f"{name:32} {value:10,.1f}{bound}")
    return {name: round(value, 2) for name, value in figures.items()}


def _ratio(found: dict[str, list[float]], ours: str, theirs: str) -> float:
    """Return the median ratio of two variants' rates in the same repeat."""
    return float(np.median(np.array(found[ours]) / np.array(found[theirs])))


def main() -> int:
    """Measure, print and write the figures; return 1 if a bound is missed."""
    parser = option_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="at least 5")
    repeats = max(5, parser.parse_args().repeats)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), repeats)
    figures = report(found)
    write_baseline(
        "engine",
        {
            "shape": _shape(),
            "load_average": round(os.getloadavg()[0], 1),
            "figures": figures,
            "per_processor_s": _summary(found),
        },
    )
    missed = [name for name, bound in BOUNDS.items() if figures[name] < bound]
    return verdict(missed)


def _shape() -> dict[str, object]:
    return {
        "model": SHAPE,
        "contexts": CONTEXTS,
        "turns": TURNS,
        "first_tokens": FIRST,
        "forced_tokens": FORCED,
        "async": {"trials": TRIALS, "turns": TRIAL_TURNS},
        "threads": 1,
    }


def _summary(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "median": round(float(np.median(values))),
            "least": round(min(values)),
            "most": round(max(values)),
            "repeats": len(values),
        }
        for name, values in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
