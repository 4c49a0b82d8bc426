"""One step of the learner: a batch of sequences in, new weights and metrics out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.config import Learner
from mage_async.learning.forward import Batch, token_logprobs
from mage_async.learning.loss import LossRules, policy_loss, truncated_weights
from mage_async.packing import Packed, Sequenced, pack
from mage_async.trajectory import Kind


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A minibatch: its tokens, and what they are worth."""

    packed: Packed
    batch: Batch
    advantages: torch.Tensor
    behaviour: torch.Tensor
    acts: torch.Tensor
    """float32 [N]: 1 for tokens of actions, 0 for those of reflections, which get no entropy bonus
    """
    proximal: torch.Tensor


class Trainer:
    """The model under training, with its optimizer.

    A step trains one batch and makes one policy version; inside it the batch is cut into
    `minibatches`, one optimizer update each. Trials are cut whole, in an order drawn from (seed,
    version).
    """

    def __init__(
        self, model: PreTrainedModel, rules: Learner, temperature: float, seed: int
    ) -> None:
        self.model = model
        self.version = 0
        self._rules, self._temperature, self._seed = rules, temperature, seed
        self._loss_rules = LossRules(rules.clip_low, rules.clip_high, rules.max_weight)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=rules.learning_rate,
            betas=(rules.beta1, rules.beta2),
            weight_decay=rules.weight_decay,
        )

    def describe(self) -> str:
        """The model in a few words."""
        model = self.model
        size = f"{model.num_parameters():,} parameters"
        return f"{model.config.model_type} of {size} in {model.dtype} on {model.device}"

    def step(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """Train on a batch; the version grows by one. Returns metrics by name."""
        parts = [self._part(chunk) for chunk in self._chunks(sequences)]
        num_tokens = sum(len(part.packed.targets) for part in parts)
        scale = len(parts) / max(1, num_tokens)
        self._set_rate()
        sums = np.sum([self._update(part, scale) for part in parts], axis=0)
        metrics = _named(sums, num_tokens, len(parts)) | _off_policy(parts, self.version)
        metrics["learning_rate"] = self._optimizer.param_groups[0]["lr"]
        self.version += 1
        return metrics

    @torch.no_grad()
    def parity(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """How far the engine's log-probs are from this model's, at equal weights and keys."""
        return _off_policy([self._part(sequences)], self.version)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        return {"version": self.version, "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.version = int(state["version"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _chunks(self, sequences: Sequence[Sequenced]) -> list[list[Sequenced]]:
        order = list(sequences)
        random.Random(f"{self._seed}/minibatches/{self.version}").shuffle(order)
        count = min(self._rules.minibatches, len(order))
        return [order[number::count] for number in range(count)]

    @torch.no_grad()
    def _part(self, sequences: Sequence[Sequenced]) -> _Part:
        device = self.model.device
        packed = pack(sequences)
        batch = Batch.of(packed, device)
        proximal, _ = token_logprobs(self.model, batch, self._temperature)
        acts = torch.from_numpy((packed.kinds == Kind.ACT).astype(np.float32))
        advantages, behaviour = (
            torch.from_numpy(packed.advantages),
            torch.from_numpy(packed.logprobs),
        )
        return _Part(
            packed, batch, advantages.to(device), behaviour.to(device), acts.to(device), proximal
        )

    def _update(self, part: _Part, scale: float) -> np.ndarray:
        """One optimizer update; sums over tokens, in the order of `_named`."""
        logprobs, entropy = token_logprobs(self.model, part.batch, self._temperature)
        weights = truncated_weights(part.proximal, part.behaviour, self._loss_rules.max_weight)
        losses, is_clipped = policy_loss(
            logprobs, part.proximal, weights, part.advantages, self._loss_rules
        )
        loss = scale * (losses - self._entropy_rate() * entropy * part.acts).sum()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._rules.grad_clip)
        self._optimizer.step()
        sums = [losses.sum(), entropy.sum(), is_clipped.sum(), weights.sum(), norm]
        return torch.stack([value.detach().float() for value in sums]).cpu().numpy()

    def _progress(self) -> float:
        return min(1.0, self.version / max(1, self._rules.steps - 1))

    def _entropy_rate(self) -> float:
        start, end = self._rules.entropy, self._rules.final_entropy
        return start + (end - start) * self._progress()

    def _set_rate(self) -> None:
        start, end = self._rules.learning_rate, self._rules.final_learning_rate
        warm = min(1.0, (self.version + 1) / max(1, self._rules.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = warm * (start + (end - start) * self._progress())


def _named(sums: np.ndarray, num_tokens: int, num_updates: int) -> dict[str, float]:
    loss, entropy, clipped, weights = sums[:4] / max(1, num_tokens)
    return {
        "loss": float(loss),
        "entropy": float(entropy),
        "clipped_share": float(clipped),
        "mean_weight": float(weights),
        "grad_norm": float(sums[4] / num_updates),
    }


def _off_policy(parts: Sequence[_Part], version: int) -> dict[str, float]:
    """How far the tokens are from the policy being trained: staleness, and log-probs at equal
    version.
    """
    drawn = np.concatenate([part.packed.policy_versions for part in parts])
    keys = np.concatenate([part.packed.kv_versions for part in parts])
    gap = torch.cat([(part.proximal - part.behaviour).abs() for part in parts]).cpu().numpy()
    staleness = version - drawn
    is_equal = (staleness == 0) & (keys == version)
    metrics = {
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "logprob_gap_mean": float(gap.mean()),
        "equal_version_tokens": float(is_equal.sum()),
    }
    if is_equal.any():
        metrics["logprob_mismatch_mean"] = float(gap[is_equal].mean())
        metrics["logprob_mismatch_max"] = float(gap[is_equal].max())
    episodes = np.concatenate([part.packed.episodes for part in parts])
    for episode in np.unique(episodes):
        metrics[f"staleness_mean_episode_{episode + 1}"] = float(
            staleness[episodes == episode].mean()
        )
    return metrics
