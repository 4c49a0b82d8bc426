"""One step of the learner: a batch of sequences in, new weights and metrics out."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.admission.staleness import TokenAges, staleness_metrics
from mage_async.config.schema import Learner
from mage_async.learning.adapters import adapted_layers, without_adapters
from mage_async.learning.corrections.surrogate import Surrogate, Tokens
from mage_async.learning.forward import (
    ModelInputs,
    checkpoint_activations,
    head_inputs,
    token_logprobs,
)
from mage_async.learning.packing import Packed, Sequenced, pack
from mage_async.learning.passes import cut
from mage_async.learning.token_loss import loss_pass
from mage_async.trajectory import Kind
from mage_kernels import advantage_report, at_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Sequences that go through the model at once, a minibatch or a piece of one, with the
    advantages of their tokens and log-probs under other policies.
    """

    packed: Packed
    inputs: ModelInputs
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
    `minibatches`, one optimizer update each, and a minibatch into passes of `tokens_per_pass`,
    whose gradients add up. Segments are never cut; their order is drawn from (seed, version).
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
        """The frozen policy of the KL term, to be set before a step whose `kl` is not 0; with
        adapters it is the model without them.
        """
        self.version = 0
        self._optimizer = torch.optim.AdamW(
            [weight for weight in model.parameters() if weight.requires_grad],
            lr=rules.learning_rate,
        )
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
        checkpoint_activations(self.model, is_on=rules.activation_checkpointing)
        for group in self._optimizer.param_groups:
            group["betas"] = (rules.beta1, rules.beta2)
            group["weight_decay"] = rules.weight_decay

    def describe(self) -> str:
        """The model in a few words."""
        model = self.model
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        size = f"{model.num_parameters():,} parameters"
        if trained < model.num_parameters():
            size += f", of which {trained:,} are trained,"
        kind = f"{model.config.model_type} of {size} in {model.dtype} on {model.device}"
        advantages = advantage_report(model.device)
        return f"{kind}; {self._rules.correction.kind}: {self._loss}; {advantages}"

    def step(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """Train on a batch; the version grows by one. Returns metrics by name."""
        minibatches = [self.passes(chunk) for chunk in self._chunks(sequences)]
        passes = [each for minibatch in minibatches for each in minibatch]
        num_tokens = sum(len(each.packed.targets) for each in passes)
        scale = len(minibatches) / max(1, num_tokens)
        self._set_rate()
        sums, made = zip(*[self._update(each, scale) for each in minibatches], strict=True)
        metrics = _named(np.sum(sums, axis=0), num_tokens, len(minibatches))
        metrics |= _mismatch(passes, self.version)
        metrics["zero_advantage_share"] = _zero_share(passes)
        surrogates = [surrogate for each in made for surrogate in each]
        metrics |= staleness_metrics(_ages(passes, surrogates), self._max_staleness)
        metrics["learning_rate"] = self._optimizer.param_groups[0]["lr"]
        self.version += 1
        return metrics

    @torch.no_grad()
    def parity(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """How far the engine's log-probs are from this model's, at equal weights and keys."""
        return _mismatch(self.passes(sequences), self.version)

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

    def passes(self, sequences: Sequence[Sequenced]) -> list[Pass]:
        """A minibatch as it goes through the model, before its gradient is known."""
        rules = self._rules
        cuts = cut(sequences, rules.tokens_per_pass, shares_opening=rules.shared_opening)
        return [self._pass(each) for each in cuts]

    @torch.no_grad()
    def _pass(self, sequences: Sequence[Sequenced]) -> Pass:
        device = self.model.device
        packed = pack(sequences, shares_opening=self._rules.shared_opening)
        sampled = packed.sampled
        inputs = ModelInputs.of(packed, device, self._sharpened(sampled.kinds))
        proximal, entropy = token_logprobs(self.model, inputs, self._temperature)
        columns = [
            at_tokens(packed.advantages, torch.from_numpy(packed.turn_lengths)),
            torch.from_numpy(sampled.logprobs),
            self._explores(sampled.kinds, entropy),
            proximal,
            torch.from_numpy(self.version - sampled.policy_versions),
            torch.from_numpy(packed.turns),
        ]
        reference = self._apart(inputs)
        return Pass(packed, inputs, *(column.to(device) for column in columns), reference)

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

    def _apart(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Log-probs under the reference policy, where there is one: float32 [N]."""
        if not self._rules.kl:
            return None
        if adapted_layers(self.model):
            with without_adapters(self.model):
                return token_logprobs(self.model, inputs, self._temperature)[0]
        assert self.reference is not None
        return token_logprobs(self.reference, inputs, self._temperature)[0]

    def _update(self, passes: Sequence[Pass], scale: float) -> tuple[np.ndarray, list[Surrogate]]:
        """One optimizer update; sums as `_named` orders them, and what the correction did."""
        sums, norm, made = self.update(passes, scale)
        total = np.sum([each.cpu().numpy() for each in sums], axis=0)
        return np.append(total, np.float32(norm.item())), made

    def update(
        self, passes: Sequence[Pass], scale: float
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[Surrogate]]:
        """One optimizer update, which waits for no GPU: sums over the tokens of each pass, float32
        [6], the gradient's norm, and what the correction did in each pass.
        """
        self._optimizer.zero_grad(set_to_none=True)
        sums, made = zip(*[self._backward(each, scale) for each in passes], strict=True)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._rules.grad_clip)
        self._optimizer.step()
        return list(sums), norm, list(made)

    def _backward(self, each: Pass, scale: float) -> tuple[torch.Tensor, Surrogate]:
        """Add a pass's gradient; its sums, and what the correction did."""
        inputs = head_inputs(self.model, each.inputs, self._temperature)
        rates = self._entropy_rate() * each.explores
        found = self._loss(inputs, each.tokens(), rates, scale, each.reference)
        found.loss.backward()
        made = replace(found.made, losses=found.made.losses.detach())
        sums = [made.losses.sum(), found.entropy.sum(), made.is_clipped.sum(), made.weights.sum()]
        sums += [made.is_masked.sum(), found.reference_k3]
        return torch.stack([value.detach().float() for value in sums]), made

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


def _mismatch(passes: Sequence[Pass], version: int) -> dict[str, float]:
    """How far the engine's log-probs are from the learner's: over all tokens, and over those of
    equal weights and keys.
    """
    keys = np.concatenate([each.packed.sampled.kv_versions for each in passes])
    drawn = np.concatenate([each.packed.sampled.policy_versions for each in passes])
    gap = np.abs(_log_ratios(passes))
    is_equal = (drawn == version) & (keys == version)
    metrics = {
        "logprob_gap_mean": float(gap.mean()),
        "equal_version_tokens": float(is_equal.sum()),
    }
    if is_equal.any():
        metrics["logprob_mismatch_mean"] = float(gap[is_equal].mean())
        metrics["logprob_mismatch_max"] = float(gap[is_equal].max())
    return metrics


def _zero_share(passes: Sequence[Pass]) -> float:
    """Share of tokens whose advantage is 0."""
    return float((torch.cat([each.advantages for each in passes]) == 0).float().mean())


def _log_ratios(passes: Sequence[Pass]) -> np.ndarray:
    """Proximal minus behaviour log-prob: float32 [N]."""
    return torch.cat([each.proximal - each.behaviour for each in passes]).cpu().numpy()


def _ages(passes: Sequence[Pass], made: Sequence[Surrogate]) -> TokenAges:
    return TokenAges(
        torch.cat([each.staleness for each in passes]).cpu().numpy(),
        np.concatenate([each.packed.sampled.episodes for each in passes]),
        _log_ratios(passes),
        torch.cat([surrogate.is_clipped for surrogate in made]).cpu().numpy(),
        torch.cat([surrogate.is_masked for surrogate in made]).cpu().numpy(),
        np.concatenate([each.packed.sampled.provenances for each in passes]),
    )
