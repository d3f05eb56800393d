"""Fill the tables of a Markdown page from result files.

    python -m hf_linattn.benchmark.readme README.md [--check]

A table stands between two comments, and the first names its file, and the part of it where the file holds several:

    <!-- table: model_cards/demo/results.json compare -->
    <!-- end of table -->
"""

import argparse
import re
from pathlib import Path

from .record import read_json
from .tables import render

PLACE = re.compile(r"(<!-- table: (\S+)(?: (\S+))? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def fill(text: str, folder: Path) -> str:
    """`text` with every table rendered anew from its file; paths are relative to `folder`."""

    def one(match: re.Match) -> str:
        result = read_json(folder / match[2])
        return f"{match[1]}\n{render(result[match[3]] if match[3] else result)}\n{match[4]}"

    return PLACE.sub(one, text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is not its file's")
    arguments = parser.parse_args(argv)
    text = arguments.page.read_text()
    filled = fill(text, arguments.page.parent)
    if arguments.check and filled != text:
        raise SystemExit(f"{arguments.page}: a table differs from its file; run this without --check")
    if not arguments.check:
        arguments.page.write_text(filled)


if __name__ == "__main__":
    main()
