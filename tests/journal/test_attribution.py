"""Returns, advantages and staleness read from a journal are those that the learner used."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from mage_async.admission.ledger import Ledger
from mage_async.admission.replay import replay
from mage_async.attribution import JournalStep, attributed, steps_of
from mage_async.config import config_file
from mage_async.inference.chat_files import load_chat
from mage_async.learning.packing import TrainingSequence, training_sequences
from mage_async.protocol.journal_records import Commit, Dropped, Granted, Record
from mage_async.protocol.messages import TrialResult
from mage_async.results.run_directory import RunDirectory
from mage_async.tasks.league import League
from mage_services.journal.export import token_columns, trial_row
from mage_services.journal.reader import open_journal
from mage_services.learner.trainer_thread import Training
from tests.helpers.recorded_runs import unpack


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of five steps."""
    return unpack("other", tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def records(run: RunDirectory) -> list[Record]:
    return list(open_journal(run.journal).records())


def trained(
    run: RunDirectory, records: Sequence[Record]
) -> Iterator[tuple[int, list[TrainingSequence]]]:
    """What the trainer was given, step by step, and the version it had; nothing is computed."""
    config = config_file.load_recorded(run.config)
    training, given = Training.of(run, config, None), list[list[TrainingSequence]]()
    step: Callable[[Any], Any] = given.append
    training.trainer.step = step  # type: ignore[method-assign]
    for version, committed in zip(count(), replay(records, Ledger(4, 1, 6), League())):
        training.adopt(config_file.loads(committed.config))
        assert committed.groups is not None
        trainer = training.trainer
        trainer.step(
            training_sequences(
                committed.groups, trainer.config, trainer.model.device, version=version
            )
        )
        yield version, given.pop()


def test_advantages_and_staleness_are_those_that_the_trainer_was_given(
    run: RunDirectory, records: list[Record]
) -> None:
    chat = load_chat(run.policy)
    steps = [step for step in steps_of(records) if step.step is not None]
    for step, (version, sequences) in zip(steps, trained(run, records), strict=True):
        assert step.step == version + 1
        found = [token_columns(trial) for trial in attributed(step, chat.decode)]
        for column, sequence in zip(found, sequences, strict=True):
            (advantages,), (staleness,) = column["advantages"], column["staleness"]
            given = np.repeat(sequence.advantages.numpy(), sequence.turn_lengths)
            assert np.array_equal(advantages[sequence.places], given)
            assert given.any()
            age = version - sequence.sampled.policy_versions
            assert np.array_equal(staleness[sequence.places], age)
            (is_sampled,) = column["is_sampled"]
            assert not staleness[~is_sampled].any()
            assert not advantages[~is_sampled].any()


@pytest.mark.parametrize("average", ["trial", "turn"])
def test_an_advantage_has_the_turns_weight_in_the_loss(
    run: RunDirectory, records: list[Record], average: str
) -> None:
    step = next(each for each in steps_of(records) if each.step == 2)
    # Turns of equal length in trials of equal length would all have a weight of 1.
    groups = [
        replace(
            group,
            trials=tuple(
                replace(trial, turns=trial.turns[: 8 if trial.index % 2 else 12])
                for trial in group.trials
            ),
        )
        for group in step.groups
    ]
    learner = msgspec.structs.replace(step.config.learner, average=average)
    config = msgspec.structs.replace(step.config, learner=learner)
    uneven = replace(step, groups=groups, config=config)
    found = [token_columns(trial) for trial in attributed(uneven, load_chat(run.policy).decode)]
    sequences = training_sequences(groups, config, "cpu", version=1)
    for column, sequence in zip(found, sequences, strict=True):
        (advantages,) = column["advantages"]
        given = np.repeat(sequence.advantages.numpy(), sequence.turn_lengths)
        assert np.array_equal(advantages[sequence.places], given)
        assert given.any()


def test_turns_that_a_step_does_not_train_on_have_no_advantage(
    run: RunDirectory, records: list[Record]
) -> None:
    chat = load_chat(run.policy)
    for step in steps_of(records):
        if step.step is None:
            continue
        # With this method, the executor, which acts, is trained at versions 1, 3, ...
        alternating = {"rema": {"separate_roles": True, "alternate": 1}}
        config = msgspec.structs.replace(step.config, methods=alternating)
        trials = attributed(replace(step, config=config), chat.decode)
        advantages = [turn.advantage for trial in trials for turn in trial.turns]
        assert any(advantages) == (step.step % 2 == 0)


def test_every_trial_of_a_journal_is_in_one_step_or_in_none(records: list[Record]) -> None:
    last = max(n for n, each in enumerate(records) if isinstance(each, Commit))
    *steps, rest = steps_of(records[:last])
    found = [
        (group.grant, trial.index)
        for step in (*steps, rest)
        for group in step.groups
        for trial in group.trials
    ]
    trials = [each for each in records[:last] if isinstance(each, TrialResult)]
    assert sorted(found) == sorted((each.grant, each.trial.index) for each in trials)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert rest.step is None
    assert rest.groups


def test_a_trial_is_told_in_full_turn_by_turn(run: RunDirectory, records: list[Record]) -> None:
    chat = load_chat(run.policy)
    step = next(steps_of(records))
    for trial in attributed(step, chat.decode):
        pieces = [piece for each in trial.turns for piece in each.text]
        whole = "".join((*pieces, trial.ending)).replace(" ", "")
        assert whole == chat.decode(trial.trial.segments[0].tokens.tolist()).replace(" ", "")
        assert [len(turns) for turns in trial.episodes()] == [4, 4, 4]
        rewards = [sum(each.turn.reward for each in turns) for turns in trial.episodes()]
        assert rewards == trial.trial.episode_rewards()


def dropped_or_lost(records: Sequence[Record], lost: int) -> Iterator[Record]:
    """A group of step 2 is dropped as it is complete, and a trial of step 1 is not there."""
    second = next(each for each in records if isinstance(each, Commit) and each.version == 2)
    for record in records:
        if isinstance(record, Commit) and record.version == 1:
            yield Dropped(grant=second.grants[0], reason="too old")
        if isinstance(record, TrialResult) and (record.grant, record.trial.index) == (lost, 0):
            continue
        yield record


def test_what_no_whole_batch_holds_has_returns_and_no_advantages(
    run: RunDirectory, records: list[Record]
) -> None:
    chat = load_chat(run.policy)
    lost = next(each.grant.grant for each in records if isinstance(each, Granted))
    dropped, first, second, *_ = steps_of(dropped_or_lost(records, lost))
    assert [each.step for each in (dropped, first, second)] == [None, 1, 2]

    def rows(step: JournalStep) -> list[dict[str, Any]]:
        return [trial_row(trial, chat) for trial in attributed(step, chat.decode)]

    assert {row["grant"] for row in rows(dropped)} == {dropped.groups[0].grant}
    for row in (*rows(dropped), *rows(first), *rows(second)):
        assert {turn["advantage"] for turn in row["turns"]} == {None}
        assert row["turns"][-1]["return"] == row["turns"][-1]["reward"]
    assert {turn["staleness"] for turn in rows(dropped)[0]["turns"]} == {None}
    assert {turn["staleness"] for turn in rows(first)[0]["turns"]} == {0}
