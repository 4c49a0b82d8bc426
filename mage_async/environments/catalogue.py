"""The catalogue: which environments there are, and how one is found by its name."""

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any, cast

from mage_async.environments.environment import Environment, Facts
from mage_async.environments.hosted.user_object import Origin
from mage_async.environments.reset_step import ResetStep
from mage_async.environments.tools.declare import has_tools
from mage_async.environments.tools.steps import with_step
from mage_async.environments.user_code import own_code
from mage_async.errors import ConfigError

_CLASSES = {
    "bandit": "mage_async.environments.bandit.game:Bandit",
    "blackjack": "mage_async.environments.blackjack.game:Blackjack",
    "boxes": "mage_async.environments.boxes.game:Boxes",
    "grid": "mage_async.environments.grid.game:Grid",
    "hangman": "mage_async.environments.hangman.game:Hangman",
    "kuhn": "mage_async.environments.kuhn.game:Kuhn",
    "mastermind": "mage_async.environments.guessing.mastermind:Mastermind",
    "maze": "mage_async.environments.maze.game:MazeGame",
    "minesweeper": "mage_async.environments.minesweeper.game:MineSweeper",
    "numberlock": "mage_async.environments.guessing.numberlock:NumberLock",
    "openspiel": "mage_async.environments.openspiel.game:OpenSpielGame",
    "rps": "mage_async.environments.rps.game:Rps",
    "scout": "mage_async.environments.scout.game:Scout",
    "shop": "mage_async.environments.shop.game:Shop",
    "sokoban": "mage_async.environments.sokoban.game:Sokoban",
    "tictactoe": "mage_async.environments.tictactoe.game:TicTacToe",
    "wordle": "mage_async.environments.guessing.wordle:Wordle",
}
_EXTRAS = {
    "alfworld": "mage_async.environments.text_games.alfworld:AlfWorld",
    "textworld": "mage_async.environments.text_games.textworld:TextWorld",
}
"""Environments on engines that have to be installed too: `pip install 'mage_async[textworld]'`."""
_LOADERS = {
    "agentgym": ("mage_async.environments.loaders.agentgym:load", "http://127.0.0.1:36001"),
    "gymnasium": ("mage_async.environments.loaders.gymnasium:load", "Taxi-v4"),
    "openenv": ("mage_async.environments.loaders.openenv:load", "http://127.0.0.1:8000"),
    "reasoning-gym": ("mage_async.environments.loaders.reasoning_gym:load", "chain_sum"),
    "textarena": ("mage_async.environments.loaders.textarena:load", "Mastermind-v0"),
    "verifiers": ("mage_services.verifiers.loader:load", "gsm8k"),
}
"""Libraries of environments, each with the function that makes a class for a name of the library,
and with such a name: `gymnasium:Taxi-v4`.
"""
_COMPOSED = {"mix": "mage_async.environments.mix.game:Mix"}
"""Made of others, which are the option `parts`."""
_KNOWN = _CLASSES | _EXTRAS | _COMPOSED
_ADVICE = (
    "inherit mage_async.environments.environment.Environment and see what it asks for, "
    "or write `reset(seed, task)` and `step(action)`"
)
_NO_OPTION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
_PROTOCOL = (
    "members",
    "family",
    "seats",
    "rules",
    "begin",
    "script",
    "swaps",
    "is_probe",
    "references",
)
_WITH_DEFAULT = ("is_probe",)


def names() -> tuple[str, ...]:
    """Names of the environments that are shipped and need nothing else."""
    return tuple(_CLASSES)


def extras() -> tuple[str, ...]:
    """Names of those on engines that have to be installed too, by extras of the same names."""
    return tuple(_EXTRAS)


def loaders() -> tuple[str, ...]:
    """Names of the libraries whose environments are loaded by `library:name`."""
    return tuple(_LOADERS)


def file_name(name: str) -> str:
    """An environment's name as a part of a file's."""
    return re.sub(r"[^\w.-]+", "-", name)


def load(name: str, **options: Any) -> Environment:
    """The environment of a name, or of your own class as `module:Class`, made with its options.

    Raises:
        ConfigError: there is none, it does not follow the protocol, or has no such option.
    """
    library, _, identity = name.partition(":")
    if library in _LOADERS:
        return _loaded(name, library, identity, options)
    if name not in _KNOWN and ":" not in name:
        raise ConfigError(_unknown(name))
    found = _find(name, _KNOWN.get(name, name))
    is_small = _is_small(found)
    if not is_small:
        _check_protocol(name, found)
    _check_options(name, _parameters(found), options)
    with nullcontext() if name in _KNOWN else own_code(name):
        if is_small:
            kind = with_step(found) if has_tools(found) else found
            return ResetStep(kind, options, Origin(name, options))
        environment = found(**options)
    if not isinstance(getattr(environment, "facts", None), Facts):
        raise ConfigError(f"environment {name!r}: its `facts` must be a `Facts`; {_ADVICE}")
    if name not in _KNOWN and not _says_how_it_is_called(found):
        object.__setattr__(environment, "called", "in_threads")  # also of a frozen dataclass
    return cast("Environment", environment)


def _loaded(name: str, library: str, identity: str, options: dict[str, Any]) -> Environment:
    """An environment of another library."""
    address, example = _LOADERS[library]
    if not identity:
        raise ConfigError(f"environment {name!r}: say which, such as {library}:{example}")
    module_name, _, function = address.partition(":")
    loader = getattr(importlib.import_module(module_name), function)
    _check_options(name, inspect.signature(loader).parameters, options)
    return ResetStep(loader(identity, **options), {}, Origin(name, options))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [*_KNOWN, *_LOADERS], n=2)
    hint = f" (did you mean {' or '.join(f'`{match}`' for match in near)}?)" if near else ""
    known = ", ".join([*_KNOWN, *(f"{library}:…" for library in _LOADERS)])
    return f"no environment {name!r}{hint}; there are {known}, or your own class as `module:Class`"


def _find(name: str, address: str) -> type:
    module_name, _, class_name = address.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ConfigError(f"environment {name!r}: write it as `module:Class`")
    module = _imported(name, module_name)
    found = getattr(module, class_name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        near = difflib.get_close_matches(class_name, classes, n=1)
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        raise ConfigError(f"environment {name!r}: {module_name} has no class `{class_name}`{hint}")
    if not inspect.isclass(found):
        kind = type(found).__name__
        raise ConfigError(f"environment {name!r}: `{class_name}` is a {kind}, not a class")
    return found


def _imported(name: str, module_name: str) -> ModuleType:
    """A module; one of the user's own may also lie in the current folder, whichever process asks.

    The processes of a run have no such entry on their path (`PYTHONSAFEPATH`), so that a checkout
    does not stand before what is installed. The folder therefore comes last.
    """
    if name not in _KNOWN and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with own_code(name):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not _is_missing(module_name, error.name):
                raise
            raise ConfigError(
                f"environment {name!r}: cannot import {module_name!r}: {error}; "
                "start in the folder it lies in, or put that on PYTHONPATH"
            ) from None


def _is_missing(module_name: str, not_found: str | None) -> bool:
    """Whether it is the module itself, or a package it lies in, and not what it imports."""
    return not_found is not None and f"{module_name}.".startswith(f"{not_found}.")


def _check_options(
    name: str, parameters: Mapping[str, inspect.Parameter], options: dict[str, Any]
) -> None:
    """Options must be arguments of the class; arguments without a default must be options."""
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {key: each for key, each in parameters.items() if each.kind not in _NO_OPTION}
    for option in options:
        if option not in named and not takes_any:
            near = difflib.get_close_matches(option, named, n=1)
            hint = f" (did you mean `{near[0]}`?)" if near else ""
            has = f"its options: {', '.join(named)}" if named else "it has none"
            raise ConfigError(f"environment {name!r}: unknown option `{option}`{hint}; {has}")
    for key, each in named.items():
        if each.default is each.empty and key not in options:
            raise ConfigError(f"environment {name!r}: needs the option `{key}`")


def _parameters(found: type) -> Mapping[str, inspect.Parameter]:
    """Arguments of a class; none where no class of its line but a protocol has an `__init__`."""
    line = [each for each in found.__mro__[:-1] if not getattr(each, "_is_protocol", False)]
    has_own = any("__init__" in vars(each) for each in line)
    return inspect.signature(found).parameters if has_own else {}


def _says_how_it_is_called(found: type) -> bool:
    return any("called" in vars(each) for each in found.__mro__ if each is not Environment)


def _is_small(found: type) -> bool:
    """Whether a class has `reset`, `step` or tools, and no part of the whole protocol's play."""
    has_reset, has_step, has_begin = (
        callable(getattr(found, each, None)) for each in ("reset", "step", "begin")
    )
    return has_reset and not has_begin and (has_step or has_tools(found))


def _check_protocol(name: str, found: type) -> None:
    lacking = [f"`{each}`" for each in _PROTOCOL if not _has(found, each)]
    if lacking:
        raise ConfigError(f"environment {name!r}: lacks {', '.join(lacking)}; {_ADVICE}")


def _has(found: type, method: str) -> bool:
    """Whether a class has a method that does something: more than the protocol's `...`."""
    own = getattr(found, method, None)
    return callable(own) and (method in _WITH_DEFAULT or own is not getattr(Environment, method))
