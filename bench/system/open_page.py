"""Request a page of `mage view` again and again, as a browser does that has it open.

As in `static/view.js`, the page is requested after an event, at most once in `LEAST_MS`. The
browser's drawing is left out.
"""

import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import mage_services.view.server
from bench.system.view_pages import Pages

# The script of the pages, from which the pause is read.
SCRIPT = Path(mage_services.view.server.__file__).parent / "static" / "view.js"
_FOUND = re.search(r"^const LEAST_MS = (\d+);", SCRIPT.read_text(), re.MULTILINE)
assert _FOUND is not None, f"{SCRIPT} names no LEAST_MS"
LEAST_S = int(_FOUND[1]) / 1000


@dataclass(slots=True)
class OpenPage:
    """Hold an open page: what was requested last, and how often."""

    address: str
    path: str
    num_answers: int = 0
    text: str = ""
    """Text of the last answer."""
    is_stale: threading.Event = field(default_factory=threading.Event)
    has_ended: bool = False

    def listen(self) -> None:
        """Receive events until the server ends."""
        events = Pages(self.address).events(run=self.path.split("/")[1])
        with suppress(HTTPException, ConnectionError):
            while line := events.readline():
                if line.startswith(b"data:"):
                    self.is_stale.set()
        self.has_ended = True
        self.is_stale.set()

    def look(self) -> None:
        """Request the page, and again whenever it is stale, until the server ends."""
        pages, pause = Pages(self.address), threading.Event()
        with suppress(HTTPException, ConnectionError):
            while not self.has_ended:
                looked_at = time.monotonic()
                _, self.text = pages.get(self.path)
                self.num_answers += 1
                self.is_stale.wait()
                pause.wait(max(0.0, looked_at + LEAST_S - time.monotonic()))
                self.is_stale.clear()


def open_page(address: str, path: str) -> OpenPage:
    """Open a page, which stays open until its server ends."""
    page = OpenPage(address, path)
    for act in (page.listen, page.look):
        threading.Thread(target=act, daemon=True).start()
    return page
