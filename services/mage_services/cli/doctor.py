"""`mage doctor`: print what is wrong with runs, since which step, and what to do.

With `--cluster` it examines the nodes of a Ray cluster before a run is started there.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mage_async.errors import ConfigError, RunError
from mage_async.results.run_directory import MAX_DEPTH, RunDirectory, find_runs
from mage_services.cli.options import add_number, add_set, positive
from mage_services.terminal import printing

HELP = "Say what is wrong with a run, or with a cluster, and what to do about it."
EXIT_FOUND = 1
"""Exit status if anything was found."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the runs, or the cluster."""
    parser.epilog = (
        "A run may be finished, interrupted or still going on. The exit status is 1 if anything is "
        "found. The signatures are explained in docs/doctor.md, the nodes in docs/cluster.md."
    )
    runs = f"a run, or a folder that holds runs, at most {MAX_DEPTH} levels below it"
    parser.add_argument("run_dir", type=Path, nargs="*", help=runs)
    cluster = "look at the nodes of a Ray cluster instead: `auto`, or HOST:PORT of its head"
    parser.add_argument("--cluster", metavar="ADDRESS", help=cluster)
    parser.add_argument(
        "--config", help="with --cluster: what is to be trained (default: quickstart)"
    )
    actors = "with --cluster: actor processes (default: as of `mage train`)"
    add_number(parser, "--actors", actors, type=positive)
    add_set(parser, "with --cluster: change a key")


def run(given: argparse.Namespace) -> int:
    """Print the findings of every run, or of the cluster; return 1 if there are any, else 0.

    Raises:
        ConfigError: neither runs nor a cluster are named, or both are; or the configuration cannot
            run on a cluster.
        RunError: a named folder has no run or cannot be read, or the cluster cannot be reached.
    """
    if bool(given.run_dir) == bool(given.cluster):
        raise ConfigError("give runs, or --cluster ADDRESS")
    if given.run_dir and (given.config or given.set or given.actors is not None):
        raise ConfigError("--config, --actors and --set need --cluster; a run has its own")
    return _nodes(given) if given.cluster else _all_runs(given)


def _nodes(given: argparse.Namespace) -> int:
    """Print the faults of the nodes of a cluster; return 1 if there are any, else 0."""
    from mage_async.assembly import check
    from mage_async.config import config_file
    from mage_async.config.defaults import default_actors
    from mage_async.doctor.cluster_faults import faults_of
    from mage_async.pages.charts import counted
    from mage_services.cluster.node_facts import examine
    from mage_services.cluster.placement import check as check_placed
    from mage_services.processes.child_process import waiting_notice

    config = config_file.load(config_file.find(given.config), given.set)
    check(config)
    check_placed(config)
    began = time.monotonic()
    with waiting_notice(f"the nodes of {given.cluster}"):
        facts, needs = examine(given.cluster, config, given.actors or default_actors(config))
    faults = faults_of(facts, needs)
    nodes = counted(1 + len(facts.others) + len(facts.silent), "node")
    seconds = time.monotonic() - began
    print(f"{given.cluster}: {nodes} in {seconds:.1f} s, {counted(len(faults), 'fault')}")
    for fault in faults:
        print(f"  {fault}")
    if needs.size_error:
        print(f"  note: room for the weights was not checked: {needs.size_error}")
    return EXIT_FOUND if faults else 0


def _all_runs(given: argparse.Namespace) -> int:
    """Print the findings of every run; return 1 if there are any, else 0."""
    from mage_async.doctor import examine
    from mage_async.pages.charts import counted
    from mage_async.results.progress import before_first_step, printable
    from mage_async.results.run_files import read_document, read_lines, read_records
    from mage_services.processes.run_lock import is_held

    num_found = 0
    with printing():
        for place in _runs(given.run_dir):
            records = read_records(place)
            findings = examine(records)
            lines, is_alive = [], is_held(place.lock)
            last, steps = len(records.metrics), records.config.learner.steps
            if not last:
                times, events = read_document(place.times), read_lines(place.events)
                lines = before_first_step(times, events, is_alive, time.time())
            elif is_alive is not None and records.evaluation.get("version") != steps:
                left = "" if last < steps else ", before its final evaluation"
                lines = [
                    f"it has trained {last} of {steps} steps, and goes on"
                    if is_alive
                    else f"it ended after step {last} of {steps}{left}: go on with "
                    f"`{place.resume_command}`"
                ]
            # Lines without "note: " only say how far the run is.
            num_notes = sum(line.startswith("note: ") for line in lines)
            num_found += len(findings) + num_notes
            counts = [counted(len(records.metrics), "step"), counted(len(findings), "finding")]
            counts += [counted(num_notes, "note")] if num_notes else []
            print(f"{place.root}: {', '.join(counts)}")
            for line in (*(finding.sentence() for finding in findings), *map(printable, lines)):
                print(f"  {line}")
    return EXIT_FOUND if num_found else 0


def _runs(roots: Sequence[Path]) -> Iterator[RunDirectory]:
    """Yield the runs that are named, and those below named folders that are no runs themselves.

    Raises:
        RunError: a folder has no run, or does not exist, or this user may not read it.
    """
    for root in roots:
        found = find_runs(root).values()
        if not found:
            name = RunDirectory(root).config.name
            raise RunError(
                f"{root}: neither a run nor a folder with runs: no {name} in it, nor at most "
                f"{MAX_DEPTH} levels below it"
            )
        yield from found
