"""A trial as chat: cut at its tags into what the agent said and what it was told, by episode.

Only the words between `<action>` or `<remark>` tags count as the agent's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mage_async.report.charts.number_format import signed

_ANSWER = re.compile(r"<(action|remark)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
TEMPLATE_MARKS = re.compile(
    r"<\|im_start\|>\w+\n?|<\|start_header_id\|>\w+<\|end_header_id\|>|<start_of_turn>\w+\n?"
    r"|<end_of_turn>|<\|[^|<>]*\|>|</?think>"
)
"""Markers of chat templates, which a reader need not see."""

Turn = Mapping[str, Any]


@dataclass(slots=True)
class Scene:
    """One episode: what was said, in order; a turn is an answer of the agent."""

    lines: list[str | tuple[str, Turn]] = field(default_factory=list)


def scenes(sample: Mapping[str, Any]) -> list[Scene] | None:
    """A sample's episodes; None where its answers cannot be told from its contexts."""
    turns: Sequence[Turn] = sample["turns"]
    pieces = [list(_pieces(context)) for context in sample["contexts"]]
    num_answers = sum(is_answer for context in pieces for is_answer, _ in context)
    if num_answers == len(turns) + len(pieces):
        pieces = [_without_example(context) for context in pieces]
    elif num_answers != len(turns):
        return None
    result = [Scene() for _ in sample["reward_by_episode"]]
    remaining, episode = iter(turns), 0
    for is_answer, text in (piece for context in pieces for piece in context):
        if is_answer:
            turn = next(remaining)
            result[turn["episode"]].lines.append((text, turn))
            episode = turn["episode"]
        else:
            before, after = _at_episode(text, episode + 1, len(result))
            _tell(result[episode], before)
            if after:
                _tell(result[episode + 1], after)
    return result


@dataclass(frozen=True, slots=True)
class Answer:
    """What the agent answered, and the reward of its turn."""

    text: str
    reward: float
    is_remark: bool
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Episode:
    """What was told and the answer to it, in order; after the last answer there may be none."""

    reward: float
    exchanges: Sequence[tuple[Sequence[str], Answer | None]]


@dataclass(frozen=True, slots=True)
class TrialChat:
    """A trial as `templates/trial_chat.html` shows it."""

    version: int
    split: str
    member: str
    rewards: str
    episodes: Sequence[Episode]
    whole: str = ""
    """The contexts as they are, where answers cannot be told apart."""


def trial_chat(sample: Mapping[str, Any], units: int) -> TrialChat:
    """The whole trial, episode by episode, with the reward of every turn."""
    read = scenes(sample)
    rewards = [reward / units for reward in sample["reward_by_episode"]]
    return TrialChat(
        version=sample["version"],
        split=sample.get("split", "train").replace("heldout", "held-out"),
        member=sample["member"],
        rewards=" → ".join(map(signed, rewards)),
        episodes=[
            Episode(reward, list(_exchanges(scene)))
            for reward, scene in zip(rewards, read or (), strict=False)
        ],
        whole="\n\n".join(sample["contexts"]) if read is None else "",
    )


def _pieces(context: str) -> Iterator[tuple[bool, str]]:
    """Alternately what was told (False) and answered (True)."""
    end = 0
    for found in _ANSWER.finditer(context):
        yield False, context[end : found.start()]
        yield True, found[2].strip()
        end = found.end()
    yield False, context[end:]


def _without_example(pieces: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
    """Rules in words show an answer before the first one is given."""
    (_, rules), (_, example), (_, rest), *others = pieces
    return [(False, f"{rules}<action> {example} </action>{rest}"), *others]


def _at_episode(text: str, number: int, num_episodes: int) -> tuple[str, str]:
    """Cut where episode `number` (from 0) is announced; nothing after where it is not."""
    at = text.rfind(f"episode {number + 1}") if number < num_episodes else -1
    return (text, "") if at < 0 else (text[:at], text[at:])


def _tell(scene: Scene, text: str) -> None:
    shown = TEMPLATE_MARKS.sub(" ", text).strip()
    if shown:
        scene.lines.append(shown)


def _exchanges(scene: Scene) -> Iterator[tuple[list[str], Answer | None]]:
    told: list[str] = []
    for line in scene.lines:
        if isinstance(line, str):
            told.append(line)
        else:
            yield told, _answer(*line)
            told = []
    if told:
        yield told, None


def _answer(text: str, turn: Turn) -> Answer:
    return Answer(text, turn["reward"], turn["kind"] != "act", turn["is_valid"])
