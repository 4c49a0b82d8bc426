"""How much memory a step of a pretrained model takes.

    python -m bench.models.step_memory MODEL         15 minutes, 5 GB

Batches of 32 made-up trials, 340 tokens each give or take 40, which begin with the same 136 tokens,
in four minibatches: `Trainer.step` on the processor in float32, two steps a variant. `MODEL` is a
HuggingFace directory; the baseline's is SmolLM2-135M-Instruct.

    passes           at most 1,360 tokens a pass, three to four trials
    checkpointed     the same, and the activations of each layer computed again
    adapters         passes, and adapters of rank 16 on the frozen model instead of all weights
    opening          the same, and what the trials of a pass begin with goes through the model once

Every variant is a process of its own with the environment that the supervisor gives the learner of
a pretrained model. "Beyond" is its peak of resident memory less what was resident when the model
had been loaded and less the optimizer's state: gradients, activations, logits, and holes in the
heap. "Slack" is what of it is still resident after the last step.
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
from mage_async.config.learning import Learner
from mage_async.config.policy import Lora
from mage_async.config.schema import Config
from mage_async.learning.trainer import Trainer
from mage_async.policy.load import load_policy
from mage_async.policy.lora import add_adapters
from mage_services.processes.supervisor import LARGE_TENSORS

LIMIT_BYTES = 4_000_000_000
NUM_TRIALS, NUM_STEPS = 32, 2
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
    """Train two steps in this process."""
    torch.set_num_threads(threads)
    rules = Learner(minibatches=4, **VARIANTS[variant])
    policy = load_policy(model, "float32", "cpu")
    if variant in ("adapters", "opening"):
        add_adapters(policy, Lora(), 0)
    trainer = Trainer(policy, Config(learner=rules))
    trained = sum(one.nbytes for one in policy.parameters() if one.requires_grad)
    weights = sum(one.nbytes for one in policy.parameters())
    assert all(one.isfinite().all() for one in policy.parameters())  # a mapped file is read so
    loaded = _resident("VmRSS")
    vocabulary, source = trainer.model.config.vocab_size, np.random.default_rng(0)
    took_s = []
    for _ in range(NUM_STEPS):
        trials = batch(source, vocabulary, NUM_TRIALS)
        began = time.monotonic()
        trainer.step(trials)
        took_s.append(round(time.monotonic() - began, 1))
    beyond = loaded + 2 * trained
    return {
        "beyond_bytes": _resident("VmHWM") - beyond,
        "slack_bytes": _resident("VmRSS") - beyond,
        "peak_bytes": _resident("VmHWM"),
        "weights_bytes": weights,
        "optimizer_bytes": 2 * trained,
        "step_s": took_s,
    }


def _resident(name: str) -> int:
    """A line of this process's status, in bytes."""
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
    found = {name: _apart(name, given.model, given.threads) for name in VARIANTS}
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


def _apart(name: str, model: Path, threads: int) -> dict[str, Any]:
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
