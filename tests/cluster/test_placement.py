"""What a run reserves on a cluster, and what it says where there is no room."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mage_async.config import config_file
from mage_async.errors import RunError
from mage_async.results.run_directory import RunDirectory
from mage_services.cluster import placement
from mage_services.cluster.connection import Node
from mage_services.cluster.placement import LOST_NODE_CODE, KeptChild, Placement, bundles_of
from mage_services.processes.supervised_process import ProcessSpec

ray = pytest.importorskip("ray")


class Group:
    """A placement group that Ray has reserved, or never reserves."""

    def __init__(self, is_reserved: bool) -> None:
        self._is_reserved = is_reserved

    def wait(self, timeout_s: float) -> bool:
        return self._is_reserved


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], tuple[list[str], str]]:
    """Reserve where there is no room for the actors, or for the learner either; return the notices
    and the error.
    """

    def reserve(learner_has_room: bool) -> tuple[list[str], str]:
        own = Node("abc", "127.0.0.1", 2.0, 0.0)
        groups = iter([Group(learner_has_room), Group(False)])
        monkeypatch.setattr(placement, "nodes", lambda: [own])
        monkeypatch.setattr(placement, "own_node", lambda: own)
        # The package has a function of the same name as this module.
        module = sys.modules["ray.util.placement_group"]
        monkeypatch.setattr(module, "placement_group", lambda *_, **__: next(groups))
        served: Any = type("Served", (), {"address": type("A", (), {"remote": lambda *_: None})()})
        monkeypatch.setattr(placement, "_create", lambda *_: served())
        monkeypatch.setattr(ray, "get", lambda _: "tcp://127.0.0.1:1")
        config, said = config_file.load(config_file.find(None)), list[str]()
        placing = Placement(RunDirectory(tmp_path), config, 1, tmp_path / "keys", said.append)
        with pytest.raises(RunError) as caught:
            placing.reserve()
        return said, str(caught.value)

    return reserve


def test_no_room_for_the_learner_is_told_of_this_node_which_others_cannot_help(
    refused: Callable[[bool], tuple[list[str], str]],
) -> None:
    [notice], error = refused(False)
    assert notice.startswith("waiting until this node has room for the learner and the evaluator: ")
    assert error.startswith("this node has had no room for the learner and the evaluator (")
    assert "lower learner.threads" in error
    assert "add nodes" not in notice + error


def test_no_room_for_the_actors_asks_for_more_nodes(
    refused: Callable[[bool], tuple[list[str], str]],
) -> None:
    [notice], error = refused(True)
    assert notice.startswith("waiting until the cluster has room for 1 actor: ")
    assert error.startswith("the cluster has had no room for 1 actor (")
    assert "add nodes" in error


def test_each_rank_of_the_learner_has_cores_for_its_threads() -> None:
    changes = ["learner.threads=3", "learner.ranks=2", "engine.threads=1"]
    config = config_file.load(config_file.find(None), changes)
    assert bundles_of(config, has_gpus=False) == ({"CPU": 6}, {"CPU": 1})


def test_an_error_of_rays_counts_as_a_lost_process_and_ends_its_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingKeeper:
        """Ray's handle of a keeper whose stream of events fails, while it lives on."""

        def __init__(self) -> None:
            self.live = self.ended = self

        def options(self, **given: str) -> "FailingKeeper":
            return self

        async def remote(self, *given: object) -> Any:
            raise AssertionError("the process never ends")

        async def failing(self, *given: object) -> Any:
            raise ray.exceptions.ObjectStoreFullError("no room")
            yield

    keeper, killed = FailingKeeper(), list[Any]()
    monkeypatch.setattr(keeper, "live", FailingKeeper())
    monkeypatch.setattr(keeper.live, "remote", keeper.failing)
    monkeypatch.setattr(ray, "kill", killed.append)
    spec = ProcessSpec("actor-0", "actor", (), tmp_path / "log", threads=1)
    child = KeptChild(spec, "node-1", keeper)

    async def whole() -> int:
        assert [event async for event in child.events(60.0)] == []
        return await child.wait()

    assert asyncio.run(whole()) == LOST_NODE_CODE
    assert killed == [keeper]
    assert "object store is full" in child.failure_line(LOST_NODE_CODE)
