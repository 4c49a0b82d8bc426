"""Options of environments, checked; the errors say what may be written."""

from mage_async.errors import ConfigError


def check_whole(environment: str, name: str, value: object, least: int, most: int) -> None:
    """A whole number within bounds.

    Raises:
        ConfigError: it is none.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise ConfigError(
            f"{environment}: `{name}` must be a whole number from {least} to {most}, got {value!r}"
        )


def check_one_of(environment: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """One of a few values.

    Raises:
        ConfigError: it is none.
    """
    if value not in choices:
        known = " or ".join(repr(each) for each in choices)
        raise ConfigError(f"{environment}: `{name}` must be {known}, got {value!r}")
