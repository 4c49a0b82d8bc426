"""Time the learner's loss, from hidden states to gradients, in two passes and in a single one.

Two passes compute log-probs first and the loss from them; the single pass computes both in one
kernel. The loss has the default correction for off-policy data and an entropy bonus. The time of
the transformer is not included. The last column is the time over that of two passes.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.kernels.heads import Case, make_data
from bench.kernels.timing import timings
from mage_async.config import config_file
from mage_async.learning.corrections import Tokens
from mage_async.learning.token_loss import CorrectedLoss, HeadInputs, corrected_loss
from mage_kernels import linear_logprob


def measure_loss(case: Case, device: str, rounds: int) -> dict[str, Any]:
    """Time two passes, the single pass, and what a run would choose; print and return figures."""
    learner = config_file.load(config_file.find(None), []).learner
    data = make_data(case, device, torch.float32 if device == "cpu" else torch.bfloat16)
    inputs = HeadInputs(data.hidden, data.head, data.tokens, 1.0)
    # Random numbers serve as advantages.
    tokens, chosen = random_tokens(inputs, data.gradients[0]), corrected_loss(learner)
    implementations = {
        "loss after log-probs": partial(
            step, replace(chosen, is_single_pass=False), inputs, tokens
        ),
        "loss in the head's pass": partial(
            step, replace(chosen, is_single_pass=True), inputs, tokens
        ),
        "loss, as a run chooses": partial(step, chosen, inputs, tokens),
    }
    times = timings(implementations, device=device, rounds=rounds)
    two_passes = times["loss after log-probs"].median_ms
    for name, timing in times.items():
        print(timing.line(name, f"{timing.median_ms / two_passes:.2f}"))
    return {name: timing.figures() for name, timing in times.items()}


def random_tokens(inputs: HeadInputs, advantages: torch.Tensor) -> Tokens:
    """Return tokens in turns of four, sampled by a policy close to the trained one."""
    with torch.no_grad():
        proximal = linear_logprob(inputs.hidden, inputs.head, inputs.targets)[0]
    behaviour = proximal + 0.1 * advantages.flip(0)
    turns = torch.arange(len(advantages), device=advantages.device) // 4
    return Tokens(
        logprobs=proximal,  # the current policy still is the proximal one, as when a step begins
        proximal=proximal,
        behaviour=behaviour,
        advantages=advantages,
        staleness=turns % 3,
        turns=turns,
        sequences=turns,
    )


def step(loss_of: CorrectedLoss, inputs: HeadInputs, tokens: Tokens) -> None:
    """Compute the loss and its gradients."""
    hidden, head = inputs.hidden.detach().requires_grad_(), inputs.head.detach().requires_grad_()
    leaves = HeadInputs(hidden, head, inputs.targets, inputs.inverse_temperature)
    rates = torch.full_like(tokens.advantages, 0.01)
    loss_of(leaves, tokens, rates, 1 / len(tokens.advantages)).loss.backward()
