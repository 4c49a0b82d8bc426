"""Every signature is found on a run made to have it, soon, and on no run that is well."""

import json
import math
import re
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest

from mage_async.config import config_file
from mage_async.config.schema import SignatureName
from mage_async.doctor import SIGNATURES, Doctor, Finding
from tests.doctor.sick_runs import ONSET, SICKNESSES, Record, doctor, healthy, made_sick

SOON = 10
"""Steps from the first sick one."""


def found_in(records: list[Record], config: str = "quickstart") -> list[Finding]:
    looks = doctor(config=config)
    return [finding for record in records for finding in looks.step(record)]


@pytest.mark.parametrize("name", ["quickstart", "scout", "kuhn"])
def test_nothing_is_found_on_a_run_that_was_well(name: str) -> None:
    assert found_in(healthy(name), name) == []


@pytest.mark.parametrize("name", SICKNESSES)
def test_a_signature_is_found_within_ten_steps_of_its_onset(name: str) -> None:
    first, *others = found_in(made_sick(name))
    assert (first.name, others) == (name, [])
    assert ONSET - 2 <= first.onset <= first.found <= ONSET + SOON
    assert first.remedy == SIGNATURES[name].remedy


def test_there_is_a_made_run_for_every_signature_that_can_halt_one() -> None:
    shown_by_steps = {name for name, each in SIGNATURES.items() if each.in_step}
    assert SICKNESSES.keys() == shown_by_steps == set(get_args(SignatureName))


ADVICE = [
    (key, value)
    for each in SIGNATURES.values()
    for key, values in re.findall(r'([a-z_]+\.[a-z_.]+) = ("\w+"(?: or "\w+")*)', each.remedy)
    for value in values.split(" or ")
]
"""The values that remedies name, each with its key."""


@pytest.mark.parametrize(("key", "value"), ADVICE)
def test_a_value_that_a_remedy_advises_is_accepted(key: str, value: str) -> None:
    assert config_file.load(config_file.find("quickstart"), [f"{key}={value}"])


def test_the_values_of_remedies_are_found() -> None:
    assert ("credit.kind", '"cumulative_paper"') in ADVICE
    assert len(ADVICE) == sum(each.remedy.count('"') for each in SIGNATURES.values()) // 2


def test_a_scout_that_never_begins_to_explore_is_found() -> None:
    """Recorded: `credit.episode_discount=0.6` makes probing worth nothing."""
    found = found_in(healthy("scout_0.6"), "scout")
    assert [(each.name, each.onset) for each in found] == [("entropy_collapse", 16)]


def test_a_run_whose_actions_were_never_valid_is_found_at_its_second_step() -> None:
    sick = [record | {"valid_action_share": 0.0} for record in healthy()]
    found = [each for each in found_in(sick) if each.name == "invalid_actions"]
    assert [(each.onset, each.found, each.evidence) for each in found] == [
        (1, 2, "100% of actions are invalid")
    ]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        # Recorded on a GPU whose engine cached 60,000 tokens for 128 contexts of 1,250.
        ({"prefix_reuse_rate": 0.2765, "staleness_max": 1.0}, "keep"),
        ({"prefix_reuse_rate": 0.2765, "staleness_max": 0.0}, "refresh_at_episode"),
    ],
)
def test_evicted_contexts_are_found_at_the_first_step(changes: Record, rule: str) -> None:
    looks = doctor(f"engine.cache_rule={rule}")
    (finding,) = looks.step(healthy()[0] | changes)
    assert (finding.name, finding.onset) == ("evicted_contexts", 1)
    assert "28% of the tokens" in finding.evidence


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_reuse_rate": 0.3, "staleness_max": 1.0},  # weights changed: recomputed on purpose
        {"prefix_reuse_rate": 0.3, "staleness_max": 0.0, "retried_trials": 2},
        {"prefix_reuse_rate": 0.99, "staleness_max": 0.0},
    ],
)
def test_tokens_that_have_to_be_computed_again_are_no_finding(changes: Record) -> None:
    looks = doctor("engine.cache_rule=refresh_at_episode")
    assert looks.step(healthy()[0] | changes) == []


def test_a_finding_names_the_member_or_the_actor() -> None:
    (member,), (actor,) = (found_in(made_sick(name)) for name in ("member_failing", "over_bound"))
    assert (member.subject, actor.subject) == ("beat-rock", "actor-2")


def test_where_many_members_fail_the_environment_is_named_once() -> None:
    sick = [record | {"dropped_by_member": dict.fromkeys("abcde", 1)} for record in healthy()]
    (finding,) = found_in(sick)
    assert finding.subject == ""
    assert "15 groups of 5 members" in finding.evidence


def test_an_actor_is_not_blamed_where_all_are_over_the_bound() -> None:
    both = {"over_bound_by_actor": {"actor-0": 0.2, "actor-1": 0.2}}
    assert found_in([record | both for record in healthy()]) == []


def test_old_weights_show_at_equal_version_too() -> None:
    sick = [record | {"logprob_mismatch_mean": 0.2} for record in healthy()]
    (finding,) = found_in(sick)
    assert (finding.name, finding.onset) == ("engine_mismatch", 1)
    assert "0.2 nats at equal version" in finding.evidence


@pytest.mark.parametrize(("youngest", "names"), [(1, ["engine_mismatch"]), (4, [])])
def test_a_policy_that_moves_while_its_data_age_is_no_fault_of_the_engine(
    youngest: int, names: list[str]
) -> None:
    """Recorded at a lag of 4, under a correction without a clip: k3 up to 1.5 nats."""
    sick = [
        {name: value for name, value in record.items() if "_age_" not in name}
        | {f"k3_mean_age_{youngest}": 1.5}
        for record in healthy()
    ]
    assert [found.name for found in found_in(sick)] == names


def test_a_solved_task_may_lose_its_entropy_and_its_variance() -> None:
    solved = {"entropy": 1e-3, "zero_advantage_share": 1.0, "return_by_episode": [0.0, 1.0, 1.0]}
    assert found_in([*healthy()[:20], *(record | solved for record in healthy()[20:])]) == []


def test_metrics_that_an_older_run_does_not_have_are_not_judged() -> None:
    bare = [{"step": each["step"], "return_by_episode": [0.0]} for each in healthy()]
    assert found_in(bare) == []


def test_a_single_step_without_a_finite_gradient_is_found_as_it_was_recorded() -> None:
    line = json.dumps(healthy()[0] | {"loss": 0.1, "grad_norm": math.nan})
    (finding,) = found_in([json.loads(line)])
    assert (finding.name, finding.onset, finding.evidence) == ("not_finite", 1, "grad_norm is nan")


def test_a_run_that_recorded_no_return_is_not_solved() -> None:
    config = config_file.load(config_file.find("quickstart"), [])
    looks = Doctor(config, (-1.0, 0.0))  # the mean of no returns, 0, would be the largest one
    for record in healthy()[:10]:
        looks.step(
            {name: value for name, value in record.items() if name != "return_by_episode"}
            | {"zero_advantage_share": 1.0}
        )
    assert "no_variance" in {each.name for each in looks.findings}


def test_control_characters_of_a_name_do_not_reach_the_terminal() -> None:
    hostile = {"dropped_by_member": {"\x1b[2Jrock\n": 3}}
    (finding,) = found_in([record | hostile for record in healthy()[:5]])
    assert finding.subject == "\x1b[2Jrock\n"
    assert "of \\x1b[2Jrock\\n since step 1" in finding.sentence()


def test_entropy_that_a_bonus_alone_raises_is_put_down_to_the_lack_of_advantages() -> None:
    sick = [record | {"zero_advantage_share": 1.0} for record in made_sick("entropy_runaway")]
    assert {each.name for each in found_in(sick)} == {"no_variance"}


@pytest.mark.parametrize(("tokens", "names"), [(12, ["entropy_collapse"]), (200, [])])
def test_entropy_after_a_warm_start_has_collapsed_once_whole_trials_are_alike(
    tokens: int, names: list[str]
) -> None:
    """It fell from 0.21 to 0.018 nats a token: to more than a twentieth, and above 0.01."""
    stuck = {"return_by_episode": [0.1, 0.5, 0.5], "trials_per_s": 10.0, "entropy": 0.21}
    lower = {"generated_tokens_per_s": 10.0 * tokens, "entropy": 0.018}
    records = [each | stuck | (lower if each["step"] > 10 else {}) for each in healthy()]
    assert [each.name for each in found_in(records)] == names


def test_entropy_that_a_warm_start_left_low_is_put_down_to_it() -> None:
    """It was 0.023 nats a token, of which a trial has 18, when RL began, and fell to 0.005."""
    tokens = {"trials_per_s": 10.0, "generated_tokens_per_s": 180.0}
    stuck = {"return_by_episode": [0.1, 0.5, 0.5]} | tokens
    records = [
        each | stuck | {"entropy": 0.023 if each["step"] < 11 else 0.005} for each in healthy()
    ]
    (found,) = found_in(records)
    assert (found.name, found.onset) == ("entropy_collapse", 12)
    assert 'warm_start = "none"' in found.remedy


@pytest.mark.parametrize(
    ("assignments", "remedy"),
    [
        (["learner.entropy=0.0", "learner.final_entropy=0.0"], "Lower learner.learning_rate."),
        (
            ["learner.entropy_tokens=restricted"],
            "Lower learner.entropy, or set learner.entropy_ceiling; lower learner.learning_rate.",
        ),
    ],
)
def test_a_bonus_that_is_off_or_restricted_is_not_advised_to_be_so(
    assignments: list[str], remedy: str
) -> None:
    config = config_file.load(config_file.find("quickstart"), assignments)
    looks = Doctor(config, (0.0, 1.0))
    found = [each for record in made_sick("entropy_runaway") for each in looks.step(record)]
    assert [(each.name, each.remedy) for each in found] == [("entropy_runaway", remedy)]


def returns_of(last: np.ndarray, first: float = 0.0) -> list[Record]:
    """Steps with these returns of the last of two episodes."""
    return [
        {"step": step, "return_by_episode": [first, float(each)]}
        for step, each in enumerate(last, 1)
    ]


def collapses_in(
    records: list[Record], *assignments: str, knows_bounds: bool = True
) -> list[Finding]:
    config = config_file.load(config_file.find("quickstart"), list(assignments))
    looks = Doctor(config, (-1.0, 1.0) if knows_bounds else None)
    return [each for record in records for each in looks.step(record)]


NOISES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda random: random.normal(0, 0.1, 150),
    "seldom won": lambda random: random.binomial(64, 0.03, 150) / 64,
    "nearly always won": lambda random: random.binomial(64, 0.97, 150) / 64,
    "with outliers": lambda random: 0.05 * random.standard_t(3, 150),
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_around_a_flat_or_a_rising_return_is_no_collapse(name: str) -> None:
    for seed in range(10):
        noise = NOISES[name](np.random.default_rng(seed))
        for rise in (0.0, 0.5):
            records = returns_of(noise + rise * np.linspace(0, 1, len(noise)))
            assert collapses_in(records, knows_bounds=False) == []


@pytest.mark.parametrize(("fall", "noise"), [(0.3, 0.03), (0.6, 0.1)])
def test_a_fall_of_the_return_is_found_within_ten_steps(fall: float, noise: float) -> None:
    for seed in range(10):
        last = np.clip(np.arange(120) / 40, 0, 0.9)
        last[70:] -= fall
        last += np.random.default_rng(seed).normal(0, noise, 120)
        first, *others = collapses_in(returns_of(last))
        assert (first.name, others) == ("return_collapse", [])
        assert 61 <= first.onset <= 72
        assert first.found <= 71 + SOON


def test_a_return_that_recovers_within_ten_steps_or_loses_a_tenth_has_not_collapsed() -> None:
    dip, lower = np.full(80, 0.9), np.full(80, 0.9)
    dip[:15] = lower[:15] = 0.0
    dip[40:45], lower[40:] = 0.2, 0.8
    ripple = 0.01 * (np.arange(80) % 3)
    assert collapses_in(returns_of(dip + ripple)) == collapses_in(returns_of(lower + ripple)) == []


def test_a_run_that_is_resumed_with_more_episodes_of_a_trial_is_examined() -> None:
    records = returns_of(np.full(20, 0.5))
    for record in records[5:]:
        record["return_by_episode"] = [0.0, 0.5, 0.5]
    assert collapses_in(records) == []


@pytest.mark.parametrize(
    "assignment",
    [
        "population.rivals=0.3",
        "population.matchmaker=progress",
        "admission.replaced_groups=4",
        "methods.scaling_inter.steps=5",
        "methods.both_seats.share=0.3",
    ],
)
def test_a_return_on_tasks_that_grow_harder_may_fall(assignment: str) -> None:
    last = np.repeat([0.0, 0.9, 0.2], 20) + 0.01 * (np.arange(60) % 3)
    assert [each.name for each in collapses_in(returns_of(last))] == ["return_collapse"]
    assert collapses_in(returns_of(last), assignment) == []
