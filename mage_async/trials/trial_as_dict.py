"""Write a trial for people: the observation and completion of each turn as text, and plain data."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mage_async.trajectory import Trial
from mage_async.trials.chat_format import ChatFormat

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text that keeps special tokens: `ChatFormat.decode`."""


class TurnText(NamedTuple):
    """Text of one turn."""

    observation: str
    """Text between the completion before and this one, with the tokens of the chat template; for
    the first turn of a context the whole prompt.
    """
    completion: str


def turn_texts(trial: Trial, decode: Decode) -> tuple[list[TurnText], str]:
    """Split the contexts of a trial into turns.

    Returns:
        The text of each turn, and the text after the last completion.
    """
    ends = [0] * len(trial.segments)
    texts = []
    for turn in trial.turns:
        tokens = trial.segments[turn.segment].tokens
        observation = tokens[ends[turn.segment] : turn.start]
        completion = tokens[turn.start : turn.stop]
        texts.append(TurnText(decode(observation.tolist()), decode(completion.tolist())))
        ends[turn.segment] = turn.stop
    ending = decode(trial.segments[-1].tokens[ends[-1] :].tolist()) if trial.segments else ""
    return texts, ending


def trial_as_dict(trial: Trial, chat: ChatFormat, version: int) -> dict[str, Any]:
    """Return a trial as plain data: the task, rewards, turns, and the text of every context."""
    # Actions that a method's adviser named at some turns, beside those that were taken.
    alternatives = {each.turn: each.action for each in trial.alternatives}
    texts, ending = turn_texts(trial, chat.decode)
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
                "observation": text.observation,
                "completion": text.completion,
                "action": turn.action,
                "reward": turn.reward,
                "is_valid": turn.is_valid,
                "info": turn.info,
            }
            | ({"alternative": alternatives[number]} if number in alternatives else {})
            for number, (turn, text) in enumerate(zip(trial.turns, texts, strict=True))
        ],
        "ending": ending,
        "contexts": [chat.decode(segment.tokens.tolist()) for segment in trial.segments],
    }
