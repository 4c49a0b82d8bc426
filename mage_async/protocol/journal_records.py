"""Define the journal's records, which a run must not lose, and decide which segments (files) of the
journal are still needed.

The first record of a segment is a `SegmentHeader` with the state of the ledger (the groups in
flight), so that earlier segments can be deleted. `services/mage_services/journal/` writes the
records to files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import field

from mage_async.policy_version import oldest
from mage_async.protocol.messages import Fields, GroupGrant, Number
from mage_async.protocol.trial_arrays import TrialResult
from mage_async.tasks.league import LeagueState
from mage_async.trajectory import Trial

# When each record is written, and what waits until the record is durable:
#
#     record         written when                                  then
#     SegmentHeader  a learner begins, or a segment is full        -
#     Granted        a group is granted, or granted again          the actor is sent the grant
#     TrialResult    a trial is accepted                           it is acknowledged
#     Dropped        a group is dropped                            -
#     Commit         a step was computed                           its version is published
#     Published      its weights are on disk                       -
#     LoadedWeights  an engine samples with a version              -
#
# Records become durable in the order in which they are written. So the trials of a durable commit
# are durable, and every version that a peer has heard of can be computed again from the journal.


class Granted(Fields):
    """Record that a group was granted, or granted again if the grant's epoch is not 0."""

    peer: str | None
    """Actor that plays the group; None in a `SegmentHeader` if no actor does."""
    version: Number
    """Policy version at the first grant. The version in `grant` is `admission.lag` steps older, but
    at least 0.
    """
    grant: GroupGrant


class Dropped(Fields):
    """Record that a group was dropped; its trials count as dropped."""

    grant: Number
    reason: str
    num_turns: Number = 0
    """Number of turns in the group's trials that had not arrived, as actors have reported it."""


class Commit(Fields):
    """Record that a step was computed from exactly these groups."""

    version: Number
    """Policy version that the step made."""
    grants: tuple[Number, ...]
    digest: str
    """Digest of all weights after the step."""
    tensors: dict[str, str]
    """Digest of each tensor, by the tensor's name."""
    time_s: float
    """Training time of the run so far, in seconds."""
    methods: dict[str, str] = field(default_factory=dict)
    """Digest of the state of each method after the step, by the method's name; methods without a
    state are left out.
    """


class Published(Fields):
    """Record that the weights of a version are on disk; peers hear of them after this record."""

    version: Number
    path: str
    digest: str


class LoadedWeights(Fields, tag="Receipt"):
    """Record that an engine samples with a version, and that it loaded what was published.

    A replay does not need this record. In the file it is tagged `Receipt`.
    """

    peer: str
    version: Number
    digest: str
    """Digest of all loaded tensors (`mage_async/inference/weight_fingerprint.py`)."""
    difference: float
    """Mean absolute difference from the learner's log-probs of the probe tokens, in nats."""
    num_retries: Number


class SegmentHeader(Fields, tag="Head"):
    """Record the learner's state at the beginning of a segment. In the file it is tagged `Head`."""

    config: str
    """The configuration in force from here on, as TOML."""
    version: Number
    """Policy version at the beginning of the segment."""
    first_grant: Number
    """Number of the first group that the counts below include."""
    next_grant: Number
    """Number of the group that will be granted next."""
    groups: tuple[Granted, ...]
    """Groups in flight, oldest first. Their trials in `held` are recorded in earlier segments."""
    trained: Number
    """Number of groups trained so far."""
    acknowledged: Number
    """Number of trials received so far, without duplicates."""
    granted_again: Number
    """Number of grants after a group's first one, over all groups so far."""
    dropped: dict[str, Number]
    """Number of dropped groups by reason."""
    population: LeagueState | None = None
    """Past policies in opponents' seats, and their ratings; None if the run has none."""
    methods: dict[str, bytes] = field(default_factory=dict)
    """State of each method that has one, by the method's name."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digest of the source of each of the user's own classes, by the class's name."""

    def oldest_version(self) -> int:
        """Return the version at which the oldest group in flight was granted."""
        return min([self.version, *(granted.version for granted in self.groups)])


FieldsRecord = SegmentHeader | Granted | Dropped | Commit | Published | LoadedWeights
"""A record of named fields."""
Record = FieldsRecord | TrialResult


def first_segment_header(version: int, next_grant: int) -> SegmentHeader:
    """Return the header of a journal that begins here: no group is in flight."""
    return SegmentHeader(
        config="",
        version=version,
        first_grant=next_grant,
        next_grant=next_grant,
        groups=(),
        trained=0,
        acknowledged=0,
        granted_again=0,
        dropped={},
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """Hold the facts that decide whether a segment file is still needed."""

    number: int
    version: int
    """Policy version of the segment's header."""
    oldest_version: int
    """Version at which the oldest group in flight in the segment's header was granted."""
    num_bytes: int


def first_needed(segments: Sequence[Segment], checkpoint_version: int) -> int | None:
    """Return the number of the first segment that a resume or a replay from a checkpoint reads.

    Returns None if one of the segments to read was deleted.
    """
    known = [segment for segment in segments if segment.version <= checkpoint_version]
    if not known:
        return None
    # The last header that is not newer than the checkpoint names the groups in flight. The trials
    # of these groups come after the last header that is older than the oldest of these groups. If
    # there is no such header, the trials may be in any segment, so none may have been deleted: the
    # first one must still have number 1.
    oldest = known[-1].oldest_version
    before = [segment for segment in known if segment.version < oldest]
    if before:
        return before[-1].number
    return known[0].number if known[0].number == 1 else None


def to_delete(segments: Sequence[Segment], checkpoint_version: int, max_bytes: int) -> list[int]:
    """Return the numbers of the segments to delete after a checkpoint, oldest first.

    Only segments that the checkpoint does not need are deleted, and only until the rest fits into
    `max_bytes`: `mage replay` can use the kept ones.
    """
    needed = first_needed(segments, checkpoint_version)
    total = sum(segment.num_bytes for segment in segments)
    numbers: list[int] = []
    for segment in segments:
        if total <= max_bytes or needed is None or segment.number >= needed:
            break
        numbers.append(segment.number)
        total -= segment.num_bytes
    return numbers


# The code below shows records as lines of text, and filters them, for `mage journal`.


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Select the records that meet all conditions."""

    kinds: tuple[str, ...] = ()
    """Kinds of records, as `line_of` names them; empty for all."""
    grant: int | None = None
    """Number of the group that a record must name; None for any."""
    step: int | None = None
    """Step that a record must belong to, or whose groups it must name; None for any."""
    trained: frozenset[int] = frozenset()
    """Grants of the groups that `step` trained, from `trained_in`."""

    def wants(self, record: Record) -> bool:
        """Return whether a record meets the conditions."""
        if self.kinds and line_of(record)[0] not in self.kinds:
            return False
        if self.step is not None and not self._is_of_step(record):
            return False
        return self.grant is None or self.grant in _grants(record)

    def _is_of_step(self, record: Record) -> bool:
        """Return whether a record belongs to `step`, or names a group that it trained."""
        if isinstance(record, Commit | Published | LoadedWeights):
            return record.version == self.step
        return isinstance(record, Granted | TrialResult) and bool(_grants(record) & self.trained)


def trained_in(records: Iterable[Record], step: int) -> frozenset[int]:
    """Return the numbers of the groups that a step trained."""
    commits = (record for record in records if isinstance(record, Commit))
    return frozenset(
        grant for commit in commits if commit.version == step for grant in commit.grants
    )


def line_of(record: Record) -> tuple[str, str]:
    """Return the kind of a record, and its contents as one line."""
    match record:
        case SegmentHeader():
            groups = len(record.groups)
            return "head", f"step {record.version}, {groups} groups in flight"
        case Granted(grant=grant):
            what = f"{grant.member} seat {grant.seat} at step {grant.version}"
            return "grant", f"group {grant.grant}.{grant.epoch} to {record.peer}: {what}"
        case TrialResult():
            group = f"group {record.grant}.{record.epoch}"
            return "trial", f"{group} {' and '.join(map(_trial_text, record.trials()))}"
        case Dropped():
            return "drop", f"group {record.grant}: {record.reason}"
        case Commit():
            grants = " ".join(map(str, record.grants))
            return "commit", f"step {record.version} {record.digest}: groups {grants}"
        case Published():
            return "publication", f"step {record.version} {record.path}"
        case LoadedWeights():  # a receipt, in the words of `mage journal`
            apart = f"log-probs {record.difference:.2g} nats apart"
            return "receipt", f"step {record.version} {record.digest} at {record.peer}: {apart}"


def _trial_text(trial: Trial) -> str:
    """Return the tokens, the oldest version and the rewards of a trial, in a few words."""
    version = oldest(run for segment in trial.segments for run in segment.versions)
    rewards = ", ".join(f"{reward:g}" for reward in trial.episode_rewards())
    return f"trial {trial.index}: {trial.num_tokens()} tokens from step {version}, [{rewards}]"


def _grants(record: Record) -> set[int]:
    """Return the groups that a record names."""
    match record:
        case SegmentHeader():
            return {granted.grant.grant for granted in record.groups}
        case Granted():
            return {record.grant.grant}
        case TrialResult() | Dropped():
            return {record.grant}
        case Commit():
            return set(record.grants)
        case Published() | LoadedWeights():
            return set()
