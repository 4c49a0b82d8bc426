"""`mage config [SECTION]`: every key of the configuration, with its default and what it means."""

import argparse

from mage_async.config.reference import as_lines, sections


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be asked for."""
    text = "a section such as learner or learner.correction (all)"
    parser.add_argument("section", nargs="?", default="", metavar="SECTION", help=text)


def run(given: argparse.Namespace) -> None:
    """Print the keys of a section, or of all.

    Raises:
        ConfigError: there is no such section.
    """
    print("\n".join(as_lines(sections(given.section))))
