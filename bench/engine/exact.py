"""Measure how much slower the embedded engine is with exact arithmetic than with float32.

    python -m bench.engine.exact [--repeats 9]

Both sample the growing contexts of `bench/engine/growing_contexts.py` on the same model, in
alternation. Rates are sampled tokens per CPU-second, which other load on the machine hardly
changes. Each ratio is of two rates measured one after the other.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.engine.growing_contexts import (
    CONTEXTS,
    MAX_TOKENS,
    by_engine,
    make_model,
    make_turns,
    rates,
)
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.inference.arithmetic import Kind
from mage_async.inference.model import Model
from mage_async.inference.scheduler import Scheduler


def measure(directory: Path, repeats: int) -> dict[str, list[float]]:
    """Return the rates with exact and with float32 arithmetic, one for each repeat."""
    make_model(directory)

    def scheduler(arithmetic: Kind) -> Scheduler:
        return Scheduler(
            Model.load(directory, slots=CONTEXTS, max_tokens=MAX_TOKENS, arithmetic=arithmetic)
        )

    exact, plain, ragged = scheduler("exact"), scheduler("float32"), make_turns(is_ragged=True)
    return rates(
        {"exact": lambda: by_engine(exact, ragged), "float32": lambda: by_engine(plain, ragged)},
        repeats,
    )


def main() -> None:
    """Measure, print, and write the baseline."""
    parser = option_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), parser.parse_args().repeats)
    ratios = np.array(found["exact"]) / np.array(found["float32"])
    figures = {name: round(float(np.median(values))) for name, values in found.items()}
    spread = [round(float(value), 3) for value in (np.median(ratios), ratios.min(), ratios.max())]
    for name, value in figures.items():
        print(f"{name:12}{value:>10,} sampled tokens per processor-second")
    print(f"exact / float32: {spread[0]:.2f} ({spread[1]:.2f} … {spread[2]:.2f})")
    write_baseline("exact", {"per_processor_s": figures, "exact_over_float32": spread})


if __name__ == "__main__":
    main()
