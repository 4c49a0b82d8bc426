"""Run the `mage` command line, and print the error of a command without a traceback.

Without a command `mage` trains: `mage --config scout` is `mage train --config scout`. Building the
tree imports no torch, so that help is quick; a command imports what it computes with when it runs.
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from mage_async import __version__
from mage_async.errors import MageError, RunFailed
from mage_async.user_modules import did_you_mean
from mage_services.cli.options import suggested_assignments
from mage_services.terminal import printing

COMMANDS = {
    name: import_module(f"mage_services.cli.{name.replace('-', '_')}")
    for name in (
        *("new", "check", "train", "evaluate", "adapt", "play", "chat", "serve", "push"),
        *("view", "report", "doctor", "replay", "journal", "track", "sweep", "ablate"),
        *("keys", "serve-environment", "plan", "config", "completion"),
    )
}
"""Modules of the commands, by name. Each has `HELP`, one sentence for `mage --help`;
`add_arguments(parser)`, which declares its arguments; and `run(given)`, which carries the command
out and returns the exit status, or raises a `MageError`: `RunFailed` if work had begun."""
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 128 + signal.SIGINT
"""Exit statuses: 1 if a command failed after work had begun, 2 if it could not begin, 130 after
Ctrl-C.
"""

NOISY_ON_IMPORT = ("torchao", "torch.utils._pytree")
"""Loggers of libraries that warn about themselves when transformers imports torchao, if that is
installed: of compiled files that do not load here, and of deprecated calls. A command shows only
their errors; the logs of a run's processes have the warnings too."""


class Parser(argparse.ArgumentParser):
    """Parse arguments, and report an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Show what is wrong with the arguments, and end with status 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def main(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, and return its exit status.

    A `MageError`, or a `PermissionError` of a path, becomes one line on stderr. The status is then
    1 if work had begun, else 2. If the reader of stdout leaves early, as `head` does, the
    command ends without an error. Ctrl-C ends it with one line and status 130.
    """
    for name in NOISY_ON_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
    tree, arguments = command_tree(), _with_command(arguments)
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        tree.error(f"no command {arguments[0]!r}{did_you_mean(arguments[0], COMMANDS)}")
    given, unknown = tree.parse_known_args(arguments)
    if unknown:
        given.parser.error(f"unknown: {' '.join(unknown)}{suggested_assignments(given, unknown)}")
    status, prefix = 0, "mage" if given.command == "train" else f"mage {given.command}"
    try:
        with printing():
            status = given.run(given)
    except* (MageError, PermissionError) as group:
        from mage_services.processes.process import first_failure

        error = first_failure(group)
        status = EXIT_FAILED if isinstance(error, RunFailed) else EXIT_USAGE
        # Before Python 3.14, even `Path.exists` raises a `PermissionError` below a folder that this
        # user may not enter.
        advice = "" if isinstance(error, MageError) else "; ask its owner, or take another path"
        print(f"{prefix}: {error}{advice}", file=sys.stderr)
    except* KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        print(f"{prefix}: ended by Ctrl-C", file=sys.stderr)
    return status


def leave(status: int) -> NoReturn:
    """End this process, even if a user's environment has started a thread that does not end."""
    if threading.active_count() > 1:
        from mage_services.processes.process import end_despite_threads

        end_despite_threads(status, partial(print, file=sys.stderr, flush=True))
    sys.exit(status)


def command_tree() -> argparse.ArgumentParser:
    """Return the parser of all commands; it sets `command`, its `parser`, and the function to
    `run`.
    """
    tree = Parser(
        prog="mage",
        description="Train a language agent that learns to learn, and look at what it has learned.",
        epilog="`mage COMMAND --help` explains a command. Without a command `mage` trains, and "
        "takes the options of `mage train`.",
    )
    tree.add_argument("--version", action="version", version=f"mage_async {__version__}")
    commands = tree.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(parser)
        parser.set_defaults(run=command.run, parser=parser)
    return tree


def _with_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with "train" in front if they name no command."""
    first = arguments[0] if arguments else ""
    is_option = first.startswith("-") and first not in ("-h", "--help", "--version")
    return ["train", *arguments] if is_option or not first else list(arguments)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
