"""Compare the forecast of a run's duration with the duration.

    python -m bench.models.forecast_accuracy                     nine configurations, 15 minutes
    python -m bench.models.forecast_accuracy --model DIR         and SmolLM2 there, 10 more

Before a run with a pretrained model on CPU cores starts, `mage train` prints a forecast: the time
to the first step, of a step, and of the run. Here each configuration is trained for a few steps, on
models of three sizes with random weights, and the three figures are compared with the time to the
first step's line, between the lines of the first and the last step, and to the end of the command.
Other load may change between forecast and run, so measure on an idle machine; the load is recorded.
A baseline is written if all ten are measured. The exit status is 1 if a figure is off by more than
25 %."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Tiny
from mage_async.policy.load import build_tiny

MOST_OFF = 0.25
"""Largest allowed error of a figure, as a share of the measured one."""
# Sizes of the models with random weights.
SHAPES = {
    "small": Tiny(hidden_size=128, layers=4, mlp_size=512),
    "middle": Tiny(hidden_size=256, layers=6, mlp_size=1024),
    "wide": Tiny(hidden_size=512, layers=6, heads=8, kv_heads=4, mlp_size=2048),
}
STEPS = 6
"""Number of steps of a run."""


@dataclass(frozen=True)
class Case:
    """A configuration: a model's size, an environment, and keys."""

    name: str
    shape: str
    environment: str
    keys: tuple[str, ...] = ()


CASES = (
    Case("boxes, small", "small", "boxes"),
    Case("boxes, middle", "middle", "boxes"),
    Case("boxes, wide", "wide", "boxes"),
    Case("rps, middle", "middle", "rps"),
    Case("rps, middle, all weights", "middle", "rps", ("policy.lora=none",)),
    Case("rps, middle, one minibatch", "middle", "rps", ("learner.minibatches=1",)),
    Case("maze, middle", "middle", "maze"),
    Case("boxes, middle, in turn", "middle", "boxes", ("admission.max_staleness=0",)),
    Case("boxes, middle, warm start", "middle", "boxes", ("warm_start=random",)),
)
WARM = ("warm_start.steps=10", "warm_start.trials=100", "warm_start.cache=false")
"""A short warm start that is not taken from the cache."""
# The line of the forecast, and a line of progress.
FORECAST = re.compile(
    r"first step is expected after (?P<first_step>[\d.:a-z ]+?)(?:, [^,]+ of it the warm start)?, "
    r"then one every (?P<step>[\d.:a-z ]+) \(.*evaluation take about (?P<run>[\d.:a-z ]+)$"
)
STEP = re.compile(r"(?<!warm_start )step=(\d+)/\d+")


def main() -> None:
    """Run every case, and compare forecast and duration."""
    given = _arguments()
    rows: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        for case in CASES:
            if given.only and case.name not in given.only:
                continue
            model = Path(folder) / f"{case.shape}-{case.environment}"
            if not model.exists():
                _build(case, model)
            rows[case.name] = _measured(case, model, Path(folder) / case.name.replace(" ", "_"))
            _print(case.name, rows[case.name])
        if given.model is not None:
            case = Case("boxes, SmolLM2", "", "boxes", ("learner.steps=3",))
            rows[case.name] = _measured(case, given.model.resolve(), Path(folder) / "smol")
            _print(case.name, rows[case.name])
    off = max(abs(row["off"][name]) for row in rows.values() for name in row["off"])
    print(f"the worst is off by {off:.0%}: {'ok' if off <= MOST_OFF else 'MISSED'}")
    if given.model is not None and not given.only:
        write_baseline("forecast", {"load_average": os.getloadavg(), "cases": rows, "worst": off})
    sys.exit(off > MOST_OFF)


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="a tenth case, SmolLM2")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone")
    return parser.parse_args()


def _build(case: Case, directory: Path) -> None:
    """Write a model of random weights that knows the environment's words."""
    config = config_file.load(config_file.find(None), [f"environment.name={case.environment}"])
    build_tiny(SHAPES[case.shape], environment_of(config).facts.words, 0, directory)


def _measured(case: Case, model: Path, run: Path) -> dict[str, Any]:
    """Train, and return the forecast and the measured seconds of each figure."""
    keys = [f"policy.source={model}", f"environment.name={case.environment}"]
    keys += [f"learner.steps={STEPS}", "evaluation.every=0", *case.keys]
    keys += WARM if any(key.startswith("warm_start") for key in case.keys) else ()
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run)]
    command += [f"--set={key}" for key in keys]
    forecast, steps, began = None, list[float](), 0.0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := FORECAST.search(line.strip()):
                forecast, began = found.groupdict(), time.monotonic()
            if STEP.search(line):
                steps.append(time.monotonic() - began)
        ended = time.monotonic() - began
    if process.returncode or forecast is None:
        raise RuntimeError(f"{case.name}: exit code {process.returncode}, forecast {forecast}")
    times = [record["time_s"] for record in _records(run / "metrics.jsonl")]
    taken = {
        "first_step": steps[0],
        "step": (times[-1] - times[0]) / (len(times) - 1),
        "run": ended,
    }
    expected = {name: _seconds(text) for name, text in forecast.items()}
    off = {name: expected[name] / taken[name] - 1 for name in taken}
    return {"forecast": expected, "taken": taken, "off": off}


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _seconds(text: str) -> float:
    """Return the seconds of `41 s`, `1.3 s`, `5:12 min` or `2:01 h`."""
    number, unit = text.split()
    if unit == "s":
        return float(number)
    whole, rest = map(float, number.split(":"))
    return (whole * 60 + rest) * (60 if unit == "h" else 1)


def _print(name: str, row: dict[str, Any]) -> None:
    figures = ", ".join(
        f"{figure} {row['forecast'][figure]:.3g} s for {row['taken'][figure]:.3g} s "
        f"({row['off'][figure]:+.0%})"
        for figure in row["taken"]
    )
    print(f"{name:<28} {figures}", flush=True)


if __name__ == "__main__":
    main()
