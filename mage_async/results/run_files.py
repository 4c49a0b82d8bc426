"""Read the records of a run as plain data; replace files durably; collect events of processes."""

import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import MissingField, RunError
from mage_async.results.run_directory import RunDirectory

Record = dict[str, Any]
"""A JSON object of a run's files: one line or one whole document."""


class _FileRecord(dict[str, Any]):
    """Hold a record, or an object in a record, and name its file in the error about a missing
    field.

    That error is `MissingField`, which reports a damaged file. A wrong key of any other dictionary
    is a bug of this program, and raises a plain `KeyError`.
    """

    __slots__ = ("_file",)

    def __init__(self, file: Path, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._file = file

    def __missing__(self, key: str) -> NoReturn:
        raise MissingField(
            f"{self._file} lacks {key!r}: it is damaged, or another version wrote it"
        )


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Hold the records of one run; records of an interrupted run may be short or empty."""

    config: Config
    metrics: list[Record]
    """Metrics of each step."""
    curve: list[Record]
    """Evaluations during training, one record each."""
    evaluation: Record
    """Scores of the final sets and the references; empty before the end."""
    learner: Record
    """Counts and totals of the learner; empty before its first checkpoint."""
    samples: list[Record]
    """Some whole trials to read, as `trial_as_dict` writes them."""
    supervisor: Record
    """Seconds that the supervisor spent in each state, states of work included, under the file's
    only key, `blocked_s`; empty before the end."""
    warm_start: Record = field(default_factory=dict)
    """Description of the warm start; empty if nothing was cloned."""
    launch: Record = field(default_factory=dict)
    """Record of the last start, with what resumptions changed."""

    def step_s(self) -> list[float]:
        """Return the seconds that each step of `metrics` took, including its wait for the batch."""
        times = [0.0, *(record["time_s"] for record in self.metrics)]
        # A restarted learner counts on from the time in the last commit, which was written a little
        # before that step's metrics. So the next difference may be negative.
        return [max(0.0, later - sooner) for sooner, later in itertools.pairwise(times)]

    def step_tokens(self) -> list[float]:
        """Return the number of sampled tokens that each step of `metrics` trained."""
        steps = zip(self.metrics, self.step_s(), strict=True)
        return [record["generated_tokens_per_s"] * seconds for record, seconds in steps]


SOURCE_OF = "source of "
"""Prefix of a key in the record of a start, before the name of a class. The key says that the class
was edited since the start before."""
VERSION_OF = "version of "
"""Prefix of a key in the record of a start, before the name of a library or of this program. The
key says that its version was another one at the start before."""


def read_records(run: RunDirectory) -> RunRecords:
    """Read all records of a run that exist yet.

    Raises:
        RunError: the run has no configuration, or a file is damaged.
        ConfigError: the configuration is not one of this version.
    """
    run.check()
    return RunRecords(
        # A user's own components are not imported: reading a run must not execute its code.
        config_file.load_recorded(run.config, imports=False),
        read_lines(run.metrics),
        read_lines(run.curve),
        read_document(run.evaluation),
        read_document(run.learner),
        read_lines(run.samples),
        read_document(run.supervisor),
        read_document(run.warm_start),
        read_document(run.launch),
    )


def made_with_of(records: RunRecords) -> dict[str, str]:
    """Return the number of actors of a run, and the versions of its last start, by name."""
    launch = records.launch
    found = {"actors": str(launch["actors"])} if "actors" in launch else {}
    versions: dict[str, str] = launch.get("versions", {})
    return found | versions


def alike_and_different(made_with: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Compare the numbers of actors and the versions with which runs were made.

    A matrix of runs that is continued after an update has runs of two versions of the program.

    Args:
        made_with: `made_with_of` of each run.

    Returns:
        What is the same in all runs, as text, and a sentence on what differs; "" if nothing does.
    """
    names = dict.fromkeys(itertools.chain(*made_with))
    counts = {name: Counter(each.get(name, "none") for each in made_with) for name in names}
    alike = [f"{name} {value}" for name, (value, *more) in counts.items() if not more]
    different = [
        f"{name} {', '.join(f'{value} ({each} of them)' for value, each in found.items())}"
        for name, found in counts.items()
        if len(found) > 1
    ]
    return ", ".join(alike), (
        f"The runs were not made alike: {'; '.join(different)}. Differences of their returns or "
        "speeds may be due to that."
        if different
        else ""
    )


def read_document(file: Path) -> Record:
    """Read a file of one JSON document; return an empty record if there is no file.

    Raises:
        RunError: the file is damaged.
    """
    return parsed(file, _text(file)) if file.is_file() else _FileRecord(file, {})


def read_lines(file: Path) -> list[Record]:
    """Read the finished lines of a file of JSON lines; return an empty list if there is no file.

    Raises:
        RunError: see `each_line`, which needs less memory.
    """
    return list(each_line(file))


def each_line(
    file: Path,
    on_damage: Callable[[RunError], None] | None = None,
    is_parsed: Callable[[bytes], object] = bytes.strip,
) -> Iterator[Record]:
    """Yield the finished lines of a file of JSON lines; none if there is no file. A long run has
    gigabytes of them, which as objects take four times as much memory.

    Args:
        on_damage: Called for each damaged line, which is left out.
        is_parsed: Returns whether a line is parsed; the default leaves out empty lines.

    Raises:
        RunError: a finished line is damaged, and `on_damage` is None.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            # A killed process may leave a last line without its newline: it counts as not written.
            if line.endswith(b"\n") and is_parsed(line):
                try:
                    yield parsed(file, line, f", line {number}")
                except RunError as fault:
                    if on_damage is None:
                        raise
                    on_damage(fault)


TAIL_BYTES = 1 << 16
"""Number of bytes at the end of a file in which its last line is looked for first."""


def last_line(file: Path) -> Record:
    """Read the last finished line of a file of JSON lines; return an empty record if there is none.

    Raises:
        RunError: the line is damaged.
    """
    if not file.is_file():
        return _FileRecord(file, {})
    with file.open("rb") as source:
        size, tail = source.seek(0, 2), TAIL_BYTES  # 2 seeks from the end
        while True:
            source.seek(max(0, size - tail))
            *lines, _ = source.read().split(b"\n")
            # The first piece lacks its beginning, unless it is the first line of the file.
            if len(lines) > 1 or tail >= size:
                break
            tail *= 4
    if not lines:
        return _FileRecord(file, {})
    return parsed(file, lines[-1], ", last line")


def last_step(metrics: Path) -> int:
    """Return the number of the last step in `metrics.jsonl` whose line is not damaged; 0 if there
    is none.
    """
    steps = deque(each_line(metrics, on_damage=lambda fault: None), maxlen=1)
    return int(steps[-1]["step"]) if steps else 0


def _text(file: Path) -> str:
    """Return the text of a file; raise a `RunError` if it is not UTF-8."""
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise RunError(f"{file}: damaged: byte {error.start} is not UTF-8") from None


def parsed(file: Path, text: str | bytes, where: str = "") -> Record:
    """Parse a document or line of a file of a run.

    If a field is missing in the result or in an object of it, reading the field raises
    `MissingField`.

    Args:
        where: names the line in errors.

    Raises:
        RunError: the text is no JSON.
    """
    try:
        record: Record = json.loads(text, object_hook=partial(_FileRecord, file))
    except ValueError as error:
        raise RunError(f"{file}{where}: damaged: {error}") from None
    return record


def sync(path: Path) -> None:
    """Sync a file's content, or the entries of a folder, to the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(file: Path, content: str | bytes, *, is_durable: bool = True) -> None:
    """Replace the content of a file: a reader finds the old or the new content.

    Args:
        is_durable: Whether the new content must also survive a crash of the machine.
    """
    draft = file.with_name(f".{file.name}.part")
    draft.write_bytes(content.encode() if isinstance(content, str) else content)
    if is_durable:
        sync(draft)
    os.replace(draft, file)
    if is_durable:
        sync(file.parent)


Event = Mapping[str, Any]
"""A line of the run's `events.jsonl`."""
MAX_NOTES = 100
"""Number of notes that a history keeps, the latest ones."""
STATES = {
    "started": "starting",
    "ready": "ready",
    "policy": "training",  # the learner has made its policy, and begins to train it
    "evaluating": "plays the final sets",
    "done": "done",
    "failed": "failed",
}
"""State that a process enters with each kind of event."""
ENDED = (STATES["done"], STATES["failed"])
"""States that a process does not leave."""


@dataclass(slots=True)
class ProcessLife:
    """Hold the state of one process of a run, and how often it was started."""

    name: str
    state: str = ""
    at: float = 0.0
    """Time at which the state began, in seconds since 1970."""
    num_starts: int = 0
    node: str = ""
    """Node of the last start, in a run on a cluster."""


@dataclass(slots=True)
class RunHistory:
    """Hold the history of the processes of a run."""

    processes: dict[str, ProcessLife] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    """Sentences on processes that failed and were restarted, the latest first."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Times and sentences of restarts, faults and remarks, the latest first."""

    @property
    def has_nodes(self) -> bool:
        """Whether the run is on a cluster."""
        return any(life.node for life in self.processes.values())


def run_history(events: Sequence[Event]) -> RunHistory:
    """Collect the events of a run, over all its resumptions."""
    history, awaited = RunHistory(), set[str]()  # processes that will be started again
    for event in events:
        kind, process, at = event["event"], event["process"], event["at"]
        if kind in STATES:
            # The supervisor records the start of another process, and names it in the text.
            name = event["text"] if kind == "started" else process
            # Each start of a run begins with its learner: processes of the start before are gone.
            if kind == "started" and name == "learner" and name not in awaited:
                for earlier in history.processes.values():
                    if earlier.state not in ENDED:
                        earlier.state = "ended, at an earlier start of the run"
            life = history.processes.setdefault(name, ProcessLife(name))
            life.state, life.at = STATES[kind], at
        if kind == "started":
            life.num_starts, life.node = life.num_starts + 1, event.get("node", "")
            awaited.discard(life.name)
        elif kind == "failed":
            history.notes.append((at, f"{process}: {event['reason']}"))
        elif kind == "note":
            prefix = "" if process == "supervisor" else f"{process}: "
            history.notes.append((at, prefix + event["text"]))
        elif kind == "restarting":
            awaited.add(event["text"].split()[0])
            history.restarts.append(event["text"])
            history.notes.append((at, event["text"]))
    history.notes.reverse()
    history.restarts.reverse()
    del history.notes[MAX_NOTES:]
    return history


def run_state(is_alive: bool | None, is_complete: bool, history: RunHistory) -> str:
    """Return the state of a run in one or two words.

    Args:
        is_alive: Whether a process runs the run; None if that cannot be known on this machine.
        is_complete: Whether its summary records that it ended as planned.
    """
    if is_alive:
        states = {life.state for life in history.processes.values()}
        return "starting" if states == {"starting"} else "running"
    if is_complete:
        return "finished"
    return "stopped" if is_alive is False else "not finished"
