"""Clone the behaviour of trials or of a data set, until the model uses the earlier episodes of its
context.

`demonstrations.py` makes the examples. Two choices were made by measurements. Tokens that the chat
template forces get a small weight, because otherwise they dominate the mean loss. RL begins only
when the loss on the observations of the last episode has fallen below that of the first one (the
gate), as it does in a model that uses earlier episodes. The ratio of the two losses falls in any
model if the observations of the last episode are easier to predict by themselves;
`demonstrations.py` notes in the run if that is so.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from mage_async.config.schema import AnyWarmStart, Config, FromWinStay, GatedWarmStart, WarmStart
from mage_async.errors import DeterministicFailure
from mage_async.learning.forward import hidden_states
from mage_async.learning.optimizer import set_decays, set_rate, step_if_finite
from mage_async.learning.packing import TokenRow, split_minibatch
from mage_async.policy.demonstrations import Example, frequency_ratio

BETA2, WEIGHT_DECAY = 0.95, 0.01
"""AdamW's decays of the second moment and of the weights."""
GATE_EVERY = 25
"""Number of steps over which the gate's losses are averaged."""
LEAST_FALL = 0.05
"""Share by which the loss, or the ratio of the gate, has to fall for a warm start to have taught
something. Losses of the tiny model fell by 60 % or more. A ratio without a trend varied by 3 %."""
MOST_SKIPPED = 25
"""Number of skipped steps in a row after which a warm start has failed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Describe the state of a warm start, as shown to people."""

    step: int
    steps: int
    """Number of steps until the end, as far as it is known: the steps of the schedule or, once
    these are exceeded because the gate is shut, the largest number of steps.
    """
    loss: float
    gate: float
    """Ratio that is compared with `warm_start.gate`: the loss on observations of the last episode
    over that of the first. With win-stay, lose-shift it is compared with `warm_start.repeat_gate`:
    the loss on repeated actions over that on actions that are only tried. NaN before it is known,
    and where there is one episode.
    """
    num_skipped: int = 0
    """Number of steps so far whose gradient was not finite, and which changed nothing."""
    fault: str = ""
    """At the end: the reason if the model has learned nothing, as a clause; else ""."""
    cure: str = ""
    """What to do about the fault, as a sentence."""


def warm_start(
    model: PreTrainedModel,
    examples: Sequence[Example],
    config: Config,
    report: Callable[[Progress], None],
) -> Progress:
    """Clone examples, in place; continue past `warm.steps` until the gate opens.

    With win-stay, lose-shift the learning rate is constant until the gate opens, or for
    `warm.max_stable_steps`, and falls in the `warm.steps` after that.

    Raises:
        DeterministicFailure: the gradients of `MOST_SKIPPED` steps in a row, or of all steps, are
            not finite.
    """
    warm, learner = config.warm_start, config.learner
    assert warm is not None, "the run has a warm start"
    source = np.random.default_rng(config.seed)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=warm.learning_rate)
    set_decays(optimizer, BETA2, WEIGHT_DECAY)
    sums = np.zeros((2, 1 + max(0, *(int(each.episodes.max()) for each in examples))))
    progress = Progress(0, warm.steps, math.nan, math.nan)
    losses, gates = list[float](), list[float]()
    step = num_skipped = in_a_row = 0
    first = [each for each in examples if not each.is_further]
    # `falls_at`: the step at which the learning rate begins to fall.
    # `waits`: whether cloning goes on at the lowest rate as long as the gate is shut.
    falls_at: float
    if isinstance(warm, FromWinStay):
        bound, max_steps = warm.repeat_gate, warm.max_stable_steps
        falls_at, waits = math.inf, False
    else:
        bound, max_steps = warm.gate, max(warm.max_steps, warm.steps)
        # With `warm.gate` = 1.0 the warm start ends after its steps, whatever the ratio.
        falls_at, waits = 0, warm.gate < 1.0
    while step < falls_at + warm.steps or (waits and step < max_steps and progress.gate > bound):
        cloned = first if falls_at == math.inf else examples
        chosen = source.integers(len(cloned), size=warm.batch_size)
        set_rate(optimizer, _learning_rate(warm, step, falls_at))
        # The gradient depends on neither of these two keys of the learner.
        shares = learner.shared_opening
        parts = split_minibatch(
            [cloned[i] for i in chosen], learner.max_tokens_per_microbatch, shares_opening=shares
        )
        loss, is_skipped = _step(model, optimizer, trained, parts, sums, shares_opening=shares)
        step += 1
        num_skipped += is_skipped
        if not is_skipped:
            losses.append(loss)
        in_a_row = in_a_row + 1 if is_skipped else 0
        if is_skipped and in_a_row >= min(MOST_SKIPPED, warm.steps):
            raise DeterministicFailure(
                f"the gradients of {in_a_row} steps of the warm start in a row are infinite or NaN "
                f"(the loss of step {step} is {loss}): lower warm_start.learning_rate, or look for "
                "weights of the model that are not finite"
            )
        gate = progress.gate
        if step % GATE_EVERY == 0 or step == warm.steps:
            gate = _gate(sums)
            gates.append(gate)
            sums[:] = 0
        if falls_at == math.inf and (gate <= bound or step >= max_steps):
            falls_at = step
        if isinstance(warm, FromWinStay):
            shown_steps = int(min(falls_at, max_steps)) + warm.steps
        else:
            shown_steps = warm.steps if step <= warm.steps else max_steps
        # With a single episode, as in rows of a data set, there is nothing to compare.
        shown_gate = gate if sums.shape[1] > 1 else math.nan
        progress = Progress(step, shown_steps, loss, shown_gate, num_skipped)
        report(progress)
    # If contexts have no earlier episodes, the ratio cannot fall, which is no fault.
    known_gates = [] if config.trial.memory == "none" else gates
    fault, cure = _fault(warm, losses, known_gates, frequency_ratio(examples))
    return replace(progress, fault=fault, cure=cure)


def _fault(
    warm: AnyWarmStart,
    losses: Sequence[float],
    gates: Sequence[float],
    by_frequency: float = math.inf,
) -> tuple[str, str]:
    """Return the reason why a warm start may have taught nothing, and a remedy. Both are empty if
    it has taught something, or is too short to tell.

    Args:
        losses: The loss of each step that was not skipped.
        gates: The ratios of the gate that were measured, in order.
        by_frequency: That of a model that knows only the frequencies of words.
    """
    rate = f"warm_start.learning_rate = {warm.learning_rate:g}"
    # Largest ratio of the last loss to the first one at which something was learned.
    bound = 1 - LEAST_FALL
    is_long = len(losses) >= 2 * GATE_EVERY
    if is_long:
        first = statistics.fmean(losses[:GATE_EVERY])
        last = statistics.fmean(losses[-GATE_EVERY:])
        has_risen = last * bound > first
        cure = (
            f"Lower {rate}."
            if has_risen
            else f"Raise {rate} or warm_start.steps = {warm.steps}; if the model played as "
            'well before, set warm_start to "none".'
        )
        if last > bound * first:
            return (
                f"the loss of its last {GATE_EVERY} steps is {last:.3f}, and that of its first was "
                f"{first:.3f}",
                cure,
            )
    # A `gate` of 1.0 is no gate.
    if isinstance(warm, GatedWarmStart) and gates and gates[-1] > warm.gate and warm.gate < 1.0:
        longer = f"Raise warm_start.steps = {warm.steps}"
        return (
            f"the loss on the last episode's observations is {gates[-1]:.2f} of the first one's, "
            f"above warm_start.gate = {warm.gate}, so the model may not look earlier episodes up",
            f"{longer}: the frequencies of words alone lead to a ratio of {by_frequency:.2f}."
            if by_frequency <= warm.gate
            else f"{longer}; where most observations are drawn anew in each episode, no model "
            "comes below the gate: then set it to 1.0.",
        )
    if not isinstance(warm, FromWinStay) or not is_long or not gates:
        return "", ""
    if gates[-1] > max(warm.repeat_gate, bound * gates[0]):
        return (
            f"the loss on repeated actions is still {gates[-1]:.2f} of that on tried ones (first "
            f"{gates[0]:.2f}), above warm_start.repeat_gate = {warm.repeat_gate}, so it has not "
            "learned to repeat what paid",
            f"Raise {rate}, warm_start.max_stable_steps = {warm.max_stable_steps} or "
            f"warm_start.trials = {warm.trials}.",
        )
    return "", ""


def _gate(sums: np.ndarray) -> float:
    """Return the mean loss of the last episode over that of the first; 0 if there is one episode.

    Args:
        sums: Sums of losses and numbers of tokens by episode, [2, episodes].
    """
    means = sums[0] / np.maximum(sums[1], 1)
    return float(means[-1] / means[0]) if len(means) > 1 and means[0] > 0 else 0.0


def _learning_rate(warm: WarmStart, step: int, falls_at: float) -> float:
    """Return the learning rate: it rises linearly over 20 steps, stays until the step `falls_at`,
    falls by a cosine to a tenth over `warm.steps` steps, and stays there.
    """
    done = min(1.0, max(0.0, step - falls_at) / max(1, warm.steps))
    cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * done))
    return warm.learning_rate * min(1.0, (step + 1) / 20) * cosine


def _step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    trained: Sequence[torch.Tensor],
    parts: Sequence[Sequence[Example]],
    sums: np.ndarray,
    *,
    shares_opening: bool,
) -> tuple[float, bool]:
    """Update the model on one batch; return the loss, and whether the update was skipped because
    its gradient is not finite.

    Args:
        trained: Weights that the optimizer changes.
        parts: Examples of the batch; those of a part go through the model together.
        sums: Sums of losses and numbers of observed tokens by episode, [2, episodes], to which this
            batch is added unless it was skipped.
    """
    weights = [example.weights[1:] for part in parts for example in part]
    total = torch.from_numpy(np.concatenate(weights)).sum()
    optimizer.zero_grad(set_to_none=True)
    loss, observed = 0.0, np.zeros_like(sums)
    for part in parts:
        losses, part_weights, episodes = _losses(model, part, shares_opening=shares_opening)
        part_loss = (losses * part_weights).sum() / total
        part_loss.backward()
        loss += float(part_loss.detach())
        is_observed = episodes >= 0
        at = episodes[is_observed].cpu().numpy()
        np.add.at(observed[0], at, losses.detach()[is_observed].cpu().numpy())
        np.add.at(observed[1], at, 1)
    # The gradient is clipped to a norm of 1.
    if not step_if_finite(optimizer, trained, 1.0).isfinite():
        return loss, True
    sums += observed
    return loss, False


def _losses(
    model: PreTrainedModel, examples: Sequence[Example], *, shares_opening: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cross-entropy, weight and episode of each token whose weight is above 0: three tensors
    [N] on the model's device, for N such tokens of all examples together.
    """
    device = model.device
    tokens = [example.tokens for example in examples]
    row = TokenRow.of(tokens, device, shares_opening=shares_opening)
    learned = [np.flatnonzero(example.weights[1:]) + 1 for example in examples]
    targets = np.concatenate([row.index_of(i, places) for i, places in enumerate(learned)])
    sources = np.concatenate([row.index_of(i, places - 1) for i, places in enumerate(learned)])
    # Examples that share their opening share its places: each place is predicted once, and its loss
    # is copied to all of them.
    _, first, copies = np.unique(targets, return_index=True, return_inverse=True)
    hidden = hidden_states(model, row)[torch.from_numpy(sources[first]).to(device)]
    head = model.get_output_embeddings().weight
    # The product may be of 16 bits, in which a softmax over the vocabulary would be too coarse.
    logits = hidden.to(head.dtype) @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    predicted = row.tokens[0, torch.from_numpy(targets[first]).to(device)]
    losses = functional.cross_entropy(logits, predicted, reduction="none")
    pairs = list(zip(examples, learned, strict=True))
    weights = np.concatenate([example.weights[places] for example, places in pairs])
    episodes = np.concatenate([example.episodes[places] for example, places in pairs])
    every_loss = losses[torch.from_numpy(copies).to(device)]
    return every_loss, torch.from_numpy(weights).to(device), torch.from_numpy(episodes).to(device)
