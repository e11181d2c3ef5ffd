"""What a checkpoint's config.json says, as typed values.

Three kinds are read: Qwen3 (dense) and LLaMA 3 targets (SmolLM2 is of the LLaMA family), and DFlash heads. A
setting that would change the computation and is not computed here is refused by its name, never skipped. A
missing setting takes transformers' default where one exists for both families, and is an error elsewhere.

It reads no weights: shapes are compared with the checkpoint's tensors in model/weights.py.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.errors import UserError

SUPPORTED = "Qwen3 dense and LLaMA 3 models can be run"
TARGETS = {
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}  # family, which is the model type: architecture
DRAFT_ARCHITECTURE = "DFlashDraftModel"

# What a rope setting of each kind may hold. Another key would change the angles, so it is refused by name,
# but for values that spell out what is done anyway.
ROPE_COMMON = {"rope_theta", "rope_type", "type"}
ROPE_STRETCH = ROPE_COMMON | {"factor", "original_max_position_embeddings"}
ROPE_KEYS = {
    "default": ROPE_COMMON,
    "llama3": ROPE_STRETCH | {"low_freq_factor", "high_freq_factor"},
    "yarn": ROPE_STRETCH | {"attention_factor", "beta_fast", "beta_slow"},
}
ROPE_NEUTRAL = (("partial_rotary_factor", 1.0), ("truncate", True))


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; the formulas are `rope_frequencies` in model/transformer.py.

    Attributes:
        theta: base of the frequencies
        kind: "default" | "llama3" | "yarn"
        factor: how far the context is stretched
        low_freq_factor, high_freq_factor: llama3's bounds, in turns over the original context
        original_context: positions of the training before the stretch; 0 for the default kind
        beta_fast, beta_slow: yarn's bounds, in turns over the original context
        attention_factor: yarn's factor on cos and sin; None: derived from `factor`
    """

    theta: float
    kind: Literal["default", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class TransformerConfig:
    """What target and drafter share.

    Attributes:
        vocab_size: V, the rows of the LM head (a drafter has none; its own value is not used)
        hidden: H
        intermediate: width of the MLP
        layers: number of decoder layers
        heads, kv_heads: Hq and Hkv
        head_dim: D, which need not be H / Hq
        eps: of every RMSNorm
        rope: rotary position embedding
        context: longest sequence, in positions
        attention_bias: biases on the q, k, v and o projections
        mlp_bias: biases on the gate, up and down projections
        qk_norm: an RMSNorm on each query and key head, as Qwen3 has
    """

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    context: int
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class TargetConfig(TransformerConfig):
    """A target.

    Attributes:
        family: "qwen3" | "llama"
        tied: the LM head is the embedding. None: config.json does not say. transformers then takes an LM head
            of its own, and so it is here if the checkpoint holds one; if not, only the embedding is left.
        eos_ids: tokens that end a text, as config.json lists them
    """

    family: Literal["qwen3", "llama"]
    tied: bool | None = None
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DraftConfig(TransformerConfig):
    """A DFlash head.

    Attributes:
        block_size: L + 1, the root and L masks
        taps: target layers whose outputs it reads, in the order of concatenation
        mask_token_id: the token that stands for a position to be drafted
        target_layers: number of layers of the target it was trained for; None: config.json does not say
    """

    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    target_layers: int | None = None


def read_config(directory: str | Path) -> dict:
    """The values of `directory`/config.json."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist: a model directory holds config.json and *.safetensors files")
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object: download it again")
    return values


def read_json(path: Path):
    """The value of a JSON file; a file that is cut, or no JSON at all, is named in one line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from error


def target_config(values: dict, where: str | Path = "config.json") -> TargetConfig:
    """Parse a target's config.json; `where` is named in errors."""
    settings = _Settings(values, where)
    if _is_dflash(values):
        raise settings.error("this is a DFlash head, not a target: it goes with --draft-model")
    family = values.get("model_type")
    architectures = settings.architectures()
    if family not in TARGETS or architectures not in ([], [TARGETS[family]]):
        named = ", ".join(architectures) or "no architecture"
        raise settings.error(f"model type {family!r} ({named}) is not supported: {SUPPORTED}")
    return TargetConfig(
        **_transformer(settings, qk_norm=family == "qwen3"),
        family=family,
        tied=settings.flag("tie_word_embeddings", None),
        eos_ids=settings.token_ids("eos_token_id"),
    )


def draft_config(values: dict, where: str | Path = "config.json") -> DraftConfig:
    """Parse a DFlash head's config.json; `where` is named in errors."""
    settings = _Settings(values, where)
    if not _is_dflash(values):
        raise settings.error("this is a target, not a DFlash head: it goes with --model")
    if settings.architectures() != [DRAFT_ARCHITECTURE]:
        named = ", ".join(settings.architectures()) or "without an architecture"
        raise settings.error(f"DFlash head {named} is not supported: only {DRAFT_ARCHITECTURE} is")
    if values.get("model_type") != "qwen3":
        raise settings.error(
            f"DFlash head of model type {values.get('model_type')!r} is not supported: qwen3 is"
        )

    nested = settings.group("dflash_config")
    own = {"block_size", "mask_token_id", "target_layer_ids"}
    for name, value in nested.given().items():
        if name not in own and value is not False:
            raise settings.error(f"dflash_config has {name} = {value!r}, which is not supported")
    # Each may stand at the top or under dflash_config; the nested one wins.
    both = _Settings({name: values.get(name) for name in own} | nested.given(), where)
    taps = both.values["target_layer_ids"]
    if taps is None:
        raise settings.error(
            "target_layer_ids is missing: which target layers the head reads cannot be guessed"
        )
    if not isinstance(taps, list) or not taps or not all(_is_whole(tap) and tap >= 0 for tap in taps):
        raise settings.error(f"target_layer_ids must be a list of layer numbers from 0, not {taps!r}")
    return DraftConfig(
        **_transformer(settings, qk_norm=True),
        block_size=both.whole("block_size", least=2),
        taps=tuple(taps),
        mask_token_id=both.whole("mask_token_id", least=0),
        target_layers=settings.whole("num_target_layers", None),
    )


def check_pair(draft: DraftConfig, target: TargetConfig) -> None:
    """Refuse a DFlash head that was trained for another target, as far as the two configs tell."""

    def refuse(what: str):
        raise UserError(f"the DFlash head does not fit this target: {what}; choose the head trained for it")

    if draft.hidden != target.hidden:
        refuse(f"its hidden size is {draft.hidden}, the target's {target.hidden}")
    if draft.target_layers not in (None, target.layers):
        refuse(f"it reads a target of {draft.target_layers} layers, this one has {target.layers}")
    if max(draft.taps) >= target.layers:
        refuse(
            f"it reads target layer {max(draft.taps)} (target_layer_ids), the last one is {target.layers - 1}"
        )
    if draft.mask_token_id >= target.vocab_size:
        refuse(f"its mask_token_id is {draft.mask_token_id}, the target's vocabulary {target.vocab_size}")


def _is_dflash(values: dict) -> bool:
    """Whether this config.json is a DFlash head's, of a kind that is supported or not."""
    return "dflash" in str(values.get("architectures")).lower() or "dflash_config" in values


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_REQUIRED = object()


class _Settings:
    """Typed reading of one JSON object. null counts as absent: transformers writes it for "not set"."""

    def __init__(self, values: dict, where: str | Path):
        self.values, self.where = values, where

    def error(self, message: str) -> UserError:
        return UserError(f"{self.where}: {message}")

    def given(self) -> dict:
        return {name: value for name, value in self.values.items() if value is not None}

    def _get(self, name: str, default, fits, wanted: str):
        value = self.values.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if value is None:
            raise self.error(f"{name} is missing")
        if not fits(value):
            raise self.error(f"{name} must be {wanted}, not {value!r}")
        return value

    def whole(self, name: str, default=_REQUIRED, least: int = 1) -> int:
        return self._get(
            name, default, lambda v: _is_whole(v) and v >= least, f"a whole number of at least {least}"
        )

    def number(self, name: str, default=_REQUIRED) -> float:
        def fits(value):
            return (_is_whole(value) or isinstance(value, float)) and 0 < value < math.inf

        value = self._get(name, default, fits, "a positive number")
        return value if value is None else float(value)

    def flag(self, name: str, default: bool | None = False) -> bool | None:
        return self._get(name, default, lambda v: isinstance(v, bool), "true or false")

    def group(self, name: str) -> "_Settings":
        return _Settings(self._get(name, {}, lambda v: isinstance(v, dict), "a JSON object"), self.where)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_whole(token) and token >= 0 for token in ids):
            raise self.error(f"{name} must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def architectures(self) -> list[str]:
        value = self.values.get("architectures") or []
        return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _refuse_variants(settings: _Settings) -> None:
    """Refuse, by name, what would change the computation and is not computed here."""
    values = settings.values
    if values.get("quantization_config") is not None:
        method = settings.group("quantization_config").values.get("quant_method", "no quant_method")
        raise settings.error(
            f"quantization_config ({method}) is not supported: use the unquantised checkpoint"
        )
    for kind in values.get("layer_types") or []:
        if kind != "full_attention":
            raise settings.error(f"layer_types has {kind!r}: only full_attention layers are supported")
    # Qwen3 configs keep a window's size beside a switch that is off; LLaMA has no switch.
    window_used = settings.flag("use_sliding_window", values.get("model_type") != "qwen3")
    if window_used and values.get("sliding_window") is not None:
        raise settings.error(
            f"sliding_window {values['sliding_window']} is not supported: only full attention is"
        )
    if values.get("draft_vocab_size") is not None:
        raise settings.error(
            f"draft_vocab_size {values['draft_vocab_size']}: a draft vocabulary is not supported"
        )
    for name, value in values.items():
        if "sink" in name and value not in (None, False):
            raise settings.error(f"{name}: attention sinks are not supported")
    if values.get("hidden_act") not in (None, "silu"):
        raise settings.error(f"hidden_act {values['hidden_act']!r} is not supported: only silu is")
    if settings.flag("rope_interleaved"):
        raise settings.error(
            "rope_interleaved is not supported: only the half-split layout of LLaMA and Qwen3 is"
        )
    if settings.number("partial_rotary_factor", 1.0) != 1.0:
        raise settings.error(f"partial_rotary_factor {values['partial_rotary_factor']} is not supported")


def _transformer(settings: _Settings, qk_norm: bool) -> dict:
    """The fields of TransformerConfig by name."""
    _refuse_variants(settings)
    hidden, heads = settings.whole("hidden_size"), settings.whole("num_attention_heads")
    kv_heads = settings.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise settings.error(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = settings.whole("head_dim", None)
    if head_dim is None:
        if hidden % heads:
            raise settings.error(
                f"head_dim is missing, and hidden_size {hidden} is not a multiple of {heads} heads"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise settings.error(f"head_dim {head_dim} is odd: rotary position embedding needs pairs")
    positions = settings.whole("max_position_embeddings")
    rope = _rope(settings, positions)
    # A yarn setting added by hand, as Qwen3's cards tell, leaves max_position_embeddings unstretched.
    stretched = int(rope.factor * rope.original_context) if rope.kind == "yarn" else 0
    return dict(
        vocab_size=settings.whole("vocab_size"),
        hidden=hidden,
        intermediate=settings.whole("intermediate_size"),
        layers=settings.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=settings.number("rms_norm_eps", 1e-6),
        rope=rope,
        context=max(positions, stretched),
        attention_bias=settings.flag("attention_bias"),
        mlp_bias=settings.flag("mlp_bias"),
        qk_norm=qk_norm,
    )


def _rope(settings: _Settings, positions: int) -> Rope:
    """Rotary settings: nested `rope_parameters`, or flat `rope_theta` and `rope_scaling`; nested wins."""

    def kind_of(group: _Settings) -> str | None:
        kind = group.values.get("rope_type") or group.values.get("type")
        return kind and str(kind)

    older, newer = settings.group("rope_scaling"), settings.group("rope_parameters")
    kinds = {kind_of(group) for group in (older, newer)} - {None}
    if len(kinds) > 1:
        raise settings.error(f"rope_parameters and rope_scaling disagree: {' and '.join(sorted(kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_KEYS:
        raise settings.error(f"rope scaling {kind!r} is not supported: default, llama3 and yarn are")
    given = {"rope_theta": settings.values.get("rope_theta")} | older.given() | newer.given()
    rope = _Settings(given, f"{settings.where}: rope ({kind})")
    for name, value in given.items():
        if name not in ROPE_KEYS[kind] and (name, value) not in ROPE_NEUTRAL:
            raise rope.error(f"{name} = {value!r} is not supported")

    theta = rope.number("rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta)
    factor = rope.number("factor")
    if kind == "llama3":
        original = rope.whole("original_max_position_embeddings")
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error(f"low_freq_factor {low} must be less than high_freq_factor {high}")
        return Rope(
            theta, kind, factor, low_freq_factor=low, high_freq_factor=high, original_context=original
        )
    return Rope(
        theta,
        kind,
        factor,
        original_context=rope.whole("original_max_position_embeddings", positions),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", None),
    )
