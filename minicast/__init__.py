"""CAST: cost-aware speculative trees from one-pass block drafters. See `minicast.round` for the round."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers: at run time, `__getattr__` finds these names
    from minicast.answer import Output, Round
    from minicast.decode import Decoder, generate, stream

__all__ = ["Decoder", "Output", "Round", "generate", "stream"]


def __getattr__(name: str):
    """Import `decode` when one of its names is first used: it imports torch, for which --help should not wait."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from minicast import decode

    return getattr(decode, name)
