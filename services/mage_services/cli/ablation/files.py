"""What an ablation leaves in its folder as text: the page and the table."""

import csv
from collections.abc import Sequence
from pathlib import Path

from mage_async.report.ablation_page import render_ablation
from mage_async.results.ablation import Finished
from mage_async.results.ablation_matrix import Ablation


def write_files(ablation: Ablation) -> list[Finished]:
    """Write `report.html` and `runs.csv` of the runs that are done, which are returned."""
    finished = ablation.finished_runs()
    if finished:
        page = render_ablation(finished, num_cells=len(ablation.configs), title=ablation.title)
        (ablation.root / "report.html").write_text(page)
        _write_csv(ablation.root / "runs.csv", finished)
    return finished


def _write_csv(file: Path, finished: Sequence[Finished]) -> None:
    """A row a run."""
    rows = [each.row() for each in finished]
    with file.open("w", newline="") as out:
        table = csv.DictWriter(out, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
