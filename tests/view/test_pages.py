"""What pages compute: bins, choices in addresses, differences of configurations, visible text."""

import re
from urllib.parse import parse_qsl

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from mage_async.config import config_file
from mage_async.pages.charts import bin_edges, histogram
from mage_async.pages.comparison import differences
from mage_async.pages.templating import Frame, fill, progress_note, visible
from mage_async.pages.turns import shown_tokens, shown_trial
from mage_async.policy_version import VersionRun
from mage_async.trajectory import Kind, Segment, Task, Trial, Turn
from mage_services.view.index import ListedGroup, ListedTrial
from mage_services.view.trial_pages import TrialFilter, group_rows, select

FRAME = Frame("/token/", "title")
VALUES = st.lists(st.floats(-1e6, 1e6).map(lambda value: round(value, 6)), min_size=1, max_size=60)


def listed(group, number, rewards, invalid=0, oldest=2):
    return ListedTrial(group, number, rewards, 2, 9, invalid, oldest, 3, 0.1, 4, "rock")


@given(VALUES)
def test_every_value_lies_in_one_bin_and_bins_are_few(values):
    edges = bin_edges(values)
    assert 1 <= edges.count <= 32
    assert edges.low <= min(values) + 1e-6 * max(1, edges.width)
    for value in values:
        place = edges.bin_of(value)
        assert edges.low + place * edges.width <= value + 1e-6 * max(1, edges.width)
    bars = histogram(values, None, str, "reward")
    counts = [int(re.search(r": ([\d,]+) of", bar.title)[1].replace(",", "")) for bar in bars.bins]
    assert sum(counts) == len(values)


def test_whole_rewards_have_a_bin_each():
    bars = histogram([-1.0, 0.0, 0.0, 3.0], None, str, "reward")
    assert [bar.label for bar in bars.bins] == ["−1", "0", "1", "2", "3"]
    assert bars.bins[1].title == "0: 2 of 4 trials"


@pytest.mark.parametrize(
    ("values", "first", "count"), [([-1.0, 0.5, 1.0], "−1", 21), ([-2.0, 0.0, 1.5], "−2", 18)]
)
def test_the_first_bin_begins_at_a_lowest_value_that_is_an_edge(values, first, count):
    edges = bin_edges(values)
    assert (edges.label(0), edges.count) == (first, count)
    assert edges.bin_of(min(values)) == 0


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


def test_differences_name_keys_and_both_values():
    one = config_file.load(config_file.find(None), [])
    other = config_file.load(config_file.find(None), ["seed=7", "learner.steps=9"])
    assert differences(one, other) == [("seed", "0", "7"), ("learner.steps", "60", "9")]
    assert differences(one, one) == []
    without_keys = msgspec.structs.replace(one, methods={"mine:Method": {}})
    assert differences(one, without_keys) == [("methods.mine:Method", "–", "{}")]


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]0;owned\x07", "␛]0;owned␇"),
        ("a\u202eb\u2066", "a⟨U+202E⟩b⟨U+2066⟩"),
        ("line\n\ttab", "line\n\ttab"),
        ("\x9b31m", "⟨U+009B⟩31m"),
    ],
)
def test_what_a_terminal_or_a_reader_would_obey_is_shown(hostile, shown):
    assert visible(hostile) == shown
    assert visible(Markup("<b>")) == "<b>"


def test_a_text_is_never_markup_in_any_page():
    assert "&lt;b&gt;" in fill("sentence.html", frame=FRAME, sentence="<b>")


def test_a_small_rest_of_the_index_is_not_worth_a_word():
    assert progress_note(99_000_000, 100_000_000) == ""
    assert progress_note(10_000_000, 100_000_000).startswith("10 %")


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


def test_rewards_in_a_small_unit_are_no_zeros():
    group = ListedGroup(1, 2, "rock", 0, "5", "actor-0", 0, 2, 4, None)
    two = [listed(1, 0, [0.0004]), listed(1, 1, [2.0])]
    rows = group_rows([group], two, two, TrialFilter())
    metrics = {"facts": [], "others": [], "returns": [0.0004, 0.0005]}
    lists = {"episodes": [], "histogram": None, "wanted": TrialFilter(), "all_address": ""}
    page = fill("step.html", frame=FRAME, rows=rows, **metrics, **lists)
    assert re.findall(r'class="reward plus">([^<]+)', page) == ["+0.00040", "+2"]
    assert "+0.00040 → +0.00050 return by episode" in page


def test_the_title_of_a_tab_names_the_run():
    frames = (Frame("/token/", "step 2", run="mine"), Frame("/token/", "mine", run="mine"))
    titles = [
        re.search("<title>(.*)</title>", fill("sentence.html", frame=frame, sentence=""))[1]
        for frame in frames
    ]
    assert titles == ["step 2 · mine · mage view", "mine · mage view"]
