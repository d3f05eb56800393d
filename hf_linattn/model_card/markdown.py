"""Pieces of Markdown."""


def link(file: str) -> str:
    return f"[{file}]({file})"


def inline(text: str) -> str:
    """Code within a line, line ends as they are written in Python."""
    return f"`{quoted(text)}`"


def fenced(text: str, language: str) -> str:
    """A code block; its fence is longer than any inside."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def folded(summary: str, text: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def quoted(text: str) -> str:
    """A Python string in double quotes."""
    return '"' + repr(text)[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
