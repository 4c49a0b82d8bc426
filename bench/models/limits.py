"""Compare the time of a training step with that of its matrix products alone, on one core.

    python -m bench.models.limits MODEL [--dtype bfloat16] [--trials 8]        3 minutes, 5 GB

It measures the rate of matrix products of the model's shapes on one thread, and counts the
floating-point operations that a step needs (`needed`): the shared opening of a group's trials is
computed once, the LM head for sampled tokens only, and frozen weights get no gradient. The limit is
the time that these operations take at this rate. Then it trains LoRA adapters of rank 16 on the
synthetic trials of `bench/models/made_up_trials.py`, in three ways that alternate on the same
batches:

    plain         a loop over transformers and peft without this project: one sequence at a time,
                  so that nothing is padded, and AdamW on float32 adapters
    by operation  `Trainer.step` over transformers' and peft's layers
    merged        `Trainer.step` as a run makes it, over `mage_async/learning/merged_layers.py`

It prints the CPU seconds of each way, the limit's share of them, and how the seconds of `merged`
are spent. The exit status is 1 if the limit's share of `merged` is below 0.6."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.lib.baseline import write_baseline
from bench.lib.learner_process import become_learner
from bench.lib.options import option_parser
from bench.models.made_up_trials import MEAN_TOKENS, OPENING, batch
from mage_async.config.schema import Config, Learner, Lora
from mage_async.learning.lora import add_adapters
from mage_async.learning.packing import TrainingSequence
from mage_async.learning.trainer import Trainer
from mage_async.policy.load import load_policy

WANTED = 0.6
"""Least share of the limit in the time of `merged`."""
RATE = 1e-6
"""Learning rate of every arm: small enough that the arms stay alike."""
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm"),
    "attention's products": ("aten::bmm", "aten::baddbmm"),
    "softmax": ("aten::_softmax", "aten::_softmax_backward_data", "aten::_log_softmax"),
    "copies and conversions": ("aten::copy_", "aten::cat", "aten::index_copy_"),
    "gate": ("aten::silu", "aten::silu_backward"),
}
"""torch's operations by part of a step; the rest is norms, rotations, sums and Python."""


class Plain:
    """A loop over transformers and peft, one sequence at a time."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        from peft import LoraConfig, get_peft_model

        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(base, config, autocast_adapter_dtype=True)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE)
        self._dtype = dtype

    def step(self, sequences: list[TrainingSequence]) -> None:
        """Train on advantage-weighted log-probs."""
        self.optimizer.zero_grad(set_to_none=True)
        for each in sequences:
            tokens = torch.from_numpy(each.tokens.astype(np.int64))[None]
            positions = torch.from_numpy(each.places)
            with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
                out = self.model(tokens, logits_to_keep=positions - 1, use_cache=False)
            logits = out.logits[0].float()
            losses = functional.cross_entropy(logits, tokens[0, positions], reduction="none")
            (losses * each.advantages).sum().backward()
        self.optimizer.step()


def needed(model: PreTrainedModel, sequences: list[TrainingSequence]) -> float:
    """Return the number of floating-point operations of a step: forward, and gradients of
    activations and adapters."""
    own = sum(len(each.tokens) - OPENING for each in sequences)  # tokens after the opening
    tokens, sampled = OPENING + own, sum(len(each.places) for each in sequences)
    shape = model.config
    # The matrices of the layers, without the LM head, which is counted below.
    frozen = sum(
        each.numel()
        for name, each in model.named_parameters()
        if "layers." in name and each.dim() == 2
    )
    adapters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    frozen -= adapters
    # Each own token attends to the opening and to half of its own sequence, on average.
    lengths = np.array([len(each.tokens) - OPENING for each in sequences], np.float64)
    pairs = OPENING**2 / 2 + float((lengths * (OPENING + lengths / 2)).sum())
    size = shape.num_attention_heads * (
        shape.head_dim or shape.hidden_size // shape.num_attention_heads
    )
    attention = pairs * size * 2 * shape.num_hidden_layers
    head = sampled * shape.vocab_size * shape.hidden_size
    # A product counts two operations. Forward and gradient of the input: twice; adapters have a
    # gradient too. The head has a forward for log-probs and the gradient of its input.
    return 2.0 * (tokens * (2 * frozen + 3 * adapters) + 3 * attention + 2 * head)


def rate(model: PreTrainedModel, num_tokens: int, dtype: torch.dtype) -> float:
    """Measure floating-point operations per second in products of the model's shapes, over all."""
    shape = model.config
    width, inner = shape.hidden_size, shape.intermediate_size
    operations = seconds = 0.0
    for inputs, outputs in ((width, width), (width, inner), (inner, width)):
        rows = torch.randn(num_tokens, inputs).to(dtype)
        weight = torch.randn(outputs, inputs).to(dtype)
        functional.linear(rows, weight)
        began = time.process_time()
        for _ in range(20):
            functional.linear(rows, weight)
        seconds += time.process_time() - began
        operations += 20 * 2.0 * num_tokens * inputs * outputs
    return operations / seconds


def trainer(model: Path, dtype: Any) -> Trainer:
    """Return a trainer as a run without GPUs has it."""
    policy = load_policy(model, dtype, "cpu")
    add_adapters(policy, Lora(rank=16), 0)
    config = Learner(
        minibatches=1,
        learning_rate=RATE,
        shared_opening=True,
        activation_checkpointing=False,
        max_tokens_per_microbatch=4096,
    )
    return Trainer(policy, Config(learner=config))


def main() -> int:
    """Measure, print, and write the baseline."""
    given = _arguments()
    # Restarts this program with the environment variables of a run's learner.
    become_learner("bench.models.limits", 1)
    torch.set_num_threads(1)
    dtype = getattr(torch, given.dtype)
    plain = Plain(given.model, dtype)
    by_operation, merged = trainer(given.model, given.dtype), trainer(given.model, given.dtype)

    def step_by_operation(sequences: list[TrainingSequence]) -> None:
        with patch("mage_async.learning.forward.merged_layers", lambda model: None):
            by_operation.step(sequences)

    arms: dict[str, Callable[[list[TrainingSequence]], Any]] = {
        "plain": plain.step,
        "by operation": step_by_operation,
        "merged": merged.step,
    }
    source, vocabulary = np.random.default_rng(0), merged.model.config.vocab_size
    took: dict[str, list[float]] = {name: [] for name in arms}
    shares: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(given.repeats + 1):
        sequences = batch(source, vocabulary, given.trials)
        least = needed(merged.model, sequences)
        limit = least / rate(merged.model, given.trials * (MEAN_TOKENS - OPENING), dtype)
        for name, step in arms.items():
            began = time.process_time()
            step(sequences)
            if repeat:  # the first round warms up
                took[name].append(time.process_time() - began)
                shares[name].append(limit / took[name][-1])
    print(f"{given.model.name} in {given.dtype}, {given.trials} trials, one core")
    for name in arms:
        gain = median(took["plain"]) / median(took[name])
        print(
            f"{name:14}{median(took[name]):7.2f} s of a core"
            f"{median(shares[name]):7.2f} of the limit{gain:7.2f} x plain"
        )
    parts = _parts(lambda: merged.step(sequences))
    print("  ".join(f"{name} {share:.0%}" for name, share in parts.items()))
    figures = {"model": given.model.name, "dtype": given.dtype, "trials": given.trials}
    found = {"processor_s": took, "share_of_limit": shares, "parts": parts, "wanted": WANTED}
    if given.name:
        write_baseline(given.name, figures | found)
    return int(median(shares["merged"]) < WANTED)


def _parts(step: Callable[[], Any]) -> dict[str, float]:
    """Return the share of each of `PARTS` in the time of a step."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    times = {each.key: each.self_cpu_time_total for each in seen.key_averages()}
    total = sum(times.values())
    parts = {
        part: sum(times.get(name, 0.0) for name in names) / total for part, names in PARTS.items()
    }
    return parts | {"other": 1.0 - sum(parts.values())}


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--trials", type=int, default=8, help="of a batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="", help="name of the baseline to write; none by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
