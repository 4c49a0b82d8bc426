"""What a run says while it waits, and when there is nothing to learn from."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mage_async.config.schema import Config
from mage_async.environments.catalogue import load
from mage_async.policy_version import VersionRun
from mage_async.results.progress import (
    MAX_KINDS_NOTED,
    Progress,
    ProgressCounts,
    Signal,
    before_first_step,
    drop_kind,
    dropped_by_kind,
    seconds_left,
    sentence,
    time_in_words,
)
from mage_async.trajectory import Group, Kind, Segment, Task, Trial, Turn
from tests.helpers.agent_site import tasks_of

CONFIG, RPS = Config(), load("rps")
FACTS = RPS.facts
SLOW = Progress(
    step=1,
    steps=60,
    doing="batch not full",
    doing_s=41.2,
    num_actors=2,
    num_loading=0,
    groups_in_flight=8,
    trials_arrived=5,
    trials_needed=32,
    turns=1200,
    tokens=43_000,
    turns_per_s=4.04,
    tokens_per_s=143.4,
    mean_return=0.125,
    valid_share=0.98,
    dropped={"outgrew the context": 2, "the environment raised": 1},
    due_s=222.5,
    is_due_bound=False,
)


def trial(rewards, *, index=0, valid=True, action="rock", num_episodes=3):
    """A trial of an action an episode."""
    segment = Segment(
        np.ones(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), (VersionRun(0, 0, 0),)
    )
    turns = [
        Turn(Kind.ACT, episode, 0, 0, 0, 1, reward, valid, action)
        for episode, reward in enumerate(rewards)
    ]
    return Trial(Task("rps", "rocky", 1), index, num_episodes, (segment,), tuple(turns))


def batch(*rewards, num_groups=2, **changes):
    """Groups of eight trials, whose rewards are repeated over the trials of a group."""
    return [
        Group(
            grant, 0, tuple(trial(rewards[i % len(rewards)], index=i, **changes) for i in range(8))
        )
        for grant in range(num_groups)
    ]


def snapshot(
    counts,
    now,
    *,
    arrived=0,
    version=0,
    doing="batch not full",
    environment=RPS,
    dropped=None,
    under_way=None,
    config=CONFIG,
):
    return counts.snapshot(
        now,
        config,
        environment,
        version=version,
        doing=(doing, 12.0),
        actors=(2, 0),
        groups_in_flight=4,
        trials=(arrived, 32),
        under_way=under_way or (32 - arrived, 0),
        dropped_by_reason=dropped or {},
    )


def test_a_sentence_has_every_fact() -> None:
    assert sentence(SLOW) == (
        "step 1/60 waits for trials, for 41 s: 5 of 32 trials are in, 8 groups in flight; "
        "1,200 turns and 43,000 tokens so far, 4.0 turns/s, 143 tokens/s; return +0.125; "
        "98% of actions valid; 3 groups dropped (2 outgrew the context, 1 the environment raised); "
        "complete in about 3:42 min"
    )


def test_the_first_trial_whose_answers_are_cut_is_noted_once_with_the_key() -> None:
    counts, whole, cut = ProgressCounts(), trial([0.0] * 3), trial([0.0] * 3, valid=False)
    assert counts.first_cut(cut, None) is None
    assert counts.first_cut(cut, 2) is None, "a shorter one is invalid for another reason"
    assert counts.first_cut(whole, 1) is None
    rarely = replace(whole, turns=(*whole.turns, *cut.turns[:2]))
    assert counts.first_cut(rarely, 1) is None
    note = counts.first_cut(cut, 1)
    assert note is not None
    assert note.startswith(
        "3 of the 3 answers of a trial were cut at transcript.max_action_tokens = 1 before they"
    )
    assert counts.first_cut(cut, 1) is None


def test_dropped_groups_are_counted_of_all_and_the_line_of_the_mistake_is_named() -> None:
    place = "/home/own (copy)/own.py, line 20"
    reason = f"own, task 8, turn 3: step('a') raised ValueError: x ({place}, in step: y)"
    shown = sentence(snapshot(ProgressCounts(), 0.0, version=1, dropped={reason: 1}))
    of = CONFIG.admission.groups_per_step + 1
    assert f"1 of {of} groups dropped (1 the environment raised, {place})" in shown


def test_a_sentence_leaves_out_what_is_not_known() -> None:
    unknown = replace(SLOW, mean_return=None, valid_share=None, dropped={}, due_s=None)
    assert sentence(replace(unknown, num_loading=2)) == (
        "step 1/60 waits for trials, for 41 s: 5 of 32 trials are in, 8 groups in flight; "
        "every actor still loads its engine"
    )
    assert sentence(replace(unknown, turns=0, tokens=0, turns_per_s=0.0)).endswith(
        "8 groups in flight; no turn was sampled yet: an engine that is starting answers when it "
        "is ready"
    )
    silent = replace(unknown, turns_per_s=0.0, tokens_per_s=0.0)
    assert sentence(silent).endswith(
        "; nothing was sampled in the last 30 s: calls of the environment, or the engine, do not "
        "answer, or other programs take the processor"
    )
    assert sentence(replace(unknown, num_actors=0)) == (
        "step 1/60 waits for trials, for 41 s: no actor is connected yet"
    )
    assert sentence(replace(unknown, doing="training")).startswith(
        "step 1/60 trains on its batch, for 41 s: 5 of 32 trials of the next batch are in, "
    )
    assert sentence(replace(unknown, step=60, doing="log-prob check")).startswith(
        "step 60/60 compares its log-probs with those of the engines, once, after the last step, f"
    )


@pytest.mark.parametrize(("number", "text"), [(41.3, "41 s"), (312, "5:12 min"), (7265, "2:01 h")])
def test_seconds_are_short(number: float, text: str) -> None:
    assert time_in_words(number) == text


def test_speed_is_that_of_the_last_half_minute_over_all_actors_and_their_restarts() -> None:
    counts = ProgressCounts()
    for second in range(0, 101, 10):
        for actor in ("actor-0", "actor-1"):
            counts.add_heartbeat(
                actor, {"num_completions": 2.0 * second, "num_generated_tokens": 10.0 * second}
            )
        seen = snapshot(counts, float(second))
    assert (seen.turns, seen.tokens) == (400, 2000)
    assert (seen.turns_per_s, seen.tokens_per_s) == (4.0, 20.0)
    counts.add_heartbeat("actor-0", {})  # started again: it loads its engine
    counts.add_heartbeat("actor-0", {"num_completions": 5.0, "num_generated_tokens": 7.0})
    assert snapshot(counts, 101.0).turns == 405
    assert snapshot(counts, 101.0).tokens == 2007


def played(counts, num_trials, num_turns):
    """Let trials of so many turns arrive."""
    for _ in range(num_trials):
        counts.add_trial(trial([0.0] * num_turns))


def test_a_batch_whose_trials_are_all_nearly_done_is_due_soon() -> None:
    """The pace of arrivals would have said 24 / 8 * 100 s."""
    counts = ProgressCounts()
    snapshot(counts, 70.0)
    counts.add_heartbeat("actor-0", {"num_completions": 290})
    played(counts, 8, 10)
    seen = snapshot(counts, 100.0, arrived=8, under_way=(24, 210))
    assert seen.turns_per_s == 290 / 30
    assert seen.due_s == pytest.approx((24 * 10 - 210) / seen.turns_per_s)
    assert not seen.is_due_bound


def test_a_batch_of_which_few_trials_are_played_at_a_time_is_due_at_the_pace_of_turns() -> None:
    counts = ProgressCounts()
    snapshot(counts, 70.0)
    counts.add_heartbeat("actor-0", {"num_completions": 30})
    played(counts, 8, 10)
    # Four are under way, and twenty wait.
    assert snapshot(counts, 100.0, arrived=8, under_way=(24, 20)).due_s == 220.0
    # The trials of a second batch in flight do not count.
    assert snapshot(counts, 100.0, arrived=8, under_way=(56, 20)).due_s == 240.0


def test_before_a_quarter_of_a_batch_only_the_longest_trials_bound_the_time() -> None:
    """The first trials to arrive are the shortest ones."""
    counts = ProgressCounts()
    snapshot(counts, 0.0)
    counts.add_heartbeat("actor-0", {"num_completions": 20})
    played(counts, 7, 1)
    most = CONFIG.trial.episodes * FACTS.max_turns
    seen = snapshot(counts, 10.0, arrived=7, under_way=(25, 13))
    assert (seen.due_s, seen.is_due_bound) == ((25 * most - 13) / 2.0, True)
    played(counts, 1, 1)
    assert not snapshot(counts, 10.0, arrived=8, under_way=(24, 13)).is_due_bound
    # Trials that are longer than those before say nothing of the time.
    assert snapshot(counts, 10.0, arrived=8, under_way=(24, 25)).due_s is None
    assert snapshot(counts, 10.0, arrived=8, doing="training").due_s is None


def test_before_the_first_trial_the_limits_of_the_environment_bound_the_time() -> None:
    counts = ProgressCounts()
    snapshot(counts, 0.0)
    counts.add_heartbeat("actor-0", {"num_completions": 20})
    seen = snapshot(counts, 10.0, under_way=(32, 20))
    most = 32 * CONFIG.trial.episodes * FACTS.max_turns
    assert (seen.due_s, seen.is_due_bound) == ((most - 20) / 2.0, True)
    said = sentence(seen)
    assert "at most" not in said  # the pace may change
    assert said.endswith(", if every trial is as long as it may be and the pace stays")


def test_the_limit_of_a_programs_calls_bounds_no_time() -> None:
    counts, program = ProgressCounts(), tasks_of(lambda base_url: 1.0)
    snapshot(counts, 0.0, environment=program)
    counts.add_heartbeat("actor-0", {"num_completions": 20})
    seen = snapshot(counts, 10.0, environment=program, under_way=(32, 20))
    assert (seen.due_s, seen.is_due_bound) == (None, False)
    mix = load("mix", parts=[{"name": "boxes"}, {"name": "rps"}])
    assert snapshot(counts, 20.0, environment=mix, under_way=(32, 20)).is_due_bound
    mix.parts = (mix.parts[0], replace(mix.parts[1], environment=program))
    seen = snapshot(counts, 20.0, environment=mix, under_way=(32, 20))
    assert (seen.due_s, seen.is_due_bound) == (None, False)


def test_the_longest_trial_has_strategies_and_reflections_too() -> None:
    shape = msgspec.structs.replace(CONFIG.trial, episodes=3, memory="history_and_reflection")
    assert msgspec.structs.replace(shape, strategy="turn").most_completions(10) == 62
    assert msgspec.structs.replace(shape, strategy="episode").most_completions(10) == 35
    shape = msgspec.structs.replace(shape, memory="history", strategy="turn")
    config, counts = msgspec.structs.replace(CONFIG, trial=shape), ProgressCounts()
    snapshot(counts, 0.0, config=config)
    counts.add_heartbeat("actor-0", {"num_completions": 20})
    seen = snapshot(counts, 10.0, config=config, under_way=(32, 20))
    assert seen.due_s == (32 * 3 * 2 * FACTS.max_turns - 20) / 2.0


def test_trials_played_again_are_named_and_end_the_bound_on_the_time() -> None:
    counts = ProgressCounts()
    snapshot(counts, 0.0)
    counts.add_heartbeat("actor-0", {"num_completions": 20, "num_played_again": 3})
    seen = snapshot(counts, 10.0)
    assert seen.due_s is None
    assert "; 3 trials played again after a fault" in sentence(seen)
    assert "complete in" not in sentence(seen)
    counts.add_heartbeat("actor-0", {"num_completions": 5, "num_played_again": 1})  # started again
    counts.add_heartbeat("actor-1", {"num_completions": 5, "num_played_again": 2})
    assert snapshot(counts, 20.0).played_again == 6


def test_while_trials_of_a_wait_are_played_again_there_is_no_estimate() -> None:
    counts = ProgressCounts()
    snapshot(counts, 0.0)
    counts.add_heartbeat("actor-0", {"num_completions": 30, "num_played_again": 1})
    played(counts, 31, 1)
    assert snapshot(counts, 10.0, arrived=31).due_s is None
    assert snapshot(counts, 20.0, version=1, arrived=31).due_s == 1 / 1.5


def test_return_and_valid_share_are_those_of_the_latest_trials() -> None:
    counts = ProgressCounts()
    for _ in range(40):
        counts.add_trial(trial((-4.0, -4.0, -4.0), valid=False))
    for _ in range(32):
        counts.add_trial(trial((0.0, 2.0, 4.0)))
    seen = snapshot(counts, 0.0)
    assert seen.mean_return == 2.0 / FACTS.units
    assert seen.valid_share == 1.0


def in_mix(trial: Trial) -> Trial:
    """The same trial, played in a mix."""
    return replace(trial, task=replace(trial.task, member=f"rps/{trial.task.member}"))


def test_in_a_mix_returns_are_in_the_units_of_the_environment_that_was_played() -> None:
    counts, mix = ProgressCounts(), load("mix", parts=[{"name": "boxes"}, {"name": "rps"}])
    counts.add_trial(in_mix(trial((0.0, 2.0, 4.0))))
    assert snapshot(counts, 0.0, environment=mix).mean_return == 2.0 / FACTS.units
    half, best = FACTS.max_return / 2, FACTS.max_return
    for rewards, is_solved in ((half,) * 3, False), ((best,) * 3, True):
        groups = [
            replace(group, trials=tuple(map(in_mix, group.trials))) for group in batch(rewards)
        ]
        text = Signal(CONFIG, mix).batch(0, groups)
        assert text is not None
        assert ("The task is solved already" in text) == is_solved


REASONS = {
    "context '3.0.1': a prompt of 812 tokens does not fit, with 64 more, into engine.max_tokens = "
    "800; raise it, or make trials shorter": ("outgrew the context", "engine.max_tokens"),
    "lock:Lock against 'a', seed 7: a context needs 26 tokens and has 20: raise trial.room (at "
    "most engine.max_tokens), or lower transcript.max_reflection_tokens": (
        "trial.room is too small",
        "",
    ),
    "a completion was not sampled within 300 s": ("a turn took too long", "engine.turn_deadline_s"),
    "missed its deadline 5 times": ("missed its deadline", "admission.grant_deadline_s"),
    "lock:Lock against 'a', seed 7: step() took longer than environment.step_deadline_s = 60": (
        "a call of the environment hung",
        "environment.step_deadline_s",
    ),
    "lock:Lock against 'a', seed 7: raised KeyError: 'x'": ("the environment raised", "mage play"),
    # `mage play` plays no program.
    "agent:m:f, task a, seed 7, episode 1: run() raised KeyError: 'x'": (
        "the environment raised",
        "Mend the program",
    ),
    "agent:m:f, task a, seed 7, episode 1: run() raised BadRequest: 400; its latest call of the "
    "policy was refused with status 400": ("the program raised after a refused call", "status 400"),
    "agent:m:f, task a, seed 7, episode 1: run() returned without a call of the policy": (
        "the program did not call the policy",
        "`base_url`",
    ),
    "agent:m:f, task a, seed 7, episode 1: run() must return a finite reward, got nan": (
        "a call returned a wrong value",
        "Let the program return",
    ),
    "lock:Lock against 'a', seed 7, episode 1, turn 2: the adviser raised KeyError: 'x'": (
        "the adviser raised",
        "adviser of the method",
    ),
    "trial 3 cannot be sent: a text of 40,000 characters": ("too large to send", "trial.episodes"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_have_kinds_with_a_cure(reason: str) -> None:
    name, key = REASONS[reason]
    kind = drop_kind(reason)
    assert kind.name == name
    assert key in kind.cure


def test_unknown_reasons_are_alike_but_for_names_and_numbers() -> None:
    found = dropped_by_kind({"the moon is at 3.5 of 'a'": 2, "the moon is at 7 of 'b'": 1})
    assert found == {"the moon is at … of …": 3}


def test_the_first_drop_of_each_kind_is_noted_with_its_cure() -> None:
    counts = ProgressCounts()
    assert counts.first_drop("missed its deadline 5 times") == (
        "a group is dropped: missed its deadline 5 times. Raise admission.grant_deadline_s, or "
        "shorten groups: lower trial.episodes or admission.trials_per_group."
    )
    assert counts.first_drop("missed its deadline 6 times") is None
    assert counts.first_drop("the moon is at 3") == "a group is dropped: the moon is at 3."
    assert counts.first_drop("the moon is at 4") is None


def test_foreign_reasons_are_one_line_and_cannot_flood_the_terminal() -> None:
    counts = ProgressCounts()
    assert counts.first_drop("odd\n\x1b[2J reason") == (r"a group is dropped: odd\n\x1b[2J reason.")
    notes = [counts.first_drop(f"reason {'x' * length}") for length in range(40)]
    assert sum(note is not None for note in notes) == MAX_KINDS_NOTED - 1


def test_silence_of_all_actors_is_said() -> None:
    text = sentence(replace(SLOW, turns_per_s=0.0, tokens_per_s=0.0))
    assert "nothing was sampled in the last 30 s: calls of the environment, or the engine" in text


# No signal.


def test_no_valid_action_is_said_once_with_an_action_and_the_keys() -> None:
    signal = Signal(CONFIG, RPS)
    text = signal.batch(0, batch((0.0, 0.0, 0.0), valid=False, action="the rock"))
    assert text is not None
    assert text.startswith(
        "nothing to learn from: of 16 trials no action was valid (the last one was 'the rock', "
        "where 'rock' would be one). "
    )
    assert "legal_actions" in text
    assert "transcript.forced_tags" in text
    assert "warm_start" in text
    assert signal.batch(1, batch((0.0, 0.0, 0.0), valid=False)) is None


def test_a_program_is_not_advised_to_have_legal_actions_or_a_warm_start() -> None:
    signal = Signal(CONFIG, tasks_of(lambda *_: 1.0))
    cut = signal.batch(0, batch((0.0, 0.0, 0.0), valid=False, action="<tool_call>"))
    unpaid = Signal(CONFIG, tasks_of(lambda *_: 1.0)).batch(0, batch((0.0, 0.0, 0.0)))
    assert cut is not None
    assert unpaid is not None
    assert "no answer of 16 trials was a whole call of a tool (the last one was '<tool_call" in cut
    assert "transcript.max_action_tokens" in cut
    assert "legal_actions" not in cut
    assert "warm_start" not in cut + unpaid


def test_no_reward_is_said_once() -> None:
    signal = Signal(CONFIG, RPS)
    text = signal.batch(0, batch((0.0, 0.0, 0.0)))
    assert text is not None
    assert "16 trials of rps have earned no reward at all" in text
    assert "environment.options" in text
    assert signal.batch(1, batch((0.0, 0.0, 0.0))) is None


def test_rewards_that_hardly_an_episode_earns_are_said_once() -> None:
    rare = batch((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), num_groups=1)
    groups = [*rare, *batch((0.0, 0.0, 0.0), num_groups=20)]
    signal = Signal(CONFIG, RPS)
    assert signal.batch(0, groups[:10]) is None  # 240 episodes: too few to tell
    text = signal.batch(1, groups)
    assert text is not None
    assert text.startswith("little to learn from: 1.1% of 744 episodes have earned anything: begin")
    assert "environment.ladder" in text
    assert signal.batch(2, groups) is None


def test_equal_returns_in_every_group_are_said_once() -> None:
    signal = Signal(CONFIG, RPS)
    text = signal.batch(0, batch((1.0, 1.0, 1.0)))
    assert text is not None
    assert "all returns are alike (1 an episode), so every advantage is zero" in text
    assert "sampling.temperature" in text
    assert signal.batch(1, batch((1.0, 1.0, 1.0))) is None


def test_groups_that_earn_alike_within_teach_where_all_trials_of_a_batch_are_compared() -> None:
    groups = [*batch((1.0, 1.0, 1.0)), *batch((0.0, 0.0, 0.0))]
    assert Signal(CONFIG, RPS).batch(0, groups) is not None
    advantage = msgspec.structs.replace(CONFIG.advantage, baseline=["kind", "episode", "index"])
    assert (
        Signal(msgspec.structs.replace(CONFIG, advantage=advantage), RPS).batch(0, groups) is None
    )


def test_equal_returns_at_the_top_are_a_solved_task() -> None:
    best = FACTS.max_return
    text = Signal(CONFIG, RPS).batch(0, batch((best, best, best)))
    assert text is not None
    assert "The task is solved already" in text


@pytest.mark.parametrize(
    ("version", "groups"),
    [
        (0, batch((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))),
        (0, batch((0.0, 0.0, 0.0), num_groups=1)),  # eight trials may be alike by chance
        (10, batch((1.0, 1.0, 1.0))),
    ],
)
def test_nothing_is_said_of_a_batch_with_spread_a_small_one_or_a_late_one(version, groups) -> None:
    assert Signal(CONFIG, RPS).batch(version, groups) is None


# A run that has trained no step.


def test_a_run_without_a_step_says_its_age_what_it_waits_for_and_its_notes() -> None:
    from dataclasses import asdict

    events = [
        {"at": 1000.0, "process": "supervisor", "event": "started", "text": "learner"},
        {"at": 1010.0, "process": "learner", "event": "policy"},
        {"at": 1020.0, "process": "learner", "event": "note", "text": "a group is dropped: x"},
    ]
    times = {"at": 1302.0, "progress": asdict(SLOW)}
    assert before_first_step(times, events, True, 1312.0) == [
        "it began 5:12 min ago",
        f"10 s ago: {sentence(SLOW)}",
        "note: learner: a group is dropped: x",
    ]
    assert before_first_step({}, events, False, 9000.0)[:2] == [
        "it ended 20 s after it began",
        "nothing is played yet: learner training",
    ]
    assert before_first_step({}, [], None, 0.0) == ["no process was started yet"]


def test_the_time_left_goes_by_the_distance_of_steps_of_which_some_are_left_out() -> None:
    steps = [{"step": 1, "time_s": 9.0}, {"step": 4, "time_s": 12.0}]
    assert seconds_left(steps[:1], 10) is None
    assert seconds_left(steps, 10) == 6.0
