"""What is wrong with a cluster's nodes is said node by node, each fault with its remedy."""

from dataclasses import replace

import pytest

from mage_async.doctor.cluster_faults import ClusterFacts, Needs, NodeFacts, faults_of
from mage_async.errors import ConfigError
from mage_services.cluster.connection import joined

OWN = NodeFacts("10.0.0.1 (aa)", 0.0, {"Python": "3.12.1", "torch": "2.11"}, 10**12, model="ab12")
SOUND = replace(OWN, name="10.0.0.2 (bb)", clock_s=0.3)
NEEDS = Needs(6, 1, 10**9, "/models/small", "tcp://10.0.0.1:5555")


def said(node: NodeFacts, **facts: object) -> list[str]:
    known = ClusterFacts(OWN, [node], cores=8.0, gpus=1.0)
    return faults_of(replace(known, **facts), NEEDS)


def test_nothing_is_said_of_sound_nodes() -> None:
    assert said(SOUND) == []


def test_a_node_needs_no_model_for_actors_get_theirs_from_the_learner() -> None:
    assert said(replace(SOUND, model="")) == []


@pytest.mark.parametrize(
    ("changes", "fault", "remedy"),
    [
        ({"clock_s": 10.0}, "its clock is 10.0 s ahead", "set it by NTP"),
        ({"clock_s": -10.0}, "its clock is 10.0 s behind", "set it by NTP"),
        ({"model": "cd34"}, "another model there (digest cd34) than here (ab12)", "copy it anew"),
        ({"connect_error": "Connection refused"}, "tcp://10.0.0.1:5555", "open the port"),
        ({"free_bytes": 10**9}, "1.0 GB are free", "set TMPDIR before `ray start`"),
        ({"announced_gpus": 1}, "lists 0 GPUs and it was started with 1", "--num-gpus"),
        ({"versions": {"Python": "3.11.7", "torch": "2.11"}}, "Python 3.11.7", "the same version"),
        ({"versions": {"Python": "3.12.1"}}, "it has torch none", "the same version"),
    ],
)
def test_a_fault_is_one_sentence_that_names_the_node_and_the_remedy(
    changes: dict[str, object], fault: str, remedy: str
) -> None:
    (sentence,) = said(replace(SOUND, **changes))
    assert sentence.startswith("node 10.0.0.2 (bb): ")
    assert fault in sentence
    assert remedy in sentence


def test_a_cluster_without_room_and_a_node_that_is_silent_are_named() -> None:
    room, silent = said(SOUND, cores=4.0, silent=[("10.0.0.3 (cc)", "nothing in 30 s")])
    assert room.startswith("the run reserves 6 CPU and the cluster has 4")
    assert silent.startswith("node 10.0.0.3 (cc) did not answer (nothing in 30 s)")


def test_a_learner_that_cannot_listen_is_a_fault_of_its_port_and_not_of_the_firewall() -> None:
    (sentence,) = said(SOUND, listen_error="Address already in use")
    assert "cannot listen at tcp://10.0.0.1:5555 (Address already in use): end the pro" in sentence
    assert "firewall" not in sentence


def test_a_fault_of_ray_without_text_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def fail(*given: object, **named: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ray, "init", fail)
    refused = pytest.raises(
        ConfigError, match=r"one of its nodes \(AssertionError\): run `ray start --head`"
    )
    with refused, joined("auto"):
        pass


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "refused"),
        ("nowhere.invalid:6379", ""),
        ("10.0.0.1", "invalid literal"),
    ],
)
def test_an_address_at_which_nothing_listens_is_a_sentence_without_a_wait_for_ray(
    monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda *given, **named: pytest.fail("it would try for long"))
    refused = pytest.raises(ConfigError, match=rf"{address}: no Ray cluster answers .*{why}")
    with refused, joined(address):
        pass
