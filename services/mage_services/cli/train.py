"""`mage train`: resolve the configuration, then do what `mage.train` does in Python."""

import argparse
import json
import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.errors import ConfigError
from mage_services.cli.options import add_checkpoint, add_config, add_number, add_set

if TYPE_CHECKING:
    from mage_async.config.schema import Config

HELP = "Train a language agent: actors play, a learner trains, and a report is written."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.epilog = (
        "`mage config` explains the keys of a configuration. A run that was stopped goes on with "
        "`mage train --resume --run-dir DIR`."
    )
    add_config(parser)
    actors = (
        "actor processes (default: 4, or 1 with a pretrained policy; of a resumed run, as many as "
        "before)"
    )
    add_number(parser, "--actors", actors)
    add_number(parser, "--learner", "the same as --set learner.ranks=N")
    cluster = (
        "start the processes on a Ray cluster: `auto` on one of its nodes, or HOST:PORT of its "
        "head (docs/cluster.md)"
    )
    parser.add_argument("--cluster", default="", metavar="ADDRESS", help=cluster)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run is written")
    add_set(parser, "change one key of the configuration; can be given several times")
    # Names are not listed: that would import every method, and numpy with them.
    method = (
        "set the keys of a published method (mage_paper, lamer_paper, grpo and others of "
        "docs/methods.md), or of a module:Class of your own, before --set"
    )
    agent = (
        "train a program that calls a model: a function (task, episode, base_url, api_key) that "
        "returns a reward (docs/agents.md)"
    )
    agents = parser.add_mutually_exclusive_group()
    agents.add_argument("--agent", metavar="MODULE:FUNCTION", help=agent)
    command = 'the same for a command, such as "python agent.py --task {task}"'
    agents.add_argument("--agent-command", metavar="COMMAND", help=command)
    url = "the same for a server of yours on this machine that plays an episode for each POST"
    agents.add_argument("--agent-url", metavar="URL", help=url)
    parser.add_argument("--method", metavar="NAME", help=method)
    add_number(parser, "--seed", "the same as --set seed=N")
    resume = (
        "go on from --run-dir's checkpoint; with --config, begin if there is no run there yet, or "
        "one that failed before it had a policy, so that a job can be started again by the same "
        "command"
    )
    parser.add_argument("--resume", action="store_true", help=resume)
    origin = (
        "begin a new run with the configuration of this one and the weights of its --checkpoint; "
        "the optimizer and the number of steps begin anew"
    )
    parser.add_argument("--from", dest="origin", type=Path, metavar="RUN_DIR", help=origin)
    add_checkpoint(parser, "of --from: newest, best, or the number of a step (default: newest)")
    whole = "print the whole configuration and end"
    parser.add_argument("--print-config", action="store_true", help=whole)


def run(given: argparse.Namespace) -> int:
    """Train to the end, or print the configuration.

    Returns:
        0; `EXIT_HALTED` if the doctor ended the run; 128 + N if signal N did.

    Raises:
        ConfigError: the configuration cannot be run as written, or not on this system.
        RunError: the directory holds another run, is in use or cannot be written, or holds no run
            to resume.
        RunFailed: the run failed after it had begun.
    """
    from mage_services.processes.child_process import (
        die_with_parent,
        ending_descendants,
        waiting_notice,
    )

    die_with_parent()  # the parent may be a sweep or an ablation
    # On a busy machine the imports alone, torch among them, may take a minute.
    with (
        waiting_notice("imports and the configuration"),
        redirect_stdout(sys.stderr) if given.print_config else nullcontext(),
    ):
        from mage_async.assembly import check_keys
        from mage_async.config import config_file
        from mage_async.results.run_directory import RunDirectory
        from mage_async.results.run_files import read_document
        from mage_services.api.start_to_report import start_run
        from mage_services.terminal import CountedOutput, lasting_output

        # `_config` sets `given.resume` to False if there is nothing to go on with.
        is_retried = given.resume
        config = _config(given)  # what an imported class prints goes to stderr
        if note := config_file.note_on_staleness(config, given.method):
            print(note, file=sys.stderr)
        if given.print_config:
            check_keys(config)
    if given.print_config:
        print(config_file.dump(config), end="")
        return 0
    actors = given.actors
    if given.origin and actors is None:  # as many as that run
        actors = read_document(RunDirectory(given.origin).launch).get("actors")
    with lasting_output(), ending_descendants():
        _, code = start_run(
            config,
            run_dir=given.run_dir,
            actors=actors,
            is_resumed=given.resume,
            is_retried=is_retried,
            cluster=given.cluster,
            say=partial(print, file=sys.stdout, flush=True),
            printed=CountedOutput(sys.stdout),
        )
    return code


def _config(given: argparse.Namespace) -> "Config":
    """Resolve the configuration of the run.

    A run's configuration is resolved here and nowhere else: every process of the run receives the
    result. A resumed run starts from the configuration that it recorded.

    Raises:
        ConfigError: a key is wrong, or options contradict one another.
        RunError: the run of `--from` has no policy, or not that checkpoint; or there is no run to
            resume.
    """
    from mage_async.config import config_file
    from mage_async.results.run_directory import RunDirectory
    from mage_services.api.configuration import resumed_config

    # The last assignment to a key holds. So --set has precedence over --agent, and --seed and
    # --learner have precedence over --set.
    assignments = [*given.set]
    assignments += [] if given.seed is None else [f"seed={given.seed}"]
    if given.agent is not None:
        assignments.insert(0, f"environment.name=agent:{given.agent}")
    for option, value in (("command", given.agent_command), ("url", given.agent_url)):
        if value is not None:
            assignments.insert(0, f"environment.options.{option}={json.dumps(value)}")
            assignments.insert(0, f"environment.name=agent:{option}")
    assignments += [] if given.learner is None else [f"learner.ranks={given.learner}"]
    if given.origin:
        return _config_from(given, assignments)
    if given.checkpoint != "newest":
        raise ConfigError(
            f"--checkpoint {given.checkpoint} is for --from RUN_DIR, which begins a new run: "
            "--resume goes on from the newest checkpoint alone"
        )
    if given.resume and given.config is not None and given.run_dir is not None:
        recorded = RunDirectory(given.run_dir)
        given.resume = recorded.has_begun and recorded.config.is_file()
        if not given.resume and recorded.config.is_file():
            print(
                f"{given.run_dir} has neither a policy nor a step to go on with: the run begins "
                "anew with --config"
            )
        if given.resume:
            print(f"{given.run_dir} goes on with its own configuration: --config is not read")
            # The kind that the run recorded in place of "auto" may lack a key of it, and the run
            # keeps the policy that it began with.
            assignments = [each for each in assignments if not each.startswith("warm_start")]
    if not given.resume:
        file = config_file.find(given.config)
        if note := config_file.note_on_preset(file, assignments, given.method):
            print(note, file=sys.stderr)
        return config_file.load(file, assignments, given.method)
    if given.run_dir is None:
        raise ConfigError("--resume needs --run-dir, the run to go on with")
    return resumed_config(given.run_dir, assignments, given.method)


def _config_from(given: argparse.Namespace, assignments: list[str]) -> "Config":
    """Return the configuration of the run of `--from`, with its checkpoint as the initial policy.

    Raises:
        ConfigError: another configuration is named too.
        RunError: the run has no policy, or not that checkpoint.
    """
    from mage_async.config import config_file
    from mage_async.results.run_directory import RunDirectory
    from mage_services.actor.play_session import chosen_policy

    if given.resume or given.config:
        raise ConfigError(
            "--from begins a new run with the configuration of another one: leave out "
            f"{'--resume' if given.resume else '--config'}"
        )
    run = RunDirectory(given.origin.resolve())
    run.check_policy()
    recorded = config_file.load_recorded(run.config)
    policy, _ = chosen_policy(run, recorded, given.checkpoint)
    source = f"policy.source={json.dumps(str(policy))}"
    return config_file.load_recorded(run.config, [source, *assignments], given.method)
