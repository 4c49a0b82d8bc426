"""A group: its trials side by side, each turn with its reward; and a turn, token by token."""

import json
from collections.abc import Sequence

from markupsafe import Markup

from mage_async.pages.frame import Frame
from mage_async.pages.listed import ListedGroup
from mage_async.pages.templating import fill
from mage_async.pages.turns import ShownToken, ShownTrial, ShownTurn

MOST_TOKENS = 1000
LONG_TEXT = 700
"""Characters; longer texts are folded."""


def group_page(
    frame: Frame,
    group: ListedGroup,
    trials: Sequence[ShownTrial],
    missing: Sequence[str],
    marked: int | None,
) -> Markup:
    """The trials of a group beside each other.

    Args:
        missing: why trials could not be read, a sentence each.
        marked: the trial that a link led to.
    """
    return fill(
        "group.html",
        frame=frame,
        group=group,
        trials=trials,
        missing=missing,
        marked=marked,
        long_text=LONG_TEXT,
    )


def turn_page(
    frame: Frame,
    trial: ShownTrial,
    turn: ShownTurn,
    tokens: Sequence[ShownToken],
    first: int,
    address: str,
    unknown: str,
) -> Markup:
    """One turn, at its `address`, with its tokens from number `first` on.

    Args:
        unknown: why its return and advantage are not known; empty where they are.
    """
    shown = tokens[first : first + MOST_TOKENS]
    rest = first + MOST_TOKENS
    return fill(
        "turn.html",
        frame=frame,
        trial=trial,
        turn=turn,
        tokens=shown,
        first=first,
        num_tokens=len(tokens),
        more=f"{address}?first={rest}" if rest < len(tokens) else "",
        depth=_depth,
        unknown=unknown,
        info=_pretty(turn.info),
        long_text=LONG_TEXT,
    )


def _pretty(info: str) -> list[tuple[str, str]]:
    """What the environment said of a step, by name; text that is no JSON object as it is."""
    try:
        found = json.loads(info or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return [("info", info)]
    return [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in found.items()
    ]


def _depth(token: ShownToken) -> str:
    """From 0, drawn for certain, to 1, a thousand to one: how surprising a token was."""
    return f"{min(1.0, max(0.0, -token.logprob / 6.9)):.2f}"
