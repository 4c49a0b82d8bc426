"""The run as one page."""

import io
import json
import math
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from mage_async.pages.charts import signed
from mage_async.pages.curves import metric_charts
from mage_async.pages.report import early_and_late, render, verdict
from mage_async.results.run_files import read_records
from mage_async.results.summary import summarise
from mage_services.terminal.final_table import print_final

VOID = {"meta", "br", "hr"}


class Checker(HTMLParser):
    """Counts elements, collects words, and fails on an element that is not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.words, self.addresses = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(run):
    return render(run, summarise(run, wall_s=96.3, processor_s=60.0))


def checked(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_a_page_is_whole_and_reaches_for_nothing_outside_itself(make_run):
    page = page_of(make_run())
    checker = checked(page)
    assert checker.addresses == []
    assert {"script", "link", "img", "iframe"}.isdisjoint(checker.tags)
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_a_page_says_which_of_many_members_it_lists(make_run):
    run = make_run()
    assert "<summary>4 more</summary>" in page_of(run)
    evaluation = json.loads(run.evaluation.read_text())
    many = {str(number): [0.1, 0.2, 0.3] for number in range(256)}
    evaluation["sets"]["heldout"]["by_member"] = many
    run.evaluation.write_text(json.dumps(evaluation))
    page = page_of(run)
    checked(page)
    assert "256 held-out members, of which these 20 have the lowest and the highest" in page
    assert "<summary>20 more, with the next lowest and highest returns</summary>" in page


def test_the_line_of_the_staleness_bound_includes_the_lag_of_the_weights(make_run):
    page = page_of(make_run(settings=["admission.lag=3"]))
    _, _, after = page.partition("<title>staleness of the tokens of each step, in steps</title>")
    ticks = re.findall(r'class="tick end">(.*?)</text>', after.partition("</svg>")[0])
    assert max(map(float, ticks)) > 2, "the bound is 1 + 3"
    assert "of 1 + 3 of lag allowed" in page
    assert "<title>bound</title>" in after.partition("</svg>")[0]


@pytest.mark.parametrize("rule", ["count", "window", "unbounded"])
def test_a_page_names_no_bound_of_staleness_where_the_rule_has_none(make_run, rule):
    page = page_of(make_run(settings=[f"admission.rule={rule}", "admission.lag=3"]))
    assert f"; rule &#39;{rule}&#39; has no bound" in page
    assert "of lag allowed" not in page
    _, _, after = page.partition("<title>staleness of the tokens of each step, in steps</title>")
    assert "<title>bound</title>" not in after.partition("</svg>")[0]


def test_a_page_shows_every_part_of_a_finished_run(make_run):
    page = page_of(make_run())
    text = " ".join(checked(page).words)
    for title in (
        "Adaptation",
        "Learning curves",
        "By task or opponent",
        "Where the time went",
        "Staleness and trials",
        "Throughput",
        "Trials to read",
        "Configuration",
    ):
        assert title in text
    for said in ("best response", "without memory", "random, nash", "1 min 36 s", "lose-rock"):
        assert said in text
    assert "8,928 granted = 8,640 trained + 0 dropped + 288 in flight" in text
    assert 'kind = "final_only"' in text
    # No method of the run gives guidance, so no set is played without it.
    assert "</i>blind" in page
    assert "</i>unguided" not in page


def test_a_page_compares_with_no_references_where_the_environment_has_none(make_run):
    run = make_run()
    evaluation = json.loads(run.evaluation.read_text())
    run.evaluation.write_text(json.dumps(evaluation | {"references": {"train": {}, "heldout": {}}}))
    assert "To compare" in page_of(make_run("other"))
    assert "To compare, in the last episode: before training +" in page_of(run)
    run.curve.unlink()
    assert "To compare" not in page_of(run)


def test_a_page_counts_special_tokens_in_text_where_there_were_any(make_run):
    run = make_run()
    assert "special tokens in text" not in page_of(run)
    summary = summarise(run, wall_s=96.3, processor_s=60.0) | {"injections": {"rps": 1200}}
    words = checked(render(run, summary)).words
    assert words[words.index("special tokens in text") :][:3].count("1,200") == 1
    assert "observations of rps" in words


def test_a_page_says_whether_drops_chose_what_was_trained(make_run):
    run = make_run()
    assert "ratio of selection" not in page_of(run)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines[0]["trained_groups"] = [["early", "a", 8, 90], ["late", "b", 80, 40]]
    lines[1]["dropped_groups"] = [["late", "b<i>", 40, "the environment raised", 40]]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = page_of(run)
    checked(page)
    assert "ratio of selection" in page
    for cell in ("130 of 170", "40 of 80", "long over short", "dropped: the environment raised"):
        assert cell in page
    assert "b&lt;i&gt;" in page
    assert "long groups were trained 0.50" in page, "the doctor's finding"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_page_leaves_steps_that_are_not_finite_out_of_its_means(make_run, value):
    run = make_run()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]

    def mean_grad_norm():
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        checked(page_of(run))
        (chart,) = metric_charts(read_records(run), ["grad_norm"])
        return chart.mean

    for line in lines:
        line["grad_norm"] = 0.25
    lines[0]["grad_norm"] = value
    assert mean_grad_norm() == "0.25"
    for line in lines:
        line["grad_norm"] = value
    assert mean_grad_norm() == "NaN"


def test_a_page_shows_whom_the_agent_met_where_versions_were_opponents(make_run):
    run = make_run()
    assert "Whom it met" not in page_of(run)
    learner = json.loads(run.learner.read_text())
    met = {"groups": 5, "episodes": 120, "total": 60.0, "recent": -1.0}
    learner["population"] = {
        "rivals": [20],
        "rating": 61.0,
        "standings": {
            "rock": met | {"rating": -61.25},
            "policy-20": met | {"rating": 12.0},
            "policy-40": met | {"rating": 3.0, "groups": 0},
        },
    }
    run.learner.write_text(json.dumps(learner))
    page = page_of(run)
    text = " ".join(checked(page).words)
    assert "Whom it met" in text
    assert text.index("policy-20") < text.index("−61"), "the best rated is the first"
    assert "policy-40" not in text, "nobody has met it"
    assert "<b>policy-20</b>" in page, "it is kept"
    assert "+0.12" in text  # 60 points in 120 episodes of four rounds
    assert "−0.25" in text


def test_an_episode_has_the_colour_of_its_legend_where_evaluations_have_more(make_run):
    run = make_run(settings=["trial.episodes=1", "evaluation.episodes=3"])
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    first = [line | {"return_by_episode": line["return_by_episode"][:1]} for line in lines]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in first))
    page = page_of(run)
    for colour, episode in ("e0", 1), ("e2", 2), ("e4", 3):
        assert f'<i class="key {colour}"></i>episode {episode}<' in page
        assert re.search(f'class="label {colour}"><title>episode {episode}<', page)
    # Batches, and the lines of staleness, are of the first episode alone.
    assert set(re.findall(r'class="line (?:faint|thin) (e\d)"', page)) == {"e0"}


def test_the_headline_is_the_final_evaluation(make_run):
    run = make_run()
    returns = summarise(run, wall_s=1.0, processor_s=60.0)["evaluation"]["heldout"][
        "return_by_episode"
    ]
    assert f"<b>{signed(returns[-1])}</b>" in page_of(run)


@pytest.mark.parametrize("steps", [1, 20])
def test_an_interrupted_run_has_a_page_that_says_so(make_run, steps):
    run = make_run(steps=steps, finished=False)
    run.config.write_text(run.config.read_text().replace(f"steps = {steps}\n", "steps = 60\n"))
    text = " ".join(checked(page_of(run)).words)
    assert f"it ended after {steps} of 60 steps" in text
    assert "Adaptation" not in text


def test_a_run_that_was_stopped_shows_what_became_of_its_trials_since_the_checkpoint(make_run):
    run = make_run(steps=20, finished=False)
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    summary["trials"] = dict.fromkeys(
        ("granted", "acknowledged", "trained", "dropped", "in_flight", "duplicate"), 0
    ) | {"granted": 3256, "trained": 3024, "in_flight": 232}
    page = render(run, summary)
    assert "3,256 granted = 3,024 trained + 0 dropped + 232 in flight" in page


def test_a_run_that_was_stopped_behind_its_last_step_says_that_it_is_trained(make_run):
    run = make_run(steps=20, finished=False)
    run.config.write_text(run.config.read_text().replace("steps = 60\n", "steps = 20\n"))
    assert "Not evaluated: all 20 steps are trained" in page_of(run)


def test_a_run_that_never_trained_has_a_page(make_run):
    run = make_run(finished=False)
    for file in (run.metrics, run.curve, run.samples):
        file.unlink()
    assert "it ended after 0 of 60 steps" in " ".join(checked(page_of(run)).words)


def test_nothing_that_was_said_can_become_markup(make_run):
    run = make_run()
    evil = "<script>alert(1)</script>&\"'"
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    for sample in samples:
        sample["member"] = evil
        for turn in sample["turns"]:
            turn["observation"] = turn["observation"].replace("opp", evil)
    run.samples.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    learner = json.loads(run.learner.read_text())
    learner["dropped_by_reason"] = {evil: 2}
    learner["blocked_s"][evil] = {evil: 1.0}
    run.learner.write_text(json.dumps(learner))
    page = page_of(run)
    assert "script" not in checked(page).tags
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_shares_of_a_process_sum_to_the_whole(make_run):
    bars = re.findall(r'<div class="bar">(.*?)</div></div>', page_of(make_run()))
    assert len(bars) == 7  # learner, four actors, supervisor, and the trials
    for bar in bars:
        shares = [float(share) for share in re.findall(r"flex:([\d.]+)", bar)]
        assert sum(shares) == pytest.approx(1, abs=1e-3)


def score(*returns, half=0.02):
    return {"return_by_episode": list(returns), "ci95_by_episode": [half] * len(returns)}


def test_adaptation_is_said_to_be_what_both_controls_take_away():
    sets = {
        "heldout": score(0.0, 0.75),
        "heldout_blind": score(0.0, 0.03),
        "heldout_swapped": score(0.0, -0.04),
    }
    assert verdict(sets).endswith("Adaptation is what these controls take away: 0.72 and 0.79.")


def test_a_single_trial_of_each_set_shows_no_adaptation():
    sets = {"heldout": score(0.0, 0.75), "heldout_blind": score(0.0, 0.0)}
    sets["heldout_swapped"] = sets["heldout_blind"]
    said = verdict(
        {
            name: {"num_trials": 1} | score(*row["return_by_episode"], half=0.0)
            for name, row in sets.items()
        }
    )
    assert "earns +0.75\u00a0±\u00a0? on" in said
    assert said.endswith("so adaptation is not shown.")


def test_returns_in_a_small_unit_have_more_digits_than_zeros():
    rows = {"heldout": (0.0, 75e-5), "heldout_blind": (0.0, 3e-5), "heldout_swapped": (0.0, -4e-5)}
    said = verdict({name: score(*row, half=2e-5) for name, row in rows.items()})
    assert "earns +0.00075\u00a0±\u00a00.00002 on held-out" in said
    assert said.endswith("take away: 0.00072 and 0.00079.")


@pytest.mark.parametrize("spared", ["heldout_blind", "heldout_swapped"])
def test_a_return_that_a_control_leaves_is_not_called_adaptation(spared):
    sets = dict.fromkeys(("heldout_blind", "heldout_swapped"), score(0.0, 0.0))
    sets |= {"heldout": score(0.0, 0.75), spared: score(0.0, 0.74)}
    assert verdict(sets).endswith("from chance, so adaptation is not shown.")


def test_the_report_says_that_rewards_of_turns_are_paid_and_those_of_episodes_per_unit(make_run):
    run = make_run()
    said = "the reward of an episode is their sum divided by the episode's 4 units."
    assert said in page_of(run)
    summary = summarise(run, wall_s=96.3, processor_s=60.0)
    summary["environment"]["units"] = 1  # then both are the same
    assert "the reward of an episode" not in render(run, summary)


def sample(version, split="train", member="a"):
    return {"version": version, "split": split, "member": member, "seed": 1, "seat": 0}


def test_the_late_trial_is_on_the_early_ones_task_where_that_was_played():
    early, other, same = sample(0), sample(60, "heldout", "b"), sample(60, "heldout", "a")
    assert early_and_late([early, other, same]) == [early, same]
    assert early_and_late([early, other]) == [early, other]
    assert early_and_late([early]) == [early]


def test_the_report_says_what_was_won_in_an_episode_and_what_in_any_so_far(make_run):
    page = page_of(make_run())
    table = page[page.index("held-out tasks won and lost") :]
    cells = re.findall(r'<td class="number">(\d+).%</td>', table)[:12]
    won, drawn, lost, within = (cells[place : place + 3] for place in (0, 3, 6, 9))
    assert (won, lost, within) == (["30", "60", "70"], ["40", "20", "10"], ["30", "70", "90"])
    assert drawn == ["30", "20", "20"]


def test_the_report_counts_no_wins_of_a_class_that_declares_none(make_run):
    run = make_run()
    summary = summarise(run, wall_s=1.0, processor_s=60.0)
    assert "won and lost" in render(run, summary)
    summary["environment"]["has_wins"] = False
    assert "won and lost" not in render(run, summary)


def test_a_page_shows_diversity_and_harder_tasks_where_they_were_measured(make_run):
    run = make_run()
    assert "Trajectory diversity" not in page_of(run)
    evaluation = json.loads(run.evaluation.read_text())
    rung = {"label": "boxes <3>", "options": {}, "score": evaluation["sets"]["heldout"]}
    evaluation["harder"] = {"ladder": "boxes", "rungs": [rung | {"label": "as trained"}, rung]}
    numbers = {"entropy_by_episode": [1.25, 0.5, 0.25], "ci95_by_episode": [0.125, 0.0, 0.0]}
    counts = {"num_tasks": 64, "repeats": 16, "distinct_by_episode": [4.0, 2.0, 1.5]}
    evaluation["diversity"] = {**numbers, **counts, "most": 2.7726}
    run.evaluation.write_text(json.dumps(evaluation))
    checker = checked(page_of(run))
    text = " ".join(" ".join(checker.words).split())
    assert "Harder tasks than trained: boxes" in text
    assert "boxes <3>" in text
    assert "64 held-out tasks, each played 16 times; at most 2.77 nats" in text
    assert "1.250 ± 0.125" in text


def test_harder_tasks_and_diversity_are_in_the_final_table(make_run):
    run = make_run()
    evaluation = json.loads(run.evaluation.read_text())
    heldout = evaluation["sets"]["heldout"]
    rungs = [{"label": label, "score": heldout} for label in ("as trained", "boxes 3")]
    numbers = {"entropy_by_episode": [1.25, 0.5, 0.25], "ci95_by_episode": [0.125, 0.0, 0.0]}
    evaluation |= {"harder": {"rungs": rungs}, "diversity": {**numbers, "most": 2.7726}}
    run.evaluation.write_text(json.dumps(evaluation))
    console = Console(file=io.StringIO(), width=100)
    print_final(console, summarise(run, wall_s=1.0, processor_s=None), run.report)
    text = console.file.getvalue()
    assert re.search(r"harder: boxes 3 .*[+-]0\.\d{3} ±", text)
    assert re.search(r"diversity, in nats, at most 2\.77 +│ +1\.250 ±0\.125", text)
