"""Numbers as a person reads them, and round numbers for axes."""

import math

MINUS = "−"


def signed(value: float, digits: int = 2) -> str:
    """A return: +0.75, −0.02, and 0.00 without a sign."""
    text = f"{abs(value):.{digits}f}"
    is_zero = float(text) == 0
    return text if is_zero else ("+" if value > 0 else MINUS) + text


def figure(value: float) -> str:
    """Three digits that matter: 0.0123, 1.23, 12.3, 1,234, 12.3k, 1.23M, 8.1e−7."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.2f}M".replace("-", MINUS)
    if size >= 1e4:
        return f"{value / 1e3:.1f}k".replace("-", MINUS)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}".replace("-", MINUS)
    if 0 < size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("-", MINUS)
    return (
        f"{value:.{2 - math.floor(math.log10(size))}f}".rstrip("0").rstrip(".").replace("-", MINUS)
    )


def percent(share: float) -> str:
    """71 %, and 0.4 % where it is small."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def duration(seconds: float) -> str:
    """9.3 s, 1 min 36 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`; the first and last may lie inside."""
    raw = (high - low) / max(1, count - 1)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def words(name: str) -> str:
    """A name of ours as words: `trials_per_s` is trials/s."""
    return name.replace("_per_s", "/s").replace("_", " ")
