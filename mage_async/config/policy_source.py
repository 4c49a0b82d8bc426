"""Which `policy.source` is a directory of this machine, and which is a model of the hub."""

from pathlib import Path

from mage_async.config.sections.policy import Policy, Pretrained
from mage_async.errors import PolicyError


def check_source(policy: Policy) -> None:
    """Refuse a `policy.source` that cannot be meant, before anything is written; see
    `local_policy`.
    """
    if isinstance(policy, Pretrained):
        local_policy(policy.source)


def local_policy(source: str) -> Path | None:
    """The model directory that a source names; None where it is a hub id.

    Raises:
        PolicyError: it can only be meant as a directory, and there is no model in it.
    """
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise PolicyError(
                f"{source}: no config.json, so this is no HuggingFace model directory"
            )
        return Path(source).resolve()
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise PolicyError(f"policy.source {source!r} is no directory; give one, or a hub id")
    return None
