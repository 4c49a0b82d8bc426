"""Check the nodes of a cluster before a run starts there, and describe each fault in one
sentence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_CLOCK_S = 2.0
"""Largest allowed difference of two nodes' clocks, in seconds. The times in a run's files come from
the clocks of the machines that wrote them.
"""
FREE_BYTES_AT_LEAST = 2 * 10**9
"""Number of free bytes that a node needs for temporary files."""
WEIGHT_COPIES = 6
"""Number of copies of the weights that a node's temporary folder may hold: the policy, the last
four versions (`KEPT_WEIGHTS` in `mage_services/cluster/keeper.py`), and one that is being written.
"""
GB = 10**9


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Hold facts about one node, measured there."""

    name: str
    clock_s: float
    """Seconds by which its clock is ahead of the clock of the machine that starts the run."""
    versions: dict[str, str]
    """Versions of Python, of mage_async, and of the libraries that write or read the messages
    between nodes, by name.
    """
    free_bytes: int
    """Number of free bytes in the folder for temporary files, which holds the policy and its newest
    weights.
    """
    gpus: int = 0
    """Number of GPUs that the driver lists."""
    announced_gpus: int = 0
    """Number of GPUs that `ray start` announced."""
    model: str = ""
    """Digest of the model at `policy.source` on this node; empty if there is none."""
    connect_error: str = ""
    """Why a connection from this node to the learner's address failed; empty if it succeeded."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Hold the resources that a run needs."""

    cores: int
    gpus: int
    model_bytes: int
    """Number of bytes of one version of the weights; 0 if that is not known."""
    source: str = ""
    """Value of `policy.source`, quoted in sentences."""
    address: str = ""
    """Address of the learner, quoted in sentences."""
    size_error: str = ""
    """Why `model_bytes` is not known; empty if it is."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Hold facts about the whole cluster; cores and GPUs are those of all its nodes together."""

    own: NodeFacts
    """The node that starts the run."""
    others: Sequence[NodeFacts]
    cores: float
    gpus: float
    silent: Sequence[tuple[str, str]] = ()
    """Name and reason of each node that did not answer."""
    listen_error: str = ""
    """Why the node that starts the run could not listen at the learner's address; empty if it
    could."""


def faults_of(facts: ClusterFacts, needs: Needs) -> list[str]:
    """Return one sentence per fault, with a remedy; faults of the whole cluster come first."""
    found = [
        f"the run reserves {reserved} {kind} and the cluster has {has:g}: add nodes, start fewer "
        f"--actors, or start nodes with a larger --num-{kind.lower()}s"
        for reserved, has, kind in (
            (needs.cores, facts.cores, "CPU"),
            (needs.gpus, facts.gpus, "GPU"),
        )
        if reserved > has
    ]
    found += [
        f"node {name} did not answer ({why}): install the same mage_async there, or start the node "
        "again with `ray stop` and `ray start`"
        for name, why in facts.silent
    ]
    if facts.listen_error:
        found.append(
            f"the learner cannot listen at {needs.address} ({facts.listen_error}): end the process "
            "that has the port, or choose another one with transport.address"
        )
    for node in (facts.own, *facts.others):
        found += [f"node {node.name}: {fault}" for fault in _node_faults(node, facts.own, needs)]
    return found


def _node_faults(node: NodeFacts, here: NodeFacts, needs: Needs) -> Iterator[str]:
    """Yield the faults of one node; `here` is the node that starts the run."""
    if abs(node.clock_s) > MAX_CLOCK_S:
        yield (
            f"its clock is {abs(node.clock_s):.1f} s {'ahead' if node.clock_s > 0 else 'behind'}: "
            "set it by NTP (`chronyc makestep`), or the times in the run's files will disagree"
        )
    needed_bytes = max(FREE_BYTES_AT_LEAST, WEIGHT_COPIES * needs.model_bytes)
    if node.free_bytes < needed_bytes:
        yield (
            f"{node.free_bytes / GB:.1f} GB are free for temporary files, and the policy with its "
            f"newest weights may take {needed_bytes / GB:.1f}: make room, or set TMPDIR before "
            "`ray start`"
        )
    if node.gpus < node.announced_gpus:
        yield (
            f"its driver lists {node.gpus} GPUs and it was started with {node.announced_gpus}: "
            "look at `nvidia-smi`, and start it again with `ray start --num-gpus`"
        )
    if node.model and node.model != here.model:
        yield (
            f"{needs.source} is another model there (digest {node.model}) than here "
            f"({here.model or 'none'}): copy it anew, or remove it there; actors get the model "
            "from the learner"
        )
    for name, version in here.versions.items():
        if (has := node.versions.get(name, "none")) != version:
            yield (
                f"it has {name} {has} and this machine {version}: install the same version on both"
            )
    if node.connect_error:
        yield (
            f"the learner cannot be reached at {needs.address} from there ({node.connect_error}): "
            "open the port in the firewall, or choose another one with transport.address"
        )
