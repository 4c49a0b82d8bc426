"""HTML that cannot be injected into: text is escaped unless it is `Markup`, which only these functions make."""

from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Markup | float | int | None


def tag(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """An element. Attribute `cls` is `class`, `_` in names is `-`; children and values that are None are left out."""
    written = "".join(
        f' {_attribute(key)}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Children one after another, escaped where they are not markup."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def _escaped(child: Child) -> str:
    return child if isinstance(child, Markup) else escape(_text(child))


def _attribute(name: str) -> str:
    return "class" if name == "cls" else name.strip("_").replace("_", "-")


def _text(value: Child) -> str:
    """Numbers as short as they are exact to a hundredth, so that a drawing stays small."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
