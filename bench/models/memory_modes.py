"""Compare what SmolLM2 remembers between episodes: nothing, its history, its reflections, or both.

    python -m bench.models.memory_modes MODEL_DIR [--modes none reflection …] [--seeds 0]
        [--run-dir DIR] [--only-report]

It runs `configs/smollm2_boxes.toml` with each mode of `trial.memory`, one actor, up to an hour of a
core a run. MODEL_DIR holds SmolLM2-135M-Instruct. All runs have the same tasks, steps and
trials a step; a reflection of at most 24 tokens follows each episode but the last. The program
prints the held-out return of both episodes, and of the last one when the hidden task is swapped
before it, by mode and seed. A run that was measured is not made again.
"""

import argparse
from pathlib import Path

from bench.learning.cases import Case, Summary
from bench.learning.shipped import is_measured, run, run_dir_of
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser

MODES = ("none", "history", "reflection", "history_and_reflection")
REFLECTION_TOKENS = 24


def main() -> None:
    """Run the modes, and print and write the figures."""
    given = _arguments()
    found: dict[str, dict[str, dict[str, object]]] = {}
    for mode in given.modes:
        for seed in given.seeds:
            case = _case(mode, given.model)
            if given.only_report and not is_measured(run_dir_of(case, seed, given.run_dir)):
                continue
            figures = _figures(run(case, seed, given.run_dir, actors=1))
            found.setdefault(mode, {})[str(seed)] = figures
            print(f"{mode:24} seed {seed}", *(f"{name} {value}" for name, value in figures.items()))
    write_baseline("memory_modes", {"modes": found})


def _case(mode: str, model: Path) -> Case:
    changes = (
        f"policy.source={model.resolve()}",
        f"trial.memory={mode}",
        f"transcript.max_reflection_tokens={REFLECTION_TOKENS}",
        "evaluation.every=0",
    )
    return Case(f"boxes_{mode}", "smollm2_boxes", changes, {})


def _figures(summary: Summary) -> dict[str, object]:
    held_out, swapped = (summary["evaluation"][name] for name in ("heldout", "heldout_swapped"))
    return {
        "held-out": [round(value, 3) for value in held_out["return_by_episode"]],
        "±": [round(value, 3) for value in held_out["ci95_by_episode"]],
        "swapped, last": round(swapped["return_by_episode"][-1], 3),
        "minutes of a processor": round(summary["processor_s"] / 60, 1),
    }


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="SmolLM2-135M-Instruct")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/memory_modes"), metavar="DIR")
    parser.add_argument("--only-report", action="store_true", help="of the runs there are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
