"""Experts asked at every action of a trial: a script, recorded trials, and where they part."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Completion
from mage_async.config import config_file
from mage_async.errors import ConfigError, EnvironmentFault
from mage_async.learning.packing import MicroBatch, sequences_of
from mage_async.methods.method import Methods
from mage_async.methods.stepagent import ScriptedExpert, recorded_experts, scripted
from mage_async.pages.turns import shown_trial
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Alternative, Kind, Task, Trial, trial_as_dict
from mage_async.trials.action_parser import ActionParser, Forced
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.duels import begin_trial
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun, TrialStart, with_first_difference

CONFIG = config_file.load(config_file.find(None), ["transcript.max_reflection_tokens=6"])
RPS = environment_of(CONFIG)
TASK = Task("rps", "fixed-rock", 3)


def rules(chat: ChatFormat, *changes: str) -> TrialConfig:
    config = config_file.load(config_file.find(None), changes, "stepagent_implicit")
    return trial_config_of(config, RPS, chat, 2, advisers=Methods(config).advisers())


def played(how: TrialConfig, chat: ChatFormat, said: str, task: Task = TASK) -> Trial:
    """A trial in which every completion is the same."""
    run = TrialRun(TrialStart(RPS, task, 0, how, chat, name="t"))
    tokens = np.array(chat.encode(said), np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    while run.next_prompt() is not None:
        run.receive(Completion(tokens, logprobs, (VersionRun(0, 0, 0),), "stop", 0))
    return run.trial()


def test_an_expert_is_asked_at_every_action_and_at_no_remark(chat: ChatFormat) -> None:
    trial = played(rules(chat, "trial.memory=history_and_reflection"), chat, " rock")
    acts = [n for n, turn in enumerate(trial.turns) if turn.kind is Kind.ACT]
    assert len(acts) < len(trial.turns)
    assert [step.turn for step in trial.alternatives] == acts
    assert {step.action for step in trial.alternatives} <= set(RPS.facts.words[:3])
    episodes = shown_trial(trial, chat.decode, None).episodes
    shown = [turn for episode in episodes for turn in episode.turns]
    assert [shown[n].alternative for n in acts] == [step.action for step in trial.alternatives]
    again = played(rules(chat, "trial.memory=history_and_reflection"), chat, " rock")
    assert again.alternatives == trial.alternatives
    alone = replace(rules(chat), advisers=None)
    assert played(alone, chat, " rock").alternatives == ()


def test_expert_and_policy_part_at_the_action_and_nowhere_where_they_agree(
    chat: ChatFormat,
) -> None:
    trial = played(rules(chat), chat, " rock")
    assert {step.action for step in trial.alternatives} > {"rock"}
    for step in trial.alternatives:
        turn = trial.turns[step.turn]
        if step.action == "rock":
            assert (step.place, step.token) == (-1, -1)
        else:
            assert (step.place, [step.token]) == (turn.start, [*chat.encode(f" {step.action}")])


def test_what_experts_would_have_said_stands_at_its_sampled_token(chat: ChatFormat) -> None:
    trial = played(rules(chat, "trial.memory=none"), chat, " rock")
    sequences = sequences_of([trial, trial], torch.zeros(2 * len(trial.turns)))
    batch = MicroBatch.of(sequences, torch.device("cpu"))
    wanted = [step.token for step in trial.alternatives]
    assert batch.alternatives.tolist() == wanted * 2
    assert len(trial.segments) == 2


QUOTED = "<think><action> rock</action></think><action>"


@pytest.mark.parametrize(
    ("forced", "before", "rest", "action", "wanted", "token"),
    [
        ("none", " rock rock <action>", " rock</action>", "rock", "paper", " paper"),
        ("none", QUOTED, " rock</action> paper", "rock", "paper", " paper"),
        ("none", "", "<action> rock</action>", "rock", "rock", None),
        ("none", "", " rock", "", "rock", None),
        ("open", " rock", " paper</action>", "rock paper", "rock scissors", " scissors"),
        ("open", " rock", " paper</action>", "rock paper", "rock", "</action>"),
        ("both", "", " rock", "rock", "paper", " paper"),
        ("both", "", " rock", "rock", "rock paper", None),
    ],
)
def test_they_part_at_the_first_token_that_differs_behind_the_tag(
    chat: ChatFormat,
    forced: Forced,
    before: str,
    rest: str,
    action: str,
    wanted: str,
    token: str | None,
) -> None:
    step, said = Alternative(4, wanted), chat.encode(before + rest)
    found = with_first_difference(step, 100, said, action, chat, ActionParser(forced))
    if token is not None:
        step = replace(step, place=100 + len(chat.encode(before)), token=chat.encode(token)[0])
    assert found == step


def test_recorded_trials_are_matched_by_task_and_prefix_and_the_best_is_followed(
    chat: ChatFormat, tmp_path: Path
) -> None:
    how, file = replace(rules(chat), advisers=None), tmp_path / "trials.jsonl"
    worse, better = (played(how, chat, f" {word}") for word in ("rock", "paper"))
    rows = [trial_as_dict(each, chat.decode, 0) for each in (better, worse)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    source = f"methods.stepagent.source={file}"
    same = played(rules(chat, source), chat, " paper")
    assert [step.action for step in same.alternatives] == ["paper"] * len(same.turns)
    other = played(rules(chat, source), chat, " scissors")
    assert [(step.turn, step.action) for step in other.alternatives] == [
        (n, "paper") for n, turn in enumerate(other.turns) if turn.index == 0
    ]
    unknown = played(rules(chat, source), chat, " paper", replace(TASK, seed=4))
    assert unknown.alternatives == ()


def test_no_expert_advises_what_the_environment_refused(chat: ChatFormat, tmp_path: Path) -> None:
    how, file = replace(rules(chat), advisers=None), tmp_path / "trials.jsonl"
    for said in (" rock rock", " lose"):  # no action of the game, and no action in tags at all
        refused = played(how, chat, said)
        assert not any(turn.is_valid for turn in refused.turns)
        file.write_text(json.dumps(trial_as_dict(refused, chat.decode, 0)))
        source = f"methods.stepagent.source={file}"
        assert played(rules(chat, source), chat, said).alternatives == ()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"turns": 3}\n')
    with pytest.raises(ConfigError, match="nor a file of recorded trials"):
        recorded_experts(tmp_path / "other.jsonl")


@pytest.mark.parametrize("answer", [None, 3, "x" * 2000])
def test_a_script_that_answers_with_no_action_is_the_environments_fault(answer: object) -> None:
    class Script:
        def choose(self, play: object) -> object:
            return answer

    with pytest.raises(EnvironmentFault, match="an expert's action is text of at most 1,024"):
        ScriptedExpert(Script()).action(RPS.begin(TASK, 0), 0, [])  # type: ignore[arg-type]


def test_nobody_is_asked_against_a_version_of_the_policy(chat: ChatFormat) -> None:
    run = begin_trial(TrialStart(RPS, Task("rps", "policy-3", 3), 0, rules(chat), chat, name="t"))
    tokens = np.array(chat.encode(" rock"), np.int32)
    while run.next_prompt() is not None:
        run.receive(Completion(tokens, np.zeros(1, np.float32), (VersionRun(0, 0, 0),), "stop", 0))
    assert run.trial().alternatives == ()
    assert scripted(RPS, TASK, 0) is not None


def test_what_an_adviser_raises_is_not_the_environments_mistake(chat: ChatFormat) -> None:
    class Raising:
        def action(self, play: object, episode: int, done: object) -> str:
            raise ValueError("no idea")

    how = replace(rules(chat), advisers=lambda environment, task, index: Raising())
    with pytest.raises(EnvironmentFault, match=r"seed 3.*: the adviser raised ValueError: no idea"):
        played(how, chat, " rock")
    Raising.action = lambda *given: 7  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match="the adviser must return an action, got 7"):
        played(how, chat, " rock")
