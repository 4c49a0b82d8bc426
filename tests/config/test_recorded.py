"""Configurations that commit 34afa1d resolved and recorded, flat, read by this version; the warm
start of `minesweeper` is a later one.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from msgspec.structs import replace

from mage_async.config import config_file
from mage_async.config.schema import Config, digest
from mage_async.config.sections.run import Hardware
from mage_async.errors import ConfigError

FOLDER = Path(__file__).parent / "recorded"
DIFFERENCES: dict[str, dict[str, Any]] = json.loads((FOLDER / "resolved.json").read_text())
"""Shipped files, and the quickstart by method; `quickstart` whole, others where they differ."""
RUN = FOLDER / "finished.toml"


def flat(name: str) -> dict[str, Any]:
    """What commit 34afa1d made of a shipped file, every key said."""
    tree = copy.deepcopy(DIFFERENCES["quickstart"])
    for section, value in DIFFERENCES[name].items():
        if isinstance(value, dict):
            tree[section] |= value
        else:
            tree[section] = value
    return tree


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_shipped_file_resolves_to_what_it_did(name: str) -> None:
    file, _, method = name.partition(" --method ")
    today = config_file.load(config_file.find(file), method=method or None)
    today = today if today.learner.device == "cpu" else without_a_plan(today)
    recorded = config_file.loads(tomli_w.dumps(flat(name)))
    assert recorded == today
    assert digest(recorded) == digest(today)


def without_a_plan(config: Config) -> Config:
    """A file for a GPU as it was before `mage plan` made it fit."""
    earlier = {"tokens_per_pass": 0, "activation_checkpointing": False, "float32_masters": False}
    learner, policy = replace(config.learner, **earlier), replace(config.policy, dtype="float32")
    return replace(config, learner=learner, policy=policy, hardware=Hardware())


def test_every_shipped_file_was_recorded() -> None:
    folder = config_file.find(None).parent
    files = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.toml")}
    assert {name for name in DIFFERENCES if "--method" not in name} <= files


def test_an_older_run_is_read_and_recorded_again_as_today() -> None:
    run = config_file.load_recorded(RUN)
    assert (run.policy.kind, run.policy.layers, run.engine.kind) == ("tiny", 2, "embedded")
    assert run.learner.correction.kind == "decoupled"
    assert run.curriculum is None
    assert config_file.loads(config_file.dump(run)) == run


def test_an_older_run_may_be_changed_by_keys_of_both_versions(tmp_path: Path) -> None:
    older = config_file.load_recorded(RUN, ["learner.max_weight=3.0", "policy.tiny.layers=3"])
    newer = config_file.load_recorded(RUN, ["learner.correction.max_weight=3.0", "policy.layers=3"])
    assert older == newer
    assert older.learner.correction.max_weight == 3.0


def test_a_section_that_said_nothing_is_absent() -> None:
    tree = flat("quickstart")
    tree["warm_start"]["steps"] = 0
    assert config_file.loads(tomli_w.dumps(tree)).warm_start is None
    assert config_file.loads(tomli_w.dumps(tree)).curriculum is None
    assert config_file.load(config_file.find(None), ["warm_start.steps=0"]).warm_start is None


def test_constants_that_an_older_correction_did_not_look_at_are_left_out() -> None:
    tree = flat("quickstart")
    tree["learner"] |= {"correction": "age_mask", "max_age": 4, "keep_low": 0.1}
    found = config_file.loads(tomli_w.dumps(tree)).learner.correction
    assert (found.kind, found.max_age) == ("age_mask", 4)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "learner.max_age=3",
            "unknown key `learner.correction.max_age` (only with learner.correction.kind = "
            '"age_mask", which is "decoupled"; once `learner.max_age`)',
        ),
        (
            "learner.max_agee=3",
            "unknown key `learner.max_agee` (known: ",
        ),
    ],
)
def test_an_older_name_that_has_no_place_is_answered_with_the_new_one(
    setting: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.load(config_file.find(None), [setting])
    assert str(caught.value).startswith(f"--set {setting}: {said}")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[learner]\nmomentum = 0.9\n", "learner.momentum"),
        ('[engine]\nkind = "vllm"\n', "engine.kind"),
        ("[telemetry]\nport = 3\n", "telemetry"),
    ],
)
def test_a_run_of_a_newer_version_is_refused_as_one(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    said = f"{file}: a newer version of mage_async wrote it: this one has no such `{key}`"
    with pytest.raises(ConfigError, match=said):
        config_file.load_recorded(file)
    with pytest.raises(
        ConfigError, match=r"^configuration: a newer version of mage_async wrote it"
    ):
        config_file.loads(text)


def test_a_wrong_change_of_a_run_is_not_taken_for_a_newer_version() -> None:
    with pytest.raises(ConfigError, match=r"^--set learner.momentum=1: unknown key `learner.mom"):
        config_file.load_recorded(RUN, ["learner.momentum=1"])
