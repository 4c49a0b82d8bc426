"""A minibatch cut into passes, so that the memory of a step does not grow with the minibatch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mage_async.errors import RunError
from mage_async.learning.corrections.surrogate import Tokens
from mage_async.learning.forward import ModelInputs
from mage_async.learning.layout import alike
from mage_async.learning.packing import Packed, Sequenced


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What the weights at the beginning of a step say of the tokens of a pass: all float32 [N]."""

    proximal: torch.Tensor
    """Log-probs in nats."""
    explores: torch.Tensor
    """1 for tokens that get the entropy bonus, 0 for others."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Sequences that go through the model at once, a minibatch or a piece of one, with the
    advantages of their `N` sampled tokens and log-probs under other policies.
    """

    packed: Packed
    inputs: ModelInputs
    advantages: torch.Tensor
    """float32 [N]"""
    behaviour: torch.Tensor
    """float32 [N]: log-probs in nats under the policy that drew them"""
    staleness: torch.Tensor
    """int32 [N]: steps"""
    turns: torch.Tensor
    """int64 [N]"""
    reference: torch.Tensor | None
    """float32 [N]: log-probs in nats under the frozen policy, where there is a KL term"""
    beginning: Start | None = None
    """None until a forward of the step's first weights is made."""

    @property
    def start(self) -> Start:
        """What is known since that forward."""
        assert self.beginning is not None
        return self.beginning

    def tokens(self) -> Tokens:
        """What the correction is given, at the beginning of the step."""
        return Tokens(
            self.start.proximal,
            self.start.proximal,
            self.behaviour,
            self.advantages,
            self.staleness,
            self.turns,
        )


def cut(
    sequences: Sequence[Sequenced], tokens_per_pass: int, *, shares_opening: bool = False
) -> list[list[Sequenced]]:
    """Whole sequences, in their order, in passes of at most `tokens_per_pass` tokens; 0 is one.

    Args:
        shares_opening: what the sequences of a pass begin with is counted once.

    Raises:
        RunError: a sequence alone has more tokens.
    """
    if not tokens_per_pass:
        return [list(sequences)]
    passes: list[list[Sequenced]] = []
    opening = own = 0
    for sequence in sequences:
        length = len(sequence.tokens)
        if length > tokens_per_pass:
            raise RunError(
                f"a segment of {length} tokens does not fit into learner.tokens_per_pass = "
                f"{tokens_per_pass}: set it to at least engine.max_tokens"
            )
        shared = _shared(passes[-1], opening, sequence) if passes and shares_opening else 0
        count = len(passes[-1]) if passes else 0
        if not passes or own + length - count * shared > tokens_per_pass:
            passes.append([])
            opening, own = length, 0
        else:
            opening = shared
        passes[-1].append(sequence)
        own += length
    return passes


def _shared(sequences: Sequence[Sequenced], opening: int, other: Sequenced) -> int:
    """What is left of an opening that one more sequence shares."""
    return min(opening, alike(sequences[0].tokens, other.tokens))
