"""A trial as chat: cut at its tags into what the agent said and what it was told, by episode.

Only the words between `<action>` or `<remark>` tags count as the agent's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mage_async.report.markup import Markup, tag
from mage_async.report.numbers import signed

_ANSWER = re.compile(r"<(action|remark)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_TEMPLATE = re.compile(
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


def chat(sample: Mapping[str, Any], units: int) -> Markup:
    """The whole trial, episode by episode, with the reward of every turn."""
    read = scenes(sample)
    if read is None:
        whole = "\n\n".join(sample["contexts"])
        return tag("article", _head(sample, units), tag("pre", whole), cls="trial")
    episodes = [
        _episode(number, scene, sample["reward_by_episode"][number - 1] / units)
        for number, scene in enumerate(read, 1)
    ]
    return tag("article", _head(sample, units), *episodes, cls="trial")


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
    shown = _TEMPLATE.sub(" ", text).strip()
    if shown:
        scene.lines.append(shown)


def _head(sample: Mapping[str, Any], units: int) -> Markup:
    rewards = " → ".join(signed(reward / units) for reward in sample["reward_by_episode"])
    return tag(
        "header",
        tag("b", f"version {sample['version']}"),
        tag("span", f"{sample.get('split', 'train').replace('heldout', 'held-out')} task"),
        tag("code", sample["member"]),
        tag("span", rewards, cls="rewards"),
    )


def _episode(number: int, scene: Scene, reward: float) -> Markup:
    title = tag("h4", f"episode {number}", tag("span", signed(reward), cls=_sign(reward)))
    return tag("section", title, *_exchanges(scene))


def _exchanges(scene: Scene) -> Iterator[Markup]:
    """What was told and the answer to it, on one line where there is room."""
    told: list[Markup] = []
    for line in scene.lines:
        if isinstance(line, str):
            told.append(tag("p", line, cls="told"))
        else:
            yield tag("div", *told, _answer(*line), cls="exchange")
            told = []
    yield from told


def _answer(text: str, turn: Turn) -> Markup:
    invalid = None if turn["is_valid"] else tag("em", "invalid")
    kind = "answer" if turn["kind"] == "act" else "answer remark"
    words = tag("span", text or "(nothing)", cls="words")
    reward = turn["reward"]
    chip = tag("span", signed(reward, 1), cls=f"chip {_sign(reward)}")
    return tag("p", words, invalid, chip if turn["kind"] == "act" else None, cls=kind)


def _sign(value: float) -> str:
    return "plus" if value > 0 else "minus" if value < 0 else "even"
