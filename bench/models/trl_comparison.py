"""Compare TRL's GRPOTrainer with our engine and trainer on the same steps, in tokens per second.

    python -m venv DIR && DIR/bin/pip install trl -e .            in the root of a checkout
    DIR/bin/python -m bench.models.trl_comparison MODEL [--steps 4] [--completion 64]

`MODEL` is a HuggingFace directory, for the baseline SmolLM2-135M-Instruct. Every step plays and
trains 32 completions of 64 tokens, in 4 groups of 8, on the CPU in float32 with LoRA adapters of
rank 16. Each has one turn, because TRL plays several turns as tool calls only, which this model's
chat template does not support. The prompt is the first one of `configs/smollm2_boxes.toml`, which
is the same in all trials.

    sampled     TRL: transformers' `generate` on the batch; ours: the embedded engine, which draws
                as many tokens for the same prompts
    trained     one update on TRL's completions with TRL's advantages, from the adapters that TRL's
                update began with. TRL: 4 batches of 8, without checkpointed activations; ours:
                passes of at most as many tokens

The two alternate, step by step, in one process; the first step warms up. The norms of both
gradients are compared in every step. The exit status is 1 if ours samples or trains fewer than
twice as many tokens per second, or a norm differs by more than 1 %."""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.lib.baseline import write_baseline
from bench.lib.learner_process import become_learner
from bench.lib.options import option_parser
from bench.models.own_side import (
    ADAPTERS,
    BATCH,
    GROUP_SIZE,
    GROUPS,
    RATE,
    Ours,
    first_prompt,
    sequenced,
)

WANTED, MOST_GAP = 2.0, 0.01
"""Least ratio of tokens per second, ours over TRL's, and largest relative difference of norms."""


def measure(model: Path, num_steps: int, num_drawn: int) -> list[dict[str, dict[str, float]]]:
    """Return seconds and gradient norm of each step, by side: "trl" and "ours"."""
    from bench.models.trl_side import TrlSide  # a library that only this benchmark needs

    prompt = first_prompt(model)
    ours, steps = Ours(model, prompt, num_drawn), list[dict[str, dict[str, float]]]()

    def ended(found: dict[str, float], batch: list[Any], adapters: dict[str, torch.Tensor]) -> None:
        own = {"sampled_s": ours.sample()}
        own |= ours.train([sequenced(*each) for each in batch], adapters)
        steps.append({"trl": found, "ours": own})
        print(f"step {len(steps)}: {found} beside {own}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        shape = {"rank": ADAPTERS.rank, "alpha": ADAPTERS.alpha, "targets": ADAPTERS.targets}
        side = TrlSide(model, prompt.tolist(), num_drawn, (GROUPS, GROUP_SIZE), RATE, shape)
        side.run(num_steps + 1, Path(folder), ended)
    return steps[1:]  # without the step that warmed up


def report(steps: list[dict[str, dict[str, float]]], given: argparse.Namespace) -> list[str]:
    """Print the table and write the baseline; return the bounds that were missed."""
    num_tokens = BATCH * given.completion
    print(f"{'tokens/s':<10}{'TRL':>10}{'ours':>10}{'ratio':>8}")
    figures: dict[str, Any] = {}
    for name in ("sampled", "trained"):
        rates = {
            side: num_tokens / median(step[side][f"{name}_s"] for step in steps)
            for side in ("trl", "ours")
        }
        figures[name] = rates | {"ratio": rates["ours"] / rates["trl"]}
        row = "".join(f"{rate:>10.0f}" for rate in rates.values())
        print(f"{name:<10}{row}{figures[name]['ratio']:>8.2f}")
    figures["norm_gap"] = max(abs(step["ours"]["norm"] / step["trl"]["norm"] - 1) for step in steps)
    print(f"gradients' norms differ by at most {figures['norm_gap']:.1e}")
    shapes = {"groups": GROUPS, "group_size": GROUP_SIZE, "completion": given.completion}
    settings = {"model": given.model.name, "threads": given.threads, "steps": steps}
    if not given.no_baseline:
        write_baseline("trl_comparison", shapes | settings | figures)
    missed = [name for name in ("sampled", "trained") if figures[name]["ratio"] < WANTED]
    return [*missed, "norm"] if figures["norm_gap"] > MOST_GAP else missed


def main() -> None:
    """Measure, and exit with 1 if a bound was missed."""
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=4, help="that are timed")
    parser.add_argument("--completion", type=int, default=64, help="tokens drawn for each prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-baseline", action="store_true", help="write no file")
    given = parser.parse_args()
    become_learner("bench.models.trl_comparison", given.threads)
    torch.set_num_threads(given.threads)
    missed = report(measure(given.model, given.steps, given.completion), given)
    print(f"missed: {', '.join(missed)}" if missed else "all within bounds")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
