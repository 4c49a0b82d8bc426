"""`mage chat RUN`: talk with a run's policy in the terminal."""

import argparse
from pathlib import Path

from mage_services.cli.options import add_checkpoint, add_number, add_set, amount, positive

HELP = "Talk with a run's policy, which remembers what was said."
COMMANDS = (
    "/reset begins another conversation, /quit or Ctrl-D ends, /help prints this line; "
    "a line with a space before the slash goes to the policy"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and how words are sampled."""
    parser.epilog = (
        "The policy answers as in training: to the observation of an environment, with an action. "
        f"Commands: {COMMANDS}."
    )
    parser.add_argument("run_dir", type=Path)
    add_checkpoint(parser)
    tokens = (
        "largest number of tokens of an answer, which may then be any text (default: answers are "
        "legal actions if these are the same in every turn, and otherwise any text of at most "
        "transcript.max_action_tokens)"
    )
    add_number(parser, "--max-tokens", tokens, type=positive)
    temperature = "temperature; 0 is greedy (default: that of training)"
    add_number(parser, "--temperature", temperature, type=amount, metavar="T")
    add_set(parser, "change one key, such as engine.max_tokens=8192")


def run(given: argparse.Namespace) -> int:
    """Answer lines until the end of the input."""
    from mage_async.errors import ContextFull
    from mage_async.results.run_directory import RunDirectory
    from mage_services.api.policy import Policy

    policy = Policy(RunDirectory(given.run_dir.resolve()), given.set, given.checkpoint)
    print(f"version {policy.version} of {given.run_dir.name}; /help lists the commands")
    with policy.chat() as chat:
        while True:
            try:
                words = input("> ")
                if words == "/quit":
                    return 0
                if words == "/reset":
                    chat.reset()
                elif words.startswith("/"):
                    unknown = "" if words == "/help" else f"there is no command {words!r}: "
                    print(f"{unknown}{COMMANDS}")
                elif words:
                    sampling = {"max_tokens": given.max_tokens, "temperature": given.temperature}
                    print(chat(words, **sampling))
            except ContextFull as error:
                print(f"{error} (/reset begins another conversation)")
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
