"""What holds of every correction, whatever the tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_async.config.schema import AnyCorrection
from mage_async.config.tables import kinds
from mage_async.learning.corrections import Tokens

KINDS = kinds(AnyCorrection)
logprobs = st.floats(-8.0, -0.0078125, width=32)
advantages = st.sampled_from([-2.0, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0])
each_correction = pytest.mark.parametrize("name", KINDS)


def made_by(name, tokens):
    """The configured correction on these tokens, and its gradient on their log-probs."""
    made = KINDS[name]().surrogate(tokens)
    (gradient,) = torch.autograd.grad(made.losses.sum(), tokens.logprobs)
    return made, gradient


@st.composite
def drawn(draw):
    """Up to 12 tokens of up to 4 turns, of three unrelated policies."""
    size = draw(st.integers(1, 12))

    def floats(values):
        return torch.tensor(draw(st.lists(values, min_size=size, max_size=size)))

    steps = draw(st.lists(st.integers(0, 1), min_size=size - 1, max_size=size - 1))
    turns = torch.tensor([0, *steps]).cumsum(0)
    stale = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    current = floats(logprobs).requires_grad_()
    return Tokens(
        current,
        floats(logprobs),
        floats(logprobs),
        floats(advantages),
        torch.tensor(stale, dtype=torch.int32),
        turns,
        turns,
    )


@each_correction
@given(tokens=drawn())
@settings(max_examples=30, deadline=None)
def test_at_equal_policies_it_is_the_plain_policy_gradient(name, tokens):
    same = tokens.logprobs.detach()
    fresh = torch.zeros_like(tokens.staleness)
    made, gradient = made_by(name, replace(tokens, proximal=same, behaviour=same, staleness=fresh))
    torch.testing.assert_close(gradient, -tokens.advantages)
    assert not made.is_masked.any()
    assert not made.is_clipped.any()


@each_correction
@given(tokens=drawn())
@settings(max_examples=30, deadline=None)
def test_a_masked_token_has_no_loss_no_weight_and_no_gradient(name, tokens):
    made, gradient = made_by(name, tokens)
    for values in (made.losses, made.weights, gradient):
        assert (values[made.is_masked] == 0).all()
        assert values.isfinite().all()


@each_correction
@given(tokens=drawn())
@settings(max_examples=30, deadline=None)
def test_a_token_without_advantage_has_no_gradient(name, tokens):
    _, gradient = made_by(name, replace(tokens, advantages=torch.zeros_like(tokens.advantages)))
    assert (gradient == 0).all()


@each_correction
@given(tokens=drawn())
@settings(max_examples=30, deadline=None)
def test_it_never_pushes_against_the_advantage(name, tokens):
    _, gradient = made_by(name, tokens)
    assert (gradient * tokens.advantages <= 0).all()


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"m2po"}))  # it looks at all tokens
@given(tokens=drawn())
@settings(max_examples=30, deadline=None)
def test_a_turn_is_corrected_by_itself(name, tokens):
    _, together = made_by(name, tokens)
    chosen = tokens.turns == tokens.turns.max()
    last = Tokens(
        tokens.logprobs.detach()[chosen].requires_grad_(),
        tokens.proximal[chosen],
        tokens.behaviour[chosen],
        tokens.advantages[chosen],
        tokens.staleness[chosen],
        *[torch.zeros(int(chosen.sum()), dtype=torch.int64)] * 2,
    )
    _, alone = made_by(name, last)
    torch.testing.assert_close(together[chosen], alone)
