"""From measured answers to figures: ms a token, R, speedup, gain, intervals, tables (paper, Appendix D).

Definitions are the paper's, with one exception. ms a token, t, is decoding time over new tokens; speedup is
t_AR / t, gain t_DFlash / t - 1. Pooled, t is that of a domain's answers together, and an average over domains is
the mean of their ratios. The mean of prompts is of their own ratios, with a 95 % interval from a bootstrap that
resamples prompts.

The exception: over the repeats of a prompt the paper takes the mean, here it is the median of their ratios. The two
answers of a repeat were timed soon after each other, so on a shared machine a slow moment, or a slow minute, hardly
changes the median, but would dominate a mean. At T > 0 each repeat has its own seed, and so its own text. Then they
differ for that reason, not because of a disturbance, and the mean is taken, as in the paper.

How far apart repeats are is shown by the range of their pooled ratios: at T > 0 the paper's range over seeds (Table
10), else its run-to-run spread (D.2).

This is arithmetic on records: it decodes nothing and reads no clock.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from minicast.answer import Output, ms_per_token
from minicast.prompts import MEAN
from minicast.table import markdown

RESAMPLES = 10_000


@dataclass(frozen=True)
class Departure:
    """Where an answer leaves the reference answer.

    Attributes:
        position: index of the first token that differs
        expected, got: the tokens there; None if an answer has ended
        gap: between the target's two best scores there, by one uncached pass: what rounding had to overcome
    """

    position: int
    expected: int | None
    got: int | None
    gap: float


@dataclass(frozen=True)
class Record:
    """One answer, measured.

    Attributes:
        arm: the competitor's name: a method with its width
        domain, prompt, repeat: prompt is an index into the run's prompts
        prompt_tokens: how many the prompt has
        output: tokens, rounds and times
        departure: from the first arm's answer to the same prompt; None if equal, or not comparable
    """

    arm: str
    domain: str
    prompt: int
    repeat: int
    prompt_tokens: int
    output: Output
    departure: Departure | None = None

    @classmethod
    def from_json(cls, values: dict) -> "Record":
        departure = values["departure"] and Departure(**values["departure"])
        return cls(**values | {"output": Output(**values["output"]), "departure": departure})


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95 % interval; None if a domain has a single prompt, which says nothing about others."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Spread:
    """The pooled ratios of single repeats: their mean, lowest and highest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """An arm in a domain or, if the domain is MEAN, the means of its rows. None: there is nothing to divide by.

    Attributes:
        ms_per_token: the paper's t; wall_ms_per_token: the same with the time from prompt to last token
        R: tokens committed a round
        round_ms: decoding time over rounds
        break_even: R at which a round would just pay: its time in AR steps
        speedup, wall_speedup: AR's ms a token over this one's, by either time, pooled
        prompt_speedup, wall_prompt_speedup: the mean of the prompts' speedups, by either time
        gain, prompt_gain: DFlash's ms a token over this one's, minus 1: pooled, and the mean of prompts
        repeat_speedup, repeat_gain: the pooled figures repeat by repeat; None if there is only one
        R_difference: the mean over prompts of R minus DFlash's
    """

    domain: str
    arm: str
    R: float | None
    ms_per_token: float | None = None
    wall_ms_per_token: float | None = None
    round_ms: float | None = None
    break_even: float | None = None
    speedup: float | None = None
    wall_speedup: float | None = None
    prompt_speedup: Estimate | None = None
    wall_prompt_speedup: Estimate | None = None
    gain: float | None = None
    prompt_gain: Estimate | None = None
    repeat_speedup: Spread | None = None
    repeat_gain: Spread | None = None
    R_difference: Estimate | None = None


@dataclass(frozen=True)
class Prediction:
    """A width that the decoder chose for itself, beside the best of the fixed ones in the same run.

    Attributes:
        domain: MEAN stands for all of them
        arm: the one that chose its width
        width: N of most rounds that drafted; 0, AR, if none did
        drafted: share of rounds that drafted
        speedup: over AR, the mean of prompts
        oracle, oracle_speedup: the fastest arm of fixed width, counting AR as N = 0
        gap: how far the oracle is ahead, in points, hundredths of a speedup
        gain_gap: the same in hundredths of a gain over DFlash; None without it
    """

    domain: str
    arm: str
    width: int
    drafted: float
    speedup: float
    oracle: str
    oracle_speedup: float
    gap: Estimate | None
    gain_gap: float | None


Cells = dict[tuple[str, str], list[Record]]  # by domain and arm


def summarise(records: Sequence[Record], seed: int, sampled: bool = False) -> list[Row]:
    """The rows of the table by domain and arm, in the records' order; the averages last.

    seed: of the bootstrap; sampled: T > 0, so repeats have different texts
    """
    cells = _cells(records)
    rows = [_row(domain, arm, cells, seed, sampled) for domain, arm in cells]
    return rows + [_mean_row(arm, rows, cells, seed, sampled) for arm in dict.fromkeys(arm for _, arm in cells)]


def _cells(records: Sequence[Record]) -> Cells:
    cells: Cells = {}
    for record in records:
        cells.setdefault((record.domain, record.arm), []).append(record)
    return cells


def _row(domain: str, arm: str, cells: Cells, seed: int, sampled: bool) -> Row:
    own = cells[domain, arm]
    ar, dflash = _rival(cells, domain, arm, "ar"), _rival(cells, domain, arm, "dflash")
    gain = over(record_ms(dflash), record_ms(own))
    return Row(
        domain,
        arm,
        R=mean_committed(own),
        ms_per_token=record_ms(own),
        wall_ms_per_token=record_ms(own, "wall_seconds"),
        round_ms=round_ms(own),
        break_even=over(round_ms(own), round_ms(ar)),
        speedup=over(record_ms(ar), record_ms(own)),
        wall_speedup=over(record_ms(ar, "wall_seconds"), record_ms(own, "wall_seconds")),
        prompt_speedup=bootstrap([prompt_ratios(ar, own, sampled)], seed),
        wall_prompt_speedup=bootstrap([prompt_ratios(ar, own, sampled, "wall_seconds")], seed),
        gain=None if gain is None else gain - 1,
        prompt_gain=bootstrap([prompt_ratios(dflash, own, sampled) - 1], seed),
        repeat_speedup=spread([(ar, own)]),
        repeat_gain=spread([(dflash, own)], less=1),
        R_difference=bootstrap([committed_differences(dflash, own)], seed),
    )


def _mean_row(arm: str, rows: Sequence[Row], cells: Cells, seed: int, sampled: bool) -> Row:
    own = [row for row in rows if row.arm == arm]

    def mean(name: str) -> float | None:
        values = [getattr(row, name) for row in own]
        return None if None in values else statistics.fmean(values)

    def pairs(reference: str) -> list[tuple[list[Record], list[Record]]]:
        return [(_rival(cells, row.domain, arm, reference), cells[row.domain, arm]) for row in own]

    def prompts(reference: str, timer: str = "decode_seconds") -> list[Tensor]:
        return [prompt_ratios(*pair, sampled, timer) for pair in pairs(reference)]

    return Row(
        MEAN,
        arm,
        R=mean("R"),
        break_even=mean("break_even"),
        speedup=mean("speedup"),
        wall_speedup=mean("wall_speedup"),
        prompt_speedup=bootstrap(prompts("ar"), seed),
        wall_prompt_speedup=bootstrap(prompts("ar", "wall_seconds"), seed),
        gain=mean("gain"),
        prompt_gain=bootstrap([ratios - 1 for ratios in prompts("dflash")], seed),
        repeat_speedup=spread(pairs("ar")),
        repeat_gain=spread(pairs("dflash"), less=1),
        R_difference=bootstrap([committed_differences(*pair) for pair in pairs("dflash")], seed),
    )


def _rival(cells: Cells, domain: str, arm: str, reference: str) -> list[Record]:
    """The reference's records, if `arm` is compared with it: no arm is compared with itself, and AR with none."""
    return [] if arm in ("ar", reference) else cells.get((domain, reference), [])


def predictions(
    records: Sequence[Record], rows: Sequence[Row], seed: int, sampled: bool = False
) -> list[Prediction]:
    """For every arm that chose its width, by domain, MEAN last. rows: from `summarise`; seed, sampled: as for it.

    Empty without AR and a swept width to compare with.
    """
    cells = _cells(records)
    speedups = {(row.domain, row.arm): row.prompt_speedup and row.prompt_speedup.mean for row in rows}
    speedups |= {(row.domain, "ar"): 1.0 for row in rows}
    domains = list(dict.fromkeys(record.domain for record in records))
    arms = list(dict.fromkeys(arm for _, arm in cells))
    swept = [arm for arm in arms if arm == "ar" or chosen_width(arm).isdigit()]
    if "ar" not in swept or len(swept) < 2 or None in speedups.values():
        return []
    return [
        _prediction(domain, arm, domains if domain == MEAN else [domain], swept, cells, speedups, seed, sampled)
        for domain in [*domains, MEAN]
        for arm in arms
        if chosen_width(arm) in ("auto", "round")
    ]


def _prediction(
    domain: str,
    arm: str,
    members: Sequence[str],
    swept: Sequence[str],
    cells: Cells,
    speedups: dict[tuple[str, str], float],
    seed: int,
    sampled: bool,
) -> Prediction:
    """members: the domains that `domain` stands for; speedups: by domain and arm."""
    oracle = max(swept, key=lambda rival: speedups[domain, rival])
    widths = [N for member in members for record in cells[member, arm] for N in record.output.widths]

    def gap(reference: Sequence[Record], best: Sequence[Record], own: Sequence[Record]) -> float | None:
        speeds = [repeat_ratio(reference, records, sampled) for records in (best, own)]
        return None if None in speeds else 100 * (speeds[0] - speeds[1])

    def gaps(reference: str) -> Estimate | None:
        """By prompt: in a speedup over AR or, as the "minus 1" cancels, in a gain over DFlash."""
        names = reference, oracle, arm
        found = [per_prompt(gap, *(cells.get((member, each), []) for each in names)) for member in members]
        return bootstrap(found, seed)

    gain_gap = gaps("dflash")
    return Prediction(
        domain,
        arm,
        width=usual_width(widths),
        drafted=sum(N > 0 for N in widths) / len(widths),
        speedup=speedups[domain, arm],
        oracle=oracle,
        oracle_speedup=speedups[domain, oracle],
        gap=gaps("ar"),
        gain_gap=gain_gap and gain_gap.mean,
    )


def usual_width(widths: Sequence[int]) -> int:
    """N of most rounds that drafted; 0, AR, if none did."""
    return statistics.mode([N for N in widths if N > 0] or [0])


def chosen_width(arm: str) -> str:
    """What follows "N=" in an arm's name: a number, "auto", "round", or nothing."""
    return arm.partition(" N=")[2]


def over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def record_ms(records: Sequence[Record], timer: str = "decode_seconds") -> float | None:
    """The paper's t, of all answers together."""
    return ms_per_token([record.output for record in records], timer)


def round_ms(records: Sequence[Record]) -> float | None:
    seconds = sum(record.output.decode_seconds for record in records)
    return over(seconds * 1e3, sum(len(record.output.round_lengths) for record in records))


def mean_committed(records: Sequence[Record]) -> float | None:
    """Mean R over all rounds."""
    lengths = [length for record in records for length in record.output.round_lengths]
    return statistics.fmean(lengths) if lengths else None


def per_prompt(figure: Callable[..., float | None], *arms: Sequence[Record]) -> Tensor:
    """(prompts,) float64: a figure of each prompt's records, which it gets arm by arm, repeats together.

    A prompt without such a figure is left out: an answer that ended with its first token has no rounds.
    """

    def by_prompt(records: Sequence[Record]) -> dict[int, list[Record]]:
        groups: dict[int, list[Record]] = {}
        for record in records:
            groups.setdefault(record.prompt, []).append(record)
        return groups

    groups = [by_prompt(records) for records in arms]
    shared = [prompt for prompt in groups[-1] if all(prompt in group for group in groups)]
    values = [figure(*(group[prompt] for group in groups)) for prompt in shared]
    return torch.tensor([value for value in values if value is not None], dtype=torch.float64)


def prompt_ratios(
    reference: Sequence[Record], own: Sequence[Record], sampled: bool, timer: str = "decode_seconds"
) -> Tensor:
    """(prompts,) float64: each prompt's ms a token by `reference` over that by `own`, see `repeat_ratio`."""
    return per_prompt(lambda *both: repeat_ratio(*both, sampled, timer), reference, own)


def repeat_ratio(
    reference: Sequence[Record], own: Sequence[Record], sampled: bool, timer: str = "decode_seconds"
) -> float | None:
    """One prompt's ratio: the median of its repeats' ratios, or their mean if they are sampled.

    A repeat whose answer ended with its first token has no ratio; with another seed it may have one.
    """
    theirs = {record.repeat: record for record in reference}
    pairs = [(theirs[record.repeat], record) for record in own if record.repeat in theirs]
    found = (over(*(record_ms([record], timer) for record in pair)) for pair in pairs)
    ratios = [ratio for ratio in found if ratio is not None]
    average = statistics.fmean if sampled else statistics.median
    return average(ratios) if ratios else None


def spread(pairs: Sequence[tuple[Sequence[Record], Sequence[Record]]], less: float = 0.0) -> Spread | None:
    """Each repeat's pooled ratio of ms a token, minus `less`, averaged over domains. None if there is only one repeat.

    pairs: by domain, the reference's records and the arm's own
    """
    ratios = []
    for repeat in dict.fromkeys(record.repeat for _, own in pairs for record in own):
        times = [
            [record_ms([record for record in records if record.repeat == repeat]) for records in pair]
            for pair in pairs
        ]
        ratios.append([over(*both) for both in times])
    if len(ratios) < 2 or any(None in domains for domains in ratios):
        return None
    figures = [statistics.fmean(domains) - less for domains in ratios]
    return Spread(statistics.fmean(figures), min(figures), max(figures))


def committed_differences(reference: Sequence[Record], own: Sequence[Record]) -> Tensor:
    """(prompts,) float64: each prompt's R by `own` minus that by `reference`."""

    def difference(theirs: Sequence[Record], ours: Sequence[Record]) -> float | None:
        lengths = mean_committed(theirs), mean_committed(ours)
        return None if None in lengths else lengths[1] - lengths[0]

    return per_prompt(difference, reference, own)


def bootstrap(figures: Sequence[Tensor], seed: int) -> Estimate | None:
    """The mean of the domains' means, resampling prompts within each. figures: (prompts,) for each domain"""
    if not all(len(values) for values in figures):
        return None
    mean = statistics.fmean(values.mean().item() for values in figures)
    if min(map(len, figures)) < 2:
        return Estimate(mean, None, None)
    generator = torch.Generator().manual_seed(seed)
    means = []
    for values in figures:
        drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
        means.append(values[drawn].mean(1))  # (RESAMPLES,)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.stack(means).mean(0).quantile(ends).tolist()
    return Estimate(mean, low, high)


def summary(record: Record) -> dict:
    """A record for JSON, with counts in place of tokens and rounds; widths stay if the decoder chose them."""
    output = asdict(record.output)
    widths = output.pop("widths")
    counts = {"tokens": len(output.pop("token_ids")), "rounds": len(output.pop("round_lengths"))}
    if chosen_width(record.arm) in ("auto", "round"):
        counts["widths"] = widths
    return asdict(record) | {"output": counts | output}


def comparison(records: Sequence[Record]) -> list[dict]:
    """Answers to one prompt, for JSON; speedups are over the first."""
    return [
        asdict(record)
        | {
            "ms_per_token": record_ms([record]),
            "mean_committed_per_round": mean_committed([record]),
            "speedup": over(record_ms(records[:1]), record_ms([record])),
        }
        for record in records
    ]


def comparison_lines(records: Sequence[Record]) -> Iterator[str]:
    """Answers to one prompt, for people; speedups are over the first."""
    if not records:
        return
    first = records[0]
    yield f"{'method':12} {'tokens':>6} {'ms/token':>9} {'R':>6} {'speedup':>8}  tokens against {first.arm}'s"
    for record in records:
        verdict = "equal" if record.output.token_ids == first.output.token_ids else "not comparable"
        if record.departure:
            verdict = describe(record.departure)
        speedup = two_decimals(over(record_ms([first]), record_ms([record])))
        ms, R = two_decimals(record_ms([record])), two_decimals(mean_committed([record]))
        yield f"{record.arm:12} {len(record.output.token_ids):6} {ms:>9} {R:>6} {speedup:>8}  {verdict}"


def describe(departure: Departure) -> str:
    return (
        f"token {departure.position} is {departure.got}, not {departure.expected}; the top-two gap there is "
        f"{departure.gap:.2g}"
    )


def located(record: Record) -> str:
    """A departure and where it happened."""
    return f"{record.arm}, {record.domain} prompt {record.prompt}: {describe(record.departure)}"


def speed_table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    heads = (
        "domain", "method", "ms/token", "wall ms/token", "R", "break-even R",
        "speedup over AR, pooled", "speedup over AR, mean of prompts",
        "by wall time, pooled", "by wall time, mean of prompts",
    )
    yield from markdown(heads, [
        [
            row.domain,
            row.arm,
            two_decimals(row.ms_per_token),
            two_decimals(row.wall_ms_per_token),
            two_decimals(row.R),
            two_decimals(row.break_even),
            two_decimals(row.speedup),
            str(row.prompt_speedup or ""),
            two_decimals(row.wall_speedup),
            str(row.wall_prompt_speedup or ""),
        ]
        for row in rows
    ])


def gain_table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: trees against the chain; none without DFlash to compare with."""
    found = [row for row in rows if row.prompt_gain or row.R_difference]
    if not found:
        return
    yield from markdown(
        ("domain", "method", "gain over DFlash, pooled", "gain over DFlash, mean of prompts",
         "R - R of DFlash, mean of prompts"),
        [
            [row.domain, row.arm, two_decimals(row.gain), str(row.prompt_gain or ""), str(row.R_difference or "")]
            for row in found
        ],
    )
    yield ""


def shape_table(rows: Sequence[Row], depth: int) -> Iterator[str]:
    """Lines of Markdown: what shape alone gains, N = L nodes as a tree or as a chain (paper, Table 9).

    depth: L. No lines if the run lacks one of the two.
    """
    arms = {(row.domain, row.arm): row for row in rows}
    found = [(row, arms.get((row.domain, "dflash"))) for row in rows if row.arm == f"cast N={depth}"]
    if not found or None in (chain for _, chain in found):
        return
    yield from markdown(
        ("domain", f"{depth + 1} packed rows", "R of DFlash", "R", "ms/token of DFlash", "ms/token",
         "shape gain, pooled", "shape gain, mean of prompts"),
        [
            [
                tree.domain, tree.arm, two_decimals(chain.R), two_decimals(tree.R), two_decimals(chain.ms_per_token),
                two_decimals(tree.ms_per_token), two_decimals(tree.gain), str(tree.prompt_gain or ""),
            ]
            for tree, chain in found
        ],
    )
    yield ""


def repeat_table(rows: Sequence[Row], repeats: str) -> Iterator[str]:
    """Lines of Markdown: how far apart repeats are; none if there is only one. repeats: what to call them"""
    found = [row for row in rows if row.repeat_speedup or row.repeat_gain]
    if not found:
        return

    def cells(spread: Spread | None) -> list[str]:
        return [two_decimals(spread.mean), f"{spread.low:.2f} to {spread.high:.2f}"] if spread else ["", ""]

    heads = [f"{figure}, {what}" for figure in ("speedup over AR", "gain over DFlash")
             for what in (f"pooled, mean of {repeats}", f"range over {repeats}")]
    yield from markdown(
        ("domain", "method", *heads),
        [[row.domain, row.arm, *cells(row.repeat_speedup), *cells(row.repeat_gain)] for row in found],
    )
    yield ""


def prediction_table(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Lines of Markdown."""
    heads = (
        "domain", "method", "predicted N", "rounds drafted", "speedup over AR, mean of prompts", "oracle",
        "its speedup, mean of prompts", "gap, points", "gap in gain over DFlash",
    )
    yield from markdown(heads, [
        [
            each.domain,
            each.arm,
            str(each.width or "0 (AR)"),
            f"{each.drafted:.0%}",
            two_decimals(each.speedup),
            each.oracle,
            two_decimals(each.oracle_speedup),
            str(each.gap or ""),
            two_decimals(each.gain_gap),
        ]
        for each in predictions
    ])


def difference_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Whether trees commit more a round than the chain, by the interval over all domains."""
    for row in rows:
        found = row.R_difference
        if row.domain == MEAN and found and found.low is not None:
            low, high = round(found.low, 2), round(found.high, 2)  # as they are shown
            verdict = "lies above 0" if low > 0 else "lies below 0" if high < 0 else "contains 0"
            yield f"R of {row.arm} less R of dflash, over all prompts: {found}, an interval that {verdict}"


def two_decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
