"""Declare options that several commands have."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
MAX_PORT = 65_535
"""Largest number of a TCP port."""
MAX_SUGGESTIONS = 3
"""Largest number of assignments that an error suggests."""


def add_config(parser: argparse.ArgumentParser, *names: str, **more: Any) -> None:
    """Declare the configuration file, as the option `--config`.

    Args:
        names: Another name of the argument; without leading dashes it is a positional one.
        more: Further arguments of `add_argument`.
    """
    text = "a TOML file, or the name of a shipped one (default: quickstart)"
    parser.add_argument(*(names or ("--config",)), help=text, **more)


def add_set(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare `--set`, whose assignments are collected in a list."""
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=text)


def suggested_assignments(given: argparse.Namespace, unknown: Sequence[str]) -> str:
    """Return " (did you mean `--set a.b=value`?)" for unknown arguments that assign a value to a
    key, "" for others.
    """
    if "set" not in given:
        return ""
    # The schema is not needed for a command line without a mistake.
    from mage_async.config.configuration_page import key_names, sections

    first, *rest = (each for each in unknown if each != "=")
    key, equals, value = first.removeprefix("--").partition("=")
    keys = key_names(sections())
    if not first.startswith("--") and not equals:  # `--set learner.steps 5`
        meant, value = [each for each in given.set if "=" not in each], first
        # `mage train guess:GuessNumber`, as `mage check` takes it.
        meant += ["environment.name"] if ":" in first and not meant else []
    else:  # `--steps 5`, `--steps=5` or `learner.steps=5`
        key = key.replace("-", "_")
        named = [each for each in keys if f".{each}".endswith(f".{key}")]
        # `--steps` means those of the run, not those of its warm start or of a method.
        meant = [each for each in named if not each.startswith(("warm_start.", "methods."))]
        meant = meant or named
        value = value or (rest[0] if rest and not rest[0].startswith("--") else "VALUE")
    shown = " or ".join(f"`--set {each}={value}`" for each in meant[:MAX_SUGGESTIONS])
    return f" (did you mean {shown}?)" if shown else ""


def add_number(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    name: str,
    text: str,
    default: Any = None,
    **more: Any,
) -> None:
    """Declare an option whose value is a whole number, or a number of the `type` in `more`."""
    parser.add_argument(name, default=default, help=text, **{"type": int, "metavar": "N", **more})


def add_checkpoint(parser: argparse.ArgumentParser, text: str = "") -> None:
    """Declare `--checkpoint`, which chooses a policy of a run (`chosen_checkpoint`)."""
    choice = text or "newest, best, or the number of a step that the run has kept (default: newest)"
    parser.add_argument(
        "--checkpoint", default="newest", type=_checkpoint, metavar="STEP", help=choice
    )


def _checkpoint(text: str) -> str:
    """Parse the choice of a checkpoint, as the `type` of an argument."""
    if text in ("newest", "best"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"must be newest, best, or the number of a step, got {text!r}"
        )
    return str(int(text))


def add_server(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare where a command listens, and how many of `what` it keeps at once."""
    host = "address to listen on (default: 127.0.0.1)"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    free = "port; 0 takes a free one (default: 8000)"
    parser.add_argument("--port", type=port, default=8000, help=free)
    add_number(
        parser, "--sessions", f"largest number of {what} at once (default: 64)", 64, type=positive
    )


def _parsed(text: str, kind: Callable[[str], T], accepts: Callable[[T], bool], expected: str) -> T:
    """Parse a number, as the `type` of an argument.

    Args:
        accepts: returns whether a number may be given.
        expected: the numbers that may be given, in words for the error.
    """
    with suppress(ValueError):
        if accepts(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")


def positive(text: str) -> int:
    """Parse a whole number above 0, as the `type` of an argument."""
    return _parsed(text, int, lambda number: number > 0, "a whole number above 0")


def amount(text: str) -> float:
    """Parse a number of at least 0, as the `type` of an argument."""
    return _parsed(text, float, lambda number: 0 <= number < float("inf"), "a number from 0")


def port(text: str) -> int:
    """Parse the number of a TCP port, 0 for a free one, as the `type` of an argument."""
    # Some event loops listen on the remainder of a larger number.
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 0 to {MAX_PORT}, 0 for a free port, got {text!r}"
        )
    return int(text)
