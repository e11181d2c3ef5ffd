"""One answer: what is asked for, what comes of it round by round, and how long it takes.

Symbols: N tree nodes, K rank cap, R tokens committed a round.

`Options` is the request as a person writes it and `Output` its outcome; `Answer` does step 7 of each round, emit. The
loop that uses them is in `decode`.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral

import torch

from graphs.capture import SetupTime
from minicast.methods import METHODS, Method
from minicast.policy import Policy, is_policy
from minicast.round import Settled
from minicast.sampling import SamplingParams, is_integer
from minicast.tree import RANK_CAP, Tree
from minicast.width import MAX_WIDTH
from model.device import clock
from model.errors import UsageError


@dataclass(frozen=True)
class Options:
    """How an answer is decoded. What cannot be served is a `UsageError` when the options are made.

    Attributes:
        method: "ar", "dflash", "cast", or a function from `Proposal` to `Tree`
        width: N for "cast", 0..127; 0 is "ar"; "auto": one that pays on this machine, found by a probe that is
            kept on disk; "round": likewise, for each round; both fall back on AR where drafting does not pay, but
            give a method of your own one width throughout; or a policy of your own, see `policy.Policy`
        max_new_tokens: exact bound on new tokens; 0 gives none
        temperature, top_k, top_p, seed: see `minicast.sampling`; temperature 0 is greedy
        stop_ids: ids that end the answer; the one reached is emitted
        rank_cap: K, ranks kept at each position; None keeps all
        verifier: "direct" or "stochastic" (see `minicast.verify`), only matters at temperature > 0. What the latter
            draws depends on the tree, so its text repeats for a seed where the width is fixed, not timed
    """

    method: str | Method = "cast"
    width: str | int | Policy = "auto"
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_ids: Sequence[int] = ()
    rank_cap: int | None = RANK_CAP
    verifier: str = "direct"

    def __post_init__(self):
        N, K, ids, most = self.width, self.rank_cap, self.stop_ids, self.max_new_tokens
        listed = isinstance(ids, Collection) and not isinstance(ids, (str, bytes))
        # Only strings are looked up: another object may be neither hashable nor comparable.
        method, width, verifier = (each if isinstance(each, str) else "" for each in (self.method, N, self.verifier))
        chooses = is_policy(N) or width in ("auto", "round") or (is_integer(N) and N >= 0)
        rules = {
            "method": (callable(self.method) or method in METHODS, f"one of {', '.join(METHODS)}, or a function"),
            "width": (chooses, f"auto, round, one of 0 to {MAX_WIDTH}, or an object with width, keep and observe"),
            "max_new_tokens": (is_integer(most) and most >= 0, "a whole number of at least 0"),
            "rank_cap": (K is None or (is_integer(K) and K >= 1), "at least 1, or none to keep all ranks"),
            "verifier": (verifier in ("direct", "stochastic"), "direct or stochastic"),
            "stop_ids": (listed and all(is_integer(each) and each >= 0 for each in ids), "a collection of token ids"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UsageError(f"{name} must be {rule}, got {getattr(self, name)!r}")
        self.sampling  # raises, too

    @property
    def sampling(self) -> SamplingParams:
        """What concerns the target's law and its choices."""
        try:
            return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
        except ValueError as error:
            raise UsageError(str(error)) from error


@dataclass
class Output:
    """An answer: finished, or complete up to its last round.

    Attributes:
        token_ids: new tokens only, EOS included if reached
        round_lengths: R of every round, counted after cuts; the first token comes from the prefill, not a round
        widths: N of every round; where shapes are fixed, with the nodes of no mass that fill up a tree
        stop_reason: "eos", "length" or "context"; None before the answer has ended
        prefill_seconds: prompt to first token, the drafter's prefill included
        decode_seconds: the paper's timer (Appendix D): opens after prefill and, where something is drafted, after
            the first draft; closes after truncation
        wall_seconds: prompt to last token; what a caller does between rounds counts in none of the three
        reused: prompt tokens that were in the caches already; the others were prefilled
        setup_seconds: compiling layers, laying out weights for them, recording graphs; in none of the three either
    """

    token_ids: list[int] = field(default_factory=list)
    round_lengths: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    stop_reason: str | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    wall_seconds: float = 0.0
    reused: int = 0
    setup_seconds: float = 0.0


def ms_per_token(outputs: Sequence[Output], timer: str = "decode_seconds") -> float | None:
    """Time over the number of new tokens, of all answers together (paper, Appendix D); None where no time passed.

    timer: a field of `Output`, in seconds
    """
    tokens, seconds = sum(len(output.token_ids) for output in outputs), sum(getattr(output, timer) for output in outputs)
    return seconds * 1e3 / tokens if tokens and seconds else None


@dataclass
class Round:
    """What one round did.

    Attributes:
        token_ids: tokens emitted, after cuts
        accepted: how many of them, from the left, were drafted; the rest are the target's own
        tree: the N nodes verified, those that the policy kept; None for the prefill
        path: packed rows accepted, from row 0, the root
        stop_reason: why the answer ends here, or None
    """

    token_ids: list[int]
    accepted: int = 0
    tree: Tree | None = None
    path: list[int] = field(default_factory=list)
    stop_reason: str | None = None

    @property
    def prefill(self) -> bool:
        return self.tree is None

    @property
    def width(self) -> int:
        return 0 if self.tree is None else self.tree.width


class Answer:
    """An answer in the making.

    Args:
        prompt_ids: never altered
        room: new tokens that fit, at least 1; full: the stop reason when they are all there
        stop_ids: end the answer, see `Options`

    Attributes:
        token_ids: prompt and all tokens emitted so far
        output: what was emitted, less its times
    """

    def __init__(self, prompt_ids: list[int], room: int, full: str, stop_ids: Collection[int]):
        self.token_ids, self.room, self.full, self.stop_ids = list(prompt_ids), room, full, stop_ids
        self.output = Output()

    def emit(self, settled: Settled, tree: Tree | None = None) -> Round:
        """Step 7: the round's tokens, cut at a stop id and at the limit. tree: what was verified; None for the prefill."""
        output, accepted = self.output, settled.tokens[1:]  # tokens[0] is b, emitted a round ago
        new = accepted if settled.fault else [*accepted, settled.next_token]
        new = new[: self.room - len(output.token_ids)]
        stop = next((count for count, token in enumerate(new, start=1) if token in self.stop_ids), None)
        emitted = new[:stop]
        self.token_ids += emitted
        output.token_ids += emitted
        if tree is not None:
            output.round_lengths.append(len(emitted))
            output.widths.append(tree.width)
        output.stop_reason = "eos" if stop else self.full if len(output.token_ids) == self.room else None
        return Round(emitted, min(len(accepted), len(emitted)), tree, settled.path, output.stop_reason)


class Stopwatch:
    """Writes the times of an `Output`. It stands still during setup, and while the caller has a round.

    Attributes:
        opened: when the paper's timer did, see `Output.decode_seconds`; None before
    """

    def __init__(self, output: Output, device: torch.device, setup: SetupTime):
        self.output, self.device, self.setup, self.setup_before = output, device, setup, setup.seconds
        self.away, self.opened = 0.0, None
        self.started = self.round_started = self.now()

    def now(self, waits: bool = False) -> float:
        """Seconds; waits: for the device to catch up first."""
        return (clock(self.device) if waits else time.perf_counter()) - self.setup.seconds - self.away

    def prefilled(self, drafts: bool) -> None:
        """The first token is there; drafts: whether rounds draft, so that the paper's timer opens later."""
        self.output.prefill_seconds = self.now(waits=True) - self.started
        self.opened = None if drafts else self.now()
        self._so_far()

    def drafted(self) -> None:
        """The tree is there: the paper's timer opens after the first."""
        if self.opened is None:
            self.opened = self.now(waits=True)

    def round_ends(self) -> float:
        """The round's seconds. There is nothing to wait for: reading its outcome has waited for the device."""
        now = self._so_far()
        self.output.decode_seconds = now - self.opened
        return now - self.round_started

    def _so_far(self) -> float:
        now = self.now()
        self.output.wall_seconds, self.output.setup_seconds = now - self.started, self.setup.seconds - self.setup_before
        return now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The caller has the round; afterwards the next one begins."""
        began = self.now()
        yield
        self.away += self.now() - began
        self.round_started = self.now()
