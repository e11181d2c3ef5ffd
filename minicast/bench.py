"""Time methods against each other on prompts of several domains (paper, Appendix D).

    python -m minicast.bench --prompts FILE... --methods ar,dflash,cast --widths 7,15,auto

All methods run in one loop on every prompt, in random order, caches empty before each, and their tokens are
compared, sampled ones too: the same seed gives the same text by every method. Reported are the paper's
decode-only time, beside it the wall time from prompt to last token, and the streaming floor of this machine,
measured in the same run. A killed run goes on where it was.

The clocks of an answer are in `minicast.decode`, the definitions of the figures in `minicast.figures`.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from minicast.command import DTYPES, Choice, Placement, at_least, guarded
from minicast.decode import Decoder, Options, Output
from minicast.figures import (
    Departure,
    Prediction,
    Record,
    Row,
    difference_lines,
    located,
    prediction_table,
    predictions,
    round_ms,
    summarise,
    summary,
    table,
)
from minicast.methods import METHODS
from minicast.sampling import gumbel_noise, shape_logits
from minicast.tree import ranked_tree
from minicast.width import MAX_WIDTH
from model.errors import UsageError, UserError
from model.linear import Linear
from model.transformer import Target

PROMPTS = Path(__file__).parent / "prompts.jsonl"
PROMPT_FIELDS = ("prompt", "question", "text", "problem")
NEAR_TIE = 1e-3  # largest top-two gap that rounding may flip in float32; a departure at a larger one is a bug
WARM_UP_TOKENS = 16
SAMPLING = ("temperature", "top_k", "top_p", "seed")


# What is run

@dataclass(frozen=True)
class Arm:
    """One competitor: a method, and for "cast" the width N, "auto" or "round"."""

    method: str
    width: int | str = 0

    def __str__(self) -> str:
        return f"cast N={self.width}" if self.method == "cast" else self.method


@dataclass(frozen=True)
class Prompt:
    domain: str
    text: str


def read_prompts(files: Sequence[Path], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each domain. A line's domain is its `domain`, else the file's name."""
    prompts, counts = [], {}
    for file in files:
        for number, line in enumerate(_read_lines(file), start=1):
            if not line.strip():
                continue
            text, domain = _read_prompt(line, f"{file}:{number}")
            domain = domain or file.stem
            counts[domain] = counts.get(domain, 0) + 1
            if limit is None or counts[domain] <= limit:
                prompts.append(Prompt(domain, text))
    if not prompts:
        raise UsageError("--prompts holds no prompts")
    return prompts


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"cannot read {file}: {reason}") from error


def _read_prompt(line: str, where: str) -> tuple[str, str | None]:
    """The text and the domain, if it names one, of a JSON line."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: a prompt file has one JSON object a line") from error
    if isinstance(values, dict):
        turns = values.get("turns")
        first = turns[:1] if isinstance(turns, list) else []
        for text in [values.get(name) for name in PROMPT_FIELDS] + first:
            if isinstance(text, str):
                return text, values.get("domain")
    raise UserError(f"{where} has no prompt: none of {', '.join(PROMPT_FIELDS)} or turns")


# Measuring answers

def measure(decoder: Decoder, arm: Arm, prompt_ids: Sequence[int], options: dict) -> Output:
    """One answer from empty caches."""
    decoder.reset()
    return decoder.generate(prompt_ids, method=arm.method, width=arm.width, **options)


def warm_up(decoder: Decoder, arms: Sequence[Arm], prompt_ids: Sequence[int], options: dict) -> None:
    """A few untimed tokens of each arm: the first products of a shape cost more than later ones."""
    for arm in arms:
        measure(decoder, arm, prompt_ids, options | {"max_new_tokens": WARM_UP_TOKENS})


def contest(
    decoder: Decoder,
    arms: Sequence[Arm],
    prompt_ids: Sequence[int],
    options: dict,
    order: Sequence[Arm] | None = None,
    domain: str = "",
    prompt: int = 0,
    repeat: int = 0,
) -> list[Record]:
    """Every arm on one prompt, run in `order`; records in that of `arms`, tokens compared with the first's.

    domain, prompt and repeat are only noted.
    """
    outputs = {arm: measure(decoder, arm, prompt_ids, options) for arm in order or arms}
    reference = outputs[arms[0]].token_ids
    return [
        Record(
            str(arm), domain, prompt, repeat, len(prompt_ids), outputs[arm],
            first_departure(decoder.target, prompt_ids, reference, outputs[arm].token_ids, options),
        )
        for arm in arms
    ]


def first_departure(
    target: Target, prompt_ids: Sequence[int], reference: list[int], answer: list[int], options: dict
) -> Departure | None:
    """Where `answer` leaves `reference`; `options` tell how tokens were chosen.

    The stochastic verifier draws from the same law, not the same tokens: its samples are not compared.
    """
    params = Options(**options).sampling
    if answer == reference or (not params.greedy and options.get("verifier") == "stochastic"):
        return None
    shared = 0
    while shared < min(len(reference), len(answer)) and reference[shared] == answer[shared]:
        shared += 1
    expected, got = [tokens[shared] if shared < len(tokens) else None for tokens in (reference, answer)]
    prefix = [*prompt_ids, *reference[:shared]]
    scores = target.score(prefix)[0][-1:]  # (1, V)
    if not params.greedy:
        position = torch.tensor([len(prefix)], device=scores.device)
        scores = shape_logits(scores, params) + gumbel_noise(params.seed, position, scores.shape[1])
    best, second = scores[0].float().topk(2).values.tolist()
    return Departure(shared, expected, got, best - second)


def is_failure(departure: Departure | None, dtype: torch.dtype) -> bool:
    """Whether rounding cannot explain this departure. In half precision it explains more: never a failure."""
    return departure is not None and dtype == torch.float32 and departure.gap > NEAR_TIE


class Journal:
    """Finished prompts on disk, a line each, so that a killed run goes on where it was.

    The first line holds the settings: only a run with the same ones continues. A line that the kill cut short
    is dropped. Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, settings: dict):
        self.path = path
        self.records: list[Record] = []
        if path is None:
            return
        settings = json.loads(json.dumps(settings))  # as they come back from the file
        complete = []
        if path.exists():
            *complete, _ = path.read_bytes().split(b"\n")
        if not complete:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(settings) + "\n")
            return
        lines = [json.loads(line) for line in complete]
        if lines[0] != settings:
            raise UsageError(f"{path} is of an unfinished run with other settings: delete it or change --out")
        self.records = [Record.from_json(values) for line in lines[1:] for values in line]
        os.truncate(path, sum(len(line) + 1 for line in complete))

    def append(self, records: Sequence[Record]) -> None:
        self.records += records
        if self.path is None:
            return
        with open(self.path, "ab") as file:
            file.write(json.dumps([asdict(record) for record in records]).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Whoever reads `path` sees the old file or the whole new one."""
    partial_file = path.with_name(path.name + ".part")
    partial_file.write_text(text, encoding="utf-8")
    os.replace(partial_file, path)


def run_prompts(
    decoder: Decoder,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    repeats: int,
    seed: int,
    options: dict,
    journal: Journal,
) -> None:
    """Measure what the journal does not hold yet. prompt_ids: the prompts, encoded.

    Each repeat samples with a seed of its own.
    """
    finished = {(record.repeat, record.prompt) for record in journal.records}
    bar = tqdm(total=repeats * len(prompts), unit="prompt", file=sys.stderr, disable=None)
    bar.update(len(finished))
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            if (repeat, index) in finished:
                continue
            bar.set_description(prompt.domain)
            order = list(arms)
            random.Random(f"{seed} {repeat} {index}").shuffle(order)
            where = (prompt.domain, index, repeat)
            seeded = options | {"seed": seed + repeat}
            journal.append(contest(decoder, arms, prompt_ids[index], seeded, order, *where))
            bar.update()
    bar.close()


# Measuring the machine and the parts

@dataclass(frozen=True)
class Floor:
    """No step can be faster than the weights stream from memory.

    Attributes:
        weight_bytes: what one step streams, in the layout the weights are held in
        weights: their number
        bytes_per_second: the best of several reads of as many bytes
    """

    weight_bytes: int
    weights: int
    bytes_per_second: float

    @property
    def ms(self) -> float:
        return self.weight_bytes / self.bytes_per_second * 1e3

    @property
    def ms_in_32_bits(self) -> float:
        """The floor of the same weights at four bytes each; layers hold them in two where nothing is lost."""
        return 4 * self.weights / self.bytes_per_second * 1e3


def measure_floor(target: Target, reads: int = 20) -> Floor:
    """Sum a buffer of the weights' size a few times. The fastest counts: the floor should not flatter."""
    layers = [module for module in target.modules() if isinstance(module, Linear)]
    weight_bytes = sum(layer.weight_bytes() for layer in layers)
    buffer = torch.ones(weight_bytes // 8, dtype=torch.int64, device=target.device)
    fastest = min(timed(buffer.sum, target.device) for _ in range(reads))
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    return Floor(weight_bytes, weights, weight_bytes / fastest)


def timed(run, device: torch.device) -> float:
    """Seconds that `run()` takes."""
    started = clock(device)
    run()
    return clock(device) - started


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Share:
    """Where the time of an answer's rounds went, in seconds.

    Attributes:
        target, head: inside the passes of the target, any use of its LM head included, and of the draft head
        total: of all rounds, the first draft included
    """

    target: float = 0.0
    head: float = 0.0
    total: float = 0.0

    @property
    def outside(self) -> float:
        """Share of the time that is spent in no model: trees, packing, walking, gathering, bookkeeping."""
        return 1 - (self.target + self.head) / self.total


def measure_share(decoder: Decoder, arm: Arm, prompt_ids: Sequence[int], options: dict) -> Share:
    """Answer once with a clock around every call of a model. On a GPU the clock waits: rounds are slower."""
    share, device = Share(), decoder.target.device
    clocked = [(decoder.target, "target", ("forward", "logits"))]
    if decoder.draft:
        clocked.append((decoder.draft, "head", ("forward", "extend")))
    decoder.reset()
    with clocks(clocked, share, device):
        for step in decoder.stream(prompt_ids, method=arm.method, width=arm.width, **options):
            if step.prefill:
                share.target = share.head = 0.0
                started = clock(device)
    share.total = clock(device) - started
    return share


@contextmanager
def clocks(clocked, share: Share, device: torch.device):
    """While open, add up time inside methods in fields of `share`; clocked is [(module, field, names)]."""

    def wrap(function, field_name):
        def run(*arguments):
            started = clock(device)
            try:
                return function(*arguments)
            finally:
                setattr(share, field_name, getattr(share, field_name) + clock(device) - started)

        return run

    for module, field_name, names in clocked:
        for name in names:
            setattr(module, name, wrap(getattr(module, name), field_name))
    try:
        yield
    finally:
        for module, _, names in clocked:
            for name in names:
                delattr(module, name)  # the instance's; the class's shows again


def measure_tree_builder(width: int = 127, depth: int = 15, ranks: int = 8, builds: int = 200) -> float:
    """Milliseconds of one best-first tree from ranked lists (depth, ranks), the median."""
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(builds):
        logits = 2 * torch.randn(depth, 1000, generator=generator)
        log_q, tokens = logits.log_softmax(-1).topk(ranks)
        times.append(timed(partial(ranked_tree, tokens, log_q, width), log_q.device))
    return statistics.median(times) * 1e3


# The report

@dataclass
class Report:
    """All that a run found.

    Attributes:
        settings: what decides the records
        environment: what they were measured on, and how to measure them again
        ar_over_floor: an AR step over the streaming floor; None without "ar"
        outside_share: by arm, the part of a round spent in no model, see `Share`
        tree_builder_ms: see `measure_tree_builder`
        predictions: of the arms that chose their own width, beside the widths swept
        failures: departures that rounding does not explain, for people
    """

    settings: dict
    environment: dict
    floor: Floor
    ar_over_floor: float | None
    outside_share: dict[str, float]
    tree_builder_ms: float
    rows: list[Row]
    predictions: list[Prediction]
    records: list[Record]
    failures: list[str]

    def to_json(self) -> str:
        """Everything but tokens and rounds one by one; an answer a line."""
        values = asdict(replace(self, records=[]))
        values["floor"] |= {"ms": self.floor.ms, "ms_in_32_bits": self.floor.ms_in_32_bits}
        del values["records"]
        records = ",\n  ".join(json.dumps(summary(record)) for record in self.records)
        return json.dumps(values, indent=1).removesuffix("\n}") + f',\n "records": [\n  {records}\n ]\n}}\n'

    def to_markdown(self) -> str:
        lines = [*table(self.rows), ""]
        if self.predictions:
            lines += [*prediction_table(self.predictions), ""]
        return "\n".join([*lines, *(f"- {line}" for line in self.notes())]) + "\n"

    def notes(self) -> Iterator[str]:
        yield from self.text_lines()
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
        yield f"best-first tree, 127 nodes, depth 15, 8 ranks: {self.tree_builder_ms:.3f} ms without ranking"
        yield (
            "ms a token: decoding time over new tokens; the clock opens after prefill and, where something "
            "is drafted, after the first draft; speedup t_AR / t, gain t_DFlash / t - 1. Mean of prompts: of "
            "their own ratios, with a 95 % bootstrap interval. The mean row averages the domains' ratios. "
            "Break-even: the R at which a round would only just pay. R - R of DFlash: mean over prompts of "
            "the difference, with such an interval"
        )
        if self.predictions:
            yield (
                "predicted N: of most rounds that drafted. Oracle: the fastest of the fixed widths swept, "
                "AR being N = 0. Gap: how far the oracle is ahead, in points, hundredths of a speedup over "
                "AR or of a gain over DFlash; mean of prompts as above"
            )
        for name, value in self.environment.items():
            yield f"{name}: {value}"

    def text_lines(self) -> Iterator[str]:
        """How tokens were chosen, and whether all arms gave the same."""
        options, (reference, *others) = self.settings["options"], self.settings["arms"]
        if options["temperature"] > 0:
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
    """What a reader needs to judge a figure and to measure it again; commit: as the run began."""
    device = placement.device
    return {
        "command": shlex.join(["python", "-m", "minicast.bench", *command]),
        "commit": commit,
        "weights": source,
        "dtype": str(placement.dtype).removeprefix("torch."),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}",
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            lines = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        lines = []
    return f"{lines[0] if lines else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of this code, marked where files differ from it."""

    def git(*command: str) -> str:
        git_here = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(git_here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# The command line

def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def methods(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(METHODS) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(METHODS)}, got {text}")
        return names

    def widths(text: str) -> list[int | str]:
        values = [name if name in ("auto", "round") else int(name) for name in text.split(",")]
        in_range = all(1 <= N <= MAX_WIDTH for N in values if isinstance(N, int))
        if not in_range or len(set(values)) < len(values):
            rule = f"auto, round or from 1 to {MAX_WIDTH}, each once"
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")
        return values

    parser = argparse.ArgumentParser(prog="python -m minicast.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", type=Path, default=[PROMPTS], metavar="FILE",
                        help="JSONL with prompt, question, text, problem or turns; a line's domain is its "
                        "own, else the file's name; default: a small set of our own")
    parser.add_argument("--limit", type=at_least(1), metavar="K", help="only a domain's first K prompts")
    parser.add_argument("--methods", type=methods, default=list(METHODS), help="default: ar,dflash,cast")
    parser.add_argument("--width", "--widths", dest="widths", type=widths, default=[15], metavar="N,N,...",
                        help="of cast, an arm each: numbers, auto (one that pays on this machine) or round "
                        "(one for each round); default: 15")
    parser.add_argument("--max-new-tokens", type=at_least(2), default=128, help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), default=1, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--verifier", choices=("direct", "stochastic"), default="direct", help="for T > 0")
    parser.add_argument("--seed", type=at_least(0), default=0,
                        help="of samples (each repeat adds 1), the methods' order and the bootstrap")
    parser.add_argument("--model", help="directory, hub id or known name")
    parser.add_argument("--draft-model", help="likewise; default: the head known for the target")
    parser.add_argument("--draft-vocabulary", type=at_least(1), metavar="V", help="tokens the head scores; default: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--attention", help="sdpa, static or flex; default: what the device runs best")
    parser.add_argument("--eager", action="store_true", help="on a GPU: compile and capture nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json",
                        help="write everything there, and the table beside it")
    parser.add_argument("--gpu-check", action="store_true",
                        help="instead of prompts: measure a GPU with random weights; --out is a directory")
    parser.add_argument("--shape", default="qwen3-8b", help="of --gpu-check; tiny rehearses it on any device")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return guarded("bench", lambda: run(arguments, sys.argv[1:] if argv is None else argv))


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    if arguments.gpu_check:
        from minicast import gpu_check

        return gpu_check.main(arguments)
    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "verifier", *SAMPLING)}
    Options(**options)  # before anything is loaded
    prompts = read_prompts(arguments.prompts, arguments.limit)
    arms = [
        Arm(method, width)
        for method in arguments.methods
        for width in (arguments.widths if method == "cast" else [0])
    ]
    placement = Placement.choose(arguments.device, arguments.dtype)
    drafts = arguments.methods != ["ar"]
    choice = Choice.of(arguments.model, arguments.draft_model, placement.device, drafts)
    tokenizer = choice.tokenizer()
    prompt_ids = [tokenizer.encode_chat(prompt.text) for prompt in prompts]
    options["stop_ids"] = tokenizer.stop_ids
    settings = {
        "weights": choice.source(),
        "draft_vocabulary": arguments.draft_vocabulary,
        "placement": str(placement),
        "attention": arguments.attention,
        "eager": arguments.eager,
        "arms": [str(arm) for arm in arms],
        "prompts": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in arguments.prompts},
        "limit": arguments.limit,
        "repeats": arguments.repeats,
        "seed": arguments.seed,
        "options": options,
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }
    journal = Journal(arguments.out and arguments.out.with_suffix(".journal.jsonl"), settings)

    target, draft = choice.load(placement, arguments.draft_vocabulary)
    compile = False if arguments.eager else None
    decoder = Decoder(target, draft, compile=compile, attention=arguments.attention)
    warm_up(decoder, arms, prompt_ids[0], options)
    before = measure_floor(target)
    run_prompts(decoder, arms, prompts, prompt_ids, arguments.repeats, arguments.seed, options, journal)
    floor = min(before, measure_floor(target), key=lambda floor: floor.ms)

    autoregressive = [record for record in journal.records if record.arm == "ar"]
    failures = [record for record in journal.records if is_failure(record.departure, target.dtype)]
    rows = summarise(journal.records, arguments.seed)
    report = Report(
        settings,
        environment(placement, choice.source(), command, settings["commit"]),
        floor,
        round_ms(autoregressive) / floor.ms if autoregressive else None,
        {str(arm): measure_share(decoder, arm, prompt_ids[0], options).outside for arm in arms},
        measure_tree_builder(),
        rows,
        predictions(journal.records, rows, arguments.seed),
        journal.records,
        [located(record) for record in failures],
    )
    print(report.to_markdown(), end="")
    if arguments.out:
        write_atomically(arguments.out, report.to_json())
        write_atomically(arguments.out.with_suffix(".md"), report.to_markdown())
    journal.remove()
    for failure in report.failures:
        print(f"bench: rounding does not explain this: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
