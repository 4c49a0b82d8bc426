"""A journal as lines of text, and which of its records a person asks for."""

from collections.abc import Iterable
from dataclasses import dataclass

from mage_async.policy_version import oldest
from mage_async.protocol.journal_records import (
    Commit,
    Dropped,
    Granted,
    Head,
    Published,
    Receipt,
    Record,
)
from mage_async.protocol.messages import TrialResult
from mage_async.trajectory import Trial


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records are wanted; all conditions hold together."""

    kinds: tuple[str, ...] = ()
    """Kinds as `line_of` names them; empty for all."""
    grant: int | None = None
    """Only records that name this group; None for all."""
    step: int | None = None
    """Only this step and the groups it was computed from; None for all."""
    trained: frozenset[int] = frozenset()
    """The groups that `step` was computed from, by `trained_in`."""

    def wants(self, record: Record) -> bool:
        """Whether a record is asked for."""
        if self.kinds and line_of(record)[0] not in self.kinds:
            return False
        if self.step is not None and not self._is_of_step(record):
            return False
        return self.grant is None or self.grant in _grants(record)

    def _is_of_step(self, record: Record) -> bool:
        """Whether a record is the step's commit, publication or a receipt of it, or a group it was
        computed from.
        """
        if isinstance(record, Commit | Published | Receipt):
            return record.version == self.step
        return isinstance(record, Granted | TrialResult) and bool(_grants(record) & self.trained)


def trained_in(records: Iterable[Record], step: int) -> frozenset[int]:
    """Numbers of the groups that a step was computed from."""
    commits = (record for record in records if isinstance(record, Commit))
    return frozenset(grant for one in commits if one.version == step for grant in one.grants)


def line_of(record: Record) -> tuple[str, str]:
    """The kind of a record, and what it says in a line."""
    match record:
        case Head():
            groups = len(record.groups)
            return "head", f"step {record.version}, {groups} groups in flight"
        case Granted(grant=grant):
            what = f"{grant.member} seat {grant.seat} at step {grant.version}"
            return "grant", f"group {grant.grant}.{grant.epoch} to {record.peer}: {what}"
        case TrialResult():
            group = f"group {record.grant}.{record.epoch}"
            return "trial", f"{group} {' and '.join(map(_said_of, record.trials()))}"
        case Dropped():
            return "drop", f"group {record.grant}: {record.reason}"
        case Commit():
            grants = " ".join(map(str, record.grants))
            return "commit", f"step {record.version} {record.digest}: groups {grants}"
        case Published():
            return "publication", f"step {record.version} {record.path}"
        case Receipt():
            apart = f"log-probs {record.difference:.2g} nats apart"
            return "receipt", f"step {record.version} {record.digest} at {record.peer}: {apart}"


def _said_of(trial: Trial) -> str:
    drawn = oldest(run for part in trial.segments for run in part.versions)
    rewards = ", ".join(f"{reward:g}" for reward in trial.episode_rewards())
    return f"trial {trial.index}: {trial.num_tokens()} tokens from step {drawn}, [{rewards}]"


def _grants(record: Record) -> set[int]:
    match record:
        case Head():
            return {granted.grant.grant for granted in record.groups}
        case Granted():
            return {record.grant.grant}
        case TrialResult() | Dropped():
            return {record.grant}
        case Commit():
            return set(record.grants)
        case Published() | Receipt():
            return set()
