"""ReMA: who computes a token, whose loss it is, and what a step leaves as it was."""

import torch

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file
from mage_async.learning.lora import trained_tensors
from mage_async.learning.packing import training_sequences
from mage_async.trajectory import Kind, Turn, role_changes

SMALL = (
    *("warm_start=none", "admission.groups_per_step=2", "admission.trials_per_group=2"),
    *("methods.rema.alternate=1", "learner.minibatches=1", "learner.warmup_steps=1"),
    *("policy.lora.rank=4", "policy.lora.alpha=8", "engine.max_tokens=256"),
)


def turn(kind, start, stop, episode=0):
    return Turn(kind, episode, 0, 0, start, stop, 0.0, True, "")


def acts(kind, is_last):
    return kind is Kind.ACT


def test_the_role_changes_where_a_turn_ends_and_the_other_role_takes_the_next():
    turns = [turn(Kind.STRATEGY, 4, 7), turn(Kind.ACT, 9, 10), turn(Kind.STRATEGY, 14, 17)]
    assert role_changes(turns, 1, acts) == (7, 10)
    assert role_changes(turns, 1, acts, (Kind.ACT, 0)) == (7, 10, 17)
    assert role_changes([], 1, acts, (Kind.ACT, 0)) == (0,)


def test_the_second_role_of_the_last_episode_begins_where_the_one_before_it_ended():
    turns = [turn(Kind.ACT, 4, 5), turn(Kind.REFLECT, 8, 12), turn(Kind.ACT, 15, 16, 1)]
    assert role_changes(turns, 2, lambda kind, is_last: is_last) == (12,)
    assert role_changes(turns[:1], 2, lambda kind, is_last: is_last) == ()


def test_planner_and_executor_take_turns_in_one_context_and_learn_alternately(tmp_path):
    config = config_file.load(config_file.find(None), list(SMALL), "rema_separate")
    run = InProcessRun(config, prepare(config, tmp_path))
    groups = run.play_batch()
    kinds = [turn.kind for turn in groups[0].trials[0].turns]
    assert kinds == [Kind.STRATEGY, Kind.ACT] * (len(kinds) // 2)
    sequences = training_sequences(groups, config, "cpu", version=0)
    planned = sum(int((each.sampled.kinds == Kind.STRATEGY).sum()) for each in sequences)
    assert planned > 0
    assert all((each.sampled.kinds != Kind.ACT).all() for each in sequences)
    assert run._trainer.parity(sequences)["logprob_mismatch_max"] < 2e-5
    for learns, rests in (("planner", "executor"), ("executor", "planner")):
        before = {name: each.clone() for name, each in trained_tensors(run.model).items()}
        run.step()
        moved = {
            name
            for name, each in trained_tensors(run.model).items()
            if not each.equal(before[name])
        }
        assert any(f".{learns}." in name for name in moved)
        assert not any(f".{rests}." in name for name in moved)
    assert torch.isfinite(torch.cat([each.flatten() for each in before.values()])).all()
