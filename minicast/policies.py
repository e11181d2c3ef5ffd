"""How fast the width policies decode recorded answers on a machine of known costs: no clock, so no noise.

    python -m minicast.replay --analyse --out DIR --costs FILE     (FILE: of the bench, with width auto)

A replayed round takes the l(N) that a probe measured, and commits what the recorded drafts say it would. The
policies are those of `minicast.width`, as the decoder runs them, back-off included. So this tells what a rule is
worth where timing cannot: whether a width for each round beats one N*, how far N* is from the best fixed width of
a domain, what back-off loses on a hard text. It holds as far as a round costs what the probe says.

A figure is a speed over AR; its rounds' times are milliseconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minicast.curve import MassCurve
from minicast.probe import Costs, decide_by, policy_of
from minicast.prompts import EVERYTHING
from minicast.replay import Replayable, committed
from minicast.tree import RANK_CAP
from minicast.width import BackOff, FixedWidth

SWEPT = (1, 2, 3, 4, 5, 6, 7, 11, 15, 23, 31, 47, 63, 95, 127)


@dataclass(frozen=True)
class Policies:
    """What the policies make of the answers.

    Attributes:
        predicted: N*, the rule's width on the mass curve of these answers; 0 is AR
        fixed: speed over AR by domain and width N; over all domains under EVERYTHING, which weighs them alike
        chosen: likewise by domain and policy, "auto" or "round"
    """

    predicted: int
    fixed: dict[str, dict[int, float]]
    chosen: dict[str, dict[str, float]]

    def lines(self) -> list[str]:
        """Markdown: a row a domain; the gap is to the best fixed width or AR, in points."""
        lines = [
            f"| speed over AR | N* = {self.predicted} | auto | round | best fixed | its speed | gap of auto, points |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for domain, widths in self.fixed.items():
            best = max(widths, key=widths.get)
            auto, each = (self.chosen[domain][name] for name in ("auto", "round"))
            name = f"N = {best}" if best else "AR"
            lines.append(
                f"| {domain} | {widths[self.predicted]:.2f} | {auto:.2f} | {each:.2f} | {name} | {widths[best]:.2f} "
                f"| {100 * (widths[best] - auto):.1f} |"
            )
        return lines


def compare(domains: dict[str, list[Replayable]], curve: MassCurve, costs: Costs) -> Policies:
    """All policies on the answers of each domain, one answer after another on one decoder.

    curve: of the pair
    costs: widths beyond the last row count measured are left out
    """
    times = costs.times(())
    widest = len(times) - 1
    decision = decide_by(replace(curve, masses=curve.masses[:widest], accepted=curve.accepted[:widest]), costs)
    swept = sorted({0, decision.width} | {N for N in SWEPT if N <= widest})
    fixed = {N: by_domain(domains, lambda _, N=N: FixedWidth(N), times, costs.draft_ms) for N in swept}
    chosen = {
        name: by_domain(
            domains, lambda back_off, name=name: policy_of(name, decision, costs, (), back_off), times, costs.draft_ms
        )
        for name in ("auto", "round")
    }
    names = [*domains, EVERYTHING]
    return Policies(
        decision.width,
        {domain: {N: speeds[domain] for N, speeds in fixed.items()} for domain in names},
        {domain: {name: speeds[domain] for name, speeds in chosen.items()} for domain in names},
    )


def by_domain(
    domains: dict[str, list[Replayable]], make: Callable, times: Sequence[float], draft_ms: float
) -> dict[str, float]:
    """Speed over AR of a policy, which `make` makes for each answer with the back-off of its domain's decoder."""
    speeds = {}
    for domain, answers in domains.items():
        back_off, tokens, ms = BackOff(), 0, 0.0
        for answer in answers:
            tokens += len(answer.needs["cast"])
            ms += decode_ms(answer, make(back_off), times, draft_ms)
        speeds[domain] = tokens * times[0] / ms
    return speeds | {EVERYTHING: sum(speeds.values()) / len(speeds)}


def decode_ms(answer: Replayable, policy, times: Sequence[float], draft_ms: float) -> float:
    """Milliseconds of an answer's rounds by `policy`; times: l(N), see `minicast.width.round_times`."""
    position, ms, last = 0, 0.0, len(answer.needs["cast"])
    while position < last:
        width = policy.width
        N = policy.keep(answer.recording.drafts.tree(position, width, RANK_CAP)) if width else 0
        R = committed(answer.needs["cast"], position, N)
        took = times[N] if N or not width else draft_ms + times[0]
        policy.observe(N, R, took / 1e3)
        ms += took
        position += R
    return ms
