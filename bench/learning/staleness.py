"""Measure what staleness costs in learning, by whole runs of `mage ablate`.

    python -m bench.learning.staleness [--run-dir DIR] [--only quickstart …] [--seeds 0 1 2 3 4]
        [--for-s S]

A cell of `mage ablate` is a run with an admission rule, a bound on staleness, a correction of the
loss, a lag (the age, in steps, of the weights that play) and a seed. Each study below is a few
cells over one configuration. The program runs the cells
that have no results, and prints a table and the differences between settings, seed by seed. Figures
in the baseline that are not measured again, and whose runs are deleted, stay there. The study
`matrix` is what `mage ablate` does by default: five bounds, three rules, three corrections and,
with `--seeds 0 1 2`, three seeds.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.learning.methods import GRID
from bench.lib.baseline import FOLDER, machine, write_baseline
from bench.lib.options import option_parser
from mage_async.results.intervals import interval, paired, standard_error
from mage_async.results.sweep import FinishedRun, Matrix, by_setting
from mage_services.cli.ablate import ablation_of
from mage_services.cli.main import command_tree
from mage_services.cli.sweep_runs import run_matrix


@dataclass(frozen=True, slots=True)
class Study:
    """Cells of `mage ablate` over one configuration, and the settings that are compared."""

    name: str
    matrices: tuple[str, ...]
    """Arguments of `mage ablate`, without seeds."""
    pairs: tuple[tuple[str, str], ...]
    """Labels of the settings that are compared: the first minus the second."""


# The options after `--set` change keys of every run of a study.
_FASTER = "--set learner.learning_rate=0.002 --set learner.final_learning_rate=0.0004"
_OPEN = "--set learner.entropy_ceiling=0.0"
# Differences by age of the data, for both studies of Kuhn poker.
_AGES = (
    ("sync 0, ppo, lag 4", "sync 0, decoupled, lag 4"),
    ("sync 0, decoupled, lag 4", "sync 0, decoupled"),
    ("sync 0, decoupled, lag 8", "sync 0, decoupled"),
    ("sync 0, none, lag 4", "sync 0, decoupled, lag 4"),
    ("slots 1, decoupled", "sync 0, decoupled"),
)
STUDIES = (
    Study(
        "quickstart",
        (
            "--rules sync --bounds 0 --corrections decoupled --lags 0 4 8",
            "--rules sync --bounds 0 --corrections ppo --lags 2 4",
            "--rules sync --bounds 0 --corrections none --lags 4 8",
            "--rules slots --bounds 1 --corrections decoupled",
        ),
        (
            ("sync 0, ppo, lag 4", "sync 0, decoupled, lag 4"),
            ("sync 0, decoupled, lag 4", "sync 0, decoupled"),
            ("sync 0, decoupled, lag 8", "sync 0, decoupled"),
            ("sync 0, none, lag 4", "sync 0, decoupled, lag 4"),
            ("sync 0, none, lag 8", "sync 0, decoupled, lag 8"),
            ("slots 1, decoupled", "sync 0, decoupled"),
        ),
    ),
    Study(
        "quickstart at twice its learning rate",
        (
            f"--rules sync --bounds 0 --corrections ppo decoupled --lags 4 {_FASTER}",
            f"--rules sync --bounds 0 --corrections decoupled --lags 8 {_FASTER}",
        ),
        (("sync 0, ppo, lag 4", "sync 0, decoupled, lag 4"),),
    ),
    Study(
        "four actors",
        ("--rules slots sync --bounds 1 --corrections decoupled --actors 4 --parallel 1",),
        (("slots 1, decoupled", "sync 0, decoupled"),),
    ),
    Study(
        "kuhn",
        (
            "--config kuhn --rules sync --bounds 0 --corrections decoupled --lags 0 4 8",
            "--config kuhn --rules sync --bounds 0 --corrections ppo none --lags 4",
            "--config kuhn --rules slots --bounds 1 --corrections decoupled",
        ),
        _AGES,
    ),
    Study(
        "kuhn without a ceiling",
        (
            f"--config kuhn --rules sync --bounds 0 --corrections decoupled --lags 0 4 8 {_OPEN}",
            f"--config kuhn --rules sync --bounds 0 --corrections ppo --lags 4 {_OPEN}",
        ),
        _AGES,
    ),
    Study(
        "grid by soft actor-critic",
        (
            "--method sac_glam --rules sync --bounds 0 --corrections none --lags 0 4 8 "
            + " ".join(f"--set {change}" for change in GRID),
        ),
        (
            ("sync 0, none, lag 4", "sync 0, none"),
            ("sync 0, none, lag 8", "sync 0, none"),
        ),
    ),
    Study(
        "matrix",
        ("--config quickstart",),
        (
            ("slots 8, decoupled", "slots 0, decoupled"),
            ("slots 8, none", "slots 8, decoupled"),
            ("slots 8, ppo", "slots 8, decoupled"),
            ("count 8, decoupled", "slots 8, decoupled"),
            ("drop 8, decoupled", "slots 8, decoupled"),
        ),
    ),
)


def main() -> int:
    """Run the studies, print them, and write the baseline."""
    options = _options()
    studies = [each for each in STUDIES if not options.only or each.name in options.only]
    outcomes = [
        0 if options.only_report else run_matrix(_ablation(study, options)) for study in studies
    ]
    known = _known_studies()
    read = {
        study.name: _read(
            study, _ablation(study, options), known.get(study.name, {}).get("runs", {})
        )
        for study in studies
    }
    write_baseline("staleness", {"studies": known | read})
    return max(outcomes)


def _known_studies() -> dict[str, Any]:
    """Return the studies in the baseline."""
    file = FOLDER / f"staleness_{machine()}.json"
    return json.loads(file.read_text())["studies"] if file.exists() else {}


def _ablation(study: Study, options: argparse.Namespace) -> Matrix:
    """Return all cells of a study; matrices of one configuration share a folder."""
    folder = options.run_dir / study.name.replace(" ", "_")
    seeds = " ".join(map(str, options.seeds))
    common = f"--run-dir {folder} --seeds {seeds} --parallel {options.parallel}"
    lines = [f"ablate {common} {each}".split() for each in study.matrices]
    parts = [ablation_of(command_tree().parse_args(line)) for line in lines]
    configs = {cell: config for part in parts for cell, config in part.configs.items()}
    ordered = dict(sorted(configs.items(), key=lambda item: (item[0].seed, item[0].setting)))
    return replace(parts[0], configs=ordered, title=study.name, for_s=options.for_s)


def _read(study: Study, ablation: Matrix, known: dict[str, Any]) -> dict[str, Any]:
    """Return figures by setting, and differences by seed; those of deleted runs are from the
    baseline."""
    rows = {label: {row["seed"]: row for row in same} for label, same in known.items()}
    for setting, same in by_setting(ablation.finished_runs()).items():
        rows.setdefault(setting.label, {}).update({run.cell.seed: _row(run) for run in same})
    print(f"\n{study.name}: held-out return of the last episode, mean ± 95 % (each seed)")
    returns = {
        label: {seed: by_seed[seed]["heldout_last_return"] for seed in sorted(by_seed)}
        for label, by_seed in sorted(rows.items())
    }
    for label, by_seed in returns.items():
        each = " ".join(f"{value:+.3f}" for value in by_seed.values())
        print(f"  {label:32} {_interval_text(list(by_seed.values()))}   {each}")
    differences = {}
    for one, other in study.pairs:
        if one in returns and other in returns:
            found = paired(returns[one], returns[other])
            differences[f"{one} − {other}"] = _summary_of(found)
            error = standard_error(found)
            print(f"  {one} − {other}: {_interval_text(found)}, standard error {error:.3f}")
    runs = {label: [rows[label][seed] for seed in by_seed] for label, by_seed in returns.items()}
    means = {label: _summary_of(list(by_seed.values())) for label, by_seed in returns.items()}
    return {"heldout_last_return": means, "differences": differences, "runs": runs}


def _summary_of(values: list[float]) -> dict[str, float]:
    mean, half = interval(values)
    error = standard_error(values)
    known = {"mean": mean, "half_width_95": half, "standard_error": error, "seeds": len(values)}
    return {name: value for name, value in known.items() if math.isfinite(value)}


def _interval_text(values: list[float]) -> str:
    mean, half = interval(values)
    return f"{mean:+.3f} ± {half:.3f}"


def _row(run: FinishedRun) -> dict[str, Any]:
    # NaN, an unknown figure, is unequal to itself; JSON has no NaN.
    known = {name: value for name, value in run.row().items() if value == value}
    return known | {"ages": [{str(age): share for age, share in part.items()} for part in run.ages]}


def _options() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--only", nargs="+", help="studies by name")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    parser.add_argument("--for-s", type=float, default=math.inf, help="begin no run later")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
