"""An attributed trial as a trajectory in ATIF v1.8, the trajectory format of Harbor.

Source: `harbor.models.trajectories` of Harbor 0.25 (RFC 0001). Values that ATIF has no field for,
such as returns and policy versions, are in its `extra`.
"""

from collections.abc import Sequence
from typing import Any

from mage_async.attribution.turns import AttributedTrial, AttributedTurn

VERSION = "ATIF-v1.8"


def trajectory_name(attributed: AttributedTrial) -> str:
    """Return the name of a trial, unique in its run."""
    return f"group-{attributed.grant}-trial-{attributed.trial.index}"


def trajectory_of(attributed: AttributedTrial, run: str, version: str) -> dict[str, Any]:
    """Return the trajectory of a trial.

    The prompt of each segment is a step of the user; each completion is a step of the agent, with
    the environment's answer as its observation. Log-probs are those of the behaviour policy, in
    nats, after temperature. Every step holds all token ids of its prompt, so the size of a
    trajectory grows with the square of its number of turns.

    Args:
        run: Name of the run, the same for all its trajectories.
        version: Version of this program.
    """
    task, trial = attributed.trial.task, attributed.trial
    return {
        "schema_version": VERSION,
        "session_id": run,
        "trajectory_id": trajectory_name(attributed),
        "agent": {"name": "mage_async", "version": version, "model_name": run},
        "steps": _steps(attributed),
        "final_metrics": {
            "total_prompt_tokens": trial.num_prompt_tokens,
            "total_completion_tokens": trial.num_sampled(),
            "total_cached_tokens": trial.num_reused_tokens,
            "extra": {"reward_by_episode": trial.episode_rewards()},
        },
        "extra": {
            "grant": attributed.grant,
            "trial": trial.index,
            "step": attributed.step,
            "granted_at": attributed.granted_at,
            "environment": task.environment,
            "member": task.member,
            "seat": task.seat,
            "seed": task.seed,
        },
    }


def _steps(attributed: AttributedTrial) -> list[dict[str, Any]]:
    """Return the steps, numbered from 1; within a segment, prompts are observations."""
    steps: list[dict[str, Any]] = []
    endings = [*_answers(attributed.turns), attributed.ending]
    for number, (each, answer) in enumerate(zip(attributed.turns, endings, strict=True)):
        if _begins_segment(attributed.turns, number):
            steps.append({"source": "user", "message": each.text.observation})
        steps.append(_agent_step(attributed, each, answer))
    return [{"step_id": number} | step for number, step in enumerate(steps, 1)]


def _answers(turns: Sequence[AttributedTurn]) -> list[str]:
    """Return the text after each completion but the last; "" at the end of a segment."""
    return [
        "" if _begins_segment(turns, number) else turns[number].text.observation
        for number in range(1, len(turns))
    ]


def _begins_segment(turns: Sequence[AttributedTurn], number: int) -> bool:
    return number == 0 or turns[number].turn.segment != turns[number - 1].turn.segment


def _agent_step(attributed: AttributedTrial, values: AttributedTurn, answer: str) -> dict[str, Any]:
    turn = values.turn
    segment_tokens = attributed.trial.segments[turn.segment].tokens
    return {
        "source": "agent",
        "message": values.text.completion,
        "observation": {
            "results": [{"content": answer, "extra": {"reward": turn.reward, "info": turn.info}}]
        },
        "metrics": {
            "prompt_tokens": turn.start,
            "completion_tokens": len(values.tokens),
            "cached_tokens": turn.num_reused,
            "prompt_token_ids": segment_tokens[: turn.start].tolist(),
            "completion_token_ids": values.tokens.tolist(),
            "logprobs": values.logprobs.tolist(),
            "extra": {"versions": values.versions.tolist()},
        },
        "extra": {
            "kind": turn.kind.name.lower(),
            "episode": turn.episode,
            "action": turn.action,
            "is_valid": turn.is_valid,
            "return": values.return_to_go,
            "advantage": values.advantage,
        },
    }
