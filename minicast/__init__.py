"""CAST: cost-aware speculative trees from one-pass block drafters. See `minicast.round` for the round."""

__all__ = ["Decoder", "Output", "Round", "generate", "stream"]


def __getattr__(name: str):
    """These are found in `decode` when they are asked for: it imports torch, for which --help should not wait."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from minicast import decode

    return getattr(decode, name)
