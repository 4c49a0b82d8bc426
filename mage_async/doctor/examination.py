"""A run examined: a step at a time while it lives, or as a whole once it is recorded."""

from collections.abc import Iterable

from mage_async.assembly import environment_of
from mage_async.config.schema import Config
from mage_async.doctor.catalogue import SIGNATURES
from mage_async.doctor.finding import Case, Finding, Record, Sighting
from mage_async.errors import ConfigError
from mage_async.results.run_files import RunRecords

GONE = 10
"""Steps without a signature, after which it is found anew where it comes back."""


class Doctor:
    """Asked after every step; each answer takes constant time, and is about what is new."""

    def __init__(self, case: Case) -> None:
        self._case, self._step = case, 0
        self._watches = {
            name: signature.watch(case)
            for name, signature in SIGNATURES.items()
            if signature.watch is not None
        }
        self._seen: dict[tuple[str, str], int] = {}
        self.findings: list[Finding] = []
        """All so far, oldest first."""

    @staticmethod
    def of(config: Config) -> "Doctor":
        """The doctor of a run that is about to begin.

        Raises: ConfigError: its environment cannot be made.
        """
        facts = environment_of(config).facts
        return Doctor(Case(config, _bounds(facts.min_return, facts.max_return, facts.units)))

    def step(self, record: Record) -> list[Finding]:
        """What the metrics of a step show that was not known. A step that a restarted learner
        trains again is not looked at again.
        """
        if record["step"] <= self._step:
            return []
        self._step = record["step"]
        return [
            finding
            for name, watch in self._watches.items()
            for finding in self._new(name, watch.step(record), self._step)
        ]

    def evaluated(self, evaluation: Record) -> list[Finding]:
        """The same of an evaluation, a point of the curve or the final one."""
        return [
            finding
            for name, signature in SIGNATURES.items()
            if signature.look is not None
            for finding in self._new(
                name, signature.look(self._case, evaluation), evaluation["version"]
            )
        ]

    def conclude(self, records: RunRecords) -> list[Finding]:
        """What the evaluations of a run show, whose steps have been looked at."""
        return [found for each in evaluations(records) for found in self.evaluated(each)]

    def _new(self, name: str, sightings: Iterable[Sighting], step: int) -> list[Finding]:
        found = []
        for each in sightings:
            last = self._seen.get((name, each.subject))
            self._seen[name, each.subject] = step
            if last is None or step - last > GONE:
                found.append(_finding(name, each, step))
        self.findings += found
        return found


def examine(records: RunRecords) -> list[Finding]:
    """All findings of a recorded run, finished or not: of its steps, then of its evaluations."""
    doctor = Doctor(Case(records.config, _recorded_bounds(records)))
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
    """Of a run whose environment may not be on this machine: then the final evaluation says them,
    or they are unknown.
    """
    if facts := records.evaluation.get("environment"):
        return _bounds(facts["min_return"], facts["max_return"], facts["units"])
    try:
        facts = environment_of(records.config).facts
    except ConfigError:
        return None
    return _bounds(facts.min_return, facts.max_return, facts.units)


def _bounds(least: float | None, most: float | None, units: int) -> tuple[float, float] | None:
    return None if least is None or most is None else (least / units, most / units)
