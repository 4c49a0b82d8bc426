"""Weight receipts: which made faults they catch, and what share of a publication they cost.

    python -m bench.engine.receipts [MODEL] [--dtype float32|bfloat16] [--publications 5]

Five kinds of faults, twenty of each, are made in publications of a small model, and twenty
publications are sound; the embedded engine loads each. The same faults are made once more in a
version whose check tokens are not scored: what digests do not see there, the next scored version
shows. Then a model (MODEL, a directory of safetensors; otherwise a random one of 400 thousand
parameters) is published and loaded again and again: its weights copied, written to a file, read and
arranged by an engine; what receipts add is taken apart from that. Processor seconds are counted, of
all threads, which a loaded machine changes little.

    learner   the check tokens' log-probs by the trained model, and digests of what is written
    engine    digests of what is read, and the check tokens' log-probs

Both sides' log-probs are counted by a sixteenth, for one version in so many is scored; the share of
a scored version stands beside. Exits with 1 where a fault is not caught, or a sound publication is
refused. Wanted: under 2 % of a publication.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from bench.engine.serving import random_model
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.config.schema import Embedded
from mage_async.errors import WeightsRefused
from mage_async.inference.architecture import read_architecture
from mage_async.inference.arithmetic import ARITHMETICS
from mage_async.inference.model import Model
from mage_async.inference.receipts.receipt import CHECK_TOKENS, check_tokens, difference
from mage_async.inference.weights import read_weights
from mage_async.policy.check_tokens import SCORED_EVERY, check_logprobs
from mage_async.policy.load import load_policy
from mage_async.policy.snapshot import Snapshot
from mage_services.engines.accepting import promised
from mage_services.engines.embedded import EmbeddedEngine
from tests.weights import weight_faults
from tests.weights.weight_faults import FAULTS, Site

TIMES, BOUND = 20, 0.02
SIDES = ("learner", "engine")
RULES = Embedded(max_contexts=2, max_tokens=64, threads=1)
Seconds = dict[str, list[float]]


def caught(folder: Path) -> dict[str, int]:
    """Refused publications by the kind of their fault, of `TIMES` each."""
    site = Site.of(folder)
    kinds = {**FAULTS, "none": lambda site, number: site.publish()}

    async def main() -> dict[str, int]:
        async with EmbeddedEngine(folder / "policy", RULES, "bench") as engine:
            return {
                kind: sum([await _is_refused(engine, fault(site, n)) for n in range(TIMES)])
                for kind, fault in kinds.items()
            }

    return asyncio.run(main())


async def _is_refused(engine: EmbeddedEngine, path: Path) -> bool:
    try:
        await engine.load(1, path)
    except WeightsRefused:
        return True
    return False


def costs(directory: Path, dtype: str, folder: Path, publications: int) -> dict[str, object]:
    """Median processor seconds of each part of a publication, and the share of receipts."""
    model = load_policy(directory, dtype, "cpu")
    spent: Seconds = defaultdict(list)
    apart = [_publication(model, directory, folder, spent) for _ in range(publications + 1)]
    parts = {name: median(seconds[1:]) for name, seconds in spent.items()}  # the first warms up
    plain = parts["copy"] + parts["write"] + parts["load"]
    logprobs, digests = (
        sum(parts[f"{side}'s {what}"] for side in SIDES) for what in ("log-probs", "digests")
    )
    return {
        "parameters": model.num_parameters(),
        "processor_s": {name: round(seconds, 5) for name, seconds in parts.items()},
        "receipts_over_publication": round((digests + logprobs / SCORED_EVERY) / plain, 4),
        "of_a_scored_version": round((digests + logprobs) / plain, 4),
        "logprob_difference": max(apart),
    }


def _publication(model, directory: Path, folder: Path, spent: Seconds) -> float:
    """One publication; how far the log-probs of both sides are apart."""
    file, shape = folder / "v000001.safetensors", read_architecture(directory)
    arithmetic = ARITHMETICS["float32" if model.dtype == torch.float32 else "bfloat16"]
    with _timed(spent, "learner's log-probs"):
        logprobs = check_logprobs(model)
    with _timed(spent, "copy"):
        snapshot = Snapshot.of(model, 1, logprobs)
    with _timed(spent, "learner's digests"):
        published = snapshot.receipt()
    with _timed(spent, "write"):
        snapshot.write(file)
    spent["write"][-1] -= spent["learner's digests"][-1]
    with _timed(spent, "load"):
        weights = read_weights(file, shape, arithmetic)
    with _timed(spent, "engine's digests"):
        _, digests = promised(file)
    engine = Model(shape, weights, lanes=1, max_tokens=CHECK_TOKENS, arithmetic=arithmetic)
    with _timed(spent, "engine's log-probs"):
        scored = engine.score(check_tokens(shape.vocabulary)).tolist()
    assert digests == published.tensors
    return difference(published.logprobs, scored)


@contextmanager
def _timed(spent: Seconds, name: str) -> Iterator[None]:
    began = time.process_time()
    yield
    spent[name].append(time.process_time() - began)


def main() -> int:
    """Measure, print, write; 1 where a fault is not caught or sound weights are refused."""
    parser = option_parser(__doc__)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--publications", type=int, default=5, metavar="N")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = caught(folder / "faults")
        with patch.object(weight_faults, "check_logprobs", return_value=None):
            by_digests = caught(folder / "faults of a version that is not scored")
        figures = costs(_model(given, folder), given.dtype, folder, given.publications)
    figures["refused_by_digests_alone"] = by_digests
    _report(found, figures)
    name = "receipts" if given.model is None else f"receipts_{given.model.absolute().name}"
    write_baseline(f"{name}_{given.dtype}", {"refused": found, "times": TIMES} | figures)
    return int(found.pop("none") > 0 or any(count < TIMES for count in found.values()))


def _model(given: argparse.Namespace, folder: Path) -> Path:
    """The directory asked for, or one of a random model."""
    if given.model is None:
        random_model("tiny", is_tied=True).save_pretrained(folder / "policy")
    return given.model or folder / "policy"


def _report(found: dict[str, int], figures: dict[str, object]) -> None:
    for kind, count in found.items():
        print(f"{kind:22}{count:4} of {TIMES} refused")
    total = sum(count for kind, count in found.items() if kind != "none")
    print(f"caught {total} of {TIMES * len(FAULTS)}")
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(f"wanted: receipts over publication under {BOUND}")


if __name__ == "__main__":
    sys.exit(main())
