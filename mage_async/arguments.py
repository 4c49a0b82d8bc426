"""Kinds of arguments of a command line, each refused with a sentence."""

import argparse


def positive(text: str) -> int:
    """A whole number above 0; for argparse's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return number
