"""Set the line numbers of the README's links to code, `[`name`](path#Lnn)`, to where each name is defined.

    python tests/tools/number_readme_links.py

tests/test_readme.py says when that is needed.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`(?P<name>\w+)`\]\((?P<path>[\w/]+\.py)#L(?P<line>\d+)\)")


def defined_at(name: str, path: str) -> int:
    """The line of the first `def name` or `class name` in a file."""
    lines = (ROOT / path).read_text().split("\n")
    return next(number for number, line in enumerate(lines, 1) if re.match(rf"\s*(def|class) {name}\b", line))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = LINK.sub(
        lambda m: f"[`{m['name']}`]({m['path']}#L{defined_at(m['name'], m['path'])})", readme.read_text()
    )
    readme.write_text(text)
