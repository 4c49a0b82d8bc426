"""A trial as a person reads it."""

from typing import Any

from mage_async.trajectory import Trial
from mage_async.trials.chat_format import ChatFormat


def trial_as_dict(trial: Trial, chat: ChatFormat, version: int) -> dict[str, Any]:
    """Plain data: the task, each episode's reward, each turn, and the text of every context."""
    experts = {step.turn: step.action for step in trial.expert_steps}
    return {
        "version": version,
        "environment": trial.task.environment,
        "member": trial.task.member,
        "seat": trial.task.seat,
        "seed": trial.task.seed,
        "reward_by_episode": trial.episode_rewards(),
        **({} if trial.memory is None else {"memory": trial.memory}),
        **({} if trial.cut_at is None else {"cut_at": trial.cut_at}),
        "turns": [
            {
                "episode": turn.episode,
                "kind": turn.kind.name.lower(),
                "action": turn.action,
                "reward": turn.reward,
                "is_valid": turn.is_valid,
                "info": turn.info,
            }
            | ({"expert": experts[number]} if number in experts else {})
            for number, turn in enumerate(trial.turns)
        ],
        "contexts": [chat.decode(segment.tokens.tolist()) for segment in trial.segments],
    }
