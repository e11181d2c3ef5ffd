"""Tree builders against a brute-force reference, which sorts all prefixes by the stated order."""

import time
from itertools import product

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from minicast.tree import (
    GROUP,
    Tree,
    best_first_tree,
    candidate_pairs,
    chain_tree,
    device_tree,
    expand,
    ranked_tree,
    top_ranked,
)

INF = float("inf")
FIELDS = ("tokens", "parents", "depths", "log_mass")


# The reference

def brute_force(log_q: torch.Tensor, rank_cap: int | None) -> Tree:
    """All prefixes of log_q (L, V) that have any mass, each with a sort key that spells out the order.

    key = (-mass, depth, rank, the parent's key): nested, for "the earlier parent" is the one of lower key.
    """
    rows = log_q.float().tolist()
    kept = [sorted(range(len(row)), key=lambda token: (-row[token], token))[:rank_cap] for row in rows]
    level, found = [((), np.float32(0), ())], {}  # (prefix of ranks, mass, key)
    for depth, (row, tokens) in enumerate(zip(rows, kept), start=1):
        children = []
        for (prefix, mass, key), (rank, token) in product(level, enumerate(tokens)):
            with np.errstate(over="ignore"):
                total = np.float32(mass + np.float32(row[token]))
            if total > -INF:
                child = (*prefix, rank)
                children.append((child, total, (-total, depth, rank, key)))
                found[child] = (token, depth, total, children[-1][2])
        level = children
    order = sorted(found, key=lambda prefix: found[prefix][3])
    place = {(): -1} | {prefix: index for index, prefix in enumerate(order)}
    return Tree(
        tokens=torch.tensor([found[prefix][0] for prefix in order], dtype=torch.int64),
        parents=torch.tensor([place[prefix[:-1]] for prefix in order], dtype=torch.int64),
        depths=torch.tensor([found[prefix][1] for prefix in order], dtype=torch.int64),
        log_mass=torch.tensor([found[prefix][2] for prefix in order], dtype=torch.float32),
    )


def row_by_row_ancestors(parents: torch.Tensor) -> torch.Tensor:
    """(N+1, N+1) bool: each row its parent's plus the diagonal."""
    rows = torch.zeros(len(parents) + 1, len(parents) + 1, dtype=torch.bool)
    rows[0, 0] = True
    for row, parent in enumerate(parents.tolist(), start=1):
        rows[row] = rows[parent + 1]
        rows[row, row] = True
    return rows


def first(tree: Tree, width: int) -> Tree:
    return Tree(*(getattr(tree, name)[:width] for name in FIELDS))


# Input: random, and of every kind that has ties, zeros or odd shapes

def peaked(shape, random):
    return torch.log_softmax(3 * torch.randn(shape, generator=random), dim=-1)


def few_values(shape, random):
    """Ties within a depth, across depths and, by sums of different terms, across branches."""
    return -torch.randint(1, 4, shape, generator=random).float() / 2


def bf16_logits(shape, random):
    """The model's case: log-softmax of bf16 logits, many of them equal, kept in bf16."""
    return torch.log_softmax(torch.randn(shape, generator=random).bfloat16(), dim=-1)


def half(shape, random):
    return peaked(shape, random).half()


def double(shape, random):
    """Differences that fp32 does not see are ties."""
    values = few_values(shape, random).double()
    return values * (1 + 1e-12 * torch.rand(shape, generator=random))


def all_equal(shape, random):
    return torch.full(shape, -0.7)


def certain(shape, random):
    """Mass one or nearly: children tie with parents, by -0.0 or by rounding, and siblings by rounding."""
    values = torch.tensor([0.0, -0.0, -1e-9, -1e-8, -1e-7, -INF])
    return values[torch.randint(0, len(values), shape, generator=random)]


def holes(shape, random):
    return peaked(shape, random).masked_fill(torch.rand(shape, generator=random) < 0.4, -INF)


def nothing(shape, random):
    return torch.full(shape, -INF)


def enormous(shape, random):
    """Sums that overflow fp32: such a prefix has mass zero."""
    return -3e38 * torch.rand(shape, generator=random)


KINDS = [peaked, few_values, bf16_logits, half, double, all_equal, certain, holes, nothing, enormous]
SHAPES = [(4, 4), (3, 7), (2, 11), (1, 5), (5, 1), (1, 1), (6, 2)]
WIDTHS = [0, 1, 2, 3, 7, 15, 40, 10_000]


def assert_same(got: Tree, expected: Tree, size: int | None = None):
    for name in FIELDS:
        a, b = getattr(got, name)[:size], getattr(expected, name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), f"{name}: {a.tolist()} is not {b.tolist()}"
    bits = [tree.log_mass[:size].view(torch.int32) for tree in (got, expected)]
    assert torch.equal(*bits), "masses differ in a bit (a negative zero)"


@pytest.mark.parametrize("kind", KINDS)
def test_builders_match_brute_force(kind):
    """Heap and device builder give the reference's tree: tokens, parents, depths, bits of the mass, order.

    Guards ties broken by insertion order, a sibling or child pushed too late to be in its place, the level's
    cut dropping a node that belongs, masses summed in fp64, mass-zero nodes proposed, an index past the ranks
    or levels.
    """
    random = torch.Generator().manual_seed(KINDS.index(kind))
    for shape, rank_cap in product(SHAPES, (1, 3, 8, None)):
        log_q = kind(shape, random)
        universe = brute_force(log_q, rank_cap)
        for width in WIDTHS:
            expected = first(universe, width)
            assert_same(best_first_tree(log_q, width, rank_cap), expected)
            assert_same(best_first_tree(log_q[: max(width, 1)], width, rank_cap), expected)  # no path is longer than it
            if 0 < width < 100:
                tokens, ranked = top_ranked(log_q, rank_cap)
                tree = device_tree(tokens, ranked, width, candidate_pairs(width, ranked.shape[1]))
                assert_same(tree, expected, size=expected.width)
                assert tree.width == width
                assert (tree.log_mass[expected.width:] == -INF).all()
                assert (tree.parents[expected.width:] == -1).all()
                assert (tree.depths[expected.width:] == 1).all()


@pytest.mark.parametrize("kind", [peaked, few_values, bf16_logits, certain, holes])
def test_builders_agree_at_full_size(kind):
    """Width 127, 15 levels, too large to enumerate: the heap and the device builder check each other.

    Also that parents come first, each mass is its parent's plus one log q, no node comes twice, and a
    narrower tree is the beginning of a wider one.
    """
    log_q = kind((15, 300), torch.Generator().manual_seed(7))
    for rank_cap in (8, None):
        tree = best_first_tree(log_q, 127, rank_cap)
        tokens, ranked = top_ranked(log_q, rank_cap or 127)
        device = device_tree(tokens, ranked, 127, candidate_pairs(127, ranked.shape[1]))
        assert_same(device, tree, size=tree.width)
        assert_same(best_first_tree(log_q, 31, rank_cap), first(tree, 31))
        assert (tree.parents < torch.arange(tree.width)).all()
        assert (tree.log_mass.diff() <= 0).all()
        depths = torch.cat([torch.zeros(1, dtype=torch.int64), tree.depths])
        masses = torch.cat([torch.zeros(1), tree.log_mass])
        assert torch.equal(tree.depths, depths[tree.parents + 1] + 1)
        steps = log_q.float()[tree.depths - 1, tree.tokens]
        assert torch.equal(tree.log_mass, masses[tree.parents + 1] + steps)
        assert len(set(zip(tree.parents.tolist(), tree.tokens.tolist()))) == tree.width


def test_ties_by_hand():
    """Every rule of the order decides once: tokens 1 and 2 are certain at depth 1, and so is 1 at depth 2."""
    log_q = torch.tensor([[-INF, 0.0, 0.0], [-1.0, 0.0, -1.0]])
    tree = best_first_tree(log_q, 10)
    assert tree.tokens.tolist() == [1, 2, 1, 1, 0, 0, 2, 2]
    assert tree.parents.tolist() == [-1, -1, 0, 1, 0, 1, 0, 1]
    assert tree.depths.tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    assert tree.log_mass.tolist() == [0, 0, 0, 0, -1, -1, -1, -1]


# Ranking

@pytest.mark.parametrize("vocabulary", [1, 5, GROUP, 64 * GROUP, 64 * GROUP + 1, 100 * GROUP * GROUP - 3])
@pytest.mark.parametrize("kind", [peaked, few_values, bf16_logits, certain, holes, nothing, double])
def test_top_ranked_is_a_stable_sort(kind, vocabulary):
    """Ranking by blocks, to any number of levels, is a stable sort of the whole vocabulary cut at K.

    Guards ties across the cut or across blocks, padding ranked as a token, a cap above the vocabulary.
    """
    log_q = kind((3, vocabulary), torch.Generator().manual_seed(vocabulary))
    expected = log_q.float().sort(dim=1, descending=True, stable=True)
    for ranks in (0, 1, 2, 8, 20, 10**6) + ((None,) if vocabulary < 10**4 else ()):
        tokens, values = top_ranked(log_q, ranks)
        assert tokens.dtype == torch.int64 and values.dtype == torch.float32
        assert torch.equal(tokens, expected.indices[:, :ranks])
        assert torch.equal(values, expected.values[:, :ranks])


def test_equal_best_tokens():
    """Equal top values at tokens 3 and 7: every builder takes 3 first, as argmax does in the target."""
    log_q = torch.full((2, 5000), -9.0)
    log_q[:, [7, 3]] = -0.7
    assert chain_tree(log_q, 2).tokens.tolist() == [3, 3]
    assert best_first_tree(log_q, 2).tokens.tolist() == [3, 7]


# Chains

@pytest.mark.parametrize("kind", [peaked, few_values, bf16_logits, certain, half])
def test_chain(kind):
    """min(width, L) best tokens, one below the other; the device's chain is the same, bit for bit."""
    random = torch.Generator().manual_seed(3)
    for shape, width in product([(7, 40), (1, 3), (4, 1)], [1, 3, 7, 50]):
        log_q = kind(shape, random).clamp(min=-50)
        size = min(width, shape[0])
        tree = chain_tree(log_q, width)
        assert tree.tokens.tolist() == log_q.float().argmax(dim=1).tolist()[:size]
        assert tree.parents.tolist() == list(range(-1, size - 1))
        assert tree.depths.tolist() == list(range(1, size + 1))
        assert_same(device_tree(*top_ranked(log_q, 1), size, candidate_pairs(size, 1)), tree)


# Ancestors

def test_ancestors():
    """Doubling gives the matrix that row after row gives, on trees of every shape, the empty one included.

    Guards a mask that depends on depth but not on which parent, and rows that stop short of the root.
    """
    random = torch.Generator().manual_seed(1)
    for width in (0, 1, 2, 5, 16, 31, 127):
        shapes = [torch.arange(width) - 1, torch.full((width,), -1)]  # a chain, a star
        for _ in range(5):  # any earlier node, or the root
            shapes.append((torch.rand(width, generator=random) * torch.arange(1, width + 1)).long() - 1)
        for parents in shapes:
            tree = Tree(tokens=parents, parents=parents, depths=parents, log_mass=parents)
            got = tree.ancestors()
            assert got.shape == (width + 1, width + 1) and got.dtype == torch.bool
            assert torch.equal(got, row_by_row_ancestors(parents))


def test_ancestors_when_one_sibling_has_all_children():
    """Two nodes at depth 1, both nodes of depth 2 under the second: only that one is their ancestor."""
    parents, depths = torch.tensor([-1, -1, 1, 1]), torch.tensor([1, 1, 2, 2])
    tree = Tree(torch.tensor([0, 1, 0, 1]), parents, depths, torch.zeros(4))
    expected = torch.eye(5, dtype=torch.bool)
    expected[:, 0] = True
    expected[[3, 4], 2] = True
    assert torch.equal(tree.ancestors(), expected)


# Limits and errors

def test_limits():
    """Widths 0, 1 and beyond all prefixes, caps beyond the vocabulary, no levels: never an IndexError."""
    log_q = peaked((2, 3), torch.Generator().manual_seed(0))
    assert best_first_tree(log_q, 0).width == 0
    assert best_first_tree(log_q, 0).ancestors().tolist() == [[True]]
    assert best_first_tree(log_q, 1).width == 1
    assert best_first_tree(log_q, 10_000, rank_cap=10_000).width == 3 + 9
    assert best_first_tree(log_q, 10_000, rank_cap=2).width == 2 + 4
    assert best_first_tree(log_q[:0], 5).width == 0


def test_errors_name_the_cause():
    """Widths and caps that mean nothing are refused, and so is a drafter's NaN, wherever in the row."""
    log_q = peaked((3, 5000), torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="-1"):
        best_first_tree(log_q, -1)
    with pytest.raises(ValueError, match="rank_cap"):
        best_first_tree(log_q, 5, rank_cap=0)
    with pytest.raises(ValueError, match=r"shape \(L, V\), not \(5000,\)"):
        best_first_tree(log_q[0], 5)
    nan = float("nan")
    for value, token, dtype in product((nan, -nan, INF), (0, 4321), (torch.float32, torch.bfloat16)):
        broken = log_q.to(dtype)
        broken[2, token] = value
        for build in (best_first_tree, chain_tree):
            with pytest.raises(ValueError, match="not finite"):
                build(broken, 7)
        if value != INF:  # the device cannot raise, but it shows
            tokens, ranked = top_ranked(broken, 8)
            assert device_tree(tokens, ranked, 7, candidate_pairs(7, 8)).log_mass.isnan().any()
    log_q = peaked((3, 5000), torch.Generator().manual_seed(0))
    for build in (best_first_tree, chain_tree):
        with pytest.raises(ValueError, match="log_softmax"):  # logits: their order of prefixes is not best first
            build(log_q - log_q.max() + 1, 7)
        build(log_q - log_q.max() + 1e-6, 7)  # rounding


# What a CUDA graph demands

def test_device_builders_are_capturable():
    """Nothing reads a value to the host or has a shape that depends on one: fake tensors have no values.

    Guards .item(), .tolist(), nonzero and boolean indexing, any of which breaks capture. That the guard works
    is shown on the heap, which does read its input.
    """
    with FakeTensorMode():
        log_q = torch.empty(4, 5000)
        tokens, ranked = top_ranked(log_q, 8)
        pairs = torch.empty(2, count_pairs(63, 8), dtype=torch.int64)
        tree = device_tree(tokens, ranked, 63, pairs)
        assert all(getattr(tree, name).shape == (63,) for name in FIELDS)
        assert tree.ancestors().shape == (64, 64)
        with pytest.raises(DataDependentOutputException):
            ranked_tree(tokens, ranked, 63)


def count_pairs(width: int, ranks: int) -> int:
    return sum((i + 1) * (r + 1) <= width for i in range(width) for r in range(ranks))


def test_candidate_pairs():
    """All pairs of the bound and no other, by rank and then parent; 342 at width 127 and 8 ranks."""
    assert candidate_pairs(127, 8).shape == (2, 342)
    for width, ranks in product((1, 2, 5, 16, 63), (1, 3, 8, 100)):
        pairs = candidate_pairs(width, ranks).T.tolist()
        assert len(pairs) == count_pairs(width, ranks)
        assert all((i + 1) * (r + 1) <= width and r < ranks for i, r in pairs)
        assert pairs == sorted(pairs, key=lambda pair: (pair[1], pair[0]))


# Time

def test_expansion_is_fast():
    """N = 127, L = 15, K = 8 within 0.4 ms, the smallest of 300 runs (typically 0.12 to 0.25 ms).

    Guards a push of all K children at each pop, or tensors inside the loop. A false alarm needs a core three
    times slower than a laptop's in every one of the runs.
    """
    _, ranked = top_ranked(peaked((15, 1000), torch.Generator().manual_seed(0)), 8)
    ranked, seconds = ranked.tolist(), []
    for _ in range(300):
        start = time.perf_counter()
        expand(ranked, 127)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.4e-3
