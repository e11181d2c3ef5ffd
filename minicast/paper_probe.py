"""The paper's own probe (Table 5), `--probe-full`, and what `--explain` and its kin print before an answer.

Its costs are shown, with the N* that would follow, and not kept: widths go by the short probe of `probe`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from minicast.decode import Decoder
from minicast.probe import DISTURBED, Costs, Deployment, Passes
from minicast.table import markdown
from minicast.width import FIT_FROM, Decision
from model.device import device_name

PACKED, PREFIX = (1, 16, 24, 32, 48, 64, 96, 128), 1024
WARM_UPS, REPEATS = 8, 30


@torch.no_grad()
def paper_costs(decoder: Decoder, prefix: int) -> Costs:
    """Table 5's protocol: random packed tokens after `prefix` positions, 8 warm-ups and 30 timed passes a count.

    The pass is timed as it runs, walk and commit included; so is the draft, with trees of three widths.
    """
    passes = Passes(decoder, prefix)
    try:
        return passes.costs(PACKED, warm_ups=WARM_UPS, repeats=REPEATS, seconds=inf)
    finally:
        passes.close()


@dataclass(frozen=True)
class FullProbe:
    """What `paper_costs` measured, and what follows from it.

    Attributes:
        device, prefix: where, and after how many positions
        costs: as measured
        slope, intercept: ms a row and ms, of the line fitted from n = 16 on
        decision: the rule's, on the pair's mass curve; None while that is unknown
    """

    device: str
    prefix: int
    costs: Costs
    slope: float
    intercept: float
    decision: Decision | None

    def lines(self) -> list[str]:
        """Markdown: the table, the fit, N* and why."""
        costs = self.costs
        drafts = ", ".join(f"of {N} {ms:.2f} ms" for N, ms in zip(costs.proposed, costs.propose_ms))
        heads, times = map(str, costs.packed), (f"{ms:.1f}" for ms in costs.settle_ms)
        lines = [
            *markdown(["packed rows n", *heads], [["ms", *times]], names=1),
            "",
            f"- paper's probe on {self.device}: verify, walk and commit of random tokens after {self.prefix} "
            f"positions, medians of {REPEATS} after {WARM_UPS} warm-ups",
            f"- fit from n = {FIT_FROM} on: {self.intercept:.2f} + {self.slope:.4f} n ms; draft with a tree {drafts}",
        ]
        if not costs.steady:
            lines.append(f"- the probe was {DISTURBED}: measure again when it is quiet")
        if self.decision is None:
            return [*lines, "- no N* follows yet: no mass curve of this pair is known"]
        return [*lines, f"- N* = {self.decision.width} follows", *(f"- {line}" for line in self.decision.lines())]


def full_probe(deployment: Deployment, prefix: int = PREFIX) -> FullProbe:
    """The paper's probe of a decoder, and the N* that its costs and the deployment's masses give."""
    decoder = deployment.decoder
    prefix = min(prefix, decoder.target.context)
    costs = paper_costs(decoder, prefix)
    cost, device = costs.model(decoder.state.buckets), device_name(decoder.target.device)
    return FullProbe(device, prefix, costs, cost.slope, cost.intercept, deployment.decision(costs))


def explain(
    decoder: Decoder, prompt_ids: Sequence[int], max_new_tokens: int, *, width: bool, reprobe: bool, full: bool
) -> list[str]:
    """Does what --explain (width), --reprobe and --probe-full (full) do before an answer. Returns the lines to print.

    UsageError for a prompt that cannot be answered.
    """
    sizes = len(prompt_ids), decoder.room(prompt_ids, max_new_tokens)[0]
    decoder.deployment = Deployment(decoder)
    if reprobe:
        decoder.deployment.costs_at(*sizes, reprobe=True)
    lines = decoder.deployment.lines(*sizes) if width else []
    return lines + (full_probe(decoder.deployment).lines() if full else [])
