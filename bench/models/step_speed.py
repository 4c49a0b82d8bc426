"""Time a training step of a pretrained model without and with its optimisations.

    python -m bench.models.step_speed MODEL [--trials 32] [--repeats 3]        15 minutes, 7 GB

A step (`Trainer.step`) runs on the CPU in float32. A batch has 32 synthetic trials of 340 ± 40
tokens with the same 136 tokens at their beginning, in two minibatches. `MODEL` is a HuggingFace
directory; the baseline's is SmolLM2-135M-Instruct. Every arm adds an optimisation:

    before           none: all weights are trained, and every micro-batch has a forward of its own
                     for the proximal log-probs, before training begins
    first forward    the first minibatch takes its proximal log-probs from its training forward
    adapters         LoRA adapters of rank 16 are trained instead of all weights
    opening          the common beginning goes through the model once per micro-batch
    interpolated     the proximal log-probs of the second minibatch are estimated, without a forward

Arms alternate on the same batches in one process. The program prints wall-clock and CPU seconds of
a step, and the trained tokens per second. The exit status is 1 if the last arm is less than 1.8
times as fast as the first.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.lib.baseline import write_baseline
from bench.lib.learner_process import become_learner
from bench.lib.options import option_parser
from bench.models.made_up_trials import MEAN_TOKENS, OPENING, SPREAD, batch
from mage_async.config.schema import Config, Learner, Lora
from mage_async.learning.lora import add_adapters
from mage_async.learning.packing import MicroBatch, TrainingSequence
from mage_async.learning.token_loss import HeadInputs
from mage_async.learning.trainer import Trainer
from mage_async.policy.load import load_policy

WANTED = 1.8
"""Least ratio of the time of the first arm to that of the last."""
MINIBATCHES = 2
ARMS = ("before", "first forward", "adapters", "opening", "interpolated")


@dataclass(frozen=True, slots=True)
class Took:
    """Hold the seconds of every step of an arm."""

    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    """Of all threads."""


class ForwardBefore(Trainer):
    """Trainer that computes proximal log-probs by a forward of its own for every micro-batch."""

    def micro_batches(self, sequences: Sequence[TrainingSequence]) -> list[MicroBatch]:
        """Return the micro-batches of a minibatch, with log-probs under the present weights."""
        begin = super().with_proximal
        return [begin(each) for each in super().micro_batches(sequences)]

    def with_proximal(self, batch: MicroBatch, inputs: HeadInputs | None = None) -> MicroBatch:
        """Return the micro-batch itself: it has its log-probs already."""
        return batch


def trainer_of(arm: str, model: Path) -> Trainer:
    """Return the trainer of an arm, with its own copy of the model."""
    policy = load_policy(model, "float32", "cpu")
    place = ARMS.index(arm)
    if place >= ARMS.index("adapters"):
        add_adapters(policy, Lora(), 0)
    rules = Learner(
        minibatches=MINIBATCHES,
        learning_rate=1e-6,
        shared_opening=place >= ARMS.index("opening"),
        proximal="interpolated" if arm == "interpolated" else "computed",
    )
    kind = ForwardBefore if arm == "before" else Trainer
    return kind(policy, Config(learner=rules))


def measure(model: Path, arms: Sequence[str], num_trials: int, repeats: int) -> dict[str, Took]:
    """Return the times of every step, by arm, after a warm-up step of each on a quarter of a
    batch."""
    trainers = {arm: trainer_of(arm, model) for arm in arms}
    vocabulary = next(iter(trainers.values())).model.config.vocab_size
    source = np.random.default_rng(0)
    took = {arm: Took() for arm in arms}
    for trainer in trainers.values():
        trainer.step(batch(source, vocabulary, max(MINIBATCHES, num_trials // 4)))
    for _ in range(repeats):
        trials = batch(source, vocabulary, num_trials)
        for arm, trainer in trainers.items():
            began, computed = time.monotonic(), time.process_time()
            trainer.step(trials)
            took[arm].wall_s.append(time.monotonic() - began)
            took[arm].processor_s.append(time.process_time() - computed)
    return took


def report(took: dict[str, Took], given: argparse.Namespace) -> float:
    """Print the table and write the baseline; return how many times as fast the last arm is."""
    num_tokens = given.trials * MEAN_TOKENS
    arm_medians = [median(each.wall_s) for each in took.values()]
    first, last = arm_medians[0], arm_medians[-1]
    print(f"{'arm':<15}{'s a step':>10}{'of a core':>11}{'tokens/s':>10}{'ratio':>8}")
    for arm, each in took.items():
        wall_s, processor_s = median(each.wall_s), median(each.processor_s)
        rate, ratio = num_tokens / wall_s, first / wall_s
        print(f"{arm:<15}{wall_s:>10.1f}{processor_s:>11.1f}{rate:>10.0f}{ratio:>8.2f}")
    shapes = {"trials": given.trials, "mean_tokens": MEAN_TOKENS, "spread": SPREAD}
    settings = {"opening": OPENING, "minibatches": MINIBATCHES, "threads": given.threads}
    arms = {arm: asdict(each) for arm, each in took.items()}
    figures = {"model": given.model.name, "wanted": WANTED, "arms": arms, "gain": first / last}
    if not given.no_baseline:
        write_baseline("step_speed", shapes | settings | figures)
    return first / last


def main() -> None:
    """Measure, and exit with 1 if the gain is too small."""
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trials", type=int, default=32, help="of a batch")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed of each arm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, help="these arms")
    parser.add_argument("--no-baseline", action="store_true", help="write no file")
    given = parser.parse_args()
    become_learner("bench.models.step_speed", given.threads)
    torch.set_num_threads(given.threads)
    gain = report(measure(given.model, given.only, given.trials, given.repeats), given)
    print(f"{gain:.2f} times as fast, wanted {WANTED}: {'ok' if gain >= WANTED else 'MISSED'}")
    sys.exit(gain < WANTED)


if __name__ == "__main__":
    main()
