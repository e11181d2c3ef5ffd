"""Candidate trees: which N prefixes of the drafter's block are worth verifying (paper, §3.2 and Appendix C).

One drafter pass gives L distributions, q_1 to q_L. A candidate is a prefix y_1..y_d of at most L tokens, and
its plug-in mass is q_1(y_1) · q_2(y_2) · ... · q_d(y_d) (paper, eq. 1). Theorem 1: the N prefixes of largest
mass form a tree, and by the drafter's own scores no other tree of N nodes commits more tokens. That is the
tree built here, twice: by a heap on the host, and in tensor operations that a CUDA graph can hold.

    L  depth of the block             K  rank cap: the tokens kept at each depth (paper: 8)
    V  vocabulary                     N  width: nodes below the root

There is one order of nodes, and every builder follows it to the bit: larger mass first; among equals the
shallower, then the lower rank in its q, then the child of the earlier parent. Equal values of one q rank by
token id. Masses are logarithms in fp32, each its parent's plus one log q. Since log q is at most 0, a node
follows its parent and its better siblings, and that is all the algorithms below rely on. Prefixes of mass
zero are never proposed.

This file knows neither the model that gives q nor the verifier that uses the tree.
"""

from array import array
from dataclasses import dataclass
from heapq import heappush, heapreplace
from math import inf

import torch
from torch.nn.functional import pad


class NonFinite(ValueError):
    """log q holds NaN or +inf, so that no order of prefixes means anything."""


@dataclass(frozen=True)
class Tree:
    """N nodes, best first: a parent comes before its children, and the first M nodes are a tree as well."""

    tokens: torch.Tensor    # (N,) int64
    parents: torch.Tensor   # (N,) int64, index of a node; -1 is the root, the pending token b
    depths: torch.Tensor    # (N,) int64, 1 below the root
    log_mass: torch.Tensor  # (N,) float32

    @property
    def width(self) -> int:
        return self.tokens.shape[0]

    def first(self, width: int) -> "Tree":
        """The tree of the first `width` nodes, in the same memory."""
        return Tree(self.tokens[:width], self.parents[:width], self.depths[:width], self.log_mass[:width])

    def real(self) -> "Tree":
        """Without the nodes of no mass that a builder of fixed shape adds where candidates run out."""
        return self.first(int((self.log_mass > -torch.inf).sum()))

    def to(self, device: torch.device, copy: bool = False) -> "Tree":
        """The same tree on `device`; with `copy`, in memory of its own."""
        fields = (self.tokens, self.parents, self.depths, self.log_mass)
        return Tree(*(values.to(device, copy=copy) for values in fields))

    def ancestors(self) -> torch.Tensor:
        """(N+1, N+1) bool by packed row, 0 the root, v node v - 1: row v is true at v and its ancestors."""
        return ancestor_matrix(self.parents, deepest=self.width)


def ancestor_matrix(parents: torch.Tensor, deepest: int) -> torch.Tensor:
    """The matrix above, (N+1, N+1) bool, of parents (N,), for a tree at most `deepest` levels deep.

    A row is its parent's row plus the diagonal. Row after row that is N steps; here each step doubles how far
    up every row has looked, so log2(deepest) steps do, without a host sync.
    """
    rows = torch.eye(parents.shape[0] + 1, dtype=torch.bool, device=parents.device)
    above = pad(parents + 1, (1, 0))  # the packed row above each one; the root stays with itself
    for _ in range(deepest.bit_length()):
        rows = rows | rows.index_select(0, above)
        above = above.index_select(0, above)
    return rows


# Ranking the vocabulary

GROUP = 32  # neighbouring tokens that share one maximum
RANK_CAP = 8  # K, if not said


def top_ranked(log_q: torch.Tensor, ranks: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of each depth: log_q (L, V) -> tokens (L, K) int64, log q (L, K) float32.

    Best first, equal values by token id; K is min(ranks, V), or V for None. A bare `topk` breaks ties as it
    likes, and a stable sort of the whole vocabulary is slow. But the K best tokens lie in the K best groups
    of neighbouring tokens, ranked by their maxima and ties by position: each of these groups holds a token
    that goes before anything in a later one. Ranking the maxima is this same problem, GROUP times smaller.
    NaN ranks first, so that it is seen.
    """
    vocabulary = log_q.shape[1]
    ranks = vocabulary if ranks is None else min(ranks, vocabulary)
    if vocabulary <= 2 * GROUP * max(ranks, 1):
        ranked = log_q.float().sort(dim=1, descending=True, stable=True)
        return ranked.indices[:, :ranks], ranked.values[:, :ranks]
    if vocabulary % GROUP:
        log_q = pad(log_q, (0, -vocabulary % GROUP), value=-inf)  # behind every real token, so never ranked
    best_groups, _ = top_ranked(log_q.unflatten(1, (-1, GROUP)).amax(dim=2), ranks)
    first_tokens = best_groups.sort(dim=1).values * GROUP  # ascending, so that ties still go by token id
    tokens = (first_tokens.unsqueeze(2) + torch.arange(GROUP, device=log_q.device)).flatten(1)
    places, values = top_ranked(log_q.gather(1, tokens), ranks)
    return tokens.gather(1, places), values


# On the host: a heap

def best_first_tree(log_q: torch.Tensor, width: int, rank_cap: int | None = RANK_CAP) -> Tree:
    """The `width` prefixes of largest mass under log_q (L, V), of the `rank_cap` best tokens at each depth.

    Fewer where fewer have any mass. `rank_cap=None` is uncapped: a token of rank r comes after r siblings, so only the
    best `width` tokens of a depth can ever be in the tree.

    ValueError for another shape, a width below 0, a rank cap below 1 or scores above 0; NonFinite for scores of NaN or +inf.
    """
    if log_q.dim() != 2:
        raise ValueError(f"log q has the shape (L, V), not {tuple(log_q.shape)}")
    if width < 0:
        raise ValueError(f"a tree has 0 nodes or more, not {width}")
    if rank_cap is not None and rank_cap < 1:
        raise ValueError(f"rank_cap is at least 1, not {rank_cap}; None lifts it")
    return ranked_tree(*top_ranked(log_q, width if rank_cap is None else min(rank_cap, width)), width)


def chain_tree(log_q: torch.Tensor, width: int, rank_cap: int | None = None) -> Tree:
    """What DFlash proposes from log_q (L, V): the best token at each depth, a tree that never branches.

    It has min(width, L) nodes. `rank_cap` is there to match best_first_tree: a chain's is 1.
    """
    return best_first_tree(log_q, width, rank_cap=1)


def ranked_tree(tokens: torch.Tensor, log_q: torch.Tensor, width: int) -> Tree:
    """The heap's tree from what top_ranked returned, tokens (L, K) and log_q (L, K).

    `tolist` copies log_q to the host, the only such copy here.
    """
    ranked = log_q.tolist()
    if not all(row[0] < inf for row in ranked if row):  # NaN ranks first, and compares false
        raise NonFinite("the drafter's log q is not finite: NaN or +inf")
    if any(row[0] > 1e-3 for row in ranked if row):  # more than rounding: a child would come before its parent
        raise ValueError("log q must be at most 0: put scores through log_softmax")
    device = log_q.device
    slots, parents, log_mass = (values.to(device) for values in expand(ranked, width))
    return Tree(
        tokens=tokens.flatten().index_select(0, slots),
        parents=parents,
        depths=slots // max(log_q.shape[1], 1) + 1,
        log_mass=log_mass,
    )


def expand(ranked: list[list[float]], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best-first expansion over L lists of K log q, each from the best down.

    Returns slots, parents (N,) int64 and log masses (N,) float32. A slot is a place in the L x K table, read
    row by row: depth first, then rank. So comparing slots is comparing (depth, rank), and a heap of (cost,
    slot, parent), with cost the negative log mass, pops in the order of this file, ties and all.

    A popped node pushes two others: its next sibling and its first child. Pushing a node only when its better sibling
    or its parent is popped never delays it, even among ties: both come before it in the order anyway. The paper
    pushes all K children at each pop, for the same tree.
    """
    stride = len(ranked[0]) + 1 if ranked else 1
    # Infinite costs, as another column and row, stand for a sibling past the last rank and a child too deep.
    step = [-value for row in ranked for value in (*row, -inf)] + [inf]
    rounded = array("f", [0.0])  # one fp32 number: Python's are fp64, and storing it here rounds it
    slots, parents, costs = [], [], [0.0]  # costs by packed row: the root's is 0
    heap = [(step[0], 0, 0)]  # the parent as a packed row too
    for row in range(1, width + 1):
        cost, slot, parent = heap[0]
        if cost == inf:  # mass zero: such nodes pop last, so nothing else is left
            break
        depth = slot // stride
        slots.append(slot - depth)  # the table here has a column more than the caller's
        parents.append(parent - 1)
        costs.append(cost)
        rounded[0] = costs[parent] + step[slot + 1]
        heapreplace(heap, (rounded[0], slot + 1, parent))
        first_child = (depth + 1) * stride
        rounded[0] = cost + step[first_child]
        heappush(heap, (rounded[0], first_child, row))
    return _tensor("q", slots), _tensor("q", parents), 0.0 - _tensor("f", costs[1:])


def _tensor(kind: str, values: list) -> torch.Tensor:
    """A list of int64 ("q") or fp32 ("f") as a tensor. `torch.tensor` takes as long as half the search."""
    dtype = {"q": torch.int64, "f": torch.float32}[kind]
    return torch.frombuffer(array(kind, values), dtype=dtype) if values else torch.empty(0, dtype=dtype)


# On the device: no heap, no host, nothing whose shape or address depends on data

def candidate_pairs(width: int, ranks: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The (parent's place in its level, rank) that can be in the next level's best `width`: (2, C) int64.

    Pair (i, r) comes after every (i', r') with i' <= i and r' <= r, so it can only qualify if (i+1)(r+1) <=
    width: 342 pairs instead of 1016 at width 127 and 8 ranks. They are listed by rank, then parent, so that a
    stable sort by mass breaks ties as every builder does. Made once; a captured round reads it.
    """
    pairs = [(i, r) for r in range(min(ranks, width)) for i in range(width // (r + 1))]
    return torch.tensor(pairs, dtype=torch.int64, device=device).T.contiguous()


def device_tree(tokens: torch.Tensor, log_q: torch.Tensor, width: int, pairs: torch.Tensor) -> Tree:
    """best_first_tree as tensor operations of fixed shape, so that a CUDA graph can hold it.

    Takes what top_ranked returned, tokens (L, K) and log_q (L, K), and candidate_pairs(width, K). The best
    `width` nodes of a level are among the children of the best `width` of the level above, so the levels are
    filled one after the other, and then the best of all levels are taken. Always `width` >= 1 nodes: where
    fewer have any mass, the last ones have log mass -inf and hang off the root. It cannot raise: NaN comes
    out in log_mass.
    """
    levels, ranks = log_q.shape
    place_of_parent, rank = pairs
    step = log_q.float().index_select(1, rank)                                  # (L, C)
    level = pad(step.new_zeros(1), (0, width - 1), value=-inf)                  # (N,) level 0 is the root
    masses, picks = [], []
    for depth in range(levels):
        candidates = level.index_select(0, place_of_parent) + step[depth]       # (C,)
        best = candidates.sort(descending=True, stable=True)
        level = best.values[:width]
        masses.append(level)
        picks.append(best.indices[:width])
    best = torch.cat(masses).sort(descending=True, stable=True)                 # (L N,) shallower first
    log_mass, node = best.values[:width], best.indices[:width]                  # (N,)
    pick = torch.cat(picks).index_select(0, node)

    depth = node // width                                                       # from 0, as a row of log_q
    slot = depth * ranks + rank.index_select(0, pick)
    rows = torch.arange(1, width + 1, device=node.device)
    packed = node.new_zeros(1 + levels * width).scatter(0, node + 1, rows)      # the root, then the levels
    above = (depth - 1) * width + place_of_parent.index_select(0, pick) + 1     # the parent's place in packed
    parent = packed.index_select(0, above.clamp(min=0)) - 1
    return Tree(
        tokens=tokens.flatten().index_select(0, slot),
        parents=parent,  # nodes of no mass are of the first level, whose own come first among them: they hang off the root
        depths=depth + 1,
        log_mass=log_mass,
    )
