"""Measure on MineSweeper what figures 1, 3 and 4 of LaMer (arXiv 2512.16848) show, and draw it.

    python -m bench.learning.lamer_figures --run-dir DIR [--seeds 0 1 2] [--set A.B=VALUE …]
        [--only-report]

Meta-RL (`configs/minesweeper.toml`), its control that was trained on single episodes, and the warm
start of both play held-out boards as with `mage evaluate --diversity 16 --harder mines`: how
differently a policy plays one board (the entropy of its trajectories, nats), how many boards it
clears in each episode and within several, and how many with more mines than it was trained on. It
is trained on three mines, as four are the most on 4×4 cells, with LaMer's rewards, which `return`
counts; it is measured with `wins_only`, so that a win is a cleared board.

A run whose results are in DIR is not made again, so seeds can be divided among processes. Then
`--only-report` with all seeds prints the values of each seed, and the other arms minus meta-RL. It
writes a baseline and draws `docs/images/lamer_figures.svg`.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.learning.cases import CASES
from bench.learning.picture import draw, mean_line
from bench.learning.populations.rows import rows_of, show
from bench.learning.shipped import run, run_dir_of
from bench.lib.baseline import ROOT, write_baseline
from bench.lib.options import option_parser
from mage_async.pages.charts import Chart, line_chart
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document
from mage_services.api.evaluation import evaluate

FILE = ROOT / "docs" / "images" / "lamer_figures.svg"
TRIALS, REPEATS, LADDER = 1024, 16, "mines"
"""Trials of a set, plays of each task whose trajectories are compared, and the ladder."""
META = "meta-RL"
ARMS = {
    META: "minesweeper",
    "single-episode RL": "minesweeper, single episode",
    "warm start": "minesweeper, warm start",
}
"""Case of `bench/learning/cases.py` by the name of an arm."""
BOARDS = 'environment.options={mines=3,most_mines=4,size=4,turns=7,view="news",wins_only=%s}'
"""Boards of training and of the measurement; `most_mines` lets a tiny policy read all of them."""
COLOURS = ("heldout", "accent", "reference")
# Beginnings of the names of measures, which end with an episode or a number of mines.
ENTROPY, RETURN = "entropy, episode ", "return, episode "
CLEARED, WITHIN = "cleared, episode ", "cleared within, episodes "
HARDER, HARDER_WITHIN = "cleared in the last episode, mines ", "cleared within three, mines "
TITLES = {
    WITHIN: "Share of boards cleared within so many episodes",
    ENTROPY: "Entropy of trajectories, nats, by episode",
    HARDER: "Share cleared in the last episode, by mines",
    HARDER_WITHIN: "Share cleared within three episodes, by mines",
}


def main() -> None:
    """Train what is missing, measure it, and draw the figures."""
    given = _arguments()
    found: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in ARMS}
    for seed in given.seeds:
        for arm in ARMS:
            if measured := _measured(arm, seed, given):
                found[arm][seed] = measured
    if not found[META]:
        raise SystemExit(f"{given.run_dir} has no results of {META}: run without --only-report")
    measures = list(next(iter(found[META].values())))
    rows = rows_of(found, measures, META)
    show(rows, "held-out boards, by seed; then minus meta-RL, 95 % over seeds")
    write_baseline("lamer_figures", {"seeds": given.seeds, "settings": given.set, "rows": rows})
    FILE.write_text(draw([(title, _chart(start, title, rows)) for start, title in TITLES.items()]))


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="where the runs stay")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--actors", type=int, default=1, help="of each run")
    parser.add_argument("--set", action="append", default=[], help="a key of every run")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


def _measured(arm: str, seed: int, given: argparse.Namespace) -> dict[str, float] | None:
    """Return the measures of a run by name, which is trained and played unless its results are
    known; None if they are not and may not be measured.
    """
    case = next(case for case in CASES if case.name == ARMS[arm])
    run_dir = RunDirectory(run_dir_of(case, seed, given.run_dir).resolve())
    played = read_document(run_dir.root / "environment_minesweeper" / run_dir.summary.name)
    if given.only_report and not played:
        return None
    changes = (BOARDS % "false", *given.set, *case.changes)
    trained = run(replace(case, changes=changes), seed, given.run_dir, given.actors)
    if not played:
        _, _, played = evaluate(
            run_dir,
            trials=TRIALS,
            diversity=REPEATS,
            harder=LADDER,
            environment="minesweeper",
            assignments=[BOARDS % "true"],
        )
        print(f"{arm}, seed {seed}", flush=True)
    heldout, own = played["evaluation"]["heldout"], played["environment"]["options"][LADDER]
    by_episode = {
        ENTROPY: played["diversity"]["entropy_by_episode"],
        RETURN: trained["evaluation"]["heldout"]["return_by_episode"],
        CLEARED: heldout["won_by_episode"],
        WITHIN: heldout["won_within"],
    }
    rungs = {each["options"].get(LADDER, own): each["score"] for each in played["harder"]["rungs"]}
    return {
        **{
            f"{name}{k}": each
            for name, values in by_episode.items()
            for k, each in enumerate(values, 1)
        },
        **{f"{HARDER}{mines}": each["won_by_episode"][-1] for mines, each in rungs.items()},
        **{f"{HARDER_WITHIN}{mines}": each["won_within"][-1] for mines, each in rungs.items()},
    }


def _chart(start: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Return the chart of the measures whose names begin so, with a line for each arm."""
    own = {
        int(row["measure"].removeprefix(start)): row["values"]
        for row in rows
        if row["measure"].startswith(start)
    }
    lines = [
        mean_line(arm, [(x, [*values[arm].values()]) for x, values in own.items()], css)
        for arm, css in zip(ARMS, COLOURS, strict=True)
        if all(arm in values for values in own.values())
    ]
    return line_chart(lines, alt_text=title, x_names=[(float(x), str(x)) for x in own])


if __name__ == "__main__":
    main()
