"""The paper's stochastic verifier: recursive speculative sampling over a row's children (paper, Theorem 3).

Legend: n packed rows, V vocabulary size, C the most children a row can have, p_v the target's law after row v, q the
drafter's.

It commits tokens by the same law as the direct walk of `verify`, and no more of them: `stochastic_choices` says why.
So nothing needs it. It is here because the paper has it; `verifier="stochastic"` runs it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minicast.sampling import ACCEPTANCE, NO_CHOICE, PROPOSAL, gumbel, keyed_uniform

FARTHEST = 600.0  # lowest log proposal below the best sibling's: e^-600 is not yet 0, and 600 + noise still keeps the noise


@dataclass(frozen=True)
class Siblings:
    """The children of each packed row, side by side."""

    tokens: Tensor  # (n, C) int64, any value where there is no child
    log_q: Tensor   # (n, C) float32 or float64, log proposal up to a constant per row, -inf where there is no child

    def row(self, row: int) -> "Siblings":
        """The children of one row, (1, C)."""
        return Siblings(self.tokens[row : row + 1], self.log_q[row : row + 1])


def siblings(tokens: Tensor, parents: Tensor, log_mass: Tensor, max_children: int) -> Siblings:
    """Gathers each row's children, best first as the rows are.

    tokens, parents: (n,) int64 as in `walk`
    log_mass:        (n,) log mass of each row's prefix under the drafter, 0 at b; any value at padding rows
    max_children:    C, the most children that a row has
    """
    n = tokens.shape[0]
    rows = torch.arange(n, device=tokens.device)
    parents = parents.clamp(min=0)
    is_child = (rows > 0) & (parents != rows)                                                     # (n,)

    # A child's column is the number of earlier rows with the same parent. Rows that are not children go to an
    # extra row n, cut off afterwards.
    same_parent = (parents[:, None] == parents) & is_child                                        # (n, n)
    column = (same_parent & (rows[:, None] > rows)).sum(dim=1).clamp(max=max_children - 1)        # (n,)
    cell = (torch.where(is_child, parents, n), column)
    child_tokens = tokens.new_zeros(n + 1, max_children).index_put(cell, tokens)
    log_mass = log_mass.double()  # large float32 values may differ by more than float32 holds
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
    single draw here: the recursion tries every child the tree retains, and a draw from p that falls on any of
    them is accepted too. (A rejected child has mu(c) = 0 from then on, so the final draw is never a child: a
    committed token is a child if and only if it was accepted.) For a given seed the two give different texts,
    and only the direct walk repeats AR's text.

    Rejection changes mu at the children and scales it by a common factor elsewhere, so the recursion works on
    (n, C) values and the vocabulary is read once, by the final draw. Nothing in a row depends on another row
    or on a value on the host: one call can serve the one row a host walk visits, or all n rows inside a graph
    before `walk`.

    log_p:     (n, V) log p of each row, from `minicast.sampling.log_probabilities`
    children:  (n, C)
    seed:      an int, or an int64 tensor of shape (1,) or (n,)
    positions: (n,) int64, absolute position of the token chosen at each row
    noise:     (n, V) `gumbel_noise` of these positions, for the final draw
    Returns (n,) int64; NO_CHOICE at a row without finite log p, as `minicast.sampling.choose`.
    """
    # Sorting by log q + Gumbel noise puts the children in the order in which drawing without replacement,
    # each time by the renormalised proposal, would draw them. Added to huge numbers, noise would be lost to rounding
    # and the law would be wrong. Any proposal gives the right law, so log q is clamped to within FARTHEST of the best.
    log_q = children.log_q.double()                                                               # (n, C)
    best = log_q.amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)              # (n, 1)
    log_q = torch.where(log_q > -torch.inf, (log_q - best).clamp(min=-FARTHEST), -torch.inf)      # (n, C)
    draws = gumbel(keyed_uniform(seed, positions, children.tokens, PROPOSAL, torch.float64))      # (n, C)
    order = (log_q + draws).argsort(dim=1, descending=True)
    log_q, tokens = log_q.gather(1, order), children.tokens.gather(1, order)                      # (n, C)
    is_child = log_q > -torch.inf                                                                 # (n, C)
    p = torch.where(is_child, log_p.gather(1, tokens).double().exp(), 0.0)                        # (n, C)

    accept = acceptance(p, log_q)                                                                 # (n, C)
    uniform = keyed_uniform(seed, positions, tokens, ACCEPTANCE, torch.float64)                   # (n, C)
    accepted = uniform < accept                                                                   # (n, C)
    first = accepted.int().argmax(dim=1, keepdim=True)                                            # (n, 1)

    # The final draw: outside the children mu is p times a constant, and at the children it is 0.
    outside = log_p.scatter_add(1, tokens, torch.where(is_child, -torch.inf, 0.0).to(log_p.dtype))
    scores = outside + noise
    final = scores.argmax(dim=1, keepdim=True)                                                    # (n, 1)
    has_mass = scores.gather(1, final) > -torch.inf                                               # (n, 1)
    # If no mass is left outside (only rounding leads here), the last candidate that has any is accepted.
    last = torch.where(p > 0, torch.arange(p.shape[1], device=p.device), -1).argmax(dim=1, keepdim=True)
    choice = torch.where(has_mass, final, tokens.gather(1, last))
    choice = torch.where(accepted.any(dim=1, keepdim=True), tokens.gather(1, first), choice)

    finite = log_p.amax(dim=1).isfinite()
    return torch.where(finite, choice.squeeze(1), NO_CHOICE)


def acceptance(p: Tensor, log_q: Tensor) -> Tensor:
    """Probability that the recursion accepts each candidate, given that it rejected those before it.

    It depends on the order of the candidates, not on the random numbers. Columns are in order of drawing.

    p:     (n, C) fp64, the row's law at the candidates; 0 where there is no candidate
    log_q: (n, C) fp64, log proposal up to a constant per row; -inf in the last columns, with no candidate
    Returns (n, C) fp64, 0 where there is no candidate.
    """
    mu = p                                                             # (n, C): mu at the children
    elsewhere = (1 - p.sum(dim=1, keepdim=True)).clamp(min=0)          # (n, 1): mass of mu elsewhere
    accept = []
    for c in range(p.shape[1]):
        q = log_q[:, c:].softmax(dim=1)                                # (n, C - c): q~; NaN if none is left
        onward = (mu - q).clamp(min=0)
        mass = elsewhere + onward.sum(dim=1, keepdim=True)             # (n, 1)
        ratio = mu[:, :1] / q[:, :1]
        # No mass left to go on with means mu = q~: accept (but never a token that the target excludes).
        ratio = torch.where((mass <= 0) & (mu[:, :1] > 0), 1.0, ratio)
        accept.append(ratio.clamp(max=1).nan_to_num(0.0))
        going_on = mass > 0
        mu = torch.where(going_on, onward / mass, mu)[:, 1:]
        elsewhere = torch.where(going_on, elsewhere / mass, elsewhere)
    return torch.cat(accept, dim=1)
