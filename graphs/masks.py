"""What each row of a pass may see, behind one name for every attention body.

Every pass of a round is the same shape: n new rows over P committed positions. Each row sees the whole prefix,
and of the new rows those that `visible` (n, n) marks:

    prompt chunk     CAUSAL, the lower triangle (a chunk is a chain)
    packed tree      the ancestor matrix (paper, Lemma 1; a chain and a single step are special cases)
    draft block      EVERYTHING (DFlash: bidirectional inside the block)

A body turns that into a `Window`. `LiveSlice` reads only the slots that exist and needs the host's P.
`FullCache` reads the whole cache under an explicit mask and depends on the device's P alone, so that it could be
captured; it is slower, and the oracle for the others. Neither knows what the rows mean.
"""

import torch
from torch import Tensor

from model.transformer import Window


CAUSAL, EVERYTHING = "causal", "everything"


def matrix(visible: Tensor | str, rows: Tensor) -> Tensor:
    """`visible` as a matrix (n, n) bool over rows (n,) = 0 … n − 1."""
    if isinstance(visible, Tensor):
        return visible
    everything = torch.ones(len(rows), len(rows), dtype=torch.bool, device=rows.device)
    return everything.tril() if visible == CAUSAL else everything


class LiveSlice:
    """Scaled dot-product attention over the P + n slots in use: the default on a CPU."""

    static = False

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
        mask = None  # one row sees all that is live
        if visible is not EVERYTHING and n > 1:
            visible = matrix(visible, rows)
            mask = torch.cat((visible.new_ones(n, prefix), visible), dim=1)
        return Window(P + rows, P + offsets, mask, live=prefix + n)


class FullCache:
    """Scaled dot-product attention over all S slots under an explicit (n, S) mask: static shapes, no host value."""

    static = True

    def window(self, P: Tensor, prefix: int, offsets: Tensor, visible: Tensor | str, slots: int) -> Window:
        """As `LiveSlice.window`; `prefix` is not read."""
        rows = torch.arange(offsets.shape[0], device=P.device)
        columns = torch.arange(slots, device=P.device)
        return Window(P + rows, P + offsets, sees(P, matrix(visible, rows), rows[:, None], columns))


def sees(P: Tensor, visible: Tensor, row: Tensor, slot: Tensor) -> Tensor:
    """Whether packed `row` sees cache `slot`: in the prefix, or a marked new row. Index tensors broadcast -> bool."""
    n = visible.shape[0]
    offset = slot - P
    inside = (offset >= 0) & (offset < n)
    return (offset < 0) | (inside & visible[row, offset.clamp(0, n - 1)])


BODIES = {"sdpa": LiveSlice, "static": FullCache}
