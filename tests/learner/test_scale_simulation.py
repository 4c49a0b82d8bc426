"""The simulation of `bench.scale`: what must hold of it, whatever it measures."""

from dataclasses import replace

import pytest

from bench.scale.simulation import Simulation
from bench.scale.workload import Workload

ONE = Workload(
    num_actors=1,
    groups_per_step=1,
    trials_per_group=1,
    max_staleness=0,
    steps=6,
    settle=2,
    trial_s=5.0,
    sigma=0.0,
    step_s=3.0,
    publish_s=0.5,
    load_s=0.0,
    link_s=0.01,
    take_s=0.0,
    send_s=0.0,
    tokens=12,
)
"""A trial, a step, a publication, and nothing drawn."""
FEW = Workload(
    num_actors=6,
    groups_per_step=4,
    trials_per_group=3,
    max_staleness=1,
    steps=12,
    settle=0,
    sigma=1.2,
    step_s=9.0,
    tokens=60,
)


def played(work: Workload) -> Simulation:
    simulation = Simulation(work)
    simulation.run()
    return simulation


def rate(simulation: Simulation) -> float:
    work, measured = simulation.work, simulation.measured
    steps = work.steps - work.settle
    return steps * work.trials_per_step() / (measured.ended - measured.began)


def test_one_actor_in_lock_step_takes_what_its_parts_take() -> None:
    simulation = played(ONE)
    round_s = ONE.trial_s + ONE.step_s + ONE.publish_s + 2 * ONE.link_s
    assert rate(simulation) == pytest.approx(1 / round_s)
    assert simulation.measured.group_ages == {0: ONE.steps - ONE.settle}
    waited_s = simulation.measured.idle.learner["too few complete"]
    assert waited_s / (ONE.steps - ONE.settle) == pytest.approx(round_s - ONE.step_s)


def test_one_actor_that_may_run_ahead_plays_without_a_pause() -> None:
    work = replace(ONE, max_staleness=2)
    assert rate(played(work)) == pytest.approx(1 / (work.trial_s + 2 * work.link_s))
    slow = replace(work, step_s=20.0)
    assert rate(played(slow)) == pytest.approx(slow.learner_bound())


@pytest.mark.parametrize("rule", ["slots", "overtake"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_token_is_over_the_bound_and_every_one_is_counted(bound: int, rule: str) -> None:
    measured = played(replace(FEW, max_staleness=bound, rule=rule)).measured
    assert max(measured.group_ages) <= bound
    assert max(measured.token_ages) <= bound
    assert measured.group_ages.total() == FEW.steps * FEW.groups_per_step
    assert measured.token_ages.total() == FEW.steps * FEW.trials_per_step() * FEW.tokens


def test_no_rate_is_over_the_ideal() -> None:
    simulation = played(FEW)
    lives_s = simulation.measured.lives_s
    ideal = min(FEW.learner_bound(), FEW.actors_bound(sum(lives_s) / len(lives_s)))
    assert 0.2 * ideal < rate(simulation) < ideal


def test_every_second_of_a_place_and_of_the_learner_has_a_reason() -> None:
    simulation = played(FEW)
    measured, idle = simulation.measured, simulation.measured.idle
    seconds = measured.ended - measured.began
    assert sum(idle.places.values()) == pytest.approx(seconds * FEW.places())
    trained_s = (FEW.steps - FEW.settle) * FEW.step_s
    assert sum(idle.learner.values()) + trained_s == pytest.approx(seconds)
    assert min(idle.learner["held back"], idle.places["no slot"]) > 0


def test_two_equal_runs_are_identical_and_another_seed_is_not() -> None:
    one, two, other = played(FEW), played(FEW), played(replace(FEW, seed=1))
    assert (one.measured, one.inbox, one.site.costs.calls) == (
        two.measured, two.inbox, two.site.costs.calls,
    )  # fmt: skip
    assert one.measured.lives_s != other.measured.lives_s


def test_messages_wait_in_the_inbox_while_the_learner_takes_its_time() -> None:
    quick, slow = played(FEW), played(replace(FEW, take_s=0.1))
    assert slow.inbox.most > quick.inbox.most
    assert slow.inbox.most_bytes > quick.inbox.most_bytes
    assert not slow.site.num_refused
