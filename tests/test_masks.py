"""The mask of a pass: what FlexAttention is told must be what the tree says, for every prefix and shape."""

import pytest
import torch

from graphs.masks import (
    EVERYTHING, KERNELS, TILE, BitMask, Flex, FullCache, LiveSlice, flex, packed_bits,
)
from minicast.round import BUCKETS
from minicast.tree import ancestor_matrix
from model.transformer import CAUSAL, dot_product_attention

SHAPES = [(1, 256), (5, 256), (16, 384), (64, 256), (96, 256), (128, 384)]  # rows, slots


def random_tree(n: int, seed: int) -> torch.Tensor:
    """The ancestor matrix (n, n) of a random tree."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, node, (1,), generator=generator)) for node in range(n - 1)]
    return ancestor_matrix(torch.tensor(parents, dtype=torch.int64), deepest=n)


def expected_mask(P: int, visible: torch.Tensor, slots: int) -> torch.Tensor:
    """(n, S): the prefix, then the matrix, then nothing."""
    n = visible.shape[0]
    mask = torch.zeros(n, slots, dtype=torch.bool)
    mask[:, :P] = True
    mask[:, P : P + n] = visible
    return mask


def prefixes(n: int, slots: int) -> list[int]:
    return [0, 1, 63, 64, 127, 128, slots - n]


@pytest.mark.parametrize("n, slots", SHAPES)
def test_the_mask_function_is_the_ancestor_matrix(n, slots):
    """One object serves every round: prefix and tree change in place. Shifts by an unclamped slot, the sign
    bit of a word, a row counted within its fold, or a value kept from the round before would each show
    here."""
    visible = random_tree(n, 0)
    mask = BitMask(n, slots, visible, "cpu")
    for seed, P in enumerate(prefixes(n, slots)):
        visible = random_tree(n, seed)
        mask.fill(torch.tensor([P]), visible)
        assert torch.equal(mask.dense().reshape(n, slots), expected_mask(P, visible, slots)), P


@pytest.mark.parametrize("n, slots", SHAPES)
@pytest.mark.parametrize("kind", [CAUSAL, EVERYTHING])
def test_the_masks_of_a_prompt_chunk_and_of_a_draft_block(n, slots, kind):
    """Causal among the new rows, or all of them both ways; never a slot behind them, where old scratch
    lies."""
    everything = torch.ones(n, n, dtype=torch.bool)
    visible = everything.tril() if kind == CAUSAL else everything
    mask = BitMask(n, slots, kind, "cpu")
    for P in prefixes(n, slots):
        mask.fill(torch.tensor([P]), kind)
        assert torch.equal(mask.dense().reshape(n, slots), expected_mask(P, visible, slots)), P


@pytest.mark.parametrize("n, slots", SHAPES)
def test_the_tiles_listed_are_those_with_something_to_see(n, slots):
    """The kernel reads no other tile, and materialised tests cannot notice one left out."""
    for P in prefixes(n, slots):
        visible = torch.eye(n, dtype=torch.bool)
        mask = BitMask(n, slots, visible, "cpu")
        mask.fill(torch.tensor([P]), visible)
        seen = expected_mask(P, visible, slots).any(dim=0).nonzero().max() // TILE + 1
        blocks = mask.blocks
        assert blocks.kv_num_blocks.dtype == blocks.kv_indices.dtype == torch.int32
        assert set(blocks.kv_num_blocks.flatten().tolist()) == {int(seen)}
        assert blocks.kv_indices[..., : int(seen)].unique().tolist() == list(range(int(seen)))
        assert blocks.full_kv_num_blocks is None


def test_bits_of_all_columns():
    """Column 63 is a word's sign bit, and column 127 the last there is."""
    visible = torch.rand(128, 128, generator=torch.Generator().manual_seed(0)) < 0.5
    words = packed_bits(visible)
    for column in range(128):
        assert torch.equal((words[:, column // 64] >> column % 64) & 1 == 1, visible[:, column])


def test_windows_of_one_shape_share_their_buffers():
    """What a graph holds must not move: same block mask, same addresses, for any prefix and tree."""
    body = Flex()
    offsets = torch.zeros(16, dtype=torch.int64)
    first = body.window(torch.tensor([3]), 3, offsets, random_tree(16, 0), 256).mask
    addresses = first.bits.data_ptr(), first.blocks.kv_num_blocks.data_ptr()
    second = body.window(torch.tensor([90]), 90, offsets, random_tree(16, 1), 256).mask
    assert second is first and addresses == (second.bits.data_ptr(), second.blocks.kv_num_blocks.data_ptr())
    for kind in (EVERYTHING, CAUSAL):
        assert body.window(torch.tensor([3]), 3, offsets, kind, 256).mask is not first


def test_all_bodies_attend_alike():
    """Folding 128 rows into two batches, and each body's own mask, leave the numbers of one plain
    attention."""
    generator = torch.Generator().manual_seed(0)
    for n, P in ((1, 40), (16, 120), (128, 77)):
        q = torch.randn(1, 4, n, 16, generator=generator)
        keys, values = torch.randn(2, 1, 2, 256, 16, generator=generator)
        visible, offsets = random_tree(n, n), torch.zeros(n, dtype=torch.int64)
        outputs = []
        for body in (LiveSlice(), FullCache(), Flex()):
            window = body.window(torch.tensor([P]), P, offsets, visible, 256)
            attend, live = window.body or dot_product_attention, window.live or 256
            outputs.append(attend(q, keys[:, :, :live], values[:, :, :live], window.mask))
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("P", [0, 40])
def test_all_bodies_attend_alike_to_a_prompt_chunk(P):
    """The first chunk needs no mask of its own, later ones see the prefix as well."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 16, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, 256, 16, generator=generator)
    seen = expected_mask(P, torch.ones(16, 16, dtype=torch.bool).tril(), 256)
    expected = dot_product_attention(q, keys, values, seen)
    for body in (LiveSlice(), FullCache(), Flex()):
        window = body.window(torch.tensor([P]), P, torch.arange(16), CAUSAL, 256)
        attend, live = window.body or dot_product_attention, window.live or 256
        torch.testing.assert_close(
            attend(q, keys[:, :, :live], values[:, :, :live], window.mask), expected, atol=1e-6, rtol=1e-5
        )


def test_kernel_layouts_obey_the_kernels_rules():
    """A tile of rows holds whole groups of heads and divides the block mask's; a wrong one fails on the GPU
    only."""
    for options in KERNELS.values():
        assert TILE % options["BLOCK_M"] == 0 and TILE % options["BLOCK_N"] == 0
        assert all(options["BLOCK_M"] % group == 0 for group in (1, 2, 4, 8))
    layouts = {1: 1, 16: 16, 24: 64, 32: 64, 48: 64, 64: 64, 96: 128, 128: 64}  # 128 rows are folded into two times 64
    assert set(layouts) == set(BUCKETS)
    for n, layout in layouts.items():
        mask = BitMask(n, 256, EVERYTHING, "cpu")
        rows, _ = mask.blocks.seq_lengths
        assert rows < TILE, "the kernel that splits the cache takes fewer than 128 rows"
        assert mask.options == KERNELS[layout]


def test_compiled_flex_attention_equals_sdpa():
    """The call itself, compiled: block mask, folds, grouped heads, and a changed prefix without compiling
    again."""
    compiled = torch.compile(flex, fullgraph=True, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    n, slots = 128, 256
    q = torch.randn(1, 4, n, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, slots, 16, generator=generator)
    mask = BitMask(n, slots, random_tree(n, 0), "cpu")
    with torch.no_grad():
        for seed, P in enumerate((3, 90)):
            visible = random_tree(n, seed)
            mask.fill(torch.tensor([P]), visible)
            with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
                ours = compiled(q, keys, values, mask)
            theirs = dot_product_attention(q, keys, values, expected_mask(P, visible, slots))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
