"""Declare options that several commands have."""

import argparse
from typing import Any

MAX_PORT = 65_535
"""Largest number of a TCP port."""


def add_config(parser: argparse.ArgumentParser, *names: str, **more: Any) -> None:
    """Declare the configuration file, as the option `--config`.

    Args:
        names: Another name of the argument; without leading dashes it is a positional one.
        more: Further arguments of `add_argument`.
    """
    text = "a TOML file, or the name of a shipped one (quickstart)"
    parser.add_argument(*(names or ("--config",)), help=text, **more)


def add_set(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare `--set`, whose assignments are collected in a list."""
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=text)


def add_number(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    name: str,
    text: str,
    default: Any = None,
    **more: Any,
) -> None:
    """Declare an option whose value is a whole number, or a number of the `type` in `more`."""
    parser.add_argument(name, default=default, help=text, **{"type": int, "metavar": "N", **more})


def positive(text: str) -> int:
    """Parse a whole number above 0, as the `type` of an argument."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return number


def port(text: str) -> int:
    """Parse the number of a TCP port, 0 for a free one, as the `type` of an argument."""
    # Some event loops listen on the remainder of a larger number.
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 0 to {MAX_PORT}, 0 for a free port, got {text!r}"
        )
    return int(text)
