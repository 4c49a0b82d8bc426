"""Group advantage: ours beside the loops that verl and MAGE run, and beside vectorised torch.

Both loops are written afresh from reading them: what they do per row, and nothing else. verl's
(GRPO) gathers one scalar tensor per row into a dict, then subtracts and divides row by row. MAGE's
(GiGPO) first looks up the rows of every trial for its returns, then compares row by row twice, for
the trial and for the step, and expands both to tokens. Both give `[B, L]`, padded, of which a loss
reads what the mask admits. Ours gives what the learner trains on: a number per turn, computed where
its model lies, and written at the tokens that the mask admits, one row after the other. Keys are
numbered each time. Beside it a bare fill of as much memory that is there already, a bound that no
code which writes the tokens can beat.

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
DISCOUNT = 0.95


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch as verl holds it: one row per trial, or for MAGE one per turn, padded to `L`."""

    tasks: list[str]
    """The task of each row: rows of equal task are compared."""
    trials: list[str] | None
    """None where every row is a trial of its own, which needs no look-up."""
    anchors: list[str]
    """The state each row was played in."""
    rewards: Tensor
    """`[B]`"""
    token_rewards: Tensor
    """`[B, L]`: a row's reward at its last token"""
    mask: Tensor
    """bool `[B, L]`"""
    lengths: Tensor
    """Tokens of each row `[B]`, on the host: the packing code knows them."""


def make_rows(num_rows: int, num_tokens: int, device: str, *, turns: int) -> Rows:
    """Rows of a half to the whole of `num_tokens`, `turns` to a trial, GROUP trials to a task."""
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
    """GRPO as verl computes it: `[B, L]`."""
    compared = by_row(rows.token_rewards.sum(-1), rows.tasks, divide_by_std=True)
    return compared.unsqueeze(-1) * rows.mask


def mage_loop(rows: Rows) -> Tensor:
    """GiGPO as MAGE computes it: trial level plus step level, `[B, L]`."""
    returns = returns_by_lookup(rows)
    trial_level = by_row(rows.token_rewards.sum(-1), rows.tasks, divide_by_std=False)
    step_level = by_row(returns, rows.anchors, divide_by_std=False)
    num_tokens = rows.mask.shape[1]
    wide = (
        level.unsqueeze(-1).tile(1, num_tokens) * rows.mask for level in (trial_level, step_level)
    )
    return next(wide) + next(wide)


def by_row(scores: Tensor, keys: Sequence[Hashable], *, divide_by_std: bool) -> Tensor:
    """The comparison, a row at a time."""
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
    """Discounted returns, for which all rows are searched once per trial and once per row."""
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
    """GRPO by sums over keys, keys given as integers."""
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
    """The same keys, numbered on the host, as the learner numbers its own."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    ids = torch.tensor(list(map(numbers.__getitem__, keys)), dtype=torch.int64)
    return Cells(ids, len(numbers)).to(rows.mask.device)


def measure_groups(num_rows: int, num_tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """Ours against verl's loop (one turn a trial) and against MAGE's (several)."""
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
    """Ours: fp32 `[B]`."""
    return minus_baseline(rows.rewards.double(), cells, divide_by_std=True).float()


def gigpo(rows: Rows) -> Tensor:
    """Ours, with the returns of each trial from one pass over its turns: fp32 `[B]`."""
    trial_level = minus_baseline(rows.rewards.double(), cells_of(rows, rows.tasks))
    returns = torch.tensor(to_go(rows.rewards.tolist()), dtype=torch.float64)
    anchors = cells_of(rows, rows.anchors)
    return (trial_level + minus_baseline(returns.to(rows.mask.device), anchors)).float()


def to_go(rewards: list[float]) -> list[float]:
    """Discounted returns of trials of TURNS turns."""
    returns = list(rewards)
    for row in reversed(range(len(rewards) - 1)):
        if (row + 1) % TURNS:
            returns[row] += DISCOUNT * returns[row + 1]
    return returns


def check(loop: Tensor, ours: Tensor) -> None:
    """Nothing is timed that computes something else."""
    torch.testing.assert_close(ours.view_as(loop), loop, rtol=1e-4, atol=1e-5)
