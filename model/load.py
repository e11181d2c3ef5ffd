"""Targets and DFlash heads, loaded from a path, a hub id or a known pair's name.

model/hub.py finds the directory of a name, model/weights.py reads its tensors, and model/tokenizer.py has the loader of
tokenizers.
"""

import torch

from model.config import draft_config, read_config, target_config
from model.dflash import DraftHead
from model.errors import UsageError
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
        device: where it runs; None: CUDA where there is one, or else the CPU
        progress: called with (bytes read, bytes in all)
        pack: lay the weights out for inference (model/linear.py); training needs the plain ones

    Raises:
        UsageError: the name is neither a directory, nor a known pair's name, nor the id of a repository on the hub; or
            the dtype is none of floating point
        UserError: a download failed; a file is missing or damaged; the model is not supported, or is a DFlash head;
            its weights and its config.json do not fit each other; or memory is too small
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
    """The DFlash head of that name. Arguments and errors as for `load_target`; UserError for a target.

    `check_pair` says whether the head fits a target.
    """
    device, dtype = default_placement(device, dtype)
    directory = resolve(name, "draft", progress)
    config = draft_config(read_config(directory), directory)
    with torch.device("meta"):
        draft = DraftHead(config)
    load_weights(draft, directory, dtype=dtype, device=device, pack=pack, progress=progress)
    draft.directory = directory
    return draft.eval()


def default_placement(device, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype given, with the defaults of `load_target` for what is None. UsageError for a dtype that is
    none of floating point."""
    if not (dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"a model's dtype is torch.float32, torch.bfloat16 or another of floating point, not {dtype!r}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return device, dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
