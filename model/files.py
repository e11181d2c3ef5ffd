"""Files that are whole or not there: whoever reads one, or kills its writer, finds the old file or the new one."""

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write text, or what `content` writes to the path that it is given, beside `path`; then put it there."""
    partial_file = path.with_name(f"{path.name}.{os.getpid()}.part")
    if isinstance(content, str):
        partial_file.write_text(content, encoding="utf-8")
    else:
        content(partial_file)
    os.replace(partial_file, path)
