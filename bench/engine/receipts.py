"""Measure which injected faults the fingerprints of weights detect, and what they cost.

    python -m bench.engine.receipts [MODEL] [--dtype float32|bfloat16] [--publications 5] [--rank R]

A publication is one version of the weights in a file, with the learner's fingerprint of them: row
checksums, and in a *scored* version also log-probs of some probe tokens. The engine computes the
same of what it loaded, and refuses weights that do not agree. Names of figures call a fingerprint a
receipt.

Faults. Five kinds, twenty of each, are injected into publications of a small model, and twenty
publications have no fault; the embedded engine loads each. The same is done in a version that is
not scored, and with nine kinds of faults in publications of LoRA adapters.

Cost. A model (MODEL, a directory of safetensors; by default a random one with 400 thousand
parameters) is published and loaded `--publications` times. The parts of a publication are to copy
the weights, write the file, and read and arrange it in the engine. The parts of the fingerprint are
timed separately:

    learner   row checksums; fingerprint; in a scored version the probe tokens' log-probs
    engine    row checksums and fingerprint; in a scored version the probe tokens' log-probs

A part's figure is its least CPU time of all threads, because other load can only add to it. Scored
versions are weighted by their share of a run's first thousand. Wanted: under 2 % of a publication.

With `--rank`, adapters of that rank are published merged into the weights and by themselves, and an
embedded engine reads both.

The exit status is 1 if a fault is not detected, or a publication without one is refused.
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
from mage_async.config.schema import Embedded, Lora
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
from mage_async.learning.lora import adapted_layers, add_adapters
from mage_async.policy.load import load_policy
from mage_async.policy.snapshot import Snapshot, base_of, checked_rows, published_tensors
from mage_async.policy.weight_digest import is_scored, probe_logprobs
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.weights.weight_store import WeightFiles
from tests.weights import weight_faults
from tests.weights.weight_faults import ADAPTER_FAULTS, FAULTS, Site

TIMES, BOUND = 20, 0.02
"""Number of faults of each kind; largest share of a publication."""
NUM_VERSIONS = 1000
"""Number of versions of a run, for the share of scored ones."""
PUBLICATION = ("copy", "write", "load")
"""Parts that a publication without a fingerprint has too."""
ENGINE = Embedded(max_contexts=2, max_tokens=64, threads=1)
Seconds = dict[str, list[float]]
"""CPU seconds of each publication, by part."""
Parts = dict[str, float]
"""Least CPU seconds, by part."""


def caught(folder: Path, *, are_adapters: bool = False) -> dict[str, int]:
    """Return how many of `TIMES` publications were refused, by kind of fault; "none" is one."""
    site = Site.of(folder, publishes_adapters=are_adapters)
    faults = ADAPTER_FAULTS if are_adapters else FAULTS
    kinds = {**faults, "none": lambda site, number: site.publish()}

    async def main() -> dict[str, int]:
        async with EmbeddedEngine(folder / "policy", ENGINE, "bench") as engine:
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
    """Return the least CPU seconds of each part of a publication, and the share of fingerprints."""
    model = load_policy(directory, dtype, "cpu")
    plain, scored = (
        _parts(model, directory, folder, publications, scores) for scores in (False, True)
    )
    publication = sum(plain[part] for part in PUBLICATION)
    added, added_scored = (
        sum(seconds for part, seconds in parts.items() if part not in PUBLICATION)
        for parts in (plain, scored)
    )
    versions = range(NUM_VERSIONS)
    share = sum(is_scored(each, has_row_checksums=True) for each in versions) / NUM_VERSIONS
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
    """Return bytes and least CPU seconds to publish and read merged weights, and adapters."""
    model, spent, size = load_policy(directory, dtype, "cpu"), defaultdict(list), {}
    add_adapters(model, Lora(rank=rank, alpha=2.0 * rank), 0)
    engine_config = msgspec.structs.replace(ENGINE, arithmetic=dtype)
    engine, files = EmbeddedEngine(directory, engine_config), WeightFiles(folder / "weights")
    for version in range(publications + 1):
        for way, base in (("merged", None), ("alone", base_of(model))):
            with _timed(spent, f"publish {way}"):
                file = files.write(Snapshot.of(model, version, base=base))
            with _timed(spent, f"read {way}"):
                # `kept` holds the previous weights during the read, as a serving engine does.
                kept = engine._read(version, file)
            size[way] = file.stat().st_size
    assert kept[1] is not None
    seconds = {name: round(min(each[1:]), 5) for name, each in spent.items()}
    return {"rank": rank, "bytes": size, "processor_s": seconds}


def _parts(model, directory: Path, folder: Path, publications: int, scores: bool) -> Parts:
    """Return the least CPU seconds of each part over some publications."""
    spent: Seconds = defaultdict(list)
    for version in range(publications + 1):
        _publication(model, directory, folder, spent, version, scores)
    return {name: min(seconds[1:]) for name, seconds in spent.items()}  # the first warms up


def _publication(
    model, directory: Path, folder: Path, spent: Seconds, version: int, scores: bool
) -> None:
    """Publish and load one version, and add the CPU seconds of each part to `spent`."""
    file, shape = folder / "published.safetensors", read_architecture(directory)
    arithmetic = ARITHMETICS["float32" if model.dtype == torch.float32 else "bfloat16"]
    logprobs = None
    if scores:
        with _timed(spent, "learner's log-probs"):
            logprobs = probe_logprobs(model)
    tensors = published_tensors(model)  # needed without a fingerprint too
    with _timed(spent, "learner's rows"), torch.no_grad():
        checked_rows(tensors, adapted_layers(model), version)
    with _timed(spent, "copy"):
        snapshot = Snapshot.of(model, version, logprobs)
    # `Snapshot.of` computes the row checksums once more, which are no part of the copy.
    spent["copy"][-1] -= spent["learner's rows"][-1]
    with _timed(spent, "learner's receipt"):
        published = read_fingerprint(snapshot.fingerprint().text(), str(file))
    with _timed(spent, "write"):
        snapshot.write(file)
    # `write` computes the fingerprint once more.
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
    """Add the CPU seconds of the block to `spent`."""
    began = time.process_time()
    yield
    spent[name].append(time.process_time() - began)


def main() -> int:
    """Measure, print and write; return 1 if the engine misjudged a publication."""
    parser = option_parser(__doc__)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--publications", type=int, default=5, metavar="N")
    parser.add_argument("--rank", type=int, default=0, metavar="R")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        refused = caught(folder / "faults")
        with patch.object(weight_faults, "probe_logprobs", return_value=None):
            refused_unscored = caught(folder / "faults of a version that is not scored")
            refused_adapters = caught(folder / "faults of adapters", are_adapters=True)
        arguments = _model(given, folder), given.dtype, folder, given.publications
        figures = costs(*arguments)
        if given.rank:
            figures["adapters"] = adapters(*arguments, given.rank)
    figures["refused_in_a_version_that_is_not_scored"] = refused_unscored
    figures["refused_adapters"] = refused_adapters
    _report(refused, figures)
    name = "receipts" if given.model is None else f"receipts_{given.model.absolute().name}"
    write_baseline(f"{name}_{given.dtype}", {"refused": refused, "times": TIMES} | figures)
    return int(
        not all(_is_as_wanted(each) for each in (refused, refused_unscored, refused_adapters))
    )


def _is_as_wanted(refused: dict[str, int]) -> bool:
    """Return whether every fault was detected, and every publication without one accepted."""
    return all(count == (0 if kind == "none" else TIMES) for kind, count in refused.items())


def _model(given: argparse.Namespace, folder: Path) -> Path:
    """Return the model directory of the command line, or one of a random model."""
    if given.model is None:
        random_model("tiny", is_tied=True).save_pretrained(folder / "policy")
    return given.model or folder / "policy"


def _report(refused: dict[str, int], figures: dict[str, object]) -> None:
    for kind, count in refused.items():
        print(f"{kind:22}{count:4} of {TIMES} refused")
    total = sum(count for kind, count in refused.items() if kind != "none")
    print(f"caught {total} of {TIMES * len(FAULTS)}")
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(f"wanted: receipts over publication under {BOUND}")


if __name__ == "__main__":
    sys.exit(main())
