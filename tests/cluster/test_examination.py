"""What is said of a node that does not answer."""

from typing import Any

import pytest

from mage_services.cluster.connection import Node
from mage_services.cluster.examination import _answers

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
