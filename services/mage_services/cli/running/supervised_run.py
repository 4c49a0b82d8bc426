"""One run from its first process to its report: what `mage train` does once all is checked."""

import json
import os
import shutil
import signal
import sys
import time

import uvloop

from mage_async.config.schema import Config
from mage_async.doctor import Doctor
from mage_async.errors import Halted, MageError, RunError, RunFailed
from mage_async.report import render
from mage_async.results.durable_files import write_whole
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines, read_records
from mage_async.results.summary import summarise, write_summary
from mage_services.cli.running.sites import Site, site_of
from mage_services.engines.sglang.versions import installed
from mage_services.processes.event_log import RecordedView
from mage_services.processes.process import first_failure
from mage_services.processes.supervisor import Supervisor, until_signalled
from mage_services.terminal.view import View, make_view
from mage_services.tracking.processes import followed
from mage_services.tracking.tracker import targets

EXIT_HALTED = 3
"""The doctor ended the run."""


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
        cluster: the address of a Ray cluster; "": all processes are started here.

    Returns: 0, `EXIT_HALTED`, or 128 + N where signal N ended the run.

    Raises:
        RunFailed: a process failed more often than its budget allows, or the summary and report
            cannot be written.
    """
    tracking = config.tracking
    view = RecordedView(make_view(config, run, is_terminal=sys.stdout.isatty()), run)
    began, doctor = time.monotonic(), _doctor(run, config)
    with followed(run, targets(tracking), tracking.wait_s, view.line):
        try:
            with site_of(run, config, num_actors, cluster, view.line) as site:
                code = _supervise(
                    run, config, site, doctor, view, num_actors=num_actors, is_resumed=is_resumed
                )
            _finish(run, doctor, view, time.monotonic() - began)
        except MageError as error:
            view.close(None)
            raise RunFailed(str(error)) from error
    return code


def _supervise(
    run: RunDirectory,
    config: Config,
    site: Site,
    doctor: Doctor,
    view: View,
    *,
    num_actors: int,
    is_resumed: bool,
) -> int:
    """Run the processes; the exit code is `EXIT_HALTED` where the doctor ended the run, and 128 + N
    where signal N did.
    """
    if config.engine.kind == "sglang":
        installed()
    supervisor = Supervisor(
        run, config, num_actors, site.address, view, is_resumed, doctor, site.start
    )
    number, halt = None, ""
    try:
        number = uvloop.run(until_signalled(supervisor))
    except* Halted as group:
        halt = str(first_failure(group))
    except* MageError as group:
        raise first_failure(group) from None
    finally:
        shutil.rmtree(run.shared_weights, ignore_errors=True)
        _write_time(run, supervisor, view)
    if halt:
        view.line(f"{halt} Go on with --resume --run-dir {run.root}")
        return EXIT_HALTED
    if number is None:
        return 0
    view.line(f"ended by {signal.Signals(number).name}; go on with --resume --run-dir {run.root}")
    return 128 + number


def _doctor(run: RunDirectory, config: Config) -> Doctor:
    """The doctor of a run, after the steps of its earlier lives."""
    doctor = Doctor.of(config)
    for record in read_lines(run.metrics):
        doctor.step(record)
    return doctor


def _write_time(run: RunDirectory, supervisor: Supervisor, view: View) -> None:
    """Where the supervisor's time went. That it cannot be written, as on a full disk, is said, and
    does not stand before the reason for which the run ended.
    """
    try:
        times = {"blocked_s": supervisor.time.seconds()}
        write_whole(run.supervisor, json.dumps(times) + "\n")
    except OSError as error:
        view.line(f"{run.supervisor} cannot be written: {error.strerror}")


def _finish(run: RunDirectory, doctor: Doctor, view: View, wall_s: float) -> None:
    """Write what is known of the run, finished or not.

    Raises: RunError: its disk is full, or some file of it is damaged.
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
