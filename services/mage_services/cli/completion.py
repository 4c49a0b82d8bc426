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
    # argparse has no public way to list the arguments of a parser.
    commands = next(each for each in tree._actions if isinstance(each, argparse._SubParsersAction))
    known = _words()
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in known:
                files = shtab.Optional.FILE if action.dest == "config" else []
                action.choices = [*known[action.dest], *files]
            elif action.type is Path:
                action.complete = shtab.FILE
    print(shtab.complete(tree, given.shell))
    return 0


def _words() -> dict[str, list[str]]:
    """Return the possible values of some arguments, by the argument's name (`dest`)."""
    from mage_async.config import config_file
    from mage_async.config.configuration_page import key_names, sections
    from mage_async.config.presets import presets
    from mage_async.methods.catalogue import METHODS

    tables = sections()
    keys = key_names(tables)
    return {
        "config": config_file.shipped(),
        "method": sorted({*presets(), *METHODS}),
        "section": [*(each.path for each in tables if each.path), *keys],
        "set": [f"{key}=" for key in keys],
    }
