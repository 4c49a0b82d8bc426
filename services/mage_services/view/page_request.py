"""Describe a request for a page of a run in `mage view`: its address, its query, and the page's
frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from mage_async.errors import RunError
from mage_async.pages.templating import Frame, progress_note, run_address
from mage_async.results.run_directory import RunDirectory
from mage_services.view.credit_process import CreditCache
from mage_services.view.index import RunReader


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Describe a request for a page of a run."""

    base: str
    """See `base_of`."""
    runs: Mapping[str, RunDirectory]
    """All runs below the folder of `mage view`, by name."""
    name: str
    """Name of the run."""
    numbers: Mapping[str, int]
    """Numbers in the address, by name: "step", "group", "trial" or "turn"."""
    query: Mapping[str, str]
    credits: CreditCache
    """Returns and advantages of turns."""
    fault: str = ""
    """Why the run's index no longer grows; empty if it does."""
    change: int = 0
    """Number of changes of the run that the server had noticed when the page was requested; see
    `Frame.change`."""

    @property
    def run(self) -> RunDirectory:
        """Directory of the run."""
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
        """Return the frame of the page.

        Args:
            reader: Index of the run, whose progress the page mentions; None to mention nothing.
            title: Title of the page.
            tab: Key of `TABS`; None if the page is below a tab.
            above: Label and address of each page between the run's first page and this one.
            before: Address of the previous page, relative to the run's; "" if there is none.
            after: Address of the next page, relative to the run's; "" if there is none.
        """
        home = run_address(self.name)
        # "" is the tab of the run's first page, which needs no link to itself.
        crumbs = [] if tab == "" else [(self.name, home)]
        crumbs += [(label, home + address) for label, address in above]
        note = self.fault or (progress_note(*reader.progress()) if reader else "")
        before, after = (home + address if address else "" for address in (before, after))
        return Frame(self.base, title, self.name, tab, crumbs, before, after, note, self.change)

    def number(self, name: str, default: int) -> int:
        """Return a whole number of the query; `default` if the query does not have it.

        Raises:
            RunError: the text is no whole number.
        """
        text = self.query.get(name, "")
        return whole_number(text, name) if text else default


def base_of(request: web.Request) -> str:
    """Return the address of the server's first page, relative to the requested page: a reverse
    proxy may show all pages below a prefix of its own, which this server does not know.
    """
    # The path begins with the token, as in "/TOKEN/runs/NAME/step/3", whose base is "../../../".
    return "../" * (request.rel_url.raw_path.count("/") - 2) or "./"


def whole_number(text: str, name: str) -> int:
    """Return the whole number that a person has given as `name`.

    Raises:
        RunError: the text is no whole number.
    """
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise RunError(f"{name} is a whole number of at most 15 digits, got {text[:40]!r}")
    return int(text)
