"""A trial as chat: which words are the agent's, and which it was told."""

import json

from mage_async.report import render
from mage_async.report.trial_chat import scenes, trial_chat
from mage_async.results.summary import summarise


def test_a_trial_is_read_episode_by_episode(make_run):
    run = make_run()
    sample = json.loads(run.samples.read_text().splitlines()[0])
    read = scenes(sample)
    assert len(read) == 3
    for number, scene in enumerate(read):
        answers = [line for line in scene.lines if not isinstance(line, str)]
        assert [turn["episode"] for _, turn in answers] == [number] * 4
        assert all(text == turn["action"] for text, turn in answers)
        assert scene.lines[0] == f"episode {number + 1}"
        assert "<|" not in "".join(line for line in scene.lines if isinstance(line, str))


def turn(episode, action, kind="act"):
    reward = float(episode)
    return {
        "episode": episode,
        "kind": kind,
        "action": action,
        "reward": reward,
        "is_valid": bool(action),
    }


def test_an_example_in_the_rules_is_not_taken_for_an_answer():
    contexts = [
        "<|im_start|>user\nAnswer like <action> rock </action>. Write in <remark> tags. episode 1"
        "<|im_end|>\n<|im_start|>assistant\n<action> paper</action><|im_end|>\n"
        "<|im_start|>user\nwin reflect<|im_end|>\n"
        "<|im_start|>assistant\n<remark> he likes rock </remark><|im_end|>\n",
        "<|im_start|>user\nAnswer like <action> rock </action>. remark 1: he likes rock episode 2"
        "<|im_end|>\n<|im_start|>assistant\n<action> </action><|im_end|>\n"
        "<|im_start|>user\ninvalid<|im_end|>\n",
    ]
    turns = [turn(0, "paper"), turn(0, "he likes rock", "reflect"), turn(1, "")]
    read = scenes({"contexts": contexts, "turns": turns, "reward_by_episode": [0.0, 1.0]})
    said = [[text for text, _ in (x for x in s.lines if not isinstance(x, str))] for s in read]
    assert said == [["paper", "he likes rock"], [""]]
    assert "<action> rock </action>" in read[0].lines[0]
    assert read[1].lines[-1] == "invalid"


def test_answers_that_cannot_be_told_apart_are_shown_as_they_are(make_run):
    run = make_run()
    sample = json.loads(run.samples.read_text().splitlines()[0]) | {"contexts": ["rock, I think"]}
    assert scenes(sample) is None
    run.samples.write_text(json.dumps(sample) + "\n")
    assert "<pre>rock, I think</pre>" in render(run, summarise(run, wall_s=1.0, processor_s=1.0))


def test_a_chat_pairs_what_was_told_with_the_answer_to_it():
    contexts = [
        "<|im_start|>user\nepisode 1 move<|im_end|>\n<|im_start|>assistant\n"
        "<action> paper</action><|im_end|>\n<|im_start|>user\nwin<|im_end|>\n"
    ]
    sample = {
        "version": 7,
        "split": "heldout",
        "member": "rock",
        "contexts": contexts,
        "turns": [turn(0, "paper")],
        "reward_by_episode": [4.0],
    }
    chat = trial_chat(sample, units=4)
    assert (chat.split, chat.rewards, chat.whole) == ("held-out", "+1.00", "")
    ((_, (told, answer), (after, none)),) = [(e, *e.exchanges) for e in chat.episodes]
    assert (told, answer.text, answer.is_valid, after, none) == (
        ["episode 1 move"],
        "paper",
        True,
        ["win"],
        None,
    )
