"""A matrix of runs: its cells, what a finished one says, and the page."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from mage_async.errors import ConfigError
from mage_async.pages.comparison import compare, read_run
from mage_async.pages.sweep import render_matrix
from mage_async.results import sweep
from mage_async.results.intervals import interval, paired, standard_error
from mage_async.results.run_directory import RunDirectory
from mage_async.results.summary import summarise, write_summary
from mage_async.results.sweep import (
    Cell,
    FinishedRun,
    cells,
    is_done,
    read_cell,
    staleness_setting,
    unreached_bounds_sentence,
)
from mage_services.cli.ablate import ablation_of
from mage_services.cli.main import command_tree
from mage_services.cli.sweep_runs import Progress

FIGURES = {
    "heldout_last_return": 0.7,
    "train_last_return": 0.7,
    "sampled_tokens": 1e5,
    "trials_per_s": 200.0,
    "wall_s": 50.0,
    "processor_s": 80.0,
    "staleness_mean": 1.0,
    "staleness_max": 2.0,
    "over_bound_share": 0.0,
    "over_bound_share_episode_1": 0.0,
    "masked_share": 0.0,
    "masked_share_episode_1": 0.0,
    "clipped_share": 0.02,
    "effective_share": 0.9,
    "k3_mean": 0.01,
    "dropped_share": 0.0,
    "wasted_share": math.nan,
    "long_over_short": 1.0,
}


def read_ablation(arguments):
    """The matrix of a command line."""
    return ablation_of(command_tree().parse_args(["ablate", *arguments]))


def finished(setting, seed, last=0.7):
    curve = [(144 * step, 0.5 * step, last * step / 30) for step in range(1, 31)]
    ages = [{0: 0.25, 1: 0.75}, {1: 1.0}, {0: 0.5, 1: 0.5}]
    return FinishedRun(Cell(setting, seed), FIGURES | {"heldout_last_return": last}, curve, ages)


def test_a_rule_with_a_bound_of_its_own_is_run_once():
    found = cells(
        bounds=[0, 1, 2], rules=["sync", "slots"], corrections=["none"], lags=[0], seeds=[0, 1]
    )
    rules = [
        (cell.setting.columns["rule"], cell.setting.columns["bound"])
        for cell in found
        if cell.seed == 0
    ]
    assert rules == [("sync", 0), ("slots", 0), ("slots", 1), ("slots", 2)]
    assert [cell.seed for cell in found] == [0] * 4 + [1] * 4


def test_a_rule_without_a_bound_is_run_once_unless_its_correction_reads_it(tmp_path):
    command = ["--bounds", "1", "4", "--rules", "unbounded", "--corrections", "none", "age_mask"]
    ablation = read_ablation([*command, "--seeds", "0", "--run-dir", str(tmp_path)])
    names = ["unbounded-none-seed0", "unbounded-1-age_mask-seed0", "unbounded-4-age_mask-seed0"]
    assert sorted(cell.name() for cell in ablation.configs) == sorted(names)
    for cell in ablation.configs:
        assert cell.setting.allowed_age is None
        assert unreached_bounds_sentence([finished(cell.setting, 0)]) == ""
    (plain,) = (cell.setting for cell in ablation.configs if cell.name() == names[0])
    assert (plain.label, plain.place, plain.place_name) == ("unbounded, none", 4, "no bound")
    assert {cell.setting.age_group for cell in ablation.configs} == {"unbounded"}

    masked = ["--bounds", "1", "4", "--rules", "unbounded", "--corrections", "age_mask", "none"]
    last = {1: 0.5, 4: 0.7}
    runs = [
        finished(cell.setting, 0, last[cell.setting.columns["bound"] or 4])
        for cell in read_ablation([*masked, "--seeds", "0", "--run-dir", str(tmp_path)]).configs
    ]
    page = render_matrix(runs, num_cells=len(runs), title="quickstart")
    row = page[page.rindex("unbounded, none", 0, page.index("What the correction did to tokens")) :]
    assert re.findall(r"[+−]0\.\d+", row)[:2] == ["+0.200", "+0.200"]


def test_the_help_names_the_control_and_a_correction_of_ones_own(capsys):
    with pytest.raises(SystemExit):
        read_ablation(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "The first value of each option makes the control" in said
    assert "your own class is module:Class" in said


def test_the_default_matrix_is_five_bounds_three_rules_three_corrections_three_seeds(tmp_path):
    ablation = read_ablation(["--run-dir", str(tmp_path)])
    assert len(ablation.configs) == 5 * 3 * 3 * 3
    assert len({cell.name() for cell in ablation.configs}) == 135


def test_numbers_are_separated_by_commas_or_spaces(tmp_path):
    options = ["--rules", "slots", "--corrections", "none", "--run-dir", str(tmp_path)]
    ways = (["--lags", "0,4", "--seeds", "0,1"], ["--lags", "0", "4", "--seeds", "0", "1"])
    one, other = (read_ablation([*options, "--bounds", "0", *way]).configs for way in ways)
    assert one == other
    assert len(one) == 4
    with pytest.raises(ConfigError, match="--lags takes whole numbers, got '0,x'"):
        read_ablation([*options, "--lags", "0,x"])


def test_what_is_no_run_is_said_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="correction"):
        read_ablation(["--run-dir", str(tmp_path), "--corrections", "prayer"])


def test_the_bound_of_a_mask_grows_with_the_lag():
    setting = staleness_setting("slots", "age_mask", lag=4, bound=2)
    assert "learner.correction.max_age=6" in Cell(setting, 0).assignments()
    assert setting.place == 6


def test_a_finished_run_is_read_and_an_unfinished_one_is_missing(make_run):
    run = make_run(steps=20)
    assert not is_done(run)
    write_summary(run, summarise(run, wall_s=40.0, processor_s=60.0))
    assert is_done(run)
    each = read_cell(Cell(staleness_setting("slots", "decoupled", 0, 1), 0), run)
    assert (each.row()["wall_s"], each.row()["processor_s"]) == (40.0, 60.0)
    assert len(each.curve) == 20
    assert each.curve[-1][0] == 20 * 144
    assert len(each.ages) == 1 + 3


def test_ages_and_shares_are_means_over_tokens_as_in_the_summary(make_run):
    run = make_run(steps=2)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for record, tokens_per_s, age in zip(records, (3000.0, 1000.0), (0, 1), strict=True):
        for name in [name for name in record if name.startswith("token_share_age")]:
            del record[name]
        record |= {"generated_tokens_per_s": tokens_per_s, f"token_share_age_{age}": 1.0}
        record |= {"over_bound_share": float(age), "masked_share": float(age)}
        del record["clipped_share"]
    seconds = records[0]["time_s"]
    records[1]["time_s"] = 2 * seconds
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = summarise(run, wall_s=40.0, processor_s=60.0)
    write_summary(run, summary)
    each = read_cell(Cell(staleness_setting("slots", "decoupled", 0, 1), 0), run)
    assert each.ages[0] == pytest.approx({0: 0.75, 1: 0.25})
    assert each.figures["masked_share"] == pytest.approx(0.25)
    assert each.figures["over_bound_share"] == summary["staleness"]["over_bound_share"]
    assert each.figures["sampled_tokens"] == pytest.approx(4000 * seconds)
    assert math.isnan(each.figures["clipped_share"])


def test_runs_that_train_no_step_have_returns_and_no_figures_of_steps(make_run):
    setting, finished = staleness_setting("slots", "decoupled", 0, 1), []
    for seed in (0, 1):
        run = make_run(str(seed), steps=0, seed=seed)
        write_summary(run, summarise(run, wall_s=4.0, processor_s=6.0))
        assert is_done(run)
        finished.append(read_cell(Cell(setting, seed), run))
    figures = finished[0].figures
    assert math.isfinite(figures["heldout_last_return"])
    assert (figures["wall_s"], figures["dropped_share"]) == (4.0, 0.0)
    of_steps = ["trials_per_s", "staleness_mean", "staleness_max", "entropy"]
    assert all(math.isnan(figures[name]) for name in [*of_steps, "masked_share_episode_1"])
    assert finished[0].curve == []
    returned = interval([run.figures["heldout_last_return"] for run in finished])[0]
    page = render_matrix(finished, num_cells=2, title="untrained")
    assert f"{returned:+.3f}" in page
    assert "per unit of the environment (rps: 4 units an episode, each from -1 to 1)." in page
    assert "nan" not in page.lower()


def test_after_each_run_a_line_says_how_far_the_matrix_is(tmp_path):
    progress = Progress(135, 11, parallel=2)
    assert progress.begin() == "11 of 135 runs done"
    run = finished(staleness_setting("slots", "decoupled", 0, 1), 0)
    assert progress.done(run, 80.0) == (
        "[12/135] slots-1-decoupled-seed0: last held-out episode 0.70, 80 s; about 1 h 22 min left"
    )
    assert progress.done(run, 100.0).endswith("; about 1 h 31 min left")  # 122 runs of 90 s, by two
    log = tmp_path / "b.log"
    log.write_text("phase=starting\nmage: learner ended\n")
    failed = progress.failed(Cell(run.cell.setting, 1), log)
    assert failed == f"[13/135] slots-1-decoupled-seed1: failed, see {log}: mage: learner ended"
    progress.num_done = 134
    assert progress.done(run, 90.0).endswith("0.70, 90 s")


def test_the_page_shows_every_setting_with_its_interval():
    runs = [
        finished(staleness_setting("slots", correction, 0, bound), seed, 0.7 + 0.01 * seed)
        for correction in ("decoupled", "ppo")
        for bound in (0, 1, 2)
        for seed in range(3)
    ]
    page = render_matrix(runs, num_cells=20, title="quickstart")
    checker = HTMLParser()
    checker.feed(page)
    assert "18 of 20 runs" in page
    assert "slots 2, ppo" in page
    for column in ("dropped share", "wasted share", "long over short"):
        assert f"{column.removesuffix(' share').capitalize()}: " in page, "a note explains it"
    assert "± 0.0248" in page  # of 0.70, 0.71, 0.72: 4.303 * 0.01 / sqrt(3)
    assert "src=" not in page


def test_equal_returns_have_no_known_interval():
    setting = staleness_setting("slots", "decoupled", 0, 1)
    equal, varied = (
        [finished(setting, seed, 0.7 + step * seed) for seed in range(2)] for step in (0.0, 0.1)
    )
    assert "± ?" in render_matrix(equal, num_cells=2, title="quickstart")
    # `train_last_return` is equal in both.
    assert render_matrix(varied, num_cells=2, title="quickstart").count("± ?") == 1


def test_the_page_has_the_differences_to_the_first_setting_seed_by_seed():
    last = {"decoupled": (0.1, 0.5, 0.9), "ppo": (0.0, 0.4, 0.77)}
    runs = [
        finished(staleness_setting("slots", correction, 0, 1), seed, values[seed])
        for correction, values in last.items()
        for seed in range(3)
    ]
    page = render_matrix(runs, num_cells=6, title="quickstart")
    assert "minus that of “slots 1, decoupled”, the first one of" in page
    assert "−0.110" in page
    assert "± 0.043" in page  # of -0.10, -0.10, -0.13: 4.303 * 0.0173 / sqrt(3)
    assert "seed by seed" not in render_matrix(runs[:3], num_cells=6, title="quickstart")


def test_a_correction_is_compared_with_the_first_one_of_the_command_at_the_same_ages():
    command = ["--rules", "slots", "--corrections", "ppo", "decoupled", "--bounds", "8", "0"]
    last = {"ppo": {8: 0.5, 0: 0.7}, "decoupled": {8: 0.61, 0: 0.75}}
    runs = [
        finished(cell.setting, cell.seed, last[correction][bound] + 0.1 * cell.seed)
        for cell in read_ablation(command).configs
        for _, correction, _, bound in [cell.setting.key]
    ]
    page = render_matrix(runs, num_cells=len(runs), title="quickstart")
    assert "of “slots 8, ppo”, the first one of the command with a finished run, seed" in page
    assert "minus ppo at the same ages" in page
    end = page.index("What the correction did to tokens")
    row = page[page.rindex("slots 0, decoupled", 0, end) :]
    assert re.findall(r"[+−]0\.\d+", row)[:2] == ["+0.250", "+0.050"]


def test_the_first_setting_is_the_control_if_any_of_its_runs_is_done(monkeypatch):
    command = ["--rules", "slots", "--corrections", "ppo", "decoupled", "--bounds", "8"]
    ablation = read_ablation([*command, "--seeds", "0", "1"])
    failed = next(iter(ablation.configs))
    monkeypatch.setattr(sweep, "is_done", lambda run: run != ablation.run_of(failed))
    monkeypatch.setattr(sweep, "read_cell", lambda cell, run: finished(cell.setting, cell.seed))
    page = render_matrix(ablation.finished_runs(), num_cells=4, title="quickstart")
    assert "of “slots 8, ppo”, the first one of the command with a finished run, seed" in page


def test_the_page_names_the_versions_of_the_runs_and_says_if_they_differ(make_run, tmp_path):
    setting, runs = staleness_setting("slots", "decoupled", 0, 1), []
    for seed, commit in enumerate(("aaaa", "aaaa", "bbbb")):
        run = make_run(str(seed), steps=20, seed=seed)
        write_summary(run, summarise(run, wall_s=40.0, processor_s=60.0))
        run.launch.write_text(json.dumps({"actors": 1, "versions": {"commit": commit}}))
        runs.append(read_cell(Cell(setting, seed), run))
    page = render_matrix(runs[:2], num_cells=3, title="")
    sizes = "learner.steps 20, admission.groups_per_step 18, admission.trials_per_group 8"
    assert f"All runs: actors 1, commit aaaa, {sizes}, evaluation.final_trials 1024." in page
    assert "Careful" not in page
    assert runs[2].row()["commit"] == "bbbb"
    said = "The runs were not made alike: commit aaaa (2 of them), bbbb (1 of them)."
    assert said in render_matrix(runs, num_cells=3, title="")
    assert said in compare([read_run(RunDirectory(tmp_path / str(seed))) for seed in range(3)])


def test_bounds_that_limited_nothing_are_named_and_those_that_did_are_not():
    reached = [
        finished(staleness_setting("slots", "none", 0, 2), seed) for seed in range(2)
    ]  # 2 steps
    assert unreached_bounds_sentence(reached) == ""
    idle = finished(staleness_setting("slots", "none", 0, 8), 0)
    said = unreached_bounds_sentence([*reached, idle])
    assert said.startswith("In 1 of 2 settings no token reached the age of the bound (at 8 steps")
    assert "2 at most" in said
    # Corrections and lags act whether or not the bound does.
    assert "settings that differ in such bounds alone differ by chance" in said
    assert said in render_matrix([*reached, idle], num_cells=3, title="").replace("&#x27;", "'")


def test_a_single_run_makes_a_page_without_intervals():
    page = render_matrix(
        [finished(staleness_setting("sync", "none", 4, 0), 0, 0.0)], num_cells=1, title=""
    )
    assert "±" not in page
    assert "sync 0, none, lag 4" in page


def test_an_interval_is_student_s_and_a_single_value_has_none():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(interval([1.0])[1])


def test_differences_are_taken_between_equal_seeds():
    assert paired({0: 1.0, 1: 5.0, 3: 9.0}, {1: 2.0, 0: 0.5}) == [0.5, 3.0]
