"""What loaders of environments on other machines have in common: addresses, and what is seen."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from mage_async.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Observed:
    """What a server answered to `reset` or `step`."""

    said: str
    reward: float
    is_done: bool
    is_valid: bool = True
    legal_actions: tuple[str, ...] = ()


def address_of(library: str, url: str) -> str:
    """A server's address, with a slash at its end.

    Raises:
        ConfigError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        name = f"{library}:{url}"
        raise ConfigError(f"environment {name!r}: write it as {library}:http://HOST:PORT")
    return f"{url.rstrip('/')}/"


def texts_of(value: object) -> tuple[str, ...] | None:
    """The texts of a list, such as legal actions; None where it is no list of texts."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return None
