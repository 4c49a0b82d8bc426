"""Damage a journal's tail as a power cut would: records that no peer was told of are lost or
garbage."""

import random

from bench.chaos.tap import Tap
from mage_async.protocol.journal_records import Commit, Dropped, Granted, Published, Record
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory, checkpoints, step_of
from mage_async.results.run_files import read_lines
from mage_services.journal.record_bytes import PREFIX_BYTES, decode_record, scan


def tear(run: RunDirectory, tap: Tap, source: random.Random) -> int:
    """Cut the last segment, or append garbage, after the last record that a peer was told of.

    No process of the run may live. Records that a checkpoint or a line of metrics depends on stay
    too, because they were synced before it was written.

    Returns:
        The number of bytes that were cut, plus those that were appended.
    """
    files = sorted(run.journal.glob("*.log"))
    if not files:
        return 0
    data = files[-1].read_bytes()
    known = [step_of(folder) for folder in checkpoints(run.checkpoints)]
    known += [line["step"] for line in read_lines(run.metrics)]
    least = _end_of_told(data, tap, max([0, *known, *tap.published]))
    kept = source.randint(least, len(data))
    garbage = source.randbytes(source.choice([0, 0, 3, 40, 400]))  # none, in two of five cases
    files[-1].write_bytes(data[:kept] + garbage)
    return len(data) - kept + len(garbage)


def _end_of_told(data: bytes, tap: Tap, version: int) -> int:
    """Return the offset behind the last record that must stay; 0 if the segment has no record."""
    found = scan(data)
    if not found.bodies:
        return 0
    # Records follow one another without gaps up to `good_bytes`; this is where the first begins.
    end = found.good_bytes - sum(PREFIX_BYTES + len(body) for body in found.bodies)
    end_of_told = end
    for body in found.bodies:
        end += PREFIX_BYTES + len(body)
        if _is_told(decode_record(body), tap, version):
            end_of_told = end
    return end_of_told


def _is_told(record: Record, tap: Tap, version: int) -> bool:
    """Return whether a record must stay: a peer was told of it, or files depend on it.

    Args:
        version: Newest version that a peer was told of, or that files depend on.
    """
    match record:
        case TrialResult():
            return (record.grant, record.trial.index) in tap.acknowledged
        case Granted():
            return (record.grant.grant, record.grant.epoch) in tap.granted
        case Commit():
            return record.version <= version
        case Published() | Dropped():
            return True  # weights that nobody needs since this record may be removed already
    return False
