"""A trial for reading: which words are observations, and which are completions of the policy."""

import json

import numpy as np

from mage_async.pages.turns import readable, sample_trial, shown_tokens, shown_trial
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Kind, Segment, Task, Trial, Turn


def test_a_trial_is_read_episode_by_episode(make_run):
    run = make_run()
    sample = json.loads(run.samples.read_text().splitlines()[0])
    episodes = sample_trial(sample, units=4).episodes
    assert len(episodes) == 3
    for number, episode in enumerate(episodes):
        assert [turn.episode for turn in episode.turns] == [number] * 4
        assert episode.turns[0].observation.startswith(f"episode {number + 1}")
        assert "<|" not in "".join(turn.observation for turn in episode.turns)
    completions = [turn.completion for episode in episodes for turn in episode.turns]
    assert completions == [turn["action"] for turn in sample["turns"]]


def turn(episode, observation, completion, kind="act"):
    return {
        "episode": episode,
        "kind": kind,
        "observation": observation,
        "completion": completion,
        "reward": float(episode),
        "is_valid": bool(completion),
    }


def sample(turns, ending, rewards):
    return {
        "version": 7,
        "split": "heldout",
        "member": "rock",
        "turns": turns,
        "ending": ending,
        "reward_by_episode": rewards,
    }


def test_the_outcome_of_an_episode_is_its_ending_and_not_the_next_ones_beginning():
    turns = [
        turn(0, "<|im_start|>user\nepisode 1 move<|im_end|>\n", "paper"),
        turn(0, "<|im_start|>user\nwin reflect<|im_end|>\n", "he likes rock", "reflect"),
        turn(1, "<|im_start|>user\nremark 1: he likes rock episode 2<|im_end|>\n", ""),
    ]
    read = sample_trial(sample(turns, "<|im_start|>user\ninvalid<|im_end|>\n", [4.0, 0.0]), units=4)
    assert (read.split, read.rewards) == ("held-out", [1.0, 0.0])
    first, second = read.episodes
    assert [(t.observation, t.completion, t.kind) for t in first.turns] == [
        ("episode 1 move", "paper", ""),
        ("win reflect", "he likes rock", "reflect"),
    ]
    assert first.ending == "remark 1: he likes rock"
    (last,) = second.turns
    assert (last.observation, last.completion, last.is_valid) == ("episode 2", "", False)
    assert second.ending == "invalid"


def test_marks_of_chat_templates_and_forced_tags_are_left_out():
    assert readable("<|im_start|>user\nmove<|im_end|>\n<|im_start|>assistant\n<action>") == "move"
    assert readable("</action><|im_end|>\nwin") == "win"
    assert readable("<bos><start_of_turn>user\nmove<end_of_turn>\n<start_of_turn>model\n") == "move"
    assert readable("<s>[INST] move [/INST]<action>") == "move"
    assert readable("</action></s>[INST] win [/INST]") == "win"
    assert readable("I say <action>rock</action>, then") == "I say <action>rock</action>, then"


def test_a_turn_knows_the_versions_of_its_tokens(chat):
    ids = np.array(chat.encode("<action> rock</action>"), np.int32)
    sampled = np.zeros(len(ids), bool)
    sampled[1:] = True
    runs = (VersionRun(0, 2, 2), VersionRun(2, 3, 1, "segment"))
    segment = Segment(ids, sampled, np.where(sampled, -0.5, 0.0).astype(np.float32), runs)
    turn = Turn(Kind.ACT, 0, 0, 0, 0, len(ids), 1.0, True, "rock", info='{"hidden": 3}')
    trial = Trial(Task("rps", "rock", 0), 0, 1, (segment,), (turn,))
    tokens = list(shown_tokens(turn, segment, chat.decode, 5))
    assert [token.version for token in tokens[:3]] == [None, 2, 3]
    assert [token.staleness for token in tokens[:3]] == [None, 2, 1]
    assert (tokens[2].kv_version, tokens[2].provenance) == (1, "segment")
    (shown,) = shown_trial(trial, chat.decode, 5).episodes[0].turns
    assert shown.staleness == 2
    assert shown.logprob == -0.5 * (len(ids) - 1)
    assert shown.info == '{"hidden": 3}'
