"""Finished episodes as paths through a state machine, and the strategies that two paths differ in.

A state is what the environment calls the state without memory (`Play.anchor`), a transition an
action in it with the sign of its reward. No second language model is asked: both are read off the
record of a trial.
"""

import random
from collections.abc import Sequence
from hashlib import blake2s
from typing import NamedTuple

from mage_async.trajectory import Kind, Trial

Decision = tuple[str, str]
"""A state, and the action to take in it: what a strategy says."""
Transition = tuple[str, str, str]
"""State, action, and the sign of what it earned."""
Path = tuple[Transition, ...]

MOST_TRANSITIONS = 32
"""Longer paths are cut here."""
_BRIEF_BYTES = 80


class Step(NamedTuple):
    """One action of an episode."""

    state: str
    action: str
    reward: float


Episode = tuple[Step, ...]


def episodes_of(trial: Trial) -> list[Episode]:
    """The actions of each episode that was played, in order; refused ones say nothing to copy."""
    steps: dict[int, list[Step]] = {}
    for turn in trial.turns:
        if turn.kind is Kind.ACT:
            action = turn.action if turn.is_valid else ""
            steps.setdefault(turn.episode, []).append(Step(turn.anchor, action, turn.reward))
    return [tuple(each) for each in steps.values()]


def return_of(episode: Episode) -> float:
    """What an episode earned."""
    return sum(step.reward for step in episode)


def path_of(episode: Episode) -> Path:
    """The canonical path: each transition once, where it was taken first; long texts made brief."""
    taken = ((_brief(s.state), _brief(s.action), _sign(s.reward)) for s in episode)
    return tuple(dict.fromkeys(taken))[:MOST_TRANSITIONS]


def contrasted(better: Episode, worse: Episode) -> list[Decision]:
    """What the better episode decided otherwise in states that both came to, and earned more by.

    Where rewards come at the end only, no decision earned more by itself: then the first one that
    differs. Of a state that was met again the last decision counts.
    """
    first, second = ({step.state: step for step in each} for each in (better, worse))
    differ = [
        (step, second[state])
        for state, step in first.items()
        if state in second and step.action and step.action != second[state].action
    ]
    earned = [one for one, other in differ if one.reward > other.reward]
    chosen = earned or [one for one, _ in differ[:1]]
    return [(step.state, step.action) for step in chosen]


def lessons(episodes: Sequence[Episode]) -> tuple[Episode, list[Decision]]:
    """The best of some episodes, and what it decided otherwise than the worst; where all earned
    alike, these are one episode, which decided nothing otherwise.
    """
    better, worse = max(episodes, key=return_of), min(episodes, key=return_of)
    return better, contrasted(better, worse)


def with_shuffled_rewards(
    batch: Sequence[Sequence[Sequence[Episode]]], source: random.Random
) -> list[list[list[Episode]]]:
    """The episodes of each trial of each group, each action with the reward of any other: the
    control in which no memory can learn anything.
    """
    steps = [s for group in batch for trial in group for episode in trial for s in episode]
    rewards = [step.reward for step in steps]
    source.shuffle(rewards)
    left = iter(rewards)
    return [
        [[tuple(s._replace(reward=next(left)) for s in e) for e in trial] for trial in group]
        for group in batch
    ]


def _sign(reward: float) -> str:
    return "+" if reward > 0 else "-" if reward < 0 else "0"


def _brief(text: str) -> str:
    """A text that names a node: of a long one its beginning and its digest."""
    data = text.encode(errors="replace")
    if len(data) <= _BRIEF_BYTES:
        return text
    digest = blake2s(data, digest_size=4).hexdigest()
    return f"{data[: _BRIEF_BYTES - 12].decode(errors='ignore')}… {digest}"
