"""The published methods as sets of keys."""

import pytest

from mage_async.assembly import check
from mage_async.config import config_file, methods


def configured(method, name="kuhn", **changes):
    settings = [f'environment.name="{name}"']
    settings += [f"{key}={value}" for key, value in changes.items()]
    return config_file.load(config_file.find(None), settings, method)


@pytest.mark.parametrize("name", ["rps", "kuhn", "tictactoe"])
@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_is_a_valid_configuration_of_every_environment(method, name):
    if (method, name) == ("metacure", "tictactoe"):
        pytest.skip("tictactoe has no Bayes filter")
    room = {"engine.max_tokens": 256}  # for a strategy before each action
    check(configured(method, name, **room))


def test_the_codes_differ_only_in_what_an_episode_is_paid():
    mage, lamer = configured("mage_code"), configured("lamer_code")
    assert (mage.credit.kind, lamer.credit.kind) == ("differential", "cumulative_code")
    assert (mage.advantage, mage.learner, mage.trial) == (
        *(lamer.advantage, lamer.learner, lamer.trial),
    )


@pytest.mark.parametrize("who", ["mage", "lamer"])
def test_the_papers_repair_what_the_codes_do(who):
    coded, repaired = configured(f"{who}_code").advantage, configured(f"{who}_paper").advantage
    assert (coded.baseline, coded.weight, coded.penalise) == (["group"], "sample", "score")
    assert set(repaired.baseline) >= {"seat", "kind", "member"}
    assert (repaired.weight, repaired.penalise) == ("trial", "return")


@pytest.mark.parametrize("method", ["grpo", "gigpo", "rloo", "retry"])
def test_a_baseline_trains_on_one_episode_and_is_evaluated_on_as_many_as_the_others(method):
    config = configured(method)
    assert config.trial.episodes == 1
    assert config.evaluation.episodes == 3


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("scaling_inter", {"curriculum"}),
        ("sge", {"trial", "sampling"}),
        ("rema", {"trial", "advantage"}),
        ("metacure", {"credit"}),
    ],
)
def test_a_method_that_changes_one_thing_leaves_all_else_as_it_is(method, changed):
    plain = config_file.load(config_file.find("kuhn"), [])
    found = config_file.load(config_file.find("kuhn"), method=method)
    names = {name for name in plain.__struct_fields__}
    assert {name for name in names if getattr(plain, name) != getattr(found, name)} == changed


def test_what_is_set_after_a_method_wins():
    settings = ["credit.episode_discount=1.0"]
    config = config_file.load(config_file.find(None), settings, "mage_code")
    assert config.credit.episode_discount == 1.0


def test_untrained_baselines_differ_in_their_memory_alone():
    shown = {name: configured(name) for name in ("zero_shot", "react", "reflexion")}
    assert {config.learner.steps for config in shown.values()} == {0}
    memories = {name: config.trial.memory for name, config in shown.items()}
    assert memories == {"zero_shot": "none", "react": "history", "reflexion": "reflection"}
