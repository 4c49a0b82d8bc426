"""Runs side by side: which belong together, what their page says, and what is refused."""

import json
import math
import re
from argparse import ArgumentTypeError
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from msgspec import structs

from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.pages.comparison import Arm, arms, compare, differences, lines, paired, read_run
from mage_async.pages.report import render
from mage_async.results.intervals import interval
from mage_async.results.run_directory import RunDirectory
from mage_async.results.summary import summarise, write_summary
from mage_services.api.start_to_report import _write_start
from mage_services.cli.options import positive
from mage_services.cli.report import write_report

PRETRAINED = "policy.kind=pretrained policy.source=model policy.dtype=float32 policy.lora"
LAST = ("evaluation", "heldout", "return_by_episode", -1)


@pytest.fixture
def runs(make_run):
    """Three seeds with a discount of 1, two with 0.6; journals and evaluations differ in size."""
    made = []
    for discount, seeds in ((1.0, (0, 1, 2)), (0.6, (0, 1))):
        for seed in seeds:
            settings = [f"credit.episode_discount={discount}", f"journal.max_bytes={10**9 + seed}"]
            settings += [f"evaluation.final_trials={100 + seed}"]
            place = make_run(f"{discount}-{seed}", seed=seed, settings=settings)
            write_summary(place, summarise(place, wall_s=60.0 + seed, processor_s=60.0))
            made.append(read_run(place))
    return made


def test_an_arm_is_the_runs_that_differ_in_nothing_but_their_seed(runs):
    found = arms(reversed(runs))
    assert [arm.settings for arm in found] == [
        {"credit.episode_discount": 0.6},
        {"credit.episode_discount": 1.0},
    ]
    assert [[run.records.config.seed for run in arm.runs] for arm in found] == [[0, 1], [0, 1, 2]]
    assert found[0].label == "episode_discount 0.6"


def test_equal_returns_have_no_known_interval(runs):
    (line,) = lines([runs[0], runs[0]])
    assert line["last"].endswith(" ± ?")


def test_runs_with_two_versions_of_a_class_are_two_arms(runs):
    same = runs[:3]
    digests = ({"my:Loss": "0a"}, {"my:Loss": "0a"}, {"my:Loss": "1b"})
    made = [replace(run, sources=each) for run, each in zip(same, digests, strict=True)]
    found = arms(made)
    assert [arm.label for arm in found] == ["source of my:Loss 0a", "source of my:Loss 1b"]
    assert [len(arm.runs) for arm in found] == [2, 1]
    assert len(arms(replace(run, sources=digests[0]) for run in same)) == 1


def test_a_run_whose_keys_a_resume_changed_is_an_arm_of_its_own_and_says_so(make_run):
    places = [make_run(f"{number}", steps=20) for number in range(2)]
    config = config_file.load(places[0].config)
    with places[0].metrics.open("a") as file:
        file.write("damaged\n")
    for steps, rate, source in ((20, 0.002, "0a"), (24, 0.0003, "1b")):
        learner = structs.replace(config.learner, learning_rate=rate, steps=steps)
        now = structs.replace(config, learner=learner)
        sources = {"my:Game": source}
        _write_start(places[0], now, num_actors=1, sources=sources)
        if steps == 20:  # the second start is one of another version of torch
            launch = json.loads(places[0].launch.read_text())
            launch["versions"]["torch"] = "1.0"
            places[0].launch.write_text(json.dumps(launch))
    text = places[0].metrics.read_text()
    places[0].metrics.write_text(text.removesuffix("damaged\n"))
    for place in places:
        write_summary(place, summarise(place, wall_s=60.0, processor_s=60.0))
    # No step was trained between the two changes, so 0.002 was the rate of none.
    was = config.learner.learning_rate
    summary = read_run(places[0]).summary
    assert summary["changed_keys"]["learner.learning_rate"] == f"{was} to step 20, then 0.0003"
    assert summary["changed_keys"]["source of my:Game"] == "0a to step 20, then 1b"
    assert f"learner.learning_rate {was} to step 20, then 0.0003" in render(places[0], summary)
    torch_text = f"torch 1.0 to step 20, then {version('torch')}"
    assert f"version of {torch_text}" in render(places[0], summary)
    assert torch_text in compare([read_run(place) for place in places])
    labels = [arm.label for arm in arms(map(read_run, places))]
    assert "torch" not in "".join(labels)
    assert f"learning_rate {was} to step 20, then 0.0003" in labels[0]
    assert labels[1] == f"steps 20, learning_rate {was:g}"


def test_runs_of_one_configuration_are_one_arm(runs):
    assert [arm.label for arm in arms(runs[:3])] == ["all runs"]
    assert "1 arm: the runs differ in nothing but seeds" in compare(runs[:3])


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        (
            ("learner.correction=decoupled", "learner.correction=icepop"),
            ["correction decoupled", "correction icepop"],
        ),
        (
            ("learner.correction.max_weight=3.0", "learner.correction=ppo"),
            ["correction decoupled", "correction ppo"],
        ),
        (
            ("seed=0", "methods.scaling_inter.turns=[2,3]"),
            ["without scaling_inter", "steps 20, turns 2+3, episodes []"],
        ),
        (
            (f"{PRETRAINED}=none", f"{PRETRAINED}.targets=['q_proj']"),
            ["lora none", "rank 16, alpha 32, targets q_proj"],
        ),
    ],
)
def test_an_arm_is_named_by_its_kind_and_not_by_keys_that_the_kind_brings(
    make_run, settings, labels
):
    places = [make_run(f"{number}", settings=each.split()) for number, each in enumerate(settings)]
    for place in places:
        write_summary(place, summarise(place, wall_s=60.0, processor_s=60.0))
    assert [arm.label for arm in arms(map(read_run, places))] == labels


def test_an_interval_over_runs_is_students():
    assert interval([1.0, 3.0]) == pytest.approx((2.0, 12.706), abs=1e-9)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)), abs=1e-9)
    mean, half = interval([4.0])
    assert mean == 4.0
    assert math.isnan(half)


def _last(run):
    return run.summary["evaluation"]["heldout"]["return_by_episode"][-1]


def test_returns_in_different_environments_have_their_own_charts_and_no_difference(runs):
    config = runs[0].records.config
    maze = structs.replace(config, environment=structs.replace(config.environment, name="maze"))
    page = compare([runs[1], replace(runs[0], records=replace(runs[0].records, config=maze))])
    assert "another environment" in page
    captions = re.findall("<figcaption>(.*by trials.*)</figcaption>", page)
    assert captions == ["held-out tasks, by trials, rps", "held-out tasks, by trials, maze"]


def test_differences_are_taken_seed_by_seed(runs):
    first, second = arms(runs)
    expected = [_last(b) - _last(a) for a, b in zip(first.runs, second.runs, strict=False)]
    assert paired(first, second, *LAST) == pytest.approx(expected)
    # Seed 0 was run twice: once as it was, once as seed 1 went.
    again = replace(first.runs[0], summary=first.runs[1].summary)
    twice = replace(first, runs=[*first.runs, again])
    change = (_last(again) - _last(first.runs[0])) / 2
    assert paired(twice, second, *LAST)[0] == pytest.approx(expected[0] - change)


def test_the_page_names_the_arms_and_says_what_each_reached(runs):
    page = compare(runs)
    assert "2 arms; they differ in credit.episode_discount" in page
    reached = page[page.index("What was reached") :]
    assert re.findall(r"<th>(episode_discount [\d.]+)</th>", reached)[:2] == [
        "episode_discount 1",
        "episode_discount 0.6",
    ]
    mean, half = interval(arms(runs)[0].values(*LAST))
    assert f"+{mean:.3f} ± {half:.3f}" in reached
    assert "fewer than three runs supports no conclusion" in reached


def test_a_terminal_gets_a_line_an_arm(runs):
    assert [(row["arm"], row["runs"]) for row in lines(runs)] == [
        ("episode_discount 1", 3),
        ("episode_discount 0.6", 2),
    ]


def test_an_arm_with_a_run_that_stopped_says_so_and_how_many_runs_its_means_are_of(runs):
    stopped = runs[1].summary | {"complete": False, "evaluation": {}}
    compared = [runs[0], replace(runs[1], summary=stopped), runs[2]]
    (arm,) = lines(compared)
    mean, half = interval([_last(run) for run in runs[:3:2]])
    assert (arm["runs"], arm["unfinished"]) == (3, ", 1 not finished")
    assert arm["last"] == f"+{mean:.3f} ± {half:.3f} (2 runs)"
    page = compare(compared)
    assert "3, 1 not finished" in page
    assert "fewer than three runs supports no conclusion" in page


def test_a_single_run_is_no_comparison(runs):
    with pytest.raises(ValueError, match="at least two runs, got 1"):
        compare(runs[:1])


def test_a_run_that_has_not_ended_is_refused(make_run):
    with pytest.raises(RunError, match=r"no summary\.json: it has not ended"):
        read_run(make_run())


def summarised(make_run, *names):
    """Runs that have ended."""
    made = [make_run(name) for name in names]
    for place in made:
        write_summary(place, summarise(place, wall_s=60.0, processor_s=60.0))
    return made


def test_a_run_that_is_named_twice_is_taken_once(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (place,) = summarised(make_run, "a")
    write_report([RunDirectory(place.root / ".." / "a"), place], None)
    said = capsys.readouterr().out
    assert "named twice is taken once" in said
    assert f"report: {place.report}" in said
    assert not (tmp_path / "comparison.html").exists()


@pytest.mark.parametrize("others", [(), ("b",)])
def test_a_page_is_utf_8_in_any_locale(make_run, tmp_path, others, monkeypatch):
    write_text = Path.write_text

    def write(file, text, encoding="ascii"):
        return write_text(file, text, encoding=encoding)

    (place, *rest) = summarised(make_run, "a", *others)
    monkeypatch.setattr(Path, "write_text", write)
    write_report([place, *rest], tmp_path / "page.html")
    assert "±" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (b'{"seed": 0, "env', r"summary\.json: damaged"),
        (b"{}", r"summary\.json lacks environment, seed, complete: it is damaged"),
        (b"\xff\xfe{", r"summary\.json: damaged: byte 0 is not UTF-8"),
    ],
)
def test_a_damaged_summary_is_said_in_a_sentence(make_run, damage, says):
    (place,) = summarised(make_run, "a")
    place.summary.write_bytes(damage)
    with pytest.raises(RunError, match=says):
        write_report([place], None)


@pytest.mark.parametrize(("others", "field"), [((), "trials_per_s"), (("b",), "time_s")])
def test_what_a_file_of_a_run_lacks_is_named(make_run, tmp_path, others, field):
    (place, *rest) = summarised(make_run, "a", *others)
    lines_ = place.metrics.read_text().splitlines()
    place.metrics.write_text("".join(line.replace(field, "other") + "\n" for line in lines_))
    with pytest.raises(RunError, match=f"lacks '{field}': it is damaged, or another version"):
        write_report([place, *rest], tmp_path / "page.html")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_trials_or_episodes_is_above_0(text):
    with pytest.raises(ArgumentTypeError, match=f"a whole number above 0, got {text!r}"):
        positive(text)
    assert positive("12") == 12


def test_keys_with_the_same_last_name_are_written_whole():
    settings = {"warm_start.steps": 200, "learner.steps": 14, "seed": 1}
    label = Arm(settings, []).label
    assert label == "warm_start.steps 200, learner.steps 14, seed 1"


def test_differences_name_keys_and_both_values():
    one = config_file.load(config_file.find(None), [])
    other = config_file.load(config_file.find(None), ["seed=7", "learner.steps=9"])
    assert differences(one, other) == [("seed", "0", "7"), ("learner.steps", "60", "9")]
    assert differences(one, one) == []
    without_keys = structs.replace(one, methods={"mine:Method": {}})
    assert differences(one, without_keys) == [("methods.mine:Method", "–", "{}")]
