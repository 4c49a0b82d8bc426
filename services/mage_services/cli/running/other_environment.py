"""Evaluation in another environment than a run was trained in."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mage_async.errors import ConfigError

if TYPE_CHECKING:
    from mage_async.config.schema import Config


@dataclass(frozen=True, slots=True)
class OtherEnvironment:
    """Another environment than the run's own."""

    name: str
    settings: tuple[str, ...]
    """Keys of the configuration, as `--set` takes them."""

    def folder(self) -> str:
        """Where its evaluation stands in the run."""
        return f"environment_{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)}"

    def config(self, file: Path) -> "Config":
        """The configuration that a run has recorded, with this environment."""
        from mage_async.config import config_file

        own = (f"environment.name={json.dumps(self.name)}", "environment.options={}")
        return config_file.load_recorded(file, [*own, *self.settings])


def check_words(config: "Config", policy: Path) -> None:
    """A tiny policy knows the words that it was built of, and no other.

    Raises:
        ConfigError: the environment has others.
    """
    from mage_async.assembly import environment_of
    from mage_async.config.sections.policy import Tiny
    from mage_async.inference.chat_files import load_chat

    if not isinstance(config.policy, Tiny):
        return
    chat, words = load_chat(policy), environment_of(config).facts.words
    if unknown := [word for word in words if len(chat.encode(f" {word}")) > 1]:
        raise ConfigError(
            f"environment {config.environment.name!r} has {len(unknown)} words that this tiny "
            f"policy was not built of, such as {unknown[0]!r}: train a mix in which the "
            "environment has a share of 0, or a pretrained model"
        )
