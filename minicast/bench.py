"""Time methods against each other on prompts of several domains (paper, Appendix D).

    python -m minicast.bench --prompts FILE... --methods ar,dflash,cast --widths 7,15,auto

All methods run in one loop on every prompt, in random order, each with empty caches, and their tokens are compared,
sampled ones too: the same seed gives the same text by every method. On a shared machine let them take turns of a few
tokens (--turn). It reports the paper's decode-only time, the wall time from prompt to last token, and the streaming
floor of this machine, measured in the same run. A killed run resumes where it was.

An answer's clocks are in `minicast.answer`, the definitions of figures in `minicast.figures`, measurements of the
machine in `minicast.machine`, checks of the tokens in `minicast.audit`, tables in `minicast.report`.
"""

from minicast.program import (
    Parser, Unwritable, at_least, compile_flags, each_once, model_flags, sampling_flags, start,
)

start(__name__)  # before anything slow is imported

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from minicast import paper_probe
from minicast.audit import Audit, first_departure, is_failure
from minicast.command import Placement, guarded, note_idle_flags, note_no_effect
from minicast.answer import Output, Round
from minicast.decode import Decoder
from minicast.figures import Record, comparison, comparison_lines, located, over, predictions, round_ms, summarise
from minicast.machine import measure_floor, measure_share, measure_tree_builder
from minicast.methods import METHODS, UNSIZED
from minicast.probe import Costs, Deployment
from minicast.prompts import Question
from minicast.report import Report, commit, environment
from minicast.subject import HEAD, PREFIX, Subject
from minicast.width import MAX_WIDTH
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.files import check_file, digest, write_atomically
from model.random_weights import SHAPES
from model.transformer import Target

WARM_UP_TOKENS = 16
SAMPLING = ("temperature", "top_k", "top_p", "seed")


# What is run

@dataclass(frozen=True)
class Arm:
    """One competitor: a method with its width, N, "auto" or "round", if it takes one."""

    method: str
    width: int | str = 0

    def __str__(self) -> str:
        return self.method if self.method in UNSIZED else f"{self.method} N={self.width}"


# Measuring answers

def answer(decoder: Decoder, arm: Arm, prompt_ids: Sequence[int], options: dict) -> Iterator[Round]:
    """One answer from empty caches."""
    decoder.reset()
    yield from decoder.stream(prompt_ids, method=arm.method, width=arm.width, **options)


def measure_answer(decoder: Decoder, arm: Arm, prompt_ids: Sequence[int], options: dict) -> Output:
    """One answer from empty caches, to its end."""
    for _ in answer(decoder, arm, prompt_ids, options):
        pass
    return decoder.output


def race(
    decoders: dict[Arm, Decoder], prompt_ids: Sequence[int], options: dict, turn: int | None, draw: random.Random
) -> dict[Arm, Output]:
    """Every arm's answer, in random order; outputs in that of `decoders`.

    turn: tokens that an arm decodes before the next one's turn; each then needs its own decoder. What slows the
        machine for a second then slows all arms, and an arm's clock stops while others have their turn. The first
        round of a turn is a little slower, so make turns 16 tokens or so. None: a whole answer
    """
    running = {arm: answer(decoder, arm, prompt_ids, options) for arm, decoder in decoders.items()}
    outputs = {}
    while running:
        for arm in draw.sample(list(running), len(running)):
            tokens = 0
            for step in running[arm]:
                tokens += len(step.token_ids)
                if turn and tokens >= turn:
                    break
            else:
                outputs[arm] = decoders[arm].output
                del running[arm]
    return {arm: outputs[arm] for arm in decoders}


def warm_up(decoders: dict[Arm, Decoder], prompt_ids: Sequence[int], options: dict) -> None:
    """A few untimed tokens of each arm: the first products of a shape cost more than later ones.

    The widest goes first: smaller CUDA graphs can reuse the memory of larger ones.
    """

    def widest(arm: Arm) -> int:
        return arm.width if isinstance(arm.width, int) else MAX_WIDTH  # "auto" and "round" may go that far

    for arm in sorted(decoders, key=widest, reverse=True):
        measure_answer(decoders[arm], arm, prompt_ids, options | {"max_new_tokens": WARM_UP_TOKENS})


def check_compiled(decoders: Iterable[Decoder]) -> None:
    """UserError where layers that should be compiled ran uncompiled: their times would be another measurement."""
    for decoder in decoders:
        if decoder.state.body.compiled_layer and not decoder.state.compiled:
            raise UserError("layers did not compile, for the reason above: repair that, or measure them with --eager")


def compared(
    decoder: Decoder, outputs: dict[Arm, Output], prompt_ids: Sequence[int], options: dict, domain: str = "",
    prompt: int = 0, repeat: int = 0,
) -> list[Record]:
    """Records of one prompt's answers, tokens compared with the first's."""
    reference = next(iter(outputs.values())).token_ids
    return [
        Record(
            str(arm), domain, prompt, repeat, prompt_tokens=len(prompt_ids), output=output,
            departure=first_departure(decoder.target, prompt_ids, reference, output.token_ids, options),
        )
        for arm, output in outputs.items()
    ]


def show_comparison(
    decoder: Decoder, tokenizer, prompt_ids: Sequence[int], width: int | str, options: dict, screen, as_json: bool
) -> int:
    """All methods on one prompt, with this width if they take one: the text on the screen, then a line for each method;
    or JSON, figures only.

    Ctrl-C or an error ends it early: it shows what was finished, or else the text so far, and raises the error again.
    Returns the exit status: 1 if a method's text is wrong.
    """
    arms = [Arm(method, 0 if method in UNSIZED else width) for method in METHODS]
    outputs, ended = {}, None
    try:
        warm_up(dict.fromkeys(arms, decoder), prompt_ids, options)
        for arm in arms:
            outputs[arm] = measure_answer(decoder, arm, prompt_ids, options)
    except (KeyboardInterrupt, UserError) as error:
        ended = error
    records = compared(decoder, outputs, prompt_ids, options) if outputs else []
    if as_json:
        screen.write(json.dumps(comparison(records)) + "\n")
    else:
        screen.write(tokenizer.decode((records[0].output if records else decoder.output).token_ids))
        screen.end_line()
        for line in comparison_lines(records):
            screen.write(line + "\n")
    if ended:
        missing = ", ".join(str(arm) for arm in arms if arm not in outputs)
        print(f"run.py: stopped, not measured: {missing}", file=sys.stderr)
        raise ended
    return 1 if any(is_failure(record.departure, decoder.target.dtype) for record in records) else 0


class Journal:
    """Finished prompts on disk, a line each, so that a killed run resumes where it was.

    The first line holds the settings: only a run with the same settings resumes. A line cut short by the kill is
    dropped. Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, settings: dict):
        self.path = path
        self.records: list[Record] = []
        if path is None:
            return
        settings = json.loads(json.dumps(settings))  # as they will be read from the file
        complete = []
        if path.exists():
            *complete, _ = path.read_bytes().split(b"\n")
        if len(complete) < 2:  # nothing was finished
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(settings) + "\n")
            return
        try:
            found, *lines = map(json.loads, complete)
            found = dict(found)
            self.records = [Record.from_json(values) for line in lines for values in line]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{path} is damaged ({error}): delete it, and the run begins anew") from error
        if found != settings:
            other = ", ".join(name for name in {**found, **settings} if found.get(name) != settings.get(name))
            raise UsageError(f"{path} is of an unfinished run with other settings ({other}): delete it or change --out")
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


@dataclass(frozen=True)
class Plan:
    """Everything that decides what is run.

    Attributes:
        seed: of samples (each repeat adds 1), the arms' order and the bootstrap
        options: of `Decoder.stream`, without those that arm, question and repeat decide
        turn: see `race`
    """

    questions: list[Question]
    repeats: int
    seed: int
    options: dict
    turn: int | None = None

    def asked(self, index: int, repeat: int = 0) -> dict:
        """The options of a question's answers by all arms."""
        return self.options | {"max_new_tokens": self.questions[index].max_new_tokens, "seed": self.seed + repeat}


def run_plan(decoders: dict[Arm, Decoder], plan: Plan, journal: Journal) -> None:
    """Measure what the journal does not hold yet."""
    first = next(iter(decoders.values()))
    finished = {(record.repeat, record.prompt) for record in journal.records}
    with tqdm(total=plan.repeats * len(plan.questions), unit="prompt", file=sys.stderr, disable=None) as bar:
        bar.update(len(finished))
        for repeat in range(plan.repeats):
            for index, question in enumerate(plan.questions):
                if (repeat, index) in finished:
                    continue
                bar.set_description(question.domain)
                options, draw = plan.asked(index, repeat), random.Random(f"{plan.seed} {repeat} {index}")
                outputs = race(decoders, question.prompt_ids, options, plan.turn, draw)
                check_compiled(decoders.values())  # again: a new shape may have come up
                where = {"domain": question.domain, "prompt": index, "repeat": repeat}
                journal.append(compared(first, outputs, question.prompt_ids, options, **where))
                bar.update()


def conclude(decoders: dict[Arm, Decoder], plan: Plan, records: list[Record], **measured) -> Report:
    """The report on finished records, with what takes one more answer to measure; measured: the report's other fields."""
    decoder = next(iter(decoders.values()))
    dtype = decoder.target.dtype
    autoregressive = [record for record in records if record.arm == "ar"]
    failures = [located(record) for record in records if is_failure(record.departure, dtype)]
    audit = measured["audit"]
    sampled = plan.options["temperature"] > 0
    rows = summarise(records, plan.seed, sampled)
    return Report(
        depth=decoder.state.depth,
        ar_over_floor=over(round_ms(autoregressive), measured["floor"].ms),
        outside_share={} if decoder.graphs else outside_shares(decoders, plan, records),  # a replay calls no model
        tree_builder_ms=measure_tree_builder(),
        costs=costs_used(decoders),
        buckets=decoder.state.buckets,
        rows=rows,
        predictions=predictions(records, rows, plan.seed, sampled),
        records=records,
        failures=failures + [str(slip) for slip in (audit.failures if audit else [])],
        **measured,
    )


def outside_shares(decoders: dict[Arm, Decoder], plan: Plan, records: Sequence[Record]) -> dict[str, float]:
    """By arm, the share of a round outside the models, in its first answer with rounds; arms with none are left out."""
    shares = {}
    for arm, decoder in decoders.items():
        for record in records:
            if record.arm == str(arm) and record.output.round_lengths:
                prompt_ids, options = plan.questions[record.prompt].prompt_ids, plan.asked(record.prompt, record.repeat)
                share = measure_share(decoder, prompt_ids, method=arm.method, width=arm.width, **options)
                shares[record.arm] = share.outside
                break
    return shares


def costs_used(decoders: dict[Arm, Decoder]) -> dict[int, Costs]:
    """The costs that auto used, or else round; they differ only if each probed for itself and was disturbed."""
    by_name = sorted(decoders, key=str)  # auto before round
    deployments = [decoders[arm].deployment for arm in by_name if decoders[arm].deployment]
    return dict(sorted(deployments[0].costs.items())) if deployments else {}


# The command line

def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def methods(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(METHODS) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(METHODS)}, each once, got {text!r}")
        return names

    def widths(text: str) -> list[int | str]:
        values = [at_least(1, auto="auto", round="round")(name) for name in text.split(",")]
        if len(set(values)) < len(values) or any(N > MAX_WIDTH for N in values if isinstance(N, int)):
            raise argparse.ArgumentTypeError(f"must be auto, round or from 1 to {MAX_WIDTH}, each once, got {text!r}")
        return values

    parser = Parser(prog="python -m minicast.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", type=Path, metavar="FILE",
                        help="JSONL with prompt, question, text, problem or turns; a line's domain is its "
                        "own, else the file's name; default: a small set of our own")
    parser.add_argument("--limit", type=at_least(1), metavar="K", help="only a domain's first K prompts")
    parser.add_argument("--methods", type=methods, default=list(METHODS), help="default: ar,dflash,cast")
    parser.add_argument("--widths", "--width", dest="widths", type=widths, default=[15], metavar="N,N,...",
                        help="of cast, an arm each: numbers, auto (one that pays on this machine) or round "
                        "(one for each round); default: 15")
    parser.add_argument("--max-new-tokens", type=each_once(2), default=[128], metavar="N,N,...",
                        help="lengths of answers, a table's domain each; default: 128")
    parser.add_argument("--prefix", type=each_once(1), default=[], metavar="N,N,...",
                        help="cut prompts to at most so many tokens, a table's domain each; also where "
                        "--probe-full probes, 1024 if not given")
    parser.add_argument("--repeats", type=at_least(1), default=1, help="default: %(default)s")
    parser.add_argument("--turn", type=at_least(1), metavar="K",
                        help="K tokens of a method, then it is the next one's turn, each with caches (and graphs) of its "
                        "own: what slows a shared machine for a second slows all alike; default: whole answers")
    sampling_flags(parser, seed=" (each repeat adds 1), the methods' order and the bootstrap")
    model_flags(parser)
    parser.add_argument("--random-weights", choices=(*SHAPES, HEAD), metavar="NAME",
                        help=f"a model of this shape, prompts of --prefix random ids (default: {PREFIX}): "
                        f"{', '.join(SHAPES)}; or {HEAD}: the model as it is, its head of random weights")
    compile_flags(parser)
    parser.add_argument("--probe-full", action="store_true",
                        help="the paper's long probe of this machine too, and the N* it gives")
    parser.add_argument("--audit", action="store_true",
                        help="greedy only: check every token against one uncached pass of the target")
    parser.add_argument("--out", type=Path, metavar="FILE.json",
                        help="write everything there, and the table beside it")
    parser.add_argument("--gpu-check", action="store_true",
                        help="instead of prompts: measure a GPU with random weights; --out is a directory, by default "
                             "gpu-check, where an earlier check is replaced")
    parser.add_argument("--shape", default="qwen3-8b", help="of --gpu-check; tiny rehearses it on any device")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.gpu_check:
        stopped = "the stages that were finished are in the directory of --out"
    elif arguments.out:
        stopped = "the same command goes on after the prompts that were finished"
    else:
        stopped = "nothing is kept: with --out FILE.json the same command would go on"
    return guarded("bench", lambda: run(arguments, sys.argv[1:] if argv is None else argv), stopped)


def beside(file: Path, suffix: str) -> Path:
    """The file of this suffix that belongs to --out: the suffix replaces .json, or is appended to any other name."""
    return file.with_name(file.name.removesuffix(".json") + suffix)


def check_outputs(file: Path) -> None:
    """UsageError if the JSON file or one beside it cannot be written, or would replace a file not from bench; a note if
    there is a report already.
    """
    check_file(file, "--out")
    if file.suffix == ".md":
        raise UsageError(f"--out {file}: name the JSON file, the table is written beside it")
    table = beside(file, ".md")
    for other in (table, beside(file, ".journal.jsonl")):
        if other.exists() and not other.is_file():
            raise UsageError(f"--out {file}: {other} is a directory or a device: move it away, or name another file")
    if table.exists() and not file.exists():
        lone = f"{table}, which lies there without its JSON file"
        raise UsageError(f"--out {file} would replace {lone}: move that, or name another file")
    there = " and ".join(str(path) for path in (file, table) if path.exists())
    if there:
        print(f"bench: {there} will be replaced", file=sys.stderr)


def decoders_of(arms: Sequence[Arm], target: Target, draft: DraftHead | None, arguments) -> dict[Arm, Decoder]:
    """One decoder for all arms or, where they take turns, one for each."""
    count = len(arms) if arguments.turn else 1
    made = [Decoder(target, draft, compile=arguments.compile, attention=arguments.attention) for _ in range(count)]
    return {arm: made[place % count] for place, arm in enumerate(arms)}


def check_lengths(questions: Sequence[Question], context: int) -> None:
    """UsageError for a prompt that leaves its answer no room, before hours are spent on the others."""
    for question in questions:
        prompt, answer = len(question.prompt_ids), question.max_new_tokens
        if prompt + answer > context:
            which = f"{question.where}: the prompt's {prompt} tokens and an answer of {answer}"
            way_out = "leave it out, or choose a smaller --prefix or --max-new-tokens"
            raise UsageError(f"{which} exceed the target's context of {context}: {way_out}")


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    if arguments.gpu_check:
        from minicast import gpu_check

        others = sorted(arguments.changed - {"gpu_check", "shape", "out"})
        note_no_effect("bench", others, "on --gpu-check")
        return gpu_check.main(arguments)
    options = {name: getattr(arguments, name) for name in ("verifier", *SAMPLING)}
    if arguments.temperature > 0 and arguments.audit:
        raise UsageError("--audit compares with the target's best token: leave out --temperature")
    if arguments.seed + arguments.repeats > 2**63:
        raise UsageError("--seed: each repeat adds 1 to it, and the last one would be beyond 2**63 - 1")
    if arguments.out:
        check_outputs(arguments.out)
    arms = [
        Arm(method, width)
        for method in arguments.methods
        for width in ([0] if method in UNSIZED else arguments.widths)
    ]
    placement = Placement.choose(arguments.device, arguments.dtype)
    drafts = arguments.methods != ["ar"] or arguments.probe_full
    note_idle_flags("bench", arguments, arguments.methods, drafts)
    note_no_effect("bench", sorted(arguments.changed & {"shape"}), "without --gpu-check")
    if len(arms) == 1:
        note_no_effect("bench", sorted(arguments.changed & {"turn"}), "on one method alone")
    subject = Subject.of(arguments, placement, drafts)
    options["stop_ids"] = subject.stop_ids
    plan = Plan(subject.questions, arguments.repeats, arguments.seed, options, arguments.turn)
    settings = {
        "weights": subject.source,
        "draft_vocabulary": arguments.draft_vocabulary,
        "placement": str(placement),
        "attention": arguments.attention,
        "compile": arguments.compile,
        "arms": [str(arm) for arm in arms],
        "prompts": [file.name for file in arguments.prompts or []],
        "questions": digest(repr(subject.questions)),
        "limit": arguments.limit,
        "prefix": arguments.prefix,
        "max_new_tokens": arguments.max_new_tokens,
        "repeats": arguments.repeats,
        "turn": arguments.turn,
        "seed": arguments.seed,
        "options": options,
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }
    journal = Journal(arguments.out and beside(arguments.out, ".journal.jsonl"), settings)
    if journal.records:
        print(f"bench: going on after {len(journal.records) // len(arms)} prompts", file=sys.stderr)

    target, draft = subject.load(placement)
    check_lengths(subject.questions, target.context)
    decoders = decoders_of(arms, target, draft, arguments)
    warm_up(decoders, subject.questions[0].prompt_ids, plan.asked(0))
    check_compiled(decoders.values())
    probes = []
    if arguments.probe_full:
        deployment = Deployment(decoders[arms[0]])
        probes = [paper_probe.full_probe(deployment, prefix) for prefix in arguments.prefix or [paper_probe.PREFIX]]
    before = measure_floor(target)
    run_plan(decoders, plan, journal)
    report = conclude(
        decoders,
        plan,
        journal.records,
        remark=subject.remark,
        settings=settings,
        environment=environment(placement, subject.source, command, settings["commit"]),
        floor=min(before, measure_floor(target), key=lambda floor: floor.ms),
        probes=probes,
        audit=Audit.of(target, journal.records, subject.questions) if arguments.audit else None,
    )
    return deliver(report, journal, arguments.out)


def deliver(report: Report, journal: Journal, out: Path | None) -> int:
    """Write the report to its files and its table to stdout, then remove the journal. Returns the exit status."""
    if out:
        try:
            write_atomically(out, report.to_json())
            write_atomically(beside(out, ".md"), report.to_markdown())
        except OSError:
            print(report.to_markdown(), end="", flush=True)  # the journal stays, so the same command can try again
            raise
        print(f"bench: wrote {out} and {beside(out, '.md').name}", file=sys.stderr)
    journal.remove()
    try:
        print(report.to_markdown(), end="", flush=True)
    except Unwritable:
        if not out:  # else the files have it
            print(report.to_markdown(), end="", file=sys.stderr)
        raise
    for failure in report.failures:
        print(f"bench: rounding does not explain this: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
