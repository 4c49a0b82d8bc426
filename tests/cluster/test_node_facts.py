"""What is said of a node that does not answer, and of a learner's address that is in use."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mage_async.config.schema import Config, Pretrained
from mage_async.errors import ConfigError
from mage_services.cluster import node_facts
from mage_services.cluster.connection import Node
from mage_services.cluster.node_facts import (
    Probe,
    _answers,
    _clock,
    _needs,
    _reached,
    model_digest,
)

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ray::Probe.facts()\n  File ...\nValueError: no model\n", "ValueError: no model"),
        ("", "RayError"),
    ],
)
def test_a_node_that_fails_is_named_by_the_last_line_of_its_error_or_by_its_class(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reference: Any, timeout: float) -> None:
        raise ray.exceptions.RayError(text)

    monkeypatch.setattr(ray, "get", fail)
    assert list(_answers({Node("abc", "127.0.0.1", 1.0, 0.0): None}).values()) == [said]


def test_a_node_that_fails_after_its_first_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reference: Any, timeout: float = 0.0) -> None:
        raise ray.exceptions.RayActorError(error_msg="the node has died")

    monkeypatch.setattr(ray, "get", fail)
    monkeypatch.setattr(node_facts, "port_of", lambda config: 0)
    node = Node("abc", "127.0.0.1", 1.0, 0.0)
    method = SimpleNamespace(remote=lambda *_: None)
    probe = SimpleNamespace(now=method, listen=method)
    assert _clock(node, probe) == "the node has died"
    with pytest.raises(ConfigError, match=r"own node .* does not answer: the node has died"):
        _reached(None, node, {node: probe})


def test_a_port_in_use_is_no_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    node = Node("abc", "127.0.0.1", 1.0, 0.0)
    probe = SimpleNamespace(listen=SimpleNamespace(remote=Probe().listen))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(node_facts, "port_of", lambda config: port)
        found = _reached(None, node, {node: probe})
    assert found == (f"tcp://127.0.0.1:{port}", "Address already in use", {})


def test_the_weights_of_a_model_that_no_machine_has_downloaded_are_sized_by_its_shape() -> None:
    config = Config(policy=Pretrained(source="Qwen/Qwen3-0.6B", dtype="bfloat16"))
    needs = _needs(config, num_actors=1, has_gpus=False)
    assert needs.model_bytes == 2 * 596_049_920
    assert needs.size_error == ""


def test_weights_of_an_unknown_model_are_said_to_be_unsized() -> None:
    config = Config(policy=Pretrained(source="nobody/has-this"))
    needs = _needs(config, num_actors=1, has_gpus=False)
    assert needs.model_bytes == 0
    assert "is not on this machine" in needs.size_error


def test_a_model_is_another_one_by_its_weights_and_not_by_what_else_was_downloaded(
    tmp_path: Path,
) -> None:
    for name in ("whole", "partial", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        weights = b"b" if name == "other" else b"a"
        (tmp_path / name / "model-00001-of-00001.safetensors").write_bytes(weights * 100)
    for name in ("README.md", ".gitattributes", "pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / "whole" / name).write_text("more")
    digests = {name: model_digest(str(tmp_path / name)) for name in ("whole", "partial", "other")}
    assert digests["whole"] == digests["partial"] != digests["other"]
