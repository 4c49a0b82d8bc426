"""Weights come to the real SGLang by every way, under load, and draw exactly what they should."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import uvloop
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.config.schema import Config, Supervision
from mage_async.config.schema import Sglang as EngineRules
from mage_async.inference.weight_fingerprint import probe_tokens
from mage_async.policy.snapshot import Snapshot
from mage_async.results.run_directory import RunDirectory
from mage_services.engines.sglang.engine import SglangEngine
from mage_services.weights.weight_sender import WeightSender
from mage_services.weights.weight_store import WeightFiles

TURNS, TOKENS = 6, 24


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    return Qwen3ForCausalLM(config).eval()


def changed(trained: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """Train a little, so to say; a copy of the weights."""
    with torch.no_grad():
        for weight in trained.parameters():
            weight.mul_(1.0 + 0.05 * torch.randn(()))
    return {name: weight.clone() for name, weight in trained.state_dict().items()}


@torch.no_grad()
def scored(trained: Qwen3ForCausalLM) -> torch.Tensor:
    """The model's own log-probs of the probe tokens."""
    tokens = torch.from_numpy(probe_tokens(trained.config.vocab_size))
    logprobs = trained(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


@torch.no_grad()
def worst_error(trained: Qwen3ForCausalLM, prompt: Prompt, drawn: Completion) -> float:
    """Largest difference of log-probs from the model's own forward, in nats."""
    tokens = torch.from_numpy(np.concatenate([prompt.tokens, drawn.tokens])).long()
    logprobs = trained(tokens[None]).logits[0].float().log_softmax(-1)
    place = torch.arange(len(prompt.tokens) - 1, len(tokens) - 1)
    own = logprobs[place, tokens[place + 1]].numpy()
    return float(np.abs(own - drawn.logprobs).max())


@pytest.mark.timeout(600)
def test_every_way_brings_the_same_weights_while_turns_are_drawn(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trained = model()
    trained.save_pretrained(tmp_path / "policy")
    run = RunDirectory(tmp_path)
    transports: list[WeightFiles] = [
        WeightFiles(run.weights),
        WeightFiles(run.shared_weights),
        WeightSender(run.weights, "gloo", lambda version: False),
    ]
    rules = EngineRules(
        max_contexts=16,
        max_tokens=256,
        cache_rule="isolate",
        threads=1,
        in_flight="in_place",
        turn_deadline_s=300.0,
        devices=[],
        server={},
    )

    def prompt(name: str, seed: int) -> Prompt:
        tokens = np.random.default_rng(seed).integers(10, 250, 40, np.int32)
        return Prompt(name, tokens, Sampling(max_tokens=TOKENS), seed, refresh_kv=True)

    async def scenario() -> None:
        supervision = Supervision(max_restarts=0, silence_s=60.0)
        engine = SglangEngine(run.policy, Config(engine=rules, supervision=supervision))
        async with engine, asyncio.TaskGroup() as tasks:
            await engine.describe()
            for version in range(1, 7):
                transport = transports[version % 3]
                under_load = [
                    tasks.create_task(
                        engine.complete(prompt(f"{version}.{n}", n)), name=f"turn {n}"
                    )
                    for n in range(TURNS)
                ]
                changed(trained)
                snapshot = Snapshot.of(trained, version, scored(trained))
                receipt = await engine.load(version, transport.write(snapshot))
                assert receipt is not None
                assert receipt.difference < 1e-4, transport.describe()
                assert receipt.num_retries == 0
                asked = prompt(f"after {version}", version)
                drawn = await engine.complete(asked)
                assert [(one.start, one.policy) for one in drawn.versions] == [(0, version)]
                assert worst_error(trained, asked, drawn) < 1e-4, transport.describe()
                for done in [await turn for turn in under_load]:
                    assert len(done.tokens) == TOKENS
                    assert {one.policy for one in done.versions} <= {version - 1, version}
            done = engine.statistics()
            assert done.num_loads == 6
            print(f"stood still {1000 * done.stall_s / done.num_loads:.0f} ms a load")

    try:
        uvloop.run(scenario())
    finally:
        shutil.rmtree(run.shared_weights, ignore_errors=True)
