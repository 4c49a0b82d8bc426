"""Lists of groups and trials, and the addresses that choose from them."""

import re
from urllib.parse import parse_qsl

from mage_async.pages.templating import Frame, fill
from mage_services.view.index import ListedGroup, ListedTrial
from mage_services.view.trial_pages import TrialFilter, group_rows, select

FRAME = Frame("/token/", "title")


def listed(group, number, rewards, invalid=0, oldest=2):
    return ListedTrial(group, number, rewards, 2, 9, invalid, oldest, 3, 0.1, 4, "rock")


def test_a_choice_is_read_back_from_its_address():
    choice = TrialFilter(first=3, last=9, bin=0, member="a&b=<c>", text="?#", only_invalid=True)
    base, _, query = choice.address("runs/x/trials").partition("?")
    assert base == "runs/x/trials"
    assert dict(parse_qsl(query)) == {
        "first": "3", "last": "9", "bin": "0", "member": "a&b=<c>", "text": "?#",
        "only_invalid": "1",
    }  # fmt: skip
    assert TrialFilter().address("runs/x/trials") == "runs/x/trials"


def test_a_selection_keeps_what_was_chosen():
    rewards = ([0.0, 2.0], [1.0, 3.0], [2.0, 2.0])
    trials = [listed(1, n, each, invalid=int(n == 1)) for n, each in enumerate(rewards)]
    last, bars = select(trials, TrialFilter(bin=0), "page")
    assert [trial.number for trial in last] == [0, 2]
    first, _ = select(trials, TrialFilter(bin=0, episode=1), "page")
    assert first == trials[:1]
    invalid, _ = select(trials, TrialFilter(only_invalid=True), "page")
    assert invalid == trials[1:2]
    assert bars.bins[0].address == "page"  # the chosen bin leads back to all


def test_a_group_says_its_spread_and_how_stale_it_was():
    group = ListedGroup(1, 2, "rock", 0, "5", "actor-0", 0, 2, 4, None)
    two = [listed(1, 0, [1.0]), listed(1, 1, [3.0], oldest=1)]
    (row,) = group_rows([group], two, two, TrialFilter())
    assert (row.mean, row.spread, row.staleness) == (2.0, 1.0, 2)
    # Trials that differ in an earlier episode alone have advantages where it is credited.
    for rewards, is_uniform in (([0.0, 1.0], False), ([1.0, 1.0], True)):
        two = [listed(1, 0, [1.0, 1.0]), listed(1, 1, rewards)]
        (row,) = group_rows([group], two, two, TrialFilter())
        assert (row.spread, row.is_uniform) == (0.0, is_uniform)


def test_what_is_said_of_a_group_is_not_of_its_listed_trials_alone():
    group = ListedGroup(1, 5, "rock", 0, "5", "actor-0", 0, 3, 4, None)
    earned = ((1.0, 3), (1.0, 3), (0.0, 1))
    trials = [listed(1, n, [reward], oldest=oldest) for n, (reward, oldest) in enumerate(earned)]
    (whole,) = group_rows([group], trials, trials, TrialFilter())
    (row,) = group_rows([group], trials, trials[:2], TrialFilter(bin=1))
    assert (row.trials, row.mean, row.spread) == (trials[:2], 1.0, 0.0)
    assert (row.is_uniform, row.staleness) == (whole.is_uniform, whole.staleness) == (False, 2)
    assert group_rows([group], trials, [], TrialFilter(bin=2)) == []


def test_rewards_in_a_small_unit_are_no_zeros():
    group = ListedGroup(1, 2, "rock", 0, "5", "actor-0", 0, 2, 4, None)
    two = [listed(1, 0, [0.0004]), listed(1, 1, [2.0])]
    rows = group_rows([group], two, two, TrialFilter())
    metrics = {"facts": [], "others": [], "returns": [0.0004, 0.0005]}
    lists = {"episodes": [], "histogram": None, "trial_filter": TrialFilter(), "all_address": ""}
    page = fill("step.html", frame=FRAME, rows=rows, **metrics, **lists)
    assert re.findall(r'class="reward plus">([^<]+)', page) == ["+0.00040", "+2"]
    assert "+0.00040 → +0.00050 return by episode" in page
