"""Templates filled with plain data: autoescaped, so that no text of a run can become markup."""

from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mage_async.report.charts.line_chart import Chart
from mage_async.report.charts.number_format import figure, signed


def fill(template: str, **data: object) -> Markup:
    """A template of the folder `templates` with its data, as markup that others may hold."""
    return Markup(_TEMPLATES.get_template(template).render(data))


def svg(chart: Chart | None) -> Markup:
    """A chart as inline SVG, or a note where nothing was recorded."""
    return fill("chart.svg", chart=chart)


def short(value: object) -> object:
    """Numbers to a hundredth, which is enough for a drawing."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def environment(*folders: Path, finalize: Callable[[object], object] = short) -> Environment:
    """Templates of some folders, the first that has one, and then of ours."""
    made = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).with_name("templates")]),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"figure": figure, "signed": signed, "svg": svg}
    return made


STYLE = Path(__file__).with_name("templates") / "style.css"
_TEMPLATES = environment()
