"""Define errors that people may see: each message says what is wrong, what was given, what to do.

MageError
├── ConfigError         a configuration cannot be run as written
├── TrialFault          one trial cannot go on or be sent: only its group is dropped
│   ├── InfrastructureFault  the agent is not to blame: the trial is played again first
│   │   ├── EnvironmentFault    an environment raised, or returned an invalid value
│   │   │   ├── CallFault       a call of a user's class or a text engine failed
│   │   │   │   └── NoRoom      a `reset` found no room for another object
│   │   │   ├── Fault           a user's class says that its infrastructure failed
│   │   │   ├── CapacityReached  a server of environments has no room for another session
│   │   │   └── SessionClosed   a server of environments, or the network, ended a session
│   │   ├── TurnOverdue         a completion missed its deadline
│   │   └── TurnLost            the engine died repeatedly during a turn
│   └── ContextFull         a trial outgrew the engine's longest context
├── PolicyError         a model directory or a tokenizer cannot be used
│   └── UnreadableWeights   weights are cut short, damaged, gone or not received
│       └── WeightsRefused  an engine loaded other weights than were published, twice
├── WireError           bytes that are no message of the protocol
├── PeerRefused         the learner refused this process: another build, configuration or key
└── RunError            a run cannot begin, go on or be read
    ├── DeterministicFailure  a run cannot go on, and no retry can change that
    ├── MissingField        a record in a file of a run lacks a field
    ├── DiskFull            a file could not be written for lack of space
    ├── RunFailed           a run, or a replay, that had begun ended badly
    └── Halted              the doctor ended a run; it can be resumed
"""


class MageError(Exception):
    """Base of all errors that are no bug of this program; shown in one line, without traceback."""

    is_deterministic = False
    """Whether a restarted process would fail in the same way."""


def in_utf8(text: str) -> str:
    """Return a text with "?" for halves of surrogate pairs, which no message can hold."""
    return text.encode("utf-8", "replace").decode()


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def error_text(error: BaseException) -> str:
    """Return the text of an error of any class, in a form that messages can hold."""
    try:
        return in_utf8(str(error))
    except Exception as fault:  # `__str__` of a user's class
        return f"(its text cannot be read: str() raised {type(fault).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return (error_text(error).strip() or type(error).__name__).splitlines()[0]


class ConfigError(MageError):
    """A configuration cannot be run as written."""

    is_deterministic = True


class TrialFault(MageError):
    """One trial cannot go on or be sent; its group is dropped, and the run continues."""


class InfrastructureFault(TrialFault):
    """The environment or the engine failed, not the agent.

    So the trial is played again (`environment.retries`) before its group is dropped.
    """

    kind = ""
    """Short name of the cause, such as "step() raised ValueError", equal for faults of one cause:
    only the first fault of each kind is shown to people. Empty if the cause has no name.
    """
    mistake = ""
    """What is wrong in the user's code: exception, file and line, or the wrong value that a call
    returned; equal for two tries that fail in the same way. Empty if another try may succeed: the
    call took too long, or a connection or a process was lost.
    """


class EnvironmentFault(InfrastructureFault):
    """An environment raised, returned an invalid value, or contradicted a fact that it declares."""


class CallFault(EnvironmentFault):
    """A call of a user's class, or of a text engine such as TextWorld, raised, took too long, or
    returned a wrong value.

    The next try may succeed, for example if the class calls a server that was briefly down.
    """

    def __init__(self, sentence: str, kind: str = "", mistake: str = "") -> None:
        super().__init__(sentence)
        self.kind, self.mistake = kind, mistake


class NoRoom(CallFault):
    """A `reset` raised `CapacityReached`: there was no room for another object of a user's class.
    Another try may succeed.
    """


class Fault(EnvironmentFault):
    """Raised by a user's class: its infrastructure failed, for example a server or a container."""


class CapacityReached(EnvironmentFault):
    """Raised by a user's class in `reset`: its server has no room for another session."""


class SessionClosed(EnvironmentFault):
    """A server of environments, or the network to it, ended a session."""


class TurnOverdue(InfrastructureFault):
    """A completion was not sampled by its deadline."""


class TurnLost(InfrastructureFault):
    """The engine died repeatedly while it sampled one turn; the turn itself may be the cause."""


class ContextFull(TrialFault):
    """A trial outgrew the engine's longest context."""


class PolicyError(MageError):
    """A model directory or a tokenizer cannot be used."""

    is_deterministic = True


class UnreadableWeights(PolicyError):
    """Weights are cut short, damaged, gone or not received; another try may succeed."""

    is_deterministic = False


class WeightsRefused(UnreadableWeights):
    """An engine loaded other weights than the learner published, also on a second read.

    The message names the engine's process.
    """


class WireError(MageError):
    """Bytes that are no message of the protocol: wrong tag, size, checksum or field."""


class PeerRefused(MageError):
    """The learner refused this process, which has another build, configuration or key; or no
    learner listens at the address.
    """


class RunError(MageError):
    """A run cannot begin, go on or be read."""


class MissingField(RunError, KeyError):
    """A record in a file of a run lacks a field: the file is damaged, or of another version.

    It is a `KeyError` too, because records are used as dicts.
    """

    __str__ = Exception.__str__  # that of a KeyError quotes the sentence


class DeterministicFailure(RunError):
    """A run cannot go on: the same configuration and files would fail again."""

    is_deterministic = True


class DiskFull(RunError):
    """A file could not be written for lack of space; another try may succeed.

    Args:
        problem: What could not be written, and why.
        advice: What to do if nobody tries again.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}; {advice}")
        self.problem = problem


# Here, not beside the other notes in `results/progress.py`: every child process imports this text,
# and that module imports a third of what a worker process of an environment imports.
MAKE_ROOM = "Make room, and the run goes on by itself"
"""Part of a note on a full disk: the run waits for space."""


class RunFailed(RunError):
    """A run or a replay failed after it had begun; `mage` exits with status 1, not 2."""


class Halted(RunError):
    """The doctor ended a run because of a signature in `doctor.halt`; the run can be resumed."""
