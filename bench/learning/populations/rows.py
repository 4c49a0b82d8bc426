"""Compare arms with a control: every measure by seed, and the gains over the control."""

from collections.abc import Mapping, Sequence
from typing import Any

from mage_async.results.intervals import interval, paired

Found = Mapping[str, Mapping[int, dict[str, Any]]]
"""Measures by arm and seed."""


def rows_of(found: Found, measures: Sequence[str], control: str) -> list[dict[str, Any]]:
    """Return a row for each measure: its values by arm and seed, and the gains over the control."""
    rows = []
    for measure in measures:
        values = {
            arm: {seed: each[measure] for seed, each in runs.items()}
            for arm, runs in found.items()
            if runs
        }
        rows.append({"measure": measure, "values": values, "gains": _gains(values, control)})
    return rows


def show(rows: Sequence[Mapping[str, Any]], heading: str) -> None:
    """Print the rows, with 95 % intervals of the gains over seeds."""
    print(heading)
    for row in rows:
        print(row["measure"])
        for arm, values in row["values"].items():
            shown = " ".join(f"{value:+.3f}" for value in values.values())
            gain = row["gains"].get(arm)
            print(f"  {arm:22} {shown}" + (f"   {gain[0]:+.3f} ± {gain[1]:.3f}" if gain else ""))


def runs_by_name(found: Found) -> dict[str, dict[str, Any]]:
    """Return all measures, for a baseline."""
    return {f"{arm}, seed {n}": each for arm, runs in found.items() for n, each in runs.items()}


def _gains(
    values: Mapping[str, Mapping[int, float]], control: str
) -> dict[str, tuple[float, float]]:
    pairs = {
        arm: paired(each, values[control])
        for arm, each in values.items()
        if arm != control and control in values
    }
    return {arm: interval(each) for arm, each in pairs.items() if len(each) > 1}
