"""Train the policy: one step turns a batch of sequences into new weights and metrics
(`token_metrics.py`).
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.learning.attention import attention_report
from mage_async.learning.corrections import Vcpo, interpolated
from mage_async.learning.forward import checkpoint_activations, head_inputs
from mage_async.learning.lora import adapted_layers, backward, without_adapters
from mage_async.learning.optimizer import (
    Masters,
    entropy_coefficient,
    learning_rate,
    optimizer_of,
    set_decays,
    set_rate,
    step_if_finite,
)
from mage_async.learning.packing import (
    MicroBatch,
    TrainingSequence,
    split_minibatch,
    training_sequences,
)
from mage_async.learning.rank_orders import Ranks
from mage_async.learning.token_loss import CorrectedLoss, HeadInputs, LossTerm, corrected_loss
from mage_async.learning.token_metrics import TrainedMicroBatch, Update, mismatch, token_metrics
from mage_async.methods.method import Methods
from mage_async.trajectory import Group, Kind
from mage_async.trials.chat_format import ChatFormat
from mage_kernels import advantage_report, backend_report


class Trainer:
    """Train a model: each step takes one batch, updates the weights, and makes one policy version.

    A step splits its batch into `learner.minibatches` minibatches, with one optimizer update each,
    and a minibatch into micro-batches, whose gradients add up. Sequences are never cut; their order
    is drawn from (seed, version).

    The proximal log-probs, from which a clip measures how far a token has moved, are those under
    the weights at the beginning of the step. For the first minibatch the training forward gives
    them, because no update has happened yet. Every other minibatch gets a forward without gradient
    before the first update; with `learner.proximal = "interpolated"` it gets none (`interpolated`).
    """

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        self.model = model
        self.reference: PreTrainedModel | None = None
        """The policy that training began with, for the KL term and for loss terms that need it;
        `refer_to` sets it before the first step. It stays None for a model with adapters: with
        adapters switched off, the model itself is the reference.
        """
        self.frozen_policy: PreTrainedModel | None = None
        """A second frozen policy, for loss terms of methods; None: there is none."""
        self._reference_weights: dict[str, torch.Tensor] | None = None
        """Weights of a checkpoint's renewed reference; None: the reference is the first policy."""
        self.version = 0
        self.masters = Masters(model, is_on=config.learner.float32_masters)
        self.optimizer = optimizer_of(self.masters.trained, config.learner, model.device)
        self.optimizer_state = config.learner.optimizer_state
        self.adopt(config)

    def adopt(self, config: Config) -> None:
        """Train under this configuration from here on; a resumed run may have changed it."""
        learner, sampling = config.learner, config.sampling
        self.config, self._learner = config, learner
        self._temperature = sampling.temperature
        # Temperature of actions divided by that of strategies.
        self._sharpness = sampling.temperature / sampling.strategy_temperature
        # `lag` makes every token that many steps older.
        self._max_staleness = config.admission.nominal_most_stale
        self._loss = self._corrected_loss()
        self._terms: list[LossTerm] = Methods(config).loss_terms()
        torch.set_float32_matmul_precision(learner.matmul_precision)  # for the whole process
        checkpoint_activations(self.model, is_on=learner.activation_checkpointing)
        set_decays(self.optimizer, learner.beta2, learner.weight_decay)

    def _corrected_loss(self) -> CorrectedLoss:
        """Return the loss of the configured correction; `RankedTrainer` overrides this."""
        return corrected_loss(self._learner)

    def describe(self) -> str:
        """Describe model, loss and kernels in one line for people."""
        model = self.model
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        size = f"{model.num_parameters():,} parameters"
        if trained < model.num_parameters():
            size += f", of which {trained:,} are trained,"
        kind = f"{model.config.model_type} of {size} in {model.dtype} on {model.device}"
        loss = f"{self._learner.correction.kind}: {self._loss}"
        kernels = advantage_report(model.device), backend_report()
        return "; ".join(each for each in (kind, loss, attention_report(model), *kernels) if each)

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Compute returns and advantages of a batch of groups, then train on it as `step` does."""
        sequences = training_sequences(groups, self.config, self.model.device, version=self.version)
        return self.step(sequences)

    def step(self, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        """Train on a batch and return metrics by name; the version grows by one."""
        chunks = self._chunks(sequences)
        minibatches = [self.micro_batches(chunk) for chunk in chunks]
        # The first minibatch needs none of this: no update has changed the weights before it.
        for number in range(1, len(chunks)):
            minibatches[number] = self.prepare_later(minibatches[number], number / len(chunks))
        num_tokens = sum(each.num_tokens for batches in minibatches for each in batches)
        set_rate(self.optimizer, learning_rate(self._learner, self.version))
        scale = len(minibatches) / max(1, num_tokens)
        updates = [
            self.update(self._variance_controlled(batches, chunk), scale)
            for batches, chunk in zip(minibatches, chunks, strict=True)
        ]
        terms = self._term_metrics(updates)
        return self.end_step(updates) | terms

    def end_step(self, updates: Sequence[Update]) -> dict[str, float]:
        """Return the metrics of a step by name, and begin the next version."""
        # Interpolated log-probs are made from the engine's, so a comparison of the two would say
        # nothing. Those of the first minibatch are always computed.
        computed = updates[:1] if self._learner.proximal == "interpolated" else updates
        metrics = token_metrics(updates, computed, self.version, self._max_staleness)
        metrics["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        self.version += 1
        if self._reference_cycle and self.version % self._reference_cycle == 0:
            assert self.reference is not None
            self.reference.load_state_dict(self.model.state_dict())
        return metrics

    @property
    def _reference_cycle(self) -> int:
        """Number of steps after which the reference is renewed; 0: never."""
        return max((term.reference_cycle for term in self._terms), default=0)

    def parity(self, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        """Compare the engine's log-probs with this model's, without training; see `mismatch`."""
        batches = self._pack(sequences)
        with self.read(len(batches)):
            return mismatch([self.with_proximal(each) for each in batches], self.version)

    def refer_to(self, model: PreTrainedModel) -> None:
        """Move a frozen policy to the model's device and use it as the reference. If a restored
        checkpoint has weights of a renewed reference, the policy gets these.
        """
        if self._reference_weights is not None:
            model.load_state_dict(self._reference_weights)
        # transformers wraps `to` in a way that hides its `self`.
        self.reference = model.to(self.model.device)  # type: ignore[arg-type]

    @contextmanager
    def read(self, num_forwards: int) -> Iterator[PreTrainedModel]:
        """Yield the model for `num_forwards` forwards without gradient.

        A sharded model has to know the number, because every rank takes part in every forward.
        """
        yield self.model

    def state(self) -> dict[str, Any]:
        """Return the state of a checkpoint: version, optimizer and masters, without the weights."""
        kept = {"version": self.version, "optimizer": self.optimizer.state_dict()}
        if self._reference_cycle and self.reference is not None:
            kept["reference"] = self.reference.state_dict()
        return kept | self.masters.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.version = int(state["version"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.masters.restore(state)
        self._reference_weights = state.get("reference")
        if self.reference is not None:
            self.refer_to(self.reference)

    def _chunks(self, sequences: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
        """Divide a batch among minibatches at random; sizes differ by one sequence at most."""
        order = list(sequences)
        random.Random(f"{self.config.seed}/minibatches/{self.version}").shuffle(order)
        count = min(self._learner.minibatches, len(order))
        return [order[number::count] for number in range(count)]

    def micro_batches(self, sequences: Sequence[TrainingSequence]) -> list[MicroBatch]:
        """Split a minibatch into micro-batches, with the results of frozen policies.

        The trained policy's forwards are not made yet.
        """
        return [self._with_frozen(each) for each in self._pack(sequences)]

    def _pack(self, sequences: Sequence[TrainingSequence]) -> list[MicroBatch]:
        """Split a minibatch into micro-batches, without any forward."""
        return [self._micro_batch(each) for each in self._split(sequences)]

    def _split(self, sequences: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
        """Group the sequences of a minibatch by micro-batch."""
        learner = self._learner
        return split_minibatch(
            sequences, learner.max_tokens_per_microbatch, shares_opening=learner.shared_opening
        )

    def _micro_batch(self, sequences: Sequence[TrainingSequence]) -> MicroBatch:
        """Make one micro-batch of sequences, without any forward."""
        return MicroBatch.of(
            sequences,
            self.model.device,
            version=self.version,
            strategy_sharpness=self._sharpness,
            shares_opening=self._learner.shared_opening,
        )

    def prepare_later(self, batches: Sequence[MicroBatch], progress: float) -> list[MicroBatch]:
        """Prepare a minibatch other than the step's first, before the step's first update.

        Its proximal log-probs are computed now; those to be interpolated are left out, and the
        micro-batches get their `progress`.

        Args:
            progress: share of the step's updates that are made before the minibatch's own.
        """
        if self._learner.proximal == "interpolated":
            return [replace(each, progress=progress) for each in batches]
        return [self.with_proximal(each) for each in batches]

    @torch.no_grad()
    def with_proximal(self, batch: MicroBatch, inputs: HeadInputs | None = None) -> MicroBatch:
        """Return the micro-batch with `proximal` and `entropy_mask`, computed by the present
        weights or, for a micro-batch with `progress`, interpolated.

        Args:
            inputs: result of `head_inputs` under these weights, if it has been computed already.
        """
        inputs = inputs or head_inputs(self.model, batch.row, self._temperature)
        logprobs, entropy = inputs.logprobs()
        # Tokens of actions whose entropy is below the ceiling get the entropy bonus.
        acts = torch.from_numpy(batch.sampled.kinds == Kind.ACT)
        if self._learner.entropy_tokens == "restricted":
            restricted = batch.row.restricted
            acts &= torch.tensor(False) if restricted is None else ~restricted.free
        ceiling = self._learner.entropy_ceiling or math.inf
        mask = (acts.to(entropy.device) & (entropy < ceiling)).float()
        if batch.progress:
            age = batch.staleness
            logprobs = interpolated(batch.behaviour, logprobs, age, batch.progress)
        return replace(batch, proximal=logprobs, entropy_mask=mask)

    @torch.no_grad()
    def _with_frozen(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with the results of frozen policies that losses need."""
        reference = frozen = logprobs = None
        if self._learner.kl or any(term.needs_reference for term in self._terms):
            with self._reference_policy() as model:
                reference = head_inputs(model, batch.row, self._temperature)
                if self._learner.kl:
                    logprobs, _ = reference.logprobs()
        if self.frozen_policy is not None:
            frozen = head_inputs(self.frozen_policy, batch.row, self._temperature)
        prepared = tuple(term.prepare(batch, reference, frozen) for term in self._terms)
        return replace(batch, reference=logprobs, prepared=prepared)

    @contextmanager
    def _reference_policy(self) -> Iterator[PreTrainedModel]:
        """Yield the reference policy: with adapters, the model while its adapters are off."""
        if adapted_layers(self.model):
            with without_adapters(self.model):
                yield self.model
        else:
            assert self.reference is not None
            yield self.reference

    def _variance_controlled(
        self, batches: Sequence[MicroBatch], sequences: Sequence[TrainingSequence]
    ) -> Sequence[MicroBatch]:
        """Subtract the baseline of least variance from the advantages of a minibatch, and set the
        learning rate of its update, if the correction asks for that.

        This takes a forward and a backward pass for each sequence alone, under the present weights.
        """
        correction = self._learner.correction
        if not isinstance(correction, Vcpo):
            return batches
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        # For each sequence: logarithm of its importance weight, squared norm of its score (the
        # gradient of its log-prob), and advantage.
        rows = []
        for sequence in sequences:
            batch = self._micro_batch([sequence])
            logprobs, _ = head_inputs(self.model, batch.row, self._temperature).logprobs()
            scores = torch.autograd.grad(logprobs.sum(), weights, allow_unused=True)
            norm = torch.stack([each.double().norm() for each in scores if each is not None]).norm()
            log_weight = (logprobs.detach() - batch.behaviour).double().sum()
            rows.append(torch.stack([log_weight, norm**2, batch.advantages.double().mean()]))
        baseline, factor = correction.variance_controls(*torch.stack(rows).T)
        set_rate(self.optimizer, learning_rate(self._learner, self.version) * float(factor))
        return [replace(each, advantages=each.advantages - baseline.float()) for each in batches]

    def update(self, batches: Sequence[MicroBatch], scale: float) -> Update:
        """Make one optimizer update on a minibatch.

        The update waits for a GPU once, for the norm; its results are tensors, read later.

        Args:
            scale: factor of every token's loss: 1 / (mean number of sampled tokens of the step's
                minibatches).
        """
        self.optimizer.zero_grad(set_to_none=True)
        trained = [self._backward(each, scale) for each in batches]
        return Update(trained, self.apply_gradient())

    def apply_gradient(self) -> torch.Tensor:
        """Clip the gradient, take an optimizer step, and return the norm before clipping. The step
        is skipped if the norm is not finite.
        """
        norm = step_if_finite(self.optimizer, self.masters.trained, self._learner.grad_clip)
        self.masters.write()
        return norm

    def _backward(self, batch: MicroBatch, scale: float) -> TrainedMicroBatch:
        """Compute the gradient of a micro-batch and add it to the model's."""
        inputs = head_inputs(self.model, batch.row, self._temperature)
        if batch.proximal is None:
            batch = self.with_proximal(batch, inputs)
        assert batch.entropy_mask is not None
        rates = entropy_coefficient(self._learner, self.version) * batch.entropy_mask
        result = self._loss(
            inputs, batch.correction_inputs(), rates, scale, batch.reference, batch.weights
        )
        loss, counted = result.loss, []
        for term, prepared in zip(self._terms, batch.prepared, strict=True):
            added, numbers = term.loss(prepared, inputs, scale)
            loss = loss + added
            counted.append(numbers)
        backward(self.model, loss, inputs.hidden, batch.row.second_role_sampled)
        surrogate = replace(result.surrogate, losses=result.surrogate.losses.detach())
        # In the order of `SUMS`.
        sums = [surrogate.losses.sum(), result.entropy.sum(), surrogate.is_clipped.sum()]
        sums += [surrogate.weights.sum(), surrogate.is_masked.sum(), result.reference_k3]
        stacked = torch.stack([each.detach().float() for each in sums])
        return TrainedMicroBatch(batch, stacked, surrogate, counted)

    def _term_metrics(self, updates: Sequence[Update]) -> dict[str, float]:
        """Return the metrics of the loss terms, from numbers summed over all micro-batches."""
        trained = [each for update in updates for each in update.micro_batches]
        metrics: dict[str, float] = {}
        for place, term in enumerate(self._terms):
            metrics |= term.metrics(
                np.sum([each.counted[place].cpu().numpy() for each in trained], 0)
            )
        return metrics


def trainer_of(
    config: Config, model: PreTrainedModel, chat: ChatFormat, ranks: Ranks | None = None
) -> Trainer:
    """Make the trainer of a new run: the one that a method brings, or the default one.

    Args:
        ranks: this process among those that the model is sharded over; None: the model is not
            sharded.

    Raises:
        RunError: the configuration asks for ranks, and there are none here; or a method cannot
            train on ranks.
    """
    methods, count = Methods(config), config.learner.ranks
    if ranks is None and count > 1:
        raise RunError(
            f"learner.ranks = {count} needs the processes of `mage train`: set it to 1 here"
        )
    by_method = methods.trainer(model, chat)
    if ranks is None:
        return Trainer(model, config) if by_method is None else by_method
    if by_method is not None or methods.loss_terms():
        raise RunError(
            f"learner.ranks = {count}: a method trains in a way that works in one process alone: "
            "leave it out, or set learner.ranks = 1"
        )
    from mage_async.learning.ranked_trainer import RankedTrainer  # a slow import: about a second

    return RankedTrainer(model, config, ranks)
