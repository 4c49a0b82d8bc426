"""The errors a person may meet. Each says what, what was got, and what to do.

MageError
├── ConfigError         a configuration cannot be run as written
├── EnvironmentFault    an environment raised, or broke a fact it declared
├── TurnOverdue         a turn was not drawn by its deadline
├── PolicyError         a model directory or a tokenizer cannot be used
├── WireError           bytes that are no message of ours
├── PeerRefused         a peer of another build or configuration
└── RunError            a run cannot begin, go on or be read
"""


class MageError(Exception):
    """Anything that is not a bug of ours; shown as one line, without a traceback."""


class ConfigError(MageError):
    """A configuration cannot be run as written."""


class EnvironmentFault(MageError):
    """An environment raised, or broke a fact it declared."""


class TurnOverdue(MageError):
    """A turn was not drawn by its deadline; costs its group."""


class PolicyError(MageError):
    """A model directory or a tokenizer cannot be used."""


class WireError(MageError):
    """Bytes that are no message of ours: wrong tag, size, checksum or field."""


class PeerRefused(MageError):
    """A peer of another build or configuration."""


class RunError(MageError):
    """A run cannot begin, go on or be read."""
