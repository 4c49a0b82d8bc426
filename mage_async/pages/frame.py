"""What surrounds every page: where it lies among the others, and what it follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from mage_async.pages.listed import IndexProgress
from mage_async.report.charts.number_format import percent

TABS = {
    "": "overview",
    "trials": "trials",
    "evaluation": "evaluation",
    "memory": "memory",
    "processes": "processes",
    "config": "configuration",
    "play": "play",
}
"""Pages of a run by their address below the run's."""
KEYS = (
    ("j, k", "next and previous in a list"),
    ("Enter", "open what is marked"),
    ("←, →", "the page before and after: step, group, turn"),
    ("↑, u", "up: from a turn to its group, its step, its run"),
    ("/", "search in the text of trials"),
    ("?", "these keys"),
)


SMALL_REST = 2_000_000
"""Bytes that a run may be ahead of its index without a word."""


@dataclass(frozen=True, slots=True)
class Link:
    """Where one may go from a page."""

    label: str
    address: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A page's surroundings. Addresses are relative to `base`."""

    base: str
    title: str
    run: str = ""
    """The name of the run the page is of; empty for the list of runs."""
    tab: str | None = None
    crumbs: Sequence[Link] = ()
    """What lies above the page, the highest first."""
    before: str = ""
    after: str = ""
    """Addresses of the neighbours; empty for none."""
    note: str = ""
    """How far the run's index has come, where it is not whole."""

    @property
    def home(self) -> str:
        """The address of the run."""
        return run_address(self.run)

    @property
    def home_path(self) -> str:
        """The same from the server's root."""
        return self.base + self.home

    @property
    def tabs(self) -> list[tuple[str, str, bool]]:
        """Label, address, and whether it is this page."""
        if not self.run:
            return []
        return [(label, f"{self.home}{path}", path == self.tab) for path, label in TABS.items()]

    @property
    def keys(self) -> Sequence[tuple[str, str]]:
        """What the keyboard does."""
        return KEYS


def run_address(name: str) -> str:
    """The address of a run by its name."""
    return f"runs/{quote(name, safe='')}/"


def progress_note(progress: IndexProgress) -> str:
    """What is missing from lists, in one sentence; empty where nothing is."""
    if progress.total - progress.read < SMALL_REST or progress.share > 0.999:
        return ""
    return (
        f"{percent(progress.share)} of this run's files are in the index so far, the newest first: "
        "lists grow while it is built."
    )
