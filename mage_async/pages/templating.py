"""Templates of pages: those of reports, and ours. Every text is escaped, and made visible."""

from pathlib import Path

from markupsafe import Markup

from mage_async.report.templating import environment, short

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_HIDDEN = {
    *range(0x7F, 0xA0),
    *range(0x200B, 0x2010),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
}
_VISIBLE = _PICTURES | {code: f"⟨U+{code:04X}⟩" for code in _HIDDEN}


def visible(text: str) -> str:
    """Text whose control characters are seen: terminal escapes, and signs that turn the direction.

    Markup stays markup; what it holds has been made visible where it was filled in.
    """
    return text if isinstance(text, Markup) else text.translate(_VISIBLE)


def _finalize(value: object) -> object:
    return visible(value) if isinstance(value, str) else short(value)


_TEMPLATES = environment(Path(__file__).with_name("templates"), finalize=_finalize)


def fill(template: str, **data: object) -> Markup:
    """A template of ours or of a report with its data."""
    return Markup(_TEMPLATES.get_template(template).render(data))
