"""From measured answers to figures: ms a token, R, speedup, gain, intervals, tables (paper, Appendix D).

Definitions are the paper's. ms a token, t, is decoding time over new tokens, of a domain's prompts together;
speedup is t_AR / t, gain t_DFlash / t - 1, and an average is the mean of the domains' ratios. A prompt's own
ratio is of its means over repeats; the mean of those has a 95 % interval from a bootstrap that resamples
prompts, so that a prompt's two times stay together.

It is arithmetic on records: it decodes nothing and reads no clock.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from minicast.decode import Output

RESAMPLES = 10_000
MEAN = "mean"  # stands for the domain in the row of averages


@dataclass(frozen=True)
class Departure:
    """Where an answer leaves the reference answer.

    Attributes:
        position: index of the first other token in the answer
        expected, got: the tokens there; None where an answer has ended
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
        arm: the competitor's name: a method, with its width
        domain, prompt, repeat: prompt is an index into the run's prompts
        prompt_tokens: their number
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
    """A mean over prompts and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Row:
    """An arm in a domain, or, with MEAN for the domain, the means of its rows. None: nothing to divide by.

    Attributes:
        ms_per_token: the paper's t; wall_ms_per_token: the same with the time from prompt to last token
        R: tokens committed a round
        round_ms: decoding time over rounds
        break_even: R at which a round would only just pay: its time in AR steps
        speedup, wall_speedup: AR's ms a token over this one's, by either time
        prompt_speedup: the mean of the prompts' speedups
        gain, prompt_gain: DFlash's ms a token over this one's, less 1
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
    gain: float | None = None
    prompt_gain: Estimate | None = None


Cells = dict[tuple[str, str], list[Record]]  # by domain and arm


def summarise(records: Sequence[Record], seed: int) -> list[Row]:
    """The rows of the table by domain and arm, in the records' order; the averages last."""
    cells: Cells = {}
    for record in records:
        cells.setdefault((record.domain, record.arm), []).append(record)
    rows = [_row(domain, arm, cells, seed) for domain, arm in cells]
    return rows + [_mean_row(arm, rows, cells, seed) for arm in dict.fromkeys(arm for _, arm in cells)]


def _row(domain: str, arm: str, cells: Cells, seed: int) -> Row:
    own = cells[domain, arm]
    ar, dflash = _rival(cells, domain, arm, "ar"), _rival(cells, domain, arm, "dflash")
    gain = over(ms_per_token(dflash), ms_per_token(own))
    return Row(
        domain,
        arm,
        R=committed(own),
        ms_per_token=ms_per_token(own),
        wall_ms_per_token=ms_per_token(own, "wall_seconds"),
        round_ms=round_ms(own),
        break_even=over(round_ms(own), round_ms(ar)),
        speedup=over(ms_per_token(ar), ms_per_token(own)),
        wall_speedup=over(ms_per_token(ar, "wall_seconds"), ms_per_token(own, "wall_seconds")),
        prompt_speedup=bootstrap([prompt_ratios(ar, own)], seed),
        gain=None if gain is None else gain - 1,
        prompt_gain=bootstrap([prompt_ratios(dflash, own) - 1], seed),
    )


def _mean_row(arm: str, rows: Sequence[Row], cells: Cells, seed: int) -> Row:
    own = [row for row in rows if row.arm == arm]

    def mean(name: str) -> float | None:
        values = [getattr(row, name) for row in own]
        return None if None in values else statistics.fmean(values)

    def ratios(reference: str) -> list[Tensor]:
        return [
            prompt_ratios(_rival(cells, row.domain, arm, reference), cells[row.domain, arm]) for row in own
        ]

    return Row(
        MEAN,
        arm,
        R=mean("R"),
        break_even=mean("break_even"),
        speedup=mean("speedup"),
        wall_speedup=mean("wall_speedup"),
        prompt_speedup=bootstrap(ratios("ar"), seed),
        gain=mean("gain"),
        prompt_gain=bootstrap([values - 1 for values in ratios("dflash")], seed),
    )


def _rival(cells: Cells, domain: str, arm: str, reference: str) -> list[Record]:
    """The reference's records, where `arm` is measured against it: never against itself, nor AR at all."""
    return [] if arm in ("ar", reference) else cells.get((domain, reference), [])


def over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def ms_per_token(records: Sequence[Record], timer: str = "decode_seconds") -> float | None:
    """Time over emitted tokens, of all answers together."""
    seconds = sum(getattr(record.output, timer) for record in records)
    return over(seconds * 1e3, sum(len(record.output.token_ids) for record in records))


def round_ms(records: Sequence[Record]) -> float | None:
    seconds = sum(record.output.decode_seconds for record in records)
    return over(seconds * 1e3, sum(len(record.output.round_lengths) for record in records))


def committed(records: Sequence[Record]) -> float | None:
    """Mean R over all rounds."""
    lengths = [length for record in records for length in record.output.round_lengths]
    return statistics.fmean(lengths) if lengths else None


def prompt_ratios(reference: Sequence[Record], own: Sequence[Record]) -> Tensor:
    """(prompts,) float64: each prompt's ms a token by `reference` over that by `own`, means over repeats.

    A prompt whose answer ended with its first token has no decoding time, and is left out.
    """

    def by_prompt(records: Sequence[Record]) -> dict[int, list[Record]]:
        groups: dict[int, list[Record]] = {}
        for record in records:
            groups.setdefault(record.prompt, []).append(record)
        return groups

    theirs, ours = by_prompt(reference), by_prompt(own)
    shared = [prompt for prompt in ours if prompt in theirs]
    ratios = [over(ms_per_token(theirs[prompt]), ms_per_token(ours[prompt])) for prompt in shared]
    return torch.tensor([ratio for ratio in ratios if ratio is not None], dtype=torch.float64)


def bootstrap(ratios: Sequence[Tensor], seed: int) -> Estimate | None:
    """The mean of the domains' means, resampling prompts within each. ratios: (prompts,) of each domain."""
    if not all(len(values) for values in ratios):
        return None
    generator = torch.Generator().manual_seed(seed)
    means = []
    for values in ratios:
        drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
        means.append(values[drawn].mean(1))  # (RESAMPLES,)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.stack(means).mean(0).quantile(ends).tolist()
    return Estimate(statistics.fmean(values.mean().item() for values in ratios), low, high)


def comparison(records: Sequence[Record]) -> list[dict]:
    """Answers to one prompt, for JSON; speedups are over the first."""
    return [
        asdict(record)
        | {
            "ms_per_token": ms_per_token([record]),
            "mean_committed_per_round": committed([record]),
            "speedup": over(ms_per_token(records[:1]), ms_per_token([record])),
        }
        for record in records
    ]


def comparison_lines(records: Sequence[Record]) -> Iterator[str]:
    """Answers to one prompt, for people; speedups are over the first."""
    first = records[0]
    yield f"{'method':12} {'tokens':>6} {'ms/token':>9} {'R':>6} {'speedup':>8}  tokens against {first.arm}'s"
    for record in records:
        verdict = "equal" if record.output.token_ids == first.output.token_ids else "not comparable"
        if record.departure:
            verdict = describe(record.departure)
        speedup = number(over(ms_per_token([first]), ms_per_token([record])))
        ms, R = number(ms_per_token([record])), number(committed([record]))
        yield f"{record.arm:12} {len(record.output.token_ids):6} {ms:>9} {R:>6} {speedup:>8}  {verdict}"


def describe(departure: Departure) -> str:
    return (
        f"token {departure.position} is {departure.got}, not {departure.expected}; the top-two gap there is "
        f"{departure.gap:.2g}"
    )


def located(record: Record) -> str:
    """A departure and where it happened."""
    return f"{record.arm}, {record.domain} prompt {record.prompt}: {describe(record.departure)}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    heads = (
        "domain", "method", "ms/token", "wall ms/token", "R", "break-even R",
        "speedup over AR", "by wall time", "mean of prompts", "gain over DFlash", "mean of prompts",
    )
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|" + "---:|" * (len(heads) - 2)
    for row in rows:
        cells = [
            row.domain,
            row.arm,
            number(row.ms_per_token),
            number(row.wall_ms_per_token),
            number(row.R),
            number(row.break_even),
            number(row.speedup),
            number(row.wall_speedup),
            str(row.prompt_speedup or ""),
            number(row.gain),
            str(row.prompt_gain or ""),
        ]
        yield f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
