"""Define the messages between an actor and its SGLang process, over a private pair of sockets.

    actor                 engine's process
    Start            ->
                     <-   Serving, or Failed
    Generate         ->
                     <-   PromptCached with the first token, if requested
                     <-   Generated, or Refused
    Abort            ->                      its Generate ends with Generated
    Prepare          ->
                     <-   Prepared                while tokens are sampled
    Load             ->
                     <-   Loaded

A message is a tagged record in msgpack; arrays are raw bytes in it.
"""

from typing import Any

from mage_async.completion import Sampling
from mage_async.inference.weight_fingerprint import AcceptedWeights
from mage_async.policy_version import Provenance
from mage_async.protocol.messages import Fields


class Start(Fields):
    """Serve a model."""

    name: str
    """Name of the engine's actor."""
    directory: str
    """Directory of the model, whose weights are version 0."""
    arguments: dict[str, Any]
    """Arguments of SGLang's `ServerArgs`, by their names there."""
    max_tokens: int
    """Longest context, prompt and completion together."""


class Serving(Fields):
    """Report that the model is loaded and the process takes requests."""

    facts: str
    """Description of the server in one line."""


class Failed(Fields):
    """Report that SGLang could not be started; the process then ends."""

    reason: str


class Generate(Fields):
    """Sample a completion."""

    rid: str
    """Id of the request. All ids have the same length, 32 hex digits, because SGLang aborts every
    request whose id begins with the id to abort."""
    tokens: bytes
    """int32 [T]"""
    extra_key: str
    """SGLang's `extra_key`: the KV cache finds only prefixes of requests with an equal key, which
    names the version whose weights compute the prompt's keys and values."""
    sampling: Sampling
    seed: int
    reports_prompt: bool = False
    """Whether to send `PromptCached`."""
    allowed: bytes = b""
    """int32, ascending: the tokens that the first token is sampled from; empty for all. Log-probs
    are of the distribution over these tokens."""


class PromptCached(Fields):
    """Report that the KV cache holds a request's prompt, so that equal prompts may be sent."""

    rid: str


class Generated(Fields):
    """Report that a request has ended, finished or aborted, and return its tokens.

    Shapes: `n` sampled tokens.
    """

    rid: str
    tokens: bytes
    """int32 [n]"""
    logprobs: bytes
    """float32 [n], in nats."""
    spans: tuple[tuple[int, int], ...]
    """(first token, version) of runs of tokens, in order."""
    provenance: Provenance
    """How the versions in `spans` are known."""
    num_cached: int
    """Number of tokens of the prompt that the KV cache held."""
    is_aborted: bool
    """Whether the request was aborted before its last token."""


class Refused(Fields):
    """Report that a request cannot be served."""

    rid: str
    reason: str


class Abort(Fields):
    """End a request; `Generated` returns its tokens so far."""

    rid: str


class Prepare(Fields):
    """Do the part of a load that is possible while tokens are sampled, such as reading a file.

    A `Load` of the same version and path follows.
    """

    version: int
    path: str


class Prepared(Fields):
    """Answer a `Prepare`; an error is reported by the answer to the `Load` that follows."""


class Load(Fields):
    """Sample with other weights from here on."""

    version: int
    path: str
    """File of weights, manifest (a file that says where to request weights that the learner sends
    from memory), or model directory, as in `Engine.load`."""
    interrupts: bool
    """Whether to abort all requests first. Otherwise they are paused, and go on with their cached
    keys and values."""


class Loaded(Fields):
    """Answer a `Load`: report the weights in use, or why they could not be loaded."""

    version: int
    """Version of the weights that are in use now."""
    error: str = ""
    """Why the load failed; empty if it did not."""
    stall_s: float = 0.0
    """Duration of the pause in generation, in seconds."""
    receipt: AcceptedWeights | None = None
    """Report that the weights have the learner's fingerprint; None for a model directory, or after
    an error."""
    is_refused: bool = False
    """Whether the weights were unreadable, did not arrive or had another fingerprint, twice."""


ToServer = Start | Generate | Abort | Prepare | Load
FromServer = Serving | Failed | PromptCached | Generated | Refused | Prepared | Loaded
Message = ToServer | FromServer
