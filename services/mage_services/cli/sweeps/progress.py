"""How far a matrix of runs is: a line for the terminal after each."""

import statistics
from dataclasses import dataclass, field

from mage_async.report.charts.number_format import duration
from mage_async.results.matrices.ablation import Cell, Finished


@dataclass(slots=True)
class Progress:
    """Counts runs as they end, and guesses from how long they took when the last one will."""

    num_runs: int
    num_done: int
    """Those of earlier calls among them."""
    parallel: int
    """Runs side by side."""
    _took_s: list[float] = field(default_factory=list)

    def begin(self) -> str:
        """Before the first run of this call."""
        return f"{self.num_runs} runs, {self.num_done} of them done"

    def done(self, run: Finished, took_s: float) -> str:
        """A run came to its end; seconds of wall time."""
        self.num_done += 1
        self._took_s.append(took_s)
        returned = f"last held-out episode {run.figures['heldout_last_return']:.2f}"
        return f"{self._place(run.cell)}: {returned}, {took_s:.0f} s{self._left()}"

    def failed(self, cell: Cell, log: str) -> str:
        """A run ended otherwise, having said why in its log."""
        return f"{self._place(cell)}: failed, see {log}"

    def _place(self, cell: Cell) -> str:
        return f"[{self.num_done}/{self.num_runs}] {cell.name()}"

    def _left(self) -> str:
        """Assumes runs as long as those of this call so far."""
        if self.num_done == self.num_runs:
            return ""
        left_s = statistics.fmean(self._took_s) * (self.num_runs - self.num_done) / self.parallel
        return f"; about {duration(left_s)} left"
