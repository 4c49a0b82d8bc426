"""What a matrix leaves in its folder as text: the page and the table."""

import csv
from collections.abc import Sequence
from pathlib import Path

from mage_async.report.matrix_page import render_matrix
from mage_async.results.matrices.ablation import Finished
from mage_async.results.matrices.matrix import Matrix


def write_files(matrix: Matrix) -> list[Finished]:
    """Write `report.html` and `runs.csv` of the runs that are done, which are returned."""
    finished = matrix.finished_runs()
    if finished:
        page = render_matrix(
            finished,
            num_cells=len(matrix.configs),
            title=matrix.title,
            subject=matrix.subject,
        )
        (matrix.root / "report.html").write_text(page)
        _write_csv(matrix.root / "runs.csv", finished)
    return finished


def _write_csv(file: Path, finished: Sequence[Finished]) -> None:
    """A row a run."""
    rows = [each.row() for each in finished]
    with file.open("w", newline="") as out:
        table = csv.DictWriter(out, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
