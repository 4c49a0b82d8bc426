"""Compare meta-RL with single-episode RL on each game of the task pack, and on the whole pack.

    python -m bench.learning.pack [--seeds 0 1 2] [--only hangman wordle …] [--run-dir DIR]
        [--actors 4] [--set A.B=VALUE …] [--only-report]

Every game is trained by itself in a run of the quickstart's size, and as a control in trials of one
episode, with the same warm start, optimizer and number of episodes. `configs/pack.toml` trains
seven games at once, and so does its control; two more games are only evaluated. All runs are
evaluated in trials of three episodes on held-out tasks, of which the last episode is compared. With
a DIR, runs are kept and not made again. The program prints for each game whether it beats its
control, and writes a baseline.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.learning.cases import Case, Summary
from bench.learning.shipped import is_measured, run, run_dir_of
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.results.intervals import interval

_SIZE = (
    "policy.rope_theta=10000.0",
    "warm_start.steps=300",
    "warm_start.max_steps=300",
    "warm_start.gate=1.0",
    "engine.max_contexts=144",
    "engine.max_tokens=320",
    "credit.kind=cumulative_paper",
    "learner.entropy_ceiling=2.0",
)
"""Settings of games with longer contexts, which change the quickstart's."""
_SEVERAL_WORDS = ("transcript.forced_tags=open", "transcript.max_action_tokens=4")
"""Settings of a game whose actions have more words than the quickstart's one."""
# The controls: three times the quickstart's 18 groups a step, each of one episode instead of three.
_SINGLE = (
    "trial.episodes=1",
    "admission.groups_per_step=54",
    "engine.max_contexts=240",
    "credit.kind=single_episode",
)
# Games of the pack without a configuration file of their own, and their settings.
GAMES: dict[str, tuple[str, ...]] = {
    "boxes": (),
    "hangman": (),
    "wordle": (),
    "blackjack": (),
    "numberlock": _SEVERAL_WORDS,
    "bandit": (),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A configuration and its control."""

    name: str
    meta: Case
    single: Case


def pairs() -> list[Pair]:
    """Return the pairs of all games, then of the pack."""
    shipped = {"rps": "quickstart", "minesweeper": "minesweeper"}
    made = [
        Pair(name, _case(name, config), _case(f"{name} single", f"{config}_single_episode"))
        for name, config in shipped.items()
    ]
    for name, own in GAMES.items():
        changes = (f"environment.name={name}", *_SIZE, *own)
        single = _case(f"{name} single", "quickstart", (*changes, *_SINGLE))
        made.append(Pair(name, _case(name, "quickstart", changes), single))
    return [*made, Pair("pack", _case("pack", "pack"), _case("pack single", "pack_single_episode"))]


def main() -> None:
    """Run the pairs one after the other, and print each result."""
    given = _arguments()
    chosen = [pair for pair in pairs() if not given.only or pair.name in given.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.run_dir or Path(temporary)
        rows: list[dict[str, Any]] = []
        for pair in chosen:
            played = [
                (_played(pair.meta, seed, folder, given), _played(pair.single, seed, folder, given))
                for seed in given.seeds
            ]
            known = [(meta, single) for meta, single in played if meta and single]
            for row in _rows(pair.name, known):
                rows.append(row)
                print(_line(row), flush=True)
    write_baseline("pack", {"seeds": given.seeds, "settings": given.set, "rows": rows})


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=[pair.name for pair in pairs()])
    parser.add_argument("--run-dir", type=Path, help="where the runs stay, and are found again")
    parser.add_argument("--actors", type=int, default=4, help="of each run")
    parser.add_argument("--set", action="append", default=[], help="a key of every run")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


def _case(name: str, config: str, changes: tuple[str, ...] = ()) -> Case:
    return Case(name, config, changes, {})


def _played(case: Case, seed: int, folder: Path, given: argparse.Namespace) -> Summary | None:
    """Return the summary of a run; None if it does not exist and `--only-report` forbids to make
    it."""
    if given.only_report and not is_measured(run_dir_of(case, seed, folder)):
        return None
    changed = Case(case.name, case.config, (*case.changes, *given.set), case.checks)
    return run(changed, seed, folder, given.actors)


def _labels(played: Sequence[tuple[Summary, Summary]]) -> list[str | None]:
    """Return the labels of the compared environments: None for all together, then each of a mix."""
    if not played:
        return [None]
    first_meta, _ = played[0]
    return [None, *first_meta.get("environments", {})]


def _rows(name: str, played: Sequence[tuple[Summary, Summary]]) -> list[dict[str, Any]]:
    return [_row(name, label, played) for label in _labels(played)] if played else []


def _row(name: str, label: str | None, played: Sequence[tuple[Summary, Summary]]) -> dict[str, Any]:
    """Return the last episode's returns by seed, and the gaps to the control.

    Training tasks are reported too, because a policy may have learned words of these tasks only.
    """
    sets = ("heldout", "heldout_blind", "heldout_swapped", "train")
    held, trained = (_gap(each, label, played) for each in ("heldout", "train"))
    first_meta, _ = played[0]  # the references are the same in all runs
    return {
        "game": name if label is None else f"{name}: {label}",
        **{each: [_last(meta, each, label) for meta, _ in played] for each in sets},
        "first_episode": [_part(meta, "heldout", label)[0] for meta, _ in played],
        "single_episode": [_last(single, "heldout", label) for _, single in played],
        "gap": held,
        "gap_on_train_tasks": trained,
        "references": _references(first_meta, label),
        "beats": len(played) > 1 and held["mean"] > held["ci95"],
    }


def _gap(name: str, label: str | None, played: Sequence[tuple[Summary, Summary]]) -> dict[str, Any]:
    """Return the gaps to the control in one evaluation set: by seed, and their mean with its
    interval."""
    gaps = [_last(meta, name, label) - _last(single, name, label) for meta, single in played]
    mean, width = interval(gaps) if len(gaps) > 1 else (gaps[0], 0.0)
    return {"mean": mean, "ci95": width, "by_seed": gaps}


def _references(summary: Summary, label: str | None) -> dict[str, float]:
    """Return the reference returns of the last episode on held-out tasks."""
    whole = summary if label is None else summary["environments"][label]
    return {name: values[-1] for name, values in whole["references"]["heldout"].items()}


def _last(summary: Summary, name: str, label: str | None) -> float:
    return _part(summary, name, label)[-1]


def _part(summary: Summary, name: str, label: str | None) -> list[float]:
    """Return the return of each episode in an evaluation set, of one environment or of all."""
    score = summary["evaluation"][name]
    whole = score if label is None else score["parts"]["environment"][label]
    return whole["return_by_episode"]


def _line(row: dict[str, Any]) -> str:
    """Return the line of a game, with its verdict in words."""
    gap = row["gap"]
    means = {key: sum(row[key]) / len(row[key]) for key in ("heldout", "single_episode")}
    verdict = "beats single-episode RL" if row["beats"] else "does NOT beat single-episode RL"
    if len(gap["by_seed"]) == 1:
        verdict = "one seed decides nothing"
    trained = row["gap_on_train_tasks"]
    return (
        f"{row['game']:18} last episode {means['heldout']:+.3f}, single-episode RL "
        f"{means['single_episode']:+.3f}, gap {gap['mean']:+.3f} ±{gap['ci95']:.3f}: {verdict}; "
        f"gap on train tasks {trained['mean']:+.3f} ±{trained['ci95']:.3f}"
    )


if __name__ == "__main__":
    main()
