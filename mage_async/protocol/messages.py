"""Define every message between the learner and its peers: fields, types and bounds.

`codec.py` turns a message into frames and back, and checks these bounds on both sides.
"""

from typing import Annotated, Literal, dataclass_transform

import msgspec
from msgspec import Meta

from mage_async.protocol.trial_arrays import EpisodeHeader, TrialHeader
from mage_async.protocol.trial_arrays import EpisodeResult as EpisodeResult
from mage_async.protocol.trial_arrays import TrialResult as TrialResult
from mage_async.trajectory import MAX_NAME_CHARS, Guidance

# A peer is an actor or the evaluator, by one connection: a restarted process is a new peer.
#
#     peer                      learner
#     Hello                ->
#                          <-   Welcome or Refusal; WhoAreYou if no Hello came first
#                          <-   GroupGrant
#     TrialResult          ->
#                          <-   Acknowledge or Unwanted
#     EpisodeResult        ->
#                          <-   EpisodeResult, before the GroupGrant of an unfinished group
#     GroupDrop            ->
#                          <-   Publication
#     Loaded               ->
#     Heartbeat            ->
#     Goodbye              <->  Goodbye

MAX_REASON_CHARS = 2000
"""Largest number of characters of a reason in a message; the sender cuts a longer one."""
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Digest = Annotated[str, Meta(min_length=1, max_length=128)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A number that is not negative and fits into a signed integer of 64 bits."""
Count = Annotated[int, Meta(ge=1, le=65_536)]
CountOrZero = Annotated[int, Meta(ge=0, le=65_536)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A finite number; NaN fails both comparisons."""
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base class of messages that have no arrays. A message is tagged with its class's name."""


class Hello(Fields):
    """Introduce a peer: its first message, and its answer to `WhoAreYou`."""

    role: Literal["actor", "evaluator"]
    name: Name
    build: Digest
    """Digest of the peer's program; it must equal the learner's."""
    config_digest: Digest
    """Digest of the peer's configuration; it must equal the learner's."""
    group_quota: CountOrZero
    """Largest number of groups that the peer plays concurrently."""


class Welcome(Fields):
    """Accept a peer: after its `Hello`, and again when its state may have changed.

    The state may change while the peer is silent, at a missed deadline, or on a full disk. The peer
    sends again every result that was not acknowledged, and drops every group that is not in
    `keeps`.
    """

    version: Number
    weights_path: Path | None = None
    """Path of the newest weights; None if no weights were published."""
    keeps: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=65_536)] = ()
    """Grant and epoch of the groups that the peer still plays. All other groups have ended, or are
    granted to another peer."""


class Refusal(Fields):
    """Refuse a peer for good; its process ends."""

    reason: Reason


class WhoAreYou(Fields):
    """Report that the learner does not know the peer, as after a restart of the learner, and
    request a `Hello`.

    The learner sends this message once. It neither reads nor acknowledges what the peer sends
    before its `Hello`.
    """


class Rival(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Name a past version of the policy that plays the opponent's seat."""

    version: Number
    path: Path
    """Path of its weights, which are kept while the group is in flight."""


class OfGroup(Fields):
    """Hold the fields of a message about a group; base class."""

    grant: Number
    """Number of the group, which stays the same when the group is granted again."""
    epoch: Number
    """Number of earlier grants of this group."""


class GroupGrant(OfGroup):
    """Allow the peer to play one group of trials."""

    environment: Name
    member: Name
    """Name of the hidden opponent or task variant."""
    seat: Number
    seed: Number
    num_trials: Count
    num_episodes: Count
    version: Number
    """Oldest policy version that may play the group: the version at its first grant, less
    `admission.lag`."""
    deadline_s: Seconds
    """Seconds from now after which the group is granted to another peer."""
    held: Annotated[tuple[Number, ...], Meta(max_length=65_536)] = ()
    """Indices of trials that have arrived already; the peer does not play them."""
    rival: Rival | None = None
    """Weights of the opponent, if `member` is a past version of the policy."""
    max_turns: CountOrZero = 0
    """Largest number of actions in an episode; 0 for as many as the environment allows."""
    guidance: Guidance | None = None
    """Strategies from earlier tasks for the prompts of the group's first trials."""


class GroupDrop(OfGroup):
    """Report that a peer cannot play a group to its end."""

    reason: Reason
    num_turns: Number = 0
    """Number of turns of its unfinished trials so far."""


class Acknowledge(OfGroup):
    """Report that the learner's journal holds the trial durably; the peer may forget it."""

    trial: Number
    """Index of the trial in its group."""
    is_duplicate: bool
    """Whether the trial had arrived before; this copy was discarded."""


class Unwanted(OfGroup):
    """Report that the learner granted no such trial and discards it; the peer may forget it."""

    trial: Number
    reason: Reason


class Publication(Fields):
    """Report that the weights of a version are ready to be loaded."""

    version: Number
    path: Path
    digest: Digest


class Loaded(Fields):
    """Report that a peer samples with this version, and no longer reads older weights.

    The other fields are the engine's fingerprint of the weights that it loaded, after it agreed
    with the learner's (`mage_async/inference/weight_fingerprint.py`).
    """

    version: Number
    digest: Annotated[str, Meta(max_length=128)] = ""
    """Digest of all loaded tensors; "unseen" if they never were in host memory; "" if the weights
    were published without a fingerprint.
    """
    difference: NonNegative = 0.0
    """Mean absolute difference from the learner's log-probs of the probe tokens, in nats; 0 if the
    version was published without such log-probs."""
    num_retries: CountOrZero = 0
    """Number of loads before this one whose fingerprint did not agree with the learner's."""


class Heartbeat(Fields):
    """Report that the peer is alive, with totals since it started."""

    name: Name
    counters: Annotated[dict[Name, Finite], Meta(max_length=256)]
    """Totals by name."""
    blocked_s: Annotated[dict[Name, NonNegative], Meta(max_length=64)]
    """Seconds in each state of the peer, by the state's name: work as well as waits."""
    turns: Annotated[tuple[tuple[Number, Number, Number], ...], Meta(max_length=65_536)] = ()
    """Grant and epoch of each group that the peer plays, and the number of turns that its
    unfinished trials have had."""


class Goodbye(Fields):
    """End the connection; no message follows."""

    reason: Reason


_FromPeer = Hello | GroupDrop | Loaded | Heartbeat
_FromLearner = Welcome | Refusal | WhoAreYou | GroupGrant | Acknowledge | Unwanted | Publication
_WithoutArrays = _FromPeer | _FromLearner | Goodbye
Message = _WithoutArrays | TrialResult | EpisodeResult
Header = _WithoutArrays | TrialHeader | EpisodeHeader
"""Content of a message's header frame; a trial's arrays are in frames of their own."""
