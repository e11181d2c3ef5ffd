"""This process's memory, as the C library keeps it."""

import ctypes
from contextlib import suppress


def trim() -> None:
    """Give freed memory back to the system: glibc keeps what lies between blocks in use, of weights that changed their
    layout 200 MB and more. Other C libraries have no such call, and need none."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
