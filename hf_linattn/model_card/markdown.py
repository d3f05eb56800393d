"""Pieces of Markdown."""

import json


def link(file: str) -> str:
    return f"[{file}]({file})"


def fenced(text: str, language: str) -> str:
    """A code block; its fence is longer than any inside."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def folded(summary: str, text: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def quoted(text: str) -> str:
    """A Python string in double quotes: what JSON writes is one."""
    return json.dumps(text, ensure_ascii=False)
