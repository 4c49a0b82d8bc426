"""One update's trials in one row, and the losses of policy and critic on them.

Shapes: `N` actions of the row, `A` actions of the environment, `D` hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from mage_async.learning.forward import ModelInputs, Row
from mage_async.learning.layout import Layout
from mage_async.learning.soft_actor_critic.critic import Critic
from mage_async.learning.soft_actor_critic.experience import SoftSequence
from mage_async.learning.soft_actor_critic.values import (
    actor_losses,
    critic_losses,
    entropies,
    log_policy,
    soft_values,
    targets,
)
from mage_async.learning.token_loss import HeadInputs
from mage_kernels import linear_logprob


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """What was done in the states of a row, on the learner's device."""

    actions: Tensor
    """int64 [N]; -1 where the critic has nothing to learn"""
    valid: Tensor
    """bool [N, A]"""
    rewards: Tensor
    """float32 [N]"""
    discounts: Tensor
    """float32 [N]: of the next row's value; 0 where a segment ends"""

    @classmethod
    def of(cls, parts: Sequence[SoftSequence], device: torch.device) -> Self:
        """One segment after the other."""
        names = ("actions", "valid", "rewards", "discounts")
        arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Means over the states of an update, each []; the first three have gradients."""

    actor: Tensor
    critic: Tensor
    outside: Tensor
    """`-log` of how probable the valid actions are together among all tokens, in nats."""
    entropy: Tensor
    """Over valid actions, in nats."""
    value: Tensor
    """V by the target heads."""

    def total(self) -> Tensor:
        """What is minimised."""
        return self.actor + self.critic + self.outside


def model_inputs(parts: Sequence[SoftSequence], first: int, device: torch.device) -> ModelInputs:
    """The row, the places of its states, and `first`, a token whose log-prob is asked for in each.

    Trials that are drawn twice, or begin alike, are not joined.
    """
    layout = Layout.of([part.tokens for part in parts], shares_opening=False)
    where = [layout.where(number, part.places - 1) for number, part in enumerate(parts)]
    sources = torch.from_numpy(np.concatenate(where)).to(device)
    return ModelInputs(Row.of(layout, device), sources, torch.full_like(sources, first))


def losses(
    inputs: HeadInputs, tokens: Tensor, critic: Critic, given: Transitions, alpha: float
) -> Losses:
    """The losses of all states of a row.

    Args:
        inputs: states, whose targets are all the first of `tokens`.
        tokens: int64 [A], the environment's actions.
    """
    hidden, weights = inputs.hidden.float(), inputs.head[tokens].float()
    logits = hidden @ weights.T * inputs.inverse_temperature
    logprobs = log_policy(logits, given.valid)
    q, slow = critic.values(hidden), critic.target_values(hidden)
    with torch.no_grad():
        values = soft_values(slow, logprobs, given.valid, alpha)
        wanted = targets(given.rewards, given.discounts, values.roll(-1))
    known = given.actions >= 0
    errors = critic_losses(q, given.actions.clamp(min=0), wanted) * known
    return Losses(
        actor_losses(q.amin(0), logprobs, given.valid, alpha).mean(),
        errors.sum() / known.sum().clamp(min=1),
        _outside(inputs, logits, given.valid).mean(),
        entropies(logprobs, given.valid).mean().detach(),
        values.mean(),
    )


def _outside(inputs: HeadInputs, logits: Tensor, valid: Tensor) -> Tensor:
    """`-log P(a valid action)` among all tokens of the vocabulary: float [N].

    The sum over the vocabulary is read off one token's logit and log-prob.
    """
    first, _ = linear_logprob(
        inputs.hidden, inputs.head, inputs.targets, inputs.inverse_temperature
    )
    among_all = logits[:, 0] - first
    return among_all - logits.masked_fill(~valid, -torch.inf).logsumexp(-1)
