"""Fills a model's parameters from a checkpoint, once and completely.

The model is built without memory (on torch's meta device). Before anything is read, the headers of all files
are held against its parameters: every tensor must have a place, every parameter must be covered, every shape
must agree; whatever does not is named. Then tensors are read one at a time and cast into place, and a linear
layer is packed as soon as its last piece has arrived. So at no time is there more than the loaded weights and
the layer in hand: neither a second copy of the weights nor the file's pages, unmapped after each tensor.

A checkpoint's tensor has its parameter's name, but for two exceptions: a leading "model." is dropped, and the
projections that share an input are rows of one parameter (`FUSED`).

Only safetensors files are read, and no quantised ones.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model.config import TransformerConfig, read_json
from model.errors import UserError
from model.linear import Linear

# Fused parameter: the checkpoint's tensors that are its rows, in this order.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# Derived values that old exporters stored among the weights; the model computes its own.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # the unquantised kinds, as safetensors names them
QUANTISED_SUFFIXES = ("scale", "scale_inv", "scales", "qweight", "qzeros", "g_idx", "weight_packed", "absmax")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint, as a file's header describes it."""

    file: Path
    name: str  # in the file, with its prefix
    shape: tuple[int, ...]
    kind: str  # "BF16", "F32", …

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * ITEM_BYTES[self.kind]

    def read(self) -> Tensor:
        """The tensor, `shape`. Mapped from the file, which is unmapped with the tensor's last reference."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)


@dataclass(frozen=True)
class Place:
    """Where one tensor of the checkpoint goes: rows start … start + shape[0] of a parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def load_weights(
    module: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tied: bool | None = False,
    pack: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill every parameter of `module` (a Target or a DraftHead with its `config`) from `directory`.

    tied: the LM head is the embedding, as config.json says (None: it says nothing, see TargetConfig). A tied
        head shares the embedding's memory until it is packed. A tied checkpoint that stores a different LM
        head is refused: transformers 5 would use the stored one, transformers 4 the embedding.
    pack: bring each Linear into its inference-only form as soon as it is complete
    progress: called with (bytes read, bytes in all) after each tensor
    """
    directory, device = Path(directory), torch.device(device)
    stored = _stored_tensors(directory)
    places = _places(module)
    shared_head = LM_HEAD in places and _head_is_embedding(stored, tied, directory)
    if shared_head:
        stored.pop(LM_HEAD, None)
        del places[LM_HEAD]
    _check(stored, places, directory)

    waiting = Counter(_owner(place.parameter) for place in places.values())  # pieces to come, by module
    filled = set()  # parameters that have their memory
    total, done = sum(tensor.bytes for tensor in stored.values()), 0
    for name, tensor in stored.items():
        place = places[name]
        owner_name = _owner(place.parameter)
        owner, leaf = module.get_submodule(owner_name), place.parameter.rpartition(".")[2]
        if place.parameter not in filled:
            filled.add(place.parameter)
            memory = torch.empty(getattr(owner, leaf).shape, dtype=dtype, device=device)
            setattr(owner, leaf, nn.Parameter(memory, requires_grad=False))
        getattr(owner, leaf).narrow(0, place.start, place.shape[0]).copy_(tensor.read())
        waiting[owner_name] -= 1
        if place.parameter == EMBEDDING:
            _finish_embedding(module, shared_head, pack)
        if pack and not waiting[owner_name] and isinstance(owner, Linear):
            owner.pack()
        done += tensor.bytes
        if progress:
            progress(done, total)


def _finish_embedding(module: nn.Module, shared_head: bool, pack: bool) -> None:
    """Lend the filled table (V, H) to a tied LM head, then narrow the table where nothing shares it.

    A lookup needs no float32: published weights are bfloat16, and half the bytes hold them. A packed LM head
    has its own layout, so it stops sharing.
    """
    embedding = module.embed_tokens
    if shared_head:
        module.lm_head.weight = embedding.weight
        if pack:
            module.lm_head.pack()
    table = embedding.weight
    if table.dtype == torch.float32 and table.device.type == "cpu" and module.lm_head.weight is not table:
        narrow = table.bfloat16()
        if torch.equal(narrow.float(), table):
            embedding.weight = nn.Parameter(narrow, requires_grad=False)


def _owner(parameter: str) -> str:
    """The name of the module that holds this parameter."""
    return parameter.rpartition(".")[0]


def _places(module: nn.Module) -> dict[str, Place]:
    """For every tensor a checkpoint must hold, by name without "model.", its place in `module`."""
    places = {}
    for parameter, value in module.named_parameters():
        owner, leaf = _owner(parameter), parameter.rpartition(".")[2]
        fused = next((name for name in FUSED if owner.endswith(name)), None)
        if fused is None:
            places[parameter] = Place(parameter, 0, tuple(value.shape))
            continue
        start = 0
        for piece in FUSED[fused]:
            shape = (_piece_rows(piece, module.config), *value.shape[1:])
            places[f"{owner.removesuffix(fused)}{piece}.{leaf}"] = Place(parameter, start, shape)
            start += shape[0]
    return places


def _piece_rows(piece: str, config: TransformerConfig) -> int:
    """Rows of one projection inside its fused parameter."""
    if piece == "self_attn.q_proj":
        return config.heads * config.head_dim
    if piece in ("self_attn.k_proj", "self_attn.v_proj"):
        return config.kv_heads * config.head_dim
    return config.intermediate


def _head_is_embedding(stored: dict[str, Stored], tied: bool | None, directory: Path) -> bool:
    """Whether the LM head (V, H) is filled from the embedding; an LM head stored beside it must agree."""
    if LM_HEAD not in stored:
        if tied is False:
            raise UserError(f"{directory} lacks {LM_HEAD}, and config.json says tie_word_embeddings false")
        return True
    if tied and EMBEDDING in stored and not _equal(stored[LM_HEAD], stored[EMBEDDING]):
        raise UserError(
            f"{directory}: {LM_HEAD} differs from {EMBEDDING}, but config.json says tie_word_embeddings true:"
            " set it to false to use the stored LM head"
        )
    return bool(tied)


def _equal(a: Stored, b: Stored) -> bool:
    return a.shape == b.shape and torch.equal(a.read().float(), b.read().float())


def _check(stored: dict[str, Stored], places: dict[str, Place], directory: Path) -> None:
    """Every tensor has a place, every place a tensor, and their shapes agree; or an error by name."""
    for name, tensor in stored.items():
        if tensor.kind not in ITEM_BYTES or (name not in places and name.endswith(QUANTISED_SUFFIXES)):
            raise UserError(
                f"{tensor.file}: {tensor.name} ({tensor.kind}) belongs to a quantised checkpoint, which is"
                " not supported: use the unquantised one"
            )
    cause = (
        "the weights and config.json do not belong together, or the model is of a kind that is not supported"
    )
    if unknown := [tensor.name for name, tensor in stored.items() if name not in places]:
        raise UserError(
            f"{directory} holds tensors that this model has no place for: {_listed(unknown)}; {cause}"
        )
    if missing := [name for name in places if name not in stored]:
        raise UserError(f"{directory} lacks tensors of this model: {_listed(missing)}; {cause}")
    for name, place in places.items():
        if stored[name].shape != place.shape:
            hint = (
                "taps × hidden wide: check target_layer_ids" if name == "fc.weight" else "as config.json says"
            )
            raise UserError(
                f"{stored[name].file}: {stored[name].name} has shape {stored[name].shape},"
                f" expected {place.shape}, {hint}"
            )


def _listed(names: list[str]) -> str:
    """The first few names and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _stored_tensors(directory: Path) -> dict[str, Stored]:
    """The checkpoint's tensors by name without "model.", from the index if there is one, else one file."""
    index = directory / INDEX
    listed = _read_index(index) if index.is_file() else {}
    if listed:
        files = [directory / shard for shard in sorted(set(listed.values()))]
    elif (directory / SINGLE).is_file():
        files = [directory / SINGLE]
    else:
        raise UserError(f"{directory} holds neither {SINGLE} nor {INDEX}: only safetensors weights are read")

    stored, found_in = {}, {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, though {INDEX} names it: download it")
        for tensor in _read_header(file):
            name = tensor.name.removeprefix("model.")
            if name.endswith(IGNORED_SUFFIXES):
                continue
            if name in stored:
                raise UserError(
                    f"{directory} holds {name} twice: in {stored[name].file.name} and {file.name}"
                )
            stored[name] = tensor
            found_in[tensor.name] = file.name
    for name, shard in listed.items():
        if not name.endswith(IGNORED_SUFFIXES) and found_in.get(name) != shard:
            raise UserError(
                f"{directory / shard} lacks {name}, though {INDEX} puts it there: download both again"
            )
    return stored


def _read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor, as a sharded checkpoint's index lists them."""
    index = read_json(path)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{path} has no weight_map: download it again")
    for shard in listed.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UserError(f"{path}: {shard!r} is not the name of a file beside it: download it again")
    return listed


def _read_header(path: Path) -> list[Stored]:
    """All tensors of one file; a file that is cut or no safetensors file at all is named in one line."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = []
            for name in file.keys():
                entry = file.get_slice(name)
                tensors.append(Stored(path, name, tuple(entry.get_shape()), entry.get_dtype()))
            return tensors
    except (SafetensorError, OSError, ValueError) as error:
        with open(path, "rb") as file:
            start = file.read(40)
        if start.startswith(b"version https://git-lfs"):
            raise UserError(
                f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` there"
            ) from error
        cause = str(error).replace("\n", " ") if start else "it is empty"
        raise UserError(f"{path} is damaged or incomplete ({cause}): download it again") from error
