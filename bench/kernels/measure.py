"""Compare our kernels for the LM head under RL with plain torch and other projects' kernels.

    python -m bench.kernels.measure

With a GPU (20 minutes): time, memory and error at every shape, beside those of the other projects
that are installed; group advantages; the learner's loss in one pass and in two. Figures are written
after each case, and the same command continues an interrupted one, as long as neither kernels nor
benchmark were edited.

    --minutes 9  begin no case after so many minutes, for machines that are lent for a short time
    --shape 16384x2560 --logits peaked    measure these cases only
    --again      also measure cases whose figures are in the file
    --into DIR   write there instead of bench/baselines; to continue, DIR has to hold the file

Without a GPU: shapes that fit a laptop (3 minutes).

    --static     compile every kernel for the GPUs it runs on, on any machine; exit status 1 on a
                 spill or a GEMM without the matrix units
    --accuracy   errors against fp64 only; with TRITON_INTERPRET=1 MAGE_KERNELS=triton, of the
                 kernels

Figures go to kernels_<machine>.json; --no-write only prints.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernels.accuracy import measure_accuracy
from bench.kernels.groups import measure_groups
from bench.kernels.heads import SHAPES, VOCABULARY, Case, ceilings, measure
from bench.kernels.record import Record
from bench.lib.baseline import FOLDER
from bench.lib.options import option_parser
from mage_kernels import backend_report
from mage_kernels.dispatch import BACKEND

Part = tuple[str, str, Callable[[], dict[str, Any]]]
"""Section and name in the file, and the function that measures it."""


def main() -> int:
    """Measure all parts; return the exit status."""
    options = arguments()
    if options.static:
        from bench.kernels.static_check import report

        return 0 if report() else 1
    print(backend_report())
    record = Record(options.into, writes=options.write)
    end = time.monotonic() + 60 * options.minutes
    left = 0
    for section, name, measured in parts(options):
        is_known = section != "ceilings" and record.is_measured(section, name)
        if is_known and not options.again:
            print(f"{section}, {name}: measured before")
        elif time.monotonic() < end:
            record.put(section, name, measured())
        else:
            left += 1
    if options.write:
        print(f"written to {record.file}")
    if left:
        print(f"{left} parts left: the same command goes on")
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--shape", action="append", help="TxD; may be repeated")
    parser.add_argument("--logits", choices=["flat", "peaked"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--into", type=Path, default=FOLDER)
    parser.add_argument("--no-write", dest="write", action="store_false")
    return parser.parse_args()


def parts(options: argparse.Namespace) -> Iterator[Part]:
    """Yield what to measure, in order."""
    is_gpu, rounds, threads = torch.cuda.is_available(), options.rounds, torch.get_num_threads()
    device = "cuda" if is_gpu else "cpu"
    form = "Triton" if BACKEND.fused_devices else "plain PyTorch"
    yield "accuracy", form, partial(measure_accuracy, device)
    if options.accuracy:
        return
    print(f"{'':36} {'median':>10}     {'fastest..slowest':>20}")
    yield "ceilings", f"{threads} threads", partial(ceilings, device, rounds)
    if is_gpu or options.shape:
        dtype = torch.bfloat16 if is_gpu else torch.float32
        for case in cases(options):
            way = partial(measure, case, device=device, rounds=rounds, dtype=dtype)
            yield "heads", case.name(), way
    else:
        from bench.kernels.laptop import SHAPES as LAPTOP
        from bench.kernels.laptop import measure_laptop

        for shape in LAPTOP:
            yield "laptop", Case.flat(*shape).name(), partial(measure_laptop, shape, rounds)
    for length in (4096,) if is_gpu else (256, 4096):
        # 8,192 rows, and three rounds: the loops of the other projects are slow.
        way = partial(measure_groups, 8192, length, device, 3)
        yield "groups", f"8192 x {length}", way
    if is_gpu:
        from bench.kernels.losses import measure_loss

        for case in cases(options):
            if not case.masked:  # the learner's loss is of sampled tokens alone
                yield "loss", case.name(), partial(measure_loss, case, device, rounds)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the chosen cases of the LM head: shapes, logits, and masks."""
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or []] or SHAPES
    for num_tokens, width in shapes:
        for logits in [options.logits] if options.logits else ["flat", "peaked"]:
            for masked in (0.0, 0.5):
                yield Case(num_tokens, width, VOCABULARY, logits, masked)


if __name__ == "__main__":
    sys.exit(main())
