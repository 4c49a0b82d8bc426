"""The published methods as sets of keys."""

import pytest

from mage_async.assembly import check
from mage_async.config import config_file, presets
from mage_async.config.schema import digest
from mage_async.errors import ConfigError
from mage_async.methods.catalogue import METHODS
from mage_async.methods.method import Methods


def configured(method, name="kuhn", **changes):
    settings = [f'environment.name="{name}"']
    settings += [f"{key}={value}" for key, value in changes.items()]
    return config_file.load(config_file.find(None), settings, method)


@pytest.mark.parametrize("name", ["rps", "kuhn", "tictactoe"])
@pytest.mark.parametrize("method", presets.presets())
def test_every_method_is_a_valid_configuration_of_every_environment(method, name):
    if method in ("information_bonus", "metacure") and name == "tictactoe":
        pytest.skip("tictactoe has no Bayes filter")
    changes = {"engine.max_tokens": 256}  # for a strategy before each action
    if method == "scaling_inter":  # whose stages are made for longer episodes
        changes["methods.scaling_inter.turns"] = [2, 4]
    check(configured(method, name, **changes))


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
        ("scaling_inter", {"methods"}),
        ("sge", {"methods", "trial", "sampling"}),
        ("rema", {"methods", "trial", "credit", "advantage", "learner"}),
        ("information_bonus", {"methods"}),
        ("metacure", {"methods", "policy", "advantage", "credit"}),
        ("graph_memory", {"methods", "advantage"}),
        ("both_seats", {"methods", "advantage"}),
        ("mage_population", {"methods", "population", "advantage"}),
    ],
)
def test_a_method_that_changes_one_thing_leaves_all_else_as_it_is(method, changed):
    plain = config_file.load(config_file.find("kuhn"), [])
    found = config_file.load(config_file.find("kuhn"), method=method)
    names = {name for name in plain.__struct_fields__}
    assert {name for name in names if getattr(plain, name) != getattr(found, name)} == changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("learner.correction=ppo", 'learner.correction must be "none", got "ppo"'),
        ("sampling.restricted=false", "sampling.restricted must be true, got false"),
        ("trial.memory=reflection", 'trial.memory must be "none" or "history", got "reflection"'),
        ("methods.scaling_inter.turns=[1]", "does not work together with methods.scaling_inter"),
        ("credit.kind=final_only", 'must be "single_episode" or "cumulative_code"'),
        ("trial.repeats=fresh", 'trial.repeats must be "same", got "fresh"'),
    ],
)
def test_soft_actor_critic_refuses_what_it_would_ignore(change, said):
    config = config_file.load(config_file.find(None), ["environment.name=grid", change], "sac_glam")
    with pytest.raises(ConfigError, match=f"^methods.sac_glam: .*{said}"):
        check(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["policy.lora=none"], r"policy\.lora is absent: set policy\.lora\.rank = 16"),
        (["engine.kind=sglang"], r'SGLang cannot .*: set engine\.kind = "embedded"'),
        (["trial.episodes=1"], r"nothing before its last: set trial\.episodes to at least 2"),
        (
            ["population.rivals=0.2", "methods.metacure.information_bonus=0"],
            r"has one role: set population\.rivals = 0",
        ),
        (["transport.weights=nccl"], r'not been tried .*: set transport\.weights = "disk"'),
    ],
)
def test_two_roles_refuse_what_would_compute_with_one(changes, said):
    config = config_file.load(config_file.find(None), changes, "metacure")
    with pytest.raises(ConfigError, match=rf"^methods\.metacure\.separate_roles: .*{said}"):
        Methods(config).check()


def test_a_bonus_for_what_later_episodes_use_needs_later_episodes():
    with pytest.raises(
        ConfigError, match=r"^methods\.metacure\.information_bonus: .*of one episode"
    ):
        check(configured("information_bonus", **{"trial.episodes": 1}))


@pytest.mark.parametrize("method", ["graph_memory", "both_seats", "mage_population"])
def test_presets_that_divide_a_group_have_enough_trials_with_a_pretrained_policy_on_cores(method):
    check(config_file.load(config_file.find(None), ["policy.source=models/mine"], method))


@pytest.mark.parametrize(("trials", "guided"), [(2, 0.5), (3, 0.5), (8, 0.1)])
def test_guided_trials_and_the_others_of_a_group_are_two_at_least_where_each_has_a_baseline(
    trials, guided
):
    changes = {"admission.trials_per_group": trials, "methods.graph_memory.guided": guided}
    with pytest.raises(ConfigError, match="a trial that is alone would never be trained"):
        check(configured("graph_memory", **changes))
    shared = {"advantage.baseline": ["group", "kind", "episode", "index"]}
    check(configured("graph_memory", **changes, **shared))
    check(configured("graph_memory", **{"admission.trials_per_group": 4}))


@pytest.mark.parametrize(
    ("name", "said"),
    [("shop", "'shop' does not list them"), ("sokoban", None), ("boxes", None)],
)
def test_soft_actor_critic_scores_listed_actions(name, said):
    config = configured("sac_glam", name, **{"engine.max_tokens": 4096})
    if said is None:
        return check(config)
    with pytest.raises(
        ConfigError, match=f"^methods.sac_glam scores all legal actions, and {said}"
    ):
        Methods(config).check()


def test_an_unknown_method_is_refused_with_all_names_that_are_accepted():
    with pytest.raises(
        ConfigError, match=r"no 'mage-paper' \(did you mean `mage_paper`\?\)"
    ) as refusal:
        presets.keys_of_method("mage-paper")
    for name in {*presets.presets(), *METHODS}:
        assert str(refusal.value).count(f" {name},") == 1
        presets.keys_of_method(name)


def test_peers_compare_all_sections_but_those_in_which_they_may_differ():
    config = config_file.load(config_file.find(None))
    for same in ("doctor.halt=['not_finite']", "tracking.wait_s=3"):
        assert digest(config_file.load(config_file.find(None), [same])) == digest(config)
    for other in ("seed=1", "methods.sac_glam.hindsight=0", "credit.turn_discount=0.5"):
        assert digest(config_file.load(config_file.find(None), [other])) != digest(config)


def test_what_is_set_after_a_method_wins():
    settings = ["credit.episode_discount=1.0"]
    config = config_file.load(config_file.find(None), settings, "mage_code")
    assert config.credit.episode_discount == 1.0


def test_untrained_baselines_differ_in_their_memory_alone():
    shown = {name: configured(name) for name in ("zero_shot", "react", "reflexion")}
    assert {config.learner.steps for config in shown.values()} == {0}
    memories = {name: config.trial.memory for name, config in shown.items()}
    assert memories == {"zero_shot": "none", "react": "history", "reflexion": "reflection"}


@pytest.mark.parametrize(
    ("file", "method", "discount", "said"),
    [
        ("papers/lamer_sokoban", "lamer_code", 0.9, ""),
        ("papers/lamer_minesweeper", "mage_code", 0.6, ""),
        ("papers/lamer_minesweeper", "lamer_paper", 0.9, "= 0.9 instead of the file's 0.6"),
        ("papers/lamer_sokoban", "lamer_paper", 0.6, "= 0.6 instead of the file's 0.9"),
        ("papers/mage_sokoban", "mage_paper", 0.6, "= 0.6 instead of the file's 0.9"),
        ("quickstart", "lamer_code", 0.6, ""),
    ],
)
def test_a_preset_keeps_the_discount_of_a_file_or_says_that_it_does_not(
    file, method, discount, said
):
    path = config_file.find(file)
    assert config_file.load(path, (), method).credit.episode_discount == discount
    note = config_file.note_on_preset(path, (), method)
    assert said in note
    assert bool(said) == bool(note)
    asked = ["credit.episode_discount=0.7"]
    assert config_file.load(path, asked, method).credit.episode_discount == 0.7
    assert not config_file.note_on_preset(path, asked, method)
    # A credit without this discount has none to keep.
    assert not config_file.note_on_preset(path, ["credit.kind=single_episode"], method)


@pytest.mark.parametrize("method", ["grpo", "gigpo", "mage_code", "lamer_paper"])
def test_a_preset_of_a_synchronous_algorithm_says_that_its_tokens_are_stale(method):
    def note(file, *asked):
        loaded = config_file.load(config_file.find(file), asked, method)
        return config_file.note_on_staleness(loaded, method)

    assert f"--method {method}: stale tokens are trained on" in note("quickstart")
    assert "admission.rule=sync" in note("quickstart", "admission.rule=unbounded")
    assert not note("quickstart", "admission.rule=sync")
    assert not note("quickstart", "learner.correction=decoupled")
    assert not note("papers/lamer_sokoban")


@pytest.mark.parametrize("method", [None, "rema", "sac_glam", "react"])
def test_other_presets_say_nothing_of_staleness(method):
    assert not config_file.note_on_staleness(configured(method), method)


def test_the_papers_carry_histories_and_reflections_and_the_codes_reflections_alone():
    for who in ("mage", "lamer"):
        assert configured(f"{who}_paper").trial.memory == "history_and_reflection"
        assert configured(f"{who}_code").trial.memory == "reflection"


def test_a_mixed_group_is_refused_where_members_are_rated_or_a_mix_is_played():
    with pytest.raises(
        ConfigError, match=r"population\.mixed_groups: .* set population\.rivals = 0"
    ):
        check(configured(None, **{"population.mixed_groups": "true", "population.rivals": 0.2}))
    mixed = {"population.mixed_groups": "true"}
    parts = {"environment.options.parts": '[{name="rps"}, {name="kuhn"}]'}
    with pytest.raises(ConfigError, match="mix is a mix: train on one environment"):
        check(configured(None, "mix", **mixed, **parts))
    check(configured(None, **mixed))
