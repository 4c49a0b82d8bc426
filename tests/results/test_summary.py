"""A run in one JSON document."""

import json
import math
import tracemalloc

import pytest

from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.pages.report import render
from mage_async.results.run_directory import RunDirectory, checkpoint_at, step_of
from mage_async.results.run_files import read_document, read_records
from mage_async.results.summary import (
    best_checkpoint,
    numbers_note,
    reference_rows,
    summarise,
    unplayed_note,
    worse_note,
    write_summary,
)


def test_a_finished_run_has_every_key_of_the_specification(make_run, learned):
    summary = summarise(make_run(), wall_s=96.3, processor_s=60.0)
    assert (summary["seed"], summary["steps"], summary["complete"]) == (0, 60, True)
    assert (summary["wall_s"], summary["warm_start_s"]) == (96.3, 14.7)
    assert set(summary["evaluation"]) == set(learned)
    assert summary["trials"] == {
        "granted": 8928,
        "acknowledged": 8840,
        "trained": 8640,
        "dropped": 0,
        "in_flight": 288,
        "duplicate": 0,
    }
    assert summary["environment"]["name"] == "rps"
    assert summary["environment"]["units"] == 4
    assert set(summary["references"]) == {"train", "heldout"}


def test_each_evaluation_set_has_returns_intervals_and_trials(make_run, learned):
    for name, score in summarise(make_run(), wall_s=1.0, processor_s=60.0)["evaluation"].items():
        assert score["return_by_episode"] == pytest.approx(learned[name], abs=0.04)
        assert len(score["ci95_by_episode"]) == 3
        assert score["num_trials"] == 1024
        assert len(score["probes_by_episode"]) == 3
        assert score["by_family"]


def test_rates_are_means_over_time_and_not_over_steps(make_run):
    run = make_run(steps=2)
    records = [
        {**line, "time_s": time_s, "trials_per_s": rate}
        for line, time_s, rate in zip(
            read_records(run).metrics, (1.0, 4.0), (100.0, 20.0), strict=True
        )
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    # 100 trials in the first second, 60 in the next three
    assert summarise(run, wall_s=1.0, processor_s=60.0)["throughput"][
        "trials_per_s"
    ] == pytest.approx(160 / 4)


def test_staleness_is_a_mean_over_tokens(make_run):
    run = make_run(steps=2)
    fresh, stale = read_records(run).metrics
    fresh |= {"generated_tokens_per_s": 3000.0, "staleness_mean": 0.0, "staleness_max": 0.0}
    stale |= {"generated_tokens_per_s": 1000.0, "staleness_mean": 1.0, "staleness_max": 1.0}
    run.metrics.write_text(json.dumps(fresh) + "\n" + json.dumps(stale) + "\n")
    staleness = summarise(run, wall_s=1.0, processor_s=60.0)["staleness"]
    assert staleness["mean"] == pytest.approx(0.25)
    assert staleness["max"] == 1.0
    assert len(staleness["mean_by_episode"]) == 3


def test_mismatch_is_the_largest_and_the_token_mean_of_parity_and_steps(make_run):
    mismatch = summarise(make_run(), wall_s=1.0, processor_s=60.0)["logprob_mismatch"]
    # step 1 and the parity at the end each measured 1728 tokens: 3e-8 and 5e-8, at most 9e-7
    assert mismatch["mean_abs"] == pytest.approx(4e-8)
    assert mismatch["max_abs"] == 9e-7
    assert mismatch["num_tokens"] == 3456


def test_the_hit_rate_is_reused_of_all_prompt_tokens(make_run):
    cache = summarise(make_run(), wall_s=1.0, processor_s=60.0)["prefix_cache"]
    assert cache == {"hit_rate": 77400 / 90000, "reuse_rate": 1.0}


def test_an_interrupted_run_says_what_is_known_and_no_more(make_run):
    summary = summarise(make_run(steps=20, finished=False), wall_s=12.0, processor_s=60.0)
    assert (summary["complete"], summary["steps"]) == (False, 20)
    assert "throughput" in summary
    assert "staleness" in summary
    assert summary["prefix_cache"]["hit_rate"] == pytest.approx(0.86)
    assert {"evaluation", "references", "trials", "warm_start_s"}.isdisjoint(summary)


def test_a_run_without_a_warm_start_has_no_time_of_one(make_run):
    run = make_run(settings=["warm_start=none"])
    assert "warm_start_s" not in summarise(run, wall_s=96.3, processor_s=60.0)


def test_a_run_stopped_after_a_checkpoint_counts_the_steps_after_it(make_run):
    run = make_run(steps=72)
    at_checkpoint = json.loads(run.learner.read_text())
    at_checkpoint |= {"version": 60, "trials": at_checkpoint["trials"] | {"trained": 144 * 60}}
    run.learner.write_text(json.dumps(at_checkpoint))
    run.evaluation.unlink()
    newest = {"granted": 10656, "trained": 144 * 72, "dropped": 0, "in_flight": 288}
    run.times.write_text(json.dumps({"at": 1.0, "trials": newest}))
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    assert summary["steps"] == 72
    assert summary["trials"] == newest


def test_version_0_and_win_stay_are_rows_where_an_environment_states_none_and_a_loss_is_said(
    make_run,
):
    run = make_run(steps=80)
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    declared = [row.label for row in reference_rows(summary)]
    assert "before training" not in declared
    assert not worse_note(summary)
    heldout = summary["evaluation"]["heldout"]
    heldout |= {"return_by_episode": [0.1, 0.1, 0.1], "ci95_by_episode": [0.1, 0.1, 0.1]}
    halves = [0.05, 0.05, 0.05]
    summary |= {
        "references": {"heldout": {"random": [0.0] * 3, "win-stay": [0.2] * 3}},
        "reference_ci95": {"heldout": {"random": halves, "win-stay": halves}},
        "before_training": {"return_by_episode": [0.3] * 3, "ci95_by_episode": halves},
        "best_step": 60,
    }
    rows = reference_rows(summary)
    assert [row.label for row in rows] == ["random", "win-stay", "before training"]
    # 0.1 below win-stay, which the intervals of 0.1 and 0.05 allow; and 0.2 below version 0.
    assert worse_note(summary) == (
        "step 80 earns +0.100 in the last held-out episode, less than before training, +0.300; "
        "the best checkpoint is that of step 60: mage evaluate RUN_DIR --checkpoint best"
    )
    assert worse_note(summary) in render(run, summary)
    summary["references"]["heldout"]["win-stay"] = [0.5] * 3
    assert "less than win-stay, +0.500 and than before training, +0.300" in worse_note(summary)
    summary["references"]["heldout"] = {"random": [0.0] * 3}
    del summary["before_training"]
    # 0.1 above random play, which the intervals of 0.1 and 0.05 allow.
    assert "+0.100 in the last held-out episode, no more than random play, +0.000" in worse_note(
        summary
    )
    assert "nothing is learned yet" in worse_note(summary)
    summary["before_training"] = {"return_by_episode": [-0.5] * 3, "ci95_by_episode": halves}
    assert worse_note(summary).endswith(
        "it earns more than before training, -0.500, so further steps may help"
    )
    heldout["num_trials"], num_trials = 1, heldout["num_trials"]
    assert not worse_note(summary), "a single trial shows nothing"
    heldout["num_trials"] = num_trials
    summary["references"]["heldout"] = {"random": [-0.1] * 3}
    assert not worse_note(summary)
    summary["references"]["heldout"] = {"random": [0.0] * 3, "best": [1.0] * 3}
    assert not worse_note(summary)


def test_a_finished_run_that_adds_nothing_to_version_0_says_so_with_the_likely_cause(make_run):
    run = make_run(steps=80)
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    halves = [0.05] * 3

    def note(before, heldout, train, half=0.05):
        summary["before_training"] = {"return_by_episode": [before], "ci95_by_episode": [half]}
        for name, last in (("heldout", heldout), ("train", train)):
            returns = {"return_by_episode": [0.0, 0.0, last], "ci95_by_episode": halves}
            summary["evaluation"][name] |= returns
        return worse_note(summary)

    blind = {"return_by_episode": [0.0, 0.0, 0.5], "ci95_by_episode": [0.05] * 3}
    summary["evaluation"]["heldout_blind"] |= blind
    said = "step 80 earns +0.550 in the last held-out episode, no more than before training, +0.500"
    assert note(0.5, 0.55, 0.5).startswith(f"{said}, by their intervals: `mage doctor RUN_DIR` ")
    assert "tasks of training are learned by heart" in note(0.5, 0.55, 0.8)
    assert "the task was solved already" in note(0.98, 1.0, 1.0)
    # An interval of few trials that holds the largest return does not show it.
    assert "`mage doctor RUN_DIR` looks for a cause" in note(0.5, 0.55, 0.5, half=0.6)
    assert note(0.5, 0.6, 0.5) == ""
    blind["return_by_episode"][-1] = 0.1
    assert "knew already how to use earlier episodes" in note(0.5, 0.55, 0.5)
    assert "without them (blind) it earns +0.100" in note(0.5, 0.55, 0.5)
    halves[-1] = math.nan  # of a single trial
    assert note(0.5, 0.55, 0.5) == ""
    halves[-1] = 0.05
    assert "less than before training" in note(0.5, 0.4, 0.5)
    summary["complete"] = False
    assert note(0.5, 0.55, 0.5) == ""


def test_points_that_the_curve_lacks_are_counted_with_the_reason(make_run):
    run = make_run(steps=80)
    assert "unplayed" not in summarise(run, wall_s=1.0, processor_s=60.0)
    first, second, *_, last = run.curve.read_text().splitlines(keepends=True)
    run.curve.write_text(first + second)
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    assert summary["unplayed"] == {"versions": [20, 30, 40, 50, 60, 70], "num_due": 8}
    assert unplayed_note(summary).startswith(
        "6 of 8 points of the curve (versions 20 to 70) were not played before the run, or its "
    )
    assert unplayed_note(summary) in render(run, summary)
    run.curve.write_text("".join([first, second, last]))
    for file in (run.learner, run.evaluation):
        file.unlink()
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:20]))
    stopped = summarise(run, wall_s=1.0, processor_s=60.0)
    assert unplayed_note(stopped).startswith("1 of 3 points of the curve (version 20) are not")
    run.config.write_text(run.config.read_text().replace("every = 10\n", "every = 0\n"))
    assert "unplayed" not in summarise(run, wall_s=1.0, processor_s=60.0)


def test_held_out_numbers_of_a_class_are_not_taken_for_new_tasks(make_run, tmp_path, monkeypatch):
    run = make_run()
    assert not numbers_note(summarise(run, wall_s=1.0, processor_s=60.0))
    code = "    def reset(self, seed, task): ...\n    def step(self, action): ...\n"
    (tmp_path / "numbered.py").write_text(f"class Own:\n    'Rules.'\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    text = run.config.read_text().replace('name = "rps"', 'name = "numbered:Own"')
    run.config.write_text(text)
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    assert "other numbers than those of training" in numbers_note(summary)
    assert numbers_note(summary) in render(run, summary)


def test_a_run_that_ended_before_its_first_step_has_a_summary(make_run):
    run = make_run(finished=False)
    for file in (run.metrics, run.curve, run.samples):
        file.unlink()
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    costs = {"wall_s", "processor_s"}
    assert set(summary) == {"seed", "steps", "complete", "environment", "credit"} | costs


def test_an_evaluated_run_that_stopped_short_is_not_complete(make_run):
    run = make_run(steps=20)
    run.config.write_text(run.config.read_text().replace("steps = 20\n", "steps = 60\n"))
    assert summarise(run, wall_s=1.0, processor_s=60.0)["complete"] is False


def test_a_half_written_last_line_was_never_written(make_run):
    run = make_run(steps=3)
    run.metrics.write_text(run.metrics.read_text() + '{"step": 4, "ti')
    assert [record["step"] for record in read_records(run).metrics] == [1, 2, 3]


def test_a_damaged_line_is_named(make_run):
    run = make_run(steps=3)
    first, *rest = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join([first, "{oops", *rest]) + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: damaged"):
        read_records(run)


def test_a_field_that_a_record_lacks_is_named_with_its_file(make_run):
    run = make_run(steps=3)
    run.evaluation.write_text('{"sets": {"heldout": {}}}')
    records = read_records(run)
    missing = {
        "metrics.jsonl lacks 'gone'": lambda: records.metrics[0]["gone"],
        "evaluation.json lacks 'gone'": lambda: records.evaluation["sets"]["heldout"]["gone"],
        "summary.json lacks 'gone'": lambda: read_document(run.summary)["gone"],
    }
    for sentence, read in missing.items():
        with pytest.raises(RunError, match=f"{sentence}: it is damaged, or another version") as got:
            read()
        assert isinstance(got.value, KeyError)
    assert records.metrics[0].get("gone") is None


def test_a_directory_without_a_configuration_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"no config\.toml, so this is no run directory"):
        summarise(RunDirectory(tmp_path), wall_s=1.0, processor_s=60.0)


def test_the_summary_is_written_as_json_and_leaves_no_draft(make_run):
    run = make_run(steps=3)
    summary, before = summarise(run, wall_s=1.0, processor_s=60.0), set(run.root.iterdir())
    write_summary(run, summary)
    assert json.loads(run.summary.read_text()) == summary
    assert set(run.root.iterdir()) == before | {run.summary}


def best_of(run, last_returns, heldout, *assignments):
    """The step of the best checkpoint of 20, 40 and 60, and the reason, in a run with these returns
    of the last episode by step, and held-out by version.
    """
    for step in (20, 40, 60):
        checkpoint_at(run.checkpoints, step).mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": step, "return_by_episode": [0.0, value]}
        for step, value in enumerate(last_returns, 1)
    ]
    points = [
        {
            "version": version,
            "sets": {"heldout": {"return_by_episode": [0.0, mean], "ci95_by_episode": [0.1, 0.05]}},
        }
        for version, mean in heldout.items()
    ]
    for file, records in ((run.metrics, lines), (run.curve, points)):
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    best = best_checkpoint(run, config_file.load(config_file.find(None), list(assignments)))
    return step_of(best.path), best.reason


RIPPLE = [0.01 * (step % 3) for step in range(60)]
UNLEARNED = [min(step / 30, 1.0) - 0.6 * (step > 50) + RIPPLE[step] for step in range(60)]
LEARNED = [min(step / 30, 1.0) + RIPPLE[step] for step in range(60)]


def test_the_best_checkpoint_has_the_best_training_returns_around_it(tmp_path):
    step, reason = best_of(RunDirectory(tmp_path), UNLEARNED, {})
    assert step == 40
    assert reason == (
        "the last episode earned +1.011 in training there, and +0.412 at step 60, the newest"
    )


def test_the_best_checkpoint_of_a_long_run_is_found_in_little_memory(tmp_path):
    run = RunDirectory(tmp_path)
    best_of(run, UNLEARNED, {})
    far = '{"step": 99, "return_by_episode": [0.0, 0.0], "trained_groups": [%s]}\n' % (
        "0, " * 999 + "0"
    )
    run.metrics.write_text(run.metrics.read_text() + far * 1000)
    tracemalloc.start()
    best = best_checkpoint(run, config_file.load(config_file.find(None)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (step_of(best.path), peak < 1e6) == (40, True), "the file alone has 3 MB"


def test_a_checkpoint_that_is_hardly_better_than_the_newest_is_not_called_so(tmp_path):
    lower = [value - 0.05 * (step > 50) for step, value in enumerate(LEARNED)]
    assert best_of(RunDirectory(tmp_path), lower, {}) == (40, "")


def test_held_out_returns_of_two_checkpoints_decide_before_those_of_training(tmp_path):
    run = RunDirectory(tmp_path)
    step, reason = best_of(run, LEARNED, {0: 0.0, 20: 0.8, 40: 0.7, 60: 0.5})
    assert (step, "+0.800 on held-out tasks there, and +0.500" in reason) == (20, True)
    # The newest has not been played yet.
    assert best_of(run, LEARNED, {0: 0.0, 20: 0.8, 40: 0.7}) == (60, "")


@pytest.mark.parametrize(
    ("heldout", "chosen_of"),
    [
        ({20: 0.8, 40: 0.7, 60: 0.5}, 3),
        ({20: 0.8, 40: 0.7}, 0),  # the newest is better in training
        ({60: 0.5}, 0),
        ({}, 0),
    ],
)
def test_a_checkpoint_that_held_out_returns_chose_says_of_how_many(tmp_path, heldout, chosen_of):
    run = RunDirectory(tmp_path)
    best_of(run, LEARNED, heldout)
    assert best_checkpoint(run, config_file.load(config_file.find(None))).num_heldout == chosen_of


def test_training_returns_of_tasks_that_change_choose_no_checkpoint(tmp_path):
    run = RunDirectory(tmp_path)
    assert best_of(run, UNLEARNED, {}, "population.rivals=0.5") == (60, "")
    assert best_of(run, UNLEARNED, {20: 0.8, 60: 0.5}, "population.rivals=0.5")[0] == 20


def test_a_run_without_a_checkpoint_has_no_best_one(tmp_path):
    assert best_checkpoint(RunDirectory(tmp_path), config_file.load(config_file.find(None))) is None
