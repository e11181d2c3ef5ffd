"""Who chooses the width of each round: policies, by the rule of `width` and the pauses of `back_off`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isnan
from typing import Protocol, runtime_checkable

import torch

from minicast.back_off import BackOff
from minicast.tree import Tree
from minicast.width import MAX_WIDTH


@runtime_checkable
class Policy(Protocol):
    """Chooses the width of an answer's rounds: any object with this attribute and these methods.

    Attributes:
        width: N to propose in the next round, 0 to MAX_WIDTH; 0 is AR. Read once a round
    """

    width: int

    def keep(self, tree: Tree) -> int:
        """How many nodes of the proposed tree are verified: its first ones."""

    def observe(self, width: int, committed: int, seconds: float) -> None:
        """A round verified `width` nodes, committed R tokens (after cuts) and took `seconds` from draft to commit."""


def is_policy(width) -> bool:
    """Whether it can choose the width of rounds."""
    return isinstance(width, Policy) and not isinstance(width, type)


@dataclass
class FixedWidth:
    """Always the same width."""

    width: int

    def keep(self, tree: Tree) -> int:
        return tree.width

    def observe(self, width: int, committed: int, seconds: float) -> None:
        """Nothing is learned."""


@dataclass
class AutoWidth:
    """One N* for every round (paper, §3.3), and AR while that does not pay.

    best: N* >= 1; times: round_times, up to N* at least
    """

    best: int
    times: Sequence[float]
    back_off: BackOff

    @property
    def width(self) -> int:
        return self.best if self.back_off.drafting else 0

    def keep(self, tree: Tree) -> int:
        return tree.width

    def observe(self, width: int, committed: int, seconds: float) -> None:
        self.back_off.observe(width > 0, committed, seconds, predicted_ms=self.times[width], ar_ms=self.times[0])


@dataclass
class RoundWidth:
    """A width for each round by its own masses: the widest tree is proposed, its best nodes are verified.

    It reads the tree's masses on the host: on a GPU, one more wait a round.

    times: round_times up to the widest tree whose cost is known; from N = 1 on they include the same proposal
    draft_ms: what a round has already spent when its masses are known
    rate: tokens a ms that the decoder makes otherwise, the price of time
    look: is called with masses and depths of every proposed tree, to learn from them; trees then have MAX_WIDTH nodes
    """

    times: Sequence[float]
    draft_ms: float
    rate: float
    back_off: BackOff
    look: Callable[[list[float], list[float]], None] | None = None

    @property
    def width(self) -> int:
        return 0 if not self.back_off.drafting else MAX_WIDTH if self.look else len(self.times) - 1

    def keep(self, tree: Tree) -> int:
        if tree.width == 0:
            return 0
        masses, depths = torch.stack((tree.log_mass.exp(), tree.depths.float())).tolist()
        if isnan(masses[0]):  # NaN ranks first; it is kept, so that `settle` reports it
            return tree.width
        if self.look:
            self.look(masses, depths)
        return paying_width(masses[: len(self.times) - 1], self.times, self.draft_ms, self.rate)

    def observe(self, width: int, committed: int, seconds: float) -> None:
        drafted = self.back_off.drafting  # as when the width was read: only the next line changes it
        predicted_ms = self.draft_ms + self.times[0] if drafted and width == 0 else self.times[width]
        self.back_off.observe(drafted, committed, seconds, predicted_ms=predicted_ms, ar_ms=self.times[0])


def paying_width(masses: Sequence[float], times: Sequence[float], draft_ms: float, rate: float) -> int:
    """How many of a drafted round's nodes pay for their verification: 0..len(masses), the larger of equals.

    Over many rounds throughput is highest if each takes the N of largest 1 + g(N) - rate l(N), that is, charges
    its time at what it would earn elsewhere. This is Theorem 2 with the decoder's own throughput in place of the
    round's. The draft is already spent, so here N = 0 pays for it too.
    """
    times = [draft_ms + times[0], *times[1:]]
    surplus = [R - rate * ms for R, ms in zip(accumulate(masses, initial=1.0), times)]
    return max(range(len(surplus)), key=lambda N: (surplus[N], N))
