"""Measure what publishing weights costs: how long sampling pauses, and how soon engines have them.

    python -m bench.engine.publish [--engine sglang] [--size tiny|0.6b|4b] [--publications 201]

Turns of 4 to 24 tokens are in flight all the time. Versions are published one after the other, each
after at least one turn has ended since the last, by each weight transport in turn. A version can
sample one token only: the LM head of version v favours token `8 + v mod 400` by 50 nats in every
context, so the cached keys and values of older weights make no difference. So each token shows
which version sampled it, and is compared with the version that the engine reported.

    stall      time in which an engine samples nothing, by the engine's own clock
    to engine  time from the announcement until all engines sample with the new weights
    to store   time to copy and write the weights, in the learner (`to_shelf_s` in the baseline)

The exit status is 1 if a turn is lost, a version is wrong, or the 99th percentile of the stall is
over 100 ms (in place, with the tiny model).
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
from bench.lib.baseline import verdict, write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Completion, Prompt, Sampling
from mage_async.policy.snapshot import Snapshot
from mage_async.results.run_directory import RunDirectory
from mage_services.engines.engine import Engine
from mage_services.weights.weight_sender import WeightSender
from mage_services.weights.weight_store import WeightFiles

CYCLE, FIRST = 400, 8
"""Number of versions that sample different tokens, and the first of these tokens."""
PROMPT_TOKENS, TURN_TOKENS = 64, 24
"""Tokens of a prompt, and most tokens of a turn."""
NATS = 50.0
"""Logit of a version's own token; all others are 0."""
STALL_BOUND_S = 0.1
"""Largest allowed 99th percentile of the stall."""


@torch.no_grad()
def make_version(model: Qwen3ForCausalLM, version: int) -> None:
    """Set the weights of a version: all tokens have the same embedding, layers pass their input on,
    and only one row of the LM head is not zero.
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
    """Return the only token that a version samples."""
    return FIRST + version % CYCLE


@dataclass
class Tally:
    """Count turns and tokens, and compare each token with its reported version."""

    num_turns: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    num_crossed: int = 0
    """Number of turns that more than one version sampled."""
    provenance: dict[str, int] = field(default_factory=dict)
    """Number of tokens by how the engine knows their version (`VersionRun.provenance`)."""
    has_more: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a turn ends."""

    def take(self, drawn: Completion) -> None:
        """Count a completion, and compare each token with its reported version."""
        self.num_turns += 1
        self.num_tokens += len(drawn.tokens)
        self.num_crossed += len({run.policy for run in drawn.versions}) > 1
        ends = [run.start for run in drawn.versions[1:]] + [len(drawn.tokens)]
        for run, end in zip(drawn.versions, ends, strict=True):
            tokens = drawn.tokens[run.start : end]
            self.num_wrong += int((tokens != token_of(run.policy)).sum())
            how = run.provenance
            self.provenance[how] = self.provenance.get(how, 0) + len(tokens)
        self.has_more.set()


async def turns(engine: Engine, name: str, tally: Tally, has_ended: asyncio.Event) -> int:
    """Sample one turn after the other until `has_ended`; return the number of turns requested."""
    # A seed that depends on the name alone: Python's own hash of a text changes with the process.
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
    """Publish while turns are in flight; return figures by transport, and counts of turns.

    Args:
        at_once: Number of turns in flight in each engine.
    """
    tally, has_ended = Tally(), asyncio.Event()
    found: dict[str, dict[str, list[float]]] = {
        kind: {"stall_s": [], "to_engine_s": [], "to_shelf_s": []} for kind in transports
    }
    async with asyncio.TaskGroup() as tasks:
        load = [
            tasks.create_task(turns(engine, f"{number}.{index}", tally, has_ended))
            for index, engine in enumerate(engines)
            for number in range(at_once)
        ]
        names = list(transports)
        for version in range(1, publications + 1):
            kind = names[version % len(names)]
            tally.has_more.clear()
            await _publish(engines, model, transports[kind], version, found[kind])
            await tally.has_more.wait()
        has_ended.set()
    requested = sum(task.result() for task in load)
    return {
        "turns": {
            "asked": requested,
            "lost": requested - tally.num_turns,
            "crossed_by_a_publication": tally.num_crossed,
            "tokens": tally.num_tokens,
            "tokens_with_a_wrong_version": tally.num_wrong,
            "tokens_by_provenance": tally.provenance,
        },
        "ways": {
            kind: {name: spread(values, 5) for name, values in figures.items()}
            for kind, figures in found.items()
        },
    }


async def _publish(
    engines: list[Engine],
    model: Qwen3ForCausalLM,
    transport: WeightFiles,
    version: int,
    found: dict[str, list[float]],
) -> None:
    """Publish one version, let all engines load it, and add the times to `found`."""
    began = time.perf_counter()
    await asyncio.to_thread(make_version, model, version)
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
    """Make model, engines and transports, and measure."""
    model = random_model(given.size, is_tied=False)
    make_version(model, 0)
    model.save_pretrained(folder / "policy")
    directory = RunDirectory(folder)
    backend = "nccl" if given.sends_by_nccl else "gloo"
    transports: dict[str, WeightFiles] = {
        "disk": WeightFiles(directory.weights),
        "tensor": WeightFiles(directory.shared_weights),
        # No version is written as a file too.
        "nccl": WeightSender(directory.weights, backend, lambda version: False),
    }
    if given.engine == "embedded":
        del transports["nccl"]  # sender and receiver would be one process
    elif torch.cuda.is_available() and not given.sends_by_nccl:
        del transports["nccl"]  # NCCL needs two GPUs, and no run with a GPU uses Gloo
    settings = {
        "max_contexts": given.at_once,
        "max_tokens": PROMPT_TOKENS + TURN_TOKENS,
        "in_flight": given.in_flight,
    }
    if torch.cuda.is_available():
        settings["server"] = {"mem_fraction_static": 0.4, "max_total_tokens": 65_536}
    try:
        async with contextlib.AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(
                    engine_of(given.engine, directory.policy, settings, f"engine {number}")
                )
                for number in range(given.engines)
            ]
            facts = [await engine.describe() for engine in engines]
            print(*facts, sep="\n")
            figures = await measure(engines, model, transports, given.publications, given.at_once)
    finally:
        shutil.rmtree(directory.shared_weights, ignore_errors=True)
    return figures | {"engine": facts[0], "num_parameters": model.num_parameters()}


def report(figures: dict[str, object], *, has_bound: bool) -> list[str]:
    """Print the table; return the bounds that were missed."""
    print(f"{'way':8}{'stall p50':>12}{'p99':>10}{'most':>10}{'to engines p50':>16}{'p99':>10}")
    missed = []
    for kind, found in figures["ways"].items():
        stall, load = found["stall_s"], found["to_engine_s"]
        cells = [stall["p50"], stall["p99"], stall["most"], load["p50"], load["p99"]]
        widths = (12, 10, 10, 16, 10)
        print(
            f"{kind:8}"
            + "".join(f"{1000 * v:>{w - 3}.1f} ms" for v, w in zip(cells, widths, strict=True))
        )
        if has_bound and stall["p99"] > STALL_BOUND_S:
            missed.append(f"stall by {kind}, 99th percentile, at most {1000 * STALL_BOUND_S:g} ms")
    turns = figures["turns"]
    print(*(f"{name}: {value}" for name, value in turns.items()), sep="\n")
    missed += [name for name in ("lost", "tokens_with_a_wrong_version") if turns[name]]
    return missed


def main() -> int:
    """Measure, print and write the figures; return 1 if a bound is missed."""
    parser = option_parser(__doc__)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="number of engines")
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
    requested = {name: value for name, value in vars(given).items() if name != "engine"}
    name = f"publish_{given.engine}_{given.size}_{given.in_flight}"
    write_baseline(name, requested | {"engine_kind": given.engine} | machine_of_figures() | figures)
    return verdict(missed)


if __name__ == "__main__":
    sys.exit(main())
