"""A memory goes through a journal: learned again it is the same, and a forged record is noticed."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mage_async.admission.ledger import Ledger
from mage_async.admission.replay import replay
from mage_async.config import config_file
from mage_async.errors import RunFailed
from mage_async.methods.method import Methods
from mage_async.policy_version import VersionRun
from mage_async.protocol.journal_records import Commit, Granted, first_segment_header
from mage_async.protocol.messages import TrialResult
from mage_async.tasks.league import League
from mage_async.trajectory import Kind, Segment, Task, Trial, Turn
from mage_services.journal.record_bytes import MAGIC, decode_record, encode_record, scan

PART = Segment(
    np.ones(2, np.int32), np.ones(2, bool), np.zeros(2, np.float32), (VersionRun(0, 0, 0),)
)


@pytest.fixture
def played(config):
    """Records of nine steps of two groups, and the ledger and memory that wrote them; a second
    head, with all that the memory holds, stands before step five.
    """
    given, source = config(strategies=2), random.Random(3)
    ledger, memory = Ledger(2, 1, 2), Methods(given)
    head = msgspec.structs.replace(first_segment_header(0, 0), config=config_file.dump(given))
    records = [head]
    for version in range(1, 10):
        if version == 5:
            later = ledger.segment_header(config_file.dump(given), 9.0)
            records.append(msgspec.structs.replace(later, methods=memory.states()))
        for _ in range(2):
            task = Task("rps", "m", ledger.next_grant)
            told = memory.guidance(ledger.next_grant, task)
            grant = ledger.grant(
                task, num_episodes=1, peer="a", now=0.0, deadline_s=9.0, guidance=told
            )
            records.append(ledger.grant_record(grant))
            for index in range(2):
                memory_of = told.version if told and index < told.num_guided else None
                action, state = source.choice("xyz"), source.choice("abc")
                turn = Turn(Kind.ACT, 0, 0, 0, 0, 1, source.random(), True, action, state)
                same = replace(turn, index=1, start=1, stop=2, anchor="d", action=action)
                trial = Trial(task, index, 1, (PART,), (turn, same), memory=memory_of)
                records.append(TrialResult(grant.grant, 0, trial))
                ledger.receive(records[-1])
        groups = ledger.take_batch()
        assert groups is not None
        memory.learn(groups)
        records.append(
            Commit(
                version=version,
                grants=tuple(group.grant for group in groups),
                digest="d",
                tensors={},
                time_s=1.0,
                methods=memory.digests(),
            )
        )
        ledger.trained(version)
    return on_disk(records), memory


def on_disk(records):
    data = MAGIC + b"".join(bytes(piece) for record in records for piece in encode_record(record))
    return [decode_record(body) for body in scan(data).bodies]


def again(records, given):
    memory = Methods(given)
    committed = list(replay(records, Ledger(2, 1, 2), League(), memory))
    return memory, committed


def test_a_replayed_memory_is_the_one_that_wrote_the_journal(played, config):
    records, memory = played
    found, committed = again(records, config(strategies=2))
    assert found.digests() == memory.digests()
    groups = [group for each in committed for group in each.groups]
    assert {trial.memory for group in groups for trial in group.trials} > {None, 8}
    assert all(
        (trial.memory is not None) == (group.guidance is not None and trial.index == 0)
        for group in groups
        for trial in group.trials
    )


def test_a_later_segment_is_enough(played, config):
    records, memory = played
    second = [n for n, record in enumerate(records) if type(record).__name__ == "SegmentHeader"][1]
    found, _ = again(records[second:], config(strategies=2))
    assert found.digests() == memory.digests()


def test_another_guidance_or_another_memory_is_an_error(played, config):
    records, _ = played
    place = max(n for n, record in enumerate(records) if isinstance(record, Granted))
    granted = records[place]
    forged = msgspec.structs.replace(
        granted.grant, guidance=replace(granted.grant.guidance, text="a lie")
    )
    lies = [*records]
    lies[place] = msgspec.structs.replace(granted, grant=forged)
    with pytest.raises(RunFailed, match="another guidance"):
        again(lies, config(strategies=2))
    lies = [*records[:-1], msgspec.structs.replace(records[-1], methods={"graph_memory": "0" * 16})]
    with pytest.raises(RunFailed, match="step 9: the state of the method graph_memory"):
        again(lies, config(strategies=2))


def test_a_trial_that_was_told_otherwise_is_not_taken(config, group_of):
    memory, ledger, task = Methods(config()), Ledger(1, 0, 2), Task("rps", "m", 1)
    memory.learn([group_of([[[("s", "left", 1.0)]], [[("s", "right", 0.0)]]])])
    told = memory.guidance(0, task)
    grant = ledger.grant(task, num_episodes=1, peer="a", now=0.0, deadline_s=9.0, guidance=told)
    assert grant.guidance == told
    for index, version in ((0, None), (0, 7), (1, 1)):
        trial = Trial(task, index, 1, (PART,), (), memory=version)
        assert "other guidance" in ledger.receive(TrialResult(0, 0, trial)).reason
    assert ledger.receive(TrialResult(0, 0, Trial(task, 0, 1, (PART,), (), memory=1))) is not None
    assert ledger.counts().acknowledged == 1
