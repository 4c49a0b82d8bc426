"""Contexts that only grow, with the real tokenizer of the tiny policy."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Completion, FinishReason
from mage_async.config.config_file import find, load
from mage_async.config.schema import Config
from mage_async.environments.environment import Environment
from mage_async.inference.chat_files import load_chat
from mage_async.policy.tiny_tokenizer import build_tokenizer, save_tokenizer
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Kind, Task
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.scripted_play import scripted_trial
from mage_async.trials.transcript import Transcript
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun, TrialStart

TASK = Task("rps", "seq-rock-paper-paper", 7)


@pytest.fixture(scope="module")
def config() -> Config:
    return load(find("quickstart"), [])


@pytest.fixture(scope="module")
def environment(config: Config) -> Environment:
    return environment_of(config)


@pytest.fixture(scope="module")
def chat(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("policy")
    save_tokenizer(build_tokenizer(environment.facts.words), folder)
    return load_chat(folder)


@pytest.fixture
def rules(config: Config, environment: Environment, chat: ChatFormat) -> TrialConfig:
    return trial_config_of(config, environment, chat, 3)


def _completion(chat: ChatFormat, text: str, version: int = 0) -> Completion:
    ids = np.array(chat.encode(text), np.int32)
    return Completion(
        ids, np.full(len(ids), -1.0, np.float32), (VersionRun(0, version, version),), "stop", 0
    )


def test_every_prompt_extends_the_one_before_token_by_token(
    environment: Environment, rules: TrialConfig, chat: ChatFormat
) -> None:
    run = TrialRun(TrialStart(environment, TASK, 0, rules, chat, name="t"))
    before = np.array([], np.int32)
    while (prompt := run.next_prompt()) is not None:
        assert (prompt.tokens[: len(before)] == before).all()
        completion = _completion(chat, " rock")
        run.receive(completion)
        before = np.concatenate([prompt.tokens, completion.tokens])
    assert (run.trial().segments[0].tokens[: len(before)] == before).all()


def test_a_trial_reads_as_chat(
    environment: Environment, rules: TrialConfig, chat: ChatFormat
) -> None:
    run = TrialRun(TrialStart(environment, TASK, 0, replace(rules, num_episodes=1), chat, name="t"))
    while run.next_prompt() is not None:
        run.receive(_completion(chat, " rock"))
    trial = run.trial()
    text = chat.decode(trial.segments[0].tokens.tolist())
    assert text.startswith(
        "<|user|> episode 1<|assistant|><action> rock</action><|user|> opp rock draw<|assistant|>"
    )
    assert text.endswith("</action>" + "<|user|> opp rock draw")


def test_a_turn_of_the_tiny_policy_costs_eight_tokens(
    environment: Environment, rules: TrialConfig, chat: ChatFormat
) -> None:
    trial = scripted_trial(environment, TASK, 0, rules, chat)
    starts = [turn.start for turn in trial.turns if turn.episode == 0]
    assert {after - before for before, after in pairwise(starts)} == {8}


def test_reflections_alone_begin_a_context_per_episode(
    environment: Environment, rules: TrialConfig, chat: ChatFormat
) -> None:
    rules = replace(rules, keeps_history=False, reflects=True)
    run = TrialRun(TrialStart(environment, TASK, 0, rules, chat, name="t"))
    while run.next_prompt() is not None:
        run.receive(_completion(chat, " paper</remark>" if run.kind is Kind.REFLECT else " rock"))
    trial = run.trial()
    texts = [chat.decode(segment.tokens.tolist()) for segment in trial.segments]
    assert len(texts) == 3
    assert "reflect<|assistant|><remark> paper</remark>" in texts[0]
    assert texts[2].startswith("<|user|> remark 1: paper remark 2: paper episode 3<|assistant|>")
    assert [turn.kind for turn in trial.turns if turn.kind is Kind.REFLECT] == [Kind.REFLECT] * 2


def test_an_empty_remark_is_left_out_and_later_ones_keep_their_numbers(
    environment: Environment, rules: TrialConfig, chat: ChatFormat
) -> None:
    rules = replace(rules, keeps_history=False, reflects=True)
    run = TrialRun(TrialStart(environment, TASK, 0, rules, chat, name="t"))
    while run.next_prompt() is not None:
        remark = "</remark>" if run.episode == 0 else " paper</remark>"
        run.receive(_completion(chat, remark if run.kind is Kind.REFLECT else " rock"))
    _, second, third = (chat.decode(each.tokens.tolist()) for each in run.trial().segments)
    assert second.startswith("<|user|> episode 2<|assistant|>")
    assert third.startswith("<|user|> remark 2: paper episode 3<|assistant|>")


def test_without_history_and_remarks_earlier_episodes_are_gone(
    environment: Environment, rules: TrialConfig, chat: ChatFormat
) -> None:
    trial = scripted_trial(environment, TASK, 0, replace(rules, keeps_history=False), chat)
    last = chat.decode(trial.segments[2].tokens.tolist())
    assert last.startswith("<|user|> episode 3<|assistant|>")


def test_a_swapped_trial_meets_someone_else_in_the_last_episode_only(
    environment: Environment, rules: TrialConfig, chat: ChatFormat
) -> None:
    other = replace(TASK, member="fixed-scissors")
    run = TrialRun(TrialStart(environment, TASK, 0, rules, chat, name="t", swap=other))
    plain = TrialRun(TrialStart(environment, TASK, 0, rules, chat, name="t"))
    for played in (run, plain):
        while played.next_prompt() is not None:
            played.receive(_completion(chat, " rock"))
    swapped, usual = run.trial().episode_rewards(), plain.trial().episode_rewards()
    assert swapped[:2] == usual[:2]
    assert swapped[2] > usual[2]


def test_versions_of_a_segment_are_runs_at_their_own_positions(chat: ChatFormat) -> None:
    transcript = Transcript(chat, ActionParser("both"))
    transcript.open("episode 1", Kind.ACT)
    for version in (3, 3, 4):
        transcript.receive(_completion(chat, " rock", version))
        transcript.add_message("opp rock draw", Kind.ACT)
    segment = transcript.segments()[0]
    drawn = np.flatnonzero(segment.is_sampled)
    assert segment.versions == (VersionRun(int(drawn[0]), 3, 3), VersionRun(int(drawn[2]), 4, 4))


@pytest.mark.parametrize(
    ("forced", "completion", "action"),
    [
        ("both", " rock", "rock"),
        ("both", " rock</", "rock"),
        ("both", " rock</action", "rock"),
        ("both", " rock</action> ", "rock"),
        ("both", " a < b </b>", "a < b </b>"),
        ("open", " rock </action>", "rock"),
        ("open", " rock", None),
        ("none", "I think <action>rock</action> wins", "rock"),
        ("none", "<think>maybe <action>paper</action></think><action>rock</action>", "rock"),
        ("none", "<think><action>paper</action>", None),
        ("none", "maybe <action>paper</action></think><action>rock</action>", "rock"),
        ("none", "rock", None),
    ],
)
def test_an_action_is_what_stands_in_tags_outside_thinking(
    forced: str, completion: str, action: str | None
) -> None:
    assert ActionParser(forced).parse(Kind.ACT, completion) == action  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Kind.ACT, Kind.REFLECT])
def test_a_stop_token_ends_a_turn_and_is_no_part_of_its_text(chat: ChatFormat, kind: Kind) -> None:
    """A pretrained model ends an answer of free text in its own way, without the closing tag."""
    transcript, stop = Transcript(chat, ActionParser("both")), chat.decode(chat.stop_tokens[:1])
    transcript.open("episode 1", kind)
    completion = _completion(chat, f" rock{stop}")
    assert completion.tokens[-1] in chat.stop_tokens
    start, text = transcript.receive(completion)
    assert text == "rock"
    transcript.add_message("episode 2", kind)
    assert chat.decode(transcript.tokens().tolist()[start:]).startswith(f" rock{stop}<|user|>")


@pytest.mark.parametrize(
    ("said", "finish", "action"),
    [
        ("<action>rock</action> loses", "length", None),
        ("<action>rock</action>", "stop", "rock"),
        ("<action>rock</action> loses</think><action>paper</action>", "stop", "paper"),
        ("<action>rock</action> loses</think><action>paper</action>", "length", "paper"),
    ],
)
def test_thinking_that_the_template_opens_and_the_limit_cuts_is_no_answer(
    said: str, finish: FinishReason, action: str | None, environment: Environment, tmp_path: Path
) -> None:
    """DeepSeek-R1's way: the template writes `<think>`, so a completion lacks it."""
    save_tokenizer(build_tokenizer([*environment.facts.words, "loses"]), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = settings["chat_template"].removesuffix("{% endif %}") + (
        "<think>{% endif %}"
    )
    file.write_text(json.dumps(settings))
    chat = load_chat(tmp_path)
    transcript = Transcript(chat, ActionParser("none"))
    transcript.open("episode 1", Kind.ACT)
    ids = np.array(chat.encode(said), np.int32)
    zeros = np.zeros(len(ids), np.float32)
    completion = Completion(ids, zeros, (VersionRun(0, 0, 0),), finish, 0)
    assert transcript.receive(completion)[1] == action


def test_a_template_that_can_think_is_asked_to_where_the_configuration_says_so(
    environment: Environment, tmp_path: Path
) -> None:
    """Qwen3's way: without thinking, the template writes an empty one itself."""
    save_tokenizer(build_tokenizer(environment.facts.words), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    empty = "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
    settings["chat_template"] = settings["chat_template"].removesuffix("{% endif %}") + empty
    file.write_text(json.dumps(settings))
    said = {}
    for thinking in (False, True):
        chosen = load(find("quickstart"), [f"transcript.thinking={str(thinking).lower()}"])
        chat = load_chat(tmp_path, thinking=chosen.transcript.thinking)
        said[thinking] = chat.decode(chat.opening("episode 1"))
    assert said[False].endswith("<|assistant|><think></think>")
    assert said[True].endswith("<|assistant|>")
