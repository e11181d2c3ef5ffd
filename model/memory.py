"""This process's memory, as the C library keeps it, and this machine's."""

import ctypes
import math
from contextlib import suppress
from pathlib import Path

import torch

from model.errors import UserError


def trim() -> None:
    """Give freed memory back to the system: glibc keeps what lies between blocks in use, of weights that changed their
    layout 200 MB and more. Other C libraries have no such call, and need none."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def require_memory(needed: int, what: str, device: torch.device | str) -> None:
    """UserError where this machine has fewer bytes than `what` needs: Linux would end the program without a word.

    Of a GPU nothing is asked: there, what does not fit is an error of its own.
    """
    free = free_memory()
    if torch.device(device).type == "cpu" and free is not None and needed > free:
        sizes = f"{needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        raise UserError(f"{what} take {sizes}: end other programs, or choose a smaller model")


def free_memory() -> int | None:
    """Bytes that a program can still have here, swap included; None where Linux does not tell."""
    try:
        with open("/proc/meminfo") as file:
            kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in file)}
        free = min(kilobytes["MemAvailable"] * 1024, _free_in_groups(Path("/sys/fs/cgroup")))
        return free + kilobytes["SwapFree"] * 1024
    except (OSError, ValueError, KeyError):
        return None


def _free_in_groups(root: Path) -> float:
    """Bytes below the limits of this process's control groups (version 2), as a container has; infinite without one.

    What a group holds of files can be given up.
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
