"""Fills a model's parameters from a checkpoint, once and completely.

The model is built without memory (on torch's meta device). Before any weights are read, the headers of all files are
compared with its parameters: every tensor must have a destination, every parameter must be covered, and all shapes must
agree; an error names what does not. Then the tensors are read one at a time and cast into place, and a linear layer is
packed as soon as its last piece has arrived. Peak memory is the loaded weights plus the layer in hand: no second copy
is made, and file pages are unmapped after each tensor.

A checkpoint's tensor has the name of its parameter, with two exceptions: a leading "model." is dropped, and projections
that share an input are rows of one parameter (see `destinations`).

Only safetensors files are read, and only unquantised ones.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from model.errors import UserError
from model.files import Progress, another_copy, open_tensors, read_json
from model.linear import Linear, narrow
from model.memory import require_memory, trim

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
DERIVED = "rotary_emb.inv_freq"  # old exporters store it among the weights; the model computes its own
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # the unquantised kinds, as safetensors names them
QUANTISED_SUFFIXES = ("scale", "scale_inv", "scales", "qweight", "qzeros", "g_idx", "weight_packed", "absmax")


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint, as a file's header describes it.

    Attributes:
        name: in the file, with any prefix
        kind: its type, as safetensors names it: "BF16", "F32", …
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * ITEM_BYTES[self.kind]

    def read(self) -> Tensor:
        """The tensor (`shape`), mapped from the file until its last reference is gone."""
        with open_tensors(self.file) as file:
            return file.get_tensor(self.name)


@dataclass(frozen=True)
class Destination:
    """Where one tensor of the checkpoint goes: to some rows of a module's parameter.

    Attributes:
        owner: the module
        leaf: the parameter, "weight" or "bias"
        start: the first of its rows
        shape: of the tensor, whose first dimension is the number of rows
    """

    owner: nn.Module
    leaf: str
    start: int
    shape: tuple[int, ...]

    def fill(self, value: Tensor, dtype: torch.dtype, device: torch.device | str) -> None:
        """Cast value (`shape`) into the rows. A parameter still on the meta device gets its memory first."""
        parameter = getattr(self.owner, self.leaf)
        if parameter.is_meta:
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(self.owner, self.leaf, nn.Parameter(memory, requires_grad=False))
        self.rows().copy_(value)

    def rows(self) -> Tensor:
        """The rows (`shape`), which share the parameter's memory."""
        return getattr(self.owner, self.leaf).detach().narrow(0, self.start, self.shape[0])


def load_weights(
    module: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tied: bool | None = False,
    pack: bool = False,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter of `module` (a Target or a DraftHead with its `config`) from `directory`.

    Args:
        tied: whether the LM head is the embedding, see `TargetConfig`. A tied head shares the embedding's memory until
            it is packed. A tied checkpoint that stores another LM head is refused: transformers 5 would use the stored
            one, transformers 4 the embedding.
        pack: pack each Linear as soon as it is complete, for inference
        progress: called after each tensor

    Raises:
        UserError: a file is missing or damaged, tensors do not fit the parameters, or memory is too small
    """
    stored, wanted = _stored_tensors(Path(directory)), destinations(module)
    tied = LM_HEAD in wanted and (LM_HEAD not in stored if tied is None else tied)
    if tied:
        del wanted[LM_HEAD]
    stored_head = stored.pop(LM_HEAD, None) if tied else None
    _check(stored, wanted, directory)
    if stored_head and not torch.equal(stored_head.read().float(), stored[EMBEDDING].read().float()):
        raise UserError(f"{directory}: {LM_HEAD} differs from {EMBEDDING}: tie_word_embeddings must be false")

    waiting = Counter(destination.owner for destination in wanted.values())  # how many of its tensors are still to come
    total, done = sum(tensor.bytes for tensor in stored.values()), 0
    wide = dtype.itemsize * sum(torch.Size(tensor.shape).numel() for tensor in stored.values())
    held = min(total, wide) if pack else wide  # what a file stores in 16 bits is held in 16
    require_memory(held, f"the weights in {directory}", device)
    for name, tensor in stored.items():
        destination = wanted[name]
        destination.fill(tensor.read(), dtype, device)
        if name == EMBEDDING:
            _finish_embedding(module, tied, pack)
        waiting[destination.owner] -= 1
        if pack and not waiting[destination.owner] and isinstance(destination.owner, Linear):
            destination.owner.pack()
        done += tensor.bytes
        if progress:
            progress(done, total)
    if pack:
        trim()


def _finish_embedding(target: nn.Module, tied: bool, pack: bool) -> None:
    """Share the filled table (V, H) with a tied LM head, and narrow it to 16 bits if nothing shares it.

    A lookup needs no float32: published weights have 16 bits, which half the bytes can hold. A packed LM head has a
    layout of its own, and so no longer shares the table.
    """
    table = target.embed_tokens.weight
    if tied:
        target.lm_head.weight = table
        if pack:
            target.lm_head.pack()
    if table.dtype == torch.float32 and table.device.type == "cpu" and target.lm_head.weight is not table:
        target.embed_tokens.weight = nn.Parameter(narrow(table), requires_grad=False)


def destinations(module: nn.Module) -> dict[str, Destination]:
    """The destination in `module` of every tensor that a checkpoint must hold, by its name without "model."."""
    config = module.config
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    fused = {  # the rows of each projection that is part of a larger parameter, in order
        "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": config.intermediate, "up_proj": config.intermediate},
    }
    found = {}
    for path, owner in module.named_modules():
        parent, dot, own_name = path.rpartition(".")
        for leaf, parameter in owner.named_parameters(recurse=False):
            start = 0
            for piece, rows in fused.get(own_name, {own_name: len(parameter)}).items():
                shape = (rows, *parameter.shape[1:])
                found[f"{parent}{dot}{piece}.{leaf}"] = Destination(owner, leaf, start, shape)
                start += rows
    return found


def _check(stored: dict[str, Stored], wanted: dict[str, Destination], directory: str | Path) -> None:
    """UserError, by name, unless every tensor is wanted, every wanted tensor is there, and all shapes agree."""
    for tensor in stored.values():
        if tensor.kind not in ITEM_BYTES or tensor.name.endswith(QUANTISED_SUFFIXES):
            what = f"{tensor.name} ({tensor.kind}) belongs to a quantised checkpoint"
            raise UserError(f"{tensor.file}: {what}, which is not supported: use the unquantised one")
    cause = "weights and config.json are not of one dense Qwen3 or LLaMA model: download both again, or choose another"
    if unknown := [tensor.name for name, tensor in stored.items() if name not in wanted]:
        raise UserError(f"{directory}: no use for {unknown[0]} ({len(unknown)} such tensors): {cause}")
    if missing := [name for name in wanted if name not in stored]:
        raise UserError(f"{directory} lacks {missing[0]} ({len(missing)} such tensors): {cause}")
    for name, destination in wanted.items():
        tensor, hint = stored[name], "taps × hidden wide" if name == "fc.weight" else "as config.json says"
        if tensor.shape != destination.shape:
            what = f"{tensor.name} has shape {tensor.shape}, expected {destination.shape}, {hint}"
            raise UserError(f"{tensor.file}: {what}: download both again")


def _stored_tensors(directory: Path) -> dict[str, Stored]:
    """The checkpoint's tensors by name without "model.": in the files of the index, or else in the one file."""
    index, shard_of = directory / INDEX, {}  # each tensor's file name, by its name in the index
    if index.is_file() or (not (directory / SINGLE).is_file() and any(directory.glob("model-*-of-*.safetensors"))):
        shard_of = read_json(index).get("weight_map")
        files = shard_of.values() if isinstance(shard_of, dict) else ()
        if not files or any(Path(str(file)).name != file for file in files):
            raise UserError(f"{index} has no weight_map to files beside it: download it again")
    stored = {}
    for shard in sorted(set(shard_of.values())) or [SINGLE]:
        tensors = _read_header(directory / shard)
        found = {tensor.name for tensor in tensors}
        if lost := [name for name, file in shard_of.items() if file == shard and name not in found]:
            raise UserError(f"{directory / shard} lacks {lost[0]}, which {INDEX} lists: download both again")
        for tensor in tensors:
            name = tensor.name.removeprefix("model.")
            if name in stored:
                raise UserError(f"{directory} holds {name} twice: in {stored[name].file.name} and {shard}")
            if not name.endswith(DERIVED):
                stored[name] = tensor
    return stored


def _read_header(path: Path) -> list[Stored]:
    """The tensors of one file. UserError where it is missing, cut short or not a safetensors file."""
    if not path.is_file():
        raise UserError(f"{path} is missing: download it, for only safetensors weights are read")
    try:
        with open_tensors(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return [Stored(path, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()]
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is empty, damaged or incomplete ({error}): {another_copy(path)}") from error
