"""`mage play`: play a trial in the agent's place, or watch the agent play."""

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.errors import RunFailed
from mage_async.results.run_directory import RunDirectory
from mage_services.cli.options import add_checkpoint, add_number, positive

if TYPE_CHECKING:
    from mage_async.trials.human_play import HumanPrompt

HELP = "Play a trial in the agent's place, then watch the agent play the same task."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and the trial."""
    parser.epilog = "The task, or the opponent, is hidden. With --watch only the agent plays."
    parser.add_argument("run_dir", type=Path)
    add_checkpoint(parser)
    parser.add_argument("--watch", action="store_true", help="let the agent play")
    member = (
        "the task or opponent that is hidden (any held-out one); or a version that the run has "
        "kept as an opponent, such as policy-20"
    )
    parser.add_argument("--member", metavar="NAME", help=member)
    add_number(parser, "--seed", "seed of the task's chance events (default: a new one)")
    add_number(
        parser,
        "--episodes",
        "episodes of the trial (default: as in training)",
        type=positive,
        metavar="K",
    )


def run(given: argparse.Namespace) -> int:
    """Play one trial, and print its rewards.

    Raises:
        RunFailed: the person left in the middle of the trial.
        RunError: the run has no policy, or has not kept the weights of the opponent.
        ConfigError: there is no such member.
    """
    # An error names the folder as it was typed.
    RunDirectory(given.run_dir).check_policy()
    try:
        _play(RunDirectory(given.run_dir.resolve()), given)
    # The engine has a task group, which wraps exceptions in a group; `except*` also takes single
    # ones.
    except* (KeyboardInterrupt, EOFError):
        print()
        raise RunFailed("left in the middle of a trial") from None
    return 0


def _play(run: RunDirectory, given: argparse.Namespace) -> None:
    """Play the trial in the terminal, first by the person and then by the agent."""
    import uvloop

    from mage_async.tasks.league import version_of
    from mage_async.trials.human_play import episode_lines, reward_table, whole_text
    from mage_services.actor.play_session import play_person_and_agent, prepare
    from mage_services.weights.weight_store import WeightFiles

    session = prepare(run, given.member, given.seed, given.episodes, given.checkpoint)
    task, ask = session.task, None if given.watch else ask_in_terminal
    playing = play_person_and_agent(session.make, task, WeightFiles(run.weights), ask)
    rewards, trial = uvloop.run(playing)
    print(f"\nthe agent (version {session.version}) on the same task, {task.member}:")
    is_duel = version_of(task.member) is not None  # the opponent is a past policy
    # `episode_lines` has the agent's actions alone. A person who watches two policies sees the
    # agent's whole context, which also shows the opponent's actions.
    print(whole_text(trial, session.chat) if given.watch and is_duel else episode_lines(trial))
    if rewards:
        print(reward_table(rewards, trial.episode_rewards()))


def ask_in_terminal(prompt: "HumanPrompt") -> str:
    """Show the possible actions, and return the line that the person types. Ctrl-C raises
    `KeyboardInterrupt` at once.
    """
    from mage_async.trials.human_play import shown

    # `uvloop.run` handles Ctrl-C on the event loop, which `input` blocks.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(f"[{shown(prompt.choices)}] > ")
    finally:
        signal.signal(signal.SIGINT, before)
