"""Train by soft actor-critic (SAC-GLAM, arXiv 2410.12481) on draws from a replay buffer.

The critic has two Q heads on the policy's last hidden state, with slow copies as targets. A head
reads the hidden state that predicts a token of an action, and gives a value to each possible token.
These tokens are the actions `a` below; `replay_buffer.py` says why the values are then those of
whole actions. For a policy `pi`, an entropy coefficient `alpha` and a discount `d` (Haarnoja et al.
2018, with expectations over actions taken exactly: Christodoulou 2019, arXiv 1910.07207):

    V(s)   = sum_a pi(a|s) (Q(s, a) - alpha log pi(a|s))
    y_1    = r + d V'(s'),   with V' by the target heads
    y_n    = r + d (y_{n-1}(s') + alpha H(s')),   with the recorded rewards, for targets of n steps
    critic = 1/2 sum_i (Q_i(s, a) - y)^2
    actor  = sum_a pi(a|s) (alpha log pi(a|s) - min_i Q_i(s, a))

Sums run over the valid actions of a state; of two heads the smaller value counts. A learned `alpha`
falls where the policy has more entropy than the target (Haarnoja et al. 2018, arXiv 1812.05905, eq.
18). The target is a share of the largest entropy that the valid actions allow:

    temperature = alpha (H(s) - share log |A(s)|)

Shapes: `N` states, `D` hidden, `A` tokens of the environment's actions; logits and log-probs in
nats.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.errors import DeterministicFailure
from mage_async.learning.corrections import Surrogate
from mage_async.learning.forward import head_inputs
from mage_async.learning.optimizer import learning_rate, set_rate
from mage_async.learning.packing import MicroBatch, TokenRow, training_sequences
from mage_async.learning.token_loss import HeadInputs
from mage_async.learning.token_metrics import SUMS, TrainedMicroBatch, Update
from mage_async.learning.trainer import Trainer
from mage_async.methods.sac_glam.method import Settings
from mage_async.methods.sac_glam.replay_buffer import (
    ReplayBuffer,
    SoftSequence,
    TrialCopy,
    action_tokens,
    experiences,
)
from mage_async.trajectory import Group
from mage_async.trials.chat_format import ChatFormat

# The critic


HEADS = 2
"""Q heads; the smaller of their values counts, against overestimation."""


class Critic(nn.Module):
    """Hold the heads, their targets and their optimizer, all in float32.

    Args:
        hidden_size: D.
        num_actions: A.
        seed: seed of the initial weights, so that `mage replay` begins with the same heads.
        alpha: the entropy coefficient; if it is learned, its initial value.
    """

    def __init__(
        self,
        hidden_size: int,
        num_actions: int,
        *,
        seed: int,
        device: torch.device,
        alpha: float = 1.0,
    ) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.heads = nn.ModuleList(
            _head(hidden_size, num_actions, source).to(device) for _ in range(HEADS)
        )
        # The target heads, which follow the Q heads slowly.
        self.slow = copy.deepcopy(self.heads).requires_grad_(requires_grad=False)
        self.log_alpha = nn.Parameter(torch.tensor(alpha, device=device).log())
        self.optimizer = torch.optim.AdamW(
            [*self.heads.parameters(), self.log_alpha], weight_decay=0.0
        )

    def values(self, hidden: Tensor) -> Tensor:
        """Return Q of every action by each head: float32 [heads, N, A]."""
        return torch.stack([head(hidden.float()) for head in self.heads])

    @torch.no_grad()
    def target_values(self, hidden: Tensor) -> Tensor:
        """Return the smaller Q of the target heads: float32 [N, A]."""
        return torch.stack([head(hidden.float()) for head in self.slow]).amin(0)

    def update(self, rate: float, target_rate: float) -> None:
        """Take an optimizer step, and move the target heads towards the Q heads."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.heads.parameters(), strict=True):
                slow.lerp_(fast, target_rate)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"weights": self.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])


def _head(hidden_size: int, num_actions: int, source: torch.Generator) -> nn.Sequential:
    """Return an MLP with one hidden layer, whose output is 0 at the beginning."""
    inner = nn.utils.skip_init(nn.Linear, hidden_size, hidden_size)
    outer = nn.utils.skip_init(nn.Linear, hidden_size, num_actions)
    with torch.no_grad():
        inner.weight.normal_(0.0, hidden_size**-0.5, generator=source)
        for zero in (inner.bias, outer.weight, outer.bias):
            zero.zero_()
    return nn.Sequential(inner, nn.SiLU(), outer)


# The equations, as pure functions


def log_policy(logits: Tensor, valid: Tensor) -> Tensor:
    """Return log-probs over valid actions, float [N, A]; 0 where an action is not valid.

    Args:
        logits: float [N, A], after temperature.
        valid: bool [N, A], at least one in a row.
    """
    logprobs = logits.masked_fill(~valid, -torch.inf).log_softmax(-1)
    return logprobs.masked_fill(~valid, 0.0)


def soft_values(q: Tensor, logprobs: Tensor, valid: Tensor, alpha: float | Tensor) -> Tensor:
    """Return V of every state under a policy: float [N].

    Args:
        q: float [N, A].
        logprobs: float [N, A], as `log_policy` gives them.
    """
    return (_probs(logprobs, valid) * (q - alpha * logprobs)).sum(-1)


def targets(rewards: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """Return the targets of the critic: float [N].

    Args:
        discounts: float [N]: 0 where nothing follows.
        next_values: float [N]: V of the state that follows.
    """
    return rewards + discounts * next_values


def n_step_targets(
    rewards: Tensor, discounts: Tensor, values: Tensor, bonus: Tensor, known: Tensor, steps: int
) -> Tensor:
    """Return the targets of the critic over some steps of the recorded trial: float [N].

    The rewards of the steps are the recorded ones, whatever the policy would do now (uncorrected).

    Args:
        rewards, discounts: as `targets` takes them; the state that follows is the next one.
        values: float [N]: V of each state.
        bonus: float [N]: entropy of the policy in each state, times its coefficient.
        known: bool [N]: states that have a target (action not -1). The steps end at a state without
            one, and the V of this state is used.
        steps: number of steps, at least 1; for 1 the result is that of `targets`.
    """
    # `roll` puts the first state after the last one, whose discount is 0, like that of the last
    # state of every segment.
    found = targets(rewards, discounts, values.roll(-1))
    for _ in range(steps - 1):
        ahead = torch.where(known, found + bonus, values)
        found = targets(rewards, discounts, ahead.roll(-1))
    return found


def temperature_losses(log_alpha: Tensor, logprobs: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return the losses of the entropy coefficient: float [N].

    Args:
        log_alpha: float []: log of the coefficient.
        share: target entropy, as a share of the largest that the valid actions allow.
    """
    most = valid.sum(-1).to(logprobs.dtype).log()
    excess = entropies(logprobs, valid) - share * most
    return log_alpha.exp() * excess.detach()


def critic_losses(q: Tensor, actions: Tensor, target: Tensor) -> Tensor:
    """Return half the squared errors, summed over heads: float [N].

    Args:
        q: float [heads, N, A].
        actions: int64 [N]: numbers of the sampled actions.
        target: float [N], as `targets` gives them.
    """
    taken = q.gather(-1, actions.expand(q.shape[0], -1)[..., None])[..., 0]
    return 0.5 * (taken - target).square().sum(0)


def actor_losses(q: Tensor, logprobs: Tensor, valid: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the actor's loss, `-V` with Q held fixed: float [N]."""
    return -soft_values(q.detach(), logprobs, valid, alpha)


def entropies(logprobs: Tensor, valid: Tensor) -> Tensor:
    """Return the entropy over valid actions in nats: float [N]."""
    return -(_probs(logprobs, valid) * logprobs).sum(-1)


def _probs(logprobs: Tensor, valid: Tensor) -> Tensor:
    """Return the probabilities of actions, 0 where an action is not valid: float [N, A]."""
    return logprobs.exp() * valid


# Losses of an update


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """Hold actions and rewards of the states of a row, on the learner's device."""

    actions: Tensor
    """int64 [N]; -1 where the critic has no target"""
    valid: Tensor
    """bool [N, A]"""
    rewards: Tensor
    """float32 [N]"""
    discounts: Tensor
    """float32 [N]: factor of the next state's value; 0 where a segment ends"""

    @classmethod
    def of(cls, parts: Sequence[SoftSequence], device: torch.device) -> Self:
        """Join segments, one after the other."""
        names = ("actions", "valid", "rewards", "discounts")
        arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Hold means over the states of an update, each []; the first three have gradients."""

    actor: Tensor
    critic: Tensor
    temperature: Tensor
    """Loss of the entropy coefficient; 0 where it is fixed."""
    entropy: Tensor
    """Entropy over valid actions, in nats."""
    alpha: Tensor
    """The entropy coefficient."""
    value: Tensor
    """V by the target heads."""

    def total(self) -> Tensor:
        """Return the sum to be minimised."""
        return self.actor + self.critic + self.temperature


def losses(
    inputs: HeadInputs,
    tokens: Tensor,
    critic: Critic,
    transitions: Transitions,
    settings: Settings,
) -> Losses:
    """Return the losses of all states of a row.

    Args:
        inputs: hidden states of the row's states, with the LM head.
        tokens: int64 [A], those of the environment's actions.
        transitions: actions and rewards of the states.
    """
    share, steps = settings.target_entropy, settings.target_steps
    alpha = critic.log_alpha.detach().exp()
    hidden, weights = inputs.hidden.float(), inputs.head[tokens].float()
    logits = hidden @ weights.T * inputs.inverse_temperature
    valid = transitions.valid
    logprobs = log_policy(logits, valid)
    q, target_q = critic.values(hidden), critic.target_values(hidden)
    with torch.no_grad():
        values = soft_values(target_q, logprobs, valid, alpha)
        has_target, bonus = transitions.actions >= 0, alpha * entropies(logprobs, valid)
        target = n_step_targets(
            transitions.rewards, transitions.discounts, values, bonus, has_target, steps
        )
    errors = critic_losses(q, transitions.actions.clamp(min=0), target) * has_target
    return Losses(
        actor_losses(q.amin(0), logprobs, valid, alpha).mean(),
        errors.sum() / has_target.sum().clamp(min=1),
        temperature_losses(critic.log_alpha, logprobs, valid, share).mean()
        if share
        else torch.zeros_like(alpha),
        entropies(logprobs, valid).mean().detach(),
        alpha,
        values.mean(),
    )


class SacTrainer(Trainer):
    """Train the policy and Q heads on its last hidden state, on draws from a replay buffer.

    A step adds its batch to the buffer and makes `learner.minibatches` updates, each on trials
    drawn from the whole buffer. Policy and critic train the transformer together. The losses do
    not depend on the weights that sampled a trial, so there is no correction for staleness.
    """

    def __init__(self, model: PreTrainedModel, config: Config, chat: ChatFormat) -> None:
        super().__init__(model, config)
        self._environment, self._chat = environment_of(config), chat
        tokens = list(action_tokens(self._environment, chat))
        self._tokens = torch.tensor(tokens, device=model.device)
        width = int(model.config.hidden_size)
        settings = msgspec.convert(config.methods["sac_glam"], Settings)
        self._critic = Critic(
            width,
            len(tokens),
            seed=config.seed,
            device=model.device,
            alpha=settings.entropy_coefficient,
        )
        self._buffer = ReplayBuffer()

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Add a batch to the buffer and train on draws; the version grows by one."""
        config = self.config
        settings = msgspec.convert(config.methods["sac_glam"], Settings)
        new = experiences(groups, config, self._environment, self._chat, settings.hindsight)
        self._buffer.add(new, settings.capacity)
        if not len(self._buffer):
            raise DeterministicFailure(
                "SAC-GLAM has no trial to learn from: in the first batch no turn had a choice "
                "between legal actions; look at the trials with `mage view`"
            )
        # This forward of the new batch is for metrics alone: its staleness, and the difference
        # between the engine's and the learner's log-probs.
        sequences = training_sequences(groups, config, self.model.device, version=self.version)
        batch = [self.with_proximal(each) for each in self.micro_batches(sequences)]
        set_rate(self.optimizer, learning_rate(self._learner, self.version))
        seed = f"{self.config.seed}/replay/{self.version}"
        sources = [random.Random(f"{seed}/{n}") for n in range(self._learner.minibatches)]
        draws = [self._buffer.draw(settings.batch, source) for source in sources]
        updates = [self._improve(draw, settings) for draw in draws]
        norms = torch.stack([norm for _, norm in updates])
        # There is no correction: its sums are 0.
        sums = torch.zeros(len(SUMS), device=self.model.device)
        trained = [TrainedMicroBatch(each, sums, _uncorrected(each)) for each in batch]
        ages = self._ages(draws)
        metrics = self.end_step([Update(trained, norms.mean())])
        del metrics["zero_advantage_share"]  # the trainer does not use advantages
        metrics |= {"mean_weight": 1.0, "replay_trials": float(len(self._buffer))}
        # `end_step` got the mean norm, as if there were one update; this counts all updates.
        metrics["skipped_updates"] = float((~norms.isfinite()).sum())
        return metrics | _means([each for each, _ in updates]) | ages

    def state(self) -> dict[str, Any]:
        """Return the trainer's state with the Q heads and the buffer."""
        return super().state() | {"critic": self._critic.state(), "replay": self._buffer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        super().restore(state)
        self._critic.restore(state["critic"])
        self._buffer.restore(state["replay"])

    def _improve(self, draw: Sequence[TrialCopy], settings: Settings) -> tuple[Losses, Tensor]:
        """Update policy and critic once; return the losses and the norm of the gradient.

        Args:
            draw: trials, each with its own goal or another one.
        """
        parts, device = [part for segments in draw for part in segments], self.model.device
        # A trial that was drawn twice is computed twice, and trials with equal beginnings do not
        # share them.
        tokens, places = [part.tokens for part in parts], [part.places for part in parts]
        row = TokenRow.of(tokens, device, predicted=places)
        inputs = head_inputs(self.model, row, self._temperature)
        transitions = Transitions.of(parts, device)
        self.optimizer.zero_grad(set_to_none=True)
        self._critic.zero_grad()
        found = losses(inputs, self._tokens, self._critic, transitions, settings)
        found.total().backward()
        norm = self.apply_gradient()
        if norm.isfinite():  # otherwise the policy's update was skipped
            self._critic.update(settings.critic_rate, settings.target_rate)
        return found, norm

    def _ages(self, draws: Sequence[Sequence[TrialCopy]]) -> dict[str, float]:
        """Return metrics of the age of the drawn trials, in steps."""
        parts = [part for draw in draws for segments in draw for part in segments]
        ages = [self.version - part.version for part in parts]
        return {"replay_age_mean": sum(ages) / len(ages), "replay_age_max": float(max(ages))}


def _means(found: Sequence[Losses]) -> dict[str, float]:
    """Return the means of losses over the updates of a step, by the name of the metric."""
    columns = {
        "loss": [each.total() for each in found],
        "actor_loss": [each.actor for each in found],
        "critic_loss": [each.critic for each in found],
        "entropy": [each.entropy for each in found],
        "entropy_coefficient": [each.alpha for each in found],
        "soft_value": [each.value for each in found],
    }
    return {name: float(torch.stack(own).detach().mean()) for name, own in columns.items()}


def _uncorrected(batch: MicroBatch) -> Surrogate:
    """Return the result of no correction: every token has weight 1, none is clipped or masked."""
    zeros = torch.zeros_like(batch.behaviour)
    return Surrogate(
        losses=zeros, weights=zeros + 1.0, is_clipped=zeros.bool(), is_masked=zeros.bool()
    )
