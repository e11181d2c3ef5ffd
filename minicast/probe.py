"""What the width rule needs to know: what a round costs, what the drafter's candidates weigh (paper, §3.3).

Costs are measured on the path that will run, the decoder's own two functions, decoding greedily: `propose` at three
widths gives the draft and h(N), `settle` at a few row counts gives the target's pass with walk and commit. They are
kept on disk, so that a deployment is probed once. The paper's own protocol (Table 5) is in `paper_probe`.

Masses are means over recorded rounds, the mass curve of a target/draft pair: shipped beside the head as
curve.json (minicast/replay.py works it out), or else learned from the rounds decoded here.

`width` decides which width follows. This module is only imported where a width has to be chosen.
"""

import json
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import inf
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minicast.answer import Options
from minicast.back_off import BackOff, Pace
from minicast.curve import MassCurve, read_shipped
from minicast.decode import Decoder
from minicast.policy import AutoWidth, FixedWidth, Policy, RoundWidth
from minicast.round import MAX_ROWS, Request
from minicast.width import MAX_WIDTH, UNINFORMED, CostModel, Decision, best_drafted, decide, round_times
from model.device import clock, device_name
from model.dflash import DraftHead
from model.files import CURVE, cache_directory, digest, write_atomically
from model.linear import weight_bytes

# What a round runs through, and what measures it: a change of these files may change its cost.
TIMED = ("graphs/capture", "graphs/cpu", "graphs/masks", "minicast/decode", "minicast/methods", "minicast/probe")
TIMED += ("minicast/round", "minicast/sampling", "minicast/tree", "minicast/verify")
TIMED += ("model/device", "model/dflash", "model/linear", "model/transformer")
ASKED = (1, 4, 8, 16, 24, 32, 48, 64, 96, MAX_ROWS)  # row counts measured where there are no buckets
ASKED_FIRST = 16     # up to here always; beyond, only while the rule still adds nodes
BEHIND = 2           # positions the drafter has to catch up with before a draft: about what a round commits
WARM_UPS, REPEATS, LEAST_REPEATS = 2, 15, 3  # enough for the median to ignore a short burst of other work
SPREAD = 1.5         # a probe was disturbed if AR's times spread more than this,
WORKED = 0.5         # if this thread ran for less than this share of the time,
LOST = 0.1           # or if other programs took more than this many of its CPUs
GRAIN = 0.02         # seconds by which /proc/stat, which counts in ticks, may be off
DISTURBED = "disturbed by other work on this machine"
SECONDS = 3.0        # after this a group of passes is not repeated any more
PREFIXES = (256, 1024, 4096, 16384, 65536)  # prefix lengths that costs are measured at
LEARNED = 128        # rounds a learned mass curve needs; until then every round is judged by its own masses
SAVED_EVERY = 4      # rounds: short answers, too, are learned from


# Costs

@dataclass(frozen=True)
class Costs:
    """Milliseconds of a round's parts, medians.

    Attributes:
        packed, settle_ms: verify, walk and commit over n packed rows, by n, ascending
        propose_ms: draft, tree and pack at the widths `proposed`, both ascending: up to width L each node adds a
            position to score, beyond L only the tree grows
        steady: nothing disturbed the measurement, see `Timings`
    """

    packed: tuple[int, ...]
    settle_ms: tuple[float, ...]
    propose_ms: tuple[float, ...]
    proposed: tuple[int, ...]
    steady: bool = True

    @property
    def draft_ms(self) -> float:
        """A draft with the smallest tree."""
        return self.propose_ms[0]

    def overhead_ms(self, N: int) -> float:
        """h(N): what a larger tree takes beyond that, interpolated linearly between the widths measured."""
        return self.proposal_ms(N) - self.draft_ms

    def proposal_ms(self, N: int) -> float:
        """A draft with a tree of N nodes."""
        return float(np.interp(N, self.proposed, self.propose_ms))

    def __str__(self) -> str:
        drafts, rows = (
            ", ".join(f"{ms:.1f} ({count})" for count, ms in zip(counts, times))
            for counts, times in ((self.proposed, self.propose_ms), (self.packed, self.settle_ms))
        )
        disturbed = "" if self.steady else f"; the probe was {DISTURBED}"
        return f"ms of a draft by nodes: {drafts}; ms by packed rows, of which 1 is AR: {rows}{disturbed}"

    def model(self, buckets: Sequence[int] = ()) -> CostModel:
        return CostModel.fit(self.packed, self.settle_ms, buckets)

    def times(self, buckets: Sequence[int], proposed: int | None = None) -> list[float]:
        """l(N) for N from 0, AR, to the widest measured.

        proposed: the width that every round proposes, whatever it keeps; None: N
        """
        draft_ms, h = (self.draft_ms, self.overhead_ms) if proposed is None else (self.proposal_ms(proposed), 0.0)
        return round_times(self.model(buckets), self.packed[-1] - 1, draft_ms, h)


@dataclass(frozen=True)
class Timings:
    """What `interleaved` measured.

    Attributes:
        ms: median milliseconds of each pass
        spread: of the first pass's times, the upper quartile over the lower one
        worked: share of the time in which this thread ran on a CPU; 1 where it waits for a device
        lost: how many of the CPUs that this program has threads for others took, on average
    """

    ms: dict[Hashable, float]
    spread: float = 1.0
    worked: float = 1.0
    lost: float = 0.0

    @property
    def steady(self) -> bool:
        """Whether no other work disturbed this one. Each sign alone misses something. Work that comes and goes makes times
        uneven. Constant work makes them evenly slow: this thread waits for a CPU, or it spins while its partner waits
        for one, and then other programs have that CPU, where the system reports it.
        """
        return self.spread <= SPREAD and self.worked >= WORKED and self.lost <= LOST


def interleaved(
    passes: dict[Hashable, Callable[[], object]],
    clock: Callable[[], float],
    used: Callable[[], tuple[float, float]] | None = None,
    warm_ups: int = WARM_UPS,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
) -> Timings:
    """Times of each pass, all in turn, so that a slow moment of the machine hits all alike.

    Passes that take longer than `seconds` together are warmed up once and repeated LEAST_REPEATS times.

    clock: in seconds; used: `cpu_seconds`, None where CPU time says nothing
    """
    times = {name: [] for name in passes}
    opened, timed, before = clock(), 0, used and used()
    for repeat in tqdm(range(warm_ups + repeats), "measuring costs", leave=False, disable=None):
        late = clock() - opened > seconds
        if late and timed >= LEAST_REPEATS:
            break
        warm = repeat < warm_ups and not (late and repeat)
        for name, run in passes.items():
            started = clock()
            run()
            if not warm:
                times[name].append(clock() - started)
        timed += not warm
    elapsed = clock() - opened
    worked, others = ((now - then) / elapsed for now, then in zip(used(), before)) if used else (1.0, 0.0)
    lost = others - GRAIN / elapsed - max(os.cpu_count() - torch.get_num_threads(), 0)
    low, _, high = quantiles(next(iter(times.values())) * 2, n=4, method="inclusive")  # doubled: needs two or more
    return Timings({name: 1e3 * median(values) for name, values in times.items()}, high / low, worked, max(lost, 0.0))


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds used by this thread, and by everything else on this machine (0 without /proc). Compare two readings."""
    try:
        with open("/proc/stat") as lines:
            ticks = [int(field) for field in lines.readline().split()[1:9]]  # of which 3 and 4 are idle
    except OSError:
        return time.thread_time(), 0.0
    busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
    return time.thread_time(), busy - time.process_time()


class Passes:
    """The decoder's own `propose` and `settle` after a prefix of P positions whose content does not matter.

    Uses the decoder's state, because graphs hold its addresses. A conversation survives if its cached prefix ends below
    the slots written here: `close` restores its counters and its pending root. A longer one is forgotten.
    """

    def __init__(self, decoder: Decoder, prefix: int, positions: int = 0):
        self.decoder, self.state, self.prefix = decoder, decoder.state, prefix
        self.request: Request = decoder.request(Options(), drafts=True)
        if self.state.prefix > prefix - BEHIND:
            decoder.reset()
        self.cached, self.root = (self.state.prefix, self.state.drafted, self.state.tapped), self.state.root.clone()
        decoder.reserve(max(prefix, positions))
        try:
            self.propose(MAX_WIDTH)  # its first rows are a pack of any smaller width
        except BaseException:
            self.close()
            raise
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(decoder.target.vocab_size, (MAX_ROWS,), generator=generator).to(self.state.P.device)

    def propose(self, width: int) -> None:
        self._place(self.prefix - min(BEHIND, self.prefix))
        self.decoder.propose(self.request, [0], width)

    def settle(self, n: int) -> Tensor:
        """What `round.settle` returns, on the device."""
        self._place(self.prefix)
        self.state.tokens.copy_(self.tokens)  # a proposal in between left its own
        return self.decoder.settle(self.request, n)

    def _place(self, drafted: int) -> None:
        self.state.place(self.prefix, drafted, self.prefix)
        self.state.root.zero_()  # if logits were not finite, this holds no token; the answer will report that

    def timings(self, runs: dict[Hashable, Callable[[], object]], **protocol) -> Timings:
        """`interleaved` by this decoder's clocks; protocol: its warm_ups, repeats and seconds.

        Compiling and recording are done before, the largest pass first (see `graphs.capture`).
        """
        for run in reversed(runs.values()) if self.state.compiled or self.decoder.graphs else ():
            run()
        used = cpu_seconds if self.decoder.target.device.type == "cpu" else None
        return interleaved(runs, partial(clock, self.decoder.target.device), used, **protocol)

    def costs(self, packed: Sequence[int], **protocol) -> Costs:
        """Costs of passes over `packed` rows, AR's first, and of drafts; protocol: as for `timings`."""
        runs = {("settle", n): partial(self.settle, n) for n in packed}
        proposed = sorted({1, self.state.depth, MAX_WIDTH})
        runs |= {("propose", N): partial(self.propose, N) for N in proposed}
        found = self.timings(runs, **protocol)
        settle_ms = tuple(found.ms["settle", n] for n in packed)
        propose_ms = tuple(accumulate((found.ms["propose", N] for N in proposed), max))  # ascending in spite of noise
        return Costs(tuple(packed), settle_ms, propose_ms, tuple(proposed), found.steady)

    def close(self) -> None:
        self.state.place(*self.cached)
        if self.state.prefix == 0:
            self.decoder.reset()  # and free the caches, which may be longer than an answer needs
        self.state.root.copy_(self.root)


def measure_costs(
    decoder: Decoder, prefix: int, positions: int, masses: Sequence[float], known: Costs | None = None
) -> Costs:
    """Probe as many row counts as the rule needs with these masses, beyond those already known.

    positions: what the request needs, so that caches do not grow again after the probe
    """
    asked = decoder.state.buckets or ASKED
    first = [n for n in asked if n <= ASKED_FIRST]
    passes = Passes(decoder, prefix, positions)
    try:
        if known is None:
            known = passes.costs(first)
        for n in asked:
            if n > known.packed[-1] and wants_more(known, masses, decoder.state.buckets):
                found = passes.timings({("settle", n): partial(passes.settle, n)})
                known = replace(
                    known, packed=(*known.packed, n), settle_ms=(*known.settle_ms, found.ms["settle", n]),
                    steady=known.steady and found.steady,
                )
    finally:
        passes.close()
    return known


def wants_more(costs: Costs, masses: Sequence[float], buckets: Sequence[int]) -> bool:
    """Whether the best drafted width lies at or beyond the end of what was measured."""
    if costs.packed[-1] >= MAX_ROWS or len(masses) < costs.packed[-1]:
        return False
    times = round_times(costs.model(buckets), len(masses), costs.draft_ms, costs.overhead_ms)
    return best_drafted(masses, times) >= costs.packed[-1] - 1


# Masses

def shipped_file(decoder: Decoder) -> Path | None:
    """The curve's file beside the head, if there is one. It is of all tokens: a head that scores fewer learns its own."""
    draft = decoder.draft
    path = draft.directory and draft.directory / CURVE
    return path if path and path.is_file() and scored_tokens(draft) is None else None


def curve_of(decoder: Decoder, shipped: Path | None) -> tuple[MassCurve, Path]:
    """The pair's curve and its file: the one beside the head, or else the one learned so far."""
    depth = decoder.state.depth
    if shipped:
        return read_shipped(shipped, depth, "the curve is learned"), shipped
    learned = cache_directory() / "curves" / f"{pair_digest(decoder)}.json"
    try:
        return MassCurve.read(learned, depth), learned
    except (OSError, ValueError):  # not there, or not ours: start anew
        return MassCurve.empty(depth), learned


# A deployment: costs and masses on one machine

class Deployment:
    """What a decoder knows of costs and masses, and the policies that follow.

    Attributes:
        curve, curve_file: the pair's mass curve and where it is kept
        shipped: whether it lies beside the head; then it is used as it is, however few rounds it counts
        costs: by prefix length, as far as needed so far
        compiled: whether these costs are of compiled layers
        probed: seconds spent measuring them here; 0 if all came from disk
        paces: how long rounds take in use, against those costs, also by prefix length
        back_offs: what drafting has earned so far, by the width asked for
    """

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        shipped = shipped_file(decoder)
        self.curve, self.curve_file = curve_of(decoder, shipped)
        self.shipped = shipped is not None
        self.costs: dict[int, Costs] = {}
        self.compiled = decoder.state.compiled
        self.probed = 0.0
        self.paces: defaultdict[int, Pace] = defaultdict(Pace)
        self.back_offs = {width: BackOff() for width in ("auto", "round")}

    def policy(self, options: Options, custom: bool, prompt_tokens: int, new_tokens: int) -> Policy:
        """The policy of one answer, for the width "auto" or "round".

        A custom method need not propose best first, so the curve does not apply to its trees, and its author wants to
        see it run: it gets one width, never AR. A curve is learned only from trees of the default rank cap, since it
        serves all later answers.
        """
        costs = self.costs_at(prompt_tokens, new_tokens)
        decision = self.decision(costs)
        if custom:
            return FixedWidth(max(decision.drafted_width, 1) if decision else UNINFORMED)
        learn = self.learn if decision is None and options.rank_cap == Options.rank_cap else None
        back_off = self.back_offs[options.width]
        back_off.pace = self.paces[self.prefix_for(prompt_tokens, new_tokens)]
        return policy_of(options.width, decision, costs, self.decoder.state.buckets, back_off, learn)

    @torch.no_grad()
    def costs_at(self, prompt_tokens: int, new_tokens: int, reprobe: bool = False) -> Costs:
        """Costs for an answer of that size; probed where neither this decoder nor the disk knows them."""
        decoder, prefix = self.decoder, self.prefix_for(prompt_tokens, new_tokens)
        if self.compiled != decoder.state.compiled:  # compiling has failed since: what was measured is not used any more
            self.compiled = decoder.state.compiled
            self.costs.clear()
        key = cost_key(decoder, prefix)
        path = cache_directory() / "costs" / f"{digest(json.dumps(key))[:16]}.json"
        known = None if reprobe else self.costs.get(prefix) or read_costs(path, key)
        if known is None or wants_more(known, self.known_masses, decoder.state.buckets):
            started = time.perf_counter()
            known = measure_costs(decoder, prefix, prompt_tokens + new_tokens, self.known_masses, known)
            self.probed += time.perf_counter() - started
            if self.compiled != decoder.state.compiled:  # it failed meanwhile
                return self.costs_at(prompt_tokens, new_tokens, reprobe)
            if known.steady:
                keep(path, {"key": key, "costs": asdict(known)}, "the next start probes again")
            else:
                remark = "its costs serve this run and are not kept, the next one probes again"
                warnings.warn(f"the probe was {DISTURBED}: {remark}", stacklevel=2)
        self.costs[prefix] = known
        return known

    def prefix_for(self, prompt_tokens: int, new_tokens: int) -> int:
        """The prefix length that stands for an answer of that size."""
        return prefix_bucket(prompt_tokens + new_tokens // 2, self.decoder.target.context)

    @property
    def known_masses(self) -> list[float]:
        """Best first; empty while the curve is still being learned."""
        return self.curve.masses if self.shipped or self.curve.rounds >= LEARNED else []

    def decision(self, costs: Costs) -> Decision | None:
        """The rule on the mass curve; None while that is still being learned."""
        return decide_by(self.curve, costs, self.decoder.state.buckets) if self.known_masses else None

    def learn(self, masses: Sequence[float], depths: Sequence[int]) -> None:
        """Add the nodes (N,) of a proposed tree to the curve, and keep the curve on disk."""
        if not self.known_masses:
            self.curve.add(masses, depths)
            if self.curve.rounds % SAVED_EVERY == 0:
                keep(self.curve_file, asdict(self.curve), "it is learned anew at the next start")

    def lines(self, prompt_tokens: int, new_tokens: int) -> list[str]:
        """What `--explain` prints."""
        costs = self.costs_at(prompt_tokens, new_tokens)
        decision = self.decision(costs)
        probed = f"probed in {self.probed:.1f} s" if self.probed else "probed by an earlier start"
        lines = [f"costs on {device_name(self.decoder.target.device)}, {probed}: {costs}"]
        if decision is None:
            known = f"{self.curve.rounds} of {LEARNED} rounds are known"
            return [*lines, f"no mass curve of this pair yet, {known}: each round goes by its own masses"]
        return [*lines, f"masses: means of {self.curve.rounds} rounds, {self.curve_file}", *decision.lines()]


def decide_by(curve: MassCurve, costs: Costs, buckets: Sequence[int] = ()) -> Decision:
    """The rule on a mass curve at these costs."""
    chain = curve.chain_accepted or curve.chain_masses
    return decide(curve.masses, costs.model(buckets), costs.draft_ms, costs.overhead_ms, chain, curve.accepted)


def policy_of(
    width: str, decision: Decision | None, costs: Costs, buckets: Sequence[int], back_off: BackOff,
    learn: Callable[[list[float], list[float]], None] | None = None,
) -> Policy:
    """The policy of an answer that begins now, for the width "auto" or "round".

    decision: None while the mass curve is being learned: every round goes by its own masses, and `learn` sees them.
        If it is AR, nothing is drafted, so a change of costs goes unnoticed until --reprobe
    """
    if width == "auto" and decision and decision.width == 0:
        return FixedWidth(0)
    back_off.begin(decision)
    times = costs.times(buckets)
    if width == "auto" and decision:
        return AutoWidth(decision.width, times, back_off)
    rate = max(decision.tokens_per_second.values()) / 1e3 if decision else 1.0 / times[0]
    proposed = MAX_WIDTH if learn else len(times) - 1  # whatever is kept of the tree
    return RoundWidth(costs.times(buckets, proposed), costs.proposal_ms(proposed), rate, back_off, learn)


def prefix_bucket(positions: int, context: int) -> int:
    """The prefix length that costs are measured at for this one."""
    return min(next((bucket for bucket in PREFIXES if bucket >= positions), PREFIXES[-1]), context)


def cost_key(decoder: Decoder, prefix: int) -> dict:
    """Everything that a round's cost depends on: of the weights only shapes and layout."""
    target, draft, state = decoder.target, decoder.draft, decoder.state
    return {
        "code": code_digest(),
        "torch": torch.__version__,
        "device": device_name(target.device),
        "dtype": str(target.dtype),
        "target": repr(target.config),
        "draft": repr(draft.config),
        "draft_vocabulary": scored_tokens(draft),
        "weight_bytes": weight_bytes(target),
        "attention": type(state.body).__name__,
        "compiled": state.compiled,
        "positions": decoder.max_length if state.static else 0,
        "prefix": prefix,
    }


@cache
def code_digest() -> str:
    """Of the files TIMED, as this program found them."""
    root = Path(__file__).parents[1]
    return digest("".join((root / f"{name}.py").read_text(encoding="utf-8") for name in TIMED))


def pair_digest(decoder: Decoder) -> str:
    """Identifies a pair by its shapes, the tokens scored, and its norms' weights, which no two trained models share."""
    norms = [decoder.target.norm.weight, decoder.draft.norm.weight, decoder.draft.hidden_norm.weight]
    weights = [weight.float().tolist() for weight in norms]
    shapes = [repr(decoder.target.config), repr(decoder.draft.config), scored_tokens(decoder.draft)]
    return digest(json.dumps([*shapes, weights]))[:16]


def scored_tokens(draft: DraftHead) -> int | None:
    """How many tokens the head scores; None: all."""
    return None if draft.vocabulary is None else len(draft.vocabulary)


def read_costs(path: Path, key: dict) -> Costs | None:
    """The costs measured under this key; None if there are no usable ones."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return costs_of(values["costs"]) if values["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def costs_of(values: dict) -> Costs:
    """Costs from JSON. Raises KeyError, TypeError or ValueError for anything else."""
    tables = (tuple(values[name]) for name in ("packed", "settle_ms", "propose_ms", "proposed"))
    costs = Costs(*tables, steady=bool(values["steady"]))
    costs.model(), costs.proposal_ms(1)  # these refuse what cannot be a measurement
    if not all(0 < ms < inf for ms in costs.propose_ms):
        raise ValueError("a proposal's time is finite and above 0 ms")
    return costs


def keep(path: Path, values: dict, otherwise: str) -> None:
    """Write a JSON file, whole or not at all. A failure is only a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values) + "\n")
    except OSError as error:
        warnings.warn(f"cannot keep {path}: {error.strerror or error}; {otherwise}", stacklevel=2)
