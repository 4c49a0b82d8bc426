"""`mage completion SHELL`: print a script that completes `mage` in a shell."""

import argparse
from pathlib import Path

HELP = "Print a script that completes commands, options and files in a shell."
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the shell."""
    parser.epilog = (
        'For bash: eval "$(mage completion bash)" in ~/.bashrc; for zsh: mage completion zsh > '
        "_mage in a folder of fpath; for tcsh: mage completion tcsh > FILE, and source FILE."
    )
    parser.add_argument("shell", choices=SHELLS)


def run(given: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from mage_services.cli.main import command_tree

    tree = command_tree()
    commands = next(each for each in tree._actions if isinstance(each, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.type is Path or action.dest == "config":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(tree, given.shell))
    return 0
