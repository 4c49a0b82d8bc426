"""`mage actor --connect ADDRESS`: play for a learner that runs elsewhere."""

import argparse
from pathlib import Path

HELP = "Play for a learner that runs on another machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which learner is joined, and how."""
    parser.epilog = (
        "The actor plays until the learner ends or until Ctrl-C, which gives its groups back at "
        "once. The configuration, the model's files and the weights come from the learner."
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
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="end after so many seconds without a learner (600)",
    )


def run(given: argparse.Namespace) -> int:
    """Join the learner, and play until one of the two leaves."""
    import secrets
    import socket
    import tempfile

    import uvloop

    from mage_services.actor.remote_actor import say, until_told

    given.name = given.name or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    with tempfile.TemporaryDirectory(prefix="mage-actor-") as temporary:
        reason = uvloop.run(until_told(given, given.dir or Path(temporary)))
    say(f"{given.name} has ended: {reason}")
    return 0
