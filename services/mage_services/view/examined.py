"""What the doctor finds in a run that is looked at; each step is examined once."""

import threading
from dataclasses import dataclass
from pathlib import Path

from mage_async.doctor import Doctor, Finding
from mage_async.results.run_files import RunRecords
from mage_services.view.found_runs import changed_at
from mage_services.view.index.run_reader import RunReader

MOST_EXAMINED = 2000
"""Steps that the doctor is shown of a run that is looked at for the first time, the newest."""


@dataclass(slots=True)
class _Examined:
    doctor: Doctor
    began: tuple[float, bool]
    """What told this run from another in its place, and an ended one from one that goes on."""
    num_evaluations: int = -1
    """Those that the doctor has looked at; -1: not even whether there are any."""


_known: dict[Path, _Examined] = {}
_lock = threading.Lock()
"""Pages are made in threads, and two of one run ask the same doctor."""


def examined(reader: RunReader, records: RunRecords) -> list[Finding]:
    """All that was found in a run so far."""
    with _lock:
        known = _examined(reader, records)
        new = reader.last_step() - known.doctor.last_step
        for record in reader.newest_metrics(min(new, MOST_EXAMINED)):
            known.doctor.step(record)
        if len(records.curve) != known.num_evaluations:
            known.num_evaluations = len(records.curve)
            known.doctor.conclude(records)
        return list(known.doctor.findings)


def _examined(reader: RunReader, records: RunRecords) -> _Examined:
    """What is known of a run; nothing where it began anew, was cut, or has just ended."""
    run = reader.run
    began = (changed_at(run.config), bool(records.evaluation))
    known = _known.get(run.root)
    if known is None or known.began != began or reader.last_step() < known.doctor.last_step:
        known = _known[run.root] = _Examined(Doctor.recorded(records), began)
    return known
