"""Make keys: what `mage_async.keys` becomes."""

import argparse
import sys
from pathlib import Path

from mage_async.errors import MageError
from mage_services.transport.authentication import make_keys


def main() -> None:
    """Make the keys, and say which file goes where; no key is printed."""
    parser = argparse.ArgumentParser(description="Make keys.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    try:
        make_keys(directory)
    except MageError as error:
        print(f"mage keys: {error}", file=sys.stderr)
        sys.exit(2)
    print(
        f"{directory}: learner.key, learner.key_secret, actor.key, actor.key_secret\n"
        f'the learner: transport.keys = "{directory}"; '
        "an actor's machine: copies of learner.key and actor.key_secret, nothing else"
    )


if __name__ == "__main__":
    main()
