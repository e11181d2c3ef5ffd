"""What a checkpoint's config.json says, as typed values.

Three kinds are read: Qwen3 (dense) and LLaMA 3 targets (SmolLM2 is of the LLaMA family), and DFlash heads. The fields
of the dataclasses are the table of what is read: `named` says what config.json calls a field, the type says what it
must hold, and a field without a default must be there. A setting that would change the computation, and is not
supported here, is refused by name and never skipped.

No weights are read here: model/weights.py compares the shapes of the checkpoint's tensors.
"""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from model.errors import UserError
from model.files import read_json

TARGETS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}  # architecture by family (model_type)
DRAFT, NAMELESS = "DFlashDraftModel", "without an architecture"

# Bounds of whole numbers: the layers are built before it is known how many are stored.
RANGES = {"block_size": (2, 2**31), "mask_token_id": (0, 2**31), "num_hidden_layers": (1, 10**4)}


def _are_ids(value: object, *_) -> bool:
    return type(value) is list and value != [] and all(type(item) is int and item >= 0 for item in value)


# By a field's type: what config.json must hold, in words, and whether a value is that. true is not a number.
KINDS = {
    int: ("a whole number of at least {} and below {}", lambda n, least, most: type(n) is int and least <= n < most),
    float: ("a positive number between 1e-30 and 1e30", lambda x, *_: type(x) in (int, float) and 1e-30 < x < 1e30),
    bool: ("true or false", lambda value, *_: type(value) is bool),
    list: ("a list", lambda value, *_: type(value) is list),
    dict: ("a JSON object", lambda value, *_: type(value) is dict),
    tuple[int, ...]: ("a list of whole numbers from 0", _are_ids),
}

# Any other value than these would change the computation.
NEUTRAL = {
    "hidden_act": "silu", "sliding_window": None, "draft_vocab_size": None, "attention_sinks": False,
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": None,
}  # fmt: skip
ROPE_NEUTRAL = {"partial_rotary_factor": 1.0, "rope_interleaved": False, "truncate": True}

# What the rope settings of each kind hold besides theta; any other key would change the angles.
ROPE_KEYS = {
    "default": (),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
ROPE_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")


def named(name: str, default=MISSING):
    """A dataclass field that config.json calls `name`."""
    return field(default=default, metadata={"name": name})


# `_Settings.fill` reads the annotations below as types at run time. So this file must do without
# `from __future__ import annotations`, which would turn them into strings.


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; the formulas are `rope_frequencies` in model/transformer.py.

    Attributes:
        theta: base of the frequencies
        kind: "default" | "llama3" | "yarn"
        factor: by how much the context is stretched
        low_freq_factor, high_freq_factor: llama3's bounds, in full turns over the original context
        original_context: positions that the model was trained on before the stretch; 0 for the default kind
        beta_fast, beta_slow: yarn's bounds, in full turns over the original context
        attention_factor: yarn's factor on cos and sin; None: it follows from `factor`
    """

    theta: float = named("rope_theta", 10000.0)
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = named("original_max_position_embeddings", 0)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What targets and drafters have in common; the defaults are those of transformers.

    Attributes:
        vocab_size: V, rows of the LM head; of a drafter, which has none, the value is not used
        hidden: H, the hidden size
        intermediate: width of the MLP
        layers: number of decoder layers
        heads, kv_heads: Hq and Hkv
        head_dim: D, which need not be H / Hq
        eps: added to the mean square in every RMSNorm
        rope: rotary position embedding
        context: positions of the longest sequence
        attention_bias: biases on the q, k, v and o projections
        mlp_bias: biases on the gate, up and down projections
        qk_norm: an RMSNorm on each query and key head, as in Qwen3
    """

    vocab_size: int
    hidden: int = named("hidden_size")
    intermediate: int = named("intermediate_size")
    layers: int = named("num_hidden_layers")
    heads: int = named("num_attention_heads")
    kv_heads: int = named("num_key_value_heads")
    head_dim: int
    eps: float = named("rms_norm_eps", 1e-6)
    rope: Rope
    context: int = named("max_position_embeddings")
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class TargetConfig(TransformerConfig):
    """A target.

    Attributes:
        family: "qwen3" | "llama"
        tied: whether the LM head is the embedding. None: config.json does not say. Then the LM head is a separate one,
            as in transformers, if the checkpoint holds one, and else the embedding.
    """

    family: str
    tied: bool | None = named("tie_word_embeddings", None)


@dataclass(frozen=True, kw_only=True)
class DraftConfig(TransformerConfig):
    """A DFlash head.

    Attributes:
        block_size: L + 1, the root and L masks
        taps: target layers whose outputs it reads, in the order of concatenation; config.json must say
        mask_token_id: the token that stands for a position to be drafted
        target_layers: number of layers of the target that it was trained for; None: config.json does not say
    """

    block_size: int
    taps: tuple[int, ...] = named("target_layer_ids")
    mask_token_id: int
    target_layers: int | None = named("num_target_layers", None)


def read_config(directory: str | Path) -> dict:
    """The values in `directory`/config.json. UserError where it is missing or damaged."""
    return read_json(Path(directory) / "config.json")


def target_config(values: dict, where: str | Path = "config.json") -> TargetConfig:
    """Read a target's config.json. where: the file, for errors. UserError for what is missing, wrong or unsupported."""
    settings = _Settings(values, where)
    settings.require(not _is_dflash(settings), "this is a DFlash head, not a target: use it as --draft-model")
    family, architecture = _family(settings)
    known = str(family) in TARGETS and architecture in (TARGETS[family], NAMELESS)
    settings.require(known, f"model type {family!r} ({architecture}) is not supported: Qwen3 dense and LLaMA 3 are")
    return _transformer(TargetConfig, settings, family=family, qk_norm=family == "qwen3")


def draft_config(values: dict, where: str | Path = "config.json") -> DraftConfig:
    """Read a DFlash head's config.json. Arguments and errors as for `target_config`."""
    settings = _Settings(values, where)
    settings.require(_is_dflash(settings), "this is a target, not a DFlash head: use it as --model")
    family, architecture = _family(settings)
    known = (family, architecture) == ("qwen3", DRAFT)
    settings.require(known, f"DFlash head {architecture} ({family!r}) is not supported: {DRAFT} ('qwen3') is")
    nested = settings.group("dflash_config")
    for name, value in nested.items():
        known = name in ("block_size", "mask_token_id", "target_layer_ids") or value is False
        settings.require(known, f"dflash_config has {name} = {value!r}, which is not supported")
    settings.update(nested)  # these may be at the top level, too, but the nested ones win
    return _transformer(DraftConfig, settings, qk_norm=True)


def check_pair(draft: DraftConfig, target: TargetConfig) -> None:
    """UserError where a DFlash head was trained for another target, as far as the two configs tell."""

    def require(fits: bool, what: str):
        if not fits:
            raise UserError(f"the DFlash head does not fit this target: {what}; use the head trained for it")

    trained, layers, tap = draft.target_layers, target.layers, max(draft.taps)
    mask, vocabulary = draft.mask_token_id, target.vocab_size
    require(draft.hidden == target.hidden, f"its hidden size is {draft.hidden}, the target's {target.hidden}")
    require(trained in (None, layers), f"it reads a target of {trained} layers, this one has {layers}")
    require(tap < layers, f"it reads target layer {tap} (target_layer_ids), the last one is {layers - 1}")
    require(mask < vocabulary, f"its mask_token_id is {mask}, the target's vocabulary {vocabulary}")


class _Settings(dict):
    """A JSON object whose values are checked as they are read. null means absent: transformers writes it for "not set".

    where: the file, and what part of it, for errors
    """

    def __init__(self, values: dict, where: str | Path):
        super().__init__({name: value for name, value in values.items() if value is not None})
        self.where = where

    def require(self, fits: bool, message: str) -> None:
        """UserError with this message unless `fits`."""
        if not fits:
            raise UserError(f"{self.where}: {message}")

    def read(self, name: str, kind: type, default=MISSING):
        """The value of `name`, checked to be of a type: one of KINDS, or such a type or None."""
        self.require(name in self or default is not MISSING, f"{name} is missing")
        if name not in self:
            return default
        value, bounds = self[name], RANGES.get(name, (1, 2**31))
        kind = next(plain for plain in KINDS if kind in (plain, plain | None))
        wanted, fits = KINDS[kind]
        self.require(fits(value, *bounds), f"{name} must be {wanted.format(*bounds)}, not {value!r}")
        return kind(value)

    def group(self, name: str) -> "_Settings":
        """The object at `name`, empty if absent."""
        return _Settings(self.read(name, dict, {}), self.where)

    def part(self, *names: str) -> dict:
        """Those of these settings that are there."""
        return {name: self[name] for name in names if name in self}

    def fill(self, config_class: type, **known):
        """A dataclass with the fields in `known`, and the others read by their name, type and default."""
        for entry in fields(config_class):
            if entry.name not in known:
                name = entry.metadata.get("name", entry.name)
                known[entry.name] = self.read(name, entry.type, entry.default)
        return config_class(**known)


def _is_dflash(settings: _Settings) -> bool:
    """Whether this is a DFlash head's config.json, supported or not."""
    return "dflash" in str(settings.get("architectures")).lower() or "dflash_config" in settings


def _family(settings: _Settings) -> tuple[str | None, str]:
    """The family and the architecture, as config.json names them."""
    return settings.get("model_type"), ", ".join(map(str, settings.read("architectures", list, []) or [NAMELESS]))


def _refuse_variants(settings: _Settings) -> None:
    """UserError, by name, for a setting that would change the computation and is not supported here."""
    quantised = settings.group("quantization_config")
    method = quantised.get("quant_method", "no quant_method")
    settings.require(not quantised, f"quantization_config ({method}) is not supported: use plain weights")
    for kind in settings.read("layer_types", list, []):
        settings.require(kind == "full_attention", f"layer_types has {kind!r}: only full_attention is run")
    # Qwen3's config.json holds a window's size beside a switch that turns it off; LLaMA's has no switch.
    if not settings.read("use_sliding_window", bool, settings["model_type"] != "qwen3"):
        settings.pop("sliding_window", None)
    for name, neutral in NEUTRAL.items():
        value = settings.get(name, neutral)
        settings.require(value == neutral, f"{name} {value!r} is not supported: only {neutral!r} is")


def _transformer(config_class: type, settings: _Settings, **known):
    """A `config_class` of these settings, of which some fields are derived and the others read as they are."""
    _refuse_variants(settings)
    hidden, heads = settings.read("hidden_size", int), settings.read("num_attention_heads", int)
    kv_heads = settings.read("num_key_value_heads", int, heads)
    settings.require(heads % kv_heads == 0, f"{heads} heads do not share num_key_value_heads {kv_heads}")
    head_dim = settings.read("head_dim", int, MISSING if hidden % heads else hidden // heads)
    settings.require(head_dim % 2 == 0, f"head_dim {head_dim} is odd: rotary position embedding needs pairs")
    positions = settings.read("max_position_embeddings", int)
    rope = _rope(settings, positions)
    # Qwen3's model cards tell users to add yarn settings by hand; max_position_embeddings then stays unstretched.
    stretched = int(rope.factor * rope.original_context) if rope.kind == "yarn" else 0
    known |= dict(kv_heads=kv_heads, head_dim=head_dim, rope=rope, context=max(positions, stretched))
    return settings.fill(config_class, **known)


def _rope(settings: _Settings, positions: int) -> Rope:
    """Rotary settings: nested in `rope_parameters`, or flat as `rope_theta` and `rope_scaling`, or a mixture of both.

    Versions of transformers read different ones of two places, so both must agree; only for theta the nested one wins.
    """
    flat, nested = settings.group("rope_scaling"), settings.group("rope_parameters")
    given, beside = {}, settings.part("original_max_position_embeddings") if flat or nested else {}
    for place in (flat, nested, beside):
        for name, value in place.items():
            name = "rope_type" if name == "type" else name
            differ = f"{name} is {given.get(name)!r} in one place and {value!r} in another: keep one of them"
            settings.require(given.setdefault(name, value) == value, f"rope scaling: {differ}")
    kind = str(given.get("rope_type", "default"))
    settings.require(kind in ROPE_KEYS, f"rope scaling {kind!r} is not supported: default, llama3 or yarn is")
    given = _Settings(settings.part("rope_theta", *ROPE_NEUTRAL) | given, f"{settings.where}: rope ({kind})")
    for name, value in given.items():
        known = name in ("rope_theta", "rope_type", *ROPE_KEYS[kind])
        given.require(known or value == ROPE_NEUTRAL.get(name), f"{name} = {value!r} is not supported")
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", positions)
    for name in ROPE_KEYS[kind]:
        given.require(name in given or name in ROPE_OPTIONAL, f"{name} is missing")
    rope = given.fill(Rope, kind=kind)
    given.require(kind != "yarn" or rope.theta > 1, f"rope_theta must be above 1, not {rope.theta}")
    given.require(rope.low_freq_factor < rope.high_freq_factor, "low_freq_factor reaches high_freq_factor")
    return rope
