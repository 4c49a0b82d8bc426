"""A trial that is continued behind its finished episodes is the trial that nothing interrupted."""

import random
from dataclasses import replace

import numpy as np
import pytest

from mage_async.assembly import environment_of, trial_config_of
from mage_async.completion import Completion, Prompt
from mage_async.config import config_file
from mage_async.errors import WireError
from mage_async.policy_version import VersionRun
from mage_async.protocol.codec import decode, encode
from mage_async.protocol.messages import EpisodeResult, TrialResult
from mage_async.trajectory import FinishedEpisodes, Task, Trial
from mage_async.trials.chat_format import ChatFormat
from mage_async.trials.trial_run import TrialRun, TrialStart

TASK = Task("rps", "seq-rock-paper-paper", 7)
MOVES = ("rock", "paper", "scissors")


def begun(changes: list[str], chat: ChatFormat, after: FinishedEpisodes | None = None) -> TrialRun:
    config = config_file.load(config_file.find("quickstart"), changes)
    environment = environment_of(config)
    rules = trial_config_of(config, environment, chat, 3)
    return TrialRun(TrialStart(environment, TASK, 4, rules, chat, name="t", after=after))


def answer(prompt: Prompt, chat: ChatFormat) -> Completion:
    """Draw a move by the prompt's seed and length; versions and allowed sets differ by turn."""
    source = random.Random(f"{prompt.seed}/{len(prompt.tokens)}")
    ids = np.array(chat.encode(source.choice(MOVES)), np.int32)
    version = source.randrange(3)
    allowed = np.array(sorted(chat.encode(word)[0] for word in MOVES), np.int32)
    sets = (allowed, *[None] * (len(ids) - 1)) if source.random() < 0.5 else None
    return Completion(
        ids,
        np.full(len(ids), -source.random(), np.float32),
        (VersionRun(0, version, version),),
        "stop",
        num_reused=len(prompt.tokens) // 2,
        drawn_from=sets,
    )


def finish(run: TrialRun, chat: ChatFormat) -> tuple[Trial, list[FinishedEpisodes]]:
    """Play to the end; what could be continued at every border, as it arrives at the next actor."""
    borders: list[FinishedEpisodes] = []
    while True:
        if run.is_between_episodes:
            sent = EpisodeResult(3, 1, run.finished_episodes(0.5))
            received = decode(encode(sent))
            assert isinstance(received, EpisodeResult)
            assert encode(received) == list(received.frames)
            borders.append(received.finished)
        if (prompt := run.next_prompt()) is None:
            return run.trial(), borders
        run.receive(answer(prompt, chat))


@pytest.mark.parametrize(
    "changes",
    [
        ["trial.memory=history"],
        ["trial.memory=reflection"],
        ["trial.memory=history_and_reflection"],
        ["trial.memory=none"],
        ["trial.strategy=episode"],
        ["trial.memory=reflection", "transcript.forced_tags=none"],
    ],
)
def test_the_rest_of_a_trial_does_not_depend_on_who_began_it(
    changes: list[str], chat: ChatFormat
) -> None:
    whole, borders = finish(begun(changes, chat), chat)
    assert [border.num_episodes for border in borders] == [1, 2]
    for border in borders:
        run = begun(changes, chat, border)
        assert run.num_turns == len(border.trial.turns) > 0
        trial, later = finish(run, chat)
        assert [each.num_episodes for each in later] == [1, 2][border.num_episodes - 1 :]
        assert trial.num_kept_episodes == border.num_episodes
        assert trial.duration_s == 0.5
        # Equal to the last byte: tokens, log-probs, versions, sets, turns and counts.
        same = replace(trial, num_kept_episodes=0, duration_s=whole.duration_s)
        assert encode(TrialResult(3, 1, same)) == encode(TrialResult(3, 1, whole))


def test_a_trial_that_does_not_declare_it_is_never_continued(chat: ChatFormat) -> None:
    _, borders = finish(begun(["trial.repeats=fresh"], chat), chat)
    assert borders == []


def test_finished_episodes_are_neither_none_nor_all(chat: ChatFormat) -> None:
    whole, _ = finish(begun([], chat), chat)
    frames = encode(EpisodeResult(3, 1, FinishedEpisodes(whole, "")))
    with pytest.raises(WireError, match="one seat, 1 to 2 of them; got 3"):
        decode(frames)
