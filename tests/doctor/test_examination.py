"""The doctor's memory: what is new, what comes back, and what evaluations show."""

import json
import random
import statistics
from dataclasses import replace

import pytest

from mage_async.config import config_file
from mage_async.doctor import Doctor, examine
from mage_async.doctor.signatures import memory_unused, swap_harmless, texts
from mage_async.results.intervals import half_width
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_records
from tests.doctor.sick_runs import Record, doctor, healthy
from tests.helpers.made_up_runs import make_run

TRUNCATED = {"truncated_action_share": 0.5}


def onsets(looks: Doctor, records: list[Record]) -> list[int]:
    return [finding.onset for record in records for finding in looks.step(record)]


def test_a_signature_that_lasts_is_found_once() -> None:
    assert onsets(doctor(), [record | TRUNCATED for record in healthy()]) == [1]


def test_a_signature_that_was_gone_for_ten_steps_is_found_again() -> None:
    sick = {*range(5, 10), *range(30, 40)}
    records = [each | (TRUNCATED if each["step"] in sick else {}) for each in healthy()]
    assert onsets(doctor(), records) == [5, 30]


def test_a_step_that_a_restarted_learner_trains_again_counts_once() -> None:
    looks = doctor()
    sick = [record | TRUNCATED for record in healthy()]
    assert onsets(looks, sick[:2] + sick[:2] + sick[1:2]) == []
    assert onsets(looks, sick[2:3]) == [1]


def score(last: float, **more: float) -> Record:
    return {"return_by_episode": [0.0, last], "ci95_by_episode": [0.02, 0.02], **more}


def evaluation(heldout: float, blind: float, swapped: float) -> Record:
    sets = {"heldout": score(heldout), "heldout_blind": score(blind)}
    return {"version": 60, "sets": sets | {"heldout_swapped": score(swapped)}}


@pytest.mark.parametrize(
    ("returns", "names"),
    [
        ((0.7, 0.0, -0.2), []),
        ((0.7, 0.69, 0.1), ["memory_unused"]),
        ((0.7, 0.0, 0.71), ["swap_harmless"]),
        ((0.7, 0.67, 0.67), []),  # 0.03 is more than the interval of the difference
    ],
)
def test_a_control_that_takes_nothing_away_is_found(
    returns: tuple[float, float, float], names: list[str]
) -> None:
    found = doctor().evaluated(evaluation(*returns))
    assert [(each.name, each.onset) for each in found] == [(name, 60) for name in names]
    assert all(
        "no loss beyond the interval of the difference, ± 0.03" in str(each) for each in found
    )


def test_tasks_that_are_learned_by_heart_are_the_cause_that_is_named() -> None:
    """A guest whose ten training tasks the tiny model learned by heart."""
    found = evaluation(0.02, 0.0, 0.0)
    found["environment"] = {"min_return": -1.0, "max_return": 1.0, "units": 1}
    for trained, is_by_heart in ((0.62, True), (0.04, False)):
        found["sets"]["train"] = score(trained)
        findings = doctor().evaluated(found)
        assert [each.name for each in findings] == ["memory_unused", "swap_harmless"]
        for each in findings:
            assert ("learned by heart" in str(each)) is is_by_heart
            assert (f"on tasks of training it earns {trained:+.2f}" in str(each)) is is_by_heart


def test_few_and_noisy_trials_accuse_no_healthy_run() -> None:
    """Wins of a policy that loses a third of them, or more, in each control."""
    config, draw, found = config_file.load(config_file.find(None)), random.Random(0), 0

    def played(number: int, share: float) -> Record:
        wins = [float(draw.random() < share) for _ in range(number)]
        mean, half = statistics.fmean(wins), half_width(wins, 1.0)
        scored = {"return_by_episode": [0.5, mean], "ci95_by_episode": [half, half]}
        return scored | {"num_trials": number}

    for _ in range(1000):
        number = draw.choice((1, 2, 3, 4, 8, 16, 32, 64, 256))
        shares = {"heldout": 0.9, "heldout_blind": 0.6, "heldout_swapped": 0.3}
        facts = {"min_return": 0.0, "max_return": 1.0, "units": 1}
        each = {name: played(number, share) for name, share in shares.items()}
        evaluated = {"sets": each, "environment": facts}
        found += any([*memory_unused(config, evaluated), *swap_harmless(config, evaluated)])
    assert found <= 10
    used = {"heldout": played(512, 0.6), "heldout_blind": played(512, 0.6)}
    assert [*memory_unused(config, {"sets": used, "environment": facts})]


def test_noise_of_the_entropy_is_no_runaway() -> None:
    draw, known = random.Random(0), healthy()[10]
    for _ in range(20):
        looks = doctor()
        for step in range(1, 101):
            noisy = {"step": step, "entropy": draw.lognormvariate(-1.0, 0.8)}
            looks.step(known | noisy)
        assert "entropy_runaway" not in {each.name for each in looks.findings}


def test_returns_in_a_small_unit_are_compared_with_more_digits_than_zeros() -> None:
    assert texts(0.7, 0.0) == ["+0.70", "+0.00"]
    assert texts(0.00075, -0.00002) == ["+0.00075", "-0.00002"]


def test_a_credit_that_pays_early_episodes_is_not_advised_again() -> None:
    def remedy(*assignments: str) -> str:
        (found,) = doctor(*assignments).evaluated(evaluation(0.7, 0.69, 0.1))
        return found.remedy

    paid = ("credit.kind=cumulative_paper", "credit.episode_discount=1.0")
    assert "credit." not in remedy(*paid)
    for other in ((paid[0], "credit.episode_discount=0.6"), ("credit.kind=single_episode",)):
        assert "credit.kind" in remedy(*other)


def test_where_rewards_are_rare_more_steps_are_not_advised() -> None:
    rare = {"earning_share": 0.01, "return_by_episode": [0.0, 0.01, 0.01]}
    looks = doctor()
    found = [each for record in healthy()[:20] for each in looks.step(record | rare)]
    found += looks.evaluated(evaluation(0.01, 0.01, 0.01))
    assert [each.name for each in found] == ["rare_rewards"]
    assert "1.0% of the episodes of eight steps earned anything" in found[0].evidence
    # A run whose batches are compared as a whole refuses the key, as pretrained ones on cores do.
    assert "where advantage.baseline is by group" in found[0].remedy


def test_where_no_reward_is_earned_that_is_the_one_finding() -> None:
    nothing = {"zero_advantage_share": 1.0, "return_by_episode": [0.0, 0.0, 0.0]}
    looks = doctor()
    found = [each for record in healthy()[:20] for each in looks.step(record | nothing)]
    found += looks.evaluated(evaluation(0.0, 0.0, 0.0))
    (finding,) = found
    assert (finding.name, finding.onset) == ("no_variance", 1)
    assert "no episode of 5 steps has earned any reward" in finding.evidence


@pytest.mark.parametrize("key", ["trial.memory=none", "trial.episodes=1"])
def test_memory_that_was_not_trained_is_not_missed(key: str) -> None:
    assert doctor(key).evaluated(evaluation(0.7, 0.7, 0.7)) == []


def test_trials_that_outgrow_the_context_are_truncation() -> None:
    document = {"version": 10, "sets": {"train": score(0.5), "heldout": score(0.5, cut_short=0.3)}}
    (finding,) = doctor().evaluated(document)
    assert finding.name == "truncation"
    assert "30% of the trials of heldout" in finding.evidence


def test_what_every_evaluation_shows_is_found_once() -> None:
    looks, sets = doctor(), {"heldout": score(0.5, cut_short=0.3)}
    found = [looks.evaluated({"version": version, "sets": sets}) for version in (0, 20, 40)]
    assert [len(each) for each in found] == [1, 0, 0]


def test_a_made_up_run_that_learned_is_well(tmp_path) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run)
    assert examine(read_records(run)) == []


def test_a_warm_start_that_taught_nothing_is_found(tmp_path) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run, settings=["warm_start.kind=win_stay"])

    def found(**said: str) -> list[tuple[str, str]]:
        run.warm_start.write_text(json.dumps({"origin": "", "fault": "", "cure": ""} | said))
        return [(each.evidence, each.remedy) for each in examine(read_records(run))]

    assert found(fault="the loss is 1", cure="Lower it.") == [("the loss is 1", "Lower it.")]
    assert found() == []
    evaluation, point = json.loads(run.evaluation.read_text()), read_records(run).curve[0]
    for chance, cloned, is_idle in ((0.0, 0.6, True), (0.0, 0.05, False), (-0.5, 0.6, False)):
        known = {"random": [chance] * 3, "win-stay": [cloned] * 3}
        halves = {name: [0.01] * 3 for name in known}
        known = {"references": {"heldout": known}, "reference_ci95": {"heldout": halves}}
        run.evaluation.write_text(json.dumps(evaluation | known))
        evidence = [text for text, _ in found()]
        assert evidence == [text for text in evidence if "random play +0.00" in text]
        assert len(evidence) == is_idle, point


def test_memory_that_a_tiny_model_does_not_use_calls_for_a_warm_start_if_there_was_none(
    tmp_path,
) -> None:
    run = RunDirectory(tmp_path / "run")

    def remedy(*settings: str, is_cloned: bool) -> str:
        make_run(run, settings=settings)
        evaluation = json.loads(run.evaluation.read_text())
        evaluation["sets"]["heldout_blind"] = evaluation["sets"]["heldout"]
        run.evaluation.write_text(json.dumps(evaluation))
        record = json.dumps({"origin": "", "fault": "", "cure": ""} if is_cloned else {})
        run.warm_start.write_text(record)
        (found,) = (each for each in examine(read_records(run)) if each.name == "memory_unused")
        return found.remedy

    assert remedy(is_cloned=True).startswith("Train for more learner.steps.")
    for settings in (["warm_start=none"], ["warm_start.kind=win_stay"]):
        assert remedy(*settings, is_cloned=False).startswith("The run began without a warm start:")


def test_low_entropy_is_put_down_to_a_warm_start_only_where_something_was_cloned(tmp_path) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run)
    same = {"return_by_episode": [0.1, 0.5, 0.5], "trials_per_s": 10.0}
    same |= {"generated_tokens_per_s": 180.0}
    steps = [each | same | {"entropy": 0.023 if each["step"] < 11 else 0.005} for each in healthy()]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))

    def is_blamed(*recorded: Record) -> bool:
        records = read_records(run)
        looks = Doctor.recorded(replace(records, warm_start=recorded[0]))
        for each in recorded[1:]:
            looks.note_warm_start(each)
        found = [finding for record in records.metrics for finding in looks.step(record)]
        (remedy,) = (each.remedy for each in found if each.name == "entropy_collapse")
        return "The warm start left hardly anything to explore" in remedy

    cloned = {"origin": "", "fault": "", "cure": ""}
    assert is_blamed(cloned)
    assert not is_blamed({})  # nothing was worth cloning
    assert is_blamed({}, cloned)  # the first page was made before the warm start ended


def test_a_class_that_was_edited_between_two_starts_is_named(tmp_path) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run)
    changes = [
        {"step": 20, "key": key, "was": "1", "now": "2"} for key in ("seed", "source of a:B")
    ]
    run.launch.write_text(json.dumps({"changes": changes}))
    (finding,) = examine(read_records(run))
    assert finding.sentence().startswith("class_edited of a:B since step 20: it was edited after")


def test_a_recorded_run_is_examined_whose_environment_is_not_here(tmp_path) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run, finished=False)
    run.config.write_text(run.config.read_text().replace('name = "rps"', 'name = "gone:Game"'))
    assert examine(read_records(run)) == []
