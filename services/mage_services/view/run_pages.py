"""Make the list of all runs, and the pages of a run as a whole.

Each function gathers the data of one page, in a thread, and fills the page's template. The frame
around it has the title, the tabs and the links to other pages (`mage_async/pages/templating.py`).
"""

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from markupsafe import Markup

from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.doctor import Doctor, Finding
from mage_async.environments.catalogue import names
from mage_async.errors import RunError
from mage_async.pages import curves, report
from mage_async.pages.charts import (
    Chart,
    Series,
    ago,
    duration,
    line_chart,
    percent,
    short_number,
    signed,
    time_bars,
)
from mage_async.pages.comparison import differences
from mage_async.pages.report import Tile
from mage_async.pages.tables import population_table
from mage_async.pages.templating import Frame, fill, run_address
from mage_async.results.dropped_bias import Selection
from mage_async.results.progress import before_first_step, seconds_left
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import ENDED, RunRecords, last_line, read_document, read_lines
from mage_async.results.summary import SETS
from mage_services.processes.child_process import end_of_log
from mage_services.processes.run_lock import is_held
from mage_services.view.index import FileState, RunReader, file_state
from mage_services.view.page_request import PageRequest
from mage_services.view.run_watcher import ListedRun, history_of, listed_run, state_of
from mage_services.view.trial_pages import TrialFilter, group_rows

MAX_DRAWN = 9
"""Largest number of runs in a chart: the style sheet has this many line colours."""
MAX_CHARTS = 6
"""Largest number of charts, each of one environment, in the list of all runs."""
MAX_POINTS = 120
"""Largest number of steps in a chart; of more steps, evenly spaced ones are drawn, so that each can
be clicked.
"""
MAX_GROUPS = 8
"""Number of groups in flight that the overview shows."""
MAX_RESTARTS = 5
"""Number of restarts of processes that the overview shows."""
SHOWN_BYTES = 4000
"""Number of bytes at the end of each log that the page of processes shows."""


def all_runs(found: Mapping[str, RunDirectory], frame: Frame) -> Markup:
    """Return the list of all runs, with held-out curves of the newest ones: a chart for each
    environment, because returns of different environments have different units.
    """
    runs = [listed_run(name, run) for name, run in found.items()]
    runs.sort(key=lambda run: -run.changed)
    drawn: dict[str, list[ListedRun]] = {}
    for run in runs:
        if run.curve:
            drawn.setdefault(run.environment, []).append(run)
    charts = [(name, _held_out(drawn[name][:MAX_DRAWN])) for name in [*drawn][:MAX_CHARTS]]
    rows = [
        (run, run_address(run.name), signed(run.curve[-1][1]) if run.curve else "") for run in runs
    ]
    return fill("runs.html", frame=frame, rows=rows, charts=charts)


def _held_out(runs: Sequence[ListedRun]) -> Chart | None:
    """Return the held-out curves of runs of one environment."""
    series = [
        Series(
            run.name,
            [(float(version), value) for version, value, _ in run.curve],
            f"s{number}",  # the class of the style sheet that has the colour
            [half for _, _, half in run.curve],
            has_dots=True,
        )
        for number, run in enumerate(runs)
    ]
    alt_text = "held-out return of the last episode against steps, by run"
    return line_chart(series, alt_text=alt_text)


def overview(request: PageRequest) -> Markup:
    """Return the overview of a run: key numbers, findings, curves, processes, groups in flight."""
    run, config, history = request.run, config_of(request.run), history_of(request.run)
    state = state_of(run, history)
    with RunReader(run) as reader:
        frame = request.frame(reader, request.name, tab="")  # "" is the tab of this page
        records = _records(reader, config)
        # The index of a run that was not opened before has to be built first.
        step = max(reader.last_step(), last_line(run.metrics).get("step", 0))
        findings, selection = examined(reader, records)
        groups = reader.untrained_groups(MAX_GROUPS)
        listed = reader.trials_of([group.number for group in groups])
    # A chart needs a link: before the first step, to the page of step 1.
    steps = [line["step"] for line in records.metrics] or [1]
    times, events = read_document(run.times), read_lines(run.events)
    # `fates`: numbers of trials that were granted, trained, dropped, or are in flight.
    fates = records.learner.get("trials")
    if _times_are_newer(run) or not fates:
        fates = times.get("trials") or fates
    population = records.learner.get("population")
    waiting = [] if step else before_first_step(times, events, is_held(run.lock), time.time())
    return fill(
        "overview.html",
        waiting=waiting,
        frame=frame,
        environment=config.environment.name,
        seed=config.seed,
        state=state,
        step=step,
        steps=config.learner.steps,
        tiles=_tiles(records, state),
        findings=findings,
        restarts=history.restarts[:MAX_RESTARTS],
        curves=[
            (
                caption,
                chart and chart.with_links(lambda x: f"{frame.home}step/{x}", steps),
            )
            for caption, chart in curves.learning_curves(records)
        ],
        episode_names=report.episode_names(config.most_episodes),
        is_sampled=steps[-1] - steps[0] >= len(steps),  # some numbers of steps are left out
        rows=group_rows(groups, listed, listed, TrialFilter()),
        time_bars=time_bars(_seconds_by_state(run, records)),
        staleness=curves.staleness(
            records.metrics, config.admission.most_stale, config.most_episodes
        ),
        fates=report.fates_part({**records.learner, "trials": fates}) if fates else None,
        selection=report.selection_table(selection, config.admission),
        throughput=curves.metric_charts(records, curves.THROUGHPUT),
        policy=curves.metric_charts(records, curves.POLICY),
        population=population_table(population, units_of(run, config)) if population else None,
    )


def _tiles(records: RunRecords, state: str) -> list[Tile]:
    """Return the key numbers at the top of the overview, each as a tile."""
    tiles = []
    if points := curves.curve_points(records, "heldout"):
        version, score = points[-1]
        tiles.append(report.heldout_tile(score, f"version {version}"))
    if not records.metrics:
        return tiles
    last, steps = records.metrics[-1], records.config.learner.steps
    progress = f"step {last['step']} of {steps}"
    if state == "running" and (left := seconds_left(records.metrics, steps)):
        progress = f"about {duration(left)} left"
    last_return = signed(last["return_by_episode"][-1])
    tiles += [
        Tile(f"batch of step {last['step']}", last_return, "last episode", css="train"),
        Tile("training", duration(last["time_s"]), progress),
        Tile("trials/s", short_number(last["trials_per_s"]), "of the last step"),
    ]
    if "staleness_mean" in last:
        most = f"max {short_number(last['staleness_max'])}"
        tiles.append(Tile("staleness", f"{last['staleness_mean']:.2f}", f"mean, in steps; {most}"))
    if "valid_action_share" in last:
        tiles.append(Tile("valid actions", percent(last["valid_action_share"]), "of the last step"))
    return tiles


def evaluation(request: PageRequest) -> Markup:
    """Return the page of the final evaluation with its controls, and of all evaluations so far.

    Without a final evaluation, the page shows the last point of the curve.
    """
    with RunReader(request.run) as reader:
        records = _records(reader, config_of(request.run))
        frame = request.frame(reader, "evaluation", "evaluation")
    summary = read_document(request.run.summary)
    has_ended = bool(summary.get("evaluation")) and bool(records.evaluation)
    sets = records.curve[-1]["sets"] if records.curve and not has_ended else {}
    return fill(
        "evaluation.html",
        frame=frame,
        part=report.adaptation_part(records, summary) if has_ended else None,
        points=[
            (line["version"], [(SETS[name].label, score) for name, score in line["sets"].items()])
            for line in reversed(records.curve)
        ],
        chart=curves.adaptation(sets, {}) if "heldout" in sets else None,
    )


def memory(request: PageRequest) -> Markup:
    """Return the page of one version of the graph memory: strategies by kind of task, the most
    relevant first.
    """
    lines = {line["version"]: line for line in read_lines(request.run.memory)}
    last = max(lines, default=0)
    version = request.number("version", last)
    if lines and version not in lines:
        raise RunError(f"there is no version {version} of the memory; the newest is {last}")
    before, after = (
        f"memory?version={near}" if near in lines else "" for near in (version - 1, version + 1)
    )
    rows = lines[version]["strategies"] if lines else []
    kinds = itertools.groupby(rows, key=lambda row: f"{row['kind']}, seat {row['seat']}")
    return fill(
        "memory.html",
        frame=request.frame(None, "memory", "memory", before=before, after=after),
        version=version if lines else None,
        last=last,
        kinds=[(kind, list(strategies)) for kind, strategies in kinds],
    )


def processes(request: PageRequest) -> Markup:
    """Return the page of a run's processes: their states, restarts, seconds by state, and logs."""
    run, now = request.run, time.time()
    history = history_of(run)
    state = state_of(run, history)
    for life in history.processes.values():
        if state in ("finished", "stopped") and life.state not in ENDED:
            life.state = "ended with the run"
    with RunReader(run) as reader:
        seconds = _seconds_by_state(run, _records(reader, config_of(run)))
    return fill(
        "processes.html",
        frame=request.frame(None, "processes", "processes"),
        state=state,
        history=history,
        bars=time_bars(seconds),
        logs=_log_tails(run),
        ago=lambda at: ago(now - at),
    )


def config(request: PageRequest) -> Markup:
    """Return the page of a run's configuration, next to another run's if one was chosen."""
    others = [name for name in request.runs if name != request.name]
    other = request.query.get("other", "")
    if other and other not in others:
        raise RunError(f"there is no run {other!r} here")
    own = config_of(request.run)
    return fill(
        "config.html",
        frame=request.frame(None, "configuration", "config"),
        text=config_file.dump(own),
        names=others,
        other=other,
        rows=differences(own, config_of(request.runs[other])) if other else None,
    )


def config_of(run: RunDirectory) -> Config:
    """Read the configuration of a run, unless it was read before and has not changed.

    Raises:
        RunError: there is no configuration.
        ConfigError: the configuration is not one of this version.
    """
    if not run.config.is_file():
        raise RunError(f"{run.root} is no run directory any more: it has no {run.config.name}")
    return _config(run.config, file_state(run.config))


@lru_cache(maxsize=8)
def _config(file: Path, _state: FileState) -> Config:
    """Read a configuration; `_state` is only a key of the cache, which changes with the file."""
    return config_file.load_recorded(file, imports=False)


def units_of(run: RunDirectory, config: Config) -> int:
    """Return the number of units of an episode, by which returns are divided; 1 if it is unknown.

    A user's environment is not imported: reading a run must not execute its code.
    """
    if summary := read_document(run.summary):
        return int(summary["environment"]["units"])
    return environment_of(config).facts.units if config.environment.name in names() else 1


def _records(reader: RunReader, config: Config) -> RunRecords:
    """Read the records of a run with at most `MAX_POINTS` steps and evaluations, from its index."""
    run = reader.run
    return RunRecords(
        config,
        metrics=reader.metrics(MAX_POINTS),
        curve=reader.curve(MAX_POINTS),
        evaluation=read_document(run.evaluation),
        learner=read_document(run.learner),
        samples=[],
        supervisor=read_document(run.supervisor),
        warm_start=read_document(run.warm_start),
        launch=read_document(run.launch),
    )


def _seconds_by_state(run: RunDirectory, records: RunRecords) -> dict[str, dict[str, float]]:
    """Return the seconds of each process by state: so far if the run goes on, else final ones."""
    final = report.seconds_by_state(records)
    # "blocked_s" has the seconds of all states, also of work.
    return final | read_document(run.times)["blocked_s"] if _times_are_newer(run) else final


def _times_are_newer(run: RunDirectory) -> bool:
    """Return whether `times.json` is newer than the file that the supervisor writes at the end: the
    run goes on, or ended by a crash.
    """
    return file_state(run.times).changed_ns > file_state(run.supervisor).changed_ns


def _log_tails(run: RunDirectory) -> dict[str, str]:
    """Return the end of each process's log."""
    logs = sorted(run.logs.glob("*.log"))
    return {log.stem: end_of_log(log, SHOWN_BYTES).strip() for log in logs}


# One doctor per run stays in memory between requests, so that a page examines only new steps.

MAX_EXAMINED = 2000
"""Largest number of steps that the doctor examines in one request, the newest ones; it skips older
steps.
"""


@dataclass(slots=True)
class _Examination:
    """Hold the doctor of one run, and the part of the run that it has examined."""

    doctor: Doctor
    run_state: tuple[FileState, bool]
    """State of the configuration's file, and whether the run had ended when the examination began.
    The first changes if another run takes the place of this one. If either changes, the examination
    starts again from the first step.
    """
    num_evaluations: int = -1
    """Number of evaluations that the doctor has examined; -1 before it has looked for any."""


_examinations: dict[Path, _Examination] = {}
"""The examination of each run that is shown, by the run's directory."""
_lock = threading.Lock()
"""Lock that is held while a doctor works: pages are made in threads, and two pages of a run share
its doctor.
"""


def examined(reader: RunReader, records: RunRecords) -> tuple[list[Finding], Selection]:
    """Examine the new steps and evaluations of a run, and return all findings so far, and the
    groups, trained or dropped, of the examined steps.
    """
    with _lock:
        known = _examination(reader, records)
        known.doctor.note_warm_start(records.warm_start)  # it may have ended since the last page
        for record in reader.newest_metrics(MAX_EXAMINED, after=known.doctor.last_step):
            known.doctor.step(record)
        if len(records.curve) != known.num_evaluations:
            known.num_evaluations = len(records.curve)
            known.doctor.conclude(records)
        # Copies, because another page may go on with the examination while this one is made.
        return list(known.doctor.findings), deepcopy(known.doctor.selection)


def _examination(reader: RunReader, records: RunRecords) -> _Examination:
    """Return the examination of a run; a new one if the run was replaced, lost steps or has
    ended.
    """
    run = reader.run
    run_state = (file_state(run.config), bool(records.evaluation))
    known = _examinations.get(run.root)
    if known is None or known.run_state != run_state or reader.last_step() < known.doctor.last_step:
        known = _examinations[run.root] = _Examination(Doctor.recorded(records), run_state)
    return known
