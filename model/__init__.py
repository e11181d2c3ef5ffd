"""Targets, DFlash heads and tokenizers, loaded from a path, a hub id or a known pair's name."""

from importlib import import_module

MODULES = {"check_pair": "config", "load_draft": "load", "load_target": "load", "load_tokenizer": "tokenizer"}
__all__ = list(MODULES)


def __getattr__(name: str):
    """These are found in their modules when they are asked for: most import torch, for which --help should not wait."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"model.{MODULES[name]}"), name)
