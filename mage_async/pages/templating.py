"""Fill the templates of the folder `templates` with plain data, and frame the pages of `mage view`.

All data is escaped, and its control characters are made visible, so that no text of a run can
become markup. A frame holds a page's title, its tabs, links to the pages around it, and a list
of keyboard shortcuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mage_async.pages.charts import Chart, Histogram, arrows, counted, percent, short_number, signed

TEMPLATES = Path(__file__).with_name("templates")
STYLE = TEMPLATES / "style.css"
"""Style sheet of all pages: whole pages contain it, and the server of `mage view` sends it."""


def fill(template: str, **data: object) -> Markup:
    """Return a template filled with data, as markup."""
    return Markup(_ENVIRONMENT.get_template(template).render(data))


def svg(chart: Chart | Histogram | None) -> Markup:
    """Return a chart as inline SVG, or a note if nothing was recorded."""
    if isinstance(chart, Histogram):
        return fill("histogram.svg", histogram=chart)
    return fill("chart.svg", chart=chart)


_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
"""The Unicode pictures of control characters, such as ␛ for escape."""
_HIDDEN = {
    *range(0x7F, 0xA0),  # delete, and the control characters of ISO 8859
    *range(0x200B, 0x2010),  # spaces without width, and marks of direction
    *range(0x202A, 0x202F),  # embeddings and overrides of direction
    *range(0x2066, 0x206A),  # isolates of direction
}
"""Code points that change a text invisibly."""
_VISIBLE = _PICTURES | {code: f"⟨U+{code:04X}⟩" for code in _HIDDEN}
"""Visible replacement of each control character and hidden code point."""


def visible(text: str) -> str:
    """Return text with visible control characters: terminal escapes, and marks of direction.

    Markup is returned unchanged, because the text in it was made visible when it was filled in.
    """
    return text if isinstance(text, Markup) else text.translate(_VISIBLE)


def _finalize(value: object) -> object:
    """Format a value that a template inserts."""
    # Floats that a template inserts without a filter are mostly coordinates, for which two digits
    # after the point are enough.
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return visible(value) if isinstance(value, str) else value


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    finalize=_finalize,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
for _filter in (arrows, counted, short_number, signed, svg):
    _ENVIRONMENT.filters[_filter.__name__] = _filter


# The frame of every page of `mage view`.

TABS = {
    "": "overview",
    "trials": "trials",
    "evaluation": "evaluation",
    "memory": "memory",
    "processes": "processes",
    "config": "configuration",
    "play": "play",
}
"""Labels of a run's pages, by their address relative to that of the run."""
KEYS = (
    ("j, k", "next and previous in a list"),
    ("Enter", "open the marked entry"),
    ("←, →", "the page before and after: step, group, turn"),
    ("↑, u", "up: from a turn to its group, its step, its run"),
    ("/", "search in the text of trials"),
    ("?", "these keys"),
)
"""Keyboard shortcuts, and what each does; `static/view.js` of the server implements them."""
_ENVIRONMENT.globals["keys"] = KEYS
UNINDEXED_BYTES = 2_000_000
"""Number of bytes of a run's files that the index may lack before pages of the run say so."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Hold the parts around the content of a page: title, tabs, and links to other pages."""

    base: str
    """Address of the server's first page, relative to this one; the addresses below are relative to
    it."""
    title: str
    run: str = ""
    """Name of the run that the page is about; empty for the list of runs."""
    tab: str | None = None
    """Key of `TABS`; None if the page is below a tab."""
    crumbs: Sequence[tuple[str, str]] = ()
    """Label and address of the pages above, the highest first."""
    before: str = ""
    """Address of the previous page in its list; "" for none."""
    after: str = ""
    """Address of the next page in its list; "" for none."""
    note: str = ""
    """Sentence that the index of the run is incomplete; "" if it is complete."""
    change: int = 0
    """Number of changes of the run that the server had noticed when the page was made. Once it has
    noticed more, the browser loads the page again."""

    @property
    def home(self) -> str:
        """The address of the run."""
        return run_address(self.run)

    @property
    def tabs(self) -> list[tuple[str, str, bool]]:
        """Label and address of each tab, and whether it is this page."""
        if not self.run:
            return []
        return [(label, f"{self.home}{path}", path == self.tab) for path, label in TABS.items()]


def run_address(name: str) -> str:
    """Return the address of a run by its name."""
    return f"runs/{quote(name, safe='')}/"


def progress_note(read: int, total: int) -> str:
    """Return a sentence that lists are incomplete; "" if the index of a run is complete enough.

    Args:
        read: Number of bytes of the run's files that the index has read. Unreadable bytes, such as
            a torn tail, keep it below `total`.
        total: Number of bytes of the files.
    """
    if total - read < UNINDEXED_BYTES or read > 0.999 * total:
        return ""
    return (
        f"{percent(read / total)} of this run's files are in the index so far, the newest first: "
        "lists grow while it is built."
    )
