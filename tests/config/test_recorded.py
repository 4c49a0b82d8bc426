"""A run's recorded configuration that this version cannot read."""

from pathlib import Path

import pytest

from mage_async.config import config_file
from mage_async.errors import ConfigError


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


def test_a_run_of_an_older_version_is_refused_by_what_became_of_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^configuration: .*it is `trial.episode_budget` now"):
        config_file.loads("[trial]\nturn_budget = 0\n")


def test_a_wrong_change_of_a_run_is_not_taken_for_a_newer_version(tmp_path: Path) -> None:
    run = tmp_path / "config.toml"
    run.write_text(config_file.dump(config_file.load(config_file.find(None))))
    with pytest.raises(ConfigError, match=r"^--set learner.momentum=1: unknown key `learner.mom"):
        config_file.load_recorded(run, ["learner.momentum=1"])
