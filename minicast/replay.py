"""How long rounds would be, replayed offline from recorded drafts (paper, §4 "Candidate scores", Appendix G).

    python -m minicast.replay --prompts FILE... --out DIR      record what DIR lacks, then analyse it
    python -m minicast.replay --analyse --out DIR              analyse only: no model is loaded
    python -m minicast.replay ... --costs FILE                 and compare width policies, see minicast/policy_replay.py

A greedy answer is the same whatever is proposed, so what the drafter says at each position of it is recorded once
(minicast/record.py). From then on the decode of any tree policy is replayed exactly: a round at position i commits
R tokens, and the next one is at i + R.

The mass curve that the width rule reads (paper, §3.3) is one result; --curve says where else to write it.
When the default pair's head has changed, record its curve again by

    python -m minicast.replay --out runs/replay --curve model/heads/smollm2-135m-dflash/curve.json

Symbols: T tokens of an answer, b pending root, L block depth, K rank cap, N width, R tokens a round commits.
A round can start at T - 1 positions, since the last token of an answer is never a root. Nothing here reads a clock.
"""

from minicast.program import Parser, at_least, model_flags, start

start(__name__)  # before anything slow is imported

import argparse
import json
import shlex
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

from minicast.command import guarded, note_no_effect
from minicast.curve import MassCurve, read_shipped
from minicast.prompts import EVERYTHING, PROMPTS
from minicast.record import RANKS, Drafts, Recording, head_digest, read_recordings, record_prompts
from minicast.report import commit
from minicast.table import markdown
from minicast.tree import RANK_CAP, Tree
from minicast.width import MAX_WIDTH
from model import hub, train_data
from model.files import CURVE, check_directory, check_file, write_atomically

CURVE_WIDTH = 15    # the mass curve is a mean over the rounds of a decode at this width
CURVE_ROUNDS = 1500  # as many as the paper's curve rests on; with fewer, a warning
SHAPE_WIDTH = 47    # nodes at which the paper compares shapes of trees
SCHEDULE = (8, 4, 2, 2)  # the paper's fixed schedule: children of a node by depth, one further down
BINS = 10           # of q, for its reliability
TABLE_WIDTHS = (1, 3, 7, 15, 31, 47, 63, 95, 127)


# Replaying

Needs = list[list[int]]
"""By position, then by depth from 1: how many nodes of the tree there, best first, hold that much of the
target's continuation, as long as the tree holds it. Ascending, since parents come before their children."""


def needed(tree: Tree, continuation: Sequence[int]) -> list[int]:
    """One position's entry of `Needs`; continuation: the target's tokens after b."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    children = {edge: node for node, edge in enumerate(zip(parents, tokens))}
    node, nodes = -1, []
    for token in continuation:
        node = children.get((node, token))
        if node is None:
            break
        nodes.append(node + 1)
    return nodes


@dataclass(frozen=True)
class Step:
    """A replayed round: where it starts, and the R tokens it commits, counted after cuts."""

    position: int
    R: int


def round_length(needs: Needs, position: int, width: int) -> int:
    """R of the round at `position` with a tree of `width` nodes; cut where the answer ends."""
    return min(1 + bisect_right(needs[position], width), len(needs) - position)


def rounds_of(needs: Needs, width: int) -> list[Step]:
    """The rounds of a decode in which trees have `width` nodes, the last one cut where the answer ends."""
    steps, position = [], 0
    while position < len(needs):
        R = round_length(needs, position, width)
        steps.append(Step(position, R))
        position += R
    return steps


@dataclass(frozen=True)
class Replayable:
    """A recording, with the trees that policies would build at each of its T - 1 positions.

    Attributes:
        masses: (T - 1, MAX_WIDTH) float32, masses of the candidates, best first, then 0
        chain_masses: (T - 1, L) float32, those of the top-1 prefixes
        needs: by policy, of the widest tree that is replayed
    """

    recording: Recording
    masses: Tensor
    chain_masses: Tensor
    needs: dict[str, Needs]

    @classmethod
    def of(cls, recording: Recording) -> "Replayable":
        drafts, short = recording.drafts, recording.short
        positions = range(len(drafts.tokens))

        def needs(build: Callable[[int], Tree]) -> Needs:
            return [needed(build(i), recording.answer[i + 1 : i + 1 + drafts.depth]) for i in positions]

        trees = [drafts.tree(i, MAX_WIDTH, RANK_CAP) for i in positions]
        masses = torch.zeros(len(trees), MAX_WIDTH)
        for row, tree in zip(masses, trees):
            row[: tree.width] = tree.log_mass.exp()
        branchings = {"schedule": SCHEDULE, "binary": (2,) * drafts.depth}
        shapes = {name: Shape.of(branching, drafts) for name, branching in branchings.items()}
        return cls(
            recording,
            masses,
            drafts.log_q[:, :, 0].cumsum(1).exp(),
            {
                "cast": needs(trees.__getitem__),
                "cast, every rank": needs(lambda i: drafts.tree(i, RANKS, RANKS)),
                "cast, short block": needs(lambda i: short.tree(i, short.depth, RANK_CAP)),
                "dflash": needs(lambda i: drafts.tree(i, drafts.depth, 1)),
                "dflash, short block": needs(lambda i: short.tree(i, short.depth, 1)),
            }
            | {name: needs(lambda i, shape=shape: shape.tree(drafts, i)) for name, shape in shapes.items()},
        )

    def rounds(self, policy: str, width: int) -> list[Step]:
        return rounds_of(self.needs[policy], width)


@dataclass(frozen=True)
class Shape:
    """A tree whose form does not depend on the scores: SHAPE_WIDTH nodes, level by level.

    Attributes:
        parents, depths: as in `Tree`
        slots: (N,) int64, each node's place in the table (L, ranks) of tokens, read row by row
    """

    parents: Tensor
    depths: Tensor
    slots: Tensor

    @classmethod
    def of(cls, branching: Sequence[int], drafts: Drafts) -> "Shape":
        """branching: how many children a node has, by its depth from 0; one beyond the list's end"""
        ranks, nodes, level = drafts.tokens.shape[2], [], [-1]
        for depth in range(drafts.depth):
            children = min(branching[depth], ranks) if depth < len(branching) else 1
            start = len(nodes)
            nodes += [(parent, depth, rank) for parent in level for rank in range(children)]
            level = range(start, len(nodes))
        parents, depths, rank = torch.tensor(nodes[:SHAPE_WIDTH]).T
        return cls(parents, depths + 1, depths * ranks + rank)

    def tree(self, drafts: Drafts, position: int) -> Tree:
        tokens = drafts.tokens[position].flatten()[self.slots]
        return Tree(tokens, self.parents, self.depths, torch.zeros(len(tokens)))


# Analyses

@dataclass(frozen=True)
class LengthsByWidth:
    """R against N, an entry for each width.

    Attributes:
        widths: N
        rounds: how many there were
        R: tokens a round, after cuts
        predicted: what the drafter's scores promise: 1 plus the mean mass of these rounds' trees
    """

    widths: list[int]
    rounds: list[int]
    R: list[float]
    predicted: list[float]


@dataclass(frozen=True)
class Corrections:
    """Where a chain's first rejections end: the rank of the target's token in q there (paper, Figure 4a).

    Attributes:
        events: the number of first rejections
        shares: of these, by ranges of ranks; the last range is beyond the ranks recorded
    """

    events: int
    shares: dict[str, float]


@dataclass(frozen=True)
class Bin:
    """Candidates at depth one with low <= q < high (the last bin takes q = 1), and what became of them."""

    low: float
    high: float
    candidates: int
    mean_q: float
    hit_rate: float


@dataclass(frozen=True)
class Cap:
    """Width N with the rank cap, and with every rank that a tree of N nodes can use."""

    width: int
    R: float
    R_every_rank: float


@dataclass(frozen=True)
class Packed:
    """R at n packed rows; block: tokens drafted, counting the root's"""

    n: int
    method: str
    block: int
    R: float


@dataclass(frozen=True)
class Finding:
    """What the replay of a domain's prompts says.

    Attributes:
        prompts, tokens: how many; of tokens, those that rounds commit
        tree: best-first trees, N = 1 to MAX_WIDTH
        chain: chains cut to N = 1 to L
        corrections, reliability: over the rounds of the whole chain
        masses: sorted, the mean over the rounds of a decode with N = CURVE_WIDTH
        accepted: in the same rounds and order, how often the target took that candidate, as masses predict it
        chain_masses, chain_accepted: the same by depth over the chain's rounds
        shapes: R by shape of tree with SHAPE_WIDTH nodes, the chain's with L beside them
        rank_cap, shrink: paper, Appendix G.1 and Table 15
    """

    domain: str
    prompts: int
    tokens: int
    tree: LengthsByWidth
    chain: LengthsByWidth
    corrections: Corrections
    reliability: list[Bin]
    masses: list[float]
    accepted: list[float]
    chain_masses: list[float]
    chain_accepted: list[float]
    shapes: dict[str, float]
    rank_cap: list[Cap]
    shrink: list[Packed]


def analyse(answers: Sequence[Replayable], domain: str = EVERYTHING) -> Finding:
    """All of the paper's offline analyses, over answers with at least one round."""
    block, half = (getattr(answers[0].recording, name).depth + 1 for name in ("drafts", "short"))

    def R(policy: str, width: int) -> float:
        return tokens_a_round(answers, policy, width)

    return Finding(
        domain=domain,
        prompts=len(answers),
        tokens=sum(len(answer.recording.answer) - 1 for answer in answers),
        tree=lengths_by_width(answers, "cast", "masses", range(1, MAX_WIDTH + 1)),
        chain=lengths_by_width(answers, "dflash", "chain_masses", range(1, block)),
        corrections=corrections(answers),
        reliability=reliability(answers),
        masses=visited(answers, "cast", CURVE_WIDTH, "masses").mean(0).tolist(),
        accepted=accepted(answers, "cast", CURVE_WIDTH, MAX_WIDTH),
        chain_masses=visited(answers, "dflash", block - 1, "chain_masses").mean(0).tolist(),
        chain_accepted=accepted(answers, "dflash", block - 1, block - 1),
        shapes={
            "chain": R("dflash", block - 1),
            "schedule": R("schedule", SHAPE_WIDTH),
            "binary": R("binary", SHAPE_WIDTH),
            "best first": R("cast", SHAPE_WIDTH),
        },
        rank_cap=[Cap(N, R("cast", N), R("cast, every rank", N)) for N in (7, 15, 31)],
        shrink=[
            Packed(half, "dflash", half, R("dflash, short block", half - 1)),
            Packed(half, "cast", half, R("cast, short block", half - 1)),
            Packed(half, "cast", block, R("cast", half - 1)),
            Packed(block, "dflash", block, R("dflash", block - 1)),
            Packed(block, "cast", block, R("cast", block - 1)),
        ],
    )


def tokens_a_round(answers: Sequence[Replayable], policy: str, width: int) -> float:
    """R of a decode, all its rounds together."""
    steps = [step.R for answer in answers for step in answer.rounds(policy, width)]
    return sum(steps) / len(steps)


def visited(answers: Sequence[Replayable], policy: str, width: int, name: str) -> Tensor:
    """The rows of `masses` or `chain_masses` at the rounds of a decode: (rounds, MAX_WIDTH or L)."""
    rows = []
    for answer in answers:
        rows.append(getattr(answer, name)[[step.position for step in answer.rounds(policy, width)]])
    return torch.cat(rows)


def accepted(answers: Sequence[Replayable], policy: str, width: int, widest: int) -> list[float]:
    """By candidate, 1 to `widest`, the share of rounds in which the continuation goes through it."""
    steps = [(answer, step) for answer in answers for step in answer.rounds(policy, width)]
    counts = [0] * widest
    for answer, step in steps:
        for nodes in answer.needs[policy][step.position]:
            counts[nodes - 1] += 1
    return [count / len(steps) for count in counts]


def lengths_by_width(answers: Sequence[Replayable], policy: str, name: str, widths: Sequence[int]) -> LengthsByWidth:
    """R against N, promised and replayed; `name` as in `visited`."""
    tables = [visited(answers, policy, width, name) for width in widths]
    return LengthsByWidth(
        widths=list(widths),
        rounds=[len(table) for table in tables],
        R=[tokens_a_round(answers, policy, width) for width in widths],
        predicted=[1 + table[:, :width].sum(1).mean().item() for width, table in zip(widths, tables)],
    )


def corrections(answers: Sequence[Replayable]) -> Corrections:
    """Over the chain's rounds, except where all of the chain was accepted, or the answer ended with it."""
    ranks = []
    for answer, step in chain_rounds(answers):
        recording, accepted = answer.recording, len(answer.needs["dflash"][step.position])
        place = step.position + accepted + 1
        if accepted < recording.drafts.depth and place < len(recording.answer):
            found = (recording.drafts.tokens[step.position, accepted] == recording.answer[place]).nonzero()
            ranks.append(found.item() + 1 if len(found) else RANKS + 1)
    limits = {"2-4": (1, 4), "5-8": (4, 8), f"9-{RANKS}": (8, RANKS), f"over {RANKS}": (RANKS, RANKS + 1)}
    events = max(len(ranks), 1)
    counts = {name: sum(low < rank <= high for rank in ranks) for name, (low, high) in limits.items()}
    return Corrections(len(ranks), {name: count / events for name, count in counts.items()})


def chain_rounds(answers: Sequence[Replayable]) -> Iterator[tuple[Replayable, Step]]:
    for answer in answers:
        for step in answer.rounds("dflash", answer.recording.drafts.depth):
            yield answer, step


def reliability(answers: Sequence[Replayable]) -> list[Bin]:
    """The RANK_CAP best candidates at depth one, binned by q (paper, Figure 4b), without empty bins."""
    said_q, hits = [], []
    for answer, step in chain_rounds(answers):
        drafts, said = answer.recording.drafts, answer.recording.answer[step.position + 1]
        said_q.append(drafts.log_q[step.position, 0, :RANK_CAP].exp())
        hits.append(drafts.tokens[step.position, 0, :RANK_CAP] == said)
    q, hit = torch.cat(said_q), torch.cat(hits).float()
    place = (q * BINS).long().clamp(max=BINS - 1)
    chosen = [(k, place == k) for k in range(BINS)]
    return [
        Bin(k / BINS, (k + 1) / BINS, int(here.sum()), q[here].mean().item(), hit[here].mean().item())
        for k, here in chosen
        if here.any()
    ]


def mass_curve(finding: Finding, target: str, draft: str) -> MassCurve:
    """A finding's mass curve, for the width rule; target, draft: names of the pair"""
    means = (finding.masses, finding.chain_masses, finding.accepted, finding.chain_accepted)
    rounded = [[float(f"{mean:.5g}") for mean in each] for each in means]
    rounds = finding.tree.rounds[finding.tree.widths.index(CURVE_WIDTH)]
    return MassCurve(*rounded, rounds, target, draft, RANK_CAP)


def length_table(findings: Sequence[Finding]) -> list[str]:
    """A Markdown table of R by width and domain, what the scores promise in brackets."""
    heads, depth = ["R (promised)", *(finding.domain for finding in findings)], len(findings[0].chain_masses)

    def row(name: str, lengths: Sequence[LengthsByWidth], place: int) -> list[str]:
        return [name, *(f"{each.R[place]:.2f} ({each.predicted[place]:.2f})" for each in lengths)]

    chain = row(f"chain, N = {depth}", [finding.chain for finding in findings], depth - 1)
    trees = [row(f"tree, N = {N}", [finding.tree for finding in findings], N - 1) for N in TABLE_WIDTHS]
    return list(markdown(heads, [chain, *trees], names=len(heads)))


# The command line

def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m minicast.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR",
                        help=f"keeps the recorded rounds, a file a prompt, with analysis.json and {CURVE}")
    parser.add_argument("--analyse", action="store_true", help="analyse what DIR holds, record nothing")
    parser.add_argument("--curve", type=Path, metavar="FILE.json", help="write the mass curve there too")
    parser.add_argument("--costs", type=Path, metavar="FILE.json",
                        help="what `bench --out` measured: compare width policies at these costs")
    parser.add_argument("--prompts", nargs="+", type=Path, default=[PROMPTS], metavar="FILE",
                        help="JSONL with prompt, question, text, problem or turns; not those you evaluate "
                        "on; default: a small set of our own")
    parser.add_argument("--limit", type=at_least(1), metavar="K", help="only a domain's first K prompts")
    parser.add_argument("--max-new-tokens", type=at_least(2), default=160, help="default: %(default)s")
    model_flags(parser, vocabulary=False)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    stopped = f"the same command goes on with what {arguments.out} holds"
    return guarded("replay", lambda: run(arguments, sys.argv[1:] if argv is None else argv), stopped)


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    check_directory(arguments.out, "--out")
    if arguments.curve:
        check_file(arguments.curve, "--curve")
        arguments.curve.parent.mkdir(parents=True, exist_ok=True)
    if arguments.costs:
        from minicast.policy_replay import Measured

        measured = Measured.read(arguments.costs)  # a wrong file is reported before anything is recorded
    if arguments.analyse:
        idle = {"prompts", "limit", "max_new_tokens", "model", "draft_model", "device", "dtype"}
        note_no_effect("replay", sorted(arguments.changed & idle), "on --analyse")
    else:
        record_prompts(arguments)
    settings, recordings = read_recordings(arguments.out)
    bar = tqdm(recordings, "replaying", unit="prompt", leave=False, disable=None)
    answers = [Replayable.of(recording) for recording in bar]
    domains = {answer.recording.domain: [] for answer in answers}
    for answer in answers:
        domains[answer.recording.domain].append(answer)
    findings = [analyse(group, domain) for domain, group in domains.items()]
    findings.append(analyse(answers))
    curve = mass_curve(findings[-1], settings["target"], settings["draft"])
    for path in (arguments.out / CURVE, arguments.curve):
        if path:
            write_atomically(path, json.dumps(asdict(curve)) + "\n")
    policies = None
    if arguments.costs:
        from minicast.policy_replay import compare

        shipped = shipped_curve(settings, len(curve.chain_masses))
        prefix = measured.prefix_for(middle(arguments.out, settings))
        policies = compare(domains, shipped or curve, measured.costs[prefix], measured.buckets)
        sources = {
            "costs": f"{measured.source} ({arguments.costs}), prefix {prefix}",
            "curve": f"{CURVE} beside the head, which auto goes by" if shipped else "recorded in these rounds",
        }

    report = {
        "command": shlex.join(["python", "-m", "minicast.replay", *command]),
        "commit": commit(),
        "settings": settings,
        "rank_cap": RANK_CAP,
        "curve_width": CURVE_WIDTH,
        "findings": [asdict(finding) for finding in findings],
        "policies": policies and asdict(policies) | sources,
    }
    write_atomically(arguments.out / "analysis.json", json.dumps(report) + "\n")
    print("\n".join(length_table(findings)))
    if policies:
        rounds = f"- rounds of {settings['draft']} on {settings['target']}; costs of {sources['costs']}"
        print("\n".join(["", *policies.lines(), "", rounds, f"- mass curve: {sources['curve']}"]))
    if curve.rounds < CURVE_ROUNDS:
        print(f"replay: the mass curve rests on {curve.rounds} rounds, the paper's on {CURVE_ROUNDS}: "
              "more prompts would make it firmer", file=sys.stderr)
    return 0


def shipped_curve(settings: dict, depth: int) -> MassCurve | None:
    """The curve beside the head, as `auto` reads it; None if there is none, or the head has changed since."""
    known = (Path(settings["draft"]), hub.HEADS.parent.parent / settings["draft"])  # a pair's path begins at the root
    file = next((place / CURVE for place in known if (place / CURVE).is_file()), None)
    if file is None or head_digest(str(file.parent)) != settings["head"]:
        return None
    return read_shipped(file, depth, "the recorded curve is used")


def middle(directory: Path, settings: dict) -> int:
    """Positions up to the middle of a typical answer, as the decoder estimates before it begins."""
    prompts = [len(example.prompt) for example in train_data.read_responses(directory / "answers.jsonl")]
    return int(median(prompts)) + settings["max_new_tokens"] // 2


if __name__ == "__main__":
    sys.exit(main())
