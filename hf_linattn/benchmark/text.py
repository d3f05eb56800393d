"""A Markdown table, and how numbers are written in it."""

from collections.abc import Callable
from typing import Any


def table(header: list[str], rows: list[list[str]], align: str = "---:") -> str:
    """A Markdown table; all columns but the first are numbers and stand to the right, or as `align` says."""
    lines = [header, ["---", *[align] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.4g} GiB"


def milliseconds_text(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def ratio_text(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def signed_bytes_text(size: float) -> str:
    return f"-{bytes_text(-size)}" if size < 0 else bytes_text(size)


def operations_text(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 999.5:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:,.4g} P"


def blank(value: Any, text: Callable[[Any], str]) -> str:
    """`text(value)`, and nothing for what was not measured."""
    return "" if value is None else text(value)


def percent_text(value: float) -> str:
    return f"{100 * value:.0f}%" if value >= 0.1 else f"{100 * value:.1f}%"


def microseconds_text(milliseconds: float) -> str:
    """Milliseconds to three digits: steps of a GPU are far below one."""
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def error_text(value: float) -> str:
    return f"{value:.1e}"
