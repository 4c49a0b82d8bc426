"""Contexts that outgrow their room: notes, or the newest turns, begin another one."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mage_async.algorithm import InProcessRun, prepare
from mage_async.assembly import check, environment_of, trial_config_of
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.credit.returns import Differential
from mage_async.credit.turn_table import build_table
from mage_async.errors import ConfigError, ContextFull
from mage_async.inference.chat_files import load_chat
from mage_async.learning.packing import batch_advantages, credited, training_sequences
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.messages import EpisodeResult
from mage_async.trajectory import FinishedEpisodes, Group, Guidance, Kind, Task, Trial, role_changes
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.context_limit import Contexts, NextTurn
from mage_async.trials.scripted_play import chat_in_words, random_task, scripted_trial
from mage_async.trials.transcript import Transcript
from mage_async.trials.trial_config import TrialConfig
from mage_async.trials.trial_run import TrialRun, TrialStart
from mage_services.actor.rollout import Stage, play_trial
from mage_services.engines.embedded import EmbeddedEngine
from mage_services.environments.call_runner import CallRunner

TASK = Task("rps", "seq-rock-paper-paper", 7)
WORDS = ("rock", "paper", "scissors", "opp", "win", "lose")
ROOM = 44


def config_of(*changes: str) -> Config:
    own = ("trial.memory=notes", f"trial.room={ROOM}", "transcript.max_reflection_tokens=9")
    return config_file.load(config_file.find("quickstart"), [*own, *changes])


def rules_of(config: Config, chat: ChatFormat) -> TrialConfig:
    return trial_config_of(config, environment_of(config), chat, 3)


def begun(
    rules: TrialConfig,
    chat: ChatFormat,
    swap: Task | None = None,
    after: FinishedEpisodes | None = None,
) -> TrialRun:
    environment = environment_of(config_of())
    return TrialRun(TrialStart(environment, TASK, 4, rules, chat, name="t", swap=swap, after=after))


def answer(prompt: Prompt, kind: Kind, chat: ChatFormat) -> Completion:
    """Draw moves, and notes of any length, by the prompt's seed."""
    source = random.Random(prompt.seed)
    words = source.choices(WORDS, k=source.randrange(1, 9))
    text = f" {source.choice(WORDS[:3])}" if kind is Kind.ACT else f" {' '.join(words)}</remark>"
    ids = np.array(chat.encode(text), np.int32)
    assert len(ids) <= prompt.sampling.max_tokens
    logprobs = np.full(len(ids), -source.random(), np.float32)
    return Completion(ids, logprobs, (VersionRun(0, 0, 0),), "stop", 0)


def finish(run: TrialRun, chat: ChatFormat) -> tuple[Trial, list[Prompt], list[FinishedEpisodes]]:
    """Play to the end; the prompts, and the finished episodes as another actor receives them."""
    prompts, borders = list[Prompt](), list[FinishedEpisodes]()
    while True:
        if run.is_between_episodes:
            received = decode(encode(EpisodeResult(3, 1, run.finished_episodes(0.5))))
            assert isinstance(received, EpisodeResult)
            borders.append(received.finished)
        if (prompt := run.next_prompt()) is None:
            return run.trial(), prompts, borders
        prompts.append(prompt)
        run.receive(answer(prompt, run.kind, chat))


def kinds(trial: Trial) -> Sequence[Kind]:
    return [turn.kind for turn in trial.turns]


def texts(trial: Trial, chat: ChatFormat) -> list[str]:
    return [chat.decode(segment.tokens.tolist()) for segment in trial.segments]


@pytest.mark.parametrize("memory", ["notes", "truncation"])
@pytest.mark.parametrize("room", [38, 44, 60, 100])
def test_a_context_never_outgrows_its_room_and_no_episode_is_cut(
    chat: ChatFormat, memory: str, room: int
) -> None:
    config = config_of(f"trial.memory={memory}", f"trial.room={room}")
    trial, prompts, _ = finish(begun(rules_of(config, chat), chat), chat)
    assert all(len(each.tokens) + each.sampling.max_tokens <= room for each in prompts)
    assert len(trial.segments) > 1
    assert kinds(trial).count(Kind.ACT) == 12
    assert trial.num_cut_episodes == 0
    own = [turn.segment for turn in trial.turns]
    assert own == sorted(own), "a context that was left is never continued"


@pytest.mark.parametrize(
    ("memory", "strategy", "rooms"),
    [
        ("notes", "turn", (260, 270, 360, 570)),
        ("notes", "episode", (250, 360)),
        ("truncation", "turn", (210, 260, 310, 370)),
        ("truncation", "episode", (210, 260, 310, 370)),
    ],
)
def test_a_request_for_a_strategy_counts_in_the_room(
    memory: str, strategy: str, rooms: Sequence[int]
) -> None:
    chat, keys = chat_in_words(), (f"trial.memory={memory}", f"trial.strategy={strategy}")
    wide = ("trial.room=0", "engine.max_tokens=9000", "transcript.rules=true")
    rules = rules_of(config_of(*keys, *wide), chat)
    for room in rooms:
        trial, prompts, _ = finish(begun(replace(rules, room=room), chat), chat)
        assert max(len(each.tokens) + each.sampling.max_tokens for each in prompts) <= room
        assert kinds(trial).count(Kind.ACT) == 12
        assert kinds(trial).count(Kind.STRATEGY) == (12 if strategy == "turn" else 3)


def test_another_context_begins_with_the_notes_and_what_they_do_not_know(chat: ChatFormat) -> None:
    trial, _, _ = finish(begun(rules_of(config_of(), chat), chat), chat)
    notes = [turn for turn in trial.turns if turn.kind is Kind.NOTES]
    first, *others = texts(trial, chat)
    assert len(notes) == len(others) > 2
    assert "remark" not in first.partition("<|user|> reflect")[0]
    for turn, text in zip(notes, others, strict=True):
        after = trial.turns[trial.turns.index(turn) + 1]
        assert text.startswith(f"<|user|> remark {turn.action} ")
        said = text.partition("<|assistant|>")[0]
        assert said.count("opp") - turn.action.count("opp") == 1, "the last outcome is in it"
        assert f"episode {after.episode + 1}" in said
        assert turn.stop == len(trial.segments[turn.segment].tokens), "they end their context"


@pytest.mark.parametrize("notes", ["rock " * 200, "rockpaper" * 200, "rock " * 3 + "paper" * 200])
def test_notes_that_are_too_long_lose_no_more_than_does_not_fit(
    chat: ChatFormat, notes: str
) -> None:
    rules = replace(rules_of(config_of(), chat), room=150)
    transcript = Transcript(chat, rules.parser)
    contexts, turn = Contexts(rules, chat, transcript, lambda: None), NextTurn(1, True, False, ())
    contexts.open("", "opp", turn, notes)
    text = chat.decode(transcript.tokens().tolist())
    _, _, carried = text.partition("remark ")
    kept = carried.partition(" episode 2")[0]
    assert notes.startswith(kept.strip())
    left = rules.room - transcript.num_tokens - rules.sampling.max_tokens
    left -= (
        transcript.max_added_tokens(rules.prompts.notes, Kind.NOTES) + rules.max_reflection_tokens
    )
    assert 0 <= left < len(chat.encode("paper" * 4)), "another piece would not fit"


def test_notes_count_in_the_episode_that_they_look_back_on(chat: ChatFormat) -> None:
    trial, _, _ = finish(begun(rules_of(config_of(), chat), chat), chat)
    found = [(turn.episode, turn.index) for turn in trial.turns if turn.kind is Kind.NOTES]
    for episode in {episode for episode, _ in found}:
        own = [index for each, index in found if each == episode]
        assert own == list(range(len(own)))
    for before, notes in zip(trial.turns, trial.turns[1:], strict=False):
        assert notes.kind is not Kind.NOTES or notes.episode == before.episode


def test_notes_are_written_in_the_role_that_they_are_trained_in(chat: ChatFormat) -> None:
    # The second role takes the last episode, and the context is full at its beginning.
    rules = replace(rules_of(config_of(), chat), second_role=lambda kind, is_last: is_last)
    trial, prompts, _ = finish(begun(rules, chat), chat)
    first = next(number for number, turn in enumerate(trial.turns) if turn.episode == 2)
    assert trial.turns[first - 1].kind is Kind.NOTES
    for number, (turn, prompt) in enumerate(zip(trial.turns, prompts, strict=True)):
        own = [each for each in trial.turns[: number + 1] if each.segment == turn.segment]
        assert prompt.role_changes == role_changes(own, 3, rules.second_role), number


def test_notes_earn_what_the_rest_of_the_trial_earns(chat: ChatFormat) -> None:
    trial, _, _ = finish(begun(rules_of(config_of(), chat), chat), chat)
    table = build_table([Group(0, 0, (trial,))], Differential())
    at = [number for number, kind in enumerate(kinds(trial)) if kind is Kind.NOTES]
    assert {trial.turns[number].episode for number in at} == {0, 1, 2}
    for number in at:
        assert table.returns[number] == table.returns[number + 1]
    before = [0.0, *trial.episode_rewards()]
    for number in at:
        # Differential rewards add up to the last episode's return, less what was settled before.
        settled = before[trial.turns[number + 1].episode]
        assert table.returns[number] == pytest.approx(before[-1] - settled)


@pytest.mark.parametrize("trains", [True, False])
def test_the_tokens_of_notes_are_trained_unless_they_earn_nothing(
    chat: ChatFormat, trains: bool
) -> None:
    config = config_of(f"trial.train_notes={str(trains).lower()}", "advantage.scale=[]")
    runs = [
        TrialRun(
            TrialStart(environment_of(config), TASK, index, rules_of(config, chat), chat, name="t")
        )
        for index in range(2)
    ]
    trials = [finish(run, chat)[0] for run in runs]
    assert trials[0].episode_rewards() != trials[1].episode_rewards()
    sequences = training_sequences([Group(0, 0, tuple(trials))], config, "cpu", version=0)
    trained = np.concatenate([sequence.sampled.kinds for sequence in sequences]).tolist()
    num_notes = sum(
        turn.stop - turn.start
        for trial in trials
        for turn in trial.turns
        if turn.kind is Kind.NOTES
    )
    assert trained.count(Kind.NOTES) == num_notes * trains
    assert trained.count(Kind.ACT) == 24
    group = Group(0, 0, tuple(trials))
    found = batch_advantages(credited([group], config), config, "cpu").numpy()
    is_notes = np.array([kind is Kind.NOTES for trial in trials for kind in kinds(trial)])
    assert np.abs(found[~is_notes]).max() > 0
    assert bool(found[is_notes].any()) == trains


def test_without_a_bound_that_matters_a_trial_with_notes_is_one_with_its_history(
    chat: ChatFormat,
) -> None:
    wide = ("trial.room=0", "engine.max_tokens=400")
    for memory in ("notes", "truncation"):
        trial, _, _ = finish(
            begun(rules_of(config_of(f"trial.memory={memory}", *wide), chat), chat), chat
        )
        whole, _, _ = finish(
            begun(rules_of(config_of("trial.memory=history", *wide), chat), chat), chat
        )
        assert texts(trial, chat) == texts(whole, chat)


def test_truncation_keeps_the_newest_turns_word_by_word(chat: ChatFormat) -> None:
    config = config_of("trial.memory=truncation")
    trial, _, _ = finish(begun(rules_of(config, chat), chat), chat)
    whole, _, _ = finish(
        begun(rules_of(config_of("trial.memory=history", "trial.room=0"), chat), chat), chat
    )
    assert trial.episode_rewards() == whole.episode_rewards()
    (history,) = texts(whole, chat)
    assert len(trial.segments) > 3
    for number, text in enumerate(texts(trial, chat)):
        _, _, said = text.partition("<|user|>")
        episode = next(turn.episode for turn in trial.turns if turn.segment == number)
        assert f"episode {episode + 1}" in text
        newest = said.partition("<|assistant|>")[2]
        assert newest in history
    is_sampled = np.concatenate([segment.is_sampled for segment in trial.segments])
    assert is_sampled.sum() == 12, "a turn that is repeated is part of a prompt"


def test_a_blind_episode_begins_without_notes(chat: ChatFormat) -> None:
    trial, _, _ = finish(begun(rules_of(config_of(), chat).blind(), chat), chat)
    assert Kind.NOTES in kinds(trial), "within an episode they stay"
    for episode in range(3):
        first = next(turn for turn in trial.turns if turn.is_act_of(episode))
        text = texts(trial, chat)[first.segment]
        assert text.startswith(f"<|user|> episode {episode + 1}<|assistant|>")


def test_a_swapped_trial_acts_on_the_notes_of_the_task_before(chat: ChatFormat) -> None:
    other = replace(TASK, member="fixed-scissors")
    rules = rules_of(config_of(), chat)
    own, _, _ = finish(begun(rules, chat), chat)
    swapped, _, _ = finish(begun(rules, chat, swap=other), chat)
    until = next(n for n, turn in enumerate(own.turns) if turn.is_act_of(2))
    assert swapped.turns[:until] == own.turns[:until]
    assert own.turns[until - 1].kind is Kind.NOTES
    carried = own.turns[until - 1].action
    at = swapped.turns[until].segment
    assert texts(swapped, chat)[at].startswith(f"<|user|> remark {carried} ")


def test_a_trial_with_notes_goes_on_behind_its_finished_episodes(chat: ChatFormat) -> None:
    rules = rules_of(config_of(), chat)
    whole, _, borders = finish(begun(rules, chat), chat)
    assert [each.num_episodes for each in borders] == [1, 2]
    for after in borders:
        resumed, _, _ = finish(begun(rules, chat, after=after), chat)
        assert resumed.turns == whole.turns
        for one, other in zip(resumed.segments, whole.segments, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_a_room_that_holds_no_turn_is_refused_with_the_numbers(chat: ChatFormat) -> None:
    with pytest.raises(ConfigError, match=r"trial\.room: .* a context needs \d+ tokens .* has 20"):
        check(config_of("trial.room=20"))
    with pytest.raises(
        ContextFull, match=r"\d+ for asking for notes and writing them\) and has 20"
    ):
        begun(replace(rules_of(config_of(), chat), room=20), chat).next_prompt()
    check(config_of())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("trial.memory=history",), 'trial.memory = "history" does neither'),
        (("trial.room=161",), "at most engine.max_tokens = 160"),
        (
            ("trial.memory=truncation", "trial.train_notes=false"),
            'needs trial.memory = "notes", got "truncation"',
        ),
    ],
)
def test_a_room_that_bounds_nothing_is_refused(changes: Sequence[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(config_of(*changes))


def test_in_an_actor_as_in_one_process_log_probs_are_the_learners(tmp_path: Path) -> None:
    small = ("admission.groups_per_step=1", "admission.trials_per_group=2", "warm_start=none")
    config = config_of(*small, "learner.steps=1", "trial.room=40")
    run = InProcessRun(config, prepare(config, tmp_path))
    (group,) = run.play_batch()
    assert all(Kind.NOTES in kinds(trial) for trial in group.trials)
    sequences = training_sequences([group], config, "cpu", version=0)
    found = run._trainer.parity(sequences)
    assert found["equal_version_tokens"] == sum(trial.num_sampled() for trial in group.trials)
    assert found["logprob_mismatch_max"] < 1e-4

    async def in_an_actor() -> list[Trial]:
        policy = prepare(config, tmp_path)
        chat, environment = load_chat(policy), environment_of(config)
        async with EmbeddedEngine(policy, config.engine) as engine, CallRunner() as workers:
            stage = Stage(environment, rules_of(config, chat), chat, engine, workers)
            task = group.trials[0].task
            begun = [stage.begin(task, index, f"0.{index}") for index in range(2)]
            return [await play_trial(each, engine, workers) for each in begun]

    for one, other in zip(asyncio.run(in_an_actor()), group.trials, strict=True):
        assert [(turn.kind, turn.action) for turn in one.turns] == [
            (turn.kind, turn.action) for turn in other.turns
        ]
        assert len(one.segments) == len(other.segments) > 1


@pytest.mark.parametrize("guidance", [None, Guidance(0, 1, (), "", 0.0)])
@pytest.mark.parametrize("name", ["boxes", "scout", "rps"])
def test_scripted_notes_are_facts_that_their_context_holds(
    name: str, guidance: Guidance | None
) -> None:
    config = config_of(f"environment.name={name}", "transcript.max_reflection_tokens=12")
    chat, environment = chat_in_words(), environment_of(config)
    rules = replace(rules_of(config, chat), room=60)
    found = [0, 0]
    for seed in range(20):
        task = random_task(environment, "train", random.Random(seed))
        trial = scripted_trial(environment, task, 0, rules, chat, guidance)
        for turn in trial.turns:
            if turn.kind is Kind.NOTES:
                before = trial.segments[turn.segment].tokens[: turn.start]
                context = chat.decode(before.tolist())
                words = turn.action.split()
                size = 3 if name == "rps" else 2
                for place in range(0, len(words), size):
                    shown = " ".join(words[place : place + size])
                    assert shown in context
                found[bool(words)] += 1
    assert found[1] > 10, "facts are written"
    assert found[0], "and some notes say nothing"
