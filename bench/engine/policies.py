"""Measure how fast one engine serves several policies that are LoRA adapters on one base model.

    python -m bench.engine.policies MODEL [--dtype bfloat16|float32] [--rank 16] [--contexts 32]

A fixed number of contexts is served in three ways: by one policy; by four policies in one forward,
as the embedded engine computes the current version and three past ones; and by four policies with
merged weights and a forward for each, as separate engines would. Each round prefills 32 tokens and
samples 24 in each context, in all three ways. Figures are medians over rounds: sampled tokens per
CPU-second, and their ratio to those of one policy in the same round.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.completion import Prompt, Sampling
from mage_async.config.schema import Embedded, Lora
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler, advance_together
from mage_async.inference.weight_fingerprint import difference, probe_logprobs
from mage_async.inference.weights import Weights
from mage_async.learning.lora import adapter_tensors, add_adapters
from mage_async.policy.load import load_policy
from mage_async.policy.snapshot import Snapshot, base_of
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.weights.weight_store import WeightFiles

PROMPT, SAMPLED, POLICIES = 32, 24, 4
"""Tokens of a prompt, sampled tokens of a context, and policies."""
WANTED = 0.8
"""Least ratio of four policies in one forward to one policy."""


@torch.no_grad()
def publish(directory: Path, dtype: str, rank: int, folder: Path) -> list[Path]:
    """Publish four versions with random adapters; return their files."""
    model, files = load_policy(directory, dtype, "cpu"), WeightFiles(folder)
    add_adapters(model, Lora(rank=rank, alpha=2.0 * rank), 0)
    base, source, paths = base_of(model), torch.Generator().manual_seed(0), []
    for version in range(POLICIES):
        for tensor in adapter_tensors(model).values():
            tensor.normal_(0.0, 0.01, generator=source)
        paths.append(files.write(Snapshot.of(model, version, base=base)))
    return paths


def serve_round(groups: list[list[Scheduler]], contexts: int, number: int) -> float:
    """Serve one round; return the sampled tokens per CPU-second.

    Args:
        groups: Schedulers; those of a group compute their forwards together.
        number: Number of the round.
    """
    schedulers = [each for group in groups for each in group]
    source = np.random.default_rng(number)
    vocabulary = schedulers[0].model.architecture.vocabulary
    names = [f"{number}.{context}" for context in range(contexts)]
    for index, name in enumerate(names):
        tokens = source.integers(5, vocabulary, PROMPT).astype(np.int32)
        schedulers[index % len(schedulers)].submit(
            Prompt(name, tokens, Sampling(max_tokens=SAMPLED), index)
        )
    began, num_sampled = time.process_time(), 0
    while not all(each.is_idle for each in schedulers):
        for group in groups:
            num_sampled += sum(len(one.tokens) for _, one in advance_together(group))
    seconds = time.process_time() - began
    for index, name in enumerate(names):
        schedulers[index % len(schedulers)].release(name)
    return num_sampled / seconds


def measure(engine: EmbeddedEngine, paths: list[Path], contexts: int, rounds: int):
    """Return the speeds of each way by round, and the mean difference between log-probs of adapters
    computed beside the base's matrices and of merged weights, over the probe tokens, in nats.
    """
    current = engine._scheduler.model

    def merged_weights(version: int, path: Path) -> Weights:
        (weights, _adapters), _fingerprint = engine._read(version, path)
        return weights

    merged = [merged_weights(version, path) for version, path in enumerate(paths)]

    def scheduler(weights) -> Scheduler:
        sizes = {"slots": contexts, "max_tokens": PROMPT + SAMPLED}
        return Scheduler(
            Model(current.architecture, weights, arithmetic=current.arithmetic, **sizes)
        )

    # The newest version is the engine's current policy, the others are past policies.
    engine._scheduler.swap(POLICIES - 1, merged[-1])
    pasts = [engine._make_past_policy(version, paths[version]) for version in range(POLICIES - 1)]
    ways = {
        "one policy": [[scheduler(merged[-1])]],
        "four in one forward": [
            [scheduler(merged[-1]), *(scheduler(each.model.weights) for each in pasts)]
        ],
        "four forwards": [[scheduler(each)] for each in merged],
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, groups in ways.items():
            speeds[way].append(serve_round(groups, contexts, number))
    shape, arithmetic = current.architecture, current.arithmetic
    # The same version twice: merged, and as adapters beside the base's matrices.
    scores = [
        probe_logprobs(each, shape, arithmetic) for each in (merged[0], pasts[0].model.weights)
    ]
    # The first round warms up.
    return {way: each[1:] for way, each in speeds.items()}, difference(*scores)


def main() -> int:
    """Measure, print and write the figures; return 1 if four policies are too slow."""
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rank", type=int, default=16, metavar="R")
    parser.add_argument("--contexts", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = Embedded(arithmetic=given.dtype, max_contexts=given.contexts, max_tokens=96, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        paths = publish(given.model, given.dtype, given.rank, Path(folder))
        engine = EmbeddedEngine(given.model, config)
        speeds, gap = measure(engine, paths, given.contexts, given.rounds)
    alone = speeds["one policy"]
    figures = {
        way: {
            "tokens_per_processor_s": round(statistics.median(each), 1),
            "over_one_policy": round(
                statistics.median(a / b for a, b in zip(each, alone, strict=True)), 3
            ),
        }
        for way, each in speeds.items()
    }
    for way, found in figures.items():
        print(f"{way:22}{found}")
    print(f"wanted: four in one forward at least {WANTED} of one policy")
    figures["log_probs_apart_nats"] = gap
    print(f"log-probs beside the base are {gap:.2g} nats from merged ones")
    options = {name: value for name, value in vars(given).items() if name != "model"}
    write_baseline(f"policies_{given.model.absolute().name}_{given.dtype}", options | figures)
    return int(figures["four in one forward"]["over_one_policy"] < WANTED)


if __name__ == "__main__":
    sys.exit(main())
