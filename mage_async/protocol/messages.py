"""Every message that crosses a socket: its fields and their bounds.

    peer                      learner
    Hello                ->
                         <-   Welcome, or Refusal            WhoAreYou, where no Hello came first
                         <-   GroupGrant
    TrialResult          ->
                         <-   Acknowledge, or Unwanted
    GroupDrop            ->
                         <-   Publication
    Loaded               ->
    Heartbeat            ->
    Goodbye              <->  Goodbye

`codec.py` makes frames of a message and reads them back, and holds both sides to the bounds here.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mage_async.protocol.trial_frames import TrialResult
from mage_async.protocol.trial_header import TrialHeader
from mage_async.trajectory import Guidance

MAX_REASON_CHARS = 2000
"""Cut a reason to this length before sending it."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Digest = Annotated[str, Meta(min_length=1, max_length=128)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=65_536)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Measured = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Finite: NaN fails every comparison."""
Booked = Annotated[float, Meta(ge=0, le=1e9)]


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """A record of named fields, without arrays; its tag is its name."""


class Hello(Fields):
    """The first message of a peer, and again after `WhoAreYou`."""

    role: Literal["actor", "evaluator"]
    name: Name
    build: Digest
    """What the peer was built from; must equal the learner's."""
    config_digest: Digest
    credits: Annotated[int, Meta(ge=0, le=65_536)]
    """Most groups the peer plays at one time."""


class Welcome(Fields):
    """The learner takes the peer in, or takes it in anew: after a restart of the learner, a silence
    of the peer, a missed deadline, a full disk.

    The peer sends again what was not acknowledged, and drops every group that it may not keep.
    """

    version: Number
    weights_path: Path | None = None
    """None: no weights were published yet."""
    keeps: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=65_536)] = ()
    """Grant and epoch of the groups that the peer still plays; all others have ended or have been
    granted to another peer."""


class Refusal(Fields):
    """The learner does not take the peer in; final."""

    reason: Reason


class WhoAreYou(Fields):
    """Answer to anything but a Hello from an unknown peer, as after a restart of the learner; once,
    until it says hello.

    What the peer had sent, and sends before it says hello, is not taken, and not acknowledged.
    """


class Rival(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A version of the policy in the opponent's seat."""

    version: Number
    path: Path
    """Location of the rival's weights, kept there while the group is in flight."""


class GroupGrant(Fields):
    """One group may be played: a slot, until its trials are trained or the group is dropped."""

    grant: Number
    epoch: Number
    """How often the group was granted before."""
    environment: Name
    member: Name
    seat: Number
    seed: Number
    num_trials: Count
    num_episodes: Count
    version: Number
    """The policy version of the (first) grant; staleness is bounded from here."""
    deadline_s: Seconds
    """From now on; after it the group is granted to someone else."""
    held: Annotated[tuple[Number, ...], Meta(max_length=65_536)] = ()
    """Trials that arrived under an earlier epoch; they need not be played again."""
    rival: Rival | None = None
    """Where `member` is a version of the policy: which, and where it lies."""
    max_turns: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Most actions of an episode; 0: as many as the environment allows."""
    guidance: Guidance | None = None
    """What the first trials of the group are told of earlier tasks."""


class GroupDrop(Fields):
    """A peer gives a group up."""

    grant: Number
    epoch: Number
    reason: Reason


class Acknowledge(Fields):
    """The learner holds this trial; the peer may forget it."""

    grant: Number
    epoch: Number
    trial: Number
    is_duplicate: bool


class Unwanted(Fields):
    """The learner knows of no such trial and does not take it; the peer may forget it."""

    grant: Number
    epoch: Number
    trial: Number
    reason: Reason


class Publication(Fields):
    """Weights are ready to be mapped."""

    version: Number
    path: Path
    digest: Digest


class Loaded(Fields):
    """A peer draws with this version, and reads no older one any more.

    The other fields are the engine's receipt, which has agreed with the learner's
    (`mage_async/inference/receipts/`).
    """

    version: Number
    digest: Annotated[str, Meta(max_length=128)] = ""
    """Of all tensors that were loaded, "unseen" where no host saw them; empty where the weights had
    no receipt."""
    difference: Booked = 0.0
    """Mean distance of the check tokens' log-probs from the learner's, in nats."""
    num_retries: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Times that other weights were read first."""


class Heartbeat(Fields):
    """A peer lives. Counters are totals since its start, by name; blocked seconds by cause."""

    name: Name
    counters: Annotated[dict[Name, Measured], Meta(max_length=256)]
    blocked_s: Annotated[dict[Name, Booked], Meta(max_length=64)]


class Goodbye(Fields):
    """The sender ends its side; nothing follows."""

    reason: Reason


Header = (
    Hello
    | Welcome
    | Refusal
    | WhoAreYou
    | GroupGrant
    | GroupDrop
    | Acknowledge
    | Unwanted
    | Publication
    | Loaded
    | Heartbeat
    | Goodbye
    | TrialHeader
)
Message = (
    Hello
    | Welcome
    | Refusal
    | WhoAreYou
    | GroupGrant
    | GroupDrop
    | Acknowledge
    | Unwanted
    | Publication
    | Loaded
    | Heartbeat
    | Goodbye
    | TrialResult
)
