"""`gymnasium:ID`: any registered environment of Gymnasium whose spaces have a text form.

A task is a seed of Gymnasium's own: the same task begins, and goes on, the same way in all
episodes of a trial.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mage_async.environments.loaders.loaded import TURNS, ListedActions, declared, library
from mage_async.environments.options import check_whole
from mage_async.environments.user_code import own_code
from mage_async.errors import ConfigError

_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*4[0-9]m(.)\x1b\[0m")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ANSI = "ansi"


@dataclass(frozen=True, slots=True)
class _Made:
    """What all episodes share."""

    identity: str
    options: Mapping[str, Any]
    renders: bool
    read: Callable[[str], Any]
    """What a text means; None where it is no action."""
    say: Callable[[Any, Any], str]
    """The environment without wrappers, and an observation."""

    def make(self, task: int) -> Any:
        """A new environment, with the options of a task."""
        return _make(self.identity, self.options, task, self.renders)


class Episode(ListedActions):
    """One episode; see `load`."""

    made: _Made
    _own: Any = None

    def reset(self, seed: int, task: int) -> str:
        """Make the environment, and reset it with the task as Gymnasium's seed."""
        self._own = self.made.make(task)
        observation, _ = self._own.reset(seed=task)
        return self._said(observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Step by what the text means; what means nothing is answered, and changes nothing."""
        meant = self.made.read(action)
        if meant is None:
            told = f"{action!r:.60} is no action of {self._own.action_space!r:.100}"
            return told, 0.0, False, False, {"is_valid": False}
        observation, reward, terminated, truncated, _ = self._own.step(meant)
        return self._said(observation), float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        """Close the environment, where it was made."""
        if self._own is not None:
            self._own.close()

    def _said(self, observation: Any) -> str:
        said = self.made.say(self._own.unwrapped, observation)
        return f"{said}\n{_drawn(self._own.render())}" if self.made.renders else said


def load(
    identity: str,
    /,
    *,
    turns: int = TURNS,
    actions: Sequence[str] = (),
    rules: str = "",
    render: bool = False,
    make: Mapping[str, Any] | None = None,
) -> type:
    """A class of episodes.

    Args:
        identity: as registered, such as `Taxi-v4`; `module:ID` imports the module first.
        turns: most steps of an episode.
        actions: words for the actions of a `Discrete` space, by number.
        rules: in words; by default the environment's own first words.
        render: also show what the environment draws as text, where it can.
        make: arguments of `gymnasium.make`.

    Raises:
        ConfigError: there is no such environment, it has no text form, or Gymnasium is missing.
    """
    name = f"gymnasium:{identity}"
    library("gymnasium", "gymnasium")
    from mage_async.environments.loaders.spaces import reader, sayer
    from mage_async.environments.loaders.toy_text import TOYS

    check_whole(name, "turns", turns, 1, 100_000)
    options = dict(make or {})
    with own_code(name):
        probe = _make(identity, options, 0, renders=False)
    own = probe.unwrapped
    if render and _ANSI not in own.metadata.get("render_modes", ()):
        raise ConfigError(f"environment {name!r}: cannot be drawn as text; set `render = false`")
    toy = TOYS.get(type(own).__name__)
    legal, read = reader(name, probe.action_space, tuple(actions) or (toy.actions if toy else ()))
    say = toy.say if toy else _without_own(sayer(name, probe.observation_space))
    return declared(
        Episode,
        name,
        made=_Made(identity, options, render, read, say),
        max_turns=turns,
        legal_actions=legal,
        rules=rules or f"{toy.rules if toy else _own_words(own)} {_asked(legal, probe)}",
    )


def _make(identity: str, options: Mapping[str, Any], task: int, renders: bool) -> Any:
    from mage_async.environments.loaders.toy_text import made_with

    mode = {"render_mode": _ANSI} if renders else {}
    gymnasium = library("gymnasium", "gymnasium")
    return gymnasium.make(identity, disable_env_checker=True, **mode, **made_with(options, task))


def _without_own(say: Callable[[Any], str]) -> Callable[[Any, Any], str]:
    return lambda _, observation: say(observation)


def _asked(legal: Sequence[str], probe: Any) -> str:
    if legal:
        return f"Answer with one of: {', '.join(legal)}."
    return f"Answer with an action of {probe.action_space!r:.200}, its numbers parted by spaces."


def _own_words(own: Any) -> str:
    """The first paragraph of the environment's docstring, or the name of its class."""
    lines = (inspect.getdoc(type(own)) or "").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).strip()
    return " ".join(text.partition("\n\n")[0].split()) or type(own).__name__


def _drawn(text: str) -> str:
    """A drawing without colours; what a colour marked stands in brackets."""
    return _COLOUR.sub("", _HIGHLIGHTED.sub(r"[\1]", text)).strip("\n")
