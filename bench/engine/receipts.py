"""Weight receipts: which made faults they catch, and what share of a publication they cost.

    python -m bench.engine.receipts [MODEL] [--dtype float32|bfloat16] [--publications 5] [--rank R]

Five kinds of faults, twenty of each, are made in publications of a small model, and twenty
publications are sound; the embedded engine loads each. The same is done once more in a version that
is not scored, and with nine kinds of faults in publications of adapters. Then a model (MODEL, a
directory of safetensors; otherwise a random one of 400 thousand parameters) is published and loaded
again and again: its weights copied, written to a file, read and arranged by an engine; what
receipts add is taken apart from that. Processor seconds are counted, of all threads, and of each
part the least: work beside it can but add to them.

    learner   rows of the model; sums, and the fingerprint itself; in a scored version
              the probe tokens' log-probs by the trained model
    engine    the receipt of what is read; in a scored version the probe tokens' log-probs

With `--rank`, the model's adapters of that rank are published in turn merged and alone, and an
embedded engine reads both.

Both kinds of versions are measured, and count as often as among the first thousand of a run. Exits
with 1 where a fault is not caught, or a sound publication is refused. Wanted: under 2 % of a
publication.
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
from unittest.mock import patch

import msgspec
import torch

from bench.engine.serving import random_model
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.config.policy import Lora
from mage_async.config.schema import Embedded
from mage_async.errors import WeightsRefused
from mage_async.inference.architecture import read_architecture
from mage_async.inference.arithmetic import ARITHMETICS
from mage_async.inference.model import Model
from mage_async.inference.weight_fingerprint import (
    NUM_PROBE_TOKENS,
    FingerprintBuilder,
    mismatch,
    probe_tokens,
    read_fingerprint,
)
from mage_async.inference.weights import as_weights, read_tensors
from mage_async.learning.adapters import adapted_layers
from mage_async.policy.load import load_policy
from mage_async.policy.lora import add_adapters
from mage_async.policy.snapshot import Snapshot, base_of, checked_rows, published_tensors
from mage_async.policy.weight_digest import is_scored, probe_logprobs
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.weights.weight_store import WeightFiles
from tests.weights import weight_faults
from tests.weights.weight_faults import ADAPTER_FAULTS, FAULTS, Site

TIMES, BOUND = 20, 0.02
RUN = 1000
PUBLICATION = ("copy", "write", "load")
RULES = Embedded(max_contexts=2, max_tokens=64, threads=1)
Seconds = dict[str, list[float]]
Parts = dict[str, float]


def caught(folder: Path, *, are_adapters: bool = False) -> dict[str, int]:
    """Refused publications by the kind of their fault, of `TIMES` each."""
    site = Site.of(folder, publishes_adapters=are_adapters)
    faults = ADAPTER_FAULTS if are_adapters else FAULTS
    kinds = {**faults, "none": lambda site, number: site.publish()}

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
    """Least processor seconds of each part of a publication, and the share of receipts."""
    model = load_policy(directory, dtype, "cpu")
    plain, scored = (
        _parts(model, directory, folder, publications, scores) for scores in (False, True)
    )
    publication = sum(plain[part] for part in PUBLICATION)
    added, added_scored = (
        sum(seconds for part, seconds in parts.items() if part not in PUBLICATION)
        for parts in (plain, scored)
    )
    share = sum(is_scored(version, has_row_checksums=True) for version in range(RUN)) / RUN
    added_by_all = added + share * (added_scored - added)
    return {
        "parameters": model.num_parameters(),
        "processor_s": {name: round(seconds, 5) for name, seconds in plain.items()},
        "processor_s_of_a_scored_version": {name: round(s, 5) for name, s in scored.items()},
        "share_of_scored_versions": share,
        "publication_s": round(publication, 5),
        "receipt_s": round(added_by_all, 5),
        "receipts_over_publication": round(added_by_all / publication, 4),
        "of_a_version_that_is_not_scored": round(added / publication, 4),
        "of_a_scored_version": round(added_scored / publication, 4),
    }


def adapters(
    directory: Path, dtype: str, folder: Path, publications: int, rank: int
) -> dict[str, object]:
    """Bytes of a publication, and least processor seconds to publish and read it, both ways."""
    model, spent, size = load_policy(directory, dtype, "cpu"), defaultdict(list), {}
    add_adapters(model, Lora(rank=rank, alpha=2.0 * rank), 0)
    rules = msgspec.structs.replace(RULES, arithmetic=dtype)
    engine, files = EmbeddedEngine(directory, rules), WeightFiles(folder / "weights")
    for version in range(publications + 1):
        for way, base in (("merged", None), ("alone", base_of(model))):
            with _timed(spent, f"publish {way}"):
                file = files.write(Snapshot.of(model, version, base=base))
            with _timed(spent, f"read {way}"):
                # The weights before are kept until then, as a serving engine keeps them.
                kept = engine._read(version, file)
            size[way] = file.stat().st_size
    assert kept[1] is not None
    seconds = {name: round(min(each[1:]), 5) for name, each in spent.items()}
    return {"rank": rank, "bytes": size, "processor_s": seconds}


def _parts(model, directory: Path, folder: Path, publications: int, scores: bool) -> Parts:
    spent: Seconds = defaultdict(list)
    for version in range(publications + 1):
        _publication(model, directory, folder, spent, version, scores)
    return {name: min(seconds[1:]) for name, seconds in spent.items()}  # the first warms up


def _publication(
    model, directory: Path, folder: Path, spent: Seconds, version: int, scores: bool
) -> None:
    """One publication, and one load of it."""
    file, shape = folder / "published.safetensors", read_architecture(directory)
    arithmetic = ARITHMETICS["float32" if model.dtype == torch.float32 else "bfloat16"]
    logprobs = None
    if scores:
        with _timed(spent, "learner's log-probs"):
            logprobs = probe_logprobs(model)
    tensors = published_tensors(model)  # needed without receipts too
    with _timed(spent, "learner's rows"), torch.no_grad():
        checked_rows(tensors, adapted_layers(model), version)
    with _timed(spent, "copy"):
        snapshot = Snapshot.of(model, version, logprobs)
    spent["copy"][-1] -= spent["learner's rows"][-1]
    with _timed(spent, "learner's receipt"):
        published = read_fingerprint(snapshot.fingerprint().text(), str(file))
    with _timed(spent, "write"):
        snapshot.write(file)
    spent["write"][-1] -= spent["learner's receipt"][-1]
    with _timed(spent, "load"):
        named = list(read_tensors(file))
    observed = FingerprintBuilder(published, file)
    with _timed(spent, "engine's receipt"):
        passed = list(observed.passing(named))
        own = observed.fingerprint(version, published.precision, ())
        assert not mismatch(published, own)
    began = time.process_time()
    weights = as_weights(passed, shape, str(file), arithmetic, copies=False)
    spent["load"][-1] += time.process_time() - began
    if scores:
        with _timed(spent, "engine's log-probs"):
            engine = Model(
                shape, weights, slots=1, max_tokens=NUM_PROBE_TOKENS, arithmetic=arithmetic
            )
            engine.score(probe_tokens(shape.vocabulary))


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
    parser.add_argument("--rank", type=int, default=0, metavar="R")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = caught(folder / "faults")
        with patch.object(weight_faults, "probe_logprobs", return_value=None):
            unscored = caught(folder / "faults of a version that is not scored")
            merging = caught(folder / "faults of adapters", are_adapters=True)
        asked = _model(given, folder), given.dtype, folder, given.publications
        figures = costs(*asked)
        if given.rank:
            figures["adapters"] = adapters(*asked, given.rank)
    figures["refused_in_a_version_that_is_not_scored"] = unscored
    figures["refused_adapters"] = merging
    _report(found, figures)
    name = "receipts" if given.model is None else f"receipts_{given.model.absolute().name}"
    write_baseline(f"{name}_{given.dtype}", {"refused": found, "times": TIMES} | figures)
    return int(not all(_is_as_wanted(each) for each in (found, unscored, merging)))


def _is_as_wanted(found: dict[str, int]) -> bool:
    return all(count == (0 if kind == "none" else TIMES) for kind, count in found.items())


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
