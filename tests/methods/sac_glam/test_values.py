"""The equations on a problem of three states, against the enumeration of its trajectories."""

from itertools import product

import pytest
import torch

from mage_async.learning.token_loss import HeadInputs
from mage_async.methods.sac_glam.method import Settings
from mage_async.methods.sac_glam.trainer import (
    Critic,
    Transitions,
    actor_losses,
    critic_losses,
    entropies,
    log_policy,
    losses,
    soft_values,
    targets,
)

ALPHA, LEFT, RIGHT, OFF = 0.5, 0, 1, 2
NEXT = {(0, LEFT): 1, (0, RIGHT): 2, (1, LEFT): 2, (1, RIGHT): None, (2, LEFT): None}
"""Where an action leads from each state; None ends the episode. State 2 has one action, and `OFF`
is valid nowhere."""
REWARD = {(0, LEFT): 0.3, (0, RIGHT): -0.2, (1, LEFT): 0.1, (1, RIGHT): 1.0, (2, LEFT): 0.7}
VALID = torch.tensor([[True, True, False], [True, True, False], [True, False, False]])


def returns_from(state):
    """The return of every trajectory from a state, each enumerated as a sequence of actions."""
    found = {}
    for actions in product((LEFT, RIGHT), repeat=3):
        here, total, taken = state, 0.0, []
        for action in actions:
            if here is None or (here, action) not in NEXT:
                break
            total, here, taken = (
                total + REWARD[here, action],
                NEXT[here, action],
                [*taken, action],
            )
        if here is None:
            found[tuple(taken)] = total
    return list(found.values())


def enumerated():
    """Soft-optimal values without a discount: `alpha log sum exp(return / alpha)` over all
    trajectories, the closed form where transitions are deterministic."""
    returns = [torch.tensor(returns_from(state), dtype=torch.float64) for state in range(3)]
    return torch.stack([ALPHA * (each / ALPHA).logsumexp(0) for each in returns])


def after(values, missing=0.0):
    """Rewards, discounts and next values of every pair of state and action: three [3, 3]."""
    rewards, discounts, following = (torch.zeros(3, 3, dtype=values.dtype) for _ in range(3))
    for (state, action), to in NEXT.items():
        rewards[state, action] = REWARD[state, action]
        discounts[state, action] = 0.0 if to is None else 1.0
        following[state, action] = missing if to is None else values[to]
    return rewards, discounts, following


def test_soft_iteration_gives_the_enumerated_values():
    q = torch.zeros(3, 3, dtype=torch.float64)
    for _ in range(4):
        values = soft_values(q, log_policy(q / ALPHA, VALID), VALID, ALPHA)
        q = targets(*after(values, missing=99.0))
    values = soft_values(q, log_policy(q / ALPHA, VALID), VALID, ALPHA)
    assert torch.allclose(values, enumerated(), atol=1e-9)
    assert len(returns_from(0)) == 3


def test_the_learners_own_losses_lead_to_the_enumerated_values():
    """Gradient steps by the code of an update, on transitions of every state and action, each state
    standing for itself: the heads, their targets and the policy all come to the soft optimum."""
    torch.manual_seed(0)
    states = torch.eye(3)
    pairs = list(NEXT)
    rows = [row for state, action in pairs for row in ((state, action), (NEXT[state, action], -1))]
    rows = [(state or 0, action) for state, action in rows]
    transitions = Transitions(
        actions=torch.tensor([action for _, action in rows]),
        valid=VALID[torch.tensor([state for state, _ in rows])],
        rewards=torch.tensor([REWARD.get(row, 0.0) for row in rows]),
        discounts=torch.tensor([1.0 if NEXT.get(row) is not None else 0.0 for row in rows]),
    )
    policy = torch.zeros(4, 3, requires_grad=True)  # of 4 tokens the last is no action
    critic = Critic(3, 3, seed=0, device=torch.device("cpu"), alpha=ALPHA)
    actor = torch.optim.Adam([policy], lr=0.05)
    hidden = states[torch.tensor([state for state, _ in rows])]
    first = torch.zeros(len(rows), dtype=torch.int64)
    for step in range(600):
        inputs = HeadInputs(hidden, policy, first, 1.0)
        found = losses(inputs, torch.arange(3), critic, transitions, Settings())
        rate = 0.05 * 0.992**step
        actor.param_groups[0]["lr"] = rate
        actor.zero_grad()
        critic.zero_grad()
        found.total().backward()
        actor.step()
        critic.update(rate, 0.2)
    logprobs = log_policy((states @ policy.T)[:, :3].detach(), VALID)
    values = soft_values(critic.target_values(states), logprobs, VALID, ALPHA)
    assert torch.allclose(values.double(), enumerated(), atol=1e-3)


def test_an_action_that_is_not_valid_has_no_part_in_anything():
    logits = torch.tensor([[0.0, 0.0, 50.0]])
    valid = torch.tensor([[True, True, False]])
    logprobs = log_policy(logits, valid)
    assert logprobs[0].tolist() == pytest.approx([-0.6931472, -0.6931472, 0.0])
    q = torch.tensor([[1.0, 3.0, 1e9]])
    assert soft_values(q, logprobs, valid, 0.1).item() == pytest.approx(2.0 + 0.1 * 0.6931472)
    assert entropies(logprobs, valid).item() == pytest.approx(0.6931472)


def test_the_policy_is_pulled_to_the_softmax_of_the_values_over_alpha():
    q, valid = torch.tensor([[0.2, 0.9]]), torch.ones(1, 2, dtype=torch.bool)
    logits = (q / ALPHA).clone().requires_grad_()
    actor_losses(q, log_policy(logits, valid), valid, ALPHA).sum().backward()
    assert logits.grad.abs().max() < 1e-7


def test_both_heads_are_trained_on_the_action_that_was_taken():
    q = torch.tensor([[[1.0, 5.0]], [[3.0, 5.0]]])
    assert critic_losses(q, torch.tensor([0]), torch.tensor([2.0])).item() == pytest.approx(1.0)
