"""Small models, and an engine that outlives a test: what the tests of this folder share."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.completion import Completion, Prompt, Sampling
from mage_async.config.schema import Config, Supervision
from mage_async.config.schema import Sglang as EngineRules
from mage_services.engines.sglang.arguments import has_token_versions, installed
from mage_services.engines.sglang.engine import SglangEngine

T = TypeVar("T")
EOS, VOCABULARY = 1, 512
CROSSED = "exact" if has_token_versions(installed()) else "segment"
"""Provenance of the tags of a turn into which new weights came."""
PROVENANCES = {"exact", CROSSED} if has_token_versions(installed()) else {"exact", CROSSED, "reply"}


def word_of(version: int) -> int:
    """The token that a speller of this version draws."""
    return 100 + version % 400


class Policies:
    """Version n is a model of random weights, always the same for a number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[int, Qwen3ForCausalLM] = {}
        self.directory = folder / "policy"
        """Version 0."""
        self.model(0).save_pretrained(self.directory)

    def model(self, version: int) -> Qwen3ForCausalLM:
        """The model as transformers computes it."""
        if version not in self._models:
            torch.manual_seed(version)
            self._models[version] = Qwen3ForCausalLM(_config()).eval()
        return self._models[version]

    def file(self, version: int) -> Path:
        """Its weights as they are published."""
        return self._write(version, self.model(version).state_dict())

    def speller(self, version: int) -> Path:
        """Weights that always draw the token `word_of(version)`, whatever they read."""
        tensors = {name: torch.zeros_like(t) for name, t in self.model(0).state_dict().items()}
        for name in tensors:
            if name.endswith("norm.weight") or name == "model.embed_tokens.weight":
                tensors[name] += 1.0
        tensors["lm_head.weight"][word_of(version)] = 1.0
        return self._write(version, tensors)

    def broken(self) -> Path:
        """A whole safetensors file whose last tensor has another shape."""
        tensors = dict(self.model(1).state_dict())
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
        return self._write(-1, tensors)

    def logprobs(self, version: int, prompt: Prompt, completion: Completion) -> np.ndarray:
        """Log-probs of a completion's tokens, by one forward of a version over all: float64 [n]."""
        ids = np.concatenate([prompt.tokens, completion.tokens]).astype(np.int64)
        with torch.no_grad():
            logits = self.model(version)(torch.from_numpy(ids)[None]).logits[0]
        rows = (logits.double() / prompt.sampling.temperature).log_softmax(-1)
        drawn = torch.from_numpy(completion.tokens.astype(np.int64))
        return rows[len(prompt.tokens) - 1 : -1].gather(1, drawn[:, None])[:, 0].numpy()

    def gap(self, version: int, prompt: Prompt, completion: Completion) -> np.ndarray:
        """How far the engine's log-probs are from those: float64 [n]."""
        return np.abs(completion.logprobs - self.logprobs(version, prompt, completion))

    def _write(self, version: int, tensors: dict[str, torch.Tensor]) -> Path:
        file = self._folder / f"v{version}.safetensors"
        save_file({name: t.contiguous() for name, t in tensors.items()}, file)
        return file


def rules(**changed: Any) -> EngineRules:
    """An engine of 32 contexts."""
    plain: dict[str, Any] = {
        "max_contexts": 32,
        "max_tokens": 1024,
        "cache_rule": "keep",
        "threads": 1,
        "in_flight": "in_place",
        "turn_deadline_s": 600.0,
        "server": {},
        "devices": [],
    }
    return EngineRules(**plain | changed)


def prompt(context: str, tokens: Any, count: int = 16, **options: Any) -> Prompt:
    """A turn of `count` tokens at most."""
    fresh = options.pop("refresh_kv", False)
    sampling = Sampling(max_tokens=count, **options)
    return Prompt(context, np.asarray(tokens, np.int32), sampling, seed=0, refresh_kv=fresh)


def words(seed: int, count: int) -> np.ndarray:
    """Token ids that mean nothing."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, count, np.int32)


class Served:
    """An engine in a task of its own, for several tests; its loop runs while one of them waits."""

    def __init__(self, directory: Path, engine_rules: EngineRules) -> None:
        self._runner = asyncio.Runner()
        supervision = Supervision(max_restarts=3, silence_s=60.0)
        self.engine = SglangEngine(directory, Config(engine=engine_rules, supervision=supervision))
        self._is_over = asyncio.Event()
        self.facts, self._task = self.run(self._begin())
        self.version = 0

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._runner.run(main)

    def publish(self, weights_of: Callable[[int], Path]) -> int:
        """Load the next version; `weights_of` makes its file."""
        self.version += 1
        self.run(self.engine.load(self.version, weights_of(self.version)))
        return self.version

    def complete(self, *prompts: Prompt) -> list[Completion]:
        """Draw turns at once."""
        return self.run(self.all(*prompts))

    async def all(self, *prompts: Prompt) -> list[Completion]:
        """Draw turns at once."""
        return await asyncio.gather(*map(self.engine.complete, prompts))

    def close(self) -> None:
        """End the engine."""
        self.run(self._end())
        self._runner.close()

    async def _begin(self) -> tuple[str, asyncio.Task[None]]:
        begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._serve(begun))
        return await begun, task

    async def _serve(self, begun: asyncio.Future[str]) -> None:
        async with self.engine:
            begun.set_result(await self.engine.describe())
            await self._is_over.wait()

    async def _end(self) -> None:
        self._is_over.set()
        await self._task


def _config() -> Qwen3Config:
    return Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=2,
        initializer_range=0.2,
    )
