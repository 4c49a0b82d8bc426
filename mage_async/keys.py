"""`python -m mage_async.keys new [DIR]`, also `mage keys new`: keys for other machines."""

import argparse
from pathlib import Path

from mage_async.launch import become


def main() -> None:
    """Check the arguments, then make the keys."""
    parser = argparse.ArgumentParser(
        prog="mage keys",
        description="Make a learner's and an actor's pair of keys, each file for its owner alone. "
        "The learner finds them by transport.keys = DIR; an actor's machine needs copies of "
        "learner.key and actor.key_secret. Further actors' public keys may be put beside them.",
    )
    parser.add_argument("command", choices=("new",))
    parser.add_argument("directory", type=Path, nargs="?", default=Path("keys"), metavar="DIR")
    given = parser.parse_args()
    become("mage_services.cli.keys", str(given.directory))


if __name__ == "__main__":
    main()
