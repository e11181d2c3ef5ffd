"""The round loop: one decoder in which a method is only a proposal (paper, §3.4 and Appendix C).

Symbols: P committed positions in both caches, b pending root (emitted, in neither cache), L block depth, N nodes
proposed, n = N + 1 packed rows, A accepted nodes, R = A + 1 tokens committed a round.

A round is seven steps: draft, propose, pack (`propose`), verify, walk, commit (`settle`), emit (`Answer.emit`).
A chain is a tree without branches and autoregressive decoding a tree without nodes, so there is one round for all.

The two functions and the state between them are in `round`, what an answer is in `answer`, methods in `methods`; trees are
built in `tree` and walked in `verify`, tokens are chosen in `sampling`, and `policy` chooses the width by the rule of
`width`. This module holds the order of things.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral

import torch
from torch import Tensor

from graphs.capture import CompiledLayer, CudaRecorder, Graphs, SetupTime
from graphs.masks import BODIES
from minicast.answer import Answer, Options, Output, Round, Stopwatch
from minicast.methods import METHODS, best_first, chain, is_custom, no_tree
from minicast.policy import FixedWidth, Policy, is_policy
from minicast.round import MAX_ROWS, Request, Settled, State, pack, prefill, propose, read_features, settle
from minicast.sampling import is_integer
from minicast.tree import Tree
from minicast.verify import target_choices
from minicast.width import MAX_WIDTH, UNINFORMED, clamp_width
from model.config import check_pair
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.linear import lay_out
from model.transformer import Target


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

    Caches persist between calls: a prompt that starts with the cached ids reuses them. `reset` forgets them. For the whole
    process a decoder on CUDA turns cuDNN's attention off, and one that compiles sets Dynamo's limits.

    Raises UsageError for a head that does not fit the target, and for an attention that is unknown or that graphs cannot hold.

    Attributes:
        output: the last answer's, complete up to its last round
        state: buffers and caches, see `minicast.round.State`; graphs: recorded rounds, None where there are none
        setup: what compiling layers, laying out weights and recording graphs took
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
            if draft.block_size > MAX_ROWS:
                raise UsageError(f"the head has block size {draft.block_size}: give one of at most {MAX_ROWS}")
            if draft.dtype != target.dtype:
                raise UsageError(f"the head is in {draft.dtype}, the target in {target.dtype}: load both in one dtype")
        self.target, self.draft, self.max_length = target, draft, max_length
        if compile and not cuda:
            lay_out(target, draft, compiled=True)  # before the compiler, too, takes memory
        layer = CompiledLayer() if compile else None
        if layer and not cuda:
            layer.try_out()
        self.state = State(target, draft, BODIES[name](layer))
        self.setup = layer.setup if layer else SetupTime()
        self.graphs = Graphs(CudaRecorder(target.device), self.setup) if cuda and compile else None
        if cuda:  # cuDNN's attention plans for each number of keys anew, longer than a round takes
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.output = Output()
        self.deployment = None

    def reset(self) -> None:
        """Forget the cached prefix and free the caches; static ones, whose addresses graphs hold, are zeroed."""
        self.state.reset()

    def generate(self, prompt_ids: Sequence[int], **options) -> Output:
        """Answer a prompt; arguments and errors are those of `stream`."""
        for _ in self.stream(prompt_ids, **options):
            pass
        return self.output

    @torch.no_grad()
    def stream(self, prompt_ids: Sequence[int], **options) -> Iterator[Round]:
        """Yield the answer round by round; `self.output` is complete after each.

        Args:
            prompt_ids: at least one id; never altered
            options: method, width, max_new_tokens, temperature, …: those of `minicast.answer.Options`

        Raises, as all generators no sooner than the first round is asked for:
            UsageError: for a request that can't be served
            ValueError: for a policy whose width is not a whole number of at least 0
            UserError: when the logits of the target, or the scores of the drafter, are not finite
        """
        wanted = Options(**options)
        prompt_ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else list(prompt_ids)
        room, full = self.room(prompt_ids, wanted.max_new_tokens)
        policy = self.policy(wanted, len(prompt_ids), room)
        request = self.request(wanted, drafts=policy != FixedWidth(0))
        state, answer = self.state, Answer(prompt_ids, room, full, wanted.stop_ids)
        self.output = output = answer.output
        if room == 0:
            output.stop_reason = full
            return
        watch = Stopwatch(output, self.target.device, self.setup)
        output.reused = self._begin(prompt_ids, room, request)
        settled = Settled([], [], self._first_token(prompt_ids, request))
        watch.prefilled(drafts=request.tap)
        step = answer.emit(settled)
        while True:
            if settled.fault:
                self.reset()  # not-a-number left in a cache would survive masking
            with watch.paused():
                yield step
            if step.stop_reason:
                return
            if settled.fault:
                raise UserError(settled.fault)
            if self.output is not output or state.prefix == 0:
                raise UserError("the decoder was reset or began another answer: give each answer a decoder of its own")
            width = clamp_width(policy.width)
            tree = self.propose(request, answer.token_ids, width)  # 1 draft 2 propose 3 pack
            tree = self._kept(tree, policy.keep(tree))
            watch.drafted()
            settled = Settled.read(self.settle(request, self._rows(tree)))  # 4 verify 5 walk 6 commit
            state.commit(settled.tokens, request.tap)
            step = answer.emit(settled, tree)  # 7 emit
            if len(answer.token_ids) < state.prefix:  # what was cut must not be inherited by a next turn
                state.rewind(len(answer.token_ids))
            seconds = watch.round_ends()
            if not settled.fault:  # else the tree's masses may be NaN
                policy.observe(tree.width, len(step.token_ids), seconds)

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
            raise UsageError(f"the prompt must be token ids below {len(ids)}: encode text with the target's own tokenizer")
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
        self.setup.seconds += time.perf_counter() - began
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
