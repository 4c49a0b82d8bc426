"""Kill and stop processes of a run at random moments, and account for every trial afterwards.

    python -m bench.chaos.kills --kills 24         a small run, 2 minutes
    … --kills 200 --quickstart         one quickstart, its return included, 15 minutes
    … --kills 20 --roles learner --deterministic      weights bit for bit as undisturbed
    … --recovery 10                    from a kill to the next committed step, by role
    … --kills 8 --frames 0.004         messages doubled, reordered, cut, bits flipped
    … --kills 8 --disk 8               the journal on a disk of 8 MiB that is full now and then

Moments, victims and harm follow from `--seed`. A killed supervisor is started again with
`--resume`; before that the journal's tail is torn as by a power cut: behind the last record that
anybody was told of it is cut anywhere, or followed by garbage. After every fourth kill a process
gets SIGSTOP, and SIGCONT after up to `--stop-s` seconds. `--clock` gives all processes a wall clock
that jumps by a day, back and forth. A tap on the sockets writes down what peers were told
(`bench/chaos/tap.py`); `bench/chaos/account.py` compares. The last line is the verdict, exit status
1 on a loss.
"""

import argparse
import atexit
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.chaos.account import FAULTS, Books, account
from bench.chaos.jumping_clock import jumping_clock
from bench.chaos.tap import Mischief, Tap
from bench.chaos.tapped_run import TAP
from bench.chaos.torn_tail import tear
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_services.journal.reader import open_journal

MODULES = {
    "actor": "mage_services.actor.actor",
    "learner": "mage_services.learner.learner",
    "evaluator": "mage_services.actor.evaluator",
    "supervisor": "bench.chaos.tapped_run",
    "engine": "mage_services.engines.sglang.main",
}
SHARES = {"actor": 11, "evaluator": 4, "learner": 3, "supervisor": 2}
"""Of twenty kills; a role named in `--roles` and not here has 3."""
SMALL = (
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
)
DETERMINISTIC = ("admission.rule=sync", "admission.max_staleness=0", "engine.arithmetic=exact")
"""What makes a run a function of its configuration."""
BOTH = ("supervision.max_restarts=100000",)
RETURN = 0.65
"""What the quickstart has to reach, killed or not."""
MOUNTS = "MAGE_CHAOS_MOUNTS"
LOOK_S = 0.02
AHEAD = 2
"""The next kill waits while the run is so many steps behind its share."""


class Victim:
    """A run under attack."""

    def __init__(self, root: Path, settings: list[str], actors: int, given: Any) -> None:
        self.run, self.actors = RunDirectory(root.resolve()), actors
        self.config = config_file.load(config_file.find(None), [*settings, *BOTH])
        check(self.config)
        self.run.logs.mkdir(parents=True)
        self.run.checkpoints.mkdir()
        self.run.config.write_text(config_file.dump(self.config))
        self.source = random.Random(given.seed)
        self.num_full = 0
        if given.disk:
            self.run.journal.mkdir()
            small = ("mount", "-t", "tmpfs", "-o", f"size={given.disk}m", "tmpfs")
            subprocess.run([*small, str(self.run.journal)], check=True)
        sockets = Path(tempfile.mkdtemp(prefix="mage-tap-"))
        mischief = Mischief(given.frames, random.Random(given.seed)) if given.frames else None
        self.tap = Tap(sockets / "tap", self.run.root / "sockets" / "work", mischief)
        self.environment = os.environ | {TAP: f"ipc://{sockets / 'tap'}"}
        if given.clock:
            self.environment |= jumping_clock(sockets)
        self.patience_s = given.patience_s
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self.torn: list[int] = []
        self._stopped: list[tuple[float, int]] = []
        self._full_until = 0.0
        self.process = self._start()
        atexit.register(lambda: self.process.poll() is None and self.process.terminate())

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.config.learner.steps

    def step(self) -> int:
        """Steps written down so far."""
        lines = read_lines(self.run.metrics)
        return lines[-1]["step"] if lines else 0

    def kill(self, role: str) -> bool:
        """SIGKILL one process of a role; False where none lives."""
        found = self._pids(role)
        if not found:
            return False
        os.kill(self.source.choice(found), signal.SIGKILL)
        self.kills[role] += 1
        if role == "supervisor":
            self.process.wait()
            self._wait_for_the_end()
            self.torn.append(tear(self.run, self.tap, self.source))
            self.process = self._start("--resume")
        return True

    def stop(self, role: str, seconds: float) -> None:
        """SIGSTOP one process of a role; `look` lets it go on when the time is over."""
        found = self._pids(role)
        if found:
            pid = self.source.choice(found)
            os.kill(pid, signal.SIGSTOP)
            self.stops[role] += 1
            self._stopped.append((time.monotonic() + seconds, pid))

    def fill(self, seconds: float) -> None:
        """Leave no space beside the journal; `look` takes the filler away when the time is over."""
        self.num_full += 1
        self._full_until = time.monotonic() + seconds
        with self._filler.open("wb", buffering=0) as out, suppress(OSError):
            while True:
                out.write(bytes(1024))

    @property
    def _filler(self) -> Path:
        return self.run.journal / "filler"

    def look(self) -> None:
        """Let a moment pass; stopped processes go on when it is time.

        Raises: SystemExit: the run ended badly.
        """
        self._continue()
        if self._filler.exists() and time.monotonic() >= self._full_until:
            self._filler.unlink()
        if self.process.poll() not in (None, 0):
            self.give_up(f"the run ended with {self.process.returncode}")
        time.sleep(LOOK_S)

    def wait_for(self, step: int) -> float:
        """Seconds until the run has come to a step, or has ended.

        Raises: SystemExit: no step for `--patience-s`: a hang is a loss, too.
        """
        began = seen = time.monotonic()
        last = self.step()
        while last < step and self.process.poll() is None:
            self.look()
            if (now := self.step()) != last:
                last, seen = now, time.monotonic()
            if time.monotonic() - seen > self.patience_s and last < self.steps:
                self.give_up(f"no step for {self.patience_s:g} s after step {last}")
        return time.monotonic() - began

    def finish(self) -> None:
        """Wait for the end of the run."""
        self.wait_for(sys.maxsize)
        self.look()

    def give_up(self, reason: str) -> None:
        """End with a loss."""
        self.process.terminate()
        print((self.run.root.parent / "output").read_text()[-3000:])
        sys.exit(f"LOST: {reason}; see {self.run.root}")

    def _start(self, *more: str) -> "subprocess.Popen[bytes]":
        script = [sys.executable, "-m", MODULES["supervisor"], str(self.run.root)]
        with (self.run.root.parent / "output").open("ab") as out:
            return subprocess.Popen(
                [*script, "--actors", str(self.actors), *more],
                stdout=out,
                stderr=out,
                env=self.environment,
            )

    def _wait_for_the_end(self) -> None:
        """Children die with their supervisor; return when they have."""
        while any(self._pids(role) for role in MODULES):
            self._continue()  # one that was stopped in its first breath has not asked to die yet
            time.sleep(LOOK_S)

    def _continue(self) -> None:
        for due, pid in [one for one in self._stopped if one[0] <= time.monotonic()]:
            self._stopped.remove((due, pid))
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # it was killed while it was stopped

    def _pids(self, role: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if MODULES[role].encode() in words and str(self.run.root).encode() in words:
                    found.append(int(entry.name))
        return found


def deck(kills: int, roles: list[str], source: random.Random) -> list[str]:
    """Who is killed, in order: roles by their shares, shuffled."""
    pack = [role for role in roles for _ in range(SHARES.get(role, 3))]
    cards: list[str] = []
    while len(cards) < kills:
        cards += source.sample(pack, len(pack))
    return cards[:kills]


def attack(victim: Victim, given: Any) -> None:
    """Spread the kills over the run: neither all at its beginning, nor fewer than asked for."""
    source, cards = victim.source, deck(given.kills, given.roles, victim.source)
    victim.wait_for(1)
    began = time.monotonic()
    for number, role in enumerate(cards):
        share = number * (victim.steps - 2) / len(cards)
        victim.wait_for(int(share) - AHEAD)
        due = time.monotonic() + (0 if victim.step() > share else source.uniform(0, given.gap_s))
        while time.monotonic() < due:
            victim.look()
        while not victim.kill(role):
            if victim.step() >= victim.steps or victim.process.poll() is not None:
                print(f"the run was over after {number} kills: too few steps")
                return
            victim.look()  # it is being started again
        if given.disk and number % 2:
            victim.fill(source.uniform(0.5, 3.0))
        if given.stop_s and source.random() < 0.25:
            victim.stop(source.choice(given.roles), source.uniform(0.1, given.stop_s))
        if number % 10 == 9:
            took = time.monotonic() - began
            print(f"{number + 1} kills, step {victim.step()}, {took:.0f} s", flush=True)


def recovery(victim: Victim, given: Any) -> dict[str, Any]:
    """Kill one process at a time, each after a step, and wait for the steps that follow."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    victim.wait_for(2)
    for number in range(given.recovery * len(given.roles)):
        role = given.roles[number % len(given.roles)]
        due = time.monotonic() + victim.source.uniform(0.0, 1.0)
        while time.monotonic() < due:
            victim.look()
        began = time.monotonic()
        while not victim.kill(role):
            victim.look()
            began = time.monotonic()
        before = victim.step()
        for name, further in (("next_s", 1), ("next_but_one_s", 2)):
            victim.wait_for(before + further)
            times[role][name].append(time.monotonic() - began)
    for role, kinds in times.items():
        for name, seconds in kinds.items():
            print(
                f"{role:<12}{name:<16}{statistics.median(seconds):>6.1f} s (median of "
                f"{len(seconds)}, {min(seconds):.1f} … {max(seconds):.1f})"
            )
    return {role: dict(kinds) for role, kinds in times.items()}


def digests(run: RunDirectory) -> dict[int, str]:
    """Of the weights at every version."""
    return Books.of(open_journal(run.journal).records(0)).digests


def settings_of(given: Any) -> list[str]:
    """What the attacked run is, as assignments to the quickstart."""
    settings = [] if given.quickstart else list(SMALL)
    steps = given.steps or (
        0 if given.quickstart else max(40, given.kills * 2, given.recovery * 16)
    )
    settings += [f"learner.steps={steps}"] if steps else []
    if given.deterministic:
        settings += DETERMINISTIC
    return [*settings, *given.set]


def main() -> None:
    """Attack, account, replay, and say the verdict."""
    given = _arguments()
    if given.disk and MOUNTS not in os.environ:  # mounts of our own, which nobody else sees
        os.environ[MOUNTS] = "own"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.orig_argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    folder, settings = Path(tempfile.mkdtemp(prefix="mage-chaos-")), settings_of(given)
    actors = given.actors or (4 if given.quickstart else 2)
    plain = None
    if given.deterministic:
        plain = Victim(folder / "plain" / "run", settings, actors, given)
        plain.finish()
    victim = Victim(folder / "run", settings, actors, given)
    began = time.monotonic()
    times = recovery(victim, given) if given.recovery else attack(victim, given)
    victim.finish()
    wall_s = time.monotonic() - began
    figures: dict[str, Any] = account(victim.run, victim.tap.acknowledged, victim.tap.published)
    replayed = subprocess.run(
        [sys.executable, "-m", "mage_async.replay", str(victim.run.root)], stdout=subprocess.PIPE
    )
    figures["replay_differs"] = int(replayed.returncode != 0)
    if plain is not None:
        one, other = digests(plain.run), digests(victim.run)
        figures["versions_compared"] = len(one)
        figures["versions_differ"] = sum(one[v] != other.get(v) for v in one)
    report = {
        "settings": settings,
        "kills": dict(victim.kills),
        "stops": dict(victim.stops),
        "times_full": victim.num_full,
        "torn_bytes": victim.torn,
        "harmed_messages": dict(victim.tap.mischief.done) if victim.tap.mischief else {},
        "messages": victim.tap.num_messages,
        "wall_s": wall_s,
        "recovery_s": times or {},
        "figures": figures | _return(victim.run),
    }
    is_whole = conclude(report, given)
    if given.name:
        write_baseline(given.name, report)
    print("nothing was lost" if is_whole else f"LOST: see {victim.run.root}")
    sys.exit(0 if is_whole else 1)


def conclude(report: dict[str, Any], given: Any) -> bool:
    """Print the figures; whether all is as it has to be."""
    figures = report["figures"]
    for name, value in figures.items():
        print(f"{name:<28}{value:>10}")
    kills = sum(report["kills"].values())
    print(f"{kills} kills {report['kills']}, stops {report['stops']}, {report['wall_s']:.0f} s")
    is_whole = not any(figures[name] for name in FAULTS) and not figures.get("versions_differ")
    if given.quickstart and not given.set:
        is_whole = is_whole and figures["heldout_return"] >= RETURN
    return is_whole and kills >= given.kills


def _return(run: RunDirectory) -> dict[str, float]:
    sets = json.loads(run.evaluation.read_text())["sets"]
    return {"heldout_return": sets["heldout"]["return_by_episode"][-1]}


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--recovery", type=int, default=0, metavar="N", help="kills of each role")
    parser.add_argument("--roles", nargs="+", choices=MODULES, default=list(SHARES))
    parser.add_argument("--quickstart", action="store_true", help="attack a whole quickstart")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--frames", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--disk", type=int, default=0, metavar="MIB", help="of the journal")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--stop-s", type=float, default=6.0, help="longest SIGSTOP; 0: none")
    parser.add_argument("--gap-s", type=float, default=1.5, help="longest time between two kills")
    parser.add_argument("--patience-s", type=float, default=180.0, help="for the next step")
    parser.add_argument("--steps", type=int, help="of the run")
    parser.add_argument("--actors", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--name", help="write the figures as this baseline")
    return parser.parse_args()


if __name__ == "__main__":
    main()
