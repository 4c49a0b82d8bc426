"""Published adapters: the engine merges them into the weights that the learner would publish, or
computes those of several versions beside their base in one forward.
"""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.config.schema import Embedded, Lora
from mage_async.errors import WeightsRefused
from mage_async.inference import scheduler as scheduler_module
from mage_async.inference.model import PolicyForward, PolicyLayer, forward_together
from mage_async.inference.scheduler import Scheduler
from mage_async.inference.weights import Adapter, Weights
from mage_async.learning.lora import add_adapters, trained_tensors
from mage_async.policy.load import export_hf
from mage_async.policy.snapshot import Snapshot, base_of
from mage_services.engines import embedded
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.weights.weight_sender import WeightSender
from mage_services.weights.weight_store import WeightFiles
from tests.helpers.random_models import random_model

ROLES = ("explore", "exploit")
RECEIVER = """
import asyncio, sys
from pathlib import Path
from mage_async.config.schema import Embedded
from mage_services.engines.embedded import EmbeddedEngine

async def main():
    rules = Embedded(arithmetic="float32", max_contexts=4, max_tokens=64, threads=1)
    async with EmbeddedEngine(Path(sys.argv[1]), rules) as engine:
        print((await engine.load(1, Path(sys.argv[2]))).digest)

asyncio.run(main())
"""
"""An engine in a process of its own, which prints the digest that it accepted."""


@torch.no_grad()
def move(model: PreTrainedModel, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for tensor in trained_tensors(model).values():
        tensor.normal_(0.0, 0.1, generator=source)


def adapted(
    folder: Path, dtype: str = "float32", roles: tuple[str, str] | None = None, **changes: object
) -> PreTrainedModel:
    """A model as a learner holds it; its policy folder is in float32."""
    model = random_model("Qwen3", **changes)
    export_hf(model, folder, folder / "policy")
    model = model.to(getattr(torch, dtype))
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    add_adapters(model, Lora(rank=4, alpha=8.0, targets=targets), 0, roles=roles)
    move(model, 1)
    return model


def engine_of(folder: Path, arithmetic: str = "float32", contexts: int = 4) -> EmbeddedEngine:
    rules = Embedded(arithmetic=arithmetic, max_contexts=contexts, max_tokens=64, threads=1)
    return EmbeddedEngine(folder / "policy", rules, "actor-0")


def served(engine: EmbeddedEngine) -> Weights:
    return engine._scheduler.model.weights


def are_equal(one: Weights, other: Weights) -> bool:
    pairs = [(one.embedding, other.embedding), (one.norm, other.norm), (one.head, other.head)]
    for each in ("layers", "second_role"):
        for own, theirs in zip(getattr(one, each), getattr(other, each), strict=True):
            pairs += zip(own.parts(), theirs.parts(), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("roles", [None, ROLES])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "exact"),
    ],
)
def test_an_engine_serves_bit_for_bit_what_merged_weights_would_be(
    tmp_path: Path, dtype: str, arithmetic: str, is_tied: bool, roles: tuple[str, str] | None
) -> None:
    model = adapted(tmp_path, dtype, roles, tie_word_embeddings=is_tied)
    base, files = base_of(model), WeightFiles(tmp_path / "weights")

    async def main() -> None:
        async with engine_of(tmp_path, arithmetic) as engine:
            for version in (1, 2):
                move(model, version)
                await engine.load(version, files.write(Snapshot.of(model, version)))
                merged = served(engine)
                await engine.load(version, files.write(Snapshot.of(model, version, base=base)))
                assert served(engine) is not merged
                assert are_equal(served(engine), merged)

    asyncio.run(main())


def test_of_a_publication_only_the_adapters_are_written(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    adapters = sum(tensor.nbytes for tensor in trained_tensors(model).values())
    whole, alone = (Snapshot.of(model, 1, base=base) for base in (None, base_of(model)))
    assert alone.data.nbytes == adapters < whole.data.nbytes / 5


def test_versions_share_what_adapters_leave_alone(tmp_path: Path) -> None:
    model, files = adapted(tmp_path), WeightFiles(tmp_path / "weights")

    async def main() -> None:
        async with engine_of(tmp_path) as engine:
            first = None
            for version in (1, 2):
                snapshot = Snapshot.of(model, version, base=base_of(model))
                await engine.load(version, files.write(snapshot))
                first = first or served(engine)
            assert served(engine).embedding is first.embedding
            assert served(engine).layers[0].qkv is not first.layers[0].qkv
            await engine.load_past(1, files.announced_path(1))
            (past,) = engine._past_policies.schedulers()
            assert past.model.weights.embedding is first.embedding

    asyncio.run(main())


def test_adapters_are_sent_from_memory_too(tmp_path: Path) -> None:
    model = adapted(tmp_path, "bfloat16")
    snapshot = Snapshot.of(model, 1, base=base_of(model))
    manifest = WeightSender(tmp_path / "weights", "gloo", lambda version: False).write(snapshot)
    command = [sys.executable, "-c", RECEIVER, tmp_path / "policy", manifest]
    receiver = subprocess.run(command, capture_output=True, text=True, check=True)
    assert receiver.stdout.strip() == snapshot.fingerprint().digest


# Several versions in one batch: the current one, and three past ones.

PASTS = (1, 2, 3)
CURRENT = 4
TOLERANCE = 1e-5


def published(folder: Path, **changes: object) -> dict[int, Path]:
    """Files of four versions, whose adapters differ."""
    model, files = adapted(folder, **changes), WeightFiles(folder / "weights")
    paths = {}
    for version in (*PASTS, CURRENT):
        move(model, version)
        paths[version] = files.write(Snapshot.of(model, version, base=base_of(model)))
    return paths


def prompt(name: str, rival: int | None) -> Prompt:
    tokens = np.arange(3, 15 + len(name), dtype=np.int32)
    return Prompt(f"{name}/{rival}", tokens, Sampling(max_tokens=6), 7, rival=rival)


async def played(engine: EmbeddedEngine, rivals: Sequence[int | None]) -> list[Completion]:
    """Two prompts to each version, all at once."""
    asked = [engine.complete(prompt(name, one)) for name in ("a", "bcd") for one in rivals]
    return list(await asyncio.gather(*asked))


async def played_apart(folder: Path, paths: dict[int, Path]) -> list[Completion]:
    """The same prompts, by an engine for each version that has no other."""
    by_version = []
    for version in (*PASTS, CURRENT):
        async with engine_of(folder) as engine:
            await engine.load(version, paths[version])
            by_version.append(await played(engine, [None]))
    return [each[place] for place in (0, 1) for each in by_version]


@asynccontextmanager
async def engine_with_all(folder: Path, paths: dict[int, Path], arithmetic: str = "float32"):
    async with engine_of(folder, arithmetic, contexts=16) as engine:
        for version in PASTS:
            await engine.load_past(version, paths[version])
        await engine.load(CURRENT, paths[CURRENT])
        yield engine


def apart(found: Sequence[Completion], wanted: Sequence[Completion]) -> float:
    """Largest difference of log-probs; infinite where other tokens were drawn."""
    pairs = list(zip(found, wanted, strict=True))
    if not all(np.array_equal(one.tokens, other.tokens) for one, other in pairs):
        return np.inf
    return max(float(np.abs(one.logprobs - other.logprobs).max()) for one, other in pairs)


def test_four_versions_in_one_batch_draw_what_four_engines_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, shared = published(tmp_path), list[int]()

    def counting(policies: Sequence[PolicyForward]) -> list[torch.Tensor]:
        shared.append(len(policies))
        return forward_together(policies)

    async def main() -> float:
        wanted = await played_apart(tmp_path, paths)
        monkeypatch.setattr(scheduler_module, "forward_together", counting)
        async with engine_with_all(tmp_path, paths) as engine:
            found = await played(engine, (*PASTS, None))
            drawn = [[run.policy for run in each.versions] for each in found]
            assert drawn == [[0], [0], [0], [CURRENT]] * 2
            assert max(shared) == 4
            return apart(found, wanted)

    assert asyncio.run(main()) < TOLERANCE


def test_keys_of_one_version_are_not_lent_to_another(tmp_path: Path) -> None:
    paths = published(tmp_path)

    async def main() -> None:
        async with engine_with_all(tmp_path, paths) as engine:
            for one in (*PASTS, None):
                assert (await engine.complete(prompt("a", one))).num_reused == 0
            for one in (*PASTS, None):
                assert (await engine.complete(prompt("b", one))).num_reused == 12

    asyncio.run(main())


def test_past_versions_share_the_matrices_of_their_base(tmp_path: Path) -> None:
    paths = published(tmp_path)

    async def main() -> None:
        async with engine_with_all(tmp_path, paths) as engine:
            first, *others = (each.model.weights for each in engine._past_policies.schedulers())
            assert all(other.layers is first.layers for other in others)
            assert served(engine).layers is not first.layers
            assert served(engine).adapters == ()

    asyncio.run(main())


def test_in_exact_arithmetic_a_version_draws_the_same_bits_beside_others(tmp_path: Path) -> None:
    paths = published(tmp_path)

    async def main() -> None:
        async with engine_with_all(tmp_path, paths, "exact") as engine:
            together = await played(engine, (*PASTS, None))
        async with engine_with_all(tmp_path, paths, "exact") as engine:
            alone = [await engine.complete(prompt("a", one)) for one in (*PASTS, None)]
        for one, other in zip(together, alone, strict=False):
            assert np.array_equal(one.logprobs, other.logprobs)

    asyncio.run(main())


FAULTS = ("another slot", "stale", "base alone", "mixed rows")


def spoil(pasts: list[Scheduler], kind: str, number: int, patch: pytest.MonkeyPatch) -> None:
    """Make a fault in one layer of one past version."""
    layer, victim = number % 3, pasts[number % len(pasts)].model
    own = victim.weights.adapters
    other = pasts[(number + 1 + number % 2) % len(pasts)].model.weights.adapters
    if kind == "mixed rows":
        adapt, name = PolicyLayer.adapt, ("qkv", "gate_up", "down")[layer]

        def mixed(self: PolicyLayer, rows: torch.Tensor, matrix: str, out: torch.Tensor) -> None:
            is_spoiled = matrix == name and self.adapters is own[layer]
            adapt(self, rows.roll(1, 0) if is_spoiled else rows, matrix, out)

        patch.setattr(PolicyLayer, "adapt", mixed)
        return
    replaced = list(own)
    if kind == "another slot":
        replaced[layer] = other[layer]
    elif kind == "base alone":
        replaced[layer] = {}
    else:
        name = sorted(own[layer])[number % len(own[layer])]
        kept = own[layer][name]
        ups = tuple((rows, columns, 0.9 * up) for rows, columns, up in kept.ups)
        replaced[layer] = {**own[layer], name: Adapter(kept.down, ups)}
    victim.weights = replace(victim.weights, adapters=tuple(replaced))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_made_fault_of_adapters_in_a_batch_is_seen(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = published(tmp_path)

    async def main() -> list[float]:
        found = []
        wanted = await played_apart(tmp_path, paths)
        for number in range(6):  # then the faults of a kind repeat
            async with engine_with_all(tmp_path, paths) as engine:
                with monkeypatch.context() as patch:
                    spoil(engine._past_policies.schedulers(), kind, number, patch)
                    found.append(apart(await played(engine, (*PASTS, None)), wanted))
        return found

    assert min(asyncio.run(main())) > TOLERANCE


def test_a_past_version_that_computes_something_else_beside_the_base_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = published(tmp_path)

    async def main() -> None:
        async with engine_with_all(tmp_path, paths) as engine:
            engine.release_past(1)
            monkeypatch.setattr(embedded, "as_adapters", lambda *given: ())
            engine._past_policies._schedulers.clear()
            with pytest.raises(WeightsRefused, match="with adapters not merged, log-probs are"):
                await engine.load_past(1, paths[1])

    asyncio.run(main())
