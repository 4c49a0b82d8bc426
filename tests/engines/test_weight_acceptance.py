"""Receipts of weights: an engine accepts what the learner published, and nothing else."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from mage_async.config.schema import Embedded
from mage_async.errors import UnreadableWeights, WeightsRefused
from mage_async.inference.weight_fingerprint import WeightFingerprint
from mage_async.policy.snapshot import Snapshot
from mage_async.policy.weight_digest import is_scored
from mage_services.engines import embedded
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.engines.weight_acceptance import fingerprint_at, read_checked
from tests.weights import weight_faults
from tests.weights.weight_faults import ADAPTER_FAULTS, FAULTS, Site

RULES = Embedded(
    arithmetic="float32",
    max_contexts=2,
    max_tokens=64,
    cache_rule="keep",
    threads=1,
    in_flight="in_place",
    turn_deadline_s=300.0,
    devices=[],
)
TIMES = 20
REFUSAL = "actor-1: weights of version 1 at"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.of(tmp_path)


def outcomes(
    site: Site, make: Callable[[int], Path], rules: Embedded = RULES, times: int = TIMES
) -> list[str]:
    """What an engine says of weights made several times: nothing where it accepts them."""

    async def main() -> list[str]:
        async with EmbeddedEngine(site.folder / "policy", rules, "actor-1") as engine:
            return [await _said(engine, make(number)) for number in range(times)]

    return asyncio.run(main())


async def _said(engine: EmbeddedEngine, path: Path) -> str:
    try:
        receipt = await engine.load(1, path)
    except WeightsRefused as refused:
        return str(refused)
    published = fingerprint_at(path)
    assert receipt is not None
    assert published is not None
    assert (receipt.digest, receipt.num_retries) == (published.digest, 0)
    return ""


@pytest.mark.parametrize("is_scored", [True, False])
@pytest.mark.parametrize("kind", FAULTS)
def test_an_engine_refuses_every_made_fault(
    site: Site, kind: str, is_scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_scored:
        monkeypatch.setattr(weight_faults, "probe_logprobs", lambda model: None)
    said = outcomes(site, partial(FAULTS[kind], site))
    assert [number for number, one in enumerate(said) if not one] == []
    assert all(one.startswith(REFUSAL) and "read twice" in one for one in said)


@pytest.mark.parametrize("kind", ADAPTER_FAULTS)
def test_an_engine_refuses_every_made_fault_of_adapters(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_faults, "probe_logprobs", lambda model: None)
    site = Site.of(tmp_path, publishes_adapters=True)
    said = outcomes(site, partial(ADAPTER_FAULTS[kind], site))
    assert [number for number, one in enumerate(said) if not one] == []
    assert all(one.startswith(REFUSAL) and "read twice" in one for one in said)


def test_an_engine_says_how_adapters_do_not_fit(tmp_path: Path) -> None:
    site = Site.of(tmp_path, publishes_adapters=True)
    number = {"another base": 1, "another rank": 3, "another target": 0, "one matrix stale": 1}
    base, rank, target, stale = (
        outcomes(site, lambda _, kind=kind, n=n: ADAPTER_FAULTS[kind](site, n), times=1)[0]
        for kind, n in number.items()
    )
    assert "they are adapters of a base with the digest" in base
    assert "give the engine the folder `policy` of the run" in base
    assert "the adapter of model.layers.0.self_attn.k_proj does not fit" in rank
    assert "A is [2, 32] and B [256, 4], the weight there [256, 32]" in rank
    assert "A is [0] and B [32, 4], the weight there [32, 48] ([0]: there is none)" in target
    assert "the digest of model.layers.0.mlp.down_proj.lora_B.weight is not the learner's" in stale


@pytest.mark.parametrize("publishes_adapters", [False, True])
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "exact"])
def test_an_engine_accepts_what_was_published(
    tmp_path: Path, arithmetic: str, publishes_adapters: bool
) -> None:
    site = Site.of(tmp_path, publishes_adapters=publishes_adapters)
    rules = msgspec.structs.replace(RULES, arithmetic=arithmetic)

    def published(number: int) -> Path:
        site.step()
        return site.publish()

    assert outcomes(site, published, rules, times=6) == [""] * 6


def test_weights_of_another_version_are_refused(site: Site) -> None:
    said = outcomes(site, lambda number: site.publish(2 + number))
    assert all(f"they are weights of version {2 + n}" in one for n, one in enumerate(said))


def test_weights_that_were_others_at_first_are_read_again(site: Site) -> None:
    path, sources = site.publish(), list[Path]()

    async def main() -> None:
        async with EmbeddedEngine(site.folder / "policy", RULES, "actor-1") as engine:

            def read(source: Path, published: WeightFingerprint | None):
                assert published is not None
                sources.append(source)
                if len(sources) == 1:
                    raise UnreadableWeights("cut short")
                return engine._read_once(1, source, published)

            _, receipt = read_checked("actor-1", 1, path, read)
            assert receipt is not None
            assert receipt.num_retries == 1

    asyncio.run(main())
    assert sources == [path, path]


def test_of_a_version_that_the_learner_did_not_score_log_probs_are_not_compared(site: Site) -> None:
    path = site.folder / "v000001.safetensors"
    Snapshot.of(site.model, 1).write(path)

    async def main() -> None:
        async with EmbeddedEngine(site.folder / "policy", RULES, "actor-1") as engine:
            with patch.object(embedded, "probe_logprobs", side_effect=AssertionError("scored")):
                receipt = await engine.load(1, path)
            assert receipt is not None
            assert receipt.difference == 0.0
            with pytest.raises(WeightsRefused, match="digest"):
                await engine.load(1, FAULTS["half a bucket"](site, 1))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("has_row_checksums", "scored"),
    [(True, [0, 1, 16, 256, 512]), (False, [0, 1, *range(16, 600, 16)])],
)
def test_the_first_versions_of_a_run_are_scored_and_then_a_few(
    has_row_checksums: bool, scored: list[int]
) -> None:
    assert [
        each for each in range(600) if is_scored(each, has_row_checksums=has_row_checksums)
    ] == scored


def test_a_rival_has_a_receipt_too_and_a_model_directory_has_none(site: Site) -> None:
    async def main() -> None:
        async with EmbeddedEngine(site.folder / "policy", RULES, "actor-1") as engine:
            assert await engine.load(0, site.folder / "policy") is None
            with pytest.raises(WeightsRefused, match="the digest of lm_head"):
                await engine.load_past(1, FAULTS["another type"](site, 2 * TIMES - 1))
            await engine.load_past(1, site.publish())

    asyncio.run(main())
