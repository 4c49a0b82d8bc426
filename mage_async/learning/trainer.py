"""One step of the learner: a batch of sequences in, new weights and metrics out."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.config.schema import Config, Expert, Learner
from mage_async.learning.adapters import adapted_layers, without_adapters
from mage_async.learning.expert_pairs import ExpertPairs, likeliest
from mage_async.learning.forward import (
    ModelInputs,
    checkpoint_activations,
    head_inputs,
)
from mage_async.learning.optimizer import Masters, optimizer_of, set_rate
from mage_async.learning.packing import Packed, Sequenced, pack
from mage_async.learning.passes import Pass, Start, cut
from mage_async.learning.roles import backward
from mage_async.learning.step_metrics import TrainedPass, Update, mismatch, step_metrics
from mage_async.learning.token_loss import HeadInputs, LossPass, loss_pass
from mage_async.learning.training_sequences import training_sequences
from mage_async.trajectory import Group, Kind
from mage_kernels import advantage_report, at_tokens, linear_logprob


class Trainer:
    """The model under training, with its optimizer.

    A step trains one batch and makes one policy version; inside it the batch is cut into
    `minibatches`, one optimizer update each, and a minibatch into passes of `tokens_per_pass`,
    whose gradients add up. Segments are never cut; their order is drawn from (seed, version).

    Log-probs under the weights at the beginning of the step come from the forward that trains the
    first minibatch, and from a forward of their own for the others.
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
        expert: Expert | None = None,
    ) -> None:
        self.model = model
        self.reference: PreTrainedModel | None = None
        """The frozen policy of the KL term and of an expert's implicit reward, to be set before a
        step that has one; with adapters it is the model without them.
        """
        self.expert_policy: PreTrainedModel | None = None
        """The frozen policy that an expert's implicit reward is taken from; None: experts come with
        the trials.
        """
        self.version = 0
        self.masters = Masters(model, is_on=rules.float32_masters)
        self.optimizer = optimizer_of(self.masters.trained, rules, model.device)
        self.optimizer_state = rules.optimizer_state
        self.adopt(
            rules,
            temperature,
            seed,
            max_staleness=max_staleness,
            strategy_temperature=strategy_temperature,
            expert=expert,
        )

    def adopt(
        self,
        rules: Learner,
        temperature: float,
        seed: int,
        *,
        max_staleness: int,
        strategy_temperature: float | None = None,
        expert: Expert | None = None,
    ) -> None:
        """Train by these rules from here on; a resumed run may have others than its checkpoint.

        Args:
            temperature: at which tokens were drawn, but those of strategies.
            strategy_temperature: of those; None: the same.
            expert: whose actions are preferred to the policy's; None: nobody's.
        """
        self._rules, self._temperature, self._seed = rules, temperature, seed
        self._sharpness = temperature / (strategy_temperature or temperature)
        self._loss = self._loss_pass(rules)
        self._preference = expert if expert and expert.form == "implicit" else None
        self._max_staleness = max_staleness
        torch.set_float32_matmul_precision(rules.matmul_precision)  # of this whole process
        checkpoint_activations(self.model, is_on=rules.activation_checkpointing)
        for group in self.optimizer.param_groups:
            group["betas"] = (rules.beta1, rules.beta2)
            group["weight_decay"] = rules.weight_decay

    def _loss_pass(self, rules: Learner) -> LossPass:
        return loss_pass(rules)

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

    def train(self, groups: Sequence[Group], config: Config) -> dict[str, float]:
        """Train on a batch of groups, credited by a configuration; as `step`."""
        return self.step(training_sequences(groups, config, self.model.device))

    def step(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """Train on a batch; the version grows by one. Returns metrics by name."""
        first, *others = [self.passes(chunk) for chunk in self._chunks(sequences)]
        minibatches = [first, *([self.begun(each) for each in passes] for passes in others)]
        num_tokens = sum(len(each.packed.targets) for passes in minibatches for each in passes)
        self._set_rate()
        scale = len(minibatches) / max(1, num_tokens)
        updates = [self.update(passes, scale) for passes in minibatches]
        metrics = step_metrics(updates, self.version, self._max_staleness)
        metrics["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        self.version += 1
        return metrics

    def parity(self, sequences: Sequence[Sequenced]) -> dict[str, float]:
        """How far the engine's log-probs are from this model's, at equal weights and keys."""
        passes = [self._laid(each) for each in self._cuts(sequences)]
        with self.read(len(passes)):
            return mismatch([self.begun(each) for each in passes], self.version)

    def refer_to(self, model: PreTrainedModel) -> None:
        """Have a frozen policy as the reference."""
        self.reference = model.to(self.model.device)

    @contextmanager
    def read(self, num_forwards: int) -> Iterator[PreTrainedModel]:
        """The model, for so many forwards without a gradient."""
        yield self.model

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        kept = {"version": self.version, "optimizer": self.optimizer.state_dict()}
        return kept | self.masters.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.version = int(state["version"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.masters.restore(state)

    def _chunks(self, sequences: Sequence[Sequenced]) -> list[list[Sequenced]]:
        order = list(sequences)
        random.Random(f"{self._seed}/minibatches/{self.version}").shuffle(order)
        count = min(self._rules.minibatches, len(order))
        return [order[number::count] for number in range(count)]

    def passes(self, sequences: Sequence[Sequenced]) -> list[Pass]:
        """A minibatch as it goes through the model, before any forward of the policy."""
        return [self._pass(each) for each in self._cuts(sequences)]

    def _cuts(self, sequences: Sequence[Sequenced]) -> list[list[Sequenced]]:
        rules = self._rules
        return cut(sequences, rules.tokens_per_pass, shares_opening=rules.shared_opening)

    def _pass(self, sequences: Sequence[Sequenced]) -> Pass:
        laid = self._laid(sequences)
        reference, pairs = self._apart(laid.packed, laid.inputs)
        return replace(laid, reference=reference, pairs=pairs)

    def _laid(self, sequences: Sequence[Sequenced]) -> Pass:
        """A pass without what a reference policy says."""
        device = self.model.device
        packed = pack(sequences, shares_opening=self._rules.shared_opening)
        sampled = packed.sampled
        inputs = ModelInputs.of(packed, device, self._sharpened(sampled.kinds))
        columns = [
            at_tokens(packed.advantages, torch.from_numpy(packed.turn_lengths)),
            torch.from_numpy(sampled.logprobs),
            torch.from_numpy(self.version - sampled.policy_versions),
            torch.from_numpy(packed.turns),
        ]
        return Pass(packed, inputs, *(column.to(device) for column in columns))

    @torch.no_grad()
    def begun(self, each: Pass, inputs: HeadInputs | None = None) -> Pass:
        """A pass with what the weights of this moment say of its tokens.

        Args:
            inputs: what the transformer's forward of these weights gave, where it was made already.
        """
        inputs = inputs or head_inputs(self.model, each.inputs, self._temperature)
        logprobs, entropy = linear_logprob(
            inputs.hidden, inputs.head, inputs.targets, inputs.inverse_temperature
        )
        explores = self._explores(each.packed.sampled.kinds, entropy)
        return replace(each, beginning=Start(logprobs, explores))

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

    @torch.no_grad()
    def _apart(
        self, packed: Packed, given: ModelInputs
    ) -> tuple[torch.Tensor | None, ExpertPairs | None]:
        """What the reference policy says, where it is asked: log-probs, float32 [N], and pairs."""
        if not (self._rules.kl or self._preference):
            return None, None
        with self._frozen() as model:
            inputs = head_inputs(model, given, self._temperature)
            logprobs = linear_logprob(
                inputs.hidden, inputs.head, inputs.targets, inputs.inverse_temperature
            )[0]
        told = None
        if self.expert_policy is not None:
            told = likeliest(head_inputs(self.expert_policy, given, self._temperature), packed)
        pairs = ExpertPairs.of(packed, inputs, told) if self._preference else None
        return (logprobs if self._rules.kl else None), pairs

    @contextmanager
    def _frozen(self) -> Iterator[PreTrainedModel]:
        """The reference policy; of a model with adapters the model, while they are off."""
        if adapted_layers(self.model):
            with without_adapters(self.model):
                yield self.model
        else:
            assert self.reference is not None
            yield self.reference

    def update(self, passes: Sequence[Pass], scale: float) -> Update:
        """One optimizer update, which waits for no GPU."""
        self.optimizer.zero_grad(set_to_none=True)
        trained = [self._backward(each, scale) for each in passes]
        return Update(trained, self._apply())

    def _apply(self) -> torch.Tensor:
        """Have the optimizer follow the gradient; the gradient's norm before it is clipped."""
        norm = self._clip()
        self.optimizer.step()
        self.masters.write()
        return norm

    def _clip(self) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.masters.trained, self._rules.grad_clip)

    def _backward(self, each: Pass, scale: float) -> TrainedPass:
        """Add a pass's gradient."""
        inputs = head_inputs(self.model, each.inputs, self._temperature)
        each = each if each.beginning else self.begun(each, inputs)
        rates = self._entropy_rate() * each.start.explores
        found = self._loss(inputs, each.tokens(), rates, scale, each.reference)
        loss, counted = found.loss, None
        if self._preference and each.pairs:
            preference, counted = each.pairs.loss(inputs, self._preference.beta)
            loss = loss + self._preference.weight * scale * preference
        backward(self.model, loss, inputs.hidden, each.inputs.exploits)
        made = replace(found.made, losses=found.made.losses.detach())
        sums = [made.losses.sum(), found.entropy.sum(), made.is_clipped.sum(), made.weights.sum()]
        sums += [made.is_masked.sum(), found.reference_k3]
        return TrainedPass(each, torch.stack([one.detach().float() for one in sums]), made, counted)

    def _progress(self) -> float:
        return min(1.0, self.version / max(1, self._rules.steps - 1))

    def _entropy_rate(self) -> float:
        start, end = self._rules.entropy, self._rules.final_entropy
        return start + (end - start) * self._progress()

    def _set_rate(self) -> None:
        start, end = self._rules.learning_rate, self._rules.final_learning_rate
        warm = min(1.0, (self.version + 1) / max(1, self._rules.warmup_steps))
        set_rate(self.optimizer, warm * (start + (end - start) * self._progress()))
