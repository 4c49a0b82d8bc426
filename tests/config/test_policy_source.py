"""Where a policy comes from, as far as that can be said before any process starts."""

from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from mage_async.config.schema import Config, Embedded, Pretrained, local_policy
from mage_async.errors import PolicyError
from mage_async.policy import initial_policy
from mage_services.cli.main import EXIT_USAGE, main


@pytest.mark.parametrize("source", ["/nope", "./nope", "~/nope", "models/qwen/nope"])
def test_a_path_that_is_not_there_is_no_hub_id(source: str) -> None:
    with pytest.raises(PolicyError, match=f"policy.source '{source}' is no directory"):
        local_policy(source)


@pytest.mark.parametrize("source", ["tiny", "gpt2", "Qwen/Qwen3-4B"])
def test_a_hub_id_and_the_tiny_model_are_no_paths(source: str) -> None:
    assert local_policy(source) is None


def test_a_directory_is_one_with_a_model_in_it(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=f"{tmp_path}: no config.json"):
        local_policy(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert local_policy(str(tmp_path)) == tmp_path.resolve()


def test_it_is_looked_for_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert main(["--set", "policy.source=/nope", "--run-dir", str(run_dir)]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("mage: policy.source '/nope' is no directory")
    assert not run_dir.exists()


def test_no_model_is_fetched_that_nobody_named() -> None:
    with pytest.raises(PolicyError, match=r'policy.source is not set: .* policy.kind = "tiny"'):
        local_policy(Config().policy.source)


def test_no_weights_are_fetched_of_a_type_that_is_refused_or_in_forms_that_nothing_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
    others = ["onnx/model.onnx", "original/consolidated.00.pth", "pytorch_model.bin", "m.gguf"]
    fetched: list[str] = []

    def fetch(name: str, **patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects([*read, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr(initial_policy, "snapshot_download", fetch)
    policy, engine = Pretrained(source="me/model"), Embedded()
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    with pytest.raises(PolicyError, match="of type 'gpt_neox' cannot be trained"):
        initial_policy.source_directory(policy, engine)
    assert fetched == ["config.json"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert initial_policy.source_directory(policy, engine) == tmp_path
    assert fetched[2:] == read
