"""Targets, DFlash heads and tokenizers, loaded from a path, a hub id or a known pair's name."""

from importlib import import_module

ROOMS = {"check_pair": "config", "load_draft": "load", "load_target": "load", "load_tokenizer": "tokenizer"}
__all__ = list(ROOMS)


def __getattr__(name: str):
    """These are found in their rooms when they are asked for: most import torch, for which --help should not wait."""
    if name not in ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"model.{ROOMS[name]}"), name)
