"""`mage config`: print every key of the configuration, with its default and meaning."""

import argparse

HELP = "Explain every key of the configuration, with its default."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the section or key."""
    parser.epilog = (
        "In brackets are the defaults of a tiny policy (tiny), of such a policy with an "
        "environment of your own (own class), and of a pretrained policy on processor cores (CPU) "
        "or a GPU. `mage train --print-config` prints the configuration that a run would have."
    )
    text = "a section, such as learner.correction, or a key, such as learner.steps (default: all)"
    parser.add_argument("section", nargs="?", default="", metavar="SECTION", help=text)


def run(given: argparse.Namespace) -> int:
    """Print the keys of a section, or of all, or one key.

    Raises:
        ConfigError: there is no such section or key.
    """
    from mage_async.config.configuration_page import as_lines, sections

    print("\n".join(as_lines(sections(given.section))))
    return 0
