"""How fast the width policies decode recorded answers on a machine of known costs: no clock, so no noise.

    python -m minicast.replay --analyse --out DIR --costs FILE     (FILE: of the bench, with width auto)

A replayed round takes the l(N) that a probe measured, and commits what the recorded drafts say it would. The
policies are those of `minicast.policy`, as the decoder runs them, back-off included. So this shows what a rule is
worth where timing cannot: whether a width for each round beats one N*, how far N* is from the best fixed width of
a domain, what back-off loses on a hard text. It is right as far as a round costs what the probe says.

A figure is a speed over AR, of a domain's answers together, and under MEAN the mean of the domains' speeds; a round's
time is in milliseconds.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from minicast.back_off import BackOff
from minicast.curve import MassCurve
from minicast.policy import FixedWidth, Policy
from minicast.probe import DISTURBED, Costs, costs_of, decide_by, policy_of
from minicast.prompts import MEAN
from minicast.replay import Replayable, round_length
from minicast.table import markdown
from minicast.tree import RANK_CAP
from model.errors import UsageError
from model.files import read_text

SWEPT = (1, 2, 3, 4, 5, 6, 7, 11, 15, 23, 31, 47, 63, 95, 127)


@dataclass(frozen=True)
class Measured:
    """The costs that a file holds.

    Attributes:
        source: what was measured, for people
        costs: by prefix length
        buckets: packed rows that rounds were padded to; none: unpadded
    """

    source: str
    costs: dict[int, Costs]
    buckets: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> "Measured":
        """From bench's file (the paper's probe, if it ran) or from the cache's."""
        text = read_text(path)
        try:
            values = json.loads(text)
            if "key" in values:  # the cache's
                key, found = values["key"], {values["key"]["prefix"]: values["costs"]}
                source = f"unnamed weights on {key['device']}"
                padded = key["compiled"] or key["positions"]  # such rounds are measured only at their buckets
                buckets = values["costs"]["packed"] if padded else ()
            else:
                source = "{weights} on {hardware}".format_map(values["environment"])
                found = {probe["prefix"]: probe["costs"] for probe in values["probes"]} or values["costs"]
                buckets = values["buckets"]
            costs = {int(prefix): costs_of(each) for prefix, each in found.items()}
            if not costs:
                raise KeyError("costs")
            disturbed = "" if all(each.steady for each in costs.values()) else f", {DISTURBED}"
            return cls(source + disturbed, costs, tuple(map(int, buckets)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            hint = "give what `python -m minicast.bench --out FILE.json` wrote, with width auto or --probe-full"
            raise UsageError(f"{path} holds no measured costs: {hint}") from error

    def prefix_for(self, positions: int) -> int:
        """The measured prefix length to use for this one: the next longer, or the longest, as in the decoder."""
        return min((prefix for prefix in self.costs if prefix >= positions), default=max(self.costs))


@dataclass(frozen=True)
class Policies:
    """What the policies make of the answers.

    Attributes:
        predicted: N*, the rule's width on the mass curve; 0 is AR
        threshold: mass from which a node pays on the fitted line, see `Decision`
        fixed: speed over AR by domain, MEAN last, and width N
        chosen: likewise by domain and policy, "auto" or "round"
    """

    predicted: int
    threshold: float
    fixed: dict[str, dict[int, float]]
    chosen: dict[str, dict[str, float]]

    def lines(self) -> list[str]:
        """Markdown: a row a domain, their mean last; the gap is to the best fixed width or AR, in points."""
        heads = ("speed over AR", f"N* = {self.predicted}", "auto", "round", "best fixed", "its speed", "gap of auto, points")
        rows = []
        for domain, widths in self.fixed.items():
            best = max(widths, key=widths.get)
            auto, each = (self.chosen[domain][name] for name in ("auto", "round"))
            speeds = (f"{speed:.2f}" for speed in (widths[self.predicted], auto, each))
            name, gap = f"N = {best}" if best else "AR", 100 * (widths[best] - auto)
            rows.append([domain, *speeds, name, f"{widths[best]:.2f}", f"{gap:.1f}"])
        return list(markdown(heads, rows, names=1))


def compare(
    domains: dict[str, list[Replayable]], curve: MassCurve, costs: Costs, buckets: Sequence[int] = ()
) -> Policies:
    """All policies on the answers of each domain, one answer after another, as on one decoder.

    curve: the pair's
    costs: widths beyond the last row count measured are left out
    buckets: packed rows that rounds are padded to
    """
    times = costs.times(buckets)
    widest = len(times) - 1
    known = replace(curve, masses=curve.masses[:widest], accepted=curve.accepted[:widest])
    decision = decide_by(known, costs, buckets)
    swept = sorted({0, decision.width} | {N for N in SWEPT if N <= widest})
    fixed = {N: by_domain(domains, lambda _, N=N: FixedWidth(N), times, costs.draft_ms) for N in swept}

    def choosing(name: str) -> Callable[[BackOff], Policy]:
        return lambda back_off: policy_of(name, decision, costs, buckets, back_off)

    widest_ms = costs.proposal_ms(widest)  # what `round` proposes, whatever it keeps
    chosen = {
        "auto": by_domain(domains, choosing("auto"), times, costs.draft_ms),
        "round": by_domain(domains, choosing("round"), costs.times(buckets, widest), widest_ms),
    }
    names = [*domains, MEAN]
    return Policies(
        decision.width,
        decision.threshold,
        {domain: {N: speeds[domain] for N, speeds in fixed.items()} for domain in names},
        {domain: {name: speeds[domain] for name, speeds in chosen.items()} for domain in names},
    )


def by_domain(
    domains: dict[str, list[Replayable]], make: Callable[[BackOff], Policy], times: Sequence[float], draft_ms: float
) -> dict[str, float]:
    """Speed over AR of a policy by domain, and under MEAN their mean.

    make: the policy of each answer, given the back-off of its domain's decoder
    """
    speeds = {}
    for domain, answers in domains.items():
        back_off, tokens, ms = BackOff(), 0, 0.0
        for answer in answers:
            tokens += len(answer.needs["cast"])
            ms += decode_ms(answer, make(back_off), times, draft_ms)
        speeds[domain] = tokens * times[0] / ms
    return speeds | {MEAN: fmean(speeds.values())}


def decode_ms(answer: Replayable, policy: Policy, times: Sequence[float], draft_ms: float) -> float:
    """Milliseconds of an answer's rounds by `policy`; times: l(N), see `minicast.width.round_times`."""
    position, ms, last = 0, 0.0, len(answer.needs["cast"])
    while position < last:
        width = policy.width
        N = policy.keep(answer.recording.drafts.tree(position, width, RANK_CAP)) if width else 0
        R = round_length(answer.needs["cast"], position, N)
        took = times[N] if N or not width else draft_ms + times[0]
        policy.observe(N, R, took / 1e3)
        ms += took
        position += R
    return ms
