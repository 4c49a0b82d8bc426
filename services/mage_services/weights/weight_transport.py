"""Choose how published weights reach the engines: as files on disk, in shared memory, or sent by
NCCL.

The key `transport.weights` of the configuration chooses a transport by its name. Each class below
is the configuration of a transport, and opens it. To add a transport, copy a class and give it a
`tag`, which is its name. The configuration imports this module in processes without torch, so the
code that moves weights is imported when a transport is opened.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mage_async.config.section import Variant
from mage_async.errors import ConfigError

if TYPE_CHECKING:
    from mage_async.config.schema import Config
    from mage_async.results.run_directory import RunDirectory
    from mage_services.weights.weight_store import WeightFiles

BUCKET_BYTES = 512 << 20
"""Number of bytes of weights that are sent at once, unless a single tensor has more."""


class WeightTransport(Variant):
    """Bring published weights to the engines."""

    is_on_disk: ClassVar[bool] = False
    """Whether versions are files in the run's directory, which outlive the learner and can be read
    by other hosts."""
    is_sent: ClassVar[bool] = False
    """Whether engines receive weights from the learner's memory, which does not hold old versions.
    """

    variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables of all processes of the run, unless they are set already."""

    def open(self, run: "RunDirectory", config: "Config") -> "WeightFiles":
        """Return the learner's side of the transport; here, one that writes a file per version."""
        from mage_async.plan.does_it_fit import versions_at_once
        from mage_services.weights.weight_store import WeightFiles

        return WeightFiles(self.folder(run), versions_at_once(config))

    def folder(self, run: "RunDirectory") -> Path:
        """Return the folder in which ranks write a version together."""
        return run.shared_weights

    def new_weight_bytes(self, whole: int, own: int, largest: int, *, is_first: bool) -> int:
        """Return the bytes of new weights that one GPU of an engine holds in addition to its old
        ones.

        Args:
            whole: Bytes of all weights.
            own: Bytes of the GPU's own part of the weights.
            largest: Bytes of the largest tensor.
            is_first: Whether the GPU is the first of its engine.
        """
        return own


class Disk(WeightTransport, tag="disk"):
    """Write a file per version in the run's directory, for any host that sees it."""

    is_on_disk: ClassVar[bool] = True

    def folder(self, run: "RunDirectory") -> Path:
        """Return the run's folder of weights."""
        return run.weights


# The tag is SGLang's word: an engine of SGLang takes such a version by
# `update_weights_from_tensor`.
class SharedMemory(WeightTransport, tag="tensor"):
    """Write a file per version in shared memory, for engines of the learner's host."""

    def new_weight_bytes(self, whole: int, own: int, largest: int, *, is_first: bool) -> int:
        """Return the bytes of new weights: the engine's first GPU reads all of them."""
        return whole if is_first else own


class Nccl(WeightTransport, tag="nccl"):
    """Send versions from GPU to GPU of the learner's host, or by Gloo if the learner has no GPU."""

    is_sent: ClassVar[bool] = True
    # All processes of an NCCL group must have the same values of these variables; otherwise a group
    # on one machine fails with CUDA errors, or hangs. SGLang sets both to 0 unless they are set;
    # NCCL's default is 1. If NCCL_CUMEM_ENABLE is 0, some versions of NCCL fail between processes
    # of different GPUs.
    variables: ClassVar[Mapping[str, str]] = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}

    def open(self, run: "RunDirectory", config: "Config") -> "WeightFiles":
        """Return the learner's side, which sends versions from memory when engines request them."""
        from mage_services.weights.weight_sender import WeightSender

        backend = "nccl" if config.learner.device.startswith("cuda") else "gloo"
        evaluation, last = config.evaluation, config.learner.steps
        # Versions that the evaluator plays are written as files too. Several ranks gather each
        # version in a folder before it is sent.
        return WeightSender(
            run.weights,
            backend,
            lambda version: evaluation.is_due(version, last),
            config.learner.device,
            self.folder(run) if config.learner.ranks > 1 else None,
        )

    def new_weight_bytes(self, whole: int, own: int, largest: int, *, is_first: bool) -> int:
        """Return the bytes of new weights: each GPU receives one whole bucket at a time, and SGLang
        holds its tensors and a copy of them.
        """
        return 2 * max(BUCKET_BYTES, largest)

    def check(self, config: Any) -> None:
        """Refuse a configuration that needs old versions, or whose engines cannot be reached.

        Raises:
            ConfigError: the message has the key to change.
        """
        if config.admission.lag:
            raise ConfigError(
                'transport.weights = "nccl" sends the newest weights only; with admission.lag = '
                f'{config.admission.lag} set transport.weights = "disk" or "tensor"'
            )
        if config.transport.keys:
            raise ConfigError(
                'transport.weights = "nccl" reaches engines of this machine only; for actors of '
                'other machines set transport.weights = "disk"'
            )
        if not config.learner.device.startswith("cuda"):
            return
        if config.engine.kind == "embedded":
            raise ConfigError(
                'transport.weights = "nccl" with a learner on a GPU needs engines on GPUs: set '
                'engine.kind = "sglang", or transport.weights = "tensor"'
            )
        own = int(config.learner.device.partition(":")[2] or 0)
        if not config.engine.devices or own in config.engine.devices:
            raise ConfigError(
                f'transport.weights = "nccl": NCCL cannot send from GPU {own} to itself; name '
                'other GPUs in engine.devices, or set transport.weights = "tensor"'
            )
