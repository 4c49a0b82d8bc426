"""Which segments of a journal a checkpoint still needs."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """What has to be known of a segment to decide whether it is still needed."""

    number: int
    version: int
    """Policy version of the segment's head."""
    oldest_version: int
    """Oldest version of the groups in flight in the segment's head."""
    num_bytes: int


def first_needed(segments: Sequence[Segment], checkpoint_version: int) -> int | None:
    """The segment from which on a checkpoint can be brought up to date; None: none is.

    The last head not newer than the checkpoint knows which groups were in flight; their trials lie
    behind the last head that is older than the oldest of those groups. The first segment of a run
    needs no earlier one.
    """
    known = [segment for segment in segments if segment.version <= checkpoint_version]
    if not known:
        return None
    oldest = known[-1].oldest_version
    before = [segment for segment in known if segment.version < oldest]
    if before:
        return before[-1].number
    return known[0].number if known[0].number == 1 else None


def to_delete(segments: Sequence[Segment], checkpoint_version: int, max_bytes: int) -> list[int]:
    """Segments to delete after a checkpoint, oldest first: only unneeded ones, and only until the
    rest fits into `max_bytes`; what fits is kept for `mage replay`.
    """
    needed = first_needed(segments, checkpoint_version)
    total = sum(segment.num_bytes for segment in segments)
    doomed: list[int] = []
    for segment in segments:
        if total <= max_bytes or needed is None or segment.number >= needed:
            break
        doomed.append(segment.number)
        total -= segment.num_bytes
    return doomed
