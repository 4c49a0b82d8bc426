"""Bytes that leave a GPU while the next step trains there.

The trainer's kernels stand in line on the default stream. A copy in that line would begin behind
all of them and hold up those that follow, and a copy to ordinary memory holds up the device itself.
So weights leave on a stream of their own, behind the event that says that they are copied out of
the model, and reach the host by pinned memory. Never run on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

STAGING_BYTES = 64 << 20
"""Pinned memory of a copy to the host, whatever the size of the weights."""


class Stream(Protocol):
    """What is needed of `torch.cuda.Stream`."""

    def synchronize(self) -> None:
        """Have the calling thread wait for what the stream was given."""
        ...


@contextmanager
def beside_training(data: torch.Tensor, made: torch.cuda.Event | None) -> Iterator[Stream | None]:
    """Work on a stream of its own; at the end this thread alone awaits the end of the stream.

    Args:
        data: what is worked on.
        made: happens when it holds its values; None: it does, and there is no GPU and no stream.
    """
    if made is None:
        yield None
        return
    stream = torch.cuda.Stream(data.device)
    stream.wait_event(made)
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()


def on_host(data: torch.Tensor, made: torch.cuda.Event | None) -> torch.Tensor:
    """The same bytes in memory of the host: a copy of a GPU's, the tensor itself of a CPU.

    Args:
        data: uint8 [bytes]
        made: as of `beside_training`.
    """
    with beside_training(data, made) as stream:
        if stream is None:
            return data
        return _staged(data, pinned(min(len(data), STAGING_BYTES)), stream)


def pinned(num_bytes: int) -> torch.Tensor:
    """Memory that a GPU writes to by itself: uint8 [bytes]; torch keeps it for the next copy."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _staged(data: torch.Tensor, staging: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Piece by piece through pinned memory, which is read after each piece has arrived."""
    whole = torch.empty(len(data), dtype=torch.uint8)
    size = len(staging)
    for source, target in zip(data.split(size), whole.split(size), strict=True):
        piece = staging[: len(source)]
        piece.copy_(source, non_blocking=True)
        stream.synchronize()
        target.copy_(piece)
    return whole
