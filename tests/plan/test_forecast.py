"""The seconds of a run, computed from what its first turns and one update took."""

import msgspec
import pytest

from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.plan.forecast import (
    MAX_STEP_S,
    Pace,
    final_sets,
    forecast,
    idle_cores,
    smaller_batch,
)

PACE = Pace(
    load_s=5.0,
    num_contexts=10,
    opening_s=2.0,
    turn_s=1.0,
    trial_turns=9.0,
    opening_tokens=0,
    trial_tokens=100,
    update_s=6.0,
    forward_s=2.0,
    num_trained=3,
    scripted_s=0.01,
)
"""A trial takes 1 s of play: (2 + 8 × 1) / 10; three trials are trained on in 6 s."""


def config(*changes: str) -> Config:
    keys = ("policy.source=DIR", "learner.minibatches=1", "learner.steps=11", "evaluation.every=0")
    return config_file.load(config_file.find(None), [*keys, "evaluation.final_trials=5", *changes])


def test_on_one_core_a_step_takes_the_play_and_the_training_of_its_trials() -> None:
    found = forecast(config(), PACE, num_actors=1, num_cores=1)
    assert (found.play_s, found.train_s, found.step_s) == pytest.approx((36.0, 72.0, 108.0))
    assert found.first_step_s == pytest.approx(7.5 + 108.0)
    assert found.run_s == pytest.approx(115.5 + 10 * 108.0 + 4 * 5 * 1.0)


@pytest.mark.parametrize(
    ("changes", "num_episodes", "names"),
    [
        ((), 1, ("train", "heldout")),
        ((), 2, ("train", "heldout", "heldout_blind", "heldout_swapped")),
        (("methods.graph_memory.guided=0.5",), 1, ("train", "heldout", "heldout_unguided")),
        (
            ("methods.graph_memory.guided=0.5",),
            3,
            ("train", "heldout", "heldout_blind", "heldout_swapped", "heldout_unguided"),
        ),
    ],
)
def test_each_set_of_the_final_evaluation_is_named_once(
    changes: tuple[str, ...], num_episodes: int, names: tuple[str, ...]
) -> None:
    assert final_sets(config(*changes), num_episodes) == names


def test_the_forecast_is_a_sentence_of_whole_times() -> None:
    found = forecast(config(), PACE, num_actors=1, num_cores=1)
    assert found.sentence(config()) == (
        "the first step is expected after 1:56 min, then one every 1:48 min (36 s of play, "
        "1:12 min of training); 11 steps and the final evaluation take about 20:16 min"
    )


def test_a_run_without_steps_is_its_start_and_its_final_evaluation() -> None:
    bare = config("learner.steps=0")
    found = forecast(bare, PACE, num_actors=1, num_cores=1)
    assert found.run_s == pytest.approx(7.5 + 4 * 5 * 1.0)
    assert found.sentence(bare) == "nothing is trained; the final evaluation ends after 28 s"
    slow = msgspec.structs.replace(PACE, update_s=60.0)
    assert smaller_batch(bare, slow, num_actors=1, num_cores=1) == (bare, "")


@pytest.mark.parametrize(
    ("changes", "step_s"),
    [
        ((), 72.0),
        (("admission.max_staleness=0",), 108.0),
        (("admission.rule=sync", "admission.max_staleness=2"), 108.0),
        (("admission.rule=one_step", "admission.max_staleness=0"), 72.0),
        (("admission.rule=unbounded", "admission.max_staleness=0"), 72.0),
    ],
)
def test_on_two_cores_play_and_training_overlap_unless_actors_wait_for_each_version(
    changes: tuple[str, ...], step_s: float
) -> None:
    found = forecast(config(*changes), PACE, num_actors=1, num_cores=2)
    assert found.step_s == pytest.approx(step_s)


def test_an_evaluation_is_played_over_its_own_number_of_episodes() -> None:
    single = config("trial.episodes=1", "evaluation.episodes=3", "evaluation.every=10")
    assert single.evaluation.trials == 32
    found = forecast(single, PACE, num_actors=1, num_cores=1)
    # A trial of three times 9 turns takes (2 + 26 * 1) / 10 = 2.8 s. A point of the curve has two
    # sets of 32 trials.
    assert found.step_s == pytest.approx(108.0 + 2 * 32 * 2.8 / 10)
    assert found.run_s == pytest.approx(115.5 + 10 * found.step_s + 4 * 5 * 2.8)


def test_a_final_evaluation_of_one_episode_has_no_controls() -> None:
    single = config("trial.episodes=1", "evaluation.episodes=1")
    found = forecast(single, PACE, num_actors=1, num_cores=1)
    assert found.run_s == pytest.approx(115.5 + 10 * 108.0 + 2 * 5 * 1.0)


def test_a_method_with_guidance_adds_a_final_set_without_it() -> None:
    guided = config("methods.graph_memory.strategies=3")
    found = forecast(guided, PACE, num_actors=1, num_cores=1)
    assert found.run_s == pytest.approx(115.5 + 10 * 108.0 + 5 * 5 * 1.0)


def test_a_shared_opening_is_computed_once_a_pass() -> None:
    shared = msgspec.structs.replace(PACE, opening_tokens=40, num_trained=1)
    # 36 trials of 60 tokens of their own and 40 once, in seconds of a pass of 100 tokens.
    one_pass = config("learner.max_tokens_per_microbatch=0")
    assert shared.step_train_s(one_pass) == pytest.approx(6.0 * (36 * 60 + 40) / 100)


def test_minibatches_after_the_first_need_a_forward_of_their_own() -> None:
    assert PACE.step_train_s(config("learner.minibatches=2")) == pytest.approx(12 * (6.0 + 1.0))


def test_a_warm_start_is_part_of_the_first_step() -> None:
    keys = ("warm_start=random", "warm_start.steps=4", "warm_start.batch_size=3")
    found = forecast(config(*keys, "warm_start.trials=200"), PACE, num_actors=1, num_cores=1)
    assert found.warm_start_s == pytest.approx(4 * 6.0 + 2.0)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # 4 + 5 steps; 200 trials to clone, and 64 of random play and of each of ten rules.
        ("win_stay", 9 * 6.0 + (200 + 13 * 64) * 0.01 + 20.0),
        ("best", 4 * 6.0 + 200 * 1.0),  # the model plays them
        ("data", 4 * 6.0),  # nothing is played
    ],
)
def test_a_warm_start_takes_the_steps_and_the_play_of_its_kind(kind: str, seconds: float) -> None:
    most = "max_stable_steps=5" if kind == "win_stay" else "max_steps=5"
    sizes = ("steps=4", most, "batch_size=3", "trials=200")
    keys = (f"warm_start={kind}", *(f"warm_start.{size}" for size in sizes))
    found = forecast(config(*keys), PACE, num_actors=1, num_cores=1)
    assert found.warm_start_s == pytest.approx(seconds)


def test_every_minibatch_is_divided_into_micro_batches_of_its_own() -> None:
    # A micro-batch has room for 17 trials, so two minibatches of 18 need four of them.
    shared = msgspec.structs.replace(PACE, opening_tokens=40, num_trained=1)
    keys = ("learner.max_tokens_per_microbatch=1060", "engine.max_tokens=1000")
    found = shared.step_train_s(config("learner.minibatches=2", *keys))
    assert found == pytest.approx((6.0 + 1.0) * (36 * 60 + 4 * 40) / 100)


def test_a_default_batch_whose_step_takes_over_five_minutes_is_made_smaller() -> None:
    slow = msgspec.structs.replace(PACE, update_s=60.0)
    smaller, why = smaller_batch(config(), slow, num_actors=1, num_cores=1)
    assert smaller.admission.groups_per_step == 4
    assert forecast(smaller, slow, num_actors=1, num_cores=1).step_s <= MAX_STEP_S
    assert why.startswith("a step of 36 trials would take 12:36 min here, so ")
    assert why.endswith("admission.groups_per_step is lowered to 4")
    assert smaller_batch(config(), PACE, num_actors=1, num_cores=1) == (config(), "")


def test_a_batch_of_a_size_of_ones_own_is_kept_and_two_keys_are_named() -> None:
    own = config("admission.groups_per_step=20")
    slow = msgspec.structs.replace(PACE, update_s=60.0)
    kept, why = smaller_batch(own, slow, num_actors=1, num_cores=1)
    assert kept == own
    assert "admission.groups_per_step" in why
    assert "trial.episodes" in why


@pytest.mark.parametrize(
    ("num_cores", "changes", "hint"),
    [
        (2, (), ""),
        (3, (), ""),  # the learner, an actor, and the evaluator
        (
            8,
            (),
            "5 of 8 cores stay idle; learner.threads = 6 shortens the training, the slower part of "
            "a step",
        ),
        (8, ("learner.threads=6",), ""),
        (
            8,
            ("learner.ranks=2",),
            "4 of 8 cores stay idle; learner.threads = 3 shortens the training, the slower part of "
            "a step",
        ),
        (5, ("learner.ranks=2",), ""),  # a core is idle, and each rank needs one
        (4, ("learner.ranks=2",), ""),
    ],
)
def test_cores_that_a_run_leaves_idle_are_given_to_the_slower_part_of_a_step(
    num_cores: int, changes: tuple[str, ...], hint: str
) -> None:
    given = config(*changes)
    found = forecast(given, PACE, num_actors=1, num_cores=num_cores)
    assert idle_cores(given, found, num_actors=1, num_cores=num_cores) == hint


def test_idle_cores_are_given_to_more_actors_or_to_engines_where_play_is_slower() -> None:
    slow = msgspec.structs.replace(PACE, turn_s=20.0)

    def hint(num_cores: int, *changes: str, num_actors: int = 1) -> str:
        given = config(*changes)
        found = forecast(given, slow, num_actors=num_actors, num_cores=num_cores)
        return idle_cores(given, found, num_actors=num_actors, num_cores=num_cores)

    end = "shortens the play, the slower part of a step"
    assert hint(8) == f"5 of 8 cores stay idle; --actors 6 {end}"
    assert hint(11, "engine.threads=4") == f"2 of 11 cores stay idle; engine.threads = 5 {end}"
    assert hint(8, "learner.steps=0") == ""
    # Two idle cores are too few for another actor of four threads, and for one thread more in each
    # of five engines.
    assert hint(23, "engine.threads=4", num_actors=4) == ""
