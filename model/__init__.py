"""Targets, DFlash heads and tokenizers, loaded from a path, a hub id or a known pair's name."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers: at run time, `__getattr__` finds these names
    from model.config import check_pair
    from model.load import load_draft, load_target
    from model.tokenizer import load_tokenizer

MODULES = {"check_pair": "config", "load_draft": "load", "load_target": "load", "load_tokenizer": "tokenizer"}
__all__ = list(MODULES)


def __getattr__(name: str):
    """Import the module of a public name when it is first used: most import torch, for which --help should not wait."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"model.{MODULES[name]}"), name)
