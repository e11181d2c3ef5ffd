"""How wide the tree should be: the stopping rule of Theorem 2 on a measured cost (paper, §3.3).

Widening the tree costs no further draft, only verification. With rho_N the mass of the N-th best candidate, a tree
of width N commits 1 + g(N) tokens a round, g(N) = rho_1 + ... + rho_N, and a round takes

    l(N) = draft + h(N) + target(1 + N) milliseconds,

h(N) being the cost of packing, gathering and, up to N = L, scoring one more of the block's L positions a node. The
next node takes l(N+1) - l(N), and in that time the decoder, at its throughput f(N) = (1 + g(N)) / l(N), would have
produced f(N) · (l(N+1) - l(N)) tokens. So it is worth adding, if and only if

    rho_(N+1) >= f(N) · (l(N+1) - l(N)).

Where cost is affine, with c1 ms a node, the first N that fails this is the best one (Theorem 2). Where it bends or
steps, at a kernel's tile or a captured bucket, throughput may rise again, and the best of all such N is taken.
Autoregressive decoding does not run the drafter, so the rule does not cover it: it is N = 0, compared last.

The rule predicts. `back_off` follows what a text turns out to be worth; the policies that are asked for a width in
each round are in `policy`.

This file is arithmetic: it measures nothing and knows no model. Costs are measured in `probe`.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import fmean, linear_regression

from minicast.sampling import is_integer

MAX_WIDTH = 127  # packed rows n = N + 1 stay within 128, the paper's grid and the widest bucket
UNINFORMED = 15  # where neither costs nor masses can be known
FIT_FROM = 16    # the paper fits its line from 16 packed rows on: fewer rows run other kernels


def clamp_width(width: int) -> int:
    """A width the decoder can run: 0 is AR; above MAX_WIDTH it becomes MAX_WIDTH, with a warning."""
    if not is_integer(width) or width < 0:
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
        if not all(1 <= n < inf for n in packed) or not all(0 < ms < inf for ms in milliseconds):
            raise ValueError("row counts are at least 1, times above 0 ms, and all are finite")
        counts = sorted(set(packed))
        means = [fmean(ms for n, ms in zip(packed, milliseconds) if n == count) for count in counts]
        fitted = [(n, ms) for n, ms in zip(counts, means) if n >= FIT_FROM]
        if len(fitted) < 2:
            fitted = list(zip(counts, means))
        line = linear_regression(*zip(*fitted)) if len(fitted) > 1 else (0.0, means[0])
        return cls(tuple(counts), tuple(means), line[0], line[1], tuple(sorted(buckets)))

    def at(self, n: int) -> float:
        """Milliseconds of a pass over n rows, or over the bucket that n is padded to.

        Measured values, linear in between. Beyond the ends it continues from the last point with the fitted slope;
        but above it never falls, and below it is never less than n rows' share of the smallest pass.
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
    # Where cost is affine, this is the first N that fails the rule (Theorem 2), elsewhere the best of those that do.
    return max(range(1, len(masses) + 1), key=lambda N: (throughput[N], N), default=0)


def line_width(masses: Sequence[float], times: Sequence[float], slope: float) -> int:
    """The first N >= 1 whose next node fails Theorem 2 if it takes `slope` ms; 0 if there are no masses.

    The throughput that it is held against is that of the measured times, up to node N.
    """
    steps = zip(accumulate(masses, initial=1.0), times, masses)  # 1 + g(N), l(N) and the mass of node N + 1
    return next((N for N, (R, ms, mass) in enumerate(steps) if N > 0 and mass < R / ms * slope), len(masses))


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
    line_width: int                      # where the next node stops paying if it takes c1 ms, as in the paper
    line_stops: bool                     # at a node that does not pay, not for want of candidates
    threshold: float                     # throughput at line_width times c1: what a node's mass must reach there
    between_ms: float                    # what the nodes between line_width and drafted_width take, as measured
    next_step_ms: float                  # l(N+1) - l(N) at drafted_width: not c1 where the table bends
    next_threshold: float                # likewise: what the next node's mass must reach
    masses: dict[int, float]             # rho by N, around the stop
    promised: float                      # R = 1 + g(drafted_width), by the scores
    recorded: float | None               # the R that was recorded at that width, where it was
    break_even: float                    # the R at which drafted_width is as fast as AR
    tokens_per_second: dict[str, float]  # predicted: "ar", "dflash" if the chain's masses were given, "cast"

    @property
    def expected(self) -> float:
        """R at drafted_width: the recorded one if there is one."""
        return self.promised if self.recorded is None else self.recorded

    def lines(self) -> list[str]:
        """What `--explain` prints."""
        N, line, speed = self.drafted_width, self.line_width, self.tokens_per_second
        predicted = "predicted " + ", ".join(f"{method} {rate:.1f} tok/s" for method, rate in speed.items())
        if N == 0:
            return [predicted, "width 0, which is AR: there is no candidate to verify"]
        pays = f"where a node pays from mass {self.threshold:.4f} on" if self.line_stops else "no candidate is left"
        lines = [
            f"fitted line, {self.slope:.4f} ms a node: stop at {line}, {pays}",
            "masses " + ", ".join(f"{mass:.4f} (node {node})" for node, mass in self.masses.items()),
        ]
        stop = f"measured times: stop at {N}"
        if N != line:
            low, high = sorted((N, line))
            nodes = f"node {high} takes" if high == low + 1 else f"nodes {low + 1} to {high} take"
            stop += f" ({nodes} {self.between_ms:.4f} ms, on the line {self.slope * (high - low):.4f} ms)"
        if N + 1 in self.masses:
            stop += f"; node {N + 1} would take {self.next_step_ms:.4f} ms and pay from mass {self.next_threshold:.4f} on"
        else:
            stop += "; no candidate is left"
        lines += [stop, predicted]
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

    The scores rank candidates well but promise too much. So if it is known how often the candidate of each rank
    was accepted, that decides between drafting and AR; how wide to draft is still left to the masses (paper).

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
    slope, next_step_ms = cost.slope + h_slope, times[N + 1] - times[N]
    line = line_width(masses, times, slope)
    return Decision(
        width=N if expected / times[N] > 1.0 / times[0] else 0,
        drafted_width=N,
        slope=slope,
        line_width=line,
        line_stops=line < len(masses),
        threshold=(1.0 + sum(masses[:line])) / times[line] * slope,
        between_ms=times[max(N, line)] - times[min(N, line)],
        next_step_ms=next_step_ms,
        next_threshold=promised / times[N] * next_step_ms,
        masses={n: masses[n - 1] for n in range(max(N - 2, 1), min(N + 3, len(masses)) + 1)},
        promised=promised,
        recorded=recorded,
        break_even=times[N] / times[0],
        tokens_per_second=speed,
    )
