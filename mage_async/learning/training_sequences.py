"""A batch of groups to the sequences that a step trains on: credit, advantages and packing."""

from collections.abc import Sequence

import torch

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.credit.discriminator import step_rewards
from mage_async.credit.exploration_bonus import bonuses
from mage_async.credit.returns import CREDITS
from mage_async.credit.turn_table import TurnTable, build_table
from mage_async.learning.advantages import turn_advantages
from mage_async.learning.packing import Sequenced, sequences
from mage_async.trajectory import Group, Trial


def training_sequences(
    groups: Sequence[Group], config: Config, device: torch.device | str
) -> list[Sequenced]:
    """The segments of all trials, with the advantages of their turns, which `device` computes."""
    trials = [trial for group in groups for trial in group.trials]
    advantages = batch_advantages(credited(groups, config), config, device)
    return sequences(trials, advantages, has_roles=config.policy.separate_exploration)


def credited(groups: Sequence[Group], config: Config) -> TurnTable:
    """All turns of a batch with their returns, as a configuration credits them."""
    return build_table(
        groups,
        CREDITS[config.credit.kind],
        turn_discount=config.credit.turn_discount,
        episode_discount=config.credit.episode_discount,
        exploration_share=config.credit.exploration_share,
        bonuses=_paid([trial for group in groups for trial in group.trials], config),
    )


def _paid(trials: Sequence[Trial], config: Config) -> list[list[float]] | None:
    """What turns are paid beside their rewards; None: nothing."""
    weight, expert = config.credit.information_bonus, config.expert
    parts = []
    if weight:
        parts.append(bonuses(trials, environment_of(config), weight))
    if expert and expert.form == "irl":
        parts.append(step_rewards(trials, expert))
    if len(parts) < 2:
        return parts[0] if parts else None
    return [
        [sum(pair) for pair in zip(*of_trial, strict=True)] for of_trial in zip(*parts, strict=True)
    ]


def batch_advantages(table: TurnTable, config: Config, device: torch.device | str) -> torch.Tensor:
    """What a step multiplies the tokens of each turn with: float32 `[N]`, computed by `device`.

    The table has to be that of the whole batch: scales are pooled over more than a group.
    """
    values = turn_advantages(
        table,
        config.advantage,
        max_action_tokens=config.transcript.max_action_tokens,
        max_reflection_tokens=config.transcript.max_reflection_tokens,
        device=device,
    )
    return values.float()
