"""Make a model of the quickstart's shape, and contexts that grow: each turn appends some tokens and
samples one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mage_async.completion import Prompt, Sampling
from mage_async.inference.scheduler import Scheduler

CONTEXTS, TURNS, FIRST, FORCED = 64, 12, 8, 7
"""Numbers of contexts, of turns of a context, of tokens of the first prompt, and of tokens that a
later turn appends."""
MAX_TOKENS = 256
"""Room of a context in tokens, more than all its turns need."""
# Shape of the model: the quickstart's.
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def make_model(directory: Path) -> Qwen3ForCausalLM:
    """Make a model with random weights, save it to `directory`, and return it."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_parameters=rope)).eval()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    return model


@dataclass(frozen=True)
class Turns:
    """Hold the tokens that are appended, by turn and context; also as tensors padded on the left,
    with masks."""

    appended: list[list[np.ndarray]]
    padded: list[torch.Tensor]
    masks: list[torch.Tensor]

    @staticmethod
    def of(appended: list[list[np.ndarray]]) -> "Turns":
        """Pad the tokens of each turn to its longest."""
        padded, masks = [], []
        for turn in appended:
            width = max(len(words) for words in turn)
            rows = [np.pad(words, (width - len(words), 0)) for words in turn]
            exists = [np.arange(width) >= width - len(words) for words in turn]
            padded.append(torch.from_numpy(np.stack(rows)).long())
            masks.append(torch.from_numpy(np.stack(exists)).long())
        return Turns(appended, padded, masks)

    def alone(self) -> list["Turns"]:
        """Return the turns of each context by itself."""
        return [Turns.of([[turn[index]] for turn in self.appended]) for index in range(CONTEXTS)]


def make_turns(*, is_ragged: bool) -> Turns:
    """Return turns of random tokens; all contexts have the same first prompt."""
    source, vocabulary = np.random.default_rng(0), SHAPE["vocab_size"]
    first = source.integers(0, vocabulary, FIRST, np.int32)
    appended = [[first] * CONTEXTS]
    for _ in range(TURNS - 1):
        counts = source.integers(4, 11, CONTEXTS) if is_ragged else [FORCED] * CONTEXTS
        appended.append([source.integers(0, vocabulary, count, np.int32) for count in counts])
    return Turns.of(appended)


def by_engine(scheduler: Scheduler, turns: Turns) -> None:
    """Sample all turns of all contexts with the embedded engine's scheduler."""
    contexts, lengths = np.zeros((CONTEXTS, MAX_TOKENS), np.int32), [0] * CONTEXTS
    for number, turn in enumerate(turns.appended):
        for index, words in enumerate(turn):
            start, lengths[index] = lengths[index], lengths[index] + len(words)
            contexts[index, start : lengths[index]] = words
            tokens = contexts[index, : lengths[index]]
            scheduler.submit(Prompt(str(index), tokens, Sampling(), number))
        while not scheduler.is_idle:
            for name, completion in scheduler.advance():
                contexts[int(name), lengths[int(name)]] = completion.tokens[0]
                lengths[int(name)] += 1
    for index in range(CONTEXTS):
        scheduler.release(str(index))


def rates(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return sampled tokens per CPU-second of each variant, one figure for each repeat.

    The variants alternate. All compute on one thread and wait for nothing, so on an idle machine
    the figures are per second too.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, work in variants.items():
            began = time.process_time()
            work()
            if repeat:  # the first repeat warms up
                found[name].append(CONTEXTS * TURNS / (time.process_time() - began))
    return found
