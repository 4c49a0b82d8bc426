"""Made-up trials, as long as they may become: what a plan, and a measurement of it, trains on."""

from dataclasses import dataclass

import numpy as np
import torch

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.learning.packing import SampledTokens, Sequenced


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step trains."""

    num_segments: int
    """Contexts of all trials."""
    tokens: int
    """Tokens of each."""
    sampled: int
    """Tokens of each that the policy drew."""

    @staticmethod
    def of(config: Config, tokens: int = 0) -> "Batch":
        """The largest batch of a configuration.

        Args:
            tokens: of a context; 0: as many as the engine takes.
        """
        episodes, spoken = config.trial.episodes, config.transcript
        keeps_history = "history" in config.trial.memory
        per_segment = episodes if keeps_history else 1
        turns = environment_of(config).facts.max_turns * per_segment
        sampled = turns * spoken.max_action_tokens
        if "reflection" in config.trial.memory:
            sampled += per_segment * spoken.max_reflection_tokens
        length = tokens or config.engine.max_tokens
        trials = config.admission.groups_per_step * config.admission.trials_per_group
        segments = trials * (1 if keeps_history else episodes)
        return Batch(segments, length, max(1, min(sampled, length - 1)))

    def of_one_pass(self, config: Config) -> int:
        """How many of the segments go through the model at once, at most."""
        rules = config.learner
        minibatch = -(-self.num_segments // rules.minibatches)
        if not rules.tokens_per_pass:
            return minibatch
        return max(1, min(minibatch, rules.tokens_per_pass // self.tokens))


def made_up(count: int, batch: Batch, vocabulary: int, seed: int = 0) -> list[Sequenced]:
    """Segments of random tokens, each with one turn, whose tokens stand apart."""
    source = np.random.default_rng(seed)
    return [_segment(source, batch.tokens, batch.sampled, vocabulary) for _ in range(count)]


def _segment(source: np.random.Generator, tokens: int, sampled: int, vocabulary: int) -> Sequenced:
    places = np.linspace(1, tokens - 1, sampled).astype(np.int64)
    zeros = [np.zeros(sampled, np.int32) for _ in range(5)]
    logprobs = np.full(sampled, -np.log(vocabulary), np.float32)
    return Sequenced(
        source.integers(0, vocabulary, tokens).astype(np.int32),
        places,
        SampledTokens(logprobs, *zeros),
        np.array([sampled]),
        torch.from_numpy(source.normal(size=1).astype(np.float32)),
    )
