"""The DFlash head: one pass over [root, mask, …, mask] gives a distribution for each of the next L tokens.

Symbols: P committed positions, B batch, T rows of this pass, L block depth (block_size − 1), H hidden size,
V vocabulary, V' tokens that are scored, F = taps·H.

The head reads the target's tap features of the committed prefix. `fc` and `hidden_norm` fuse the taps, once for each
position; each draft layer projects the fused feature to a key and a value, which are kept in the draft cache. The
block's own keys and values go to the slots after the prefix, and are overwritten when those positions commit, so that
nothing computed from a mask stays. Queries come only from the block, and see the whole prefix and the whole block, in
both directions.

Embedding and LM head are the target's. With a small target, the LM head is most of the cost of a draft, yet nearly all
text is written with few of its tokens: after `restrict`, only these are scored. What becomes of the L distributions is
not decided here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from model.config import DraftConfig
from model.errors import UsageError
from model.linear import Linear
from model.transformer import KVCache, Layer, RMSNorm, Rotary, Target, Window


class DraftHead(nn.Module):
    """A one-pass block drafter. Its parameters have the names of the published checkpoints."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.directory: Path | None = None  # it was loaded from; the pair's mass curve is there
        self.rotary = Rotary(config)
        self.fc = Linear(len(config.taps) * config.hidden, config.hidden)
        self.hidden_norm = RMSNorm(config.hidden, config.eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.vocabulary: Tensor | None = None  # (V',) int64, the tokens scored; None: all
        self.vocabulary_head: Linear | None = None  # their rows of the LM head

    @property
    def block_size(self) -> int:
        """L + 1: the root and L masks."""
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs are the features, in the order of concatenation."""
        return self.config.taps

    @property
    def mask_token_id(self) -> int:
        """The token that stands for a position to be drafted."""
        return self.config.mask_token_id

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and caches."""
        return self.norm.weight.dtype

    def extend(
        self, features: Tensor, cache: KVCache, slots: Tensor, remember: Callable = Layer.remember,
        run_linear: Callable = Linear.__call__,
    ) -> None:
        """Append committed positions to the cache: features (B, T, F) become keys and values in slots (T,) int64, which
        are also their positions.

        remember: runs Layer.remember, as it is written or compiled; run_linear: runs a linear layer, in the same way
        """
        fused = self.hidden_norm(run_linear(self.fc, features))
        rope = self.rotary(slots, fused.dtype)
        for layer, layer_cache in zip(self.layers, cache.layers):
            remember(layer, fused, rope, layer_cache, slots)

    def forward(self, block: Tensor, cache: KVCache, window: Window, target: Target) -> Tensor:
        """block (B, L+1) int64 token ids -> normed hidden states (B, L, H) of the mask rows.

        cache: the draft cache, which holds the prefix. window: puts the block at positions and slots P..P+L, and lets
        every row see prefix and block.
        """
        x = target.embed(block)
        rope = self.rotary(window.positions, x.dtype)
        run_layer = window.run_layer or Layer.__call__
        for layer, layer_cache in zip(self.layers, cache.layers):
            x = run_layer(layer, x, rope, layer_cache, window)
        return self.norm(x[:, 1:])

    @torch.no_grad()
    def restrict(self, tokens: Sequence[int], target: Target) -> None:
        """Score only `tokens` from now on. Others get no mass, and so are never proposed; the text stays the same.

        This takes a copy of their V' rows of the target's LM head. UsageError for no tokens, and for a token that the
        target does not know.
        """
        known = sorted(set(tokens))
        if not known or known[0] < 0 or known[-1] >= target.vocab_size:
            ids = f"ids below {target.vocab_size}, the target's vocabulary"
            raise UsageError(f"a head scores at least one token, and tokens are {ids}: give others")
        vocabulary = torch.tensor(known, device=target.device)
        rows = target.lm_head.dense().index_select(0, vocabulary).to(target.dtype)
        head = Linear(self.config.hidden, len(vocabulary))
        head.weight = nn.Parameter(rows, requires_grad=False)
        head.pack()
        self.vocabulary, self.vocabulary_head = vocabulary, head

    def log_q(self, hidden: Tensor, target: Target, run_linear: Callable = Linear.__call__) -> Tensor:
        """Normed hidden states (L, H) -> log q (L, V) float32: in 16 bits, ranks would tie and masses would be coarse.

        run_linear: as for `extend`
        """
        if self.vocabulary is None:
            return torch.log_softmax(target.logits(hidden, run_linear), dim=-1, dtype=torch.float32)
        known = torch.log_softmax(run_linear(self.vocabulary_head, hidden), dim=-1, dtype=torch.float32)
        nothing = known.new_full((len(hidden), target.vocab_size), -torch.inf)
        return nothing.index_copy_(1, self.vocabulary, known)

    @torch.no_grad()
    def score(self, features: Tensor, root: int, target: Target) -> Tensor:
        """features (P, F) of the committed prefix, and the token id of the pending root -> log q (L, V) float32, whose
        row j is q_{j+1}."""
        prefix, size, device = features.shape[0], self.block_size, target.device
        cache = KVCache(self.config, prefix + size, target.dtype, device)
        self.extend(features[None].to(target.dtype), cache, torch.arange(prefix, device=device))
        block = torch.full((1, size), self.mask_token_id, device=device)
        block[0, 0] = root
        slots = torch.arange(prefix, prefix + size, device=device)
        hidden = self(block, cache, Window(slots, slots, live=prefix + size), target)
        return self.log_q(hidden[0], target)
