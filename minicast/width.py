"""How wide the tree should be: the stopping rule of Theorem 2 on a measured cost (paper, §3.3).

Widening the tree costs no further draft, only verification. With rho_N the mass of the N-th best candidate, a tree
of width N commits 1 + g(N) tokens a round, g(N) = rho_1 + ... + rho_N, and a round takes

    l(N) = draft + h(N) + target(1 + N) milliseconds,

h being what packing and gathering cost, and scoring one more of the block's positions while the tree may reach it. The
next node takes l(N+1) - l(N), and in that time the decoder would have produced so many tokens times its throughput
f(N) = (1 + g(N)) / l(N). So it is worth adding, if and only if

    rho_(N+1) >= f(N) · (l(N+1) - l(N)).

Where cost is affine, with c1 ms a node, the first N that fails this is the best one (Theorem 2). Where it bends or
steps, at a kernel's tile or a captured bucket, throughput may rise again, and the best of all such N is taken.
Autoregressive decoding is not in that family, for it does not pay the drafter: it is N = 0, compared last.

The rule predicts; a policy asks it for a width, round after round, and looks at what was committed.

This file is arithmetic: it measures nothing and knows no model. Costs are measured in `probe`.
"""

import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from numbers import Integral
from statistics import fmean, linear_regression, median
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from minicast.tree import Tree

MAX_WIDTH = 127  # packed rows n = N + 1 stay within 128, the paper's grid and the widest bucket
UNINFORMED = 15  # where no cost and no mass can be known
FIT_FROM = 16    # the paper fits its line from 16 packed rows on: fewer take other kernels


def clamp_width(width: int) -> int:
    """A width the decoder can run: 0 is AR, and above MAX_WIDTH it is MAX_WIDTH, with a warning."""
    if not isinstance(width, Integral) or width < 0:
        raise ValueError(f"a width is a whole number, 0 (AR) to {MAX_WIDTH}, not {width!r}")
    if width > MAX_WIDTH:
        warnings.warn(f"width {width} is above the widest tree: using {MAX_WIDTH}", stacklevel=2)
    return min(width, MAX_WIDTH)


@dataclass(frozen=True)
class CostModel:
    """What one target pass over n packed rows takes: the measured table, and the line fitted to it."""

    packed: tuple[int, ...]          # row counts measured, ascending
    milliseconds: tuple[float, ...]  # the pass at each of them
    slope: float                     # ms a row of the least-squares line from FIT_FROM rows on: c1
    intercept: float
    buckets: tuple[int, ...] = ()    # row counts captured in graphs, ascending; none: any n runs unpadded

    @classmethod
    def fit(
        cls, packed: Sequence[int], milliseconds: Sequence[float], buckets: Sequence[int] = ()
    ) -> "CostModel":
        """From measured (n, ms), averaged where one n has several.

        The line is fitted to all of them where fewer than two have n >= FIT_FROM.
        """
        if len(packed) != len(milliseconds) or not packed:
            raise ValueError(f"{len(packed)} row counts with {len(milliseconds)} times: give a time for each")
        if min(packed) < 1 or not min(milliseconds) > 0:
            raise ValueError("row counts are at least 1 and times above 0 ms")
        counts = sorted(set(packed))
        means = [fmean(ms for n, ms in zip(packed, milliseconds) if n == count) for count in counts]
        fitted = [(n, ms) for n, ms in zip(counts, means) if n >= FIT_FROM]
        if len(fitted) < 2:
            fitted = list(zip(counts, means))
        line = linear_regression(*zip(*fitted)) if len(fitted) > 1 else (0.0, means[0])
        return cls(tuple(counts), tuple(means), line[0], line[1], tuple(sorted(buckets)))

    def at(self, n: int) -> float:
        """Milliseconds of a pass over n rows, or over the bucket that n is padded to.

        As measured where it was measured, and on straight lines between. Beyond the ends it goes on from the
        last point with the fitted slope: above, never downwards; below, never under what n rows would take if the
        smallest pass were shared out by the row.
        """
        if self.buckets and n <= self.buckets[-1]:
            n = self.buckets[bisect_left(self.buckets, n)]
        growth = max(self.slope, 0.0)
        right = bisect_left(self.packed, n)
        if right == len(self.packed):
            return self.milliseconds[-1] + growth * (n - self.packed[-1])
        upper, upper_ms = self.packed[right], self.milliseconds[right]
        if n == upper:
            return upper_ms
        if right == 0:
            return max(upper_ms - growth * (upper - n), upper_ms * n / upper)
        lower, lower_ms = self.packed[right - 1], self.milliseconds[right - 1]
        return lower_ms + (upper_ms - lower_ms) * (n - lower) / (upper - lower)


Overhead = float | Callable[[int], float]  # h in ms: a constant, or a function of N


def round_times(cost: CostModel, widest: int, draft_ms: float, overhead_ms: Overhead = 0.0) -> list[float]:
    """l(N) in ms for N = 0 to `widest`. Entry 0 is AR: a pass over one row, without drafter or overhead."""
    h = overhead_ms if callable(overhead_ms) else lambda N: overhead_ms
    return [cost.at(1)] + [draft_ms + h(N) + cost.at(1 + N) for N in range(1, widest + 1)]


def best_drafted(masses: Sequence[float], times: Sequence[float]) -> int:
    """The width N >= 1 of highest throughput; 0 if there are no masses. times: round_times up to len(masses).

    A node that does not reduce throughput is added (Theorem 2), so of equal widths this is the larger.
    """
    committed = list(accumulate(masses, initial=1.0))  # 1 + g(N)
    throughput = [R / ms for R, ms in zip(committed, times)]
    widest = len(masses)
    stops = [N for N in range(1, widest + 1)  # masses[N] is rho_(N+1)
             if N == widest or masses[N] < throughput[N] * (times[N + 1] - times[N])]
    return max(stops, key=lambda N: (throughput[N], N), default=0)


def stopping_width(
    masses: Sequence[float], cost: CostModel, draft_ms: float, overhead_ms: Overhead = 0.0
) -> int:
    """N* in 0..len(masses); masses are probabilities, best first. 0 is AR, which also wins a tie."""
    return decide(masses, cost, draft_ms, overhead_ms).width


# The rule explained

@dataclass(frozen=True)
class Decision:
    """A width and the figures behind it, for `--explain`. Masses and lengths are expected values."""

    width: int                           # N*; 0 is AR
    drafted_width: int                   # best N >= 1; N* unless AR won; 0 if nothing can be drafted
    slope: float                         # c1, ms a node: the fitted line's and the overhead's
    threshold: float                     # throughput at drafted_width times c1: what a node's mass must reach
    next_step_ms: float                  # l(N+1) - l(N) at drafted_width: not c1 where the table bends
    next_threshold: float                # likewise: what the next node's mass must reach
    masses: dict[int, float]             # rho by N, around the stop
    promised: float                      # R = 1 + g(drafted_width), by the scores
    recorded: float | None               # the R that was recorded at that width, where it was
    break_even: float                    # the R at which drafted_width is as fast as AR
    tokens_per_second: dict[str, float]  # predicted: "ar", "dflash" if the chain's masses were given, "cast"

    @property
    def expected(self) -> float:
        """R at drafted_width by the best knowledge."""
        return self.promised if self.recorded is None else self.recorded

    def lines(self) -> list[str]:
        """What `--explain` prints."""
        N, speed = self.drafted_width, self.tokens_per_second
        predicted = "predicted " + ", ".join(f"{method} {rate:.1f} tok/s" for method, rate in speed.items())
        if N == 0:
            return [predicted, "width 0, which is AR: there is no candidate to verify"]
        lines = [
            f"slope {self.slope:.4f} ms a node: on the fitted line one pays above mass {self.threshold:.4f}",
            "masses " + ", ".join(f"{mass:.4f} (node {node})" for node, mass in self.masses.items()),
        ]
        if N + 1 in self.masses:
            step = f"node {N + 1} would add {self.next_step_ms:.4f} ms"
            lines.append(f"stop at {N}: {step}, so it would pay from mass {self.next_threshold:.4f} on")
        else:
            lines.append(f"stop at {N}: no candidate is left")
        lines.append(predicted)
        scores = "" if self.recorded is None else f" (the scores promise {self.promised:.2f})"
        expected = f"R {self.expected:.2f} expected{scores}, {self.break_even:.2f} needed to be as fast as AR"
        if self.width:
            lines.append(f"width {N}: {expected}")
        else:
            lines.append(f"width 0, which is AR: {expected}; to see a tree anyway: --method cast --width {N}")
        return lines


def decide(
    masses: Sequence[float],
    cost: CostModel,
    draft_ms: float,
    overhead_ms: Overhead = 0.0,
    chain_masses: Sequence[float] = (),
    accepted: Sequence[float] = (),
) -> Decision:
    """N* with its reasons.

    The scores rank candidates well and promise too much. So where it is known how often rounds accepted the
    candidate of each rank, that decides between drafting and AR; how wide to draft, the masses do (paper).

    chain_masses: those of the top-1 prefix at each depth, 1 to L, or the shares accepted
    accepted: shares by rank, as long as masses
    """
    masses, chain_masses = [float(mass) for mass in masses], [float(mass) for mass in chain_masses]
    times = round_times(cost, max(len(masses), len(chain_masses)) + 1, draft_ms, overhead_ms)
    N = best_drafted(masses, times)
    promised = 1.0 + sum(masses[:N])
    recorded = 1.0 + sum(accepted[:N]) if accepted else None
    expected = promised if recorded is None else recorded
    speed = {"ar": 1000.0 / times[0]}
    if chain_masses:
        speed["dflash"] = 1000.0 * (1.0 + sum(chain_masses)) / times[len(chain_masses)]
    if N:
        speed["cast"] = 1000.0 * expected / times[N]
    h_slope = 0.0
    if callable(overhead_ms) and len(masses) > 1:
        h_slope = (overhead_ms(len(masses)) - overhead_ms(1)) / (len(masses) - 1)
    slope, throughput, next_step_ms = cost.slope + h_slope, promised / times[N], times[N + 1] - times[N]
    return Decision(
        width=N if expected / times[N] > 1.0 / times[0] else 0,
        drafted_width=N,
        slope=slope,
        threshold=throughput * slope,
        next_step_ms=next_step_ms,
        next_threshold=throughput * next_step_ms,
        masses={n: masses[n - 1] for n in range(max(N - 2, 1), min(N + 3, len(masses)) + 1)},
        promised=promised,
        recorded=recorded,
        break_even=times[N] / times[0],
        tokens_per_second=speed,
    )


# When the prediction was too hopeful

COMPARED, COMPARED_LEAST = 9, 3  # latest comparisons kept, by their median; with fewer the probe's word stands
COMPARE_FIRST, COMPARE_EVERY = 6, 48  # drafted rounds until AR runs for one: while there are too few, and later
NEIGHBOURS = 5  # drafted rounds, the last before AR, that it is compared with, by their median


@dataclass
class Pace:
    """How much longer than a probe predicted drafted rounds take in use, in units of AR's.

    A probe lasts a second or two. On a shared machine memory and cores gain and lose a tenth or two within seconds.
    AR is bound by memory, drafted rounds more by the cores; both slow down together, so that only rounds that ran
    next to each other can be compared, and how they compare drifts within half a minute or so. Hence all rounds are
    timed as they run, and now and then AR decodes two tokens only to be compared. The second of them counts: on a CPU
    the first AR round after a drafted one is up to a twentieth slower than those that follow.

    Attributes:
        ratios: at each of the latest changes from drafting to AR, a drafted round's time over AR's, both over what was
            predicted of them
        since: drafted rounds since the latest comparison
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED))
    since: int = 0
    _drafted: deque[float] = field(default_factory=lambda: deque(maxlen=NEIGHBOURS))  # before the latest AR rounds
    _ar_rounds: int = 0  # since then
    _compared: bool = False  # in this answer

    @property
    def due(self) -> bool:
        """Whether AR should run for a comparison."""
        return self.since >= (COMPARE_EVERY if len(self.ratios) >= COMPARED_LEAST else COMPARE_FIRST)

    @property
    def correction(self) -> float:
        """What to multiply a drafted round's predicted time with, in units of AR's."""
        return median(self.ratios) if len(self.ratios) >= COMPARED_LEAST else 1.0

    def begin(self) -> None:
        """Another answer: its rounds are no neighbours of those before.

        Where the last one compared nothing, the oldest comparison is forgotten. Else an accident that silenced drafting
        would outlast it: without drafts there are no new comparisons.
        """
        if self.ratios and not self._compared:
            self.ratios.popleft()
        self._drafted.clear()
        self._ar_rounds, self._compared = 0, False

    def observe(self, drafted: bool, excess: float) -> None:
        """A round took `excess` times its predicted time."""
        if drafted:
            if self._ar_rounds:
                self._drafted.clear()
            self._drafted.append(excess)
            self._ar_rounds = 0
            self.since += 1
            return
        self._ar_rounds += 1
        if self._ar_rounds == 2:
            if self._drafted:
                self.ratios.append(median(self._drafted) / excess)
                self._compared = True
            self.since = 0


TRUSTED_FROM = 24.0  # tokens that masses must have promised before what comes of it is known
MEMORY = 64          # drafted rounds that are looked back, or so: older ones fade
LENT = 4.0           # tokens that an answer may be credited beyond those it committed: 3 % of 128


@dataclass
class Trust:
    """How many tokens a drafted round was worth: by its masses, once it is known what they are worth.

    How hard a text is for the drafter shows in what its rounds accept, and in the sum of their masses, which is what they
    should accept. Acceptance scatters around that sum by as much again, so the sum tells sooner. But masses promise too
    much, or too little, by a share that depends on the head; and they may be wrong about a text, so that an answer is
    lent a few tokens on them, not more.

    Attributes:
        promised, accepted: tokens, sums over the drafted rounds of late
        lent: tokens credited in this answer, less those committed
    """

    promised: float = 0.0
    accepted: float = 0.0
    lent: float = 0.0

    @classmethod
    def of(cls, decision: Decision | None) -> "Trust":
        """As it was recorded of the pair; none yet where it was not."""
        if decision is None or decision.recorded is None:
            return cls()
        return cls(MEMORY * (decision.promised - 1.0), MEMORY * (decision.recorded - 1.0))

    def credit(self, committed: int, promised: float) -> float:
        """The R to be expected of a round whose masses sum up to `promised` and which committed R; both are learned from."""
        expected = float(committed)
        if self.promised >= TRUSTED_FROM:
            expected = min(1.0 + promised * self.accepted / self.promised, committed + LENT - self.lent)
        self.promised += promised - self.promised / MEMORY
        self.accepted += committed - 1 - self.accepted / MEMORY
        self.lent += expected - committed
        return expected


BUDGET = 1.0       # AR tokens of time that an answer at least may lose before drafting pauses: 0.8 % of 128
RECORDED_BUDGET = 2.0  # the same where it was recorded that drafting pays, or nearly: texts may begin hard
BANK = 6.0         # most that good rounds save up: with more a text that turns hard, or the next one, is noticed late
TRY_SHARE = 0.01   # of the AR time before it, what the first try after a pause may lose
RECORDED_TRY_SHARE = 0.02  # the same where it was recorded that drafting pays, or nearly: the alarm may have been false
NEARLY = 0.85      # of the R that pays: above this share of it, many texts do pay, though the average does not
TOLERANCE = 1e-9   # sums of rounded numbers may miss their mark by so much


@dataclass
class BackOff:
    """Leaves drafting for a while when it does not pay, so that a poor head or a hard text costs little.

    The rule decides for all texts at once; this looks at the text at hand. It keeps a purse, in units of the
    time AR takes for one token. A drafted round earns the R tokens that were to be expected of it, see `Trust`, and
    spends its own time; it only takes place if the purse could pay for it even if nothing were accepted. Otherwise
    AR decodes k tokens, then there is money for one more try; k doubles with each failure in a row. (A sum that is
    kept below a cap and raises an alarm at a limit is Page's test for a change of mean, the quickest for
    its rate of false alarms.)

    So an answer loses at most what the purse holds when it begins, or one round if that is more, what it was lent, and one
    try a pause; a head that is no good loses that once, and then less and less. What good rounds saved stays for the next answer, where it makes a false
    alarm less likely. What a round took is its predicted time, corrected by the `Pace` of late: the time of a single
    round may be an accident.

    Attributes:
        price: what one more round like the last would lose if nothing were accepted
        pace: of rounds whose times were predicted by the same costs
        trust: in the masses of the decoder's drafter
        try_share: of the AR time before it, what the first try after a pause may lose
    """

    purse: float = BUDGET
    price: float = 0.0
    ar_tokens_left: int = 0
    pace: Pace = field(default_factory=Pace)
    trust: Trust = field(default_factory=Trust)
    try_share: float = TRY_SHARE
    _pauses: int = 0    # since drafting last filled the purse, or an answer of a pair that pays began

    @property
    def drafting(self) -> bool:
        """Whether the next round should draft."""
        return self.ar_tokens_left == 0 and not self.pace.due

    def begin(self, decision: Decision | None = None) -> None:
        """Another answer. decision: the rule's, with what was recorded of the pair.

        Where drafting was recorded to pay, or nearly, a pause was about the text: the next one may be easier. Where it was
        not, it is about the head, and goes on.
        """
        self.pace.begin()
        if self.trust.promised == 0:
            self.trust = Trust.of(decision)
        self.trust.lent = 0.0
        recorded = decision.recorded if decision else None
        pays = recorded is not None and recorded > NEARLY * decision.break_even * self.pace.correction
        self.try_share = RECORDED_TRY_SHARE if pays else TRY_SHARE
        self.purse = max(self.purse, RECORDED_BUDGET if pays else BUDGET)
        if pays:
            self.ar_tokens_left = self._pauses = 0

    def observe(
        self, drafted: bool, committed: int, seconds: float, *, promised: float, predicted_ms: float, ar_ms: float
    ) -> None:
        """A round of either kind committed R tokens in `seconds`.

        promised: tokens, the sum of its nodes' masses; predicted were `predicted_ms`, and `ar_ms` for AR
        """
        self.pace.observe(drafted, 1e3 * seconds / predicted_ms)
        if drafted:
            self.after_draft(self.trust.credit(committed, promised), predicted_ms / ar_ms * self.pace.correction)
        else:
            self.after_ar(committed)

    def after_draft(self, earned: float, ar_tokens: float) -> None:
        """A drafted round earned so many tokens and took the time of `ar_tokens` tokens of AR."""
        self.purse = min(self.purse + earned - ar_tokens, BANK)
        self.price = max(ar_tokens - 1.0, 0.0)
        if self.purse == BANK:
            self._pauses = 0
        if self.purse < self.price - TOLERANCE:
            self.ar_tokens_left = ceil(self.price / self.try_share) << self._pauses
            self._pauses += 1
            self.purse = self.price

    def after_ar(self, tokens: int) -> None:
        """AR emitted `tokens` tokens."""
        self.ar_tokens_left = max(self.ar_tokens_left - tokens, 0)


# Policies

@runtime_checkable
class Policy(Protocol):
    """Chooses the width of an answer's rounds: any object with these three.

    Attributes:
        width: N to propose in the next round, 0 to MAX_WIDTH; 0 is AR. Read once a round
    """

    width: int

    def keep(self, tree: Tree) -> int:
        """How many of the first nodes of the tree proposed are verified."""

    def observe(self, width: int, committed: int, seconds: float) -> None:
        """A round verified `width` nodes, committed R tokens, after cuts, and took so long from draft to commit."""


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
    _log_mass: Tensor = field(default_factory=lambda: torch.empty(0), init=False)  # (N,) of the round, on the host

    @property
    def width(self) -> int:
        return self.best if self.back_off.drafting else 0

    def keep(self, tree: Tree) -> int:
        """All of it. Nobody waits for its masses: a copy to pinned memory is there when the round's outcome is."""
        log_mass = tree.log_mass
        self._log_mass = torch.empty_like(log_mass, device="cpu", pin_memory=log_mass.is_cuda)
        self._log_mass.copy_(log_mass, non_blocking=True)
        return tree.width

    def observe(self, width: int, committed: int, seconds: float) -> None:
        promised = self._log_mass.exp().sum().item()
        self.back_off.observe(
            width > 0, committed, seconds, promised=promised, predicted_ms=self.times[width], ar_ms=self.times[0]
        )


@dataclass
class RoundWidth:
    """A width for each round by its own masses: the widest tree is proposed, its best nodes are verified.

    It reads the tree's masses on the host, on a GPU one wait a round more.

    times: round_times, as far as costs are known: no tree is wider; all of them after the same proposal
    draft_ms: the part that a round has spent when its masses are known
    rate: tokens a ms that the decoder makes otherwise, the price of time
    look: shown masses and depths of every proposed tree, to learn from them; these trees are as wide as can be
    """

    times: Sequence[float]
    draft_ms: float
    rate: float
    back_off: BackOff
    look: Callable[[list[float], list[float]], None] | None = None
    _drafted: bool = field(default=False, init=False)
    _promised: float = field(default=0.0, init=False)

    @property
    def width(self) -> int:
        self._drafted = self.back_off.drafting
        return 0 if not self._drafted else MAX_WIDTH if self.look else len(self.times) - 1

    def keep(self, tree: Tree) -> int:
        if tree.width == 0:
            return 0
        masses, depths = torch.stack((tree.log_mass.exp(), tree.depths.float())).tolist()
        if self.look:
            self.look(masses, depths)
        width = paying_width(masses[: len(self.times) - 1], self.times, self.draft_ms, self.rate)
        self._promised = sum(masses[:width])
        return width

    def observe(self, width: int, committed: int, seconds: float) -> None:
        predicted_ms = self.draft_ms + self.times[0] if self._drafted and width == 0 else self.times[width]
        self.back_off.observe(
            self._drafted, committed, seconds,
            promised=self._promised, predicted_ms=predicted_ms, ar_ms=self.times[0],
        )


def paying_width(masses: Sequence[float], times: Sequence[float], draft_ms: float, rate: float) -> int:
    """How many of a drafted round's nodes pay for their verification: 0..len(masses), the larger of equals.

    Over many rounds throughput is highest if each of them takes what its time is worth elsewhere: the N of
    largest 1 + g(N) - rate l(N). That is Theorem 2 with the decoder's own throughput in the place of this
    round's. The draft is spent either way, so here N = 0 pays it too.
    """
    times = [draft_ms + times[0], *times[1:]]
    surplus = [R - rate * ms for R, ms in zip(accumulate(masses, initial=1.0), times)]
    return max(range(len(surplus)), key=lambda N: (surplus[N], N))
