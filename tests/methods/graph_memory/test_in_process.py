"""A memory in the algorithm, in one process: later groups are told what earlier ones taught."""

import pytest
import torch

from mage_async.algorithm import InProcessRun, prepare
from mage_async.config import config_file

SMALL = (
    "environment.name=boxes",
    "warm_start.steps=0",
    "admission.groups_per_step=3",
    "admission.trials_per_group=4",
    "methods.graph_memory.strategies=2",
    "learner.steps=3",
)


@pytest.fixture
def run(tmp_path):
    threads = torch.get_num_threads()
    config = config_file.load(config_file.find("quickstart"), SMALL, "graph_memory")
    yield InProcessRun(config, prepare(config, tmp_path))
    torch.set_num_threads(threads)


def test_half_of_later_trials_begin_with_what_earlier_groups_taught(run):
    groups = []
    run.train(groups.extend)
    assert all(group.guidance is None for group in groups[:3])
    told = [group for group in groups[3:] if group.guidance is not None]
    assert told
    for group in told:
        guided, alone = group.trials[:2], group.trials[2:]
        assert {trial.memory for trial in guided} == {group.guidance.version}
        assert {trial.memory for trial in alone} == {None}
        for trial in group.trials:
            opening = trial.segments[0].tokens[: trial.turns[0].start].tolist()
            text = run._chat.decode(opening)
            assert (group.guidance.text in text) == (trial in guided)
    (line,) = run.methods.records()
    assert line["version"] == 3


def test_evaluated_trials_are_told_or_not_as_asked(run, monkeypatch):
    run.train()
    play, seen = run._play, []

    def watched(runs):
        seen.append(play(runs))
        return seen[-1]

    monkeypatch.setattr(run, "_play", watched)
    for guided in (True, False):
        run.evaluate("heldout", 4, guided=guided)
    assert [{trial.memory for trial in trials} for trials in seen] == [{3}, {None}]
    assert len(run.methods.evaluation_guidance(seen[0][0].task).decisions) <= 2
