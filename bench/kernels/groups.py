"""Time group-normalised advantages: ours, the loops of verl and MAGE, and vectorised torch.

Both loops are reimplementations of what the other projects do for each row. verl's (GRPO) gathers a
scalar tensor from each row into a dict, then subtracts and divides row by row. MAGE's (GiGPO) first
looks up the rows of every trial for its returns, then compares row by row twice, for the trial and
for the step, and expands both to tokens. Both return a padded `[B, L]`. Ours returns what the
learner trains on: a number for each turn, on the model's device, and then written at the unmasked
tokens, one row after the other; each call numbers the keys of the groups again. "a bare fill"
writes as many values into existing memory, which no code that writes tokens can beat.

Shapes: `B` rows, `L` tokens of the longest row.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.kernels.timing import timings
from mage_kernels import Cells, at_tokens, minus_baseline

GROUP, TURNS = 8, 12
"""Trials of a group, and turns of a trial where it has several."""
DISCOUNT = 0.95
"""Discount between turns in the returns of GiGPO."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Hold a batch as verl does: one row for each trial, or for MAGE one for each turn, padded to
    `L`."""

    tasks: list[str]
    """Task of each row; rows with the same task are compared."""
    trials: list[str] | None
    """Trial of each row; None if every row is a trial of its own."""
    anchors: list[str]
    """State of the environment in which each row was played."""
    rewards: Tensor
    """`[B]`"""
    token_rewards: Tensor
    """`[B, L]`: a row's reward, at its last token."""
    mask: Tensor
    """bool `[B, L]`"""
    lengths: Tensor
    """`[B]` on the CPU, where the packing code knows them: tokens of each row."""


def make_rows(num_rows: int, num_tokens: int, device: str, *, turns: int) -> Rows:
    """Make rows of random lengths from half of `num_tokens` up: `turns` in a trial, GROUP trials in
    a task."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(num_tokens // 2, num_tokens + 1, (num_rows,), generator=generator)
    mask = torch.arange(num_tokens)[None] < lengths[:, None]
    rewards = torch.randint(2, (num_rows,), generator=generator).float()
    token_rewards = torch.zeros(num_rows, num_tokens)
    token_rewards[torch.arange(num_rows), lengths - 1] = rewards
    rows = range(num_rows)
    return Rows(
        [f"task {row // (turns * GROUP)}" for row in rows],
        [f"trial {row // turns}" for row in rows] if turns > 1 else None,
        [f"task {row // (turns * GROUP)}, state {row % turns}" for row in rows],
        rewards.to(device),
        token_rewards.to(device),
        mask.to(device),
        lengths,
    )


def verl_loop(rows: Rows) -> Tensor:
    """Compute GRPO's advantages as verl does: `[B, L]`."""
    compared = by_row(rows.token_rewards.sum(-1), rows.tasks, divide_by_std=True)
    return compared.unsqueeze(-1) * rows.mask


def mage_loop(rows: Rows) -> Tensor:
    """Compute GiGPO's advantages as MAGE does, at trial level plus at step level: `[B, L]`."""
    returns = returns_by_lookup(rows)
    trial_level = by_row(rows.token_rewards.sum(-1), rows.tasks, divide_by_std=False)
    step_level = by_row(returns, rows.anchors, divide_by_std=False)
    num_tokens = rows.mask.shape[1]
    wide = (
        level.unsqueeze(-1).tile(1, num_tokens) * rows.mask for level in (trial_level, step_level)
    )
    return next(wide) + next(wide)


def by_row(scores: Tensor, keys: Sequence[Hashable], *, divide_by_std: bool) -> Tensor:
    """Subtract the mean of each row's group, one row at a time."""
    members = defaultdict(list)
    for row in range(len(keys)):
        members[keys[row]].append(scores[row])
    mean = {key: torch.stack(values).mean() for key, values in members.items()}
    std = {key: torch.stack(values).std() for key, values in members.items()}
    for row in range(len(keys)):
        scores[row] = scores[row] - mean[keys[row]]
        if divide_by_std:
            scores[row] = scores[row] / (std[keys[row]] + 1e-6)
    return scores


def returns_by_lookup(rows: Rows) -> Tensor:
    """Compute discounted returns by searching all rows for each trial and for each row."""
    trials = cells_of(rows, rows.trials).ids.cpu()
    rewards, returns, of_trial = rows.rewards.tolist(), torch.zeros(len(trials)), {}
    for trial in range(int(trials.max()) + 1):
        running, found = 0.0, []
        for row in reversed((trials == trial).nonzero().squeeze(1).tolist()):
            running = rewards[row] + DISCOUNT * running
            found.insert(0, running)
        of_trial[trial] = found
    for row, trial in enumerate(trials.tolist()):
        place = int((trials[: row + 1] == trial).sum()) - 1
        returns[row] = of_trial[trial][place]
    return returns.to(rows.rewards.device)


def vectorised(rows: Rows) -> Callable[[], Tensor]:
    """Return a function that computes GRPO by vectorised sums; groups are numbered in advance."""
    keys = cells_of(rows, rows.tasks).ids
    count = torch.bincount(keys).float()

    def way() -> Tensor:
        scores, zeros = rows.token_rewards.sum(-1), torch.zeros_like(count)
        mean = zeros.index_add(0, keys, scores) / count
        wrong = scores - mean[keys]
        std = (zeros.index_add(0, keys, wrong.square()) / (count - 1).clamp(min=1)).sqrt()
        return (wrong / (std + 1e-6)[keys]).unsqueeze(-1) * rows.mask

    return way


def cells_of(rows: Rows, keys: Sequence[Hashable]) -> Cells:
    """Number the keys of rows on the CPU, as the learner does."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    ids = torch.tensor(list(map(numbers.__getitem__, keys)), dtype=torch.int64)
    return Cells(ids, len(numbers)).to(rows.mask.device)


def measure_groups(num_rows: int, num_tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """Compare ours with verl's loop (one turn in a trial) and with MAGE's (several)."""
    print(f"group advantage, {num_rows} rows x {num_tokens} tokens")
    single = make_rows(num_rows, num_tokens, device, turns=1)
    several = make_rows(num_rows, num_tokens, device, turns=TURNS)
    lengths = single.lengths
    tokens = torch.empty(int(lengths.sum()), device=device)
    by_task = cells_of(single, single.tasks)
    ways = {
        "verl's loop": lambda: verl_loop(single),
        "vectorised torch": vectorised(single),
        "ours, GRPO": lambda: at_tokens(grpo(single, cells_of(single, single.tasks)), lengths),
        "ours, GRPO, cells at hand": lambda: at_tokens(grpo(single, by_task), lengths),
        "ours, GRPO, turns": lambda: grpo(single, cells_of(single, single.tasks)),
        "MAGE's loop": lambda: mage_loop(several),
        "ours, GiGPO": lambda: at_tokens(gigpo(several), lengths),
        "ours, GiGPO, turns": lambda: gigpo(several),
        "a bare fill": lambda: tokens.fill_(1.0),
    }
    check(verl_loop(single)[single.mask], ways["ours, GRPO"]())
    check(mage_loop(several)[several.mask], ways["ours, GiGPO"]())
    found = timings(ways, device=device, rounds=rounds, warm_up=1)
    for name, timing in found.items():
        loop = found["MAGE's loop" if "GiGPO" in name or "MAGE" in name else "verl's loop"]
        print(timing.line(name, f"{loop.median_ms / timing.median_ms:.1f} x"))
    return {name: timing.figures() for name, timing in found.items()}


def grpo(rows: Rows, cells: Cells) -> Tensor:
    """Compute GRPO's advantages by our kernel: fp32 `[B]`."""
    return minus_baseline(rows.rewards.double(), cells, divide_by_std=True).float()


def gigpo(rows: Rows) -> Tensor:
    """Compute GiGPO's advantages by our kernel, and returns in one pass: fp32 `[B]`."""
    trial_level = minus_baseline(rows.rewards.double(), cells_of(rows, rows.tasks))
    returns = torch.tensor(to_go(rows.rewards.tolist()), dtype=torch.float64)
    anchors = cells_of(rows, rows.anchors)
    return (trial_level + minus_baseline(returns.to(rows.mask.device), anchors)).float()


def to_go(rewards: list[float]) -> list[float]:
    """Return the discounted returns of trials with TURNS turns."""
    returns = list(rewards)
    for row in reversed(range(len(rewards) - 1)):
        if (row + 1) % TURNS:
            returns[row] += DISCOUNT * returns[row + 1]
    return returns


def check(loop: Tensor, ours: Tensor) -> None:
    """Check that our results equal the loop's before they are timed."""
    torch.testing.assert_close(ours.view_as(loop), loop, rtol=1e-4, atol=1e-5)
