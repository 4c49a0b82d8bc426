"""What `mage doctor --cluster` finds out: a probe on every node, all asked at once."""

import time
from dataclasses import replace
from typing import Any

from mage_async.config.schema import Config, Pretrained
from mage_async.doctor.cluster_faults import ClusterFacts, Needs, NodeFacts
from mage_async.errors import ConfigError
from mage_services.cluster.connection import Node, joined, nodes, on, own_node
from mage_services.cluster.placement import Bundles, port_of
from mage_services.cluster.probe import Probe, model_digest

ANSWER_S = 30.0
"""For a node to start its probe, and to say what it has."""
NUM_CLOCK_CALLS = 5
"""The shortest of them says most."""


def examine(address: str, config: Config, num_actors: int) -> tuple[ClusterFacts, Needs]:
    """Look at every node of a cluster.

    The learner is taken to run on this machine's node, as it does where the run's directory is seen
    from no other.

    Raises:
        ConfigError: there is no such cluster, or this machine's own node does not answer.
    """
    with joined(address):
        found, own = nodes(), own_node()
        probes = {node: _probe(node) for node in found}
        source = _source_of(config)
        answers = _answers({node: probe.facts.remote(source) for node, probe in probes.items()})
        said = {node: facts for node, facts in answers.items() if not isinstance(facts, str)}
        clocks = {node: _clock(probes[node]) for node in said}
        if own not in said:
            raise ConfigError(f"this machine's own node {own.name} does not answer: {answers[own]}")
        where, unreached = _reached(config, own, {node: probes[node] for node in said})
        described = {
            node: NodeFacts(
                node.name,
                clocks[node] - clocks[own],
                announced_gpus=int(node.gpus),
                unreached=unreached.get(node, ""),
                **facts,
            )
            for node, facts in said.items()
        }
    silent = [(node.name, why) for node, why in answers.items() if isinstance(why, str)]
    facts = ClusterFacts(
        described.pop(own),
        list(described.values()),
        sum(node.cores for node in found),
        sum(node.gpus for node in found),
        silent,
    )
    return facts, replace(_needs(config, num_actors, facts.gpus > 0), address=where)


def _probe(node: Node) -> Any:
    import ray

    return ray.remote(Probe).options(num_cpus=0, scheduling_strategy=on(node)).remote()


def _answers(asked: dict[Node, Any]) -> dict[Node, Any]:
    """What each node answers; a sentence where it cannot, or does not within `ANSWER_S`."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    due, answers = time.monotonic() + ANSWER_S, dict[Node, Any]()
    for node, reference in asked.items():
        try:
            answers[node] = ray.get(reference, timeout=max(0.0, due - time.monotonic()))
        except GetTimeoutError:
            answers[node] = f"nothing in {ANSWER_S:g} s"
        except RayError as fault:
            answers[node] = str(fault).strip().splitlines()[-1]
    return answers


def _clock(probe: Any) -> float:
    """How far a node's clock is ahead of this process's, in seconds."""
    import ray

    offsets = list[tuple[float, float]]()
    for _ in range(NUM_CLOCK_CALLS):
        began = time.time()
        theirs = ray.get(probe.now.remote())
        ended = time.time()
        offsets.append((ended - began, theirs - (began + ended) / 2))
    return min(offsets)[1]


def _reached(config: Config, own: Node, probes: dict[Node, Any]) -> tuple[str, dict[Node, str]]:
    """Listen where the learner would, and connect from every node; the address, and what failed."""
    import ray

    port, fault = ray.get(probes[own].listen.remote(own.address, port_of(config)))
    address = f"tcp://{own.address}:{port}"
    if fault:
        return address, {own: fault}
    asked = {node: probe.reaches.remote(own.address, port) for node, probe in probes.items()}
    return address, {node: why for node, why in _answers(asked).items() if why}


def _needs(config: Config, num_actors: int, has_gpus: bool) -> Needs:
    bundles = Bundles.of(config, has_gpus)
    every = [bundles.learner, *[bundles.actor] * (num_actors + 1)]
    cores, gpus = (int(sum(each.get(kind, 0) for each in every)) for kind in ("CPU", "GPU"))
    source = _source_of(config)
    return Needs(cores, gpus, model_digest(source)[1], source)


def _source_of(config: Config) -> str:
    """`policy.source`; "" where the policy is built anew."""
    return config.policy.source if isinstance(config.policy, Pretrained) else ""
