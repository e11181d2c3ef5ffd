"""The methods: what each of them proposes to the round. Everything else about a round is shared.

A method is a function from a `Proposal`, which says what may be looked at, to a `Tree`. A fork that drafts or
branches differently is one more such function, given to `Decoder.generate(method=…)` as it is.

On a GPU a round is replayed from CUDA graphs, and what a graph holds may not look at a value on the host:
there `proposal.static` is true, and `best_tree` builds the same tree from operations of fixed shape. A method
that does so, too, and reads neither `token_ids` nor anything else on the host that changes from round to round,
says so with `@capturable`. Any other runs as it is, and only the rest of the round is replayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minicast.tree import Tree, best_first_tree, candidate_pairs, device_tree, top_ranked


@dataclass
class Proposal:
    """What a method may look at to propose its tree.

    Attributes:
        token_ids: prompt and answer so far; the last one is the pending root b
        width: N asked for; a method may return fewer nodes, but replayed from a graph always as many
        rank_cap: K, ranks kept at each position; None keeps all
        draft: runs the drafter on [b, mask × L] -> log q (L, V), a pass at each call. Given a depth, it scores no
            position beyond: on a small target the LM head at one position costs more than a layer of the drafter
        static: shapes of the round are fixed; a method that a graph is to hold must build with fixed ones, too
        device: of the models
    """

    token_ids: Sequence[int]
    width: int
    rank_cap: int | None
    draft: Callable[..., Tensor]
    static: bool = False
    device: torch.device = torch.device("cpu")


Method = Callable[[Proposal], Tree]


def capturable(method: Method) -> Method:
    """Marks a method that a CUDA graph can hold, and that drafts in every round.

    Replayed, its trees are not checked: that would read them on the host.
    """
    method.capturable = True
    return method


def no_tree(proposal: Proposal) -> Tree:
    """Autoregressive decoding: nothing is proposed, and the drafter does not run."""
    nothing = torch.empty(0, dtype=torch.int64, device=proposal.device)
    return Tree(nothing, nothing, nothing, torch.empty(0, device=proposal.device))


@capturable
def chain(proposal: Proposal) -> Tree:
    """DFlash: the likeliest token at each of the L positions, a tree of rank cap 1."""
    log_q = proposal.draft()
    return best_tree(proposal, log_q, log_q.shape[0], rank_cap=1)


@capturable
def best_first(proposal: Proposal) -> Tree:
    """CAST: the N best prefixes, of which none is longer than N."""
    return best_tree(proposal, proposal.draft(proposal.width), proposal.width, proposal.rank_cap)


def best_tree(proposal: Proposal, log_q: Tensor, width: int, rank_cap: int | None) -> Tree:
    """The best-first tree of log_q (depth, V), scores of at most 0 each: by the heap or, where shapes must not depend on
    data, on the device.
    """
    if not proposal.static or width == 0:
        return best_first_tree(log_q, width, rank_cap)
    tokens, log_q = top_ranked(log_q, min(rank_cap or width, width))
    return device_tree(tokens, log_q, width, kept_pairs(width, tokens.shape[1], tokens.device))


# Made on the host, so in a warm-up, before a graph is recorded; kept as long as a graph may read them.
kept_pairs = lru_cache(maxsize=None)(candidate_pairs)


METHODS: dict[str, Method] = {"ar": no_tree, "dflash": chain, "cast": best_first}
UNSIZED = ("ar", "dflash")  # the others are asked for a width


def is_custom(method: Method) -> bool:
    """Whether it is none of the three above, under whatever name: nothing is known of its trees."""
    return method not in (no_tree, chain, best_first)
