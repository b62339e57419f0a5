"""Write the tables of the documentation that come from the code.

python docs/generate.py            writes them
python docs/generate.py --check    only looks, and fails when one is out of date or stands nowhere

In a Markdown file beside this one a table stands between a line ``<!-- table: NAME -->`` and a line
``<!-- end of table -->``; the words around them are written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hicache_async import WritePolicy
from hicache_async.core.write_policy_tables import TERMS, TIERS

DOCS = Path(__file__).parent
PLACE = re.compile(
    r"^(?P<start><!-- table: (?P<name>\S+) -->\n).*?^(?P<end><!-- end of table -->)$",
    re.MULTILINE | re.DOTALL,
)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a cell must not hold a line break or an upright bar."""
    lines = [f"| {' | '.join(map(str, line))} |\n" for line in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def tiers_table() -> str:
    """Return what is in which tier, a row for each stage of a prompt's life."""
    rows = [[stage, *(row[policy] for policy in WritePolicy)] for stage, row in TIERS.items()]
    return markdown_table(["a prompt that was", *(f"`{policy}`" for policy in WritePolicy)], rows)


def terms_table() -> str:
    """Return what each policy asks for, copies and can lose."""
    rows = [[name, *(row[policy] for policy in WritePolicy)] for name, row in TERMS.items()]
    return markdown_table(["", *(f"`{policy}`" for policy in WritePolicy)], rows)


TABLES: dict[str, Callable[[], str]] = {
    "write-policy-tiers": tiers_table,
    "write-policy-terms": terms_table,
}


def generate(folder: Path, *, check: bool) -> list[str]:
    """Put every table where the Markdown files of ``folder`` want it.

    Args:
        check: change nothing.
    Returns: what was wrong before, a line each.
    """
    wrong: list[str] = []
    missing = set(TABLES)
    for path in sorted(folder.glob("*.md")):
        text = before = path.read_text(encoding="utf-8")
        for place in reversed(list(PLACE.finditer(text))):
            name = place["name"]
            if name not in TABLES:
                wrong.append(f"{path.name}: there is no table {name}; there are {', '.join(TABLES)}")
                continue
            missing.discard(name)
            table = f"{place['start']}\n{TABLES[name]()}\n{place['end']}"
            if table != place[0]:
                wrong.append(f"{path.name}: {name} is out of date; run python docs/generate.py")
                text = text[: place.start()] + table + text[place.end() :]
        if text != before and not check:
            path.write_text(text, encoding="utf-8")
    return wrong + [f"no file has a place for the table {name}" for name in sorted(missing)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write the tables of the documentation from the code.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail when one is out of date")
    options = parser.parse_args(arguments)
    if not options.check:
        generate(DOCS, check=False)
    wrong = generate(DOCS, check=True)
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
