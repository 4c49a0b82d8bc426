"""What a publication costs: how long generation stands still, and when every engine has it.

    python -m bench.engine.publish [--engine sglang] [--size tiny|0.6b|4b] [--publications 201]

Turns of 4 to 24 tokens are in flight all the time; versions come one after the other, by each way
in turn, each when some turn has ended since the last. The model
is made so that a version can draw one token only, its own: the head of version v favours token
`v mod 400` by 50 nats whatever the context. So each token says which weights drew it, and is
compared with the version the engine tagged it with; old keys in the cache cannot blur it.

    stall      from the pause to going on: nothing is drawn by anyone (the engine's own clock)
    to engine  from the announcement until the engines draw with it (all of them)
    to store   copying and writing it, beside the training

Exits with 1 where a turn is lost, a tag is wrong, or, for the tiny model on a CPU, the 99th
percentile of the stall is over 100 ms.
"""

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import uvloop
from transformers import Qwen3ForCausalLM

from bench.engine.serving import engine_of, machine_of_figures, random_model, spread
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Completion, Prompt, Sampling
from mage_async.policy.snapshot import Snapshot
from mage_async.results.run_directory import RunDirectory
from mage_services.engines.engine import Engine
from mage_services.weights.weight_sender import WeightSender
from mage_services.weights.weight_store import WeightFiles

CYCLE, FIRST = 400, 8
PROMPT_TOKENS, TURN_TOKENS = 64, 24
NATS = 50.0
STALL_BOUND_S = 0.1


@torch.no_grad()
def draw_only(model: Qwen3ForCausalLM, version: int) -> None:
    """Make version `version`: every layer passes its input on, every token embeds alike, and one
    row of the head is seen.
    """
    if version == 0:
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.zero_()
    model.lm_head.weight[token_of(version)] = NATS / model.config.hidden_size


def token_of(version: int) -> int:
    """The only token that a version draws."""
    return FIRST + version % CYCLE


@dataclass
class Tally:
    """What the turns in flight came to."""

    num_turns: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    num_crossed: int = 0
    """Turns that more than one version drew."""
    provenance: dict[str, int] = field(default_factory=dict)
    has_more: asyncio.Event = field(default_factory=asyncio.Event)
    """A turn has ended since this was cleared."""

    def take(self, drawn: Completion) -> None:
        """Compare each token with its tag."""
        self.num_turns += 1
        self.num_tokens += len(drawn.tokens)
        self.num_crossed += len({run.policy for run in drawn.versions}) > 1
        ends = [run.start for run in drawn.versions[1:]] + [len(drawn.tokens)]
        for run, end in zip(drawn.versions, ends, strict=True):
            tokens = drawn.tokens[run.start : end]
            self.num_wrong += int((tokens != token_of(run.policy)).sum())
            how = getattr(run, "provenance", "exact")
            self.provenance[how] = self.provenance.get(how, 0) + len(tokens)
        self.has_more.set()


async def turns(engine: Engine, name: str, tally: Tally, has_ended: asyncio.Event) -> int:
    """One turn after the other; returns how many were asked for."""
    source, number = np.random.default_rng(sum(name.encode())), 0
    while not has_ended.is_set():
        context = f"{name}.{number}"
        tokens = source.integers(FIRST, FIRST + CYCLE, PROMPT_TOKENS, np.int32)
        sampling = Sampling(max_tokens=int(source.integers(4, TURN_TOKENS + 1)))
        number += 1
        tally.take(await engine.complete(Prompt(context, tokens, sampling, number)))
        engine.release(context)
    return number


async def measure(
    engines: list[Engine],
    model: Qwen3ForCausalLM,
    transports: dict[str, WeightFiles],
    publications: int,
    at_once: int,
) -> dict[str, object]:
    """Publish under load; figures by way, and what became of the turns."""
    tally, has_ended = Tally(), asyncio.Event()
    found: dict[str, dict[str, list[float]]] = {
        way: {"stall_s": [], "to_engine_s": [], "to_shelf_s": []} for way in transports
    }
    async with asyncio.TaskGroup() as tasks:
        load = [
            tasks.create_task(turns(engine, f"{number}.{index}", tally, has_ended))
            for index, engine in enumerate(engines)
            for number in range(at_once)
        ]
        names = list(transports)
        for version in range(1, publications + 1):
            way = names[version % len(names)]
            tally.has_more.clear()
            await _publish(engines, model, transports[way], version, found[way])
            await tally.has_more.wait()
        has_ended.set()
    asked = sum(task.result() for task in load)
    return {
        "turns": {
            "asked": asked,
            "lost": asked - tally.num_turns,
            "crossed_by_a_publication": tally.num_crossed,
            "tokens": tally.num_tokens,
            "tokens_with_a_wrong_version": tally.num_wrong,
            "tokens_by_provenance": tally.provenance,
        },
        "ways": {
            way: {name: spread(values, 5) for name, values in figures.items()}
            for way, figures in found.items()
        },
    }


async def _publish(
    engines: list[Engine],
    model: Qwen3ForCausalLM,
    transport: WeightFiles,
    version: int,
    found: dict[str, list[float]],
) -> None:
    began = time.perf_counter()
    await asyncio.to_thread(draw_only, model, version)
    path = await asyncio.to_thread(lambda: transport.write(Snapshot.of(model, version)))
    written = time.perf_counter()
    before = [engine.statistics().stall_s for engine in engines]
    await asyncio.gather(*(engine.load(version, path) for engine in engines))
    found["to_shelf_s"].append(written - began)
    found["to_engine_s"].append(time.perf_counter() - written)
    found["stall_s"] += [
        engine.statistics().stall_s - had for engine, had in zip(engines, before, strict=True)
    ]
    transport.remove([old for old in transport.versions() if old < version])


async def run(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Make everything, measure, and take it down."""
    model = random_model(given.size, is_tied=False)
    draw_only(model, 0)
    model.save_pretrained(folder / "policy")
    places = RunDirectory(folder)
    backend = "nccl" if given.sends_by_nccl else "gloo"
    transports: dict[str, WeightFiles] = {
        "disk": WeightFiles(places.weights),
        "tensor": WeightFiles(places.shared_weights),
        "nccl": WeightSender(places.weights, backend, lambda version: False),
    }
    if given.engine == "embedded":
        del transports["nccl"]  # two ends of a group in one process are no measure of it
    elif torch.cuda.is_available() and not given.sends_by_nccl:
        del transports["nccl"]  # one GPU cannot send to itself, and a GPU would not use Gloo
    rules = {
        "max_contexts": given.at_once,
        "max_tokens": PROMPT_TOKENS + TURN_TOKENS,
        "in_flight": given.in_flight,
    }
    if torch.cuda.is_available():
        rules["server"] = {"mem_fraction_static": 0.4, "max_total_tokens": 65_536}
    try:
        async with contextlib.AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(
                    engine_of(given.engine, places.policy, rules, f"engine {number}")
                )
                for number in range(given.engines)
            ]
            facts = [await engine.describe() for engine in engines]
            print(*facts, sep="\n")
            figures = await measure(engines, model, transports, given.publications, given.at_once)
    finally:
        shutil.rmtree(places.shared_weights, ignore_errors=True)
    return figures | {"engine": facts[0], "num_parameters": model.num_parameters()}


def report(figures: dict[str, object], *, has_bound: bool) -> list[str]:
    """Print the table; what was missed."""
    print(f"{'way':8}{'stall p50':>12}{'p99':>10}{'most':>10}{'to engines p50':>16}{'p99':>10}")
    missed = []
    for way, found in figures["ways"].items():
        stall, load = found["stall_s"], found["to_engine_s"]
        cells = [stall["p50"], stall["p99"], stall["most"], load["p50"], load["p99"]]
        widths = (12, 10, 10, 16, 10)
        print(
            f"{way:8}"
            + "".join(f"{1000 * v:>{w - 3}.1f} ms" for v, w in zip(cells, widths, strict=True))
        )
        if has_bound and stall["p99"] > STALL_BOUND_S:
            missed.append(f"stall by {way}, 99th percentile, at most {1000 * STALL_BOUND_S:g} ms")
    turns = figures["turns"]
    print(*(f"{name}: {value}" for name, value in turns.items()), sep="\n")
    missed += [name for name in ("lost", "tokens_with_a_wrong_version") if turns[name]]
    return missed


def main() -> int:
    """Measure, print, write; 1 where a bound is missed."""
    parser = option_parser(__doc__)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--engines", type=int, default=1, metavar="N")
    parser.add_argument("--size", choices=("tiny", "0.6b", "4b"), default="tiny")
    parser.add_argument("--publications", type=int, default=201, metavar="N")
    parser.add_argument("--at-once", type=int, default=32, metavar="N", help="turns in flight")
    parser.add_argument("--in-flight", choices=("in_place", "interrupt"), default="in_place")
    parser.add_argument("--sends-by-nccl", action="store_true", help="engines on other GPUs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(run(given, Path(folder)))
    has_bound = given.size == "tiny" and given.in_flight == "in_place"
    missed = report(figures, has_bound=has_bound)
    asked = {name: value for name, value in vars(given).items() if name != "engine"}
    name = f"publish_{given.engine}_{given.size}_{given.in_flight}"
    write_baseline(name, asked | {"engine_kind": given.engine} | machine_of_figures() | figures)
    print(f"missed: {', '.join(missed)}" if missed else "no bound is missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
