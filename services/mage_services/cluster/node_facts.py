"""Collect facts about a cluster for `mage doctor --cluster`, by a probe on every node.

`mage_async/doctor/cluster_faults.py` turns the facts into sentences.
"""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mage_async.config.schema import Config, Pretrained
from mage_async.doctor.cluster_faults import ClusterFacts, Needs, NodeFacts
from mage_async.errors import ConfigError, PolicyError, first_line
from mage_async.inference.chat_files import CHAT_FILES
from mage_services.cluster.connection import CONNECT_S, Node, joined, nodes, on, own_node
from mage_services.cluster.placement import bundles_of, port_of, total
from mage_services.processes.process import build_digest

LIBRARIES = ("torch", "transformers", "pyzmq", "msgpack", "safetensors", "ray")
"""Libraries that write or read what nodes exchange, so that their versions have to agree."""
MODEL_FILES = ("config.json", *CHAT_FILES, "model*.safetensors")
"""Files by which a model is identified. Its folder may hold further files, such as README.md or
weights in other formats, depending on the program that downloaded the model."""
BLOCK_BYTES, MOST_BLOCKS = 1 << 16, 64
"""Size in bytes, and about the largest number, of the blocks that are read from a model's file,
evenly spread. They are enough to tell two models apart, because training changes every tensor."""


class Probe:
    """Collect facts about the node on which this Ray actor runs, before a run starts there. All
    methods return plain data.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def now(self) -> float:
        """Return the node's clock, in seconds since 1970."""
        return time.time()

    def facts(self, source: str) -> dict[str, Any]:
        """Return the fields of `NodeFacts` that do not depend on other nodes.

        Args:
            source: `policy.source`; "" if the policy is built anew.
        """
        digest = model_digest(source)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        return dict(versions=_versions(), free_bytes=free, gpus=_num_gpus(), model=digest)

    def listen(self, host: str, port: int) -> tuple[int, str]:
        """Listen as the learner will, until the probe ends.

        Returns:
            The port, and the reason why listening failed; "" if it succeeded.
        """
        listener = socket.socket()
        try:
            listener.bind((host, port))
        except OSError as fault:
            listener.close()
            return port, fault.strerror or str(fault)
        listener.listen()
        self._listener = listener
        return listener.getsockname()[1], ""

    def reaches(self, host: str, port: int) -> str:
        """Connect to an address; return the reason if that fails, else ""."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S):
                return ""
        except OSError as fault:
            return fault.strerror or str(fault)


def model_digest(source: str) -> str:
    """Return a digest of the model that `policy.source` names; "" if this machine has none.

    Large files are read in part, so this takes seconds for a model of any size.
    """
    folder = _folder_of(source) if source else None
    if folder is None:
        return ""
    state = blake2b(digest_size=6)
    for file in sorted(each for pattern in MODEL_FILES for each in folder.glob(pattern)):
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in range(0, size, max(BLOCK_BYTES, size // MOST_BLOCKS)):
                opened.seek(start)
                state.update(opened.read(BLOCK_BYTES))
    return state.hexdigest()


def _folder_of(source: str) -> Path | None:
    """Return the folder of a model: a local one, or that of a hub id which was downloaded before.
    None if neither is on this machine.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _versions() -> dict[str, str]:
    """Return versions by name; a library that is not installed is left out."""
    found = {"Python": sys.version.split()[0], "mage_async": build_digest()}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


def _num_gpus() -> int:
    """Count the GPUs that NVIDIA's driver lists."""
    # Untested on a machine with a GPU.
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    # Without a working driver the command prints its error instead; a part of a divided GPU (MIG)
    # has a line of its own, which is indented.
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


ANSWER_S = 30.0
"""Seconds for a node to start its probe and to answer."""
NUM_CLOCK_CALLS = 5
"""Number of times that a node's clock is read. The fastest call gives the best estimate of its
offset.
"""


def examine(address: str, config: Config, num_actors: int) -> tuple[ClusterFacts, Needs]:
    """Collect facts about every node of a cluster, and compute what a run of this configuration
    needs.

    The learner is assumed to run on this machine's node, which has the run's directory.

    Raises:
        ConfigError: there is no such cluster, or this machine's own node does not answer.
    """
    with joined(address):
        found, own = nodes(), own_node()
        probes = {node: _probe(node) for node in found}
        source = _source_of(config)
        answers = _answers({node: probe.facts.remote(source) for node, probe in probes.items()})
        clocks = dict[Node, float]()
        for node in found:
            if isinstance(answers[node], str):
                continue
            clock = _clock(node, probes[node])
            if isinstance(clock, str):  # the node has failed since it reported its facts
                answers[node] = clock
            else:
                clocks[node] = clock
        if own not in clocks:
            raise _silent(own, answers[own])
        answered = {node: answers[node] for node in clocks}
        where, listen_error, connect_errors = _reached(
            config, own, {node: probes[node] for node in answered}
        )
        described = {
            node: NodeFacts(
                node.name,
                clocks[node] - clocks[own],
                announced_gpus=int(node.gpus),
                connect_error=connect_errors.get(node, ""),
                **facts,
            )
            for node, facts in answered.items()
        }
    silent = [(node.name, why) for node, why in answers.items() if isinstance(why, str)]
    facts = ClusterFacts(
        described.pop(own),
        list(described.values()),
        sum(node.cores for node in found),
        sum(node.gpus for node in found),
        silent,
        listen_error,
    )
    return facts, replace(_needs(config, num_actors, facts.gpus > 0), address=where)


def _probe(node: Node) -> Any:
    """Start a probe on a node, and return its handle."""
    import ray

    return ray.remote(Probe).options(num_cpus=0, scheduling_strategy=on(node)).remote()


def _answers(references: dict[Node, Any]) -> dict[Node, Any]:
    """Return each node's answer, or the reason if there is none: the call failed, or took longer
    than `ANSWER_S`.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    due, answers = time.monotonic() + ANSWER_S, dict[Node, Any]()
    for node, reference in references.items():
        try:
            answers[node] = ray.get(reference, timeout=max(0.0, due - time.monotonic()))
        except GetTimeoutError:
            answers[node] = f"nothing in {ANSWER_S:g} s"
        except RayError as fault:
            # Ray's text may end with the traceback of the node, whose last line names the
            # exception.
            answers[node] = [first_line(fault), *str(fault).strip().splitlines()][-1]
    return answers


def _silent(own: Node, why: str) -> ConfigError:
    """Return the error for the case that this machine's own node does not answer."""
    return ConfigError(f"this machine's own node {own.name} does not answer: {why}")


def _clock(node: Node, probe: Any) -> float | str:
    """Return the seconds by which a node's clock is ahead of this process's, or the reason why the
    node does not answer.
    """
    offsets = list[tuple[float, float]]()
    for _ in range(NUM_CLOCK_CALLS):
        began = time.time()
        theirs = _answers({node: probe.now.remote()})[node]
        ended = time.time()
        if isinstance(theirs, str):
            return theirs
        offsets.append((ended - began, theirs - (began + ended) / 2))
    return min(offsets)[1]


def _reached(
    config: Config, own: Node, probes: dict[Node, Any]
) -> tuple[str, str, dict[Node, str]]:
    """Listen where the learner would, and connect from every node.

    Returns:
        The address; the reason why listening failed, "" if it succeeded; and for each node that
        could not connect, the reason.

    Raises:
        ConfigError: this machine's own node does not answer.
    """
    answer = _answers({own: probes[own].listen.remote(own.address, port_of(config))})[own]
    if isinstance(answer, str):
        raise _silent(own, answer)
    port, fault = answer
    address = f"tcp://{own.address}:{port}"
    if fault:
        return address, fault, {}
    references = {node: probe.reaches.remote(own.address, port) for node, probe in probes.items()}
    return address, "", {node: why for node, why in _answers(references).items() if why}


def _needs(config: Config, num_actors: int, has_gpus: bool) -> Needs:
    """Return what a run of this configuration needs; the learner's address is not known yet."""
    learner, actor = bundles_of(config, has_gpus)
    cores, gpus = total([learner, *[actor] * (num_actors + 1)])  # one more for the evaluator
    num_bytes, size_error = _model_bytes(config)
    return Needs(int(cores), int(gpus), num_bytes, _source_of(config), size_error=size_error)


def _model_bytes(config: Config) -> tuple[int, str]:
    """Return the number of bytes of one version of the weights, and "". If it cannot be computed,
    because the model is not on this machine, return 0 and the reason.
    """
    # Imported here, because a probe, which imports this module too, needs neither torch nor
    # transformers.
    from mage_async.plan.model_shape import shape_of
    from mage_async.plan.plan import ITEMSIZE

    try:
        return shape_of(config).num_weights * ITEMSIZE[config.policy.dtype], ""
    except PolicyError as error:
        return 0, str(error)


def _source_of(config: Config) -> str:
    """Return `policy.source`, or "" if the policy is built anew."""
    return config.policy.source if isinstance(config.policy, Pretrained) else ""
