"""Markdown tables."""

from collections.abc import Iterator, Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], names: int = 2) -> Iterator[str]:
    """A table, line by line. Its first `names` columns are names, aligned left; figures are aligned right."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * names + "---:|" * (len(heads) - names)
    for cells in rows:
        yield f"| {' | '.join(cells)} |"
