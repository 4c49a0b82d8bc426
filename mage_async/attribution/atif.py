"""An attributed trial as a trajectory in ATIF v1.8, the format of Harbor's trajectories.

Source: `harbor.models.trajectories` of Harbor 0.25 (RFC 0001). What ATIF has no word for, such as
returns and versions, stands in its `extra`.
"""

from collections.abc import Sequence
from typing import Any

from mage_async.attribution.turns import AttributedTrial, AttributedTurn

VERSION = "ATIF-v1.8"


def name_of(found: AttributedTrial) -> str:
    """A trial's name, which no other trial of a run has."""
    return f"group-{found.grant}-trial-{found.trial.index}"


def trajectory_of(found: AttributedTrial, run: str, version: str) -> dict[str, Any]:
    """A trajectory: the prompt of each context is a step of the user, each completion a step of the
    agent, and what the environment answered its observation.

    The log-probs are those of the policy that drew the tokens, in nats, after temperature. The
    prompt's token ids are whole in every step, so a trajectory grows with the square of its turns.

    Args:
        run: the name of the run, which all its trajectories share.
        version: of this program.
    """
    task, trial = found.trial.task, found.trial
    return {
        "schema_version": VERSION,
        "session_id": run,
        "trajectory_id": name_of(found),
        "agent": {"name": "mage_async", "version": version, "model_name": run},
        "steps": _steps(found),
        "final_metrics": {
            "total_prompt_tokens": trial.num_prompt_tokens,
            "total_completion_tokens": trial.num_sampled(),
            "total_cached_tokens": trial.num_reused_tokens,
            "extra": {"reward_by_episode": trial.episode_rewards()},
        },
        "extra": {
            "grant": found.grant,
            "trial": trial.index,
            "step": found.step,
            "granted_at": found.granted_at,
            "environment": task.environment,
            "member": task.member,
            "seat": task.seat,
            "seed": task.seed,
        },
    }


def _steps(found: AttributedTrial) -> list[dict[str, Any]]:
    """Steps, numbered from 1. The prompt of a context that goes on is told in the observation."""
    steps: list[dict[str, Any]] = []
    endings = [*_answers(found.turns), found.ending]
    for number, (each, answer) in enumerate(zip(found.turns, endings, strict=True)):
        if _begins_context(found.turns, number):
            steps.append({"source": "user", "message": each.told})
        steps.append(_agent_step(found, each, answer))
    return [{"step_id": number} | step for number, step in enumerate(steps, 1)]


def _answers(turns: Sequence[AttributedTurn]) -> list[str]:
    """What the environment told after each completion but the last; "" at the end of a context."""
    return [
        "" if _begins_context(turns, number) else turns[number].told
        for number in range(1, len(turns))
    ]


def _begins_context(turns: Sequence[AttributedTurn], number: int) -> bool:
    return number == 0 or turns[number].turn.segment != turns[number - 1].turn.segment


def _agent_step(found: AttributedTrial, each: AttributedTurn, answer: str) -> dict[str, Any]:
    turn = each.turn
    context = found.trial.segments[turn.segment].tokens
    return {
        "source": "agent",
        "message": each.said,
        "observation": {
            "results": [{"content": answer, "extra": {"reward": turn.reward, "info": turn.info}}]
        },
        "metrics": {
            "prompt_tokens": turn.start,
            "completion_tokens": len(each.tokens),
            "cached_tokens": turn.num_reused,
            "prompt_token_ids": context[: turn.start].tolist(),
            "completion_token_ids": each.tokens.tolist(),
            "logprobs": each.logprobs.tolist(),
            "extra": {"versions": each.versions.tolist()},
        },
        "extra": {
            "kind": turn.kind.name.lower(),
            "episode": turn.episode,
            "action": turn.action,
            "is_valid": turn.is_valid,
            "return": each.return_to_go,
            "advantage": each.advantage,
        },
    }
