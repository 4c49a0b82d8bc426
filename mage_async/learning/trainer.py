"""One step of the learner: a batch of sequences in, new weights and metrics out."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.admission.staleness import TokenAges, staleness_metrics
from mage_async.config.schema import Learner
from mage_async.learning.corrections.surrogate import Surrogate, Tokens
from mage_async.learning.forward import Minibatch, head_inputs, token_logprobs
from mage_async.learning.packing import Packed, Sequenced, pack
from mage_async.learning.token_loss import loss_pass
from mage_async.trajectory import Kind


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A minibatch with the advantages of its tokens, and their log-probs under other policies."""

    packed: Packed
    minibatch: Minibatch
    advantages: torch.Tensor
    behaviour: torch.Tensor
    explores: torch.Tensor
    """float32 [N]: 1 for tokens that get the entropy bonus, 0 for others"""
    proximal: torch.Tensor
    staleness: torch.Tensor
    turns: torch.Tensor
    reference: torch.Tensor | None

    def tokens(self) -> Tokens:
        """What the correction is given, at the beginning of the step."""
        return Tokens(
            self.proximal,
            self.proximal,
            self.behaviour,
            self.advantages,
            self.staleness,
            self.turns,
        )


class Trainer:
    """The model under training, with its optimizer.

    A step trains one batch and makes one policy version; inside it the batch is cut into
    `minibatches`, one optimizer update each. Segments are cut whole, in an order drawn from (seed,
    version).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rules: Learner,
        temperature: float,
        seed: int,
        *,
        max_staleness: int,
        strategy_temperature: float | None = None,
    ) -> None:
        self.model = model
        self.reference: PreTrainedModel | None = None
        """The frozen policy of the KL term; to be set before a step whose `kl` is not 0."""
        self.version = 0
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rules.learning_rate)
        self.adopt(
            rules,
            temperature,
            seed,
            max_staleness=max_staleness,
            strategy_temperature=strategy_temperature,
        )

    def adopt(
        self,
        rules: Learner,
        temperature: float,
        seed: int,
        *,
        max_staleness: int,
        strategy_temperature: float | None = None,
    ) -> None:
        """Train by these rules from here on; a resumed run may have others than its checkpoint.

        Args:
            temperature: at which tokens were drawn, but those of strategies.
            strategy_temperature: of those; None: the same.
        """
        self._rules, self._temperature, self._seed = rules, temperature, seed
        self._sharpness = temperature / (strategy_temperature or temperature)
        self._loss = loss_pass(rules)
        self._max_staleness = max_staleness
        for group in self._optimizer.param_groups:
            group["betas"] = (rules.beta1, rules.beta2)
            group["weight_decay"] = rules.weight_decay

    def describe(self) -> str:
        """The model in a few words."""
        model = self.model
        size = f"{model.num_parameters():,} parameters"
        kind = f"{model.config.model_type} of {size} in {model.dtype} on {model.device}"
        return f"{kind}; {self._rules.correction.kind}: {self._loss}"

    def step(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """Train on a batch; the version grows by one. Returns metrics by name."""
        parts = [self._part(chunk) for chunk in self._chunks(sequences)]
        num_tokens = sum(len(part.packed.targets) for part in parts)
        scale = len(parts) / max(1, num_tokens)
        self._set_rate()
        sums, surrogates = zip(*[self._update(part, scale) for part in parts], strict=True)
        metrics = _named(np.sum(sums, axis=0), num_tokens, len(parts))
        metrics |= _mismatch(parts, self.version)
        metrics |= staleness_metrics(_ages(parts, surrogates), self._max_staleness)
        metrics["learning_rate"] = self._optimizer.param_groups[0]["lr"]
        self.version += 1
        return metrics

    @torch.no_grad()
    def parity(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """How far the engine's log-probs are from this model's, at equal weights and keys."""
        return _mismatch([self._part(sequences)], self.version)

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
        sampled = packed.sampled
        minibatch = Minibatch.of(packed, device, self._sharpened(sampled.kinds))
        proximal, entropy = token_logprobs(self.model, minibatch, self._temperature)
        columns = [
            torch.from_numpy(sampled.advantages),
            torch.from_numpy(sampled.logprobs),
            self._explores(sampled.kinds, entropy),
            proximal,
            torch.from_numpy(self.version - sampled.policy_versions),
            torch.from_numpy(packed.turns),
        ]
        reference = self._apart(minibatch)
        return _Part(packed, minibatch, *(column.to(device) for column in columns), reference)

    def _explores(self, kinds: np.ndarray, entropy: torch.Tensor) -> torch.Tensor:
        """Which tokens get the bonus: those of actions whose entropy, at the beginning of the step,
        is below the ceiling; float32 [N].
        """
        acts = torch.from_numpy(kinds == Kind.ACT).to(entropy.device)
        return (acts & (entropy < (self._rules.entropy_ceiling or math.inf))).float()

    def _sharpened(self, kinds: np.ndarray) -> np.ndarray | None:
        """How much sharper than at the temperature of actions each token was drawn: [N]."""
        if self._sharpness == 1.0:
            return None
        return np.where(kinds == Kind.STRATEGY, self._sharpness, 1.0)

    def _apart(self, minibatch: Minibatch) -> torch.Tensor | None:
        """Log-probs under the reference policy, where there is one: float32 [N]."""
        if not self._rules.kl:
            return None
        assert self.reference is not None
        return token_logprobs(self.reference, minibatch, self._temperature)[0]

    def _update(self, part: _Part, scale: float) -> tuple[np.ndarray, Surrogate]:
        """One optimizer update; sums over tokens, in the order of `_named`, and what the correction
        did.
        """
        inputs = head_inputs(self.model, part.minibatch, self._temperature)
        rates = self._entropy_rate() * part.explores
        found = self._loss(inputs, part.tokens(), rates, scale, part.reference)
        self._optimizer.zero_grad(set_to_none=True)
        found.loss.backward()
        made = found.made
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._rules.grad_clip)
        self._optimizer.step()
        sums = [made.losses.sum(), found.entropy.sum(), made.is_clipped.sum(), made.weights.sum()]
        sums += [made.is_masked.sum(), found.reference_k3, norm]
        return torch.stack([value.detach().float() for value in sums]).cpu().numpy(), made

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
    loss, entropy, clipped, weights, masked, apart = sums[:6] / max(1, num_tokens)
    return {
        "loss": float(loss),
        "entropy": float(entropy),
        "clipped_share": float(clipped),
        "mean_weight": float(weights),
        "masked_share": float(masked),
        "reference_k3": float(apart),
        "grad_norm": float(sums[6] / num_updates),
    }


def _mismatch(parts: Sequence[_Part], version: int) -> dict[str, float]:
    """How far the engine's log-probs are from the learner's: over all tokens, and over those of
    equal weights and keys.
    """
    keys = np.concatenate([part.packed.sampled.kv_versions for part in parts])
    drawn = np.concatenate([part.packed.sampled.policy_versions for part in parts])
    gap = np.abs(_log_ratios(parts))
    is_equal = (drawn == version) & (keys == version)
    metrics = {
        "logprob_gap_mean": float(gap.mean()),
        "equal_version_tokens": float(is_equal.sum()),
    }
    if is_equal.any():
        metrics["logprob_mismatch_mean"] = float(gap[is_equal].mean())
        metrics["logprob_mismatch_max"] = float(gap[is_equal].max())
    return metrics


def _log_ratios(parts: Sequence[_Part]) -> np.ndarray:
    """Proximal minus behaviour log-prob: float32 [N]."""
    return torch.cat([part.proximal - part.behaviour for part in parts]).cpu().numpy()


def _ages(parts: Sequence[_Part], made: Sequence[Surrogate]) -> TokenAges:
    return TokenAges(
        torch.cat([part.staleness for part in parts]).cpu().numpy(),
        np.concatenate([part.packed.sampled.episodes for part in parts]),
        _log_ratios(parts),
        torch.cat([surrogate.is_clipped for surrogate in made]).cpu().numpy(),
        torch.cat([surrogate.is_masked for surrogate in made]).cpu().numpy(),
        np.concatenate([part.packed.sampled.provenances for part in parts]),
    )
