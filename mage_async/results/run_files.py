"""The files of a run, read back as plain data, as far as they exist yet."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of one run; those of an interrupted one may be short or empty."""

    config: Config
    metrics: list[Record]
    """A record a step."""
    curve: list[Record]
    """A record an evaluation while training."""
    evaluation: Record
    """The final sets and the references; empty before the end."""
    learner: Record
    """Counts and totals; empty before the end."""
    samples: list[Record]
    """Trials to read."""
    supervisor: Record
    """Where its time went; empty before the end."""

    def step_s(self) -> list[float]:
        """Seconds that each step of `metrics` took, its wait for the batch included."""
        times = [0.0, *(record["time_s"] for record in self.metrics)]
        return [max(0.0, later - sooner) for sooner, later in itertools.pairwise(times)]


def read_records(run: RunDirectory) -> RunRecords:
    """Read all records of a run.

    Raises:
        RunError: it has no configuration, or a file is damaged (an unfinished last line is not).
        ConfigError: its configuration is not one of this version.
    """
    if not run.config.is_file():
        raise RunError(f"{run.root} is no run directory: it has no {run.config.name}")
    return RunRecords(
        config_file.load_recorded(run.config),
        read_lines(run.metrics),
        read_lines(run.curve),
        read_document(run.evaluation),
        read_document(run.learner),
        read_lines(run.samples),
        read_document(run.supervisor),
    )


def read_document(file: Path) -> Record:
    """A file of one JSON document; empty where it is not there.

    Raises: RunError: it is damaged.
    """
    return _parsed(file, _text(file), "") if file.is_file() else {}


def read_lines(file: Path) -> list[Record]:
    """Every finished line; what a killed process left of a last one was never written."""
    if not file.is_file():
        return []
    *lines, _ = _text(file).split("\n")
    return [_parsed(file, line, f", line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise RunError(f"{file}: damaged: byte {error.start} is no text") from None


def _parsed(file: Path, text: str, where: str) -> Record:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{file}{where}: damaged: {error}") from None
