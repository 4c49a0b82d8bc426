"""Train on tasks as a new user would write them: do they start, and do they learn?

    python -m bench.learning.first_hour --only Workshop                  one task, 2 minutes
    python -m bench.learning.first_hour --kind tiny                      seven tasks, 20 minutes
    python -m bench.learning.first_hour --kind pretrained --model DIR    a core-hour for each task

Each class of `bench/learning/first_hour_tasks.py` is trained with the README's command and nothing
else: `mage train --set environment.name=…`, with `policy.source` for a pretrained model. The
program measures

- the lines of code of the class;
- the seconds to the first step, and the longest time without a line of output;
- the held-out return of the last episode, with the half-width of its 95 % interval: of random play,
  before training (after a warm start, if there is one), after it, and after it with every episode
  played without memory of the earlier ones (`blind`).

The model has learned a task if, after training, the last episode's return is above `blind` and
above the return from which the weights began, each by more than the two intervals together. The
weights of a pretrained model began with its return before training, those of a tiny model, which
are random before its warm start, with that of random play.

A run that reaches `--limit-s` is ended, and its newest checkpoint is evaluated then. A task whose
result is in `--run-dir` is not trained again. `--set` changes configuration keys of
every run, and is written to the baseline.
"""

import argparse
import inspect
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mage_async as mage
from bench.learning.first_hour_tasks import PRETRAINED, TINY
from bench.lib.baseline import write_baseline
from bench.lib.last_episode import Return, documents, is_above, returns_of
from bench.lib.options import option_parser
from mage_async.assembly import environment_of, trial_config_of
from mage_async.results.score import score
from mage_async.trials.scripted_play import chat_in_words, random_play, random_task, scripted_trial

STEP = re.compile(r"step=\d+/\d+")
"""Matches a line of progress. A fast run prints one line for several steps."""
NUM_RANDOM = 400
"""Trials of random play."""


def main() -> None:
    """Train on the tasks, and print a line for each."""
    given = _arguments()
    kinds = {"tiny": TINY, "pretrained": PRETRAINED}
    chosen = [
        (kind, task)
        for kind, tasks in kinds.items()
        for task in tasks
        if task.__name__ in (given.only or [task.__name__]) and given.kind in ("all", kind)
    ]
    given.run_dir.mkdir(parents=True, exist_ok=True)
    rows = {}
    for kind, task in chosen:
        # One task is played by both kinds of models.
        name = task.__name__ if kind == "tiny" or task not in TINY else f"{task.__name__}_{kind}"
        file = given.run_dir / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(_measured(kind, task, given, given.run_dir / name)))
        rows[name] = json.loads(file.read_text())
        print(_line_of_output(name, rows[name]), flush=True)
    learned = sum(row["has_learned"] for row in rows.values())
    print(f"{learned} of {len(rows)} learned")
    if given.name:
        write_baseline(given.name, {"set": given.set, "tasks": rows, "num_learned": learned})


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="CLASS")
    parser.add_argument("--kind", choices=("all", "tiny", "pretrained"), default="all")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the pretrained model")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/first_hour"), metavar="DIR")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="end a run after so many seconds"
    )
    parser.add_argument("--name", default="", help="name of the baseline to write; none by default")
    given = parser.parse_args()
    if given.kind != "tiny" and given.model is None and not given.only:
        parser.error("--model is needed for the tasks of a pretrained model")
    return given


def _measured(kind: str, task: type, given: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Train on a task in the run directory `run`, and return all that is measured."""
    keys = [f"environment.name={task.__module__}:{task.__name__}"]
    keys += [f"policy.source={given.model.resolve()}"] if kind == "pretrained" else []
    command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(run)]
    command += [f"--set={key}" for key in (*keys, *given.set)]
    began, first_step_s, lines = time.monotonic(), None, [0.0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(time.monotonic() - began)
            if first_step_s is None and STEP.search(line.decode()):
                first_step_s = lines[-1]
            # Once: a second signal would end the run before its summary is written.
            if lines[-2] <= given.limit_s < lines[-1]:
                process.terminate()
    steps = documents(run / "metrics.jsonl")
    if steps and not (run / "evaluation.json").exists():
        # The limit ended the run before its final evaluation.
        subprocess.run(
            [sys.executable, "-m", "mage_services.cli.main", "evaluate", str(run)], check=False
        )
    row = {
        "kind": kind,
        # One line more than the class has: the command.
        "lines": len([line for line in inspect.getsource(task).splitlines() if line.strip()]) + 1,
        "started": first_step_s is not None,
        "exit_code": process.returncode,
        "first_step_s": first_step_s,
        "wall_s": lines[-1],
        # The last time is repeated, so that there is a pair even if no line was printed.
        "longest_silence_s": max(after - before for before, after in pairwise([*lines, lines[-1]])),
        "num_steps": len(steps),
        "returns": returns_of(run) | {"random": _random_return(task)},
    }
    return row | {"has_learned": _has_learned(row["returns"], kind)}


def _random_return(task: type) -> Return:
    """Return what the last episode of random play earns on held-out tasks."""
    # Random play needs no model; the tiny one's configuration loads none.
    config = mage.configure(keys={"policy.kind": "tiny"}, environment=task)
    environment, source = environment_of(config), random.Random(config.seed)
    rules = replace(trial_config_of(config, environment, chat_in_words(), 3), restricted=False)
    trials = [
        scripted_trial(
            environment,
            random_task(environment, "heldout", source),
            index,
            rules,
            chat_in_words(),
            player=random_play,
        )
        for index in range(NUM_RANDOM)
    ]
    found = score(trials, environment)
    return found.return_by_episode[-1], found.ci95_by_episode[-1]


def _has_learned(returns: dict[str, Return], kind: str) -> bool:
    """Return whether the last episode ends above `blind` and above what it began from."""
    names = ("heldout", "random" if kind == "tiny" else "start", "heldout_blind")
    if not all(name in returns for name in names):
        return False
    end, *others = (returns[name] for name in names)
    return is_above(end, others)


def _line_of_output(name: str, row: dict[str, Any]) -> str:
    returns = "  ".join(
        f"{name} {mean:+.3f} ±{half:.3f}"
        for name, (mean, half) in row["returns"].items()
        if name in ("random", "start", "heldout", "heldout_blind")
    )
    first = f"{row['first_step_s']:.0f} s" if row["started"] else "never"
    verdict = "learned" if row["has_learned"] else "not learned"
    return (
        f"{name:<12} {row['lines']} lines, first step {first}, {row['num_steps']} steps in "
        f"{row['wall_s']:.0f} s, silent for {row['longest_silence_s']:.0f} s at most: "
        f"{returns}: {verdict}"
    )


if __name__ == "__main__":
    main()
