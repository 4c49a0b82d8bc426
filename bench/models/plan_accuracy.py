"""Compare the memory that `mage plan` computes for an update with the memory that one takes on a
CPU.

    python -m bench.models.plan_accuracy MODEL         4 minutes, 6 GB

The learners of four configurations train two steps on synthetic trials, each in a process of its
own. The measured memory is the peak of resident memory less what was resident before the model was
made: weights, gradients, optimizer, activations and logits. Nearly every tensor has a memory map of
its own, so fragmentation of the heap is not measured; a plan counts that separately, up to 1 GB.
The planned memory is computed by `mage_async.plan` from shapes alone. `MODEL` is a HuggingFace
directory; the baseline's is SmolLM2-135M-Instruct.

    tiny        the quickstart's model of 95 thousand weights, 288 contexts in a micro-batch
    30M         the same architecture, 8 layers of width 512
    adapters    MODEL under adapters of rank 16, activations checkpointed
    whole       MODEL, all weights trained
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.learning.attention import PACKED_ATTENTION
from mage_async.learning.lora import add_adapters
from mage_async.learning.trainer import Trainer
from mage_async.plan.model_shape import shape_of
from mage_async.plan.update_memory import Batch, random_segments, update_of

MAX_GAP = 0.1
"""Largest allowed difference of planned and measured memory, as a share of the measured one."""
OWN_MAPS = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "4000000"}
"""Variables of glibc with which nearly every tensor has a memory map of its own, which is freed
with it."""
# Settings of the variants, which change the quickstart's.
ONE_GROUP = ("admission.groups_per_step=1", "learner.minibatches=1")
SHORT = (*ONE_GROUP, "engine.max_tokens=340", "learner.max_tokens_per_microbatch=1360")
VARIANTS: dict[str, tuple[str, ...]] = {
    "tiny": ("admission.groups_per_step=36", "learner.minibatches=1"),
    "30M": (
        *("policy.hidden_size=512", "policy.layers=8", "policy.heads=8", "policy.kv_heads=4"),
        *("policy.mlp_size=1536", "admission.groups_per_step=2", "learner.minibatches=1"),
    ),
    "adapters": SHORT,
    "whole": (*SHORT, "policy.lora=none", "learner.activation_checkpointing=false"),
}


def configuration(variant: str, model: Path) -> Config:
    """Return the configuration of a variant: the quickstart with some keys changed."""
    source = () if variant in ("tiny", "30M") else (f"policy.source={model}",)
    return config_file.load(config_file.find(None), [*source, *VARIANTS[variant]])


def measure(variant: str, model: Path) -> int:
    """Train two steps in this process; return the peak of resident memory beyond that before it, in
    bytes."""
    torch.set_num_threads(1)
    config = configuration(variant, model)
    shape, batch = shape_of(config), Batch.of(config)
    segments = random_segments(batch.micro_batch_lengths(config), batch, shape.config.vocab_size)
    if config.policy.lora:
        import peft  # noqa: F401  # so that the library's own memory counts as before
    before = _resident("VmRSS")
    policy = AutoModelForCausalLM.from_config(shape.config, attn_implementation=PACKED_ATTENTION)
    if config.policy.lora:
        add_adapters(policy, config.policy.lora, 0)
    trainer = Trainer(policy.train(), config)
    for _ in range(2):
        trainer.step(segments)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Return this process's resident memory, in bytes: present ("VmRSS") or peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def planned(variant: str, model: Path) -> int:
    """Return the planned memory, in bytes."""
    config = configuration(variant, model)
    return update_of(config, shape_of(config), Batch.of(config)).parts.total()


def main() -> None:
    """Measure each variant in a process of its own, print a table and write the baseline."""
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help="only measure this one, here")
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(measure(given.variant, given.model)))
        return
    print(f"{'variant':<12}{'planned':>10}{'measured':>10}  MB{'apart':>10}")
    rows = {}
    for variant in VARIANTS:
        plan, seen = planned(variant, given.model), _in_own_process(variant, given.model)
        rows[variant] = {"planned_bytes": plan, "measured_bytes": seen, "ratio": plan / seen}
        print(
            f"{variant:<12}{plan / 1e6:10.1f}{seen / 1e6:10.1f}{plan / seen - 1:+14.1%}", flush=True
        )
    write_baseline("plan_accuracy", {"model": given.model.name, "variants": rows})
    sys.exit(any(abs(row["ratio"] - 1) > MAX_GAP for row in rows.values()))


def _in_own_process(variant: str, model: Path) -> int:
    command = [sys.executable, "-m", "bench.models.plan_accuracy", str(model)]
    done = subprocess.run(
        [*command, "--variant", variant],
        env={**os.environ, **OWN_MAPS, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
