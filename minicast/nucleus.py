"""Top-k and top-p without sorting the vocabulary: which tokens a law keeps.

Legend: V vocabulary size; `shaped` is log p up to a constant per row, the largest of each row being 0.

Tokens rank by value, equal values by lower id. Shapes are static and nothing is copied to the host, so that a CUDA
graph can hold all of it. Used by `minicast.sampling.shape_logits`, if a request asks for it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def keep_top_k(shaped: Tensor, k: int, top_p: float) -> Tensor:
    """Keeps the k best-ranked tokens of each row, and of those the nucleus of top_p; sets the rest to -inf.

    The nucleus of a ranked list is its beginning, so top-p only makes k smaller, row by row.
    shaped: (rows, V), the largest of each row is 0. Returns (rows, V).
    """
    values = shaped.topk(k, dim=1).values                                # (rows, k), best first
    count = torch.full_like(values[:, :1], k, dtype=torch.int64)         # (rows, 1)
    if top_p < 1:
        mass = _mass(values)
        before = mass.cumsum(dim=1) - mass                               # (rows, k): mass ranked before each
        count = (before < _limit(mass, top_p)).sum(dim=1, keepdim=True).clamp_(min=1)
    threshold = values.gather(1, count - 1)                              # (rows, 1)
    above = shaped > threshold
    return _keep(shaped, above, shaped == threshold, count - above.sum(dim=1, keepdim=True))


def _mass(shaped: Tensor) -> Tensor:
    """Mass in units of 2^-40 of the largest, (rows, C) -> (rows, C) int64: sums are exact in any order."""
    return (shaped.exp() * 2.0**40).long()


def _limit(mass: Tensor, top_p: float) -> Tensor:
    """The share top_p of all the mass, at least one unit. (rows, C) -> (rows, 1) int64."""
    total = mass.sum(dim=1, keepdim=True)
    return torch.minimum((total.double() * top_p).ceil().long(), total)


# The nucleus is found digit by digit: 2^11 bins hold a digit, three digits the 31 bits below a float's sign.
_DIGIT_BITS = 11


def keep_top_p(shaped: Tensor, top_p: float) -> Tensor:
    """Keeps each token whose better-ranked tokens hold less than top_p of the mass; sets the rest to -inf.

    Instead of sorting the vocabulary, this looks for the value t at which the mass of the tokens down to t
    reaches top_p, as a radix select does: values become integer keys in rank order, and each pass adds up mass
    by one digit of the key and finds the digit of t. Masses are integers, so a row has the same nucleus alone,
    among other rows, and on another device.

    shaped: (rows, V), the largest of each row is 0. Returns (rows, V).
    """
    # For values <= 0 the bits of the magnitude, read as an integer, ascend from the best token to the worst.
    integer, key_bits = (torch.int64, 63) if shaped.dtype == torch.float64 else (torch.int32, 31)
    keys = shaped.abs().view(integer).long()                             # (rows, V)
    mass = _mass(shaped)                                                 # (rows, V)
    limit = _limit(mass, top_p)                                          # (rows, 1)

    bins = 2**_DIGIT_BITS
    histogram = mass.new_zeros(mass.shape[0], bins + 2)
    boundary = torch.zeros_like(limit)                                   # (rows, 1): first digits of t's key
    for shift in reversed(range(0, key_bits, _DIGIT_BITS)):
        # Bins 1..2^11 are the digits below `boundary`; what ranks before it falls into bin 0, what ranks
        # after it into the last.
        boundary = boundary << _DIGIT_BITS
        digits = ((keys >> shift).sub_(boundary - 1)).clamp_(0, bins + 1)
        reached = histogram.zero_().scatter_add(1, digits, mass).cumsum(dim=1)  # (rows, bins + 2)
        digit = (reached < limit).sum(dim=1, keepdim=True)               # (rows, 1): first bin to reach it
        boundary = boundary + digit - 1

    # By now t's bin holds only tokens equal to t, all of the same mass: as many stay as it takes to reach the
    # limit. The clamps are for rows of NaN, which have no mass.
    digit = digit.clamp_(1, bins)
    before = reached.gather(1, digit - 1)                                # (rows, 1): mass ranked before t
    equal = keys == boundary                                             # (rows, V)
    count = equal.sum(dim=1, keepdim=True).clamp_(min=1)                 # (rows, 1)
    each = ((reached.gather(1, digit) - before) // count).clamp_(min=1)  # (rows, 1): mass of one of them
    return _keep(shaped, keys < boundary, equal, (limit - before + each - 1) // each)


# Places counted at a time. CUDA counts several long rows step by step, but short ones all at once.
_BLOCK = 128


def _keep(shaped: Tensor, above: Tensor, equal: Tensor, room: Tensor) -> Tensor:
    """Keeps what is above the threshold and, by lower id, the first `room` of what equals it.

    shaped: (rows, V); above, equal: (rows, V) bool; room: (rows, 1) int64. Returns (rows, V).
    """
    keep = above | equal & (_count(equal) <= room)
    return torch.where(keep, shaped, -torch.inf)


def _count(marked: Tensor) -> Tensor:
    """How many of a row are marked up to each place, (rows, V) bool -> (rows, V) integers."""
    rows, V = marked.shape
    if rows == 1:
        return marked.cumsum(dim=1)
    blocks = pad(marked, (0, -V % _BLOCK)).unflatten(1, (-1, _BLOCK)).cumsum(dim=2, dtype=torch.int32)
    before = blocks[:, :, -1].cumsum(dim=1, dtype=torch.int32) - blocks[:, :, -1]  # (rows, V / _BLOCK)
    return (blocks + before[:, :, None]).flatten(1)[:, :V]
