"""The frozen target: a Qwen3 or LLaMA decoder-only transformer that also hands out tap features.

Symbols: B batch, T rows of this pass, S cache slots, H hidden size, V vocabulary, D head dimension,
Hq and Hkv query and key/value heads, M keys attended to, or slots moved.

One pass is described by a `Window`: which cache slots its keys go to and which slots each row sees. A prompt
chunk, one autoregressive step and a packed tree (paper, Lemma 1) differ only in their window. The model knows
nothing of trees, drafts or rounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Rope, TargetConfig, TransformerConfig
from model.errors import UsageError
from model.linear import Linear

CAUSAL = "causal"
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Window:
    """Where one pass writes its keys and values, and what each of its rows sees.

    Attributes:
        slots: (T,) int64, cache slots written, one a row
        positions: (T,) int64, RoPE positions; siblings in a tree share one
        mask: (T, live) bool, or anything that broadcasts to (B, Hq, T, live), true where a row may look; CAUSAL, the
            lower triangle, where T is `live`; None: every row sees all `live` slots; what `body` reads, if there is one
        live: slots that exist for this pass, a host int that bounds what is read. None: the whole cache is
            read and `mask` is (T, S), so that nothing depends on a host value
        body: attention as `dot_product_attention` below, which None is: (q, keys, values, `mask`) -> (B, Hq, T, D)
        run_layer: runs one layer, (layer, x, rope, cache, window) -> x; None: as it is written here
    """

    slots: Tensor
    positions: Tensor
    mask: object = None
    live: int | None = None
    body: Callable | None = None
    run_layer: Callable | None = None


class KVCache:
    """Keys and values of every layer in one tensor at one address.

    Attributes:
        data: (layers, 2, B, Hkv, S, D); zeroed, since a masked NaN would still poison a row
        layers: per-layer views ((B, Hkv, S, D) keys, (B, Hkv, S, D) values)
    """

    def __init__(self, config: TransformerConfig, slots: int, dtype: torch.dtype, device, batch: int = 1):
        shape = (config.layers, 2, batch, config.kv_heads, slots, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.data]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots source (M,) to slots target (M,), both int64, through a temporary, for all layers at once."""
        self.data.index_copy_(4, target, self.data.index_select(4, source))


def rope_frequencies(rope: Rope, head_dim: int, context: int) -> tuple[Tensor, float]:
    """Inverse frequencies (D/2,) float32 and the factor on cos and sin, for default, llama3 and yarn scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain, 1.0
    original = rope.original_context or context
    if rope.kind == "llama3":
        turns = original * plain / (2 * math.pi)  # full turns that a frequency makes over the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return plain * (keep + (1 - keep) / rope.factor), 1.0
    if rope.kind == "yarn":

        def dimension(turns: float) -> float:
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low = max(math.floor(dimension(rope.beta_fast)), 0)
        high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
        ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0, 1)
        factor = rope.attention_factor
        if factor is None:
            factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return plain * (keep + (1 - keep) / rope.factor), factor
    raise ValueError(f"unknown rope scaling {rope.kind!r}")


class Rotary(nn.Module):
    """Rotary position embedding for a whole pass: computed once, used by every layer."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        with torch.device("cpu"):
            frequencies, self.scale = rope_frequencies(config.rope, config.head_dim, config.context)
        self.frequencies = frequencies  # a plain attribute: .to(bfloat16) of the model must not round it

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (T,) -> cos (T, D) and signed sin (T, D): the first half of sin is negated."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate x (B, heads, T, D); halves swap by a roll, and the sign lives in `signed_sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, the mean square in at least float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (…, size) -> (…, size)."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        mean_square = (wide * wide).sum(-1, keepdim=True).mul_(1 / x.shape[-1])  # `mean` costs twice as much on a CPU
        return (wide * mean_square.add_(self.eps).rsqrt_()).to(x.dtype) * self.weight


def dot_product_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | str | None) -> Tensor:
    """q (B, Hq, T, D) over keys and values (B, Hkv, M, D) -> (B, Hq, T, D); mask (…, T, M) bool, CAUSAL (T = M) or None."""
    seen = mask if isinstance(mask, Tensor) else None
    if q.shape[2] == 1:  # heads that share keys become rows of one product: six times as fast in bfloat16 on a CPU
        rows = q[:, :, 0].unflatten(1, (keys.shape[1], -1))  # (B, Hkv, Hq / Hkv, D)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen).flatten(1, 2)[:, :, None]
    grouped = not q.is_cuda or seen is None
    if not grouped:  # CUDA's kernels that take a mask take no groups of heads
        keys, values = (side.repeat_interleave(q.shape[1] // side.shape[1], 1) for side in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, seen, is_causal=mask is CAUSAL, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention with a fused QKV projection and, for Qwen3, norms on each query and key head."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden, rows, bias=config.attention_bias)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else None

    def project(self, x: Tensor, rope: Pair) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, H) -> q (B, Hq, T, D), k and v (B, Hkv, T, D), normed and rotated."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, Hq + 2 Hkv, T, D)
        first_v = self.heads + self.kv_heads
        if self.q_norm is None:
            rotated = rotate(heads[:, :first_v], *rope)
            q, k = rotated[:, : self.heads], rotated[:, self.heads :]
        else:
            q = rotate(self.q_norm(heads[:, : self.heads]), *rope)
            k = rotate(self.k_norm(heads[:, self.heads : first_v]), *rope)
        return q, k, heads[:, first_v:]

    def forward(self, x: Tensor, rope: Pair, cache: Pair | None, window: Window | None) -> Tensor:
        """x (B, T, H) -> (B, T, H).

        rope: cos and signed sin (T, D); cache: keys and values (B, Hkv, S, D) each, or None: plain causal attention
        over the T rows
        """
        q, k, v = self.project(x, rope)
        if cache is None:
            out = dot_product_attention(q, k, v, CAUSAL)
        else:
            keys, values = cache
            keys.index_copy_(2, window.slots, k)
            values.index_copy_(2, window.slots, v)
            if window.live is not None:
                keys, values = keys[:, :, : window.live], values[:, :, : window.live]
            out = (window.body or dot_product_attention)(q, keys, values, window.mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU with gate and up fused in one product."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden, 2 * config.intermediate, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, H) -> (B, T, H)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """One pre-norm decoder layer; target and drafter use the same one."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Pair, cache: Pair | None, window: Window | None) -> Tensor:
        """x (B, T, H) -> (B, T, H); the others as for `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, window)
        return x + self.mlp(self.post_attention_layernorm(x))

    def remember(self, x: Tensor, rope: Pair, cache: Pair, slots: Tensor) -> None:
        """Keep the keys and values of x (B, T, H) in `slots` (T,) int64 of the cache; these rows attend to nothing.

        rope, cache: as for `Attention.forward`
        """
        for side, new in zip(cache, self.self_attn.project(x, rope)[1:]):
            side.index_copy_(2, slots, new)


class Target(nn.Module):
    """A frozen causal language model. Parameters carry the checkpoint's names, less the `model.` prefix."""

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden)  # handed over, since nn.Embedding would fill its own
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = Linear(config.hidden, config.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.config.context

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and caches; the embedding table may be held in fewer bits where that loses nothing."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) int64 -> (B, T, H)."""
        return self.embed_tokens(tokens).to(self.dtype)

    def forward(
        self, tokens: Tensor, cache: KVCache | None, window: Window, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over tokens (B, T).

        Returns the final normed hidden states (B, T, H) and the outputs of layers `taps`, concatenated
        (B, T, len(taps)·H), or None without taps.
        """
        x = self.embed(tokens)
        rope = self.rotary(window.positions, x.dtype)
        run_layer = window.run_layer or Layer.__call__
        outputs = {}
        for index, layer in enumerate(self.layers):
            x = run_layer(layer, x, rope, cache.layers[index] if cache else None, window)
            if index in taps:
                outputs[index] = x
        features = torch.cat([outputs[tap] for tap in taps], dim=-1) if taps else None
        return self.norm(x), features

    def logits(self, hidden: Tensor, run_linear: Callable = Linear.__call__) -> Tensor:
        """hidden (…, H) -> logits (…, V). run_linear: runs a linear layer, (layer, x) -> y, as written or compiled."""
        return run_linear(self.lm_head, hidden)

    @torch.no_grad()
    def read(self, token_ids: Sequence[int] | Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """One uncached causal pass over token_ids (T,) -> hidden states (T, H), tap features (T, len(taps)·H) or None.

        UsageError for a tap that is no layer, and for a token that the target does not know.
        """
        if not all(0 <= tap < len(self.layers) for tap in taps):
            raise UsageError(f"taps are layers, 0 to {len(self.layers) - 1} in this target, got {list(taps)}")
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)[None]
        if ((tokens < 0) | (tokens >= self.vocab_size)).any():
            raise UsageError(f"tokens must be ids below {self.vocab_size}, the target's vocabulary: is the tokenizer its own?")
        positions = torch.arange(tokens.shape[1], device=self.device)
        hidden, features = self(tokens, None, Window(positions, positions), taps)
        return hidden[0], None if features is None else features[0]

    def score(self, token_ids: Sequence[int] | Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """As `read`, with logits (T, V) in the place of hidden states."""
        hidden, features = self.read(token_ids, taps)
        return self.logits(hidden), features
