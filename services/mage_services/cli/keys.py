"""`mage keys new`: make keys for a run on several machines."""

import argparse
from pathlib import Path

HELP = "Make the keys with which processes of a run on several machines authenticate one another."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder of the keys."""
    parser.epilog = (
        "There is a pair of keys for the learner and one for the actors; only their owner may read "
        "the files (mode 0600). A run uses them by transport.keys = DIR; `mage train --cluster` "
        "brings learner.key and actor.key_secret to the nodes of actors. Public keys of further "
        "actors may be put into the same folder."
    )
    parser.add_argument("action", choices=("new",), help="`new` makes two pairs of keys")
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path("keys"),
        metavar="DIR",
        help="folder to write (default: keys)",
    )


def run(given: argparse.Namespace) -> int:
    """Make the keys, and print the names of their files, without the keys, and which files other
    machines need.

    Raises:
        ConfigError: the keys cannot be written there.
    """
    from mage_services.transport.access_control import make_keys

    directory = given.directory
    make_keys(directory)
    print(
        f"{directory}: learner.key, learner.key_secret, actor.key, actor.key_secret\n"
        f'a run uses them by transport.keys = "{directory}"; `mage train --cluster` brings '
        "learner.key and actor.key_secret to the nodes of actors, nothing else"
    )
    return 0
