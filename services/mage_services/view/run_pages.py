"""The pages of a run by their address: each gathers what it shows, in a thread, and lays it out."""

import time
from collections.abc import Callable

from markupsafe import Markup

from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.pages.memory_page import memory_page
from mage_async.pages.overview import MOST_POINTS, Seen, evaluation_page, overview_page
from mage_async.pages.processes import processes_page
from mage_async.pages.run_lists import config_page
from mage_async.report.run_page import blocked_s
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import RunRecords, read_document, read_lines
from mage_services.view.asked import Asked, config_of, units_of
from mage_services.view.examined import examined
from mage_services.view.found_runs import changed_at, lives, run_state
from mage_services.view.index.run_reader import RunReader
from mage_services.view.trial_pages import group, step, trials, turn

MOST_GROUPS = 8
"""Groups in play that the overview shows."""
MOST_ENDS = 5
LOG_BYTES = 4000


def overview(asked: Asked) -> Markup:
    """Curves and state."""
    with RunReader(asked.run) as reader:
        config, times = config_of(asked.run), read_document(asked.run.times)
        records = _records(reader, config)
        lived = lives(asked.run)
        groups = reader.groups_in_flight(MOST_GROUPS)
        seen = Seen(
            records=records,
            state=run_state(asked.run, lived),
            step=reader.last_step(),
            blocked_s=_blocked(asked.run, records),
            trials=times.get("trials") or records.learner.get("trials") or {},
            findings=examined(reader, records),
            ends=lived.ends[:MOST_ENDS],
            groups=groups,
            listed=reader.trials_of([group.number for group in groups]),
            units=units_of(asked.run, config),
        )
        return overview_page(asked.frame(reader, asked.name, ""), seen)


def evaluation(asked: Asked) -> Markup:
    """Controls beside held-out tasks."""
    with RunReader(asked.run) as reader:
        records = _records(reader, config_of(asked.run))
        summary = read_document(asked.run.summary)
        return evaluation_page(asked.frame(reader, "evaluation", "evaluation"), records, summary)


def memory(asked: Asked) -> Markup:
    """Strategies of a version of the graph memory, with their weights."""
    lines = {line["version"]: line for line in read_lines(asked.run.memory)}
    last = max(lines, default=0)
    version = asked.number("version", last)
    if lines and version not in lines:
        raise RunError(f"there is no version {version} of the memory; the newest is {last}")
    frame = asked.frame(
        None,
        "memory",
        "memory",
        before=f"memory?version={version - 1}" if version - 1 in lines else "",
        after=f"memory?version={version + 1}" if version + 1 in lines else "",
    )
    return memory_page(frame, lines.get(version), last)


def processes(asked: Asked) -> Markup:
    """Lives, waits and logs."""
    with RunReader(asked.run) as reader:
        lived = lives(asked.run)
        records = _records(reader, config_of(asked.run))
        return processes_page(
            asked.frame(None, "processes", "processes"),
            run_state(asked.run, lived),
            lived,
            _blocked(asked.run, records),
            _logs(asked.run),
            time.time(),
        )


def config(asked: Asked) -> Markup:
    """The configuration beside another run's."""
    others = [name for name in asked.runs if name != asked.name]
    other = asked.query.get("other", "")
    if other and other not in others:
        raise RunError(f"there is no run {other!r} here")
    against = config_of(asked.runs[other]) if other else None
    frame = asked.frame(None, "configuration", "config")
    return config_page(frame, config_of(asked.run), others, other, against)


def _records(reader: RunReader, config: Config) -> RunRecords:
    run = reader.run
    return RunRecords(
        config,
        reader.metrics(MOST_POINTS),
        reader.curve(MOST_POINTS),
        read_document(run.evaluation),
        read_document(run.learner),
        [],
        read_document(run.supervisor),
    )


def _blocked(run: RunDirectory, records: RunRecords) -> dict[str, dict[str, float]]:
    """Seconds by state of each process: of the end, or of the last step where that is newer."""
    at_the_end = blocked_s(records)
    if changed_at(run.times) <= changed_at(run.supervisor):
        return at_the_end
    return at_the_end | read_document(run.times)["blocked_s"]


def _logs(run: RunDirectory) -> dict[str, str]:
    """The last lines of each process's log."""
    logs = {}
    for file in sorted(run.logs.glob("*.log")):
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, 2) - LOG_BYTES))
            logs[file.stem] = source.read().decode(errors="replace").strip()
    return logs


PAGES: dict[str, Callable[[Asked], Markup]] = {
    "": overview,
    "step/{step}": step,
    "group/{group}": group,
    "group/{group}/trial/{trial}/turn/{turn}": turn,
    "trials": trials,
    "evaluation": evaluation,
    "memory": memory,
    "processes": processes,
    "config": config,
}
"""Pages by address; what stands in braces is a number."""
