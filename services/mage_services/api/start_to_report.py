"""Carry a run from its checks to its report, and choose its exit status, which is 128 + N after
signal N; `mage train` and `mage.train` call this module.
"""

import asyncio
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, nullcontext, redirect_stdout, suppress
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

import mage_async
from mage_async.assembly import (
    check_context_length,
    check_keys,
    edit_note,
    edited,
    environment_of,
    own_sources,
    rungs_out_of_reach,
    with_warm_start,
)
from mage_async.config import config_file
from mage_async.config.defaults import DEFAULT_ACTORS, default_actors
from mage_async.config.schema import (
    Config,
    Embedded,
    FromData,
    FromScriptIfAny,
    FromWinStay,
    check_installed,
    check_source,
)
from mage_async.doctor import Doctor
from mage_async.errors import ConfigError, Halted, MageError, RunError, RunFailed
from mage_async.pages.report import render
from mage_async.plan.does_it_fit import check_words
from mage_async.policy.demonstrations import check_rows
from mage_async.results.run_directory import (
    RunDirectory,
    checkpoints,
    default_name,
    step_of,
)
from mage_async.results.run_files import (
    SOURCE_OF,
    VERSION_OF,
    Record,
    each_line,
    last_line,
    last_step,
    read_document,
    read_records,
    write_whole,
)
from mage_async.results.summary import best_checkpoint, summarise, write_summary
from mage_services.actor.preflight import run_preflight
from mage_services.actor.rehearsal_runner import rehearse_all
from mage_services.api.configuration import training_changes
from mage_services.engines.sglang.arguments import installed
from mage_services.processes.cores_and_memory import num_cores
from mage_services.processes.process import Runner, first_failure, unless_a_call_hangs
from mage_services.processes.run_lock import take_lock
from mage_services.processes.supervised_process import (
    ProcessSpec,
    RunningProcess,
    SupervisedProcess,
)
from mage_services.processes.supervisor import RecordedView, Supervisor, until_signalled
from mage_services.terminal import CountedOutput
from mage_services.terminal.plain_lines import View, make_view
from mage_services.tracking.tracker_worker import tracked, trackers_of
from mage_services.transport.access_control import actor_keys, keys_in, learner_keys, make_keys
from mage_services.transport.sockets import check_address, check_free, learner_address

EXIT_HALTED = 3
"""Exit status of a run that the doctor ended."""
LONG_STEPS = 5_000
"""Number of steps from which the end of a run is announced, because it takes seconds."""


def start_run(
    config: Config,
    *,
    run_dir: Path | None,
    actors: int | None,
    is_resumed: bool,
    is_retried: bool = False,
    say: Callable[[str], None],
    cluster: str = "",
    runner: Runner = asyncio.run,
    printed: CountedOutput | None = None,
    **more: Any,
) -> tuple[RunDirectory, int]:
    """Check the configuration, write the run directory, and train to the end.

    Args:
        run_dir: The run directory; None for a new folder of `runs/`.
        actors: Number of actors; None for the default number, or that of a resumed run's last
            start.
        is_retried: See `RunDirectory.check_is_new`.
        cluster: Address of a Ray cluster; "" for this machine.
        say: Called with each line for the user, until the run's own view begins.
        runner: Runs what is played before the run begins, and may cancel it.
        printed: Replaces stdout while a user's class is called before the run; None: prints of the
            class are shown.
        more: Further arguments of `run_to_end`.

    Returns:
        The run, and the exit status of `run_to_end`.

    Raises:
        ConfigError: the configuration cannot be run as written, or not on this system, or a package
            that it needs, such as a supported SGLang, is not installed.
        PolicyError: a new run has no source of its pretrained policy.
        RunError: the directory holds another run, is in use or cannot be written.
        RunFailed: the run failed after it had begun.
    """
    # On other systems a killed supervisor leaves its processes running (`PR_SET_PDEATHSIG`), and
    # Python may lack calls of the journal (`os.fdatasync`).
    if sys.platform != "linux":
        raise ConfigError(
            f"a run needs Linux, which ends its processes when their parent dies, and this system "
            f"is {platform.system()}: start the run on a machine or in a container with Linux"
        )
    check_start(config, is_resumed=is_resumed)
    # Before the run's directory is written, so that the next try finds it new. On a cluster the
    # nodes need SGLang, and this machine does not.
    if config.engine.kind == "sglang" and not cluster:
        installed()
    if cluster:
        from mage_services.cluster import connection, placement

        placement.check(config)
        connection.check_address(cluster)
    else:
        _check_address(config)
    name = default_name(config.environment.name, datetime.now())
    directory = RunDirectory((run_dir or Path("runs") / name).resolve())
    if not is_resumed and run_dir is not None:
        # This is checked again under the lock. If the directory cannot be read, the error
        # comes from the first attempt to write there, below.
        with suppress(OSError):
            directory.check_is_new(is_retried=is_retried)
    resolved = with_warm_start(config)  # "auto" replaced by the kind that it stands for
    if config.warm_start and not resolved.warm_start:
        say(f"warm_start: none, because {config.environment.name} plays its own episodes")
    if sentence := rungs_out_of_reach(config):
        say(sentence)
    given, default = config.warm_start, FromScriptIfAny()
    # Two keys of the kind "auto" have no effect if it stands for the kind "win_stay".
    if isinstance(given, FromScriptIfAny) and isinstance(resolved.warm_start, FromWinStay):
        for key in ("gate", "max_steps"):
            if getattr(given, key) != getattr(default, key):
                say(
                    f"warm_start.{key}: not used, because {config.environment.name} has no `script`"
                )
    config = resolved
    if actors is not None and actors < 1:
        raise ConfigError(f"actors must be at least 1, got {actors}")
    if actors is None and is_resumed:
        actors = read_document(directory.launch).get("actors")
    num_actors = actors or default_actors(config)
    cores = num_cores()
    # The default number of actors gets no warning, even on fewer cores.
    if isinstance(config.engine, Embedded) and num_actors > max(cores, DEFAULT_ACTORS):
        say(f"{num_actors} actors: each computes, and this process may use {cores} cores")
    try:
        # A class may change the folder, from which processes import it.
        with chdir("."), nullcontext() if printed is None else redirect_stdout(printed):
            rehearse_all(config, say, runner)
            check_length = partial(check_context_length, config)
            unless_a_call_hangs(check_length, config.environment.step_deadline_s, say, runner)
    finally:
        if printed is not None and printed.num_lines:
            say(f"rehearsal: {printed.sentence()}")
    sources = own_sources(config)
    if not is_resumed:  # a resumed run keeps the policy that it began with
        # The result has longer deadlines and a smaller batch, if the policy needs them.
        config = run_preflight(config, num_actors, say, runner)
    elif directory.policy.is_dir():  # the class may have been edited
        check_words(config, directory.policy)
    with ExitStack() as lock:
        try:
            if run_dir is None:
                directory = _make_new_directory(directory)
            else:
                directory.root.mkdir(parents=True, exist_ok=True)
            lock.callback(os.close, take_lock(directory))
            for each in edited(read_document(directory.launch).get("sources", {}), sources):
                say(edit_note(each))
            if not is_resumed:
                directory.check_is_new(is_retried=is_retried)
            _write_start(directory, config, num_actors, sources)
        except OSError as error:
            raise RunError(
                f"{directory.root} cannot be written: {error.strerror}; choose another --run-dir, "
                "or make room"
            ) from error
        code = run_to_end(directory, config, num_actors=num_actors, cluster=cluster, **more)
    return directory, code


def _make_new_directory(directory: RunDirectory) -> RunDirectory:
    """Make the directory of a run whose caller named none. Its name gets a number at the end if
    another run that was started in the same second has made a directory of this name.
    """
    first = directory.root
    first.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        root = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            root.mkdir()
            return RunDirectory(root)
    raise AssertionError("`count` has no end")


def check_start(config: Config, *, is_resumed: bool = False) -> None:
    """Make the checks of a start that play no trial; `mage check` makes them too.

    Raises:
        ConfigError: the configuration cannot be run as written, or a package is not installed.
        PolicyError: a new run has no source of its pretrained policy.
    """
    check_keys(config)
    trackers_of(config.tracking)  # raises if a tracker's package is not installed
    check_installed(config.learner)
    if not is_resumed:
        check_source(config.policy)
        if isinstance(config.warm_start, FromData):
            check_rows(config.warm_start.path)


def _write_start(
    directory: RunDirectory,
    config: Config,
    num_actors: int,
    sources: Mapping[str, str],
) -> None:
    """Write the resolved configuration, the number of actors, the versions that run, with those of
    the user's own classes (`own_sources`), and the bounds of the return.
    """
    directory.logs.mkdir(exist_ok=True)
    directory.checkpoints.mkdir(exist_ok=True)
    checkout = Path(mage_async.__file__).parents[1]
    versions = _versions(checkout)
    facts = environment_of(config).facts
    # The doctor of a recorded run needs the bounds, and loads no class of the user to ask for them.
    bounds = {name: getattr(facts, name) for name in ("min_return", "max_return", "units")}
    launch = {
        "actors": num_actors,
        "versions": versions,
        "sources": sources,
        "environment": bounds,
    }
    if changes := _changes(directory, config, sources, versions):
        launch["changes"] = changes
    write_whole(directory.config, config_file.dump(config))
    write_whole(directory.launch, json.dumps(launch) + "\n")


def _changes(
    run: RunDirectory, config: Config, sources: Mapping[str, str], versions: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the keys that this start and earlier ones changed after a step, with both values, the
    classes that were edited, with the digests of both sources, and the versions that changed.
    """
    launch = read_document(run.launch)
    changes, before = list(launch.get("changes", [])), launch.get("sources", {})
    # `run_to_end` reports damaged lines, and the learner removes them.
    if step := last_step(run.metrics):
        recorded = config_file.load_recorded(run.config, imports=False)
        changes += [
            {"step": step, "key": key, "was": was, "now": now}
            for key, was, now in (
                *training_changes(recorded, config),
                *(
                    (f"{SOURCE_OF}{name}", before[name], sources[name])
                    for name in edited(before, sources)
                ),
                *(
                    (f"{VERSION_OF}{name}", was, versions.get(name, "none"))
                    for name, was in launch.get("versions", {}).items()
                    if was != versions.get(name, "none")
                ),
            )
        ]
    return changes


LIBRARIES = ("torch", "transformers", "triton", "sglang")
"""Libraries whose versions are recorded, where they are installed."""


def _versions(checkout: Path) -> dict[str, str]:
    """Return the versions of Python, of this program and of libraries by name, and the git commit
    if the program runs from a checkout.

    Args:
        checkout: The folder in which this package lies. The commit of one with changes that were
            not committed ends with "-dirty".
    """
    found = {"python": platform.python_version(), "mage_async": mage_async.__version__}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    # An installed package may lie inside somebody else's checkout, but not at its root.
    if (checkout / ".git").exists() and shutil.which("git"):
        describe = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
        # Without tags: only the commit is described.
        described = subprocess.run([*describe, "--exclude=*"], capture_output=True, text=True)
        if described.returncode == 0:
            found["commit"] = described.stdout.strip()
    return found


Until = Callable[[Supervisor], Coroutine[Any, Any, int | None]]
"""Supervises a run until its end or until it is stopped; see `_supervise`."""
Site = tuple[str, Callable[[ProcessSpec], Awaitable[RunningProcess]]]
"""The place where the processes of a run live, this machine or the nodes of a Ray cluster: the
address of the learner, and the function that starts a process there.
"""


@contextmanager
def site_of(
    run: RunDirectory, config: Config, num_actors: int, cluster: str, say: Callable[[str], None]
) -> Iterator[Site]:
    """Set up the site of a run, and remove it at the end of the block.

    Args:
        cluster: Address of a Ray cluster; "" for this machine. For a cluster, keys are made if the
            configuration names none.

    Raises:
        ConfigError: the address, the keys or the cluster cannot be used.
        RunError: no socket can be made, or the cluster has no room.
    """
    if cluster:
        from mage_services.cluster.connection import joined
        from mage_services.cluster.placement import Placement

        keys = Path(config.transport.keys or run.root / "keys")
        if not config.transport.keys and not keys.exists():
            make_keys(keys)
        _check_key_folder(str(keys))
        with joined(cluster):
            placement = Placement(run, config, num_actors, keys.resolve(), say)
            placement.reserve()
            yield placement.address, placement.start
        return
    with learner_address(config.transport.address, run.root) as address:
        yield address, SupervisedProcess.start


def _check_address(config: Config) -> None:
    """Check the learner's address on this machine, and its keys.

    Raises:
        ConfigError: the address or the keys cannot be used.
        RunError: the address is in use.
    """
    address, keys = config.transport.address, config.transport.keys
    _check_key_folder(keys)
    if address != "ipc":
        check_address(address, has_keys=bool(keys))
        check_free(address)


def _check_key_folder(keys: str) -> None:
    """Check the folder of keys before any process starts; "" is no folder.

    Raises:
        ConfigError: keys of the learner or of an actor are missing or cannot be used.
    """
    keys_in(learner_keys, keys)
    keys_in(actor_keys, keys)


def run_to_end(
    run: RunDirectory,
    config: Config,
    *,
    num_actors: int,
    cluster: str = "",
    view: View | None = None,
    until: Until | None = None,
) -> int:
    """Supervise a run, whose lock the caller holds, to its end; then write its summary and report.

    Args:
        cluster: Address of a Ray cluster; "" for this machine.
        view: Shows the run; None for the terminal.
        until: See `_supervise`.

    Returns:
        0, `EXIT_HALTED`, or 128 + N if signal N ended the run.

    Raises:
        RunFailed: a process failed more often than its budget allows, or the summary and report
            cannot be written.
    """
    view = RecordedView(view or make_view(config, run, is_terminal=sys.stdout.isatty()), run)
    began, doctor = _seconds(), Doctor.of(config)
    doctor.note_warm_start(read_document(run.warm_start))
    earlier = read_document(run.summary)  # of the starts before a resumption
    damage: list[RunError] = []
    for record in each_line(run.metrics, damage.append):  # the steps before a resumed run's start
        doctor.step(record)
    for fault in damage:
        view.line(f"{fault}; the learner removes this line")
    with tracked(run, trackers_of(config.tracking), config.tracking.wait_s, view.line) as news:
        try:
            with site_of(run, config, num_actors, cluster, view.line) as (address, start):
                code = _supervise(
                    Supervisor(run, config, num_actors, address, view, doctor, start, news),
                    until,
                )
            costs = {name: seconds - began[name] for name, seconds in _seconds().items()}
            _finish(run, doctor, view, costs, earlier)
        except MageError as error:
            view.close(None)
            raise RunFailed(str(error)) from error
    return code


def _supervise(supervisor: Supervisor, until: Until | None = None) -> int:
    """Run the processes of a run to their end.

    Args:
        until: Supervises until the end, and returns the number of the signal that ended the run, or
            None. It is called on an event loop that leaves all signal handlers alone. None: the run
            ends at SIGINT, SIGTERM or SIGHUP, which are handled meanwhile.

    Returns:
        0, `EXIT_HALTED` if the doctor ended the run, or 128 + N if signal N did.
    """
    run, view = supervisor.run, supervisor.view
    number, halt = None, ""
    try:
        if until is None:
            number = uvloop.run(until_signalled(supervisor))
        else:  # asyncio, because uvloop would replace the caller's handling of SIGCHLD
            number = asyncio.run(until(supervisor))
    except* Halted as group:
        halt = str(first_failure(group))
    except* MageError as group:
        raise first_failure(group) from None
    finally:
        shutil.rmtree(run.shared_weights, ignore_errors=True)
        try:
            times = {"blocked_s": supervisor.time.seconds()}
            write_whole(run.supervisor, json.dumps(times) + "\n")
        except OSError as error:  # a full disk must not hide the reason why the run ended
            view.line(f"{run.supervisor} cannot be written: {error.strerror}")
    # Before the reason why the run ended, which `Relay` takes from the last line.
    if (steps := last_line(run.metrics).get("step", 0)) >= LONG_STEPS:
        view.line(f"the summary and the report of {steps:,} steps are made, which may take a while")
    if halt:
        view.line(f"{halt} Go on with `{run.resume_command}`")
        return EXIT_HALTED
    if number is None:
        return 0
    # The last process may take seconds to exit. A signal may arrive then, although the run is
    # complete.
    is_complete = read_document(run.evaluation).get("version") == supervisor.config.learner.steps
    what_is_left = (
        "all steps are trained, and the final sets are played"
        if is_complete
        else _what_a_resumed_run_does(run)
    )
    view.line(f"ended by {signal.Signals(number).name}; {what_is_left}")
    return 128 + number


def _what_a_resumed_run_does(run: RunDirectory) -> str:
    """Return the command that goes on with a run that was stopped, and the steps that it repeats.

    Raises:
        RunError: the metrics are damaged.
    """
    command = f"go on with `{run.resume_command}`"
    saved = checkpoints(run.checkpoints)
    first = step_of(saved[-1]) + 1 if saved else 1
    last = last_line(run.metrics).get("step", 0)
    if last < first:
        return command
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    newest = (
        f"the newest checkpoint is of step {first - 1}" if saved else "no checkpoint is written"
    )
    return (
        f"{command}, which first trains {steps} again, from the journal: nothing is lost; until "
        f"then {newest}, so `mage evaluate` and `mage play` have step {first - 1}"
    )


def _seconds() -> dict[str, float]:
    """Return the wall clock, and the CPU time of this process and of its ended children, in
    seconds, by the names of their differences in the summary.
    """
    # The first four times are user and system time, of the process and of its children.
    return {"wall_s": time.monotonic(), "processor_s": sum(os.times()[:4])}


def _finish(
    run: RunDirectory, doctor: Doctor, view: View, costs: Mapping[str, float], earlier: Record
) -> None:
    """Write the summary and the report of a run, finished or not.

    Args:
        costs: `wall_s` and `processor_s` of this start of the run.
        earlier: Summary of the starts before this one; empty for a new run.

    Raises:
        RunError: the disk is full, or a file of the run is damaged.
    """
    total = {name: seconds + (earlier.get(name) or 0.0) for name, seconds in costs.items()}
    records = read_records(run)  # once: a long run has hundreds of megabytes
    summary = summarise(run, **total, records=records)
    view.close(summary)
    place = shlex.quote(str(run.root))
    if doctor.findings:  # their lines are far up in the terminal
        found = ", ".join(f"{each.name} since step {each.onset}" for each in doctor.findings)
        view.line(f"doctor: found during the run: {found}; what to do: `mage doctor {place}`")
    for finding in doctor.conclude(records):
        view.line(f"doctor: {finding.sentence()}")
    if (best := best_checkpoint(run, records.config)) and best.reason:
        step = step_of(best.path)
        view.line(
            f"best checkpoint: step {step}: {best.reason}. Measure it: `mage evaluate {place} "
            f"--checkpoint {step}`; go on from it: `mage train --from {place} --checkpoint {step}`"
        )
    try:
        # The summary first: a page that cannot be made must not lose it.
        write_summary(run, summary)
        run.report.write_text(render(run, summary, records, doctor.findings), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"{run.root}: no summary and report can be written: {error.strerror}; make room, then "
            "--resume"
        ) from error
