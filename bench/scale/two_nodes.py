"""Check that a run on a Ray cluster learns what it learns on one machine.

    python -m bench.scale.two_nodes                        # the quickstart
    python -m bench.scale.two_nodes --exact --steps 8      # a function of its configuration

The same configuration is trained on two Ray nodes, both on this machine, and without Ray. The
learner and the evaluator fill the first node, so all actors are on the second one, where no file of
the run is visible. The program prints the held-out return of each episode of both runs, and whether
their last weights are equal: with --exact they must be, byte by byte, or the exit status is 1.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.lib.options import option_parser

# Settings that make a run a function of its configuration, and one thread a process in all runs.
EXACT = ("admission.rule=sync", "admission.max_staleness=0", "engine.arithmetic=exact")
THREADS = ("learner.threads=1", "engine.threads=1")


def main() -> int:
    """Train with and without Ray, and compare returns and weights."""
    given = _arguments()
    settings = [*THREADS, *(EXACT if given.exact else ()), *given.set, f"seed={given.seed}"]
    settings += [] if given.steps is None else [f"learner.steps={given.steps}"]
    with TemporaryDirectory(prefix="two-nodes-") as temporary:
        folder = given.run_dir or Path(temporary)
        here, there = folder / "one_machine", folder / "two_nodes"
        _train(here, given.actors, settings)
        _train_on_nodes(there, given.actors, settings)
        for run in (here, there):
            print(_line(run))
        is_equal = _weights(here) == _weights(there)
    print(f"last weights: {'equal' if is_equal else 'different'}")
    return int(given.exact and not is_equal)


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="instead of the configuration's")
    parser.add_argument("--exact", action="store_true", help="lock-step, in exact arithmetic")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where runs stay (temporary)")
    return parser.parse_args()


def _train_on_nodes(run: Path, num_actors: int, settings: list[str]) -> None:
    described = json.dumps([{"cpus": 2}, {"cpus": num_actors}])
    command = [sys.executable, "-m", "bench.scale.ray_nodes", described]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as nodes:
        assert nodes.stdout is not None
        address = nodes.stdout.readline().strip()
        _train(run, num_actors, settings, "--cluster", address)
        nodes.communicate()  # the nodes end with the end of their stdin


def _train(run: Path, num_actors: int, settings: list[str], *more: str) -> None:
    command = [sys.executable, "-m", "mage_async.launch", "train", "--run-dir", str(run), *more]
    command += ["--actors", str(num_actors), *(f"--set={each}" for each in settings)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _line(run: Path) -> str:
    summary = json.loads((run / "summary.json").read_text())
    held_out = summary["evaluation"]["heldout"]
    returns = zip(held_out["return_by_episode"], held_out["ci95_by_episode"], strict=True)
    figures = "  ".join(f"{mean:+.3f} ±{ci:.3f}" for mean, ci in returns)
    return f"{run.name:12} held-out by episode: {figures}; wall {summary['wall_s']:.1f} s"


def _weights(run: Path) -> str:
    newest = max((run / "checkpoints").glob("step_*/model.safetensors"))
    return hashlib.sha256(newest.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
