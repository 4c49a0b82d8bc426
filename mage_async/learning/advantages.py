"""Turn returns into advantages, by a class for each estimator.

The class of an estimator is also its configuration: its fields are the keys of `[advantage]`. To
add one, copy a class and give it a `tag`, which is its name.

A list of columns of the `TurnTable` says which turns are compared: turns that agree in all of these
columns form a *cell* and share a baseline. ("group",) is GRPO's; ("group", "kind", "episode",
"index") compares the same turn of trials on the same task, and reflections with reflections. "seat"
(the player whose role the policy takes), "member" (the hidden opponent or task variant) and
"component" (the environment, of a mix of several) separate different games. Before the anchor term
is added, a turn alone in its cell has an advantage of exactly 0 (except under gigpo with `baseline
= ["group"]`), and so have turns with equal returns.

The host numbers the cells; `mage_kernels` computes means, deviations and scales in float64 on the
learner's device. Shapes: `N` turns of the batch.

torch is imported inside of functions only, because processes that never need torch import this
module with the configuration.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from msgspec import field

from mage_async.config.section import NonNegative, Variant
from mage_async.credit.turn_table import Key, TurnTable, joint_cells
from mage_async.errors import ConfigError
from mage_async.trajectory import Kind
from mage_async.user_modules import as_config_error, place_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mage_async.config.schema import Transcript
    from mage_kernels import Cells

Weight = Literal["trial", "sample"]
"""How a mean counts: each trial once however many turns it has in the cell, or each turn once."""

CODED_BASELINE = ("group",)
"""Baseline of GiGPO's reference code, under which a turn alone in its cell keeps its score."""


class Advantage(Variant, tag_field="estimator"):
    """Advantages from returns: which turns a turn is compared with, and on which scale."""

    baseline: list[Key] = field(default_factory=lambda: ["group", "kind", "episode", "index"])
    """Turns that agree in all these columns form a cell, and are compared with each other; with
    gigpo, these are the cells of its first term. "component" is the environment, of a mix its part;
    "member" is the hidden opponent or task variant; "seat" is the side that the policy plays;
    "kind" tells actions from remarks; "index" is the number of the turn among those of its kind in
    its episode; "anchor" is the state in which it was taken; "memory" tells trials that begin with
    strategies of the graph memory from the others."""
    scale: list[Key] | Literal["none"] = field(default_factory=lambda: ["member"])
    """Advantages, anchor term included, are divided by their root mean square over the turns that
    agree in all these columns; [] takes the whole batch, and "none" divides by nothing. gigpo
    divides each of its terms by the standard deviation of its cell instead; token_normalised first
    subtracts the mean over the tokens of these turns, and its root mean square is over tokens."""
    value: Literal["return", "trial_score"] = "return"
    """The compared quantity. "return": the return of each turn by `credit`. "trial_score": one
    score per trial, the undiscounted sum of the amounts that `credit` pays for its turns; all turns
    of the trial then have the same advantage (GRPO, RLOO)."""
    weight: Weight = "trial"
    """Whether a mean is over trials, or over turns, so that long trials weigh more. The mean of a
    state (`anchor_weight`) is over its visits in either case."""
    anchor_weight: NonNegative = 0.0
    """Weight of the comparison with turns taken in the same state."""
    anchor: Literal["global", "local", "coded"] = "global"
    """Which turns count as taken in the same state: "global": in whichever episode the state recurs
    (MAGE), in the same seat; "local": only in episodes of the same number (MAGE's ablation);
    "coded": as "global", but both seats share a state, and all reflections of a group count as one
    state, as in the codes of MAGE and LaMer."""
    format_penalty: NonNegative = 1.0
    """Penalty of a turn without a valid action or remark, in every episode."""
    length_penalty: NonNegative = 0.0
    """Penalty of a completion as long as its limit. It grows linearly from 0 at half the limit."""
    penalise: Literal["advantage", "return", "score"] = "advantage"
    """Where penalties are subtracted: "advantage": after all normalisation; "return": from returns
    and scores, before it (with `value = "trial_score"`, those of all turns of a trial from its
    score), in both of gigpo's terms as in its authors' code; "score": from gigpo's first term
    alone, as in the codes of LaMer and MAGE."""

    has_score: ClassVar[bool] = False
    """Whether the estimator reads an episode's score in addition to the return."""
    leaves_one_out: ClassVar[bool] = False
    """Whether a turn's own trial has no part in its baseline."""
    normalises_tokens: ClassVar[bool] = False
    """Whether the mean over the tokens that share a `scale` is subtracted before the division, and
    the root mean square is one over these tokens."""

    def estimate(self, table: TurnTable, device: "torch.device | str") -> "Tensor":
        """Return the advantages of all turns, without penalties: float64 `[N]` on `device`."""
        raise NotImplementedError("write its method `estimate`")

    def checked(self, table: TurnTable, device: "torch.device | str") -> "Tensor":
        """Return the result of `estimate`, and check it if the class is a user's own.

        Raises:
            ConfigError: a user's own class raised, or returned no finite number for a turn.
        """
        if ":" not in self.kind:
            return self.estimate(table, device)

        import torch

        what, expected = f"advantage estimator {self.kind!r}", (len(table),)
        with as_config_error(what):
            # The columns of a table are NumPy arrays, so a user's class may return a NumPy array.
            values = self.estimate(table, device)
            found = torch.as_tensor(values, dtype=torch.float64, device=device)
            shape, is_finite = tuple(found.shape), bool(found.isfinite().all())
        if shape != expected or not is_finite:
            finding = "numbers that are not finite" if shape == expected else f"shape {shape}"
            raise ConfigError(
                f"{what}: `estimate`{place_of(type(self).estimate)} returned {finding} for "
                f"{len(table)} turns: return a tensor of shape {expected} of finite numbers"
            )
        return found

    def penalties(self, table: TurnTable, max_tokens: np.ndarray | int) -> np.ndarray:
        """Return each turn's penalty for an invalid action and for a long completion, summed.

        The penalty for length grows linearly from 0 at half of `max_tokens` to `length_penalty` at
        `max_tokens`, which may differ by turn (MAGE, `apply_length_penalty`).

        Returns:
            float64 `[N]`, in units of reward.
        """
        over = np.clip(2.0 * table.num_tokens / max_tokens - 1.0, 0.0, 1.0)
        return self.format_penalty * ~table.is_valid + self.length_penalty * over

    def _states(
        self, table: TurnTable, key: Sequence[Key], device: "torch.device | str"
    ) -> "Cells":
        """Number the cells of turns in the same state, by `anchor`. In their means each visit of a
        state counts once (GiGPO, eq. 6 and 7), whatever `weight` is.

        Args:
            key: columns that the turns of a cell share under a global anchor. In self-play a state
                may have the same name for both seats, whose returns are opposite: without "seat"
                their mean is 0 whatever was played.
        """
        if self.anchor == "local":
            key = (*key, "episode")
        elif self.anchor == "coded":
            key = tuple(each for each in key if each != "seat")
            # No state has the number -1, so all reflections of a group share a cell.
            merged = np.where(table.kind == Kind.REFLECT, -1, table.anchor)
            table = replace(table, anchor=merged)
        return _cells(table, key, "sample", device)

    def check(self, config: Any) -> None:
        """Refuse penalties that cannot be subtracted, and groups in which nothing is compared."""
        if self.penalise == "score" and not self.has_score:
            raise ConfigError(
                'advantage.penalise = "score" needs the estimator "gigpo", the only one with a '
                f'score in addition to the return; with {self.kind!r} write "return" or "advantage"'
            )
        for limit in ("max_action_tokens", "max_reflection_tokens"):
            if self.length_penalty and getattr(config.transcript, limit) < 2:
                raise ConfigError(
                    "advantage.length_penalty punishes completions over half their limit, and a "
                    f"limit of one token has no half: set it to 0, or raise transcript.{limit}"
                )
        is_alone = config.admission.trials_per_group == 1
        if config.learner.steps and is_alone and self.needs_other_trials():
            raise ConfigError(
                "admission.trials_per_group must be at least 2 with advantage.baseline = "
                f"{self.baseline} and the estimator {self.kind!r}, got 1: a turn is compared "
                "with turns of other trials of its group, and every advantage would be 0"
            )

    def needs_other_trials(self) -> bool:
        """Return whether only turns of other trials of the group can give a turn an advantage."""
        compares_trials = (
            self.leaves_one_out
            or self.value == "trial_score"
            or {"kind", "episode", "index"} <= set(self.baseline)
        )
        # The anchor term compares turns of one trial too, unless all of them have its score.
        has_anchor_term = self.anchor_weight and self.value == "return"
        return compares_trials and "group" in self.baseline and not has_anchor_term


class GroupMean(Advantage, tag="group_mean"):
    """The return minus the mean return of its cell (GRPO)."""

    epsilon: NonNegative = 0.05
    """Added to the root mean square of `scale`, in `epsilon_unit`."""
    epsilon_unit: Literal["return", "range"] = "return"
    """Unit of `epsilon`: one of return, or the range of the returns that share a `scale`. With
    "range" advantages are the same in whatever unit rewards are paid."""

    def estimate(self, table: TurnTable, device: "torch.device | str") -> "Tensor":
        """Subtract the baseline from returns, add the anchor term, and divide by the scale.

        The anchor term is GiGPO's step level: a turn's return against those of turns that were
        taken in the same state of the group (`anchor`). A state met once gives 0. The scale is the
        root mean square of these sums.
        """
        from mage_kernels import minus_baseline, over_rms

        returns = _on(device, table.returns)
        leaves_one_out = self.leaves_one_out
        cells = _cells(table, self.baseline, self.weight, device, has_parts=leaves_one_out)
        values = minus_baseline(returns, cells, leave_one_out=leaves_one_out)
        if self.anchor_weight:
            states = self._states(table, ("group", "seat", "anchor"), device)
            values = values + self.anchor_weight * minus_baseline(returns, states)
        if self.scale == "none":
            return values
        weight: Weight | Literal["token"] = "token" if self.normalises_tokens else self.weight
        scales = _cells(table, self.scale, weight, device)
        if self.normalises_tokens:
            values = minus_baseline(values, scales)
        if self.epsilon_unit == "range":
            unit = _ranges(returns, scales)
            values, returns = values / unit, returns / unit
        # A cell whose root mean square is no larger than the rounding error of its largest return
        # gives 0.
        return over_rms(values, scales, returns, self.epsilon)


class LeaveOneOut(GroupMean, tag="leave_one_out"):
    """The return minus the mean return of the other trials of its cell (RLOO)."""

    leaves_one_out: ClassVar[bool] = True


class TokenNormalised(GroupMean, tag="token_normalised"):
    """The return minus the mean return of its cell, normalised over tokens (REINFORCE++)."""

    # REINFORCE++ with a baseline (arXiv 2501.03262), as OpenRLHF and verl compute it: the
    # differences from the mean of the group are normalised over the sampled tokens of the batch.

    normalises_tokens: ClassVar[bool] = True


class Gigpo(Advantage, tag="gigpo"):
    """The episode's score against its group, plus the return against the same state (GiGPO)."""

    # GiGPO (arXiv 2505.10978) as LaMer and MAGE run it, with an episode's score s and return G:
    #
    #     A = (s - mean s over the episode cell) + anchor_weight (G - mean G over the state cell)
    #
    # With baseline ["group"], weight "sample", anchor_weight 1 and penalties subtracted from the
    # score, the result is that of MAGE's code to rounding (recorded in the tests): nothing is
    # compared across opponents. It repeats these habits of that code:
    #
    # - Means are over turns, so long trials weigh more, and a reflection enters the first one with
    #   score 0: in groups that do well a reflection is pushed down, whatever it says. The baseline
    #   ["group", "kind"] and weight "trial" repair both.
    # - Seats share a mean, though they are different games. "seat" in the baseline, and another
    #   anchor than "coded", keep them apart.
    # - A turn alone in its episode cell keeps its whole score; under any other baseline it gets 0.

    anchor_weight: NonNegative = 1.0
    """Weight of the comparison with turns taken in the same state, the second of GiGPO's terms."""

    has_score: ClassVar[bool] = True
    anchor_key: ClassVar[Sequence[Key]] = ("group", "member", "seat", "anchor")
    """Columns that the turns of a state cell share; LaMer has no "member"."""

    def estimate(self, table: TurnTable, device: "torch.device | str") -> "Tensor":
        """Return the sum of GiGPO's two terms, each divided by its cell's standard deviation
        (`mean_std_norm` in the codes) unless `scale` is "none".
        """
        from mage_kernels import minus_baseline

        episodes = _cells(table, self.baseline, self.weight, device)
        states = self._states(table, self.anchor_key, device)
        divides = self.scale != "none"
        scores = minus_baseline(
            _on(device, table.episode_score),
            episodes,
            keep_lone=tuple(self.baseline) == CODED_BASELINE,
            divide_by_std=divides,
        )
        returns = minus_baseline(_on(device, table.returns), states, divide_by_std=divides)
        return scores + self.anchor_weight * returns

    def check(self, config: Any) -> None:
        """Refuse a `scale` over other cells than `baseline`, and a `value` other than "return"."""
        super().check(config)
        if self.value != "return":
            raise ConfigError(
                'advantage.value must be "return" with the estimator "gigpo", whose second term '
                f'compares returns of states; got {self.value!r}: take "group_mean"'
            )
        if self.scale not in ("none", self.baseline):
            raise ConfigError(
                'advantage.scale must be "none" or equal to advantage.baseline with the estimator '
                f'"gigpo", which divides by the deviation inside each cell; got {self.scale}'
            )


def turn_advantages(
    table: TurnTable, config: Advantage, transcript: "Transcript", device: "torch.device | str"
) -> "Tensor":
    """Return the advantages of all turns, penalties included: float64 `[N]` on `device`.

    Args:
        transcript: has the limits of completions, which the penalty on length is relative to.
    """
    acts = table.kind == Kind.ACT
    limits = np.where(acts, transcript.max_action_tokens, transcript.max_reflection_tokens)
    penalties = config.penalties(table, limits)
    is_trial_score = config.value == "trial_score"
    returns = table.trial_scores() if is_trial_score else table.returns
    if config.penalise == "return":
        # A trial has one score, from which all of its penalties are subtracted.
        charged = np.bincount(table.trial, penalties)[table.trial] if is_trial_score else penalties
        returns = returns - charged
    table = replace(table, returns=returns)
    if config.penalise != "advantage":
        table = replace(table, episode_score=table.episode_score - penalties)
    values = config.checked(table, device)
    return values - _on(device, penalties) if config.penalise == "advantage" else values


def _ranges(values: "Tensor", cells: "Cells") -> "Tensor":
    """Return the range of the values in each turn's cell, or 1 where it is 0: float64 `[N]`."""
    low = values.new_full((cells.num_cells,), math.inf)
    low = low.scatter_reduce(0, cells.ids, values, "amin")
    high = values.new_full((cells.num_cells,), -math.inf)
    high = high.scatter_reduce(0, cells.ids, values, "amax")
    ranges = (high - low)[cells.ids]
    return ranges.where(ranges > 0.0, 1.0)


def _cells(
    table: TurnTable,
    key: Sequence[Key],
    weight: Weight | Literal["token"],
    device: "torch.device | str",
    *,
    has_parts: bool = False,
) -> "Cells":
    """Number the cells, whose turns agree in the columns `key`.

    Args:
        weight: how a mean counts; with "token" each turn by the number of its sampled tokens.
        has_parts: whether to number the parts of each cell too (the turns of one trial).
    """
    import torch

    from mage_kernels import Cells

    ids = table.cells(key)
    parts = joint_cells(ids, table.trial) if weight == "trial" or has_parts else None
    weights = None
    if weight == "trial" and parts is not None:
        weights = 1.0 / np.bincount(parts)[parts]
        parts = parts if has_parts else None  # a mean needs the weights only, not the parts
    elif weight == "token":
        tokens = table.num_sampled.astype(np.float64)
        # Turns without a sampled token have no loss; a cell of such turns still needs a mean.
        weights = np.where(np.bincount(ids, tokens)[ids] > 0.0, tokens, 1.0)
    return Cells(
        torch.from_numpy(ids),
        _count(ids),
        None if parts is None else torch.from_numpy(parts),
        0 if parts is None else _count(parts),
        None if weights is None else torch.from_numpy(weights),
    ).to(device)


def _count(ids: np.ndarray) -> int:
    """Count cells or parts by their numbers, which have no gaps; 0 without turns."""
    return int(ids.max(initial=-1)) + 1


def _on(device: "torch.device | str", values: np.ndarray) -> "Tensor":
    """Copy an array to a device."""
    import torch

    return torch.from_numpy(values).to(device, non_blocking=True)
