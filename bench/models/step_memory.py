"""Measure the memory of a training step of a pretrained model.

    python -m bench.models.step_memory MODEL         15 minutes, 5 GB

Each variant makes two steps (`Trainer.step`) on the CPU in float32. A batch has 32 synthetic trials
of 340 ± 40 tokens with the same 136 tokens at their beginning, in four minibatches. `MODEL` is a
HuggingFace directory; the baseline's is SmolLM2-135M-Instruct.

    passes           all weights, in micro-batches of at most 1,360 tokens, three to four trials
    checkpointed     the same, with activation checkpointing
    adapters         as passes, with LoRA adapters of rank 16 instead of all weights
    opening          as adapters; the common beginning goes through the model once per micro-batch

Every variant is a process of its own with the environment variables of a learner of a pretrained
model. "Beyond" is the peak of resident memory less the loaded model and the optimizer's state:
gradients, activations, logits, and fragmentation of the heap. "Slack" is the part of it that is
still resident after the last step.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.models.made_up_trials import MEAN_TOKENS, OPENING, SPREAD, batch
from mage_async.config.schema import Config, Learner, Lora
from mage_async.learning.lora import add_adapters
from mage_async.learning.trainer import Trainer
from mage_async.policy.load import load_policy
from mage_services.processes.supervisor import LARGE_TENSORS

LIMIT_BYTES = 4_000_000_000
"""Largest allowed memory "beyond" of a variant."""
NUM_TRIALS, NUM_STEPS = 32, 2
"""Trials of a batch, and steps."""
VARIANTS: dict[str, dict[str, Any]] = {
    "passes": {"max_tokens_per_microbatch": 4 * MEAN_TOKENS},
    "checkpointed": {
        "max_tokens_per_microbatch": 4 * MEAN_TOKENS,
        "activation_checkpointing": True,
    },
    "adapters": {"max_tokens_per_microbatch": 4 * MEAN_TOKENS},
    "opening": {"max_tokens_per_microbatch": 4 * MEAN_TOKENS, "shared_opening": True},
}


def measure(model: Path, variant: str, threads: int) -> dict[str, Any]:
    """Train two steps in this process, and return the memory figures."""
    torch.set_num_threads(threads)
    rules = Learner(minibatches=4, **VARIANTS[variant])
    policy = load_policy(model, "float32", "cpu")
    if variant in ("adapters", "opening"):
        add_adapters(policy, Lora(), 0)
    trainer = Trainer(policy, Config(learner=rules))
    trained = sum(one.nbytes for one in policy.parameters() if one.requires_grad)
    weights = sum(one.nbytes for one in policy.parameters())
    assert all(one.isfinite().all() for one in policy.parameters())  # reads the whole mapped file
    loaded = _resident("VmRSS")
    vocabulary, source = trainer.model.config.vocab_size, np.random.default_rng(0)
    took_s = []
    for _ in range(NUM_STEPS):
        trials = batch(source, vocabulary, NUM_TRIALS)
        began = time.monotonic()
        trainer.step(trials)
        took_s.append(round(time.monotonic() - began, 1))
    # AdamW keeps two numbers for each trained weight.
    without_step = loaded + 2 * trained
    return {
        "beyond_bytes": _resident("VmHWM") - without_step,
        "slack_bytes": _resident("VmRSS") - without_step,
        "peak_bytes": _resident("VmHWM"),
        "weights_bytes": weights,
        "optimizer_bytes": 2 * trained,
        "step_s": took_s,
    }


def _resident(name: str) -> int:
    """Return this process's resident memory, in bytes: present ("VmRSS") or peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    """Measure each variant in a process of its own, print a table and write the baseline."""
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(measure(given.model, given.variant, given.threads)))
        return
    found = {name: _in_own_process(name, given.model, given.threads) for name in VARIANTS}
    print(f"{'variant':<15}{'beyond':>8}{'slack':>8}{'peak':>8}  GB  seconds a step")
    for name, one in found.items():
        sizes = "".join(f"{one[f'{key}_bytes'] / 1e9:8.2f}" for key in ("beyond", "slack", "peak"))
        print(f"{name:<15}{sizes}      {', '.join(map(str, one['step_s']))}")
    shapes = {"trials": NUM_TRIALS, "mean_tokens": MEAN_TOKENS, "spread": SPREAD}
    shapes |= {"opening": OPENING, "minibatches": 4}
    settings = {"model": given.model.name, "threads": given.threads, "limit_bytes": LIMIT_BYTES}
    write_baseline("step_memory", shapes | settings | {"variants": found})
    missed = [name for name, one in found.items() if one["beyond_bytes"] > LIMIT_BYTES]
    print(f"over {LIMIT_BYTES / 1e9:g} GB: {', '.join(missed)}" if missed else "all within bounds")
    sys.exit(bool(missed))


def _in_own_process(name: str, model: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.models.step_memory", str(model), "--variant", name]
    environment = {**os.environ, **LARGE_TENSORS, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*command, "--threads", str(threads)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
