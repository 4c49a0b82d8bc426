"""Kill processes of a run at random moments, and account for every trial afterwards.

`python bench/chaos.py --kills 20`, from the root of a checkout, takes a minute: 3 s a kill, of
actors, learner, evaluator and supervisor in turn (`--roles`). The supervisor is started again with
`--resume`. At the end: the run's own books, the journal's, and `mage replay`. The last line is the
verdict; exit status 1 on a loss. SIGKILL leaves what the kernel was given: it does not try what a
power cut does to unsynced files.

    lost            trials by which the run's books and the journal's differ
    trained twice   groups in more than one commit
    recovery_s      from the kill to the next committed step, by role
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from baseline import write_baseline

from mage_async.journal import Commit, Dropped, Granted
from mage_async.run_directory import RunDirectory
from mage_async.run_records import read_lines
from mage_async.wire import TrialResult
from mage_services.journal_reading import open_journal

MODULES = {
    "actor": "mage_services.actor",
    "learner": "mage_services.learner",
    "evaluator": "mage_services.evaluator",
    "supervisor": "mage_services.run",
}
SETTINGS = (
    "warm_start.steps=8",
    "warm_start.gate=1.0",
    "warm_start.max_steps=8",
    "warm_start.trials=64",
    "warm_start.threads=1",
    "admission.groups_per_step=4",
    "admission.trials_per_group=4",
    "learner.checkpoint_every=5",
    "evaluation.every=0",
    "evaluation.final_trials=24",
    "supervision.max_restarts=100000",
)
LOOK_S = 0.02
PATIENCE_S = 90.0


class Victim:
    """A run under attack."""

    def __init__(self, root: Path, steps: int) -> None:
        self.run, self.steps = RunDirectory(root), steps
        self.process = self._start()

    def _start(self, *more: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "mage_async.launch", "--run-dir", str(self.run.root)]
        settings = [*SETTINGS, f"learner.steps={self.steps}"]
        command += ["--actors", "2", *(part for s in settings for part in ("--set", s)), *more]
        with (self.run.root.parent / "output").open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out)

    def step(self) -> int:
        """Steps written down so far."""
        lines = read_lines(self.run.metrics)
        return lines[-1]["step"] if lines else 0

    def kill(self, role: str, source: random.Random) -> bool:
        """SIGKILL one process of a role; False where none lives."""
        found = self._pids(MODULES[role])
        if not found:
            return False
        os.kill(source.choice(found), signal.SIGKILL)
        if role == "supervisor":
            self.process.wait()
            self.process = self._start("--resume")
        return True

    def wait_for(self, step: int) -> float:
        """Seconds until the run has come to a step, or has ended.

        Raises: SystemExit: it did not within `PATIENCE_S`: a hang is a loss, too.
        """
        began = time.monotonic()
        while self.step() < step and self.process.poll() is None:
            time.sleep(LOOK_S)
            if time.monotonic() - began > PATIENCE_S:
                self._give_up(f"no step for {PATIENCE_S:g} s after step {self.step()}")
        if self.process.poll() not in (None, 0):
            self._give_up(f"the run ended with {self.process.returncode}")
        return time.monotonic() - began

    def _give_up(self, reason: str) -> None:
        self.process.terminate()
        print((self.run.root.parent / "output").read_text()[-3000:])
        sys.exit(f"LOST: {reason}; see {self.run.root}")

    def _pids(self, module: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if module.encode() in words and str(self.run.root).encode() in words:
                    found.append(int(entry.name))
        return found


def attack(victim: Victim, kills: int, roles: list[str], seed: int) -> dict[str, list[float]]:
    """Kill so often, each time after a step and a random moment; recovery times by role."""
    source, recovery = random.Random(seed), defaultdict(list)
    victim.wait_for(1)
    for number in range(kills):
        role = roles[number % len(roles)]
        time.sleep(source.uniform(0.0, 0.5))
        if victim.step() >= victim.steps:
            print(f"the run was over after {number} kills: --steps was too small")
            break
        before = victim.step()
        if victim.kill(role, source):
            recovery[role].append(victim.wait_for(before + 2))
            print(
                f"kill {number + 1}: {role} at step {before}, {recovery[role][-1]:.1f} s",
                flush=True,
            )
    return dict(recovery)


def account(run: RunDirectory) -> dict[str, int]:
    """What the journal says of every trial, beside what the run says of itself."""
    records = list(open_journal(run.journal).records(0))
    granted = {r.grant.grant for r in records if isinstance(r, Granted)}
    taken = [(r.grant, r.trial.index) for r in records if isinstance(r, TrialResult)]
    trained = [grant for r in records if isinstance(r, Commit) for grant in r.grants]
    dropped = {r.grant for r in records if isinstance(r, Dropped)}
    trials = json.loads(run.summary.read_text())["trials"]
    in_flight = granted - set(trained) - dropped
    return {
        "acknowledged": len(set(taken)),
        "taken_twice": len(taken) - len(set(taken)),
        "groups_trained": len(set(trained)),
        "groups_trained_twice": len(trained) - len(set(trained)),
        "groups_dropped": len(dropped),
        "trained_without_trials": len({(g, i) for g in trained for i in range(4)} - set(taken)),
        "lost": abs(trials["trained"] - 4 * len(set(trained)))
        + abs(trials["in_flight"] - 4 * len(in_flight)),
        "staleness_max": int(max(line["staleness_max"] for line in read_lines(run.metrics))),
        "steps_missing": len(
            {r.version for r in records if isinstance(r, Commit)}
            ^ {line["step"] for line in read_lines(run.metrics)}
        ),
    }


def main() -> None:
    """Attack, account, replay, and say the verdict."""
    parser = argparse.ArgumentParser(description="Kill processes of a run.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--roles", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--steps", type=int, help="of the run (kills * 6)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="mage-chaos-")) / "run"
    victim = Victim(root, given.steps or given.kills * 6)
    recovery = attack(victim, given.kills, given.roles, given.seed)
    victim.wait_for(sys.maxsize)
    figures = account(victim.run)
    replayed = subprocess.run([sys.executable, "-m", "mage_async.replay", str(root)])
    figures["replay_differs"] = int(replayed.returncode != 0)
    medians = {role: statistics.median(times) for role, times in recovery.items()}
    for name, value in figures.items():
        print(f"{name:<24}{value:>10}")
    for role, times in recovery.items():
        print(f"{role:<12}{len(times):>4} kills, {medians[role]:.1f} s to the next but one step")
    write_baseline("chaos", {"figures": figures, "recovery_s": recovery})
    faults = ("taken_twice", "groups_trained_twice", "trained_without_trials", "lost")
    faults = (*faults, "steps_missing", "replay_differs")
    is_whole = not any(figures[name] for name in faults) and figures["staleness_max"] <= 1
    print("nothing was lost" if is_whole else f"LOST: see {root}")
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    main()
