"""What a request asks for, and what every page of a run needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mage_async.assembly import environment_of
from mage_async.config import config_file
from mage_async.config.schema import Config
from mage_async.environments.catalogue import names
from mage_async.errors import MageError, RunError
from mage_async.inference.chat_files import load_chat
from mage_async.pages.frame import Frame, Link, progress_note
from mage_async.pages.trial_lists import Choice
from mage_async.pages.turns import Decode
from mage_async.results.run_directory import RunDirectory
from mage_async.results.run_files import read_document
from mage_services.view.credit_process import Credits
from mage_services.view.found_runs import changed_at
from mage_services.view.index.run_reader import RunReader

MOST_CONSIDERED = 5_000
"""Trials that a list is narrowed from, the newest ones."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a page of a run."""

    base: str
    runs: Mapping[str, RunDirectory]
    name: str
    """Of the run."""
    numbers: Mapping[str, int]
    """Numbers of the address: a step, a group, a trial, a turn."""
    query: Mapping[str, str]
    credits: Credits
    """What steps made of turns."""
    fault: str = ""
    """Why the run's index does not grow any more."""

    @property
    def run(self) -> RunDirectory:
        """The run."""
        return self.runs[self.name]

    def frame(
        self,
        reader: RunReader | None,
        title: str,
        tab: str | None = None,
        above: Sequence[tuple[str, str]] = (),
        before: str = "",
        after: str = "",
    ) -> Frame:
        """The page's surroundings; addresses are below the run's.

        Args:
            above: label and address of the pages above, below that of the run itself.
        """
        home = Frame(self.base, "", self.name).home
        crumbs = [] if tab == "" else [Link(self.name, home)]
        crumbs += [Link(label, home + address) for label, address in above]
        note = self.fault or (progress_note(reader.progress()) if reader else "")
        before, after = (home + address if address else "" for address in (before, after))
        return Frame(self.base, title, self.name, tab, crumbs, before, after, note)

    def number(self, name: str, default: int) -> int:
        """A whole number of the query.

        Raises: RunError: it is none.
        """
        text = self.query.get(name, "")
        if not text:
            return default
        if not text.isascii() or not text.isdecimal() or len(text) > 15:
            raise RunError(f"{name} is a whole number of at most 15 digits, got {text[:40]!r}")
        return int(text)

    def choice(self, first: int, last: int) -> Choice:
        """Which trials the query asks for, of these steps unless it says otherwise."""
        has_bin = bool(self.query.get("bin"))
        return Choice(
            first=self.number("first", first),
            last=self.number("last", last),
            episode=self.number("episode", 0),
            bin=self.number("bin", 0) if has_bin else None,
            member=self.query.get("member", ""),
            only_invalid=bool(self.query.get("only_invalid")),
            text=self.query.get("text", "").strip(),
            behind=self.number("behind", 0),
        )


def config_of(run: RunDirectory) -> Config:
    """The configuration of a run.

    Raises:
        RunError: there is none.
        ConfigError: it is not one of this version.
    """
    if not run.config.is_file():
        raise RunError(f"{run.root} is no run directory any more: it has no {run.config.name}")
    state = run.config.stat()
    return _config(run.config, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _config(file: Path, _changed_ns: int, _size: int) -> Config:
    return config_file.load_recorded(file)


def units_of(run: RunDirectory, config: Config) -> int | None:
    """Units of an episode, by which returns are divided; None where that is not known. The code of
    a user's own environment is not run to look at it.
    """
    summary: dict[str, Any] = read_document(run.summary)
    if summary:
        return summary["environment"]["units"]
    return environment_of(config).facts.units if config.environment.name in names() else None


def decode_of(run: RunDirectory) -> tuple[Decode, str]:
    """How a run's policy reads tokens, and why only their numbers can be shown, or ""."""
    file = run.policy / "tokenizer.json"
    return _decode(run.policy, changed_at(file))


@lru_cache(maxsize=8)
def _decode(policy: Path, _changed_at: float) -> tuple[Decode, str]:
    try:
        return load_chat(policy).decode, ""
    except MageError as error:
        return _numbers, f"Tokens are shown by their numbers: {error}"


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(f"⟨{token}⟩" for token in tokens)
