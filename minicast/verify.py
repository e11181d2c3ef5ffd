"""Which drafted tokens the target keeps: the walk over a packed tree (paper, Appendix C, Theorem 3).

Legend: b pending root, n packed rows (row 0 is b), L block depth, A accepted tokens, V vocabulary size,
p_v the target's law after row v, q the drafter's, K the most children a row can have.

Every method reads the same two things: the packed tree and one target choice per row, `choices[v]`, the token
that the target puts after the prefix that ends in row v. The walk starts at b and steps to the child that
carries the choice, while there is one; the choice at the last row becomes the next pending root. Three
verifiers differ in nothing but how a row comes to its choice:

  greedy      the argmax                                       `minicast.sampling.choose` at temperature 0
  direct      one draw from p_v, blind to the tree             `minicast.sampling.choose`
  stochastic  the paper's recursion over the row's children    `stochastic_choices`, below

The walk comes in two forms, held equal by tests. `walk` is tensor code of static shape: no value ever reaches
the host, so it runs inside a CUDA graph. `walk_rows` runs on the host and asks for a choice only at the rows
it visits, at most L + 1 of n, which is cheaper where a choice costs a pass over the vocabulary and no graph
wants static shapes.
"""

from dataclasses import dataclass
from typing import Callable, Sequence

import torch
from torch import Tensor

from minicast.sampling import (
    ACCEPTANCE, PROPOSAL, SamplingParams, choose, gumbel, gumbel_noise, keyed_uniform, log_probabilities,
)


@dataclass(frozen=True)
class Walk:
    """Where the walk went. All tensors live on the device of the tree."""

    accepted: Tensor  # () int64, A: how many drafted tokens were accepted
    path: Tensor      # (L + 1,) int64: packed rows of b and the accepted path, then identity (entry i is i)
    last: Tensor      # () int64: the last packed row of the path
    next_root: Tensor  # () int64: the target's choice after the path


def walk(tokens: Tensor, parents: Tensor, visible: Tensor, choices: Tensor, max_depth: int) -> Walk:
    """The walk over all rows at once.

    A row is reached when it and each of its ancestors carry the choice made at their parent. Siblings carry
    different tokens, so at most one row a depth is reached, and the reached rows are one path.

    tokens:    (n,) int64, row 0 is b
    parents:   (n,) int64 packed rows; the entry of row 0 is ignored; a padding row is its own parent
    visible:   (n, n) bool, row v true at v and at its ancestors, b included
    choices:   (n,) int64, the target's choice at each row
    max_depth: L; `path` has L + 1 entries whatever the tree
    """
    n = tokens.shape[0]
    rows = torch.arange(n, device=tokens.device)
    steps = torch.arange(max_depth + 1, device=tokens.device)

    # clamp: row 0 may have the parent -1. A padding row is its own parent and never carries a choice.
    carries_choice = (tokens == choices[parents.clamp(min=0)]) & (parents != rows) | (rows == 0)  # (n,)
    reached = carries_choice & ~(visible & ~carries_choice).any(dim=1)                            # (n,)
    depths = visible.sum(dim=1) - 1                                                               # (n,)

    # last keeps a dimension of one: indexing with a () tensor would copy it to the host.
    last = torch.where(reached, depths, -1).argmax(dim=0, keepdim=True)                           # (1,)
    on_path = visible[last] & (depths == steps[:, None])                                          # (L + 1, n)
    path = torch.where(steps <= depths[last], on_path.int().argmax(dim=1), steps)
    return Walk(depths[last].squeeze(0), path, last.squeeze(0), choices[last].squeeze(0))


def child_rows(tokens: Sequence[int], parents: Sequence[int]) -> list[dict[int, int]]:
    """The tree as the host walk reads it: for each packed row, {token: packed row of that child}.

    tokens, parents: (n,) as in `walk`, on the host.
    """
    children: list[dict[int, int]] = [{} for _ in tokens]
    for row in range(1, len(tokens)):
        if parents[row] != row:
            children[parents[row]][tokens[row]] = row
    return children


def walk_rows(children: Sequence[dict[int, int]], choose: Callable[[int, int], int]) -> tuple[list[int], int]:
    """The same walk on the host: choose(row, depth) is called at each visited row, once and in order.

    Returns the packed rows of b and the accepted path, (A + 1,), and the next pending root.
    """
    path = [0]
    while True:
        choice = choose(path[-1], len(path) - 1)
        child = children[path[-1]].get(choice)
        if child is None:
            return path, choice
        path.append(child)


@dataclass(frozen=True)
class Siblings:
    """The children of each packed row, side by side."""

    tokens: Tensor  # (n, K) int64, any value where there is no child
    log_q: Tensor   # (n, K) log proposal up to a constant per row, -inf where there is no child

    def row(self, row: int) -> "Siblings":
        """The children of one row, (1, K)."""
        return Siblings(self.tokens[row : row + 1], self.log_q[row : row + 1])


def siblings(tokens: Tensor, parents: Tensor, log_mass: Tensor, max_children: int) -> Siblings:
    """Gathers each row's children, best first as the rows are.

    tokens, parents: (n,) int64 as in `walk`
    log_mass:        (n,) log mass of each row's prefix under the drafter, 0 at b; any value at padding rows
    max_children:    K, the rank cap of the tree
    """
    n = tokens.shape[0]
    rows = torch.arange(n, device=tokens.device)
    parents = parents.clamp(min=0)
    is_child = (rows > 0) & (parents != rows)                                                     # (n,)

    # A child's column is the number of rows before it that have the same parent. What is no child goes to an
    # extra row n, cut off afterwards.
    same_parent = (parents[:, None] == parents) & is_child                                        # (n, n)
    column = (same_parent & (rows[:, None] > rows)).sum(dim=1).clamp(max=max_children - 1)        # (n,)
    cell = (torch.where(is_child, parents, n), column)
    child_tokens = tokens.new_zeros(n + 1, max_children).index_put(cell, tokens)
    log_q = torch.where(is_child, log_mass - log_mass[parents], -torch.inf)
    child_log_q = log_q.new_full((n + 1, max_children), -torch.inf).index_put(cell, log_q)
    return Siblings(child_tokens[:n], child_log_q[:n])


def stochastic_choices(
    log_p: Tensor, children: Siblings, seed: int | Tensor, positions: Tensor, noise: Tensor
) -> Tensor:
    """The choice at each row by recursive speculative sampling without replacement (paper, Theorem 3).

    At a row with law p, start from mu = p. Draw a candidate c among the children that are left, by the
    proposal renormalised over them, q~; commit c with probability min(1, mu(c) / q~(c)); otherwise mu becomes
    (mu - q~)+, normalised, and c is left out. When no child is left, commit a draw from the final mu.

    Theorem 3 says that the committed token has the law p whatever the proposal is, as long as every child can
    be drawn. So each child c is committed with probability exactly p(c), as by one direct draw from p: the
    law of the token at every visited row is that of the direct walk, hence by induction over the rows also
    the law of (path, next token), and of the committed length R. Trying several children gains nothing over a
    single draw here, because the recursion tries every child the tree retains, and a draw from p that falls
    on any of them is accepted too. (A child that was rejected has mu(c) = 0 from then on, so the final draw
    can never be a child: what is committed is a child if and only if it was accepted.) The two differ in text
    for a given seed, and only the direct walk repeats AR's text.

    Rejection changes mu at the children and scales it by a common factor elsewhere, so the recursion works on
    (n, K) values and the vocabulary is read once, by the final draw. Nothing in a row depends on another row
    or on a value on the host: one call can serve the one row a host walk visits, or all n rows inside a graph
    before `walk`.

    log_p:     (n, V) log p of each row, from `minicast.sampling.log_probabilities`
    children:  (n, K)
    seed:      an int, or an int64 tensor of shape () or (n,)
    positions: (n,) int64, absolute position of the token chosen at each row
    noise:     (n, V) `gumbel_noise` of these positions, for the final draw
    Returns (n,) int64; -1 at a row without finite log p, as `minicast.sampling.choose`.
    """
    # Sorting by log q + Gumbel noise puts the children in the order in which drawing without replacement,
    # each time by the renormalised proposal, would draw them.
    draws = gumbel(keyed_uniform(seed, positions, children.tokens, PROPOSAL, torch.float64))      # (n, K)
    log_q, order = children.log_q.double(), (children.log_q + draws).argsort(dim=1, descending=True)
    log_q, tokens = log_q.gather(1, order), children.tokens.gather(1, order)                      # (n, K)
    is_child = log_q > -torch.inf                                                                 # (n, K)
    p = torch.where(is_child, log_p.gather(1, tokens).double().exp(), 0.0)                        # (n, K)

    accept = acceptance(p, log_q)                                                                 # (n, K)
    uniform = keyed_uniform(seed, positions, tokens, ACCEPTANCE, torch.float64)                   # (n, K)
    accepted = uniform < accept                                                                   # (n, K)
    first = accepted.int().argmax(dim=1, keepdim=True)                                            # (n, 1)

    # The final draw: outside the children mu is p times a constant, and at the children it is 0.
    outside = log_p.scatter_add(1, tokens, torch.where(is_child, -torch.inf, 0.0).to(log_p.dtype))
    scores = outside + noise
    final = scores.argmax(dim=1, keepdim=True)                                                    # (n, 1)
    has_mass = scores.gather(1, final) > -torch.inf                                               # (n, 1)
    # With no mass outside (rounding alone leads here), the last candidate that has any is accepted.
    last = torch.where(p > 0, torch.arange(p.shape[1], device=p.device), -1).argmax(dim=1, keepdim=True)
    choice = torch.where(has_mass, final, tokens.gather(1, last))
    choice = torch.where(accepted.any(dim=1, keepdim=True), tokens.gather(1, first), choice)

    finite = log_p.amax(dim=1).isfinite()
    return torch.where(finite, choice.squeeze(1), -1)


def acceptance(p: Tensor, log_q: Tensor) -> Tensor:
    """Probability that the recursion accepts each candidate, given that it rejected those before it.

    It depends on the order of the candidates, not on the random numbers. Columns are in order of drawing.

    p:     (n, K) fp64, the row's law at the candidates; 0 where there is no candidate
    log_q: (n, K) fp64, log proposal up to a constant per row; -inf in the last columns, with no candidate
    Returns (n, K) fp64, 0 where there is no candidate.
    """
    mu = p                                                             # (n, K): mu at the children
    elsewhere = (1 - p.sum(dim=1, keepdim=True)).clamp(min=0)          # (n, 1): mass of mu elsewhere
    accept = []
    for k in range(p.shape[1]):
        q = log_q[:, k:].softmax(dim=1)                                # (n, K - k): q~; NaN if none is left
        onward = (mu - q).clamp(min=0)
        mass = elsewhere + onward.sum(dim=1, keepdim=True)             # (n, 1)
        ratio = mu[:, :1] / q[:, :1]
        # No mass to go on with means mu = q~: accept (but never a token that the target excludes).
        ratio = torch.where((mass <= 0) & (mu[:, :1] > 0), 1.0, ratio)
        accept.append(ratio.clamp(max=1).nan_to_num(0.0))
        going_on = mass > 0
        mu = torch.where(going_on, onward / mass, mu)[:, 1:]
        elsewhere = torch.where(going_on, elsewhere / mass, elsewhere)
    return torch.cat(accept, dim=1)


def target_choices(
    logits: Tensor, params: SamplingParams, positions: Tensor, children: Siblings | None = None,
    seed: Tensor | None = None, depths: Tensor | None = None,
) -> Tensor:
    """The target's choice at each row, by whatever rule the request asks for.

    logits:    (rows, V)
    positions: (rows,) int64, absolute position of the token chosen at each row
    children:  (rows, K) for the stochastic verifier, None for the direct walk; not read when greedy
    seed:      (1,) int64 on the device, for a graph that serves any seed; None: that of `params`
    depths:    (rows,) int64; with it `positions` is (L + 1,), one a depth: rows of a depth share their noise
    Returns (rows,) int64; -1 at a row whose logits are not finite.
    """
    if params.greedy:
        return choose(logits, params)
    seed = params.seed if seed is None else seed
    noise = gumbel_noise(seed, positions, logits.shape[1])
    if depths is not None:
        positions, noise = positions.index_select(0, depths), noise.index_select(0, depths)
    if children is None:
        return choose(logits, params, noise)
    return stochastic_choices(log_probabilities(logits, params), children, seed, positions, noise)


def visit(
    tokens: Tensor, parents: Tensor, logits: Tensor, params: SamplingParams, P: Tensor,
    children: Siblings | None, max_depth: int,
) -> Walk:
    """`walk` by `target_choices` made one at a time on the host, only at the rows visited (`walk_rows`).

    It reads the pack, and each choice, to the host: for a CPU, where a choice costs a pass over the vocabulary and
    a read costs nothing.

    tokens, parents: (n,) int64 as in `walk`; logits: (n, V); P: (1,) int64, position of b
    """

    def choice(row: int, depth: int) -> int:
        here = None if children is None else children.row(row)
        return target_choices(logits[row : row + 1], params, P + depth + 1, here).item()

    path, next_root = walk_rows(child_rows(tokens.tolist(), parents.tolist()), choice)
    padded = path + list(range(len(path), max_depth + 1))
    values = (len(path) - 1, padded, path[-1], next_root)
    return Walk(*(torch.tensor(value, device=tokens.device) for value in values))
