"""What an SGLang engine remembers of turns and weights that are waited for."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mage_async.completion import Completion
from mage_async.inference.kv_contexts import Opened
from mage_async.inference.receipts.receipt import Accepted
from mage_async.inference.turn_requests import Piece, TurnRequests
from mage_async.policy_version import VersionRun
from mage_services.engines.sglang.messages import Draw, Drew


@dataclass(slots=True, eq=False)
class Asked:
    """A turn, and the future that waits for it."""

    turn: TurnRequests
    future: asyncio.Future[Completion]
    opened: Opened | None = None
    """None until it is first asked."""
    key_version: int = 0
    rid: str = ""
    """Id of the request under way; empty while there is none."""
    is_warm: bool = False
    """An equal prompt has been computed."""
    num_deaths: int = 0
    """Processes that died while it was under way."""

    @property
    def is_cold(self) -> bool:
        """Whether possibly no token of its prompt has been computed."""
        return not self.is_warm and self.opened is not None and not self.opened.num_known

    def place(self) -> tuple[int, bytes]:
        """Where keys of its prompt would be found."""
        return self.key_version, self.turn.prompt.tokens.tobytes()

    def name(self) -> str:
        """The turn's name in an error."""
        return f"context {self.turn.prompt.context!r}"

    def request(self, *, says_when_it_began: bool) -> Draw:
        """Its next request."""
        prompt = self.turn.prompt
        return Draw(
            rid=self.rid,
            tokens=self.turn.tokens().astype(np.int32).tobytes(),
            key=f"v{self.key_version}",
            max_tokens=self.turn.budget(),
            temperature=prompt.sampling.temperature,
            top_p=prompt.sampling.top_p,
            top_k=prompt.sampling.top_k,
            stop_tokens=prompt.sampling.stop_tokens,
            seed=prompt.seed,
            says_when_it_began=says_when_it_began,
        )


@dataclass(slots=True, eq=False)
class WantedWeights:
    """A version on disk, and the future that waits for it."""

    version: int
    path: Path
    future: asyncio.Future[Accepted | None]
    num_deaths: int = 0
    """Processes that died while they loaded it."""


def piece_of(message: Drew, key_version: int) -> Piece:
    """What a request drew, with the versions of its tokens and of the keys they may have read."""
    runs = tuple(
        VersionRun(start, version, min(key_version, version), message.provenance)
        for start, version in message.spans
    )
    return Piece(
        np.frombuffer(message.tokens, np.int32),
        np.frombuffer(message.logprobs, np.float32),
        runs,
        message.num_cached,
        message.is_aborted,
    )


def settle(future: asyncio.Future[Any], error: BaseException | None, result: object = None) -> None:
    """Settle a future with a result or a failure, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
