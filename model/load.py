"""Targets and DFlash heads, loaded from a path, a hub id or a known pair's name.

Where a name leads is in `hub`, how tensors are read in `weights`. The tokenizer's loader is its own, in `tokenizer`.
"""

import torch

from model.config import draft_config, read_config, target_config
from model.dflash import DraftHead
from model.files import Progress
from model.hub import resolve
from model.transformer import Target
from model.weights import load_weights


def load_target(
    name: str, dtype: torch.dtype | None = None, device=None, progress: Progress | None = None, pack: bool = True
) -> Target:
    """A frozen target, ready to run.

    Args:
        name: a directory, a hub id, or a known pair's name
        dtype: of activations and caches; None: float32 on a CPU, bfloat16 elsewhere
        device: None: CUDA where there is one
        progress: called with (bytes read, bytes in all)
        pack: lay weights out as inference reads them best (`model.linear`); training needs the plain ones
    """
    device, dtype = default_placement(device, dtype)
    directory = resolve(name, "target", progress)
    config = target_config(read_config(directory), directory)
    with torch.device("meta"):
        target = Target(config)
    load_weights(target, directory, dtype=dtype, device=device, tied=config.tied, pack=pack, progress=progress)
    return target.eval()


def load_draft(
    name: str, dtype: torch.dtype | None = None, device=None, progress: Progress | None = None, pack: bool = True
) -> DraftHead:
    """The DFlash head of that name; arguments as for `load_target`. `check_pair` says whether it fits a target."""
    device, dtype = default_placement(device, dtype)
    directory = resolve(name, "draft", progress)
    config = draft_config(read_config(directory), directory)
    with torch.device("meta"):
        draft = DraftHead(config)
    load_weights(draft, directory, dtype=dtype, device=device, pack=pack, progress=progress)
    draft.directory = directory
    return draft.eval()


def default_placement(device, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Where a model runs and in which precision, where one of them, or both, are left open."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return device, dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
