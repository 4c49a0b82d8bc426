"""A run examined: a step at a time while it lives, or as a whole once it is recorded."""

from collections.abc import Iterable

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.doctor.catalogue import SIGNATURES
from mage_async.doctor.finding import Case, Finding, Record, Sighting
from mage_async.environments.catalogue import names
from mage_async.results.run_files import RunRecords

GONE = 10
"""Steps without a signature, after which it is found anew where it comes back."""


class Doctor:
    """Asked after every step; each answer takes constant time, and is about what is new."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.last_step = 0
        """The newest that was looked at."""
        self._watches = {
            name: signature.watch(case)
            for name, signature in SIGNATURES.items()
            if signature.watch is not None
        }
        self._seen: dict[tuple[str, str], int] = {}
        """The last step that showed a signature of a subject."""
        self._evaluated: set[str] = set()
        """Signatures that evaluations have shown."""
        self.findings: list[Finding] = []
        """All so far, oldest first."""

    @staticmethod
    def of(config: Config) -> "Doctor":
        """The doctor of a run that is about to begin.

        Raises: ConfigError: its environment cannot be made.
        """
        facts = environment_of(config).facts
        return Doctor(Case(config, _bounds(facts.min_return, facts.max_return, facts.units)))

    @staticmethod
    def recorded(records: RunRecords) -> "Doctor":
        """The doctor of a run by what it has written down, of which nothing was looked at yet."""
        return Doctor(Case(records.config, _recorded_bounds(records)))

    def step(self, record: Record) -> list[Finding]:
        """What the metrics of a step show that was not known. A step that a restarted learner
        trains again is not looked at again.
        """
        if record["step"] <= self.last_step:
            return []
        self.last_step = record["step"]
        return [
            finding
            for name, watch in self._watches.items()
            for finding in self._new(name, watch.step(record))
        ]

    def evaluated(self, evaluation: Record) -> list[Finding]:
        """What an evaluation, a point of the curve or the final one, shows that none before did."""
        return [
            finding
            for name, signature in SIGNATURES.items()
            if signature.look is not None
            for finding in self._once(name, signature.look(self._case, evaluation))
        ]

    def conclude(self, records: RunRecords) -> list[Finding]:
        """What the evaluations of a run show, whose steps have been looked at."""
        return [found for each in evaluations(records) for found in self.evaluated(each)]

    def _new(self, name: str, sightings: Iterable[Sighting]) -> list[Finding]:
        found = []
        for each in sightings:
            last = self._seen.get((name, each.subject))
            self._seen[name, each.subject] = self.last_step
            if last is None or self.last_step - last > GONE:
                found.append(_finding(name, each, self.last_step))
        self.findings += found
        return found

    def _once(self, name: str, sightings: Iterable[Sighting]) -> list[Finding]:
        new = [] if name in self._evaluated else list(sightings)
        found = [_finding(name, each, each.onset) for each in new]
        self._evaluated.update(finding.name for finding in found)
        self.findings += found
        return found


def examine(records: RunRecords) -> list[Finding]:
    """All findings of a recorded run, finished or not: of its steps, then of its evaluations."""
    doctor = Doctor.recorded(records)
    for record in records.metrics:
        doctor.step(record)
    doctor.conclude(records)
    return doctor.findings


def evaluations(records: RunRecords) -> list[Record]:
    """The points of the curve and the final evaluation, as far as there are any."""
    return [*records.curve, *([records.evaluation] if records.evaluation else [])]


def _finding(name: str, seen: Sighting, step: int) -> Finding:
    remedy = SIGNATURES[name].remedy
    return Finding(name, seen.onset, step, seen.evidence, remedy, seen.subject)


def _recorded_bounds(records: RunRecords) -> tuple[float, float] | None:
    """As the final evaluation says them, or one of our own environments; to look at a run runs no
    code of its environment, which may not be on this machine.
    """
    if facts := records.evaluation.get("environment"):
        return _bounds(facts["min_return"], facts["max_return"], facts["units"])
    if records.config.environment.name not in names():
        return None
    facts = environment_of(records.config).facts
    return _bounds(facts.min_return, facts.max_return, facts.units)


def _bounds(least: float | None, most: float | None, units: int) -> tuple[float, float] | None:
    return None if least is None or most is None else (least / units, most / units)
