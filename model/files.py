"""Files that a user names, and files that are whole or not there.

Whoever reads one of the latter, or kills its writer, finds the old file or the new one.
"""

import os
from collections.abc import Callable
from pathlib import Path

from model.errors import UsageError, UserError


def write_atomically(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write text, or what `content` writes to the path that it is given, beside `path`; then put it there."""
    partial_file = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if isinstance(content, str):
            partial_file.write_text(content, encoding="utf-8")
        else:
            content(partial_file)
        os.replace(partial_file, path)
    except BaseException:  # a full disk, Ctrl-C: a part of the file is of no use, and takes room
        partial_file.unlink(missing_ok=True)
        raise


def check_directory(path: Path, flag: str) -> None:
    """UsageError where something else than a directory is in the way of one."""
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        raise UsageError(f"{flag} {path}: {nearest} is a file: name a directory")


def read_text(path: str | Path) -> str:
    """The text of a file. UsageError where there is none of that name, UserError where it is not to be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not UTF-8") from error
    except OSError as error:
        named_wrongly = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
        raise (UsageError if named_wrongly else UserError)(f"cannot read {path}: {error.strerror}") from error
