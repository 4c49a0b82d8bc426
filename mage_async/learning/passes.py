"""A minibatch cut into passes, so that the memory of a step does not grow with the minibatch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mage_async.errors import RunError
from mage_async.learning.corrections.surrogate import Tokens
from mage_async.learning.expert_pairs import ExpertPairs
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
    reference: torch.Tensor | None = None
    """float32 [N]: log-probs in nats under the frozen policy, where there is a KL term"""
    pairs: ExpertPairs | None = None
    """Where experts parted from the policy, with a preference loss on it."""
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
    """Whole sequences in passes of at most `tokens_per_pass` tokens; 0 is one pass.

    Args:
        shares_opening: what the sequences of a pass begin with is counted once. Then sequences that
            begin alike come together, and one that would cost a pass more than its own tokens
            begins the next; otherwise they keep their order.

    Raises:
        RunError: a sequence alone has more tokens.
    """
    if not tokens_per_pass:
        return [list(sequences)]
    if shares_opening:
        sequences = sorted(sequences, key=lambda sequence: sequence.tokens.tolist())
    passes: list[_Open] = []
    for sequence in sequences:
        _check(sequence, tokens_per_pass)
        wider = passes[-1].with_one_more(sequence, shares_opening) if passes else None
        if wider and wider.size <= min(tokens_per_pass, passes[-1].size + len(sequence.tokens)):
            passes[-1] = wider
        else:
            passes.append(_Open([sequence], len(sequence.tokens), len(sequence.tokens)))
    return [each.sequences for each in passes]


@dataclass(frozen=True, slots=True)
class _Open:
    """A pass that may have room."""

    sequences: list[Sequenced]
    num_tokens: int
    """Of all sequences."""
    opening: int
    """How many tokens the sequences begin with alike."""

    @property
    def size(self) -> int:
        """Tokens that go through the model."""
        return self.num_tokens - (len(self.sequences) - 1) * self.opening

    def with_one_more(self, sequence: Sequenced, shares_opening: bool) -> "_Open":
        first = self.sequences[0].tokens
        opening = min(self.opening, alike(first, sequence.tokens)) if shares_opening else 0
        length = len(sequence.tokens)
        return _Open([*self.sequences, sequence], self.num_tokens + length, opening)


def _check(sequence: Sequenced, tokens_per_pass: int) -> None:
    length = len(sequence.tokens)
    if length > tokens_per_pass:
        raise RunError(
            f"a segment of {length} tokens does not fit into learner.tokens_per_pass = "
            f"{tokens_per_pass}: set it to at least engine.max_tokens"
        )
