"""Who meets whom, in steps made by a matchmaker."""

import random
from collections import Counter

import pytest

from mage_async.config.schema import Admission, Config, Population
from mage_async.environments.games.kuhn import Kuhn
from mage_async.environments.games.rps import Rps
from mage_async.tasks.league import ITSELF, League, version_of
from mage_async.tasks.matchmaking import Draw, Progress, prioritised
from mage_async.tasks.task_stream import MIXED, MatchedTasks, TaskStream, own_task
from tests.helpers.populations import KUHN, group, population


def matchmaker(
    rules: Population, league: League | None = None, seed: int = 0, groups_per_step: int = 18
) -> MatchedTasks:
    league = league or League(rules, KUHN.facts)
    admission = Admission(groups_per_step=groups_per_step)
    return MatchedTasks(KUHN, league, Config(seed=seed, population=rules, admission=admission))


def test_where_nothing_is_asked_for_the_decks_are_as_they_were() -> None:
    made, stream = matchmaker(population(rivals=0.0)), TaskStream(KUHN, 0)
    assert [made.task(n) for n in range(100)] == [stream.task(n) for n in range(100)]


@pytest.mark.parametrize("rule", ["decks", "fixed", "resampled", "prioritised"])
def test_a_share_of_groups_meets_the_versions_that_are_kept(rule: str) -> None:
    rules = population(rule, rivals=1 / 3, every=2)
    league = League(rules, KUHN.facts)
    made, stream = matchmaker(rules, league), TaskStream(KUHN, 0)
    scripts = set(KUHN.members("train"))
    assert {made.task(n).member for n in range(200)} <= scripts, "there is no version yet"
    for version in range(6):
        league.published(version)
    tasks = [made.task(number) for number in range(1800)]
    met = Counter(version_of(task.member) for task in tasks)
    assert set(met) == {None, 0, 2, 4}
    assert 1 - met[None] / len(tasks) == pytest.approx(1 / 3, abs=0.05)
    assert {task.member for task in tasks if version_of(task.member) is None} == scripts
    for number, task in enumerate(tasks):  # luck and seat are the stream's
        own = stream.task(number)
        assert (task.seed, task.seat) == (own.seed, own.seat)
    assert tasks == [matchmaker(rules, league).task(number) for number in range(1800)]


def test_fixed_places_meet_the_same_member_all_through() -> None:
    rules = population("fixed", rivals=0.0)
    made = matchmaker(rules)
    steps = [[made.task(step * 18 + place).member for place in range(18)] for step in range(5)]
    assert all(step == steps[0] for step in steps)
    assert set(steps[0]) == set(KUHN.members("train"))


def test_regret_is_what_the_best_answer_earns_more() -> None:
    rules = population("prioritised", rivals=0.0)
    league = League(rules, KUHN.facts)
    easy, hard, *others = KUHN.members("train")
    for member in (easy, hard, *others):
        best = KUHN.best_return(member)
        for _ in range(20):
            league.trained([group(member, best if member != hard else best - 2.0)])
    made = matchmaker(rules, league)
    met = Counter(made.task(number).member for number in range(3000))
    assert met[hard] / 3000 == pytest.approx(0.9 + 0.1 / 12, abs=0.02)
    assert min(met.values()) > 0, "no regret grows old: everyone is met now and then"


def test_whom_nobody_has_met_is_met_first() -> None:
    source = random.Random(0)
    drawn = Counter(
        prioritised(["new", "known"], {"new": 8.0, "known": 0.5}.__getitem__, source)
        for _ in range(2000)
    )
    assert drawn["new"] / 2000 == pytest.approx(0.9 * 8 / 8.5 + 0.05, abs=0.03)
    assert prioritised(["a"], lambda name: 0.0, source) == "a"


@pytest.mark.parametrize("environment", [KUHN, Kuhn("family"), Rps()])
def test_the_best_answers_are_those_of_the_references(environment: Kuhn | Rps) -> None:
    units = environment.facts.units
    for split in ("train", "heldout"):
        members = environment.members(split)
        mean = sum(map(environment.best_return, members)) / len(members) / units
        known = environment.references(split, 1)
        name = "hindsight" if "hindsight" in known else "best_response"
        assert mean == pytest.approx(known[name][0])


def test_a_share_of_groups_has_the_policy_in_both_seats() -> None:
    rules = Population(rivals=0.25, every=2)
    league = League(rules, KUHN.facts, self_play_share=0.25)
    league.published(0)
    made = matchmaker(rules, league)
    met = Counter(made.task(number).member for number in range(2000))
    assert met[ITSELF] / 2000 == pytest.approx(0.25, abs=0.04)
    assert met["policy-0"] / 2000 == pytest.approx(0.25, abs=0.04)
    tasks = [made.task(number) for number in range(50)]
    assert tasks == [matchmaker(rules, league).task(number) for number in range(50)]


def test_self_play_is_counted_and_rates_nobody() -> None:
    league = League(facts=KUHN.facts, self_play_share=0.5)
    league.trained([group(ITSELF, 2.0, 2.0)])
    standing = league.standing(ITSELF)
    assert standing is not None
    assert (standing.groups, standing.rating, league.rating) == (1, 0.0, 0.0)


def test_progress_draws_by_the_change_of_returns_in_either_direction() -> None:
    """Means by hand: after 0 and then a, the fast one is a / 4, the slow one a / 20."""
    rules = Population(matchmaker=Progress())
    league = League(rules, KUHN.facts)
    first, second, *others = KUHN.members("train")
    for each in others:
        league.trained([group(each, 1.0)] * 61)
    league.trained([*[group(first, 0.0)] * 60, group(first, 2.0)])
    league.trained([*[group(second, 0.0)] * 60, group(second, -4.0)])
    assert league.standing(first).fast_mean - league.standing(first).slow_mean == pytest.approx(0.4)  # type: ignore[union-attr]
    made = matchmaker(rules, league)
    met = Counter(made.task(number).member for number in range(6000))
    anyone = 0.1 / len(KUHN.members("train"))
    assert met[first] / 6000 == pytest.approx(0.3 + anyone, abs=0.03)
    assert met[second] / 6000 == pytest.approx(0.6 + anyone, abs=0.03)


def test_whoever_was_never_met_may_make_the_most_progress() -> None:
    rules = Population(matchmaker=Progress())
    league = League(rules, KUHN.facts)
    unmet, *others = KUHN.members("train")
    for each in others:
        league.trained([group(each, 0.0)] * 30)
    met = Counter(matchmaker(rules, league).task(number).member for number in range(500))
    assert met[unmet] > 400


def test_equal_members_get_a_fair_share_of_the_groups_from_the_first_on() -> None:
    """Returns are noise: 120 groups, of which each of 12 members would get 10."""
    environment = Rps()
    names = environment.members("train")[:12]
    for seed in range(5):
        noise, met = random.Random(seed), Counter[str]()
        league = League(Population(matchmaker=Progress()), environment.facts)
        for number in range(120):
            draw = Draw(0, names[0], random.Random(f"{seed}/{number}"), league, environment)
            member = Progress().choose(names, draw)
            met[member] += 1
            league.trained([group(member, noise.gauss(0.0, 0.2))])
        assert max(met.values()) <= 20
        assert len(met) == 12


def test_each_trial_of_a_mixed_group_meets_a_member_of_its_own() -> None:
    made, members = matchmaker(Population(mixed_groups=True)), set(KUHN.members("train"))
    for number in range(20):
        task, own = made.task(number), TaskStream(KUHN, 0).task(number)
        names = task.member.split(MIXED)
        assert 4 <= len(names) == len(set(names))
        assert set(names) <= members
        trials = [own_task(task, index) for index in range(2 * len(names))]
        assert [trial.member for trial in trials] == names * 2
        assert {(trial.seed, trial.seat) for trial in trials} == {(own.seed, own.seat)}
    assert len({made.task(number).member for number in range(20)}) > 1
