"""What a person is told about a configuration that cannot be run."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_async.assembly import check
from mage_async.config import config_file
from mage_async.config.configuration_page import key_names, sections
from mage_async.config.error_messages import successor
from mage_async.config.schema import FromData, Pretrained
from mage_async.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = [*sorted(FOLDER.glob("*.toml")), FOLDER / "papers" / "qwen3_4b.toml"]
"""Every complete one."""


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_is_complete_and_sound(file: Path) -> None:
    check(config_file.load(file, []))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_final_set_is_large_enough(file: Path) -> None:
    """Papers measured 128, at which most of their comparisons are within their intervals. A
    language model on cores plays two trials a second: 64 trials give its return to ± 0.06 in boxes,
    which have no chance, and to ± 0.1 in rock-paper-scissors.
    """
    least = 64 if file.stem.startswith(("smollm2_boxes", "smollm2_rps")) else 512
    assert config_file.load(file, []).evaluation.final_trials >= least


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_what_is_printed_reads_back_as_the_same_configuration(file: Path, tmp_path: Path) -> None:
    config = config_file.load(file, ["environment.options={depth = [1, 2]}"])
    copy = tmp_path / "copy.toml"
    copy.write_text(config_file.dump(config))
    assert config_file.load(copy, []) == config


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        (
            "admission.max_stalenes=1",
            "unknown key `admission.max_stalenes` (did you mean `admission.max_staleness`?)",
        ),
        ("admission.groups_per_step=0", "`admission.groups_per_step` must be at least 1, got 0"),
        ("engine.kind=vllm", "`engine.kind` must be one of 'embedded', 'sglang', got 'vllm'"),
        ("learner.steps=few", "`learner.steps` must be a whole number, got 'few'"),
        ("learner.learning_rate=few", "`learner.learning_rate` must be a number, got 'few'"),
        (
            "engine.devices=3",
            "`engine.devices` must be a list, as in --set 'engine.devices=[3]', got 3",
        ),
        (
            "policy.lora={targets=['query', 3]}",
            "`policy.lora.targets[1]` must be a text, got 3",
        ),
        ("lerner.steps=3", "unknown key `lerner` (did you mean `learner`?)"),
        ("admission.lag=257", "`admission.lag` must be at most 256, got 257"),
        ("sampling.top_p=1.5", "`sampling.top_p` must be at most 1.0, got 1.5"),
        ("learner.learning_rate=inf", "`learner.learning_rate` must be a finite number, got inf"),
        (
            "environment.options={odds=[1.0, nan]}",
            "`environment.options.odds[1]` must be a finite number, got nan",
        ),
        (
            "environment.options.days=[2024-01-01]",
            "`environment.options.days[0]` must be a number or a text, not a date or time; a text "
            'has quotes: "2024-01-01"',
        ),
        (
            "learner.checkpoint_minutes=00:10:00",
            "`learner.checkpoint_minutes` must be a number or a text, not a date or time; a text "
            'has quotes: "00:10:00"',
        ),
        (f"seed={2**63}", f"`seed` must be at most {2**63 - 1}, got {2**63}"),
        (
            f"environment.options={{low=[{-(2**63)}, {-(2**63) - 1}]}}",
            f"`environment.options.low[1]` must be at least {-(2**63)}, got {-(2**63) - 1}",
        ),
        ("learner.beta2=1.0", "`learner.beta2` must be less than 1.0, got 1.0"),
        ("sampling.temperature=0", "`sampling.temperature` must be greater than 0.0, got 0"),
    ],
)
def test_a_wrong_key_or_value_is_answered_with_what_to_write(
    assignment: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.load(config_file.find(None), [assignment])
    assert str(caught.value) == f"--set {assignment}: {sentence}"


@pytest.mark.parametrize("assignment", ["tracking.own=true", "tracking.own.experiment=mine"])
def test_a_tracker_of_ones_own_without_a_kind_is_no_tracker_of_this_package(
    assignment: str,
) -> None:
    with pytest.raises(ConfigError, match=r"`tracking\.own\.kind` must be one of 'wandb', "):
        config_file.load(config_file.find(None), [assignment])


@pytest.mark.parametrize("policy", ["policy.kind=tiny", "policy.source=model"])
def test_a_rate_or_a_bonus_that_is_set_alone_does_not_rise_to_another_end(policy: str) -> None:
    def ends(*assignments: str, file: str | None = None) -> list[float]:
        found = config_file.load(config_file.find(file), [policy, *assignments]).learner
        return [found.final_learning_rate, found.final_entropy]

    assert ends("learner.learning_rate=1e-5", "learner.entropy=0") == [1e-5, 0.0]
    by_default = ends()
    assert ends("learner.learning_rate=1", "learner.entropy=1") == by_default
    assert min(by_default) > 0.0
    assert ends("learner.entropy=0", "learner.final_entropy=0.5")[1] == 0.5
    assert ends("learner.entropy=0", file="kuhn")[1] == 0.0  # the file states its end
    assert ends(file="kuhn")[1] == 0.01


def test_a_recorded_end_is_lowered_with_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    rising = ["learner.learning_rate=1e-5", "learner.final_learning_rate=1e-3"]
    file.write_text(config_file.dump(config_file.load(config_file.find(None), rising)))
    assert config_file.load_recorded(file).learner.final_learning_rate == 1e-3
    lowered = config_file.load_recorded(file, ["learner.learning_rate=1e-6"])
    assert lowered.learner.final_learning_rate == 1e-6


@pytest.mark.parametrize("value", ["entropy_collapse", '"entropy_collapse"', "[entropy_collapse]"])
def test_a_text_instead_of_a_list_is_answered_with_the_values_and_the_list(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.load(config_file.find(None), [f"doctor.halt={value}"])
    text = str(caught.value)
    assert "`doctor.halt` must be a list of 'not_finite', " in text
    assert """--set 'doctor.halt=["entropy_collapse"]'""" in text


def test_a_wrong_item_of_a_list_names_the_assignment_and_not_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^--set doctor.halt=\['entropy'\]: `doctor.halt\[0\]`"):
        config_file.load(config_file.find(None), ["doctor.halt=['entropy']"])


def test_a_wrong_kind_of_warm_start_is_answered_with_how_to_leave_it_out() -> None:
    with pytest.raises(
        ConfigError, match=r"got 'win'; warm_start = \"none\" leaves the table out$"
    ):
        config_file.load(config_file.find(None), ["warm_start=win"])


def test_what_the_file_says_is_blamed_on_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[learner]\nstep = 3\n")
    with pytest.raises(ConfigError) as caught:
        config_file.load(file, ["learner.threads=2"])
    said = "unknown key `learner.step` (did you mean `learner.steps`?)"
    assert str(caught.value) == f"{file}: {said}"


def test_numbers_are_looked_for_however_deep_dotted_keys_are_nested(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    text = config_file.find(None).read_text() + "[environment]\noptions = {}\n"
    text = text.replace('[environment]\nname = "rps"\n', "")
    deep = f"options.{'.'.join('a' * 3000)} = "
    file.write_text(text.replace("options = {}", f"{deep}1"))
    config_file.load(file)
    file.write_text(text.replace("options = {}", f"{deep}nan"))
    with pytest.raises(ConfigError, match=r"a\.a\.a` must be a finite number, got nan"):
        config_file.load(file)


LEAVES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()


@given(st.recursive(LEAVES, lambda more: st.lists(more) | st.dictionaries(st.text(), more)))
def test_a_value_written_as_toml_reads_back(value: object) -> None:
    text = config_file.toml_text(value)
    assert "\n" not in text
    assert config_file.toml_value(text) == value


def test_a_tilde_stands_for_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/of-mine")
    keys = ("policy.source=~/model", "warm_start.kind=data", "warm_start.path=~/rows")
    config = config_file.load(config_file.find(None), [*keys, "transport.keys=~/keys"])
    assert isinstance(config.policy, Pretrained)
    assert isinstance(config.warm_start, FromData)
    paths = (config.policy.source, config.warm_start.path, config.transport.keys)
    assert paths == ("/home/of-mine/model", "/home/of-mine/rows", "/home/of-mine/keys")
    recorded = tmp_path / "config.toml"
    recorded.write_text(config_file.dump(config))
    changed = config_file.load_recorded(recorded, ["policy.source=~"])
    assert getattr(changed.policy, "source", "") == "/home/of-mine"


def test_a_tilde_before_the_name_of_nobody_stays() -> None:
    config = config_file.load(config_file.find(None), ["policy.source=~nobody-here/model"])
    assert getattr(config.policy, "source", "") == "~nobody-here/model"


def test_an_unknown_file_is_answered_with_the_shipped_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no configuration file 'quikstart'; shipped ones: .*quickstart"
    ):
        config_file.find("quikstart")
    with pytest.raises(ConfigError, match=r"no configuration file 'aaa"):
        config_file.find(256 * "a")


def test_too_few_contexts_for_a_group_are_refused() -> None:
    config = config_file.load(config_file.find(None), ["engine.max_contexts=7"])
    with pytest.raises(ConfigError, match=r"engine.max_contexts must be at least .* = 8, got 7"):
        check(config)


@pytest.mark.parametrize("change", ["engine.max_tokens=10", "engine.max_tokens=97"])
def test_an_engine_without_room_for_a_trial_is_refused(change: str) -> None:
    config = config_file.load(config_file.find(None), [change])
    with pytest.raises(ConfigError, match=r"engine.max_tokens must be at least 98.*of 3 episodes"):
        check(config)


def test_the_room_wanted_is_that_of_the_horizon_in_which_training_ends() -> None:
    changes = ["engine.max_tokens=20", "methods.scaling_inter.turns=[1, 2]", "learner.steps=20"]
    check(config_file.load(config_file.find(None), [*changes, "trial.episodes=1"]))


def test_remarks_need_the_room_of_those_they_are_cloned_from() -> None:
    planning = ["trial.strategy=turn"]
    with pytest.raises(ConfigError, match=r"engine.max_tokens must be at least 190"):
        check(config_file.load(config_file.find(None), planning))
    check(config_file.load(config_file.find(None), [*planning, "warm_start=none"]))


@pytest.mark.parametrize(
    "assignment",
    ['advantage.baseline=["kind", "episode", "index"]', "methods.metacure.information_bonus=0.2"],
)
def test_groups_of_equal_rewards_are_not_replaced_where_they_teach(assignment: str) -> None:
    replaced = ["admission.replaced_groups=4"]
    check(config_file.load(config_file.find(None), replaced))
    with pytest.raises(ConfigError, match=r"admission.replaced_groups must be 0 with"):
        check(config_file.load(config_file.find(None), [*replaced, assignment]))
    grid = [*replaced, "environment.name=grid", "warm_start=none"]
    with pytest.raises(ConfigError, match=r"must be 0 with methods.sac_glam, which learns from"):
        check(config_file.load(config_file.find(None), grid, "sac_glam"))


def test_groups_of_one_trial_are_refused_where_there_is_training() -> None:
    alone = ["admission.trials_per_group=1"]
    with pytest.raises(ConfigError, match=r"admission.trials_per_group must be at least 2 with"):
        check(config_file.load(config_file.find(None), alone))
    check(config_file.load(config_file.find(None), [*alone, "learner.steps=0"]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["transport.weights=nccl", "admission.lag=1"], "sends the newest weights only"),
        (["transport.weights=nccl", "transport.keys=keys"], "engines of this machine only"),
        (["transport.weights=nccl", "learner.device=cuda:0"], "needs engines on GPUs"),
        (
            ["transport.weights=nccl", "learner.device=cuda:1", "engine.kind=sglang"],
            "NCCL cannot send from GPU 1 to itself",
        ),
    ],
)
def test_what_cannot_be_sent_is_said_before_anything_starts(
    changes: list[str], sentence: str
) -> None:
    config = config_file.load(config_file.find(None), changes)
    with pytest.raises(ConfigError, match=sentence):
        check(config)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("learner.tokens_per_pass", "it is `learner.max_tokens_per_microbatch` now"),
        ("admission.max_drops_in_a_row", "it was removed; leave it out: 50 groups"),
        ("trial.turn_budget", "it is `trial.episode_budget` now"),
        ("methods.graph_memory.initial", "it was removed; set `methods.graph_memory.rate`"),
    ],
)
def test_an_error_says_what_became_of_an_old_key(key: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown key `{key}` ({sentence}")):
        config_file.load(config_file.find(None), [f"{key}=1"])


def test_an_error_names_the_keys_of_win_stay() -> None:
    sentence = re.escape("unknown key `warm_start.gate` (it is `warm_start.repeat_gate` now")
    with pytest.raises(ConfigError, match=sentence):
        config_file.load(config_file.find(None), ["warm_start=win_stay", "warm_start.gate=1"])


SHIPPED_KEYS = Path(__file__).parent / "keys_before_release.txt"
"""Keys of the files and documents that were shipped before keys were renamed."""


def test_every_key_that_was_shipped_is_known_or_named_anew() -> None:
    every = sections()
    known = {*key_names(every), *(each.path for each in every)}
    for key in SHIPPED_KEYS.read_text().split():
        table = key.rpartition(".")[0]
        if key in known or table in ("engine.server", "environment.options"):  # free tables
            continue
        sentence = successor(key)
        assert sentence, key
        if named := re.match("it is `(.+)` now", sentence):
            assert named[1] in known, key
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            sections(key)
        with pytest.raises(ConfigError, match=r"\((it is `.+` now|it was removed; .+)\)"):
            config_file.load(config_file.find(None), [f"{key}=1"])


@pytest.mark.parametrize(
    ("assignments", "num_episodes"),
    [
        (["trial.episodes=2"], 2),
        (["trial.episodes=2", "evaluation.episodes=4"], 4),
        (["trial.episodes=1"], 3),  # training on single episodes is the control
    ],
)
def test_a_run_is_evaluated_on_as_many_episodes_as_a_trial_has(assignments, num_episodes):
    config = config_file.load(config_file.find(None), assignments)
    assert config.evaluation.episodes == num_episodes


def test_a_file_may_begin_with_a_bom(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_bytes(b"\xef\xbb\xbf[learner]\nsteps = 3\n")
    assert config_file.load(file).learner.steps == 3
