"""The round loop: one decoder in which a method is only a proposal (paper, §3.4 and Appendix C).

Symbols: P committed positions in both caches, b pending root (emitted, in neither cache), L block depth, N nodes
proposed, n = N + 1 packed rows, A accepted nodes, R = A + 1 tokens committed a round.

A round is seven steps: draft, propose, pack (`propose`), verify, walk, commit (`settle`), emit (`Decoder.stream`).
A chain is a tree without branches and autoregressive decoding a tree without nodes, so there is one round for all.

The two functions and the state between them are in `round`, methods in `methods`; trees are built in `tree` and walked
in `verify`, tokens are chosen in `sampling`, and `policy` chooses the width by the rule of `width`. This module holds
the order of things.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral

import torch
from torch import Tensor

from graphs.capture import CompiledLayer, CudaRecorder, Graphs, Once
from graphs.masks import BODIES
from minicast.methods import METHODS, Method, best_first, chain, is_custom, no_tree
from minicast.policy import FixedWidth, Policy, is_policy
from minicast.round import (
    FAULTS, MAX_ROWS, Request, Settled, State, pack, prefill, propose, read_features, settle,
)
from minicast.sampling import SamplingParams, is_integer
from minicast.tree import RANK_CAP, Tree
from minicast.verify import target_choices
from minicast.width import MAX_WIDTH, UNINFORMED, clamp_width
from model.config import check_pair
from model.device import clock
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.linear import lay_out
from model.transformer import Target


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
    """One finished answer.

    Attributes:
        token_ids: new tokens only, EOS included if reached
        round_lengths: R of every round, counted after cuts; the first token comes from the prefill, not a round
        widths: N of every round; where shapes are fixed, with the nodes of no mass that fill up a tree
        stop_reason: "eos", "length" or "context"
        prefill_seconds: prompt to first token, the drafter's prefill included
        decode_seconds: the paper's timer (Appendix D): opens after prefill and, where something is drafted, after
            the first draft; closes after truncation
        wall_seconds: prompt to last token; what a caller does between rounds counts in none of the three
        reused: prompt tokens that were in the caches already; the others were prefilled
        once_seconds: compiling layers, laying out weights for them, recording graphs; in none of the three either
    """

    token_ids: list[int] = field(default_factory=list)
    round_lengths: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    stop_reason: str = "length"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    wall_seconds: float = 0.0
    reused: int = 0
    once_seconds: float = 0.0


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


def cut(tokens: list[int], room: int, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
    """The emitted part of a round's tokens: up to the first stop id, at most `room`; and whether it was a stop id."""
    for count, token in enumerate(tokens[:room], start=1):
        if token in stop_ids:
            return tokens[:count], True
    return tokens[:room], False


class Stopwatch:
    """Writes the times of an `Output`. It stands while layers compile, graphs are recorded, and the caller has a round.

    Attributes:
        opened: when the paper's timer did, see `Output.decode_seconds`; None before
    """

    def __init__(self, output: Output, device: torch.device, once: Once):
        self.output, self.device, self.once, self.once_before = output, device, once, once.seconds
        self.away, self.opened = 0.0, None
        self.started = self.round_started = self.now()

    def now(self, waits: bool = False) -> float:
        """Seconds; waits: for the device to catch up first."""
        return (clock(self.device) if waits else time.perf_counter()) - self.once.seconds - self.away

    def prefilled(self, drafts: bool) -> None:
        self.output.prefill_seconds = self.now(waits=True) - self.started
        self.opened = None if drafts else self.now()

    def drafted(self) -> None:
        if self.opened is None:
            self.opened = self.now(waits=True)

    def emitted(self, in_round: bool) -> float:
        """The round's seconds. There is nothing to wait for: reading its outcome has waited for the device."""
        now, output = self.now(), self.output
        if in_round:
            output.decode_seconds = now - self.opened
        output.wall_seconds, output.once_seconds = now - self.started, self.once.seconds - self.once_before
        return now - self.round_started

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = self.now()
        yield
        self.away += self.now() - began


class Decoder:
    """A target, a drafter and their buffers; one answer at a time.

    Args:
        target, draft: from `load_target` and `load_draft`; without a drafter only "ar" and own methods that do not
            draft can run
        max_length: positions that static caches hold at first; caches grow with the request
        compile: compile the layers and, on CUDA, replay rounds from graphs; None: on CUDA only, where the
            attention allows it. On a CPU this changes how the models hold their weights; the next answer of a
            decoder that does not compile changes it back
        attention: "sdpa" (live slice, the default where no graphs are used), "static" (whole cache under an
            explicit mask, padded shapes) or "flex" (FlexAttention, the default for graphs)

    Caches persist between calls: a prompt that starts with the cached ids reuses them. `reset` forgets them.

    Attributes:
        output: the last answer's, complete up to its last round
        state: buffers and caches, see `minicast.round.State`; graphs: recorded rounds, None where there are none
        once: seconds spent on what is done once
        deployment: costs and learned masses, None before a width has had to be chosen: `minicast.probe.Deployment`
    """

    def __init__(
        self, target: Target, draft: DraftHead | None = None, max_length: int = 4096, compile: bool | None = None,
        attention: str | None = None,
    ):
        cuda = target.device.type == "cuda"
        compile = cuda and attention != "sdpa" if compile is None else compile
        name = attention or ("flex" if cuda and compile else "sdpa")
        if name not in BODIES:
            raise UsageError(f"unknown attention {name!r}: choose from {', '.join(BODIES)}")
        if cuda and compile and not BODIES[name].static:
            raise UsageError(f"graphs cannot hold attention {name!r}: choose static or flex, or do not compile")
        if draft:
            check_pair(draft.config, target.config)
            if draft.block_size > MAX_ROWS or draft.dtype != target.dtype:
                raise UsageError(
                    f"the head has block size {draft.block_size} and {draft.dtype}: give one of at most {MAX_ROWS}, "
                    f"loaded in the target's {target.dtype}"
                )
        self.target, self.draft, self.max_length = target, draft, max_length
        if compile and not cuda:
            lay_out(target, draft, compiled=True)  # before the compiler, too, takes memory
        layer = CompiledLayer() if compile else None
        if layer and not cuda:
            layer.try_out()
        self.state = State(target, draft, BODIES[name](layer))
        self.once = layer.once if layer else Once()
        self.graphs = Graphs(CudaRecorder(target.device), self.once) if cuda and compile else None
        if cuda:  # cuDNN's attention plans for each number of keys anew, longer than a round takes
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.output = Output()
        self.deployment = None

    def reset(self) -> None:
        """Forget the cached prefix and free the caches; static ones, whose addresses graphs hold, are zeroed."""
        self.state.reset()

    def generate(self, prompt_ids: Sequence[int], **options) -> Output:
        """Answer a prompt; `options` are those of `Options`."""
        for _ in self.stream(prompt_ids, **options):
            pass
        return self.output

    @torch.no_grad()
    def stream(self, prompt_ids: Sequence[int], **options) -> Iterator[Round]:
        """Yield the answer round by round; `self.output` is complete after each.

        Args:
            prompt_ids: at least one id; never altered
            options: those of `Options`

        Raises, as all generators no sooner than the first round is asked for:
            UsageError: for a request that can't be served
            ValueError: for a policy whose width is not a whole number of at least 0
            UserError: when the logits of the target, or the scores of the drafter, are not finite
        """
        wanted = Options(**options)
        token_ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else list(prompt_ids)
        room, full = self.room(token_ids, wanted.max_new_tokens)
        policy = self.policy(wanted, len(token_ids), room)
        request = self.request(wanted, drafts=policy != FixedWidth(0))
        state, output = self.state, Output(stop_reason=full)
        self.output, watch = output, Stopwatch(output, self.target.device, self.once)
        if room == 0:
            return
        output.reused = self._begin(token_ids, room, request)
        tree, settled = None, Settled([], [], self._first_token(token_ids, request))
        watch.prefilled(drafts=request.tap)
        while True:
            # 7 emit: of the first token there was no round
            accepted, fault = settled.tokens[1:], FAULTS.get(settled.next_token)
            new = accepted if fault else [*accepted, settled.next_token]
            emitted, ended = cut(new, room - len(output.token_ids), wanted.stop_ids)
            token_ids += emitted
            output.token_ids += emitted
            if fault:
                self.reset()  # not-a-number left in a cache would survive masking
            elif len(token_ids) < state.prefix:  # what was cut must not be inherited by a next turn
                state.rewind(len(token_ids))
            seconds = watch.emitted(in_round=tree is not None)
            if tree is not None:
                output.round_lengths.append(len(emitted))
                output.widths.append(tree.width)
                if not fault:  # else the tree's masses may be NaN
                    policy.observe(tree.width, len(emitted), seconds)
            reason = "eos" if ended else full if len(output.token_ids) == room else None
            output.stop_reason = reason or full
            with watch.paused():
                yield Round(emitted, min(len(accepted), len(emitted)), tree, settled.path, reason)
            if reason:
                return
            if fault:
                raise UserError(fault)
            if self.output is not output or state.prefix == 0:
                raise UserError("the decoder was reset or began another answer: give each answer a decoder of its own")
            width = clamp_width(policy.width)
            watch.round_started = watch.now()
            tree = self.propose(request, token_ids, width)  # 1 draft 2 propose 3 pack
            tree = self._kept(tree, policy.keep(tree))
            watch.drafted()
            settled = Settled.read(self.settle(request, self._rows(tree)))  # 4 verify 5 walk 6 commit
            state.commit(settled.tokens, request.tap)

    def policy(self, options: Options, prompt_tokens: int, new_tokens: int) -> Policy:
        """What chooses each round's width, see `minicast.policy`. "auto" and "round" may have to measure costs."""
        if is_policy(options.width):
            return options.width
        if isinstance(options.width, Integral):
            return FixedWidth(clamp_width(options.width))
        request = self.request(options, drafts=True)
        if self.draft is None or new_tokens < 2 or request.method in (no_tree, chain):  # the first comes without a round
            return FixedWidth(UNINFORMED)
        if self.deployment is None:
            from minicast.probe import Deployment

            self.deployment = Deployment(self)
        return self.deployment.policy(options, request.custom, prompt_tokens, new_tokens)

    def request(self, options: Options, drafts: bool) -> Request:
        """What the rounds need of `options`; drafts: false where the width is 0 throughout."""
        method = options.method if callable(options.method) else METHODS[options.method]
        if method is best_first and not drafts:
            method = no_tree
        if self.draft is None and method in (chain, best_first):
            raise UsageError("this method needs a draft head; give one, or use method 'ar'")
        return Request(
            method=method, rank_cap=options.rank_cap, params=options.sampling, custom=is_custom(method),
            stochastic=options.verifier == "stochastic" and options.temperature > 0,
            tap=self.draft is not None and method is not no_tree,
            deepest=MAX_WIDTH if is_custom(method) else self.state.depth,
        )

    def room(self, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[int, str]:
        """How many new tokens fit, and the stop reason when they are all there."""
        length, context, ids = len(prompt_ids), self.target.context, range(self.target.vocab_size)
        if length == 0:
            raise UsageError("the prompt has no tokens; give at least one")
        if not all(is_integer(token) and token in ids for token in prompt_ids):
            raise UsageError(f"the prompt must be ids below {len(ids)}, the target's vocabulary: is the tokenizer its own?")
        if length > context:
            raise UsageError(f"the prompt has {length} tokens, the target's context is {context}; shorten the prompt")
        return min(max_new_tokens, context - length), "length" if max_new_tokens <= context - length else "context"

    def _begin(self, token_ids: list[int], room: int, request: Request) -> int:
        """Keep the longest cached prefix of the prompt, whose length is returned, and make room for the rest.

        The prompt's last token runs again for its logits.
        """
        state = self.state
        state.seed.fill_(request.params.seed)
        shared = 0
        for cached, token in zip(state.cached_ids, token_ids[:-1]):
            if cached != token:
                break
            shared += 1
        state.rewind(min(shared, state.tapped) if request.tap else shared)
        self.reserve(len(token_ids) + room)
        return state.prefix

    def reserve(self, positions: int) -> None:
        """Room for an answer that ends at `positions`; static caches have few sizes, so that they seldom grow.

        Also the moment to lay out the weights, which another decoder on the same target may have done its own way.
        """
        began = time.perf_counter()
        lay_out(self.target, self.draft, compiled=self.state.compiled)
        self.once.seconds += time.perf_counter() - began
        if self.state.static:
            positions = min(1 << (max(positions, self.max_length) - 1).bit_length(), self.target.context)
        if self.state.reserve(positions) and self.graphs:
            self.graphs.clear(f"caches grew to {positions} positions")

    def _first_token(self, token_ids: list[int], request: Request) -> int:
        """Prefill, and the target's choice after the prompt, which becomes b."""
        logits = prefill(self.state, token_ids, request.tap)
        self.state.root.copy_(target_choices(logits, request.params, self.state.P))
        return self.state.root.item()  # host sync: the first token

    def propose(self, request: Request, token_ids: Sequence[int], width: int) -> Tree:
        """`round.propose`, replayed where graphs are in use and the method can be captured."""
        if width == 0 and request.method is best_first:  # a policy's pause: the drafter rests
            request = replace(request, method=no_tree)
        state, method = self.state, request.method
        if state.buckets and request.tap and method is not no_tree:  # after rounds without a draft
            read_features(state, max(state.prefix - state.drafted - (state.depth + 1), 0))
        if not (self.graphs and getattr(method, "capturable", False)):  # of AR there is nothing to capture here
            return propose(state, request, token_ids, width)
        tree = self.graphs.run(
            ("propose", method, width, request.rank_cap),
            lambda: propose(state, replace(request, custom=False), (), width),  # a check reads the tree on the host
            state.buffers(), f"{getattr(method, '__name__', 'method')} of width {width}",
        )
        state.drafted = state.prefix  # a replay counts nothing on the host, and recording counted too often
        return tree.to(state.P.device, copy=True)

    def _kept(self, tree: Tree, count: int) -> Tree:
        """The `count` best nodes, which a policy keeps. Where rounds are padded, the pack must hold no others."""
        if not (isinstance(count, Integral) and 0 <= count <= tree.width):
            raise UsageError(f"a policy keeps a whole number of nodes, here 0 to {tree.width}, not {count!r}")
        kept = tree.first(count)
        if count < tree.width and self.state.buckets:
            pack(self.state, kept)
        return kept

    def settle(self, request: Request, n: int) -> Tensor:
        """`round.settle` -> (2 + 2M,) int64, replayed where graphs are in use."""
        state = self.state
        if not self.graphs:
            return settle(state, request, n)
        return self.graphs.run(
            ("settle", n, request.constants()), lambda: settle(state, request, n), state.buffers(), f"{n} rows"
        )

    def _rows(self, tree: Tree) -> int:
        """Packed rows that this round runs: those of the tree, or of the bucket that holds it."""
        n = tree.width + 1
        return next((bucket for bucket in self.state.buckets if bucket >= n), n)


def generate(target: Target, draft: DraftHead | None, prompt_ids: Sequence[int], **options) -> Output:
    """`Decoder.generate` with one decoder kept on the target between calls."""
    return _decoder(target, draft).generate(prompt_ids, **options)


def stream(target: Target, draft: DraftHead | None, prompt_ids: Sequence[int], **options) -> Iterator[Round]:
    """`Decoder.stream` with one decoder kept on the target between calls."""
    return _decoder(target, draft).stream(prompt_ids, **options)


def _decoder(target: Target, draft: DraftHead | None) -> Decoder:
    decoder = getattr(target, "decoder", None)
    if decoder is None or decoder.draft is not draft:
        decoder = target.decoder = Decoder(target, draft)
    return decoder
