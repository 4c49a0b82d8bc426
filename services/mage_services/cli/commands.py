"""The commands of `mage` by name, and what a module of a command has."""

import argparse
from typing import Protocol

from mage_services.cli.looking import doctor, journal, report, track, view
from mage_services.cli.running import evaluate, play, replay, serve_environment, train
from mage_services.cli.settings import completion, config, keys, plan
from mage_services.cli.sweeps import ablate, sweep


class Command(Protocol):
    """What a module of a command has."""

    HELP: str
    """One sentence."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments; `parser` has a description already."""
        ...

    def run(self, given: argparse.Namespace) -> int:
        """Do what the command says and return the exit status.

        Raises:
            RunFailed: what had begun ended badly.
            MageError: the command cannot be carried out.
        """
        ...


COMMANDS: dict[str, Command] = {
    "train": train,
    "evaluate": evaluate,
    "play": play,
    "view": view,
    "report": report,
    "doctor": doctor,
    "replay": replay,
    "journal": journal,
    "track": track,
    "sweep": sweep,
    "ablate": ablate,
    "keys": keys,
    "serve-environment": serve_environment,
    "plan": plan,
    "config": config,
    "completion": completion,
}
