"""Which drafted tokens the target keeps: the walk over a packed tree (paper, Appendix C).

Legend: b pending root, n packed rows (row 0 is b), L block depth, A accepted tokens, V vocabulary size,
p_v the target's law after row v, C the most children a row can have.

Every method reads the same two things: the packed tree and one target choice per row, `choices[v]`, the token
that the target puts after the prefix that ends in row v. The walk starts at b and steps to the child that
carries the choice, while there is one; the choice at the last row becomes the next pending root. Three
verifiers differ in nothing but how a row comes to its choice:

  greedy      the argmax                                       `minicast.sampling.choose` at temperature 0
  direct      one draw from p_v, blind to the tree             `minicast.sampling.choose`
  stochastic  the paper's recursion over the row's children    `minicast.theorem3.stochastic_choices`

The walk comes in two forms, held equal by tests. `walk` is tensor code of static shape: no value ever reaches
the host, so it runs inside a CUDA graph. `walk_rows` runs on the host and asks for a choice only at the rows
it visits, at most L + 1 of n, which is cheaper where a choice costs a pass over the vocabulary and no graph
wants static shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minicast.sampling import SamplingParams, choose, gumbel_noise, log_probabilities

if TYPE_CHECKING:
    from minicast.theorem3 import Siblings


@dataclass(frozen=True)
class Walk:
    """Where the walk went. All tensors live on the device of the tree."""

    accepted: Tensor  # () int64, A: how many drafted tokens were accepted
    path: Tensor      # (deepest + 1,) int64: packed rows of b and the accepted path, then identity (entry i is i)
    next_root: Tensor  # () int64: the target's choice after the path


def walk(tokens: Tensor, parents: Tensor, visible: Tensor, choices: Tensor, deepest: int) -> Walk:
    """The walk over all rows at once.

    A row is reached when it and each of its ancestors carry the choice made at their parent. Siblings carry
    different tokens, so at most one row a depth is reached, and the reached rows are one path.

    tokens:    (n,) int64, row 0 is b
    parents:   (n,) int64 packed rows; the entry of row 0 is ignored; a padding row is its own parent
    visible:   (n, n) bool, row v true at v and at its ancestors, b included
    choices:   (n,) int64, the target's choice at each row
    deepest:   most levels a tree of the request can have; `path` has one entry more, whatever the tree
    """
    n = tokens.shape[0]
    rows = torch.arange(n, device=tokens.device)
    steps = torch.arange(deepest + 1, device=tokens.device)

    # clamp: row 0 may have the parent -1. A padding row is its own parent and never carries a choice.
    carries_choice = (tokens == choices[parents.clamp(min=0)]) & (parents != rows) | (rows == 0)  # (n,)
    reached = carries_choice & ~(visible & ~carries_choice).any(dim=1)                            # (n,)
    depths = visible.sum(dim=1) - 1                                                               # (n,)

    # last keeps a dimension of one: indexing with a () tensor would copy it to the host.
    last = torch.where(reached, depths, -1).argmax(dim=0, keepdim=True)                           # (1,)
    on_path = visible[last] & (depths == steps[:, None])                                          # (deepest + 1, n)
    path = torch.where(steps <= depths[last], on_path.int().argmax(dim=1), steps)
    return Walk(depths[last].squeeze(0), path, choices[last].squeeze(0))


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


def target_choices(
    logits: Tensor, params: SamplingParams, positions: Tensor, children: "Siblings | None" = None,
    seed: Tensor | None = None, depths: Tensor | None = None,
) -> Tensor:
    """The target's choice at each row, by whatever rule the request asks for.

    logits:    (rows, V)
    positions: (rows,) int64, absolute position of the token chosen at each row
    children:  for the stochastic verifier, `minicast.theorem3.Siblings` (rows, C); None for the direct walk
    seed:      (1,) int64 on the device, for a graph that serves any seed; None: that of `params`
    depths:    (rows,) int64; with it `positions` is (deepest + 1,), one a depth: rows of a depth share their noise
    Returns (rows,) int64; NO_CHOICE at a row whose logits are not finite.
    """
    if params.greedy:
        return choose(logits, params)
    seed = params.seed if seed is None else seed
    noise = gumbel_noise(seed, positions, logits.shape[1])
    if depths is not None:
        positions, noise = positions.index_select(0, depths), noise.index_select(0, depths)
    if children is None:
        return choose(logits, params, noise)
    from minicast.theorem3 import stochastic_choices

    return stochastic_choices(log_probabilities(logits, params), children, seed, positions, noise)


def walk_on_host(
    tokens: Tensor, parents: Tensor, logits: Tensor, params: SamplingParams, P: Tensor, children: "Siblings | None",
    deepest: int,
) -> Walk:
    """`walk` by `target_choices` made one at a time on the host, only at the rows visited (`walk_rows`).

    It reads the pack, and each choice, to the host: for a CPU, where a choice costs a pass over the vocabulary and
    a read costs nothing.

    tokens, parents: (n,) int64, and deepest, as in `walk`; logits: (n, V); P: (1,) int64, position of b; children: (n, C)
    as in `target_choices`
    """

    def choice(row: int, depth: int) -> int:
        here = None if children is None else children.row(row)
        return target_choices(logits[row : row + 1], params, P + depth + 1, here).item()

    path, next_root = walk_rows(child_rows(tokens.tolist(), parents.tolist()), choice)
    padded = path + list(range(len(path), deepest + 1))
    return Walk(*(torch.tensor(value, device=tokens.device) for value in (len(path) - 1, padded, next_root)))
