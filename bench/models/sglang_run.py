"""Train SmolLM2 with SGLang, and compare SGLang's log-probs with the learner's.

    ENV/bin/python -m bench.models.sglang_run MODEL_DIR [--engine embedded]     8 minutes, 8 GB

ENV is an environment that has SGLang (`tests/sglang/make_env.py`), MODEL_DIR holds
SmolLM2-135M-Instruct. `mage train --config smollm2_boxes` plays by SGLang on the processor, in
float32, for three steps of all weights, so SGLang loads three published versions. The program
prints the largest difference between the engine's and the learner's log-prob of a token under the
same version. The exit status is 1 if it is over 1e-4 nats, or a step is missing.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from bench.learning.cases import Case, Summary
from bench.learning.shipped import run
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser

STEPS, MAX_GAP = 3, 1e-4
"""Number of steps, and the largest allowed difference of log-probs, in nats."""
# Settings of the short run, and of its engines.
SHORT = (
    f"learner.steps={STEPS}",
    "policy.dtype=float32",
    "policy.lora=none",
    "learner.learning_rate=0.00001",
    "learner.final_learning_rate=0.00001",
    "transcript.forced_tags=both",
    "engine.max_contexts=16",
    "engine.threads=1",
    "admission.groups_per_step=4",
    "admission.rule=sync",
    "evaluation.every=0",
    "evaluation.final_trials=16",
)
ENGINES = {"sglang": ("engine.kind=sglang",), "embedded": ("engine.arithmetic=float32",)}


def main() -> None:
    """Run the three steps, and print and judge the difference of log-probs."""
    given = _arguments()
    changes = (*SHORT, *ENGINES[given.engine], f"policy.source={given.model.resolve()}")
    with tempfile.TemporaryDirectory() as folder:
        summary = run(Case(given.engine, "smollm2_boxes", changes, {}), 0, Path(folder), actors=1)
    measured = _measured(summary)
    for name, value in measured.items():
        print(f"{name:14} {value:.4g}")
    # A largest difference of exactly 0 would mean that no token was compared.
    is_ok = measured["steps"] == STEPS and 0 < measured["max_gap_nats"] <= MAX_GAP
    print("ok" if is_ok else "MISSED")
    if given.engine == "sglang":
        write_baseline("sglang_run", {"measured": measured})
    sys.exit(not is_ok)


def _measured(summary: Summary) -> dict[str, float]:
    mismatch = summary["logprob_mismatch"]
    held_out = summary["evaluation"]["heldout"]
    return {
        "steps": summary["steps"],
        "tokens": mismatch["num_tokens"],
        "max_gap_nats": mismatch["max_abs"],
        "mean_gap_nats": mismatch["mean_abs"],
        "evaluated": held_out["num_trials"],
        "minutes": summary["wall_s"] / 60,
    }


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    return parser.parse_args()


if __name__ == "__main__":
    main()
