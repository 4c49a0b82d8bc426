"""The RL head's kernels: `python bench/kernels.py`.

With a GPU: time, memory and error at every shape beside the anchors that are installed (20 minutes;
with --shape and --logits, a part of it). Without one: what runs on a laptop (2 minutes).

    --static     compile every kernel for sm_90, on any machine; exit status 1 on a spill or a GEMM
                 without wgmma
    --accuracy   errors against fp64 only; with TRITON_INTERPRET=1 MAGE_KERNELS=triton, of the
    kernels

Figures go to bench/baselines/kernels_<machine>.json; --no-write only prints.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from baseline import FOLDER, machine, provenance
from kernel_accuracy import measure_accuracy
from kernel_groups import measure_groups
from kernel_heads import SHAPES, VOCABULARY, Case, ceilings, measure
from kernel_laptop import measure_laptop

from mage_kernels import backend_report


def main() -> int:
    """Exit status."""
    options = arguments()
    if options.static:
        from mage_kernels.fused.static_check import report

        return 0 if report() else 1
    print(backend_report())
    figures: dict[str, Any] = {"accuracy": measure_accuracy(options.device)}
    if not options.accuracy:
        print(f"{'':36} {'median':>10}     {'fastest..slowest':>20}")
        figures["num_threads"] = torch.get_num_threads()
        figures |= on_gpu(options) if options.device == "cuda" else on_laptop(options)
    if options.write:
        write(figures)
    return 0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--static", action="store_true", help="compile for sm_90 and look")
    parser.add_argument("--accuracy", action="store_true", help="errors against fp64 only")
    parser.add_argument("--shape", action="append", help="TxD, as 16384x2560; may be repeated")
    parser.add_argument("--logits", choices=["flat", "peaked"], help="only these")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-write", dest="write", action="store_false")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    return parser.parse_args()


def on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """Every shape, flat and peaked, whole and half masked."""
    found: dict[str, Any] = {"ceilings": ceilings(options.device, options.rounds)}
    found["heads"] = heads(options, torch.bfloat16)
    found["groups"] = {"8192 x 4096": measure_groups(8192, 4096, options.device, 3)}
    return found


def on_laptop(options: argparse.Namespace) -> dict[str, Any]:
    """The quickstart's shapes, and advantages at two lengths; with --shape, heads as on a GPU."""
    found: dict[str, Any] = {"ceilings": ceilings(options.device, options.rounds)}
    if options.shape:
        return found | {"heads": heads(options, torch.float32)}
    found["laptop"] = measure_laptop(options.rounds)
    found["groups"] = {
        f"8192 x {length}": measure_groups(8192, length, options.device, 3)
        for length in (256, 4096)
    }
    return found


def heads(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Figures by case."""
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or []] or SHAPES
    cases = [
        Case(num_tokens, width, options.vocabulary, logits, masked)
        for num_tokens, width in shapes
        for logits in ([options.logits] if options.logits else ["flat", "peaked"])
        for masked in (0.0, 0.5)
    ]
    return {
        case.name(): measure(case, device=options.device, rounds=options.rounds, dtype=dtype)
        for case in cases
    }


def write(figures: dict[str, Any]) -> Path:
    """Into the machine's baseline; what an earlier run measured and this one did not, stays."""
    name = machine()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower().replace(" ", "_")
    file = FOLDER / f"kernels_{name}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    kept = {
        key: before[key] | value
        for key, value in figures.items()
        if isinstance(value, dict) and key in before
    }
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(before | provenance() | figures | kept, indent=1)
    file.write_text(text + "\n")
    print(f"written to {file}")
    return file


if __name__ == "__main__":
    sys.exit(main())
