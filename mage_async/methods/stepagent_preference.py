"""Prefer an expert's action to the policy's at every turn: the implicit reward of StepAgent.

DPO (Rafailov et al. 2023, arXiv 2305.18290) reads a policy as a reward: r(s, a) = beta log(p(a|s) /
ref(a|s)), where the reference policy `ref` is the one at the beginning of training, or of a cycle
of training (`Settings.cycle`). StepAgent (arXiv 2411.03817) trains the policy so that in each state
the expert's action e has a larger reward than the policy's own action a:

    loss = -log sigmoid(r(s, e) - r(s, a))

Here the two actions are compared at the first token in which they differ. Both log-probs then
belong to one softmax, whose normaliser cancels:

    gap = log p(e|s) - log p(a|s) = hidden . (head[e] - head[a]) / temperature

so a pair needs two rows of the LM head, and no forward pass of its own. Where every action is one
token, this compares whole actions.

Shapes: `N` sampled tokens, `D` hidden.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch.nn import functional

from mage_async.learning.packing import MicroBatch
from mage_async.learning.token_loss import HeadInputs
from mage_async.methods.stepagent import Settings
from mage_async.trajectory import Kind

_ROWS = 1024
"""Number of tokens whose logits over the whole vocabulary are in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPairs:
    """Pair the expert's token with the sampled token, for sampled tokens of a micro-batch."""

    experts: torch.Tensor
    """int64 [N]: the expert's token; the sampled token where there is no pair."""
    weights: torch.Tensor
    """float32 [N]: where there is a pair, the number of sampled tokens of its turn, so that a pair
    counts as much as an advantage of 1 on every token of the turn; elsewhere 0."""
    reference: torch.Tensor
    """float32 [N]: gaps in nats under the reference policy."""

    @classmethod
    def of(cls, experts: np.ndarray, turn_lengths: np.ndarray, reference: HeadInputs) -> Self:
        """Make the pairs of a micro-batch.

        Args:
            experts: int64 [N]: the expert's token; -1 where there is no pair.
            turn_lengths: int64 [turns]: sampled tokens of each turn; they sum to N.
            reference: forward of the reference policy over the micro-batch.
        """
        device = reference.hidden.device
        is_pair = experts >= 0
        weights = torch.from_numpy(is_pair * np.repeat(turn_lengths, turn_lengths)).float()
        known = torch.from_numpy(experts).to(device)
        tokens = torch.where(torch.from_numpy(is_pair).to(device), known, reference.targets)
        return cls(tokens, weights.to(device), gaps(reference, tokens))

    def loss(self, inputs: HeadInputs, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the pairs' losses, each times the tokens of its turn; and float32 [3]
        without a gradient: the number of pairs, the sum of their losses, and the number of pairs
        that prefer the expert's token by more than the reference does.
        """
        margins = beta * (gaps(inputs, self.experts) - self.reference)
        losses, is_pair = -functional.logsigmoid(margins), self.weights > 0
        numbers = (is_pair, is_pair * losses, is_pair & (margins > 0))
        counted = torch.stack([each.sum().detach().float() for each in numbers])
        return (self.weights * losses).sum(), counted


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Compute a preference for the expert's tokens over the sampled ones, a `LossTerm`."""

    settings: Settings
    needs_reference = True

    @property
    def reference_cycle(self) -> int:
        """Steps of a cycle, at whose end the policy becomes the reference; 0: the reference never
        changes.
        """
        return self.settings.cycle

    def prepare(
        self, batch: MicroBatch, reference: HeadInputs | None, frozen: HeadInputs | None
    ) -> ExpertPairs:
        """Return the pairs of a micro-batch.

        Args:
            reference: forward of the reference policy.
            frozen: forward of the expert, if the expert is a policy; None: `batch.alternatives` has
                the expert's tokens.
        """
        assert reference is not None
        experts = batch.alternatives
        if frozen is not None:
            experts = likeliest(frozen, batch.sampled.kinds, batch.turn_lengths)
        return ExpertPairs.of(experts, batch.turn_lengths, reference)

    def loss(
        self, prepared: ExpertPairs, inputs: HeadInputs, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted preference loss, and the counts of `ExpertPairs.loss`.

        Args:
            scale: factor of every token's loss: 1 / (mean number of sampled tokens of the step's
                minibatches).
        """
        loss, counted = prepared.loss(inputs, self.settings.beta)
        return self.settings.weight * scale * loss, counted

    def metrics(self, counted: np.ndarray) -> dict[str, float]:
        """Return the mean loss of pairs, and the share that prefers the expert's token."""
        num_pairs, losses, preferred = counted
        if not num_pairs:
            return {}
        return {
            "expert_loss": float(losses / num_pairs),
            "expert_preferred_share": float(preferred / num_pairs),
        }


@torch.no_grad()
def likeliest(inputs: HeadInputs, kinds: np.ndarray, turn_lengths: np.ndarray) -> np.ndarray:
    """Return expert tokens: int64 [N]. In each action, at the first sampled token that is not the
    expert policy's most likely one, this is the expert's; -1 at all other tokens.

    If the sampled token was drawn from a set of allowed tokens, the expert's token is the most
    likely one of this set.

    Args:
        inputs: the expert's forward over the policy's own tokens.
        kinds: int32 [N]: `Kind` of each token's turn.
        turn_lengths: int64 [turns]: sampled tokens of each turn; they sum to N.
    """
    rows = inputs.hidden.split(_ROWS)
    best = torch.cat([(each @ inputs.head.T).argmax(-1) for each in rows])
    if (sets := inputs.restricted) is not None:
        logits = inputs.hidden[sets.index] @ inputs.head[sets.columns].T
        allowed = logits.masked_fill(~sets.mask, -torch.inf).argmax(-1)
        best[sets.index] = sets.columns[allowed]
    tokens = best.cpu().numpy()
    targets = inputs.targets.cpu().numpy()
    differs = np.flatnonzero((tokens != targets) & (kinds == Kind.ACT))
    turns = np.repeat(np.arange(len(turn_lengths)), turn_lengths)
    _, first = np.unique(turns[differs], return_index=True)
    experts = np.full(len(tokens), -1, np.int64)
    experts[differs[first]] = tokens[differs[first]]
    return experts


def gaps(inputs: HeadInputs, experts: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of expert tokens minus that of sampled tokens, in nats: float32 [N]."""
    other, own = (functional.embedding(each, inputs.head) for each in (experts, inputs.targets))
    differences = (inputs.hidden.float() * (other.float() - own.float())).sum(-1)
    return differences * inputs.inverse_temperature
