"""What a run of the bench found, as JSON and as Markdown, with what a reader needs to repeat it.

Figures are computed in `figures`; nothing is measured here.
"""

import json
import platform
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from minicast.audit import Audit
from minicast.command import Placement
from minicast.figures import (
    Prediction, Record, Row, difference_lines, gain_table, located, prediction_table, repeat_table, shape_table,
    speed_table, summary,
)
from minicast.machine import TREE_DEPTH, Floor
from minicast.paper_probe import FullProbe
from minicast.probe import Costs
from minicast.prompts import MEAN
from minicast.tree import RANK_CAP
from minicast.width import MAX_WIDTH
from model.device import device_name


@dataclass
class Report:
    """All that a run found.

    Attributes:
        depth: L of the head; 0 without one
        remark: what a reader has to know before any figure
        settings: everything that decides the records
        environment: what they were measured on, and how to repeat it
        ar_over_floor: an AR step over the streaming floor; None without "ar"
        outside_share: by arm, the part of a round spent in no model, see `Share`
        tree_builder_ms: see `measure_tree_builder`
        predictions: the arms that chose their own width, beside the widths swept
        costs: those that "auto" and "round" used, by prefix length; empty without these arms
        buckets: packed rows that rounds were padded to; none: unpadded
        probes: the paper's, by prefix, if asked for
        audit: whether tokens are the target's best, if asked for
        failures: departures that rounding does not explain, for people
    """

    depth: int
    remark: str | None
    settings: dict
    environment: dict
    floor: Floor
    ar_over_floor: float | None
    outside_share: dict[str, float]
    tree_builder_ms: float
    rows: list[Row]
    predictions: list[Prediction]
    costs: dict[int, Costs]
    buckets: tuple[int, ...]
    probes: list[FullProbe]
    audit: Audit | None
    records: list[Record]
    failures: list[str]

    def to_json(self) -> str:
        """Everything but the single tokens and rounds; one answer a line."""
        values = asdict(replace(self, records=[]))
        values["floor"] |= {"ms": self.floor.ms, "ms_in_32_bits": self.floor.ms_in_32_bits}
        del values["records"]
        records = ",\n  ".join(json.dumps(summary(record)) for record in self.records)
        return json.dumps(values, indent=1).removesuffix("\n}") + f',\n "records": [\n  {records}\n ]\n}}\n'

    def to_markdown(self) -> str:
        lines = [f"**{self.remark}**", ""] if self.remark else []
        lines += [*speed_table(self.rows), "", *gain_table(self.rows), *shape_table(self.rows, self.depth)]
        lines += repeat_table(self.rows, "seeds" if self.sampled else "repeats")
        if self.predictions:
            lines += [*prediction_table(self.predictions), ""]
        for probe in self.probes:
            lines += [*probe.lines(), ""]
        if self.audit:
            lines += [*self.audit.lines(), ""]
        return "\n".join([*lines, *(f"- {line}" for line in self.notes())]) + "\n"

    @property
    def sampled(self) -> bool:
        return self.settings["options"]["temperature"] > 0

    def notes(self) -> Iterator[str]:
        yield from self.text_lines()
        blank = dict.fromkeys(row.domain for row in self.rows if row.domain != MEAN and row.R is None)
        if blank:
            yield (
                f"all answers of {', '.join(blank)} ended at their first token, before any round: there are no figures "
                "of them, nor means over domains"
            )
        yield from difference_lines(self.rows)
        floor = self.floor
        yield (
            f"streaming floor {floor.ms:.1f} ms a token: {floor.weight_bytes / 1e6:.0f} MB of weights at "
            f"{floor.bytes_per_second / 1e9:.1f} GB/s ({floor.ms_in_32_bits:.1f} ms if held in 32 bits)"
        )
        if self.ar_over_floor:
            yield f"AR step over the floor: {self.ar_over_floor:.2f}"
        for arm, share in self.outside_share.items():
            yield f"{arm}: {share:.1%} of a round is spent outside the models"
        for prefix, costs in self.costs.items():
            yield f"costs that auto went by at a prefix of {prefix} positions: {costs}"
        if self.buckets:
            yield f"rounds are padded to {', '.join(map(str, self.buckets))} packed rows"
        size = f"{MAX_WIDTH} nodes, depth {TREE_DEPTH}, {RANK_CAP} ranks"
        yield f"best-first tree, {size}: {self.tree_builder_ms:.3f} ms without ranking"
        yield (
            "ms a token: decoding time over new tokens; the clock opens after prefill and, where something "
            "is drafted, after the first draft; speedup t_AR / t, gain t_DFlash / t - 1. Pooled: of a domain's "
            "answers together; its mean row averages the domains' ratios. Mean of prompts: of their own ratios, "
            "with a 95 % bootstrap interval over prompts where there are several. Break-even: the R at which a "
            "round would only just pay"
        )
        if self.settings["repeats"] > 1:
            average = "mean of its seeds, whose texts differ" if self.sampled else (
                "median of its repeats (the paper's is their mean), which a slow moment of the machine hardly changes"
            )
            yield (
                f"a prompt's ratio is the {average}; the range over {'seeds' if self.sampled else 'repeats'} is of "
                "their pooled ratios, one for each"
            )
        if self.predictions:
            yield (
                "predicted N: of most rounds that drafted. Oracle: the fastest of the fixed widths swept, "
                "AR being N = 0. Gap: how far the oracle is ahead, in points, hundredths of a speedup over "
                "AR or of a gain over DFlash. All of them are means of prompts"
            )
        for name, value in self.environment.items():
            yield f"{name}: {value}"

    def text_lines(self) -> Iterator[str]:
        """What was asked, how tokens were chosen, and whether all arms gave the same text."""
        counts = [record.prompt_tokens for record in self.records]
        cut_to = ", ".join(map(str, self.settings["prefix"]))
        yield f"prompts of {min(counts)} to {max(counts)} tokens" + (f", cut to at most {cut_to}" if cut_to else "")
        options, (reference, *others) = self.settings["options"], self.settings["arms"]
        if self.settings["turn"] and others:
            yield f"methods took turns of {self.settings['turn']} tokens, so slow moments of the machine hit all alike"
        if self.sampled:
            limits = "".join(f", {name} {options[name]}" for name in ("top_k", "top_p") if options[name])
            seeds = f"seed {options['seed']}" + (" + repeat" if self.settings["repeats"] > 1 else "")
            verifier = options["verifier"]
            yield f"sampled at T = {options['temperature']:g}{limits}, {seeds}, {verifier} verifier"
            if verifier == "stochastic":
                yield "the stochastic verifier draws other tokens of the same law: texts are not compared"
                return
        departed = [record for record in self.records if record.departure]
        compared = sum(record.arm != reference for record in self.records)
        if others:
            equal = "all texts are equal" if not departed else f"{len(departed)} texts differ"
            yield f"{equal}: {compared} answers compared, token by token, with those of {reference}"
        for record in departed:
            yield located(record)


def environment(placement: Placement, source: str, command: Sequence[str], commit: str) -> dict:
    """What a reader needs to judge a figure and to measure it again; commit: when the run began"""
    return {
        "command": shlex.join(["python", "-m", "minicast.bench", *command]),
        "commit": commit,
        "weights": source,
        "dtype": str(placement.dtype).removeprefix("torch."),
        "hardware": device_name(placement.device),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}",
    }


def commit() -> str:
    """The commit of this code, marked if files other than those of results/ differ from it."""

    def git(*command: str) -> str:
        git_here = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(git_here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)results")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
