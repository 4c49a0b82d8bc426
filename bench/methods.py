"""Four other methods beside the quickstart's own: what each one changes in the last episode.

    python bench/methods.py [--run-dir DIR] [--seeds 0 1 2] [--only sge] [--only-report]

Each arm is the quickstart with one thing changed by `--method`, at the same number of steps and
trials, on-policy in one process (`in_process.py`). Seeds share tasks, evaluation and, where the
contexts look alike, the warm start; so differences are taken seed by seed. `rema` needs reflections
and is compared with the quickstart that has them, the others with the quickstart. Resumable: a run
that is in the folder is not run again.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from baseline import write_baseline
from in_process import InProcess, prepare

from mage_async import config_file, methods
from mage_async.config import Config
from mage_async.intervals import interval, paired

CONFIG = Path(__file__).parents[1] / "configs/quickstart.toml"
STEPS, TRIALS = 20, 512
"""A third of the quickstart's steps, where it still learns: what is compared is how fast."""
ROOM = "engine.max_tokens=240"
REMARKS = 'trial.memory="history_and_reflection"'


@dataclass(frozen=True, slots=True)
class Arm:
    """The quickstart with some keys changed."""

    method: str | None = None
    changes: tuple[str, ...] = ()
    control: str = "quickstart"
    """The arm it is compared with."""
    warm_start: str = "plain"
    """Arms of equal contexts share theirs."""


ARMS = {
    "quickstart": Arm(),
    "scaling_inter": Arm("scaling_inter", ("curriculum.turns=[2, 3, 4]", "curriculum.steps=5")),
    "metacure": Arm("metacure"),
    "sge": Arm("sge", ('trial.strategy="episode"',), warm_start="strategies"),
    "reflections": Arm(None, (REMARKS,), warm_start="reflections"),
    "rema": Arm("rema", (REMARKS,), control="reflections", warm_start="reflections"),
}


def main() -> int:
    """Run what is missing, then report what there is."""
    given = _arguments()
    names = given.only or list(ARMS)
    if not given.only_report:
        for seed in given.seeds:
            for name in names:
                run(name, seed, given.run_dir)
    found = {
        (name, seed): json.loads(file.read_text())
        for name in ARMS
        for seed in given.seeds
        if (file := _file(name, seed, given.run_dir)).exists()
    }
    return _report(found, given.seeds)


def run(name: str, seed: int, folder: Path) -> None:
    """Train one arm with one seed and write down what it is worth."""
    file, began = _file(name, seed, folder), time.monotonic()
    if file.exists():
        return
    config = config_of(name, seed)
    warm = folder / ARMS[name].warm_start
    warm.mkdir(parents=True, exist_ok=True)
    lab = InProcess(config, prepare(config, warm))
    curve = lab.train()
    heldout = lab.evaluate("heldout", TRIALS)
    said = {
        "curve": curve,
        "heldout": msgspec.to_builtins(heldout),
        "wall_s": time.monotonic() - began,
    }
    file.write_text(json.dumps(said))
    print(name, seed, [round(value, 3) for value in heldout.return_by_episode], flush=True)


def config_of(name: str, seed: int) -> Config:
    """The configuration of an arm."""
    arm = ARMS[name]
    method = methods.assignments(arm.method) if arm.method else []
    return config_file.load(
        CONFIG, [*method, *arm.changes, ROOM, f"learner.steps={STEPS}", f"seed={seed}"]
    )


def _report(found: dict[tuple[str, int], Any], seeds: list[int]) -> int:
    rows = []
    for name, arm in ARMS.items():
        values = _last(found, name, seeds)
        if not values:
            continue
        control = _last(found, arm.control, seeds)
        gains = paired(values, control)
        gain = interval(gains) if name != arm.control and len(gains) > 1 else None
        first = [found[name, seed]["heldout"]["return_by_episode"][0] for seed in values]
        row = {"arm": name, "control": arm.control, "first_episode": first, "gain": gain}
        rows.append(row | {"last_episode": list(values.values())})
        beside = "" if gain is None else f"  {gain[0]:+.3f} ± {gain[1]:.3f} against {arm.control}"
        last = " ".join(f"{value:+.3f}" for value in values.values())
        print(f"{name:14} episode 3: {last}{beside}")
    write_baseline("methods", {"steps": STEPS, "trials": TRIALS, "seeds": seeds, "rows": rows})
    return 0


def _last(found: dict[tuple[str, int], Any], name: str, seeds: list[int]) -> dict[int, float]:
    """Held-out return of the last episode by seed."""
    return {
        seed: found[name, seed]["heldout"]["return_by_episode"][-1]
        for seed in seeds
        if (name, seed) in found
    }


def _file(name: str, seed: int, folder: Path) -> Path:
    return folder / f"{name}-{seed}.json"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/methods"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, help="these arms alone")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
