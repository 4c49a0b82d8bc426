"""Players of known kind, and a game in which each of them differs from the others.

Each answers a chat about `SignedBoxes` as a model behind an endpoint would: it sees the messages
and nothing else. `orbit_reply` answers one about a maze or about Mastermind.
"""

import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

from mage_async.environments.games.game import COLUMNS, ROWS, Cell, step
from mage_async.environments.games.guessing import COLOURS, colours_in_place
from tests.helpers.chat_server import Messages

BUTTONS = ("left", "right")
THINGS = ("red", "green", "blue", "gold")


class SignedBoxes:
    """Each of four boxes is opened by one button, left or right, the same in all episodes. A sign
    on the box names the right one in three of four cases. You are told the right one afterwards."""

    legal_actions = BUTTONS
    max_turns = len(THINGS)
    min_return, max_return = 0.0, 1.0

    def reset(self, seed: int, task: int) -> str:
        """Hide a code, with signs of which three of four are right."""
        source = random.Random(f"signed boxes {task}")
        self.code = [source.choice(BUTTONS) for _ in THINGS]
        self.signs = [each if source.random() < 0.75 else _other(each) for each in self.code]
        self.box = 0
        return self._asked()

    def step(self, action: str) -> tuple[str, float, bool]:
        """Press a button of the current box."""
        right, thing = self.code[self.box], THINGS[self.box]
        self.box += 1
        is_over = self.box == len(THINGS)
        said = f"{thing} needs {right}." + ("" if is_over else f" {self._asked()}")
        return said, (action == right) / len(THINGS), is_over

    def _asked(self) -> str:
        return f"The {THINGS[self.box]} box says {self.signs[self.box]}."


class MoreBoxes(SignedBoxes):
    """The same game with other codes."""

    def reset(self, seed: int, task: int) -> str:
        """Hide another code."""
        return super().reset(seed, task + 100_000)


class OtherBoxes(SignedBoxes):
    """The same game with other codes again."""

    def reset(self, seed: int, task: int) -> str:
        """Hide another code."""
        return super().reset(seed, task + 200_000)


def _other(button: str) -> str:
    return BUTTONS[1 - BUTTONS.index(button)]


Choose = Callable[[str, str, Sequence[dict[str, str]], random.Random], str]
"""Maps the thing, its sign, what each episode so far has told, and a random source to a button."""


def bayes(thing: str, sign: str, told: Sequence[dict[str, str]], source: random.Random) -> str:
    """Press what any episode has told, else what the sign says: exact inference."""
    known = [episode[thing] for episode in told if thing in episode]
    return known[0] if known else sign


def memoriser(thing: str, sign: str, told: Sequence[dict[str, str]], source: random.Random) -> str:
    """Press what the only code learned by heart that fits this episode has for the thing."""
    codes = {
        "left": ("left", "right", "right", "left"),
        "right": ("right", "right", "left", "left"),
    }
    return codes[told[-1].get(THINGS[0], sign)][THINGS.index(thing)]


def retries(thing: str, sign: str, told: Sequence[dict[str, str]], source: random.Random) -> str:
    """Press at random."""
    return source.choice(BUTTONS)


def good(thing: str, sign: str, told: Sequence[dict[str, str]], source: random.Random) -> str:
    """Press what the sign says."""
    return sign


def worse(thing: str, sign: str, told: Sequence[dict[str, str]], source: random.Random) -> str:
    """Press what the sign says in the first episode, and in later ones less and less often."""
    return sign if source.random() < 1.5 / (len(told) + 0.5) - 0.2 else _other(sign)


def reads_last(thing: str, sign: str, told: Sequence[dict[str, str]], source: random.Random) -> str:
    """Press what the last episode has told, else what the sign says."""
    return told[-2].get(thing, sign) if len(told) > 1 else sign


def practises(thing: str, sign: str, told: Sequence[dict[str, str]], source: random.Random) -> str:
    """Press at random, but what the sign says once any episode was played."""
    return sign if len(told) > 1 else source.choice(BUTTONS)


PLAYERS: dict[str, tuple[Choose, str]] = {
    "bayes": (bayes, "adapts"),
    "reads the last episode": (reads_last, "adapts"),
    "memoriser": (memoriser, "does not adapt"),
    "retries": (retries, "improves without memory"),
    "practises": (practises, "improves without memory"),
    "merely good": (good, "does not adapt"),
    "gets worse": (worse, "does not adapt"),
}
"""Each player with the verdict that is right."""
_EVENT = re.compile(r"\bepisode \d+|(\w+) needs (\w+)\.|The (\w+) box says (\w+)\.")


def reply_of(player: str, seed: int = 0) -> Callable[[Messages], str]:
    """Return the function that answers a chat as a player does."""
    return partial(_reply, PLAYERS[player][0], random.Random(f"{player}/{seed}"))


def _reply(choose: Choose, source: random.Random, messages: Messages) -> str:
    told: list[dict[str, str]] = []
    thing = sign = ""
    for message in messages:
        if message["role"] == "user":
            for found in _EVENT.finditer(message["content"]):
                if found[1]:
                    told[-1][found[1]] = found[2]
                elif found[3]:
                    thing, sign = found[3], found[4]
                else:
                    told.append({})
    return f"I press it. <action> {choose(thing, sign, told, source)} </action>"


def orbit_reply(messages: Messages) -> str:
    """Answer a chat about ORBIT's tests: guess a code that fits all answers; in a maze go to the
    goal, or to the nearest cell that was not seen.
    """
    texts = [each["content"] for each in messages if each["role"] == "user"]
    acts = [
        each["content"].removeprefix("<action> ").removesuffix(" </action>")
        for each in messages
        if each["role"] == "assistant"
    ]
    choose = _next_code if "A code of" in texts[0] else _next_way
    return f"<action> {choose(acts, texts)} </action>"


def _next_code(guesses: Sequence[str], texts: Sequence[str]) -> str:
    """Return the code that was solved, or the first that fits all answers; if the history is that
    of another code, any.
    """
    told = list(zip(guesses, texts[1:], strict=True))
    solved = [guess for guess, text in told if text.startswith("solved")]
    if solved:
        return solved[-1]
    fits = (
        " ".join(code)
        for code in permutations(COLOURS, 3)
        if all(
            text.startswith(("over", colours_in_place(code, tuple(guess.split()))))
            for guess, text in told
        )
    )
    return next(fits, "red green blue")


def _next_way(acts: Sequence[str], texts: Sequence[str]) -> str:
    """Return a first step to the goal, or to a cell that was not seen."""
    seen: dict[Cell, list[str]] = {}
    cell, goal = (0, 0), None
    for number, text in enumerate(texts):
        if number and text.startswith("goal episode"):
            goal = step(cell, acts[number - 1])
        found = list(_CELL.finditer(text))[-1]
        cell = ROWS.index(found[1]), COLUMNS.index(found[2])
        words = found[3].split()
        if "goal" in words:
            goal = step(cell, words[words.index("goal") + 1])
        seen[cell] = [word for word in words if word != "goal"]
    waiting, met = deque([(cell, "")]), {cell}
    while waiting:
        at, first = waiting.popleft()
        if first and (at == goal if goal else at not in seen):
            return first
        for way in seen.get(at, ()):
            if (to := step(at, way)) not in met:
                met.add(to)
                waiting.append((to, first or way))
    return seen[cell][0]  # the history is that of another maze


_CELL = re.compile(rf"({'|'.join(ROWS)}) ({'|'.join(COLUMNS)})((?: (?:goal|up|down|left|right))+)")
"""A cell, and its exits."""
