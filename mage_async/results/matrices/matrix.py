"""A matrix of runs with the configuration of every cell, checked before anything runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.policy_source import check_source
from mage_async.config.schema import Config
from mage_async.results.matrices.ablation import Cell, Finished, is_done, read_cell
from mage_async.results.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Subject:
    """What a matrix is about, in the words of its page."""

    heading: str
    axis: str
    """What a setting's place is."""
    is_about_age: bool = False


STALENESS = Subject("What staleness costs", "bound plus lag, steps", is_about_age=True)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is to be run, checked."""

    root: Path
    title: str
    configs: dict[Cell, Config]
    num_actors: int
    parallel: int
    """Runs side by side."""
    for_s: float
    """No run begins later than so many seconds after the first."""
    subject: Subject = STALENESS

    def run_of(self, cell: Cell) -> RunDirectory:
        """The directory of a cell's run."""
        return RunDirectory(self.root / cell.name())

    def log_of(self, cell: Cell) -> Path:
        """The file of what a cell's run printed."""
        return self.root / f"{cell.name()}.log"

    def failures_of(self, cell: Cell) -> Path:
        """The file with a line for each time that a cell's run failed."""
        return self.root / f"{cell.name()}.failures"

    def num_failures(self, cell: Cell) -> int:
        """How often a cell's run has failed, in all calls."""
        file = self.failures_of(cell)
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def finished_runs(self) -> list[Finished]:
        """The runs that are done.

        Raises: RunError: a file of one is damaged.
        """
        runs = [(cell, self.run_of(cell)) for cell in self.configs]
        return [read_cell(cell, run) for cell, run in runs if is_done(run)]


def checked_configs(
    file: Path, wanted: Iterable[Cell], assignments: list[str], method: str | None = None
) -> dict[Cell, Config]:
    """The configuration of each cell: a file, changed by a method, by assignments and by the cell.

    Raises: MageError: a cell cannot be run; the sentence says which key and why.
    """
    return {cell: _checked(file, [*assignments, *cell.assignments()], method) for cell in wanted}


def _checked(file: Path, assignments: list[str], method: str | None) -> Config:
    config = config_file.load(file, assignments, method)
    check(config)
    check_source(config.policy)
    return config
