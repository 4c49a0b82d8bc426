"""A run from its first process to its report: what `mage train` does after its checks."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from mage_async.config.schema import Config
from mage_async.doctor import Doctor
from mage_async.errors import Halted, MageError, RunError, RunFailed
from mage_async.pages.report import render
from mage_async.results.durable_files import write_whole
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines, read_records
from mage_async.results.summary import summarise, write_summary
from mage_services.engines.sglang.arguments import installed
from mage_services.processes.process import first_failure
from mage_services.processes.supervised_process import (
    ProcessSpec,
    RunningProcess,
    SupervisedProcess,
)
from mage_services.processes.supervisor import RecordedView, Supervisor, until_signalled
from mage_services.terminal.view import View, make_view
from mage_services.tracking.tracker_worker import tracked, trackers_of
from mage_services.transport.authentication import actor_keys, keys_in, learner_keys, make_keys
from mage_services.transport.sockets import check_address, ipc_address

EXIT_HALTED = 3
"""Exit status of a run that the doctor ended."""


Site = tuple[str, Callable[[ProcessSpec], Awaitable[RunningProcess]]]
"""Where the processes of a run live, on this machine or on the nodes of a Ray cluster: the address
of the learner, and the function that starts a process there.
"""


@contextmanager
def site_of(
    run: RunDirectory, config: Config, num_actors: int, cluster: str, say: Callable[[str], None]
) -> Iterator[Site]:
    """Set up the site of a run, and remove it in the end.

    Args:
        cluster: address of a Ray cluster; "" for this machine. On a cluster keys are made where
            the configuration names none.

    Raises:
        ConfigError: the address, the keys or the cluster cannot be used.
        RunError: no socket can be made, or the cluster has no room.
    """
    if cluster:
        from mage_services.cluster.connection import joined
        from mage_services.cluster.placement import Placement, check

        check(config)
        keys = Path(config.transport.keys or run.root / "keys")
        if not config.transport.keys and not keys.exists():
            make_keys(keys)
        _check_keys(str(keys))
        with joined(cluster):
            placement = Placement(run, config, num_actors, keys.resolve(), say)
            placement.reserve()
            yield placement.address, placement.start
        return
    _check_keys(config.transport.keys)
    is_ours = config.transport.address == "ipc"
    address = ipc_address(run.root) if is_ours else config.transport.address
    check_address(address, has_keys=bool(config.transport.keys))
    try:
        yield address, SupervisedProcess.start
    finally:
        if is_ours:
            shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


def _check_keys(keys: str) -> None:
    """Raise the error of unusable keys before any process starts."""
    keys_in(learner_keys, keys)
    keys_in(actor_keys, keys)


def run_to_end(
    run: RunDirectory,
    config: Config,
    *,
    num_actors: int,
    is_resumed: bool = False,
    cluster: str = "",
) -> int:
    """Supervise a run whose lock this process holds, then write its summary and report.

    Args:
        cluster: address of a Ray cluster; "" for this machine.

    Returns:
        0, `EXIT_HALTED`, or 128 + N where signal N ended the run.

    Raises:
        RunFailed: a process failed more often than its budget allows, or the summary and report
            cannot be written.
    """
    view = RecordedView(make_view(config, run, is_terminal=sys.stdout.isatty()), run)
    began, doctor = time.monotonic(), Doctor.of(config)
    for record in read_lines(run.metrics):  # the steps before the run was resumed
        doctor.step(record)
    with tracked(run, trackers_of(config.tracking), config.tracking.wait_s, view.line):
        try:
            with site_of(run, config, num_actors, cluster, view.line) as (address, start):
                code = _supervise(
                    Supervisor(run, config, num_actors, address, view, is_resumed, doctor, start)
                )
            _finish(run, doctor, view, time.monotonic() - began)
        except MageError as error:
            view.close(None)
            raise RunFailed(str(error)) from error
    return code


def _supervise(supervisor: Supervisor) -> int:
    """Run the processes to their end.

    Returns:
        0, `EXIT_HALTED` where the doctor ended the run, or 128 + N where signal N did.
    """
    run, view = supervisor.run, supervisor.view
    if supervisor.config.engine.kind == "sglang":
        installed()
    number, halt = None, ""
    try:
        number = uvloop.run(until_signalled(supervisor))
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
    if halt:
        view.line(f"{halt} Go on with --resume --run-dir {run.root}")
        return EXIT_HALTED
    if number is None:
        return 0
    view.line(f"ended by {signal.Signals(number).name}; go on with --resume --run-dir {run.root}")
    return 128 + number


def _finish(run: RunDirectory, doctor: Doctor, view: View, wall_s: float) -> None:
    """Write the summary and the report of a run, finished or not.

    Raises:
        RunError: the disk is full, or a file of the run is damaged.
    """
    summary = summarise(run, wall_s=wall_s, processor_s=sum(os.times()[:4]))
    page = render(run, summary)
    view.close(summary)
    for finding in doctor.conclude(read_records(run)):
        view.line(f"doctor: {finding.sentence()}")
    try:
        write_summary(run, summary)
        run.report.write_text(page)
    except OSError as error:
        raise RunError(
            f"{run.root}: no summary and report can be written: {error.strerror}; make room, then "
            "--resume"
        ) from error
