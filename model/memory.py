"""Memory: giving back what this process has freed, and how much this machine has left."""

import ctypes
import math
from contextlib import suppress
from pathlib import Path

import torch

from model.errors import UserError


def trim() -> None:
    """Return freed memory to the system.

    glibc keeps free blocks that lie between used ones: 200 MB and more after weights changed layout. Other C libraries
    lack this call, and need none.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def require_memory(needed: int, what: str, device: torch.device | str) -> None:
    """UserError where `needed` bytes for `what` are more than this machine has free: Linux would kill the program
    without a message. A GPU is not checked, since torch raises an error of its own there.
    """
    free = free_memory()
    if torch.device(device).type == "cpu" and free is not None and needed > free:
        sizes = f"{needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        raise UserError(f"{what} take {sizes}: end other programs, or choose a smaller model")


def free_memory() -> int | None:
    """Bytes that a program can still get here, swap included; None where that cannot be read (/proc/meminfo)."""
    try:
        with open("/proc/meminfo") as file:
            kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in file)}
        free = min(kilobytes["MemAvailable"] * 1024, _free_in_groups(Path("/sys/fs/cgroup")))
        return free + kilobytes["SwapFree"] * 1024
    except (OSError, ValueError, KeyError):
        return None


def _free_in_groups(root: Path) -> float:
    """Bytes that the limits of this process's control groups (version 2) leave free, infinite without a limit. A
    container has such limits.

    Cached files count as free, since the system gives them up when memory is short.
    """
    free = math.inf
    with suppress(OSError, ValueError, KeyError):
        names = Path("/proc/self/cgroup").read_text().splitlines()
        group = root / next((name[3:] for name in names if name.startswith("0::")), "").strip("/")
        for group in (group, *group.parents):
            limit = group / "memory.max"
            if group.is_relative_to(root) and limit.exists() and (most := limit.read_text().strip()) != "max":
                held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                files = int(held["active_file"]) + int(held["inactive_file"])
                free = min(free, int(most) - int((group / "memory.current").read_text()) + files)
    return free
