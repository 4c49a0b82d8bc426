"""Load an environment by its name, by `library:name`, or from a user's own `module:Class`."""

import importlib
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

from mage_async.environments.agent import AgentProgram, AgentTasks
from mage_async.environments.environment import Environment, Facts
from mage_async.environments.tools import has_tools, with_step
from mage_async.environments.user_calls import Origin, as_config_error
from mage_async.environments.user_class import ResetStep
from mage_async.errors import ConfigError
from mage_async.user_modules import Registry, address_of, did_you_mean, place_of

_CLASSES = {
    "bandit": "mage_async.environments.games.bandit:Bandit",
    "biased_rps": "mage_async.environments.games.rps:BiasedRps",
    "blackjack": "mage_async.environments.games.blackjack:Blackjack",
    "blackjack_pick": "mage_async.environments.games.blackjack:BlackjackPick",
    "boxes": "mage_async.environments.games.boxes:Boxes",
    "family": "mage_async.environments.games.family:Family",
    "grid": "mage_async.environments.games.grid:Grid",
    "hangman": "mage_async.environments.games.hangman:Hangman",
    "kuhn": "mage_async.environments.games.kuhn:Kuhn",
    "mastermind": "mage_async.environments.games.guessing:Mastermind",
    "maze": "mage_async.environments.games.maze:MazeGame",
    "minesweeper": "mage_async.environments.games.minesweeper:MineSweeper",
    "numberlock": "mage_async.environments.games.guessing:NumberLock",
    "openspiel": "mage_async.environments.games.openspiel:OpenSpielGame",
    "rps": "mage_async.environments.games.rps:Rps",
    "scout": "mage_async.environments.games.scout:Scout",
    "shop": "mage_async.environments.games.shop:Shop",
    "sokoban": "mage_async.environments.games.sokoban:Sokoban",
    "tictactoe": "mage_async.environments.games.tictactoe:TicTacToe",
    "wordle": "mage_async.environments.games.guessing:Wordle",
}
"""Built-in environments by name, as `module:Class`."""
EXTRAS = {
    "alfworld": "mage_async.environments.games.alfworld:AlfWorld",
    "textworld": "mage_async.environments.games.textworld:TextWorld",
}
"""Environments that need another package. The extra that installs it has the name of the
environment, as in `pip install 'mage_async[textworld]'`.
"""
LOADERS = {
    "agent": ("mage_services.gateway.programs:load", "my_agent:run"),
    "agentgym": ("mage_async.environments.loaders.agentgym:load", "http://127.0.0.1:36001"),
    "gymnasium": ("mage_async.environments.loaders.gymnasium:load", "Taxi-v4"),
    "openenv": ("mage_async.environments.loaders.openenv:load", "http://127.0.0.1:8000"),
    "reasoning-gym": ("mage_async.environments.loaders.reasoning_gym:load", "chain_sum"),
    "textarena": ("mage_async.environments.loaders.textarena:load", "Mastermind-v0"),
    "verifiers": ("mage_services.verifiers.process:load", "gsm8k"),
}
"""For each `prefix` of an environment's name `prefix:rest`: the address `module:function` of the
function that returns a class for `rest`, and an example of `rest`. The prefix `agent` stands for a
user's own program that is the agent; the others are libraries of environments.
"""
_KNOWN = _CLASSES | EXTRAS | {"mix": "mage_async.environments.mix:Mix"}
"""All environments that a configuration can name without a module."""
# The error for an unknown name also lists the prefixes of the loaders.
_REGISTRY = Registry("environment", _KNOWN, (f"{library}:…" for library in LOADERS))
_ADVICE = (
    "inherit mage_async.environments.environment.Environment and define its methods, or write "
    "`reset(seed, task)` and `step(action)`"
)
"""Advice in errors about a class that is no environment."""
_NO_OPTION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)
"""Kinds of parameters that no option of a configuration can set by name, such as a loader's first
one, which is the rest of the environment's name after the colon.
"""
_REQUIRED = ("members", "family", "seats", "rules", "begin", "script", "swaps", "references")
"""Methods that a class must define: `Environment` only declares them."""


def load(name: str | type, /, **options: Any) -> Environment:
    """Load an environment with its options. `name` is a name of the catalogue, such as `maze` or
    `gymnasium:Taxi-v4`, or a user's own class or its address `module:Class`.

    Raises:
        ConfigError: no environment has this name, the class does not follow the protocol, or an
            option is unknown or missing.
    """
    name = address_of(name) if isinstance(name, type) else name
    library, _, identity = name.partition(":")
    meant = library.replace("_", "-")  # people also write `reasoning_gym`
    if identity and meant in LOADERS and library != meant:
        raise ConfigError(f"environment {name!r}: did you mean `{meant}:{identity}`?")
    if library in LOADERS:
        address, example = LOADERS[library]
        if not identity:
            raise ConfigError(
                f"environment {name!r}: add a name after the colon, such as {library}:{example}"
            )
        module_name, _, function = address.partition(":")
        loader = getattr(importlib.import_module(module_name), function)
        _check_options(name, inspect.signature(loader).parameters, options)
        kind = loader(identity, **options)
        adapter = AgentTasks if issubclass(kind, AgentProgram) else ResetStep
        # The options are applied already, so the class itself gets none.
        return adapter(kind, {}, Origin(name, options))
    found = _REGISTRY.load(name)
    is_reset_step = _is_reset_step(found)
    if not is_reset_step:
        _check_protocol(name, found)
    _check_options(name, _parameters(found), options)
    # Any exception of a user's own constructor becomes a `ConfigError`.
    with nullcontext() if name in _KNOWN else as_config_error(name):
        if is_reset_step:
            _check_tools_are_methods(name, found)
            kind = with_step(found) if has_tools(found) else found
            return ResetStep(kind, options, Origin(name, options))
        environment = found(**options)
    if not isinstance(getattr(environment, "facts", None), Facts):
        raise ConfigError(f"environment {name!r}: its `facts` must be a `Facts`; {_ADVICE}")
    is_call_mode_declared = any(
        "called" in vars(each) for each in found.__mro__ if each is not Environment
    )
    # Calls of a user's class may block, so they are made in threads unless it says otherwise.
    if name not in _KNOWN and not is_call_mode_declared:
        object.__setattr__(environment, "called", "in_threads")  # also of a frozen dataclass
    return cast("Environment", environment)


def _check_options(
    name: str, parameters: Mapping[str, inspect.Parameter], options: dict[str, Any]
) -> None:
    """Check that options are parameters of the class, and that parameters without a default are
    given.
    """
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {key: each for key, each in parameters.items() if each.kind not in _NO_OPTION}
    for option in options:
        if option not in named and not takes_any:
            hint = did_you_mean(option, named)
            has = f"its options: {', '.join(named)}" if named else "it has none"
            raise ConfigError(f"environment {name!r}: unknown option `{option}`{hint}; {has}")
    for key, each in named.items():
        if each.default is each.empty and key not in options:
            raise ConfigError(
                f"environment {name!r}: needs the option `{key}`: set environment.options.{key}"
            )


def _parameters(found: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's `__init__`; an empty mapping if it has none.

    The `__init__` that a class inherits from a `Protocol` does not count: it takes any arguments.
    """
    # The last one, which is left out, is `object`.
    classes = [each for each in found.__mro__[:-1] if not getattr(each, "_is_protocol", False)]
    has_own = any("__init__" in vars(each) for each in classes)
    return inspect.signature(found).parameters if has_own else {}


def _is_reset_step(found: type) -> bool:
    """Return whether a class has `reset`, and `step` or tools, but not `begin`; `ResetStep` adapts
    such a class.
    """
    has = {each: callable(getattr(found, each, None)) for each in ("reset", "step", "begin")}
    return has["reset"] and not has["begin"] and (has["step"] or has_tools(found))


def _check_tools_are_methods(name: str, found: type) -> None:
    """Raise a `ConfigError` if a class lists functions in `tools`: other libraries read such a
    list, but this package reads marked methods.
    """
    listed = getattr(found, "tools", None)
    if isinstance(listed, list | tuple) and any(map(callable, listed)):
        raise ConfigError(
            f"environment {name!r}: functions in a list `tools` are not read: make each a method "
            "that is marked with `@tool` of `mage_async.environments.tools`, instead of `step`; if "
            "`step` itself calls them, give the list another name"
        )


def _check_protocol(name: str, found: type) -> None:
    """Raise a `ConfigError` if a class lacks methods of the protocol."""
    # Every evaluation calls `is_probe` (`score.py`), so a class that does not inherit `Environment`
    # has to define it. A class that inherits may keep the default of `is_probe`, while the methods
    # in `_REQUIRED` have no default.
    lacking = [
        f"`{each}`"
        for each in (*_REQUIRED, "is_probe")
        if not callable(own := getattr(found, each, None))
        or (own is getattr(Environment, each) and each in _REQUIRED)
    ]
    # A class with only one of these two methods was probably meant to have both.
    both = ("reset", "step") if not callable(getattr(found, "begin", None)) else ()
    has = [each for each in both if hasattr(found, each)]
    lacks = [each for each in both if not hasattr(found, each)]
    if has and lacks:
        hint = did_you_mean(lacks[0], [each for each in dir(found) if each not in has])
        tools = ", or mark its tools with `@tool`" if lacks == ["step"] else ""
        raise ConfigError(
            f"environment {name!r}: {found.__name__} has `{has[0]}` but no `{lacks[0]}`{hint}: "
            f"write `reset(seed, task)` and `step(action)`{tools}{place_of(found)}"
        )
    if lacking:
        raise ConfigError(f"environment {name!r}: lacks {', '.join(lacking)}; {_ADVICE}")


def names() -> tuple[str, ...]:
    """Return the names of the shipped environments that need no further package."""
    return tuple(_CLASSES)
