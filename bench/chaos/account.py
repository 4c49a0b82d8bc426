"""Account for every trial of a run after its processes were killed.

Three independent sources are compared: the journal on disk, the run's own summary, and the messages
that a tap on the learner's sockets recorded. The most important figures:

    lost            acknowledged trials that are neither trained, nor in a group in flight, nor in a
                    group that was dropped for a recorded reason
    trained_twice   groups in more than one commit
    over_bound      groups with a token staler than the bound, by the versions in the journal
    books_differ    trials by which the run's own counts differ from the journal's
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from mage_async.config import config_file
from mage_async.protocol.journal_records import (
    Commit,
    Dropped,
    Granted,
    LoadedWeights,
    Published,
    Record,
    SegmentHeader,
)
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_lines
from mage_services.journal.reader import open_journal


@dataclass
class Books:
    """Hold what the journal's records say about groups and trials."""

    granted: set[int] = field(default_factory=set)
    trials: dict[tuple[int, int], int] = field(default_factory=dict)
    """The oldest version that sampled a token of each recorded trial, by grant and index."""
    num_taken_twice: int = 0
    """Number of records of trials that an earlier record holds."""
    commits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The groups that a step trained, by the version that it made."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights, by version."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Reason for which a group was dropped, by grant."""
    num_segments: int = 0

    @staticmethod
    def of(records: Iterable[Record]) -> "Books":
        """Read all records of a journal."""
        books = Books()
        for record in records:
            books._take(record)
        return books

    def _take(self, record: Record) -> None:
        """Take one record into the books."""
        match record:
            case SegmentHeader():
                self.num_segments += 1
            case Granted():
                self.granted.add(record.grant.grant)
            case TrialResult():
                key = record.grant, record.trial.index
                self.num_taken_twice += key in self.trials
                runs = [run for part in record.trial.segments for run in part.versions]
                self.trials[key] = min(run.policy for run in runs)
            case Commit():
                self.commits[record.version] = record.grants
                self.digests[record.version] = record.digest
            case Dropped():
                self.dropped[record.grant] = record.reason
            case Published() | LoadedWeights():
                return

    def trained(self) -> list[int]:
        """Return the trained groups in the order of training."""
        return [grant for grants in self.commits.values() for grant in grants]


def account(
    run: RunDirectory, acknowledged: set[tuple[int, int]], published: set[int]
) -> dict[str, int]:
    """Return all figures of a finished run; those of `bench.chaos.verdict.FAULTS`, where each is
    explained, must be 0.

    Args:
        acknowledged: Grant and index of the trials that the learner acknowledged, by the tap.
        published: Versions that the learner announced, by the tap.
    """
    config = config_file.load(run.config, [])
    count, bound = config.admission.trials_per_group, config.admission.max_staleness
    books = Books.of(open_journal(run.journal).records(0))
    trained = set(books.trained())
    own = json.loads(run.learner.read_text())["trials"]
    in_flight = books.granted - trained - books.dropped.keys()
    lines = read_lines(run.metrics)
    return {
        "acknowledged": len(acknowledged),
        "of_these_trained": sum(grant in trained for grant, _ in acknowledged),
        "of_these_in_flight": sum(grant in in_flight for grant, _ in acknowledged),
        "of_these_dropped": sum(grant in books.dropped for grant, _ in acknowledged),
        "taken": len(books.trials),
        "lost": sum(
            key not in books.trials or key[0] not in trained | in_flight | books.dropped.keys()
            for key in acknowledged
        ),
        "taken_twice": books.num_taken_twice,
        "groups_trained": len(trained),
        "trained_twice": len(books.trained()) - len(trained),
        "trained_without_trials": sum(
            (grant, index) not in books.trials for grant in trained for index in range(count)
        ),
        "groups_dropped": len(books.dropped),
        "over_bound": sum(
            version - 1 - min(books.trials.get((g, i), version) for i in range(count))
            > bound + config.admission.lag
            for version, grants in books.commits.items()
            for g in grants
        ),
        # Version 0 is the policy that training begins with.
        "told_of_no_commit": len(published - books.commits.keys() - {0}),
        "books_differ": abs(own["trained"] - count * len(trained))
        + abs(own["in_flight"] - count * len(in_flight))
        + abs(own["acknowledged"] - len(books.trials)),
        "steps": len(books.commits),
        "steps_missing": len(books.commits.keys() ^ {line["step"] for line in lines}),
        # At most as many as learner processes: each begins a segment, unless it is killed before
        # the segment's header is on disk, or the header is torn off with the journal's tail.
        "journal_segments": books.num_segments,
    }
