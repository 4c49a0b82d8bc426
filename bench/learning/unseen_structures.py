"""Measure in which structures of small games a policy adapts that it was never trained on.

    python -m bench.learning.unseen_structures --models RUN_DIR ... [--name unseen_structures]
    python -m bench.learning.unseen_structures --models RUN_DIR ... --others
    python -m bench.learning.unseen_structures --draw

`mage adapt` certifies each model, a run or a model directory, on one structure of the environment
`family` at a time (`docs/family.md`). The games are held-out ones, in words and phrasings of which
none occurs in training, and a wrong action is answered with the right one where a structure can
tell it.
The models are meant to be runs of different seeds. Each measurement is recorded, and the same
command continues one that was interrupted.

First come the held-out parts of each run's own evaluation, one line each: the last episode's
return, the same `blind` and `swapped`, run by run. Then a line for each structure. It has the mean
return of the first and of the last of three episodes over the models, the last
episode's under four controls (`docs/adapt.md`), each model's least difference to the first episode
and to the controls, and its verdict.

`--others` measures in games that are no part of the family: four of this repository, one of
Gymnasium, and one of TextArena (`OTHERS`).

`--draw` draws `docs/images/unseen_games.svg` from the baseline `unseen_structures`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.learning.picture import draw
from bench.lib.baseline import FOLDER, ROOT, write_baseline
from bench.lib.options import option_parser
from mage_async.environments.games.family import STRUCTURES
from mage_async.pages.charts import Chart, Series, line_chart
from mage_async.results.certificate import ARMS, DIFFERENCES
from mage_async.results.run_directory import RunDirectory

CONTROLS = ARMS[1:]
# Name and options of each game of `--others`. FrozenLake has a map of its own in each task; its
# own limit of 100 steps is far above the shortest way, which has 6.
OTHERS: dict[str, dict[str, str]] = {
    "rps": {},
    "mastermind": {},
    "bandit": {},
    "maze": {},
    "gymnasium:FrozenLake-v1": {
        "make": '{is_slippery = false, desc = "random", max_episode_steps = 20}'
    },
    "textarena:GuessTheNumber-v0": {},
}
PICTURE = ROOT / "docs" / "images" / "unseen_games.svg"
# Lines of a panel: label, arm of `mage adapt`, and class of `style.css`.
LINES = (
    ("blind", "blind", "blind"),
    ("another game's history", "noise", "accent"),
    ("swapped", "swapped", "swapped"),
    ("held-out", "own", "heldout"),
)


def main() -> int:
    """Measure what is not recorded yet, and print the table."""
    parser = option_parser(__doc__)
    parser.add_argument("--models", nargs="+", type=Path, default=[], metavar="DIR")
    parser.add_argument("--structures", nargs="+", choices=list(STRUCTURES))
    parser.add_argument("--others", nargs="*", choices=list(OTHERS), help="games; all by default")
    parser.add_argument("--trials", type=int, default=96, help="tasks of each game (96)")
    parser.add_argument("--out", type=Path, default=Path("runs/unseen_structures"), metavar="DIR")
    parser.add_argument("--only-report", action="store_true", help="play nothing")
    parser.add_argument("--name", default="", help="of the baseline; without it none is written")
    parser.add_argument("--draw", action="store_true", help="draw the picture, and play nothing")
    given = parser.parse_args()
    if given.draw:
        return _draw()
    if not given.models:
        parser.error("--models is needed: directories of runs or models, or --draw")
    if given.others is None:
        structures = given.structures or STRUCTURES
        games = {each: ("family", _options_of(each)) for each in structures}
    else:
        games = {name: (name, OTHERS[name]) for name in given.others or OTHERS}
    evaluations = {model.name: found for model in given.models if (found := _evaluation(model))}
    _print_evaluations(evaluations)
    rows = []
    width = max(map(len, games))
    print(f"{'game':{width}} {'first':>6} {'last':>6}" + "".join(f" {c:>7}" for c in CONTROLS))
    for label, (game, options) in games.items():
        found = {}
        for model in given.models:
            folder = given.out / model.name / label
            is_measured = (folder / "certificate.json").exists()
            if not is_measured and not given.only_report:
                _measure(model, game, options, given.trials, folder)
                is_measured = True
            if is_measured:
                found[model.name] = _figures(folder)
        if found:
            rows.append({"structure" if game == "family" else "game": label, "models": found})
            _print_row(f"{label:{width}}", list(found.values()))
    if given.name:
        figures = {"trials": given.trials, "evaluations": evaluations, "rows": rows}
        write_baseline(given.name, figures)
    return 0


def _draw() -> int:
    """Draw a panel for each structure in which every model adapts."""
    rows = json.loads((FOLDER / "unseen_structures_cpu2.json").read_text())["rows"]
    rows.sort(key=lambda row: row["structure"])
    charts = [
        (f"{row['structure']}, never trained on", _chart(row["structure"], row["models"]))
        for row in rows
        if all(model["verdict"] == "adapts" for model in row["models"].values())
    ]
    PICTURE.write_text(draw(charts))
    print(f"written to {PICTURE.relative_to(ROOT)}")
    return 0


def _chart(structure: str, models: dict[str, Any]) -> Chart | None:
    """Return the chart of the returns by episode in one structure, means over the models."""
    series = [_series(label, arm, css, models) for label, arm, css in LINES]
    episodes = [(float(k), f"episode {k}") for k in range(1, len(series[0].points) + 1)]
    return line_chart(series, alt_text=f"{structure}, by episode", x_names=episodes)


def _series(label: str, arm: str, css: str, models: dict[str, Any]) -> Series:
    """Return the line of an arm, means over the models. An arm that differs from `own` in the last
    episode alone begins with the returns of `own`.
    """
    returns = [
        [(found or own)[0] for found, own in zip(model[arm], model["own"], strict=True)]
        for model in (each["returns"] for each in models.values())
    ]
    points = [
        (float(number), sum(by_model) / len(by_model))
        for number, by_model in enumerate(zip(*returns, strict=True), 1)
    ]
    return Series(label, points, css, has_dots=True)


def _evaluation(model: Path) -> dict[str, Any]:
    """Return the returns of each part of a run's evaluation sets, by episode; {} if the model is no
    run, or one that is not evaluated.
    """
    file = RunDirectory(model).evaluation
    sets = json.loads(file.read_text())["sets"] if file.exists() else {}
    return {
        name: {
            part: {
                key: score[key] for key in ("num_trials", "return_by_episode", "ci95_by_episode")
            }
            for part, score in each["parts"]["family"].items()
        }
        for name, each in sets.items()
    }


def _print_evaluations(evaluations: dict[str, Any]) -> None:
    """Print a line for each held-out part: last episodes, run by run."""
    for part in next(iter(evaluations.values()), {}).get("heldout", ()):
        columns = [
            "/".join(
                f"{run[name][part]['return_by_episode'][at]:.2f}" for run in evaluations.values()
            )
            for name, at in (
                *(("heldout", 0), ("heldout", -1)),
                *(("heldout_blind", -1), ("heldout_swapped", -1)),
            )
        ]
        first, last, blind, swap = columns
        print(f"{part:20} first {first}, last {last}, blind {blind}, swapped {swap}", flush=True)


def _options_of(structure: str) -> dict[str, str]:
    """Return the options of the family for one structure, as `mage adapt` takes them."""
    return {"structures": f'["{structure}"]', "heldout": "words", "feedback": "told"}


def _measure(model: Path, game: str, options: dict[str, str], trials: int, folder: Path) -> None:
    """Let `mage adapt` measure a model on one game."""
    command = [sys.executable, "-m", "mage_services.cli.main", "adapt", "--model", str(model)]
    command += ["--games", game, "--trials", str(trials), "--out", str(folder)]
    for key, value in options.items():
        command += ["--option", f"{game}.{key}={value}"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("a") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)


def _figures(folder: Path) -> dict[str, Any]:
    """Return the figures of a certificate that the table needs."""
    document = json.loads((folder / "certificate.json").read_text())
    differences = document["differences"]
    return {
        "verdict": document["verdict"],
        "sentence": document["sentence"],
        "returns": document["returns"],
        "differences": {name: differences[name] for name in DIFFERENCES},
    }


def _print_row(label: str, models: list[dict[str, Any]]) -> None:
    """Print the means over the models, and each one's least difference and verdict."""

    def mean(arm: str, episode: int) -> float:
        return sum(model["returns"][arm][episode][0] for model in models) / len(models)

    verdicts = [
        f"{min(each['mean'] for each in model['differences'].values()):+.2f} {model['verdict']}"
        for model in models
    ]
    controls = "".join(f" {mean(arm, -1):7.2f}" for arm in CONTROLS)
    print(
        f"{label} {mean('own', 0):6.2f} {mean('own', -1):6.2f}{controls}  " + "; ".join(verdicts),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
