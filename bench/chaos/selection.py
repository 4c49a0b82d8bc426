"""Measure whether faults and kills select which trials are trained.

    python -m bench.chaos.selection --name selection      2,000 trials, 4 minutes

Half of the tasks have two turns an episode, the others twenty. Each `step` raises with the same
probability, so a fault hits a long trial ten times as often as a short one, and an actor is killed
every few seconds, mostly in the middle of long trials. The ratio of selection is the trained share
of the long groups that were started, over that of the short ones; 1 is no selection. The run's
ratio comes from its journal. The program compares it with three other ways to treat the same faults
and kills, computed from the same journal:

    drop                    a group with a fault or a kill is not trained
    mask as zero            a trial with a fault or a kill is trained with return 0
    resume from checkpoint  a kill ends the whole job, and trials in flight are not played again

The last line is the verdict; the exit status is 1 if the run's own ratio is not 1 within its
interval, or a trial was lost.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from bench.chaos.account import account
from bench.chaos.uneven import SETTINGS, SHARE_VARIABLE, Uneven
from bench.chaos.verdict import shortfalls, verdict
from bench.chaos.victim import Victim
from bench.lib.baseline import write_baseline
from bench.lib.options import option_parser
from mage_async.protocol.journal_records import Commit, Dropped, Granted, Record
from mage_async.protocol.messages import TrialResult
from mage_async.results.dropped_bias import Selection, Share, contrast, ratio_text
from mage_async.results.run_files import read_lines
from mage_services.journal.reader import open_journal

GROUPS, TRIALS = 10, 4
"""Groups of a step, and trials of a group; the environment's `SETTINGS` must have the same."""


def settings(given: Namespace) -> list[str]:
    """Return the settings of the run, which change the quickstart's."""
    return [
        *SETTINGS,
        f"admission.groups_per_step={GROUPS}",
        f"learner.steps={given.trials // (GROUPS * TRIALS)}",
        *given.set,
    ]


@dataclass
class Fates:
    """Hold what happened to every group, by grant."""

    kinds: dict[int, str] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    hit: set[tuple[int, int]] = field(default_factory=set)
    """Grant and index of the trials that a fault or a kill interrupted."""
    in_flight_at_a_kill: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Fates":
        """Read a journal."""
        fates, kinds, missing = cls(), Uneven(), dict[int, set[int]]()
        for record in records:
            match record:
                case Granted() if record.grant.epoch == 0:
                    grant = record.grant
                    fates.kinds[grant.grant] = kinds.family(int(grant.member))
                    missing[grant.grant] = set(range(grant.num_trials))
                case Granted():  # again, after a kill of its actor: a later epoch
                    number = record.grant.grant
                    fates.hit.update((number, index) for index in missing[number])
                    fates.in_flight_at_a_kill.update(each for each in missing if missing[each])
                case TrialResult():
                    missing[record.grant].discard(record.trial.index)
                    if record.trial.num_retries:
                        fates.hit.add((record.grant, record.trial.index))
                case Commit():
                    fates.trained.update(record.grants)
                case Dropped():
                    fates.dropped.add(record.grant)
        return fates

    def own(self, kind: str) -> Share:
        """Return the trained share of the groups of a kind in the run."""
        started = [grant for grant in self._ended() if self.kinds[grant] == kind]
        return Share(kind, sum(grant in self.trained for grant in started), len(started))

    def drop(self, kind: str) -> Share:
        """Return the share of groups without a fault or a kill."""
        hit = {grant for grant, _ in self.hit}
        return self._without(kind, hit)

    def resume(self, kind: str) -> Share:
        """Return the share of groups that were not in flight at a kill."""
        return self._without(kind, self.in_flight_at_a_kill)

    def mask(self, kind: str) -> Share:
        """Return the share of trials without a fault or a kill, which keep their own return."""
        started = [
            (grant, index)
            for grant in self._ended()
            if self.kinds[grant] == kind
            for index in range(TRIALS)
        ]
        kept = sum(trial[0] in self.trained and trial not in self.hit for trial in started)
        return Share(kind, kept, len(started))

    def _ended(self) -> set[int]:
        return self.trained | self.dropped

    def _without(self, kind: str, lost: set[int]) -> Share:
        started = [grant for grant in self._ended() if self.kinds[grant] == kind]
        return Share(
            kind,
            sum(grant in self.trained and grant not in lost for grant in started),
            len(started),
        )


def main() -> None:
    """Attack a run, and compare its ratio of selection with those of other treatments."""
    parser = option_parser(__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--share", type=float, default=0.009, help="of the steps that raise")
    parser.add_argument("--gap-s", type=float, default=8.0, help="between two kills of an actor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--name", help="write the figures as this baseline")
    given = parser.parse_args()
    os.environ[SHARE_VARIABLE] = str(given.share)
    others = {"disk": 0, "frames": 0.0, "clock": False, "patience_s": 300.0}
    victim = Victim(
        Path(mkdtemp(prefix="mage-selection-")) / "run",
        settings(given),
        2,
        Namespace(**vars(given), **others),
    )
    began = time.monotonic()
    victim.wait_for(1)
    while victim.step() < victim.steps and victim.process.poll() is None:
        due = time.monotonic() + victim.source.uniform(0.5, 1.5) * given.gap_s
        while time.monotonic() < due and victim.process.poll() is None:
            victim.look()
        if victim.step() < victim.steps:
            victim.kill("actor")
    victim.finish()
    fates = Fates.of(open_journal(victim.run.journal).records(0))
    figures = account(victim.run, victim.tap.acknowledged, victim.tap.published)
    ways = {
        "this run": fates.own,
        "drop": fates.drop,
        "mask as zero": fates.mask,
        "resume from checkpoint": fates.resume,
    }
    print(f"{victim.kills['actor']} kills, {len(fates.hit)} trials hit, {figures['lost']} lost")
    print(f"{'':<24}{'short':>16}{'long':>16}   long over short, 95 %")
    rows = {}
    for name, share in ways.items():
        short, long = share("short"), share("long")
        ratio = contrast(long, short)
        cells = [f"{each.trained:,} of {each.started:,}" for each in (short, long)]
        print(f"{name:<24}{cells[0]:>16}{cells[1]:>16}   {ratio_text(ratio)}")
        rows[name] = {
            "short": (short.trained, short.started),
            "long": (long.trained, long.started),
            "ratio": ratio,
        }
    reported = Selection.of(read_lines(victim.run.metrics)).long_over_short(TRIALS)
    if reported is not None:
        print(f"{'as the report has it':<56}   {ratio_text(reported)}")
    report = {
        "trials": given.trials,
        "share": given.share,
        "kills": dict(victim.kills),
        "trials_hit": len(fates.hit),
        "wall_s": time.monotonic() - began,
        "ways": rows,
        "reported": reported,
        "figures": figures,
    }
    if given.name:
        write_baseline(given.name, report)
    own = contrast(fates.own("long"), fates.own("short"))
    found = shortfalls(figures, kills=0, kills_asked=0, least_return=None)
    if not own.low <= 1.0 <= own.high:
        found.append(f"ratio of selection: {ratio_text(own)}, wanted 1")
    print(verdict(found, num_lost=figures["lost"]))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
