"""The graph memory of a run: the strategies of a version with their weights."""

import itertools
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from mage_async.pages.frame import Frame
from mage_async.pages.templating import fill


def memory_page(frame: Frame, line: Mapping[str, Any] | None, last: int) -> Markup:
    """Strategies by kind of task, the most relevant first.

    Args:
        line: of the run's file, that of the version shown; None: the run has no memory.
        last: the newest version.
    """
    rows = line["strategies"] if line else []
    kinds = itertools.groupby(rows, key=lambda row: f"{row['kind']}, seat {row['seat']}")
    return fill(
        "memory.html",
        frame=frame,
        version=line["version"] if line else None,
        last=last,
        kinds=[(kind, list(of)) for kind, of in kinds],
    )
