"""Where the cache lies; reading text, JSON and tensors with one-line errors; atomic writes; checks of output paths; the settings
file that says which run a directory belongs to.

A file is written here as a whole or not at all: even after the writer was killed, a reader finds the old file or the
new one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model.errors import UsageError, UserError

Progress = Callable[[int, int], None]  # called with (done, in all), in bytes unless stated
SETTINGS = "settings.json"  # in a directory of answers: the settings they were made with
CURVE = "curve.json"  # beside a head: the mass curve of its pair


def cache_directory() -> Path:
    """$MINICAST_CACHE, or else minicast in $XDG_CACHE_HOME, or else ~/.cache/minicast."""
    if os.environ.get("MINICAST_CACHE"):
        return Path(os.environ["MINICAST_CACHE"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).expanduser() / "minicast"
    return Path("~/.cache/minicast").expanduser()


def digest(text: str) -> str:
    """SHA-256 of a text, in hex: names what it stands for, the same in every run."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write a file beside `path`, then rename it to `path`. OSError, with this path, where that fails.

    content: the text, or a function that writes the file at the path that it is given. A symbolic link stays: the file
    that it leads to is replaced.
    """
    path = path.resolve()
    partial_file = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial_file.touch()
        mode = partial_file.stat().st_mode
        if isinstance(content, str):
            partial_file.write_text(content, encoding="utf-8")
        else:
            content(partial_file)
        partial_file.chmod(mode)  # safetensors leaves a file that only its owner can read
        os.replace(partial_file, path)
    except BaseException as error:  # a full disk, Ctrl-C: part of a file is of no use
        with suppress(OSError):  # the same cause may have left none
            partial_file.unlink()
        if isinstance(error, OSError) and (error.filename is None or str(error.filename) == str(partial_file)):
            error.filename = str(path)  # the name that the caller knows
        raise


def save_tensors(path: Path, tensors: dict, metadata: dict[str, str] | None = None) -> None:
    """Write {name: tensor of any shape} to a safetensors file. UserError or OSError where that fails: a full disk."""
    from safetensors import SafetensorError  # here, since it imports torch, which not every user of this module needs
    from safetensors.torch import save_file

    try:
        write_atomically(path, lambda partial: save_file(tensors, partial, metadata))
    except SafetensorError as error:
        raise UserError(f"cannot write {path}: {error}") from error


@contextmanager
def open_tensors(path: Path) -> Iterator:
    """A safetensors file to read from, as `safe_open` gives it. UserError where it may not be read; other failures are the
    library's own."""
    from safetensors import safe_open

    try:
        path.open("rb").close()  # the library calls a file that may not be read one that is not there
    except PermissionError as error:
        raise UserError(f"{path} may not be read: change its permissions") from error
    with safe_open(path, framework="pt") as file:
        yield file


def check_directory(path: Path, flag: str) -> None:
    """UsageError where `path`, or a directory above it, is a file. flag: named in the error"""
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        raise UsageError(f"{flag} {path}: {nearest} is a file: name a directory")


def check_file(path: Path, flag: str) -> None:
    """UsageError where no file can be written: `path` is a directory or a device, or cannot lie in a directory."""
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a directory: name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"{flag} {path} is not a regular file: name another")
    check_directory(path.parent, flag)


def read_text(path: str | Path) -> str:
    """The text of a file. UsageError where there is no such file or it is not UTF-8, UserError where reading fails."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {path}: it is not UTF-8") from error
    except OSError as error:
        named_wrongly = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
        raise (UsageError if named_wrongly else UserError)(f"cannot read {path}: {error.strerror}") from error


def another_copy(file: Path) -> str:
    """What to do about a damaged file of a checkpoint, for an error message."""
    if file.is_relative_to(cache_directory()):
        return f"delete {file.parent}, and the next start builds it again"
    return "download it again, or run `git lfs pull` if it is a pointer"


def read_json(path: Path) -> dict:
    """The JSON object in a file. UserError where the file is missing, cannot be read or holds something else."""
    if not path.is_file():
        raise UserError(f"{path} is missing: download it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or nested too deep
        raise UserError(f"{path} is not JSON ({error}): {another_copy(path)}") from error
    if type(value) is not dict:
        raise UserError(f"{path} is not a JSON object: {another_copy(path)}")
    return value


def claimed(directory: Path) -> dict | None:
    """The settings and notes that `claim` wrote there; None if it never did. UserError where they are damaged."""
    file = directory / SETTINGS
    if not file.exists():
        return None
    try:
        settings = json.loads(read_text(file))
        if type(settings) is not dict:
            raise ValueError("no JSON object")
        return settings
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged: delete {directory}, or choose another --out") from error


def claim(directory: Path, settings: dict, notes: dict | None = None) -> None:
    """Write into a directory, made if need be, the settings that its answers were made with.

    settings: what later runs must share; notes: what may change. UsageError where it holds answers made with other
    settings, UserError where it cannot be written to or its settings file is damaged.
    """
    known = claimed(directory)
    others = [file for file in directory.iterdir() if file.name != SETTINGS] if directory.is_dir() else []
    holds = any(file.is_file() and file.stat().st_size for file in others)
    if known is not None and holds and not settings.items() <= known.items():
        told = ", ".join(f"{name} {known.get(name)}" for name in settings)
        raise UsageError(f"{directory} holds answers of {told}: give the same flags again, or another --out")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / SETTINGS, json.dumps(settings | (notes or {}), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from error
