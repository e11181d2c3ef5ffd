"""Markdown tables."""

from collections.abc import Iterator, Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], names: int = 2) -> Iterator[str]:
    """A table, line by line. Its first `names` columns are names, aligned left; the others are figures, aligned right, and
    left out where no row has any."""
    kept = [place for place in range(len(heads)) if place < names or any(row[place] for row in rows)]
    yield f"| {' | '.join(heads[place] for place in kept)} |"
    yield "|" + "---|" * names + "---:|" * (len(kept) - names)
    for row in rows:
        yield f"| {' | '.join(row[place] for place in kept)} |"
