"""Tables that come in kinds: how a kind is chosen, and what is said of a key of another."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mage_async.assembly import check
from mage_async.config import config_file, defaults
from mage_async.config.schema import AnyCorrection, Config, Embedded, Lora, Pretrained, Sglang, Tiny
from mage_async.config.tables import kinds
from mage_async.errors import ConfigError

CORRECTIONS = kinds(AnyCorrection)


@pytest.fixture(autouse=True, scope="module")
def without_bfloat16() -> Iterator[None]:
    """Defaults of a processor that multiplies in float32 alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "_multiplies_bfloat16", lambda: False)
        yield


def quickstart(*settings: str) -> Config:
    return config_file.load(config_file.find(None), settings)


def mine(folder: Path, text: str, *settings: str) -> Config:
    file = folder / "mine.toml"
    file.write_text(text)
    return config_file.load(file, settings)


@given(
    kind=st.sampled_from(sorted(CORRECTIONS)),
    engine=st.sampled_from(["embedded", "sglang"]),
    policy=st.sampled_from(["tiny", "pretrained"]),
    absent=st.sets(st.sampled_from(["warm_start", "methods.scaling_inter"])),
)
def test_every_combination_of_kinds_is_read_back_as_written(
    kind: str, engine: str, policy: str, absent: set[str]
) -> None:
    changes = [f"learner.correction={kind}", f"engine.kind={engine}", f"policy.kind={policy}"]
    changes += ["methods.scaling_inter.turns=[1, 2]", *(f"{name}=none" for name in absent)]
    config = quickstart(*changes)
    assert config_file.loads(config_file.dump(config)) == config
    assert (config.learner.correction.kind, config.engine.kind, config.policy.kind) == (
        *(kind, engine, policy),
    )
    assert ("scaling_inter" not in config.methods) == ("methods.scaling_inter" in absent)


def test_a_source_alone_is_a_pretrained_policy_with_its_own_defaults() -> None:
    tiny, config = quickstart(), quickstart("policy.source=models/mine", "environment.name=rps")
    assert isinstance(tiny.policy, Tiny)
    assert config.policy == Pretrained(source="models/mine", lora=Lora())
    assert config.warm_start is None
    assert config.transcript.rules
    assert config.transcript.max_action_tokens > 1
    assert config.learner.learning_rate < 1e-3
    assert config.engine.max_tokens > 1000
    assert config.trial == tiny.trial
    check(config)


def test_all_weights_of_a_small_local_model_are_trained(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    source = f"policy.source={tmp_path}"
    assert quickstart(source).policy == Pretrained(source=str(tmp_path))
    assert quickstart(source, "policy.lora.rank=8").policy.lora == Lora(rank=8)  # type: ignore[union-attr]
    os.truncate(tmp_path / "model.safetensors", 20_000_001)
    assert quickstart(source).policy.lora == Lora()  # type: ignore[union-attr]


def test_a_source_in_a_file_is_a_pretrained_policy(tmp_path: Path) -> None:
    config = mine(tmp_path, '[policy]\nsource = "models/mine"\nlora = "none"\n')
    assert config.policy == Pretrained(source="models/mine")


def test_a_file_that_says_nothing_is_a_run_of_a_pretrained_policy(tmp_path: Path) -> None:
    assert mine(tmp_path, "").policy == Pretrained(lora=Lora())
    assert mine(tmp_path, '[engine]\nkind = "sglang"\n') == Config(engine=Sglang())


@pytest.mark.parametrize(
    ("name", "credit", "room", "scale"),
    [
        ("rps", "final_only", 160, "member"),
        ("guess:Guess", "cumulative_paper", 2048, "component"),
        ("gymnasium:X", "cumulative_paper", 2048, "component"),
    ],
)
def test_the_tiny_policy_is_paid_for_all_episodes_of_a_class_that_is_not_ours_and_has_more_room(
    name: str, credit: str, room: int, scale: str
) -> None:
    config = quickstart(f"environment.name={name}")
    assert (config.credit.kind, config.engine.max_tokens) == (credit, room)
    assert config.advantage.scale == [scale]
    stated = quickstart(f"environment.name={name}", "credit.kind=final_only")
    assert stated.credit.kind == "final_only"


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        (["environment.name=agent:own:run"], 128),
        (["environment.name=agent:url"], 128),
        (["environment.name=verifiers:gsm8k"], 128),
        (["environment.name=mix", 'environment.options.parts=[{name="agent:own:run"}]'], 128),
        (["environment.name=own:Class"], 8),
        (["environment.name=tests.environments.boxes:Boxes"], 128),
        (["environment.name=agent:own:run", "engine.kind=sglang"], 64),
    ],
)
def test_a_call_of_a_tool_fits_into_an_answer_of_a_program_or_a_class(
    keys: list[str], most: int
) -> None:
    config = quickstart("policy.source=models/mine", *keys)
    assert config.transcript.max_action_tokens == most


class AnyText:
    """Any text is an action."""

    def reset(self, seed: int, task: int) -> str:
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "end", 0.0, True


class ListedLater(AnyText):
    """A method sets the legal actions."""

    def reset(self, seed: int, task: int) -> str:
        self.legal_actions = ("left", "right")
        return "begin"


class Patterned(AnyText):
    """A pattern restricts the actions."""

    legal_pattern = "offer [1-9]"


@pytest.mark.parametrize(("kind", "most"), [(AnyText, 24), (ListedLater, 8), (Patterned, 8)])
def test_free_text_gets_room_for_a_sentence(kind: type, most: int) -> None:
    name = f"environment.name={kind.__module__}:{kind.__qualname__}"
    config = quickstart("policy.source=models/mine", name)
    assert config.transcript.max_action_tokens == most


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("agent:own:run", "restricted"),
        ("tests.environments.boxes:Boxes", "restricted"),
        (f"{__name__}:AnyText", "restricted"),
        ("rps", "restricted"),
        ("agent:own:run learner.device=cuda:0", "all"),
    ],
)
def test_on_cores_a_pretrained_model_gets_no_entropy_bonus_for_free_text(
    name: str, tokens: str
) -> None:
    keys = f"environment.name={name}".split()
    config = quickstart("policy.source=models/mine", *keys)
    assert config.learner.entropy_tokens == tokens
    assert quickstart("environment.name=rps").learner.entropy_tokens == "all"


def test_a_dataset_and_a_mix_with_a_class_of_free_text_have_room_for_a_sentence_too() -> None:
    given = ["policy.source=models/mine", "environment.name=reasoning-gym:chain_sum"]
    assert quickstart(*given).transcript.max_action_tokens == 24
    name = f"{AnyText.__module__}:{AnyText.__qualname__}"
    parts = f'environment.options.parts=[{{name="agent:own:run"}}, {{name="{name}"}}]'
    mixed = quickstart("policy.source=models/mine", "environment.name=mix", parts)
    assert (mixed.learner.entropy_tokens, mixed.transcript.max_action_tokens) == ("restricted", 128)


@pytest.mark.parametrize(("second", "room"), [("boxes", 160), ("guess:Guess", 2048)])
def test_a_mix_with_one_class_that_is_not_ours_has_the_defaults_of_such_a_class(
    second: str, room: int
) -> None:
    parts = f'environment.options.parts=[{{name="rps"}}, {{name="{second}"}}]'
    config = quickstart("environment.name=mix", parts)
    assert config.engine.max_tokens == room
    assert config.credit.kind == ("final_only" if room == 160 else "cumulative_paper")


def test_a_pretrained_policy_on_cores_has_defaults_that_fit_two_of_them(tmp_path: Path) -> None:
    config, on_gpu = mine(tmp_path, ""), mine(tmp_path, "", "learner.device=cuda:0")
    assert 0 < config.engine.max_tokens <= config.learner.max_tokens_per_microbatch
    # A pass of SmolLM2 keeps 3.9 GB of so many tokens in float32, and half of it in bfloat16.
    assert config.learner.max_tokens_per_microbatch <= 2048
    assert config.learner.shared_opening
    learner = replace(
        Config().learner, device="cuda:0", matmul_precision="high", float32_masters=True
    )
    assert on_gpu == replace(Config(), policy=Pretrained(dtype="bfloat16"), learner=learner)
    own = mine(tmp_path, "", "learner.device=cuda:0", "environment.name=guess:Guess")
    assert own.advantage.scale == ["component"]
    assert own.advantage.epsilon_unit == "range"
    adapted = mine(tmp_path, "", "learner.device=cuda:0", "policy.lora.rank=8")
    assert not adapted.learner.float32_masters
    check(adapted)
    assert config_file.load_recorded(tmp_path / "mine.toml") == Config()


@pytest.mark.parametrize(("lora", "dtype"), [("{ rank = 8 }", "bfloat16"), ("none", "float32")])
def test_a_processor_that_has_bfloat16_multiplies_in_it_but_for_weights_that_are_trained(
    lora: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "_multiplies_bfloat16", lambda: True)
    config = mine(tmp_path, "", f"policy.lora={lora}")
    assert (config.policy.dtype, config.engine.arithmetic) == (dtype, "bfloat16")  # type: ignore[union-attr]
    assert quickstart().policy.dtype == "float32"


def test_the_steps_of_a_file_are_those_of_its_own_environment(tmp_path: Path) -> None:
    assert quickstart("environment.name=rps").learner.steps == 60
    assert mine(tmp_path, "[learner]\nsteps = 7\n", "environment.name=rps").learner.steps == 7
    assert quickstart("environment.name=boxes").learner.steps == 200
    assert quickstart("learner.steps=7", "environment.name=boxes").learner.steps == 7


def test_a_warm_start_that_the_file_says_of_its_policy_goes_with_it() -> None:
    kuhn = config_file.find("kuhn")
    assert config_file.load(kuhn).warm_start is not None
    assert config_file.load(kuhn, ["policy.source=models/mine"]).warm_start is None
    asked = ["warm_start.steps=9", "policy.source=models/mine"]
    found = config_file.load(kuhn, asked).warm_start
    assert found is not None
    assert found.steps == 9


@pytest.mark.parametrize("spelling", ["icepop", '{kind = "icepop"}'])
def test_a_kind_alone_stands_for_its_table(spelling: str, tmp_path: Path) -> None:
    assert quickstart(f"learner.correction={spelling}").learner.correction.kind == "icepop"
    value = spelling if spelling[0] == "{" else f'"{spelling}"'
    found = mine(tmp_path, f"[learner]\ncorrection = {value}\n").learner.correction
    assert found == CORRECTIONS["icepop"]()


@pytest.mark.parametrize("setting", ["icepop", "mis_token", "tis"])
def test_a_changed_kind_keeps_what_both_kinds_have_and_drops_the_rest(
    setting: str, tmp_path: Path
) -> None:
    text = '[learner]\ncorrection = { kind = "age_mask", max_weight = 3.0, max_age = 4 }\n'
    for way in (f"learner.correction={setting}", f"learner.correction.kind={setting}"):
        found = mine(tmp_path, text, way).learner.correction
        own = {"max_weight": 3.0} if setting != "icepop" else {}
        assert found == CORRECTIONS[setting](**own)


def test_a_changed_engine_drops_the_other_engines_keys(tmp_path: Path) -> None:
    text = '[engine]\nthreads = 2\narithmetic = "exact"\n'
    assert mine(tmp_path, text, "engine.kind=sglang").engine == Sglang(threads=2)
    stated = ("engine.max_contexts=32", "engine.max_tokens=8192", "engine.turn_deadline_s=300")
    found = mine(tmp_path, text, *stated)
    assert found.engine == Embedded(threads=2, arithmetic="exact", cache_rule="keep")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_key_of_another_kind_that_was_asked_for_is_an_error(order: tuple[int, int]) -> None:
    asked = ["engine.arithmetic=exact", "engine.kind=sglang"]
    with pytest.raises(ConfigError) as caught:
        quickstart(*(asked[place] for place in order))
    assert str(caught.value) == (
        "--set engine.arithmetic=exact: unknown key `engine.arithmetic` "
        '(only with engine.kind = "embedded", which is "sglang")'
    )


def test_a_key_of_another_kind_in_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        mine(tmp_path, '[engine]\nkind = "sglang"\narithmetic = "exact"\n')
    assert str(caught.value).startswith(
        f"{tmp_path}/mine.toml: unknown key `engine.arithmetic` (on"
    )


def test_a_method_counts_as_the_files_own_word() -> None:
    file = config_file.find(None)
    found = config_file.load(file, ["learner.correction=cispo"], "mage_code").learner.correction
    assert found == CORRECTIONS["cispo"](clip_low=0.2, clip_high=0.2)


def test_a_control_may_leave_out_what_its_base_has(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[warm_start]\nsteps = 3\n")
    assert mine(tmp_path, 'base = "base.toml"\n').warm_start is not None
    assert mine(tmp_path, 'base = "base.toml"\nwarm_start = "none"\n').warm_start is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learner.correction=prayer", "`learner.correction.kind` must be one of 'none', 'ppo', "),
        ("learner.correction.clip_lo=1", "unknown key `learner.correction.clip_lo` (did you mean "),
        ("policy.heads=0", "`policy.heads` must be at least 1, got 0"),
        ("warm_start=3", "`warm_start` must be a table, or 'none', got 3"),
        (
            "tracking.wandb=mine",
            "`tracking.wandb` must be a table (project), or 'none', got 'mine'",
        ),
        ("engine=3", "`engine` must be a table, got 3"),
        ("seed.x=3", "`seed` is a value, not a table"),
        (
            "methods.scaling_inter.turnz=[1]",
            "unknown key `methods.scaling_inter.turnz` (did you mean `methods.scaling_inter.turns",
        ),
        ("methods.typo.x=1", "no method 'typo'"),
    ],
)
def test_what_is_wrong_is_said_of_the_assignment(setting: str, said: str, tmp_path: Path) -> None:
    later = "methods.scaling_inter.steps=80"  # is right
    with pytest.raises(ConfigError) as caught:
        mine(tmp_path, 'seed = 1\n[policy]\nkind = "tiny"\n', setting, later)
    assert str(caught.value).startswith(f"--set {setting}: {said}")


def test_a_value_where_a_preset_writes_a_table_is_said_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("learner = 3\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: `learner` is a value, not a table$"):
        config_file.load(tmp_path / "mine.toml", (), "lamer_paper")


def test_a_wrong_method_of_a_file_is_said_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^[^-].*\.toml: no method 'typo'"):
        mine(tmp_path, "[methods.typo]\n", "methods.scaling_inter.steps=80")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learner.correction.dual_clip=0.5", "learner.correction.dual_clip must be above 1, or 0"),
        (
            "policy.heads=3",
            r"policy: hidden_size must be a multiple of 2 \* heads, and heads of kv_",
        ),
        # A head of 15 numbers has no pairs for the rotary embedding.
        ("policy.hidden_size=60", r"a multiple of 2 \* heads, and heads of kv_heads; got 60, 4, 2"),
    ],
)
def test_what_types_cannot_say_of_one_section_is_checked(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(quickstart(setting))


def test_a_warm_start_stays_where_the_kind_of_policy_does(tmp_path: Path) -> None:
    text = "[warm_start]\nsteps = 3\n"
    assert mine(tmp_path, text, "policy.source=models/mine").warm_start is not None
    assert mine(tmp_path, text, "policy.kind=tiny").warm_start == quickstart().warm_start


KEYS = st.sampled_from(["kind", "steps", "source", "tiny", "correction", "max_age", "heads", "x"])
VALUES = st.recursive(
    st.one_of(st.sampled_from(["tiny", "sglang", "icepop", "none", "x"]), st.integers(-1, 3)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
SECTIONS = st.sampled_from(["seed", "policy", "engine", "learner", "warm_start", "methods"])


@given(
    tree=st.dictionaries(SECTIONS, VALUES | st.dictionaries(KEYS, VALUES, max_size=4)),
    changes=st.lists(st.tuples(SECTIONS, KEYS, VALUES), max_size=3),
    method=st.sampled_from([None, "mage_code", "zero_shot", "scaling_inter"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_a_file_is_read_or_refused_in_words(
    tree: dict[str, Any],
    changes: list[tuple[str, str, Any]],
    method: str | None,
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(tomli_w.dumps(tree))
    literals = [tomli_w.dumps({"v": value}) for *_, value in changes]
    assignments = [
        f"{section}.{key}={text.removeprefix('v = ').strip()}"
        for (section, key, _), text in zip(changes, literals, strict=True)
        if text.startswith("v = ")
    ]
    with contextlib.suppress(ConfigError):
        config = config_file.load(file, assignments, method)
        assert config_file.loads(config_file.dump(config)) == config
