"""Clone the behaviour of trials or of a data set, until the model uses the earlier episodes of its
context.

Two choices were made by measurements. Tokens that the chat template forces get a small weight,
because otherwise they dominate the mean loss. RL begins only when the loss on the observations of
the last episode has fallen below that of the first one (the gate): only then has the model learned
to use earlier episodes.
"""

import json
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from mage_async.assembly import environment_of, trial_config_of
from mage_async.config.schema import Config, FromBest, FromWinStay, WarmStart, data_files
from mage_async.errors import ConfigError, DeterministicFailure
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler, play_trials
from mage_async.learning.forward import hidden_states
from mage_async.learning.optimizer import set_rate, step_if_finite
from mage_async.learning.packing import TokenRow, split_minibatch
from mage_async.trajectory import Kind, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import begin_trial
from mage_async.trials.scripted import random_task
from mage_async.trials.win_stay import Rule, repeated_wins

GATE_EVERY = 25
"""Number of steps over which the gate's losses are averaged."""
MOST_SKIPPED = 25
"""Number of skipped steps in a row after which a warm start has failed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Describe the state of a warm start, as shown to people."""

    step: int
    steps: int
    """Total to show beside `step`: the steps of the schedule; if the gate is still shut after
    these, the number of steps after which that is an error.
    """
    loss: float
    gate: float
    """Ratio that is compared with `warm_start.gate`: the loss on observations of the last episode
    over that of the first; with win-stay, lose-shift, the loss on repeated actions over that on
    actions that are only tried. NaN before it is known."""
    num_skipped: int = 0
    """Number of steps so far whose gradient was not finite, and which changed nothing."""


TEMPLATE_WEIGHT = 0.1
"""Weight in the loss of tokens that the transcript forces, for a model with random weights, which
has to learn the form of a trial. For a pretrained model, which has read chats, the weight is 0.
"""

WIN_STAY_TEMPLATE_WEIGHT = 0.02
"""`TEMPLATE_WEIGHT` for trials of win-stay, lose-shift. It is smaller, because only few tokens of
such a trial have weight 1."""
TRIED_WEIGHT = 0.05
"""Weight of an action that win-stay, lose-shift only tries. No context predicts it, so that its
loss is noise beside that of repeated actions. With this weight a tiny model learns in 100 steps to
repeat what paid; with a weight of 1 it takes 300.
"""
OBSERVED_WEIGHT = 0.3
"""Weight of observed words in trials of win-stay, lose-shift."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Hold a token sequence to clone, and how much each of its tokens counts."""

    tokens: np.ndarray
    """int64 [T]"""
    weights: np.ndarray
    """float32 [T]: weight of the loss of predicting each token"""
    episodes: np.ndarray
    """int64 [T]: episode that an observed word belongs to; -1 for other tokens. In trials of
    win-stay, lose-shift: 1 for a repeated action, 0 for one that was only tried, -1 for others."""


def warm_start(
    model: PreTrainedModel,
    examples: Sequence[Example],
    warm: WarmStart,
    seed: int,
    report: Callable[[Progress], None],
    *,
    max_tokens: int = 0,
    shares_opening: bool = False,
) -> Progress:
    """Clone examples, in place; continue past `warm.steps` until the gate opens.

    With win-stay, lose-shift the learning rate is constant until the gate opens, or for
    `warm.max_steps`, and falls in the `warm.steps` after that.

    Args:
        max_tokens: Tokens that go through the model together, at most; the gradient of a step is
            that of all its examples. 0 is no limit.
        shares_opening: Whether to compute the common prefix of such examples only once.

    Raises:
        DeterministicFailure: the gate is still shut after `warm.max_steps`, or the gradients of
            `MOST_SKIPPED` steps in a row, or of all steps, are not finite.
    """
    source = np.random.default_rng(seed)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=warm.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    sums = np.zeros((2, 1 + max(0, *(int(each.episodes.max()) for each in examples))))
    progress = Progress(0, warm.steps, math.nan, math.nan)
    step = num_skipped = in_a_row = 0
    is_win_stay = isinstance(warm, FromWinStay)
    # Whether a shut gate is an error. A gate of 1.0 is none: the warm start ends after its steps.
    has_to_open = warm.gate < 1.0 and not is_win_stay
    # The step from which on the learning rate falls.
    falls_at: float = math.inf if is_win_stay else 0
    while step < falls_at + warm.steps or (has_to_open and progress.gate > warm.gate):
        if has_to_open and step >= max(warm.max_steps, warm.steps):
            raise DeterministicFailure(_gate_is_shut(progress, warm))
        chosen = source.integers(len(examples), size=warm.batch_size)
        set_rate(optimizer, _learning_rate(warm, step, falls_at))
        parts = split_minibatch(
            [examples[i] for i in chosen], max_tokens, shares_opening=shares_opening
        )
        loss, is_skipped = _step(
            model, optimizer, trained, parts, sums, shares_opening=shares_opening
        )
        step += 1
        num_skipped += is_skipped
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
            sums[:] = 0
        if falls_at == math.inf and (gate <= warm.gate or step >= warm.max_steps):
            falls_at = step
        if is_win_stay:
            shown_steps = int(min(falls_at, warm.max_steps)) + warm.steps
        else:
            shown_steps = warm.steps if step <= warm.steps else max(warm.max_steps, warm.steps)
        progress = Progress(step, shown_steps, loss, gate, num_skipped)
        report(progress)
    return progress


def _gate_is_shut(progress: Progress, warm: WarmStart) -> str:
    """Return the error message for a gate that is still shut."""
    return (
        f"the warm start has not learned to look back: after {progress.step} steps the loss on "
        f"the last episode's observations is {progress.gate:.2f} of the first one's, above "
        f"warm_start.gate = {warm.gate}; raise warm_start.steps = {warm.steps}, beyond which it "
        "learns at a tenth of the rate, or set the gate to 1.0"
    )


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
    _, first, again = np.unique(targets, return_index=True, return_inverse=True)
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
    every_loss = losses[torch.from_numpy(again).to(device)]
    return every_loss, torch.from_numpy(weights).to(device), torch.from_numpy(episodes).to(device)


def examples_of(
    trials: Sequence[Trial], words: Collection[int], template_weight: float
) -> list[Example]:
    """Return the contexts of trials, in which observed words and sampled tokens have weight 1.

    Args:
        words: Ids of the environment's words that are one token.
        template_weight: Weight of all other tokens, which the transcript forces.
    """
    return [
        _example(trial, number, words, template_weight)
        for trial in trials
        for number in range(len(trial.segments))
    ]


def _example(trial: Trial, number: int, words: Collection[int], template_weight: float) -> Example:
    """Make an example of one segment. Observations after a turn belong to the turn's episode."""
    segment = trial.segments[number]
    is_word = np.isin(segment.tokens, list(words))
    is_learned = is_word | segment.is_sampled
    weights = np.where(is_learned, 1.0, template_weight).astype(np.float32)
    episodes = np.full(len(segment.tokens), -1)
    turns = [turn for turn in trial.turns if turn.segment == number]
    stops = [*(turn.start for turn in turns[1:]), len(segment.tokens)]
    for turn, stop in zip(turns, stops, strict=True):
        episodes[turn.stop : stop] = turn.episode
    episodes[~is_word] = -1
    return Example(segment.tokens.astype(np.int64), weights, episodes)


def win_stay_examples(
    trials: Sequence[Trial], rule: Rule, words: Collection[int], template_weight: float
) -> list[Example]:
    """Return the contexts of trials that were played by a rule of win-stay, lose-shift.

    Args:
        words: Ids of the environment's words that are one token.
        template_weight: Weight of tokens that the transcript forces.
    """
    found = list[Example]()
    for trial in trials:
        examples, wins = examples_of([trial], words, template_weight), repeated_wins(trial, rule)
        for example in examples:
            example.weights[example.episodes >= 0] = OBSERVED_WEIGHT
            example.episodes[:] = -1
        for number, turn in enumerate(trial.turns):
            if turn.kind is not Kind.ACT:
                continue
            sampled = np.flatnonzero(trial.segments[turn.segment].is_sampled[: turn.stop])
            sampled = sampled[sampled >= turn.start]
            # 1 for a repeated win, 0 for another action: the gate compares the losses of both.
            examples[turn.segment].episodes[sampled] = number in wins
            if number not in wins:
                examples[turn.segment].weights[sampled] = TRIED_WEIGHT
        found += examples
    return found


def read_examples(path: str, chat: ChatFormat, max_tokens: int) -> list[Example]:
    """Read the rows of a data set as examples, each of at most `max_tokens` tokens.

    Raises:
        ConfigError: the data set has no rows; a row has neither `messages` nor `text`, or a message
            without a role or text, or nothing that the assistant says; a file is no JSON lines or
            no Parquet; or pyarrow, which reads Parquet, is not installed.
    """
    found = [
        _example_of_row(row, where, chat, max_tokens)
        for file in data_files(path)
        for where, row in _rows(file)
    ]
    if not found:
        raise ConfigError(f"warm_start.path = {path!r}: the data set has no rows")
    return found


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place, as an error names it."""
    if file.suffix == ".jsonl":
        with file.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield f"{file}, line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{file}, line {number}: not JSON: {error}") from None
        return
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError(
            f"{file}: Parquet needs pyarrow: pip install 'mage_async[export]', or give JSON lines"
        ) from None
    try:
        rows = parquet.read_table(file).to_pylist()
    except ArrowInvalid as error:
        raise ConfigError(f"{file}: not Parquet: {error}") from None
    for number, row in enumerate(rows, 1):
        yield f"{file}, row {number}", row


def _example_of_row(row: Any, where: str, chat: ChatFormat, max_tokens: int) -> Example:
    """Return a row of a data set as an example; `where` names the row in errors."""
    is_table = isinstance(row, dict)
    tokens: Sequence[int]
    if is_table and isinstance(row.get("messages"), list):
        if not all(map(_is_message, row["messages"])):
            raise ConfigError(
                f"{where}: a message must be a table with `role` and `content`, both text"
            )
        tokens, is_own = chat.conversation(row["messages"])
    elif is_table and isinstance(row.get("text"), str):
        tokens = chat.encode(row["text"])
        is_own = [True] * len(tokens)
    else:
        raise ConfigError(
            f"{where}: a row must have `messages`, a list of tables with `role` and `content`, or "
            "`text`"
        )
    if not any(is_own[1:max_tokens]):
        raise ConfigError(f"{where}: the assistant says nothing in the first {max_tokens} tokens")
    kept = np.array(tokens[:max_tokens], np.int64)
    weights = np.array(is_own[:max_tokens], np.float32)
    return Example(kept, weights, np.full(len(kept), -1))


def _is_message(value: Any) -> bool:
    """Return whether a value is a table with `role` and `content`, both text."""
    is_table = isinstance(value, dict)
    return is_table and all(isinstance(value.get(key), str) for key in ("role", "content"))


def best_trials(config: Config, warm: FromBest, directory: Path, chat: ChatFormat) -> list[Trial]:
    """Let a model play training tasks, and return the trials with the best last episodes.

    Of two trials whose last episodes are equally good, the one with the higher total reward is
    better.

    Raises:
        CallFault: a call of the environment failed, or is a coroutine that has to wait, for which
            there is no event loop here.
    """
    environment = environment_of(config)
    trial_config = trial_config_of(config, environment, chat, warm.episodes)
    source = random.Random(f"{config.seed}/own play")
    runs = [
        begin_trial(
            environment,
            random_task(environment, "train", source),
            0,  # index in its group, of which it is the only trial
            trial_config,
            chat,
            name=str(number),
        )
        for number in range(warm.trials)
    ]
    slots, max_tokens = config.engine.max_contexts, config.engine.max_tokens
    model = Model.load(directory, slots=slots, max_tokens=max_tokens)
    trials = play_trials(runs, Scheduler(model))
    trials.sort(key=lambda trial: (trial.episode_rewards()[-1], sum(trial.episode_rewards())))
    return trials[-max(1, round(warm.kept * len(trials))) :]
