"""`python -m mage_async.join`, also `mage actor --connect ADDRESS`: join a running learner."""

import argparse
from pathlib import Path

from mage_async.launch import become


def main() -> None:
    """Check the arguments, then become an actor."""
    parser = argparse.ArgumentParser(
        prog="mage actor",
        description="Play for a learner that runs elsewhere, until it ends or until Ctrl-C, which "
        "gives its groups back at once. The configuration, the model's files and the weights come "
        "from the learner.",
    )
    parser.add_argument(
        "--connect", required=True, metavar="ADDRESS", help="the learner's transport.address"
    )
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="with learner.key and actor.key_secret"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="end unless the learner has this configuration"
    )
    parser.add_argument("--name", metavar="NAME", help="for the screen; one actor a name (HOST-…)")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where files are fetched to, and kept (temporary)"
    )
    parser.add_argument(
        "--patience", type=float, metavar="S", help="end after so long without a learner (600)"
    )
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    become(
        "mage_services.actor.remote_actor", *(f"--{name}={value}" for name, value in given.items())
    )


if __name__ == "__main__":
    main()
