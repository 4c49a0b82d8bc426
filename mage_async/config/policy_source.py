"""Which `policy.source` is a directory of this machine, and which a model of the hub."""

from pathlib import Path

from mage_async.errors import PolicyError

TINY = "tiny"
"""Built by us, of random weights."""


def local_policy(source: str) -> Path | None:
    """The model directory that a source names; None where it is a hub id, or "tiny".

    Raises:
        PolicyError: it can only be meant as a directory, and there is no model in it.
    """
    if source == TINY:
        return None
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise PolicyError(
                f"{source}: no config.json, so this is no HuggingFace model directory"
            )
        return Path(source).resolve()
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise PolicyError(
            f'policy.source {source!r} is no directory; give one, a hub id, or "tiny"'
        )
    return None
