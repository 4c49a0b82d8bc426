"""The folder and the card with which a run is published."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import HfApi

from mage_async.config import config_file
from mage_async.config.schema import Config, Pretrained
from mage_async.errors import RunError
from mage_async.inference.chat_files import load_chat
from mage_async.pages.report import verdict
from mage_async.results.run_directory import RunDirectory
from mage_services.api import hub
from tests.helpers.pages import python_blocks
from tests.helpers.random_models import save_text_model
from tests.helpers.recorded_runs import unpack


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return unpack("finished", tmp_path)


def begun_from(run: RunDirectory, source: str, base: Path) -> Config:
    """Let a recorded run look like one that began from a pretrained model in the folder `base`."""
    run.policy.rename(run.policy.with_name("initial"))
    base.mkdir(parents=True)
    for file in run.policy.with_name("initial").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    run.policy.symlink_to(base)
    config = config_file.load_recorded(run.config, imports=False)
    policy = Pretrained(source=source)
    config = msgspec.structs.replace(config, policy=policy, warm_start=None)
    run.config.write_text(config_file.dump(config))
    return config


def published(run: RunDirectory, folder: Path) -> tuple[str, str]:
    """Return the card, and the published configuration."""
    hub.write_folder(run, folder)
    return (folder / "README.md").read_text(), (folder / "config.toml").read_text()


def test_a_model_of_random_weights_has_no_base_whose_licence_is_unknown(
    run: RunDirectory, tmp_path: Path
) -> None:
    card, config = published(run, tmp_path / "out")
    assert "It began with random weights" in card
    assert ", from seed 0; before that a warm start, `auto`, by behaviour cloning.\n" in card
    assert "base model" not in card
    assert "trials; staleness at most " in card
    assert config == run.config.read_text()
    (code,) = python_blocks(tmp_path / "out" / "README.md")
    loaded: dict[str, Any] = {}
    exec(code.replace("PLACE", str(tmp_path / "out")), loaded)
    assert loaded["model"].config.vocab_size >= len(loaded["tokenizer"]) > 10


def test_a_published_model_names_the_token_with_which_its_template_ends_a_turn(
    run: RunDirectory, tmp_path: Path
) -> None:
    config = config_file.load_recorded(run.config)
    model, _ = hub.chosen_policy(run, config, "newest")
    end = load_chat(save_text_model(model)).end_token
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    # As those of Qwen2.5's base models, whose template writes another token than they name.
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 20}')
    published(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [0, end], "top_k": 20}


def test_a_card_claims_adaptation_only_where_the_controls_show_it(
    run: RunDirectory, tmp_path: Path
) -> None:
    scores = json.loads(run.summary.read_text())["evaluation"]
    card, _ = published(run, tmp_path / "out")
    assert verdict(scores) in card
    assert "so adaptation is not shown." in card
    assert "adapts" not in card


def test_a_rule_without_a_bound_of_staleness_is_published_with_none(
    run: RunDirectory, tmp_path: Path
) -> None:
    config = config_file.load_recorded(run.config)
    admission = msgspec.structs.replace(config.admission, rule="count")
    run.config.write_text(config_file.dump(msgspec.structs.replace(config, admission=admission)))
    card, _ = published(run, tmp_path / "out")
    assert "trials; staleness has no bound.\n" in card


@pytest.mark.parametrize("source", ["gpt2", "me/small"])
def test_a_model_of_the_hub_is_named_by_its_id_and_licence(
    run: RunDirectory, tmp_path: Path, source: str
) -> None:
    cache = tmp_path / "hub" / f"models--{source.replace('/', '--')}" / "snapshots" / "0"
    begun_from(run, source, cache)
    card, config = published(run, tmp_path / "out")
    assert f"base_model: {source}\n" in card
    assert f"It began as {source}." in card
    assert "license: mit" in card
    assert f'source = "{source}"' in config


@pytest.mark.parametrize("source", ["models/mine", "/home/somebody/models/mine"])
def test_no_folder_of_the_machine_that_trained_is_published(
    run: RunDirectory, tmp_path: Path, source: str
) -> None:
    begun_from(run, source, tmp_path / "models" / "mine")
    card, config = published(run, tmp_path / "out")
    assert "It began as a model that is not on the hub." in card
    assert "base_model" not in card
    assert "models/mine" not in card + config
    assert "license: mit" in card


def test_a_push_without_a_token_says_so_before_anything_is_written(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(RunError, match="no token for the hub: `hf auth login`"):
        hub.push(run, "me/scout")


@pytest.mark.parametrize("repo", ["me/a/b", "my model"])
def test_a_name_that_the_hub_cannot_have_is_one_sentence(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, repo: str
) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: "hf_some")
    with pytest.raises(RunError, match=f"the hub refused '{repo}': Repo id must"):
        hub.push(run, repo)


def test_a_push_without_a_network_is_one_sentence(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise hub._HTTPError("no route to host")

    monkeypatch.setattr(hub, "get_token", lambda: "hf_some")
    monkeypatch.setattr(HfApi, "create_repo", fail)
    with pytest.raises(RunError, match="the hub cannot be reached: no route to host"):
        hub.push(run, "me/scout")


def test_a_file_in_the_place_of_the_folder_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(RunError, match="is no empty folder"):
        hub.write_folder(run, tmp_path / "out")
