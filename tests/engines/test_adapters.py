"""Published adapters: the engine merges them into the weights that the learner would publish."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from mage_async.config.policy import Lora
from mage_async.config.schema import Embedded
from mage_async.inference.weights import Weights
from mage_async.learning.adapters import trained_tensors
from mage_async.policy.load import export_hf
from mage_async.policy.lora import add_adapters
from mage_async.policy.snapshot import Snapshot, base_of
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


def engine_of(folder: Path, arithmetic: str = "float32") -> EmbeddedEngine:
    rules = Embedded(arithmetic=arithmetic, max_contexts=4, max_tokens=64, threads=1)
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
            await engine.load_past(1, files.file(1))
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
