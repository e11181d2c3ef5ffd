"""What each row of a pass may see, behind one name for every attention body.

Every pass of a round is the same shape: n new rows over P committed positions. Each row sees the whole
prefix, and of the new rows those that `visible` (n, n) marks:

    prompt chunk     CAUSAL, the lower triangle (a chunk is a chain)
    packed tree      the ancestor matrix (paper, Lemma 1; a chain and a single step are special cases)
    draft block      EVERYTHING (DFlash: bidirectional inside the block)

A body turns that into a `Window`. `LiveSlice` reads only the slots that exist and needs the host's P.
`FullCache` reads the whole cache under an explicit mask and depends on the device's P alone, so that it could
be captured; it is slower, and the oracle for the others. `Flex` is what a GPU runs: the mask is a function
that the attention kernel calls, and the blocks of the cache that hold nothing are never read. No body knows
what the rows mean.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.transformer import CAUSAL, Window, dot_product_attention


EVERYTHING = "everything"


def matrix(visible: Tensor | str, rows: Tensor) -> Tensor:
    """`visible` as a matrix (n, n) bool over rows (n,) = 0 … n − 1."""
    if isinstance(visible, Tensor):
        return visible
    everything = torch.ones(len(rows), len(rows), dtype=torch.bool, device=rows.device)
    return everything.tril() if visible == CAUSAL else everything


class Body:
    """What all bodies have, beside a `window` like `LiveSlice.window`.

    Attributes:
        static: no shape and no value that a window holds depends on the host, so that a graph can hold its pass
        compiled_layer: a `graphs.capture.CompiledLayer`; None runs layers as they are written. A prompt chunk is never
            compiled: it may have any length, and compiling for each would take longer than it saves
    """

    static = False

    def __init__(self, compiled_layer: Callable | None = None):
        self.compiled_layer = compiled_layer


class LiveSlice(Body):
    """Scaled dot-product attention over the P + n slots in use: the default on a CPU."""

    def window(self, P: Tensor, prefix: int, offsets: Tensor, visible: Tensor | str, slots: int) -> Window:
        """Lay n rows after the prefix.

        Args:
            P: (1,) int64 on the device, committed positions; prefix: the same on the host
            offsets: (n,) int64, RoPE position of each row less P (its depth in a tree)
            visible: among the new rows: (n, n) bool, CAUSAL or EVERYTHING
            slots: S, slots of the cache
        """
        n = offsets.shape[0]
        rows = torch.arange(n, device=P.device)
        mask = CAUSAL if visible is CAUSAL and prefix == 0 else None  # None: one row sees all that is live
        if mask is None and visible is not EVERYTHING and n > 1:
            among = matrix(visible, rows)
            mask = torch.cat((among.new_ones(n, prefix), among), dim=1)
        run_layer = None if visible is CAUSAL else self.compiled_layer
        return Window(P + rows, P + offsets, mask, live=prefix + n, run_layer=run_layer)


class FullCache(Body):
    """Scaled dot-product attention over all S slots under a mask (n, S): static shapes, no host value."""

    static = True

    def window(self, P: Tensor, prefix: int, offsets: Tensor, visible: Tensor | str, slots: int) -> Window:
        """As `LiveSlice.window`; `prefix` is not read."""
        rows = torch.arange(offsets.shape[0], device=P.device)
        mask = sees(P, matrix(visible, rows), rows[:, None], torch.arange(slots, device=P.device))
        return Window(P + rows, P + offsets, mask, run_layer=None if visible is CAUSAL else self.compiled_layer)


def sees(P: Tensor, visible: Tensor, row: Tensor, slot: Tensor) -> Tensor:
    """Whether `row` sees cache `slot`: in the prefix, or a new row marked in visible (n, n) bool. P: (1,) int64; row and slot,
    int64 of any shapes, broadcast -> bool."""
    n = visible.shape[0]
    offset = slot - P
    inside = (offset >= 0) & (offset < n)
    return (offset < 0) | (inside & visible[row, offset.clamp(0, n - 1)])


# FlexAttention

TILE = 128  # rows and slots of a tile that a block mask lists or leaves out; caches have whole tiles
WORD = 64   # bits of an int64
FOLD = 64   # rows of one batch where a pass is folded, see below

# How the kernel is laid out, by the largest number of rows it is for. On CUDA, FlexAttention has two kernels.
# The one for short queries splits the cache between SPLIT_KV programs, and has to: one decoder has too few
# heads to fill a GPU. It takes fewer than 128 rows of groups of 1, 2, 4, … heads (SmolLM2's groups of 3 run in
# the other kernel), in tiles of BLOCK_M query vectors, where the heads that share a key head lie side by side.
# Left to itself it wants a single tile, and finds no layout from 33 rows of 4 heads on. The other kernel does
# not split the cache, so 128 rows run as a batch of two times 64 over the one cache.
#
# BLOCK_M divides TILE and is divided by the heads of a group; BLOCK_N divides TILE. With more tiles of rows
# it takes fewer splits to fill the GPU, and each split writes and reads D fp32 values a row and head. Stages
# overlap loading with products; torch's own default for Hopper is 1, by an oversight. The figures are
# estimates: `bench --gpu-check` sweeps them.
KERNELS = {
    1: {"BLOCK_M": 16, "BLOCK_N": 64, "SPLIT_KV": 32, "num_warps": 4, "num_stages": 3},
    16: {"BLOCK_M": 64, "BLOCK_N": 64, "SPLIT_KV": 16, "num_warps": 4, "num_stages": 3},
    64: {"BLOCK_M": 64, "BLOCK_N": 64, "SPLIT_KV": 8, "num_warps": 4, "num_stages": 3},
    TILE: {"BLOCK_M": 64, "BLOCK_N": 64, "SPLIT_KV": 4, "num_warps": 4, "num_stages": 3},
}


class Flex(Body):
    """FlexAttention over the slots in use: static shapes, no host value, nothing built from round to round.

    It exists in compiled layers only. Elsewhere its mask is materialised, which is slow, so where layers are
    compiled a prompt chunk, which is not, takes the live slice instead.
    """

    static = True

    def __init__(self, compiled_layer: Callable | None = None):
        super().__init__(compiled_layer)
        self.masks: dict[tuple, BitMask] = {}

    def window(self, P: Tensor, prefix: int, offsets: Tensor, visible: Tensor | str, slots: int) -> Window:
        """As `LiveSlice.window`. Windows of one shape share buffers: each call overwrites the last one's mask."""
        if visible is CAUSAL and self.compiled_layer:
            return LiveSlice().window(P, prefix, offsets, visible, slots)
        n = offsets.shape[0]
        mask = self._mask(n, slots, visible, P.device)
        mask.fill(P, visible)
        return Window(P + torch.arange(n, device=P.device), P + offsets, mask, body=flex, run_layer=self.compiled_layer)

    def _mask(self, n: int, slots: int, visible: Tensor | str, device: torch.device) -> "BitMask":
        if visible is CAUSAL:
            return BitMask(n, slots, CAUSAL, device)
        key = n, slots, visible is EVERYTHING
        if key not in self.masks:
            self.masks[key] = BitMask(n, slots, visible, device)
        return self.masks[key]


class BitMask:
    """The mask of n rows over S slots as functions of buffers, which a round fills in place.

    FlexAttention asks for two things: a function of (row, slot), and for each tile of rows the list of tiles
    of slots where the function is to be called. Here the function reads P and the rows' bits from buffers, and
    the list is 0, 1, 2, … with a length. So one block mask serves all rounds of a shape: nothing is built,
    compiled or captured again when P and the tree change. A second list could name tiles that need no
    function, but with it the kernel splits the whole cache between its programs, however little of it is in
    use.

    Args:
        n: rows; slots: S
        visible: (n, n) bool of a tree, of which only the kind is read, CAUSAL or EVERYTHING
        options: layout of the kernel, by default from KERNELS

    Attributes:
        P: () int64; bits: (n, 2) int64 from `packed_bits`; written by `fill`, read by the mask function
        folds: the n rows run as a batch of so many times n / folds
        blocks: BlockMask of n / folds rows over S slots; its kv_num_blocks is written by `fill`
        options: layout of the kernel
    """

    def __init__(self, n: int, slots: int, visible: Tensor | str, device, options: dict | None = None):
        self.n = n
        self.folds = n // FOLD if n == TILE else 1
        rows = n // self.folds
        self.options = options or KERNELS[next((most for most in KERNELS if most >= rows), TILE)]
        self.P = torch.zeros((), dtype=torch.int64, device=device)
        self.bits = torch.zeros(n, 2, dtype=torch.int64, device=device)
        row_tiles, slot_tiles = -(-rows // TILE), -(-slots // TILE)
        tiles = torch.arange(slot_tiles, dtype=torch.int32, device=device)
        self.blocks = BlockMask.from_kv_blocks(
            kv_num_blocks=torch.zeros(self.folds, 1, row_tiles, dtype=torch.int32, device=device),
            kv_indices=tiles.expand(self.folds, 1, row_tiles, slot_tiles).contiguous(),
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=self._function(rows, "tree" if isinstance(visible, Tensor) else visible),
            seq_lengths=(rows, slots),
            compute_q_blocks=False,
        )

    def _function(self, rows: int, kind: str) -> Callable:
        """Whether row `row` of the batch sees `slot`, for index tensors of any shape."""
        n, P, bits = self.n, self.P, self.bits

        def sees(batch, head, row, slot):
            row = batch * rows + row
            offset = slot - P
            j = offset.clamp(0, n - 1)  # shifting by more bits than there are gives anything
            if kind == "tree":
                # Both words of a row are read, and one is taken: an index that varied with the slot, too, would have
                # the kernel gather a word for each entry of a tile, through shared memory and with registers spilled.
                inside = ((torch.where(j < WORD, bits[row, 0], bits[row, 1]) >> (j % WORD)) & 1) == 1
            else:
                inside = (j <= row) | (kind == EVERYTHING)
            return (offset < 0) | ((offset < n) & inside)

        return sees

    def fill(self, P: Tensor, visible: Tensor | str) -> None:
        """Set for a round: P (1,) int64, and the bits of visible (n, n) bool. Tiles are listed up to the last row's slot."""
        self.P.copy_(P[0])
        self.blocks.kv_num_blocks.copy_((P + self.n - 1) // TILE + 1)
        if isinstance(visible, Tensor):
            self.bits.copy_(packed_bits(visible))

    def dense(self) -> Tensor:
        """The mask function on all (row, slot): (folds, 1, n / folds, S) bool."""
        rows, slots = self.blocks.seq_lengths
        batch, row, slot = (torch.arange(count, device=self.P.device) for count in (self.folds, rows, slots))
        head = torch.zeros_like(self.P)
        return self.blocks.mask_mod(batch[:, None, None, None], head, row[:, None], slot)


def packed_bits(visible: Tensor) -> Tensor:
    """Rows of a matrix (n, n) bool as bits, (n, 2) int64: column j is bit j % 64 of word j // 64. n ≤ 128."""
    columns = F.pad(visible, (0, 2 * WORD - visible.shape[1])).unflatten(1, (2, WORD))
    return (columns.long() << torch.arange(WORD, device=visible.device)).sum(dim=-1)


def flex(q: Tensor, keys: Tensor, values: Tensor, mask: BitMask) -> Tensor:
    """q (1, Hq, n, D) over keys and values (1, Hkv, S, D) -> (1, Hq, n, D).

    A single fold is folded, too, so that the kernel is given a view: of a q just computed, Inductor reads the strides
    before it decides them, and heads and rows change places (torch 2.13, `create_flex_decoding_kernel`).
    """
    q = q[0].unflatten(1, (mask.folds, -1)).transpose(0, 1)  # (folds, Hq, n / folds, D)
    if torch.compiler.is_compiling():
        # In 32 bits three stages of tiles do not fit a multiprocessor's shared memory, and a product of tiles is written
        # out, multiplication by multiplication, so that large ones are long to compile.
        small = {"BLOCK_M": 16, "BLOCK_N": 32, "num_stages": 1} if q.dtype == torch.float32 else {}
        options = mask.options | small | {"BLOCKS_ARE_CONTIGUOUS": True}
        out = flex_attention(q, keys, values, block_mask=mask.blocks, enable_gqa=True, kernel_options=options)
    else:
        keys, values = (side.expand(mask.folds, -1, -1, -1) for side in (keys, values))
        out = dot_product_attention(q, keys, values, mask.dense())
    return out.transpose(0, 1).flatten(1, 2)[None]


BODIES = {"sdpa": LiveSlice, "static": FullCache, "flex": Flex}
