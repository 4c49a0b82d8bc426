"""Kill an actor in the third episode of each of 50 trials: is a finished episode played again?

    python -m bench.chaos.kept_episodes --name kept_episodes      1 minute

The environment waits in its third episodes until the actor has been killed, and writes every call
of `reset` to a file. If finished episodes are kept, 50 trials of three episodes make 150 calls
before the kill and 50 after it. `mage replay` then trains the journal's trials again and compares
the weights. The last line is the verdict; the exit status is 1 if an episode was played again or
the replay differs.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from bench.lib.processes import command_lines
from mage_async.protocol.journal_records import Dropped
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_services.journal.reader import open_journal

GROUPS, TRIALS, EPISODES = 5, 10, 3
"""Groups of the run's only step, trials of a group, and episodes of a trial."""
WAIT_S = 240.0
"""Longest wait for the third episodes, and for the run's end, on a loaded machine."""
# Source of the environment. `THIRD` becomes the number of calls of `reset` before all trials are in
# their third episodes.
SLOW = '''
import asyncio
import pathlib
import random
import sys

HERE = pathlib.Path(__file__).parent
IS_ACTOR = "mage_services.actor.actor" in sys.orig_argv
EPISODES = {}


class Slow:
    """Say a or b, twice an episode."""

    legal_actions = ("a", "b")
    words = ("a", "b", "yes", "no", "begin")
    max_turns = 2

    def reset(self, seed, task):
        self.right, self.turns = random.Random(task).choice("ab"), 0
        if IS_ACTOR:
            with (HERE / "resets").open("a") as log:
                log.write(f"{task}\\n")
        return "begin"

    async def step(self, action):
        self.turns += 1
        if IS_ACTOR:
            # An episode takes over a second: an actor sends finished episodes once a second.
            await asyncio.sleep(0.8)
            while self.is_third() and not (HERE / "go").exists():
                await asyncio.sleep(0.1)
        is_right = action == self.right
        return "yes" if is_right else "no", float(is_right), self.turns == 2

    def is_third(self):
        """Return whether all trials are in their third episodes: `reset` was called THIRD times."""
        return len((HERE / "resets").read_text().splitlines()) >= THIRD
'''


def main() -> None:
    """Play until all trials are in their third episodes, kill the actor, and count calls of
    `reset`."""
    parser = option_parser(__doc__)
    parser.add_argument("--name", help="write the figures as this baseline")
    given = parser.parse_args()
    folder, num_trials = Path(tempfile.mkdtemp(prefix="mage-kept-")), GROUPS * TRIALS
    resets, run = folder / "resets", RunDirectory(folder / "run")
    (folder / "slow_task.py").write_text(SLOW.replace("THIRD", str(EPISODES * num_trials)))
    settings = {
        "environment.name": "slow_task:Slow",
        "warm_start": "none",
        "admission.rule": "sync",
        "admission.max_staleness": 0,
        "admission.groups_per_step": GROUPS,
        "admission.trials_per_group": TRIALS,
        "trial.episodes": EPISODES,
        "engine.arithmetic": "exact",
        "learner.steps": 1,
        "evaluation.every": 0,
        "evaluation.final_trials": 2,
    }
    mage = [sys.executable, "-m", "mage_async.launch"]
    command = [*mage, "--run-dir", str(run.root), "--actors", "1"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
        )
    try:
        _wait(lambda: _lines(resets) >= EPISODES * num_trials, process, folder)
        time.sleep(3.0)  # the last finished episodes are on their way to the learner
        before = resets.read_text().splitlines()
        (pid,) = [pid for pid, words in command_lines() if _is_actor(words, run)]
        os.kill(pid, signal.SIGKILL)
        (folder / "go").touch()
        _wait(lambda: process.poll() is not None, process, folder)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    records = list(open_journal(run.journal).records(0))
    # After its step the run begins groups of other tasks, which it does not wait for.
    after = [task for task in resets.read_text().splitlines()[len(before) :] if task in before]
    trials = [record.trial for record in records if isinstance(record, TrialResult)]
    replay = subprocess.run(
        [*mage, "replay", str(run.root)], cwd=folder, env=environment, stdout=subprocess.PIPE
    )
    figures = {
        "trials": len(trials),
        "resets_before_the_kill": len(before),
        "resets_after_the_kill": len(after),
        "episodes_kept": sum(trial.num_kept_episodes for trial in trials),
        "groups_dropped": sum(isinstance(record, Dropped) for record in records),
        "replay_differs": int(replay.returncode != 0),
    }
    for name, value in figures.items():
        print(f"{name:<28}{value:>6}")
    if given.name:
        write_baseline(given.name, {"settings": settings, "figures": figures})
    wanted = {
        "trials": num_trials,
        "resets_before_the_kill": EPISODES * num_trials,
        "resets_after_the_kill": num_trials,
        "episodes_kept": (EPISODES - 1) * num_trials,
        "groups_dropped": 0,
        "replay_differs": 0,
    }
    wrong = [name for name, value in wanted.items() if figures[name] != value]
    print(f"NOT PASSED: {', '.join(wrong)}" if wrong else "no finished episode was played again")
    sys.exit(1 if wrong else 0)


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _is_actor(words: list[str], run: RunDirectory) -> bool:
    return "mage_services.actor.actor" in words and str(run.root) in words


def _wait(happens: Callable[[], bool], process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait until something happens; end this program if the run fails or `WAIT_S` have passed."""
    began = time.monotonic()
    while not happens():
        if time.monotonic() - began > WAIT_S or (process.poll() or 0) != 0:
            print((folder / "output").read_text()[-3000:])
            sys.exit(f"FAILED: see {folder}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
