"""New weights for a running SGLang. Their path says how they arrive:

    a model directory, or a file on disk    read by SGLang
    a file in shared memory                 one flattened bucket, handed over as a tensor: on a GPU
                                            it is brought there first, and shared by CUDA IPC; with
                                            several GPUs each takes its part out of the same bucket
    a manifest                              sent by the learner to SGLang's scheduler, in a group

What can be done while tokens are drawn is done in `prepare`; generation has to stand still for
`update` alone. An update never flushes the cache: SGLang ends its whole process tree where it
cannot flush, and keys of older weights are kept apart by their names
(`mage_async/inference/kv_contexts.py`).
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from mage_async.errors import UnreadableWeights
from mage_async.inference.receipts.observed import Observed
from mage_async.inference.receipts.receipt import Precision, Receipt, check_tokens
from mage_async.inference.weights import unreadable, weight_files
from mage_async.policy.snapshot import read_snapshot
from mage_services.weights.weight_group import (
    HOST,
    SENDING,
    Manifest,
    Row,
    answer,
    ask,
    is_manifest,
    store_of,
)

SHARED = Path("/dev/shm")

Update = Callable[[], Awaitable[str]]
"""Changes the weights; returns why that failed, or nothing."""


class Loader:
    """Brings weights into one SGLang, by its `TokenizerManager`."""

    def __init__(
        self, manager: Any, vocabulary: int, precision: Precision, *, has_sessions: bool
    ) -> None:
        self._manager, self._has_sessions = manager, has_sessions
        self._vocabulary: int = vocabulary
        self._precision: Precision = precision
        self._port, self._group = 0, ""
        self._kept: Any = None
        """What was handed over last: its memory is read until that update is answered."""

    async def prepare(self, version: int, path: Path) -> Update:
        """Do what needs no pause.

        The update that is returned may leave the weights half-written when it fails: what was
        loaded before has to be loaded again. Cancellation leaves the old weights.

        Raises:
            UnreadableWeights: these weights cannot be had; nothing was touched.
        """
        if is_manifest(path):
            return await self._ask(Manifest.read(path))
        reason = await asyncio.to_thread(unreadable, path)
        if reason:
            raise UnreadableWeights(reason)
        if path.suffix == ".safetensors" and path.is_relative_to(SHARED):
            self._forget_last()
            bucket = await asyncio.to_thread(_bucket, path)
            return partial(self._in_session, partial(self._hand_over, version, bucket))
        return partial(self._read, version, path)

    async def receipt(self, version: int, observed: Observed, *, scores: bool) -> Receipt:
        """The receipt of weights that SGLang draws with: what it was given, and where `scores` says
        so its log-probs of the check tokens. Cancellation leaves nothing.
        """
        logprobs = await self._logprobs() if scores else ()
        return await asyncio.to_thread(observed.receipt, version, self._precision, logprobs)

    async def _logprobs(self) -> tuple[float, ...]:
        """Log-probs of the check tokens after the first, computed without cached keys."""
        meta: dict[str, Any] = {}
        async for reply in self._manager.generate_request(_check_request(self._vocabulary), None):
            meta = reply["meta_info"]
        return tuple(entry[0] for entry in meta["input_token_logprobs"][1:])

    def _forget_last(self) -> None:
        """Free what was handed over last, before as much again is taken: SGLang has copied it."""
        self._kept = None
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    async def _read(self, version: int, path: Path) -> str:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        with tempfile.TemporaryDirectory(prefix="mage-weights-") as folder:
            for number, file in enumerate(weight_files(path)):
                (Path(folder) / f"{number}.safetensors").symlink_to(file.resolve())
            success, message, *_ = await self._manager.update_weights_from_disk(
                UpdateWeightFromDiskReqInput(
                    model_path=folder, weight_version=str(version), flush_cache=False
                ),
                None,
            )
        return "" if success else message

    async def _in_session(self, update: Update) -> str:
        """Tell an SGLang that wants to know where an update begins and ends."""
        if not self._has_sessions:
            return await update()
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        success, message = await self._manager.begin_weight_update(BeginWeightUpdateReqInput())
        if not success:
            return message
        reason = await update()
        success, message = await self._manager.end_weight_update(EndWeightUpdateReqInput())
        return reason or ("" if success else message)

    async def _hand_over(self, version: int, bucket: dict[str, Any]) -> str:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        self._kept, num_gpus = bucket, self._manager.server_args.tp_size
        success, message = await self._manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[
                    MultiprocessingSerializer.serialize(bucket) for _ in range(num_gpus)
                ],
                load_format="flattened_bucket",
                weight_version=str(version),
                flush_cache=False,
            ),
            None,
        )
        return "" if success else message

    async def _ask(self, manifest: Manifest) -> Update:
        """Have the learner ready to send."""
        store = await asyncio.to_thread(store_of, manifest.port)
        is_new = self._port != manifest.port  # a learner we have not met
        if is_new:
            self._group = uuid4().hex
        members = 1 + self._manager.server_args.tp_size
        number = ask(store, self._group, manifest.version, members)
        if is_new:
            await self._join(manifest, members)
        said = await asyncio.to_thread(answer, store, number)
        if said != SENDING:
            raise UnreadableWeights(f"weights of version {manifest.version}: {said}")
        return partial(self._in_session, partial(self._receive, manifest))

    async def _join(self, manifest: Manifest, members: int) -> None:
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        success, message = await self._manager.init_weights_update_group(
            InitWeightsUpdateGroupReqInput(
                master_address=HOST,
                master_port=manifest.port,
                rank_offset=1,
                world_size=members,
                group_name=self._group,
                backend=manifest.backend,
            ),
            None,
        )
        if not success:
            raise UnreadableWeights(f"no group with the learner: {message}")
        self._port = manifest.port

    async def _receive(self, manifest: Manifest) -> str:
        for bucket in manifest.buckets:
            success, message = await self._receive_bucket(manifest.version, bucket)
            if not success:
                return message
        return ""

    async def _receive_bucket(self, version: int, bucket: tuple[Row, ...]) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        names, dtypes, shapes = zip(*bucket, strict=True)
        return await self._manager.update_weights_from_distributed(
            UpdateWeightsFromDistributedReqInput(
                names=list(names),
                dtypes=list(dtypes),
                shapes=[list(shape) for shape in shapes],
                group_name=self._group,
                load_format="flattened_bucket",
                weight_version=str(version),
                flush_cache=False,
            ),
            None,
        )


def _check_request(vocabulary: int) -> Any:
    """A request of one token, for the log-probs of its prompt."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    rid = uuid4().hex
    return GenerateReqInput(
        rid=rid,
        input_ids=check_tokens(vocabulary).tolist(),
        sampling_params={"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        extra_key=rid,
    )


def _bucket(path: Path) -> dict[str, Any]:
    """A file in shared memory as SGLang's flattened bucket, in memory that it can share."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    places, data = read_snapshot(path)
    if torch.cuda.is_available():
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        flat = data.to("cuda")
        torch.cuda.synchronize()
    else:
        flat = torch.empty(len(data), dtype=torch.uint8).share_memory_()
        flat.copy_(data)
    metadata = [
        FlattenedTensorMetadata(
            name=place.name,
            shape=torch.Size(place.shape),
            dtype=place.dtype,
            start_idx=place.start,
            end_idx=place.end,
            numel=place.end - place.start,
        )
        for place in places
    ]
    return {"flattened_tensor": flat, "metadata": metadata}
