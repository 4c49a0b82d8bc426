"""The errors a person may meet. Each says what, what was got, and what to do.

MageError
├── ConfigError         a configuration cannot be run as written
├── TrialFault          one trial cannot be played on or sent: costs its group and no more
│   ├── EnvironmentFault    an environment raised, or broke a fact it declared
│   │   ├── CallFault       a call of `step`, `act` and the like did, or took too long
│   │   │   └── CapacityFault   a `reset` found no room for another object
│   │   ├── CapacityReached  a server of environments has no room for another session
│   │   └── SessionClosed   a server of environments, or the network, ended a session
│   ├── TurnOverdue         a turn was not drawn by its deadline
│   ├── TurnLost            the engine died of a turn again and again
│   └── ContextFull         a trial outgrew the engine's longest context
├── PolicyError         a model directory or a tokenizer cannot be used
│   └── UnreadableWeights   weights are cut short, damaged, gone or not received
│       └── WeightsRefused  an engine loads other weights than were published, again and again
├── WireError           bytes that are no message of ours
├── PeerRefused         a peer of another build or configuration
└── RunError            a run cannot begin, go on or be read
    ├── DeterministicFailure  a run cannot go on, and no retry can change that
    ├── RunFailed           a run, or a replay, that had begun ended badly
    └── Halted              the doctor ended a run; it can be resumed
"""


class MageError(Exception):
    """Anything that is not a bug of ours; shown as one line, without a traceback."""

    is_deterministic = False
    """Whether a process that is started again would fail in the same way."""


class ConfigError(MageError):
    """A configuration cannot be run as written."""

    is_deterministic = True


class TrialFault(MageError):
    """One trial cannot be played on or sent; costs its group, and the run goes on."""


class EnvironmentFault(TrialFault):
    """An environment raised, or broke a fact it declared."""


class CallFault(EnvironmentFault):
    """A call into a class of a user's own, or into a text engine, raised, took too long, or
    returned what it may not: as other people's servers do now and then.
    """


class CapacityFault(CallFault):
    """A `reset` found no room for another object: another try may succeed."""


class CapacityReached(EnvironmentFault):
    """A server of environments has no room for another session; a class raises it in `reset`."""


class SessionClosed(EnvironmentFault):
    """A server of environments, or the network to it, ended a session."""


class TurnOverdue(TrialFault):
    """A turn was not drawn by its deadline."""


class TurnLost(TrialFault):
    """The engine died again and again while a turn was drawn, perhaps of it."""


class ContextFull(TrialFault):
    """A trial outgrew the engine's longest context."""


class PolicyError(MageError):
    """A model directory or a tokenizer cannot be used."""

    is_deterministic = True


class UnreadableWeights(PolicyError):
    """Weights are cut short, damaged, gone or not received; another try may succeed."""

    is_deterministic = False


class WeightsRefused(UnreadableWeights):
    """An engine has loaded other weights than the learner published, and again when the weights
    were read once more; the sentence names the engine's process.
    """


class WireError(MageError):
    """Bytes that are no message of ours: wrong tag, size, checksum or field."""


class PeerRefused(MageError):
    """A peer of another build or configuration."""


class RunError(MageError):
    """A run cannot begin, go on or be read."""


class DeterministicFailure(RunError):
    """A run cannot go on; the same configuration and files would fail again."""

    is_deterministic = True


class RunFailed(RunError):
    """A run, or a replay of one, that had begun ended badly; `mage` ends with status 1, not 2."""


class Halted(RunError):
    """The doctor ended a run because of a signature that `doctor.halt` names; it can be resumed."""
