"""The round loop: one decoder in which a method is only a proposal (paper, §3.4 and Appendix C).

Symbols: P committed positions in both caches, b pending root (emitted, in neither cache), L block depth, N nodes
proposed, n = N + 1 packed rows, A accepted nodes, R = A + 1 tokens committed a round, F = taps·H feature width,
S cache slots, V vocabulary.

A round is seven steps: draft, propose, pack (`propose`), verify, walk, commit (`settle`), emit (`Decoder.stream`).
A chain is a tree without branches and autoregressive decoding a tree without nodes, so there is one round for all.

Methods are in `methods`, trees are built in `tree`, walked in `verify`, sampled in `sampling`, and their width is
chosen in `width`; this module holds the state and the order of things.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

import torch
from torch import Tensor

from graphs.capture import CompiledLayer, CudaRecorder, Graphs, to_host
from graphs.masks import BODIES, CAUSAL, EVERYTHING, TILE
from minicast.methods import METHODS, Method, Proposal, best_first, chain, no_tree
from minicast.sampling import SamplingParams
from minicast.tree import NonFinite, Tree
from minicast.verify import siblings, target_choices, visit, walk
from minicast.width import MAX_WIDTH, UNINFORMED, FixedWidth, clamp_width
from model.config import check_pair
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.transformer import KVCache, Target, Window

MAX_ROWS = MAX_WIDTH + 1  # packed rows of the widest tree
BUCKETS = (1, 16, 24, 32, 48, 64, 96, MAX_ROWS)  # packed rows that static rounds are padded to
PREFILL_ROWS = 512  # prompt positions a pass: bounds the memory of a long prompt
FAULTS = {  # what a round reports in place of the next token
    -1: "the target gave non-finite logits; try --dtype float32, or check the checkpoint",
    -2: "the drafter gave non-finite scores; check its checkpoint, or use method 'ar'",
}


@dataclass
class Output:
    """One finished answer.

    Attributes:
        token_ids: new tokens only, EOS included if reached
        round_lengths: R of every round, counted after cuts; the first token comes from the prefill, not a round
        widths: N of every round
        stop_reason: "eos", "length" or "context"
        prefill_seconds: prompt to first token, the drafter's prefill included
        decode_seconds: the paper's timer (Appendix D): opens after prefill and, where something is drafted, after
            the first draft; closes after truncation
        wall_seconds: prompt to last token
    """

    token_ids: list[int] = field(default_factory=list)
    round_lengths: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    stop_reason: str = "length"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass
class Round:
    """What one round did.

    Attributes:
        token_ids: tokens emitted, after cuts
        accepted: how many of them, from the left, were drafted; the rest are the target's own
        tree: the N nodes proposed; None for the prefill
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


@dataclass(frozen=True)
class Request:
    """What stays the same through all rounds of one answer.

    Attributes:
        method: proposes each round's tree
        rank_cap: K
        params: how the target's choice is made
        stochastic: by the paper's verifier rather than the direct walk
        tap: collect features for the drafter
        deepest: most levels a tree can have, known without looking at it
    """

    method: Method
    rank_cap: int | None
    params: SamplingParams
    stochastic: bool
    tap: bool
    deepest: int

    def constants(self) -> "Request":
        """All of it that a graph of `settle` holds: not how trees are proposed, and the seed is in a buffer."""
        return replace(self, method=no_tree, params=replace(self.params, seed=0))


class State:
    """Everything that lives across rounds, at fixed addresses.

    Attributes:
        P: (1,) int64, committed positions; `prefix` is the same on the host, equal at the start of every round
        D: (1,) int64, positions that the drafter has read into its cache, ≤ P; `drafted` on the host
        root: (1,) int64, b; seed: (1,) int64, the request's
        target_cache, draft_cache: slots < P hold committed positions; above is scratch of the running round
        features: (1, S, F), tap features of committed positions; written by `settle`, read by the drafter
        tapped: positions whose features are there; less than P after rounds that did not tap
        tokens, parents, depths: (MAX_ROWS,) int64, log_mass: (MAX_ROWS,) float32, visible: (MAX_ROWS, MAX_ROWS)
            bool, the pack: row 0 is the root, parents are packed rows, a padding row is its own parent and sees
            only itself; written by `pack`, read by `settle`
        cached_ids: token ids of the committed positions, for reuse by a prompt that starts with them
        static: shapes are padded and nothing below reads a host value that changes from round to round
    """

    def __init__(self, target: Target, draft: DraftHead | None, body):
        self.target, self.draft, self.body, self.static = target, draft, body, body.static
        self.depth = draft.block_size - 1 if draft else 0
        device = target.device
        self.P = torch.zeros(1, dtype=torch.int64, device=device)
        self.D = torch.zeros(1, dtype=torch.int64, device=device)
        self.root = torch.zeros(1, dtype=torch.int64, device=device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows = torch.arange(max(MAX_ROWS, PREFILL_ROWS), device=device)
        self.tokens = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.parents = self.rows[:MAX_ROWS].clone()
        self.depths = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.log_mass = torch.zeros(MAX_ROWS, device=device)
        self.visible = torch.eye(MAX_ROWS, dtype=torch.bool, device=device)
        self.slots = 0
        self.reset()

    def reset(self) -> None:
        """Forget the cached prefix, and free the caches, unless graphs may hold their addresses."""
        self.prefix = self.drafted = self.tapped = 0
        self.cached_ids: list[int] = []
        if not self.static or not self.slots:
            self.slots = 0
            self.target_cache = self.draft_cache = self.features = None
            return
        self.P.zero_()
        self.D.zero_()
        for cache in (self.target_cache, self.draft_cache):
            if cache:
                cache.data.zero_()
        if self.features is not None:
            self.features.zero_()

    def reserve(self, positions: int) -> bool:
        """Room for `positions` committed positions and the widest round above them, in whole tiles.

        True where the caches grew: that forgets the prefix, and what was captured holds addresses of old ones.
        """
        slots = positions + max(MAX_ROWS, self.depth + 1)
        slots += -slots % TILE
        if slots <= self.slots:
            return False
        self.slots = 0
        self.reset()
        self.slots = slots
        target, draft = self.target, self.draft
        self.target_cache = KVCache(target.config, slots, target.dtype, target.device)
        if draft:
            self.draft_cache = KVCache(draft.config, slots, target.dtype, target.device)
            width = len(draft.taps) * target.config.hidden
            self.features = torch.zeros(1, slots, width, dtype=target.dtype, device=target.device)
        return True

    def buffers(self) -> list[Tensor]:
        """What a round reads and changes, less the caches, of which it only changes what lies above P."""
        return [self.P, self.D, self.root, self.tokens, self.parents, self.depths, self.log_mass, self.visible]

    def commit(self, token_ids: list[int], tap: bool) -> None:
        """Follow on the host what was committed on the device."""
        self.cached_ids += token_ids
        self.prefix += len(token_ids)
        if tap:
            self.tapped = self.prefix

    def keep(self, prefix: int) -> None:
        """Keep the first `prefix` committed positions; what lies above is overwritten before it is read."""
        self.prefix = prefix
        self.drafted, self.tapped = min(self.drafted, prefix), min(self.tapped, prefix)
        self.P.fill_(prefix)
        self.D.fill_(self.drafted)
        del self.cached_ids[prefix:]

    def window(self, offsets: Tensor, visible: Tensor | str) -> Window:
        """The pass of rows at P + offsets (n,) that see the prefix and, of each other, what `visible` says."""
        return self.body.window(self.P, self.prefix, offsets, visible, self.slots)


def prefill(state: State, token_ids: Sequence[int], tap: bool) -> Tensor:
    """Commit the prompt's ids beyond the cached prefix, chunk by chunk -> logits (1, V) after its last token."""
    target = state.target
    while state.prefix < len(token_ids):
        chunk = list(token_ids[state.prefix : state.prefix + PREFILL_ROWS])
        rows = state.rows[: len(chunk)]
        tokens = torch.tensor([chunk], device=target.device)
        taps = state.draft.taps if tap else ()
        hidden, features = target(tokens, state.target_cache, state.window(rows, CAUSAL), taps)
        if tap:
            state.features[:, state.prefix : state.prefix + len(chunk)] = features
        state.commit(chunk, tap)
        state.P.fill_(state.prefix)
        if tap:
            read_features(state, state.prefix - state.drafted)
    return target.logits(hidden[0, -1:])


def read_features(state: State, count: int) -> None:
    """Feed the drafter's cache from the feature cache: `count` positions from D on.

    Static rounds read L + 1 whatever was committed; what lies beyond P is overwritten before it is seen.
    """
    slots = state.D + state.rows[:count]
    state.draft.extend(state.features.index_select(1, slots), state.draft_cache, slots)
    state.D.copy_(torch.minimum(state.D + count, state.P))
    state.drafted = min(state.drafted + count, state.prefix)


def draft(state: State) -> Tensor:
    """Step 1: one pass of the drafter over [b, mask × L] at positions P..P+L -> log q (L, V)."""
    rows = state.depth + 1
    behind = rows if state.static else state.prefix - state.drafted
    if behind:
        read_features(state, behind)
    block = torch.full((1, rows), state.draft.mask_token_id, device=state.P.device)
    block[:, :1] = state.root
    hidden = state.draft(block, state.draft_cache, state.window(state.rows[:rows], EVERYTHING), state.target)
    return torch.log_softmax(state.target.logits(hidden[0]), dim=-1)


def pack(state: State, tree: Tree) -> None:
    """Step 3: lay [b, z_1 … z_N] into the pack. Row v holds node v − 1, so parents shift by one."""
    n, rows = tree.width + 1, state.rows[:MAX_ROWS]
    state.tokens[:1] = state.root
    state.tokens[1:n] = tree.tokens
    state.depths[1:n] = tree.depths
    state.log_mass[1:n] = tree.log_mass
    real = tree.log_mass > -torch.inf  # a static builder may have found fewer nodes than it had room for
    state.parents[1:n] = torch.where(real, tree.parents + 1, rows[1:n])
    state.visible[:n, :n] = tree.ancestors()
    if state.static:  # padding rows see themselves alone, at b's position
        state.parents[n:] = rows[n:]
        state.depths[n:].zero_()
        state.visible[n:] = torch.eye(MAX_ROWS, dtype=torch.bool, device=rows.device)[n:]


def propose(state: State, request: Request, token_ids: Sequence[int], width: int) -> Tree:
    """Steps 1–3: draft, propose, pack. The method decides whether to draft at all."""
    proposal = Proposal(token_ids, width, request.rank_cap, lambda: draft(state), state.static, state.P.device)
    try:
        tree = request.method(proposal).to(state.P.device)
    except NonFinite as error:  # builders of fixed shape cannot raise: `settle` reports for them
        raise UserError(FAULTS[-2]) from error
    pack(state, tree)
    return tree


def settle(state: State, request: Request, n: int) -> Tensor:
    """Steps 4–6: verify the pack's first n rows, walk, commit the accepted path.

    Returns what the host needs to know as one tensor (2 + 2M,) int64, M rows of path at most: A, the target's own
    next token (below 0: a key of FAULTS), the path's tokens (M,) and its packed rows (M,), of which the first
    A + 1 count. `Settled.read` is its reader.
    """
    tokens, parents, depths, visible = state.tokens[:n], state.parents[:n], state.depths[:n], state.visible[:n, :n]
    deepest = min(n - 1, request.deepest)
    tokens[:1] = state.root  # there already, unless nothing was proposed and so nothing packed
    # 4 verify
    taps = state.draft.taps if request.tap else ()
    hidden, features = state.target(tokens[None], state.target_cache, state.window(depths, visible), taps)
    logits = state.target.logits(hidden[0])
    # 5 walk
    children = None
    if request.stochastic and n > 1:
        children = siblings(tokens, parents, state.log_mass[:n], min(n - 1, request.rank_cap or n - 1))
    if request.params.greedy or state.static:
        positions = state.P + 1 + state.rows[: deepest + 1]
        choices = target_choices(logits, request.params, positions, children, state.seed, depths)
        walked = walk(tokens, parents, visible, choices, deepest)
    else:  # a choice is a pass over the vocabulary: make it only at the rows visited
        walked = visit(tokens, parents, logits, request.params, state.P, children, deepest)
    # 6 commit: the path's rows move down to slots P, P + 1, …; entries past A copy themselves and stay scratch
    slots = state.P + state.rows[: deepest + 1]
    state.target_cache.move(state.P + walked.path, slots)
    if request.tap:
        state.features.index_copy_(1, slots, features.index_select(1, walked.path))
    state.P += walked.accepted + 1
    state.root.copy_(walked.next_root)
    next_token = torch.where(state.log_mass[:n].isnan().any(), -2, walked.next_root)  # a key of FAULTS
    return torch.cat((torch.stack((walked.accepted, next_token)), tokens[walked.path], walked.path))


@dataclass(frozen=True)
class Settled:
    """A round's outcome on the host.

    Attributes:
        tokens: b and the accepted tokens, now committed
        path: their packed rows
        next_token: the target's own, the new b; or a key of FAULTS
    """

    tokens: list[int]
    path: list[int]
    next_token: int

    @classmethod
    def read(cls, outcome: Tensor) -> "Settled":
        """Copy the outcome of `settle` to the host: the one host sync of a round whose tree needs none."""
        accepted, next_token, *rest = to_host(outcome).tolist()
        tokens, path = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return cls(tokens[: accepted + 1], path[: accepted + 1], next_token)


def cut(tokens: list[int], room: int, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
    """The emitted part of a round's tokens: up to the first stop id, at most `room`; and whether it was a stop id."""
    for count, token in enumerate(tokens[:room], start=1):
        if token in stop_ids:
            return tokens[:count], True
    return tokens[:room], False


def checked(build, *values):
    """What `build` makes of the values; a value that it refuses is a usage error."""
    try:
        return build(*values)
    except ValueError as error:
        raise UsageError(str(error)) from error


class Decoder:
    """A target, a drafter and their buffers; one answer at a time.

    Args:
        target, draft: from `load_target` and `load_draft`; without a drafter only "ar" and own methods that do not
            draft can run
        max_length: positions that static caches hold at first; caches grow with the request
        compile: compile the layers and, on CUDA, replay rounds from graphs; None: on CUDA only, where the
            attention allows it
        attention: "sdpa" (live slice, the default where no graphs are used), "static" (whole cache under an
            explicit mask, padded shapes) or "flex" (FlexAttention, the default for graphs)

    Caches persist between calls: a prompt that starts with the cached ids reuses them. `reset` forgets them.
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
                    f"a head of block size {draft.block_size} in {draft.dtype} does not go with this decoder: "
                    f"at most {MAX_ROWS}, and the target's {target.dtype}"
                )
        self.target, self.draft, self.max_length = target, draft, max_length
        self.state = State(target, draft, BODIES[name](CompiledLayer() if compile else None))
        self.graphs = Graphs(CudaRecorder(target.device)) if cuda and compile else None
        self.output = Output()
        self.deployment = None  # costs and masses, known once a width has to be chosen: `minicast.probe.Deployment`

    def reset(self) -> None:
        """Forget the cached prefix and free the caches."""
        self.state.reset()

    def generate(self, prompt_ids: Sequence[int], **options) -> Output:
        """Answer a prompt; options as for `stream`."""
        for _ in self.stream(prompt_ids, **options):
            pass
        return self.output

    @torch.no_grad()
    def stream(
        self,
        prompt_ids: Sequence[int],
        method: str | Method = "cast",
        width: int | str = "auto",
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        rank_cap: int | None = 8,
        verifier: str = "direct",
    ) -> Iterator[Round]:
        """Yield the answer round by round; `self.output` is complete after each.

        Args:
            prompt_ids: at least one id; never altered
            method: "ar", "dflash", "cast", or a function from `Proposal` to `Tree`
            width: N for "cast", 0..127; 0 is "ar"; "auto": one that pays on this machine, found by a probe that is
                kept on disk; "round": likewise, for each round; both fall back on AR where drafting does not pay;
                or a policy of your own, an object with `width`, `trim` and `observe` like `FixedWidth`
            max_new_tokens: exact bound on new tokens; 0 gives none
            temperature, top_k, top_p, seed: see `minicast.sampling`; temperature 0 is greedy
            stop_ids: ids that end the answer; the one reached is emitted
            rank_cap: K, ranks kept at each position; None keeps all
            verifier: "direct" or "stochastic" (see `minicast.verify`), only matters at temperature > 0

        Raises:
            UsageError: for a request that can't be served
            UserError: when the target's logits are not finite
        """
        room, full = self._room(prompt_ids, max_new_tokens)
        policy = self._policy(method, width, len(prompt_ids), room)
        started = time.perf_counter()
        state, output = self.state, Output(stop_reason=full)
        self.output = output
        params = checked(SamplingParams, temperature, top_k, top_p, seed)
        request = self._request(method, policy.width, rank_cap, params, verifier)
        if room == 0:
            return
        token_ids = list(prompt_ids)

        self._begin(token_ids, room, request)
        emitted = [self._first_token(token_ids, request)]
        output.prefill_seconds = self._clock() - started
        opened = None if request.tap else self._clock()
        tree, settled = None, Settled([], [], emitted[0])
        while True:
            emitted, ended = cut(emitted, room - len(output.token_ids), stop_ids)  # 7 emit
            fault = FAULTS.get(emitted[-1])
            if fault:
                emitted.pop()
            token_ids += emitted
            output.token_ids += emitted
            state.keep(min(state.prefix, len(token_ids)))  # what was cut must not be inherited by a next turn
            if tree is not None:
                output.round_lengths.append(len(emitted))
                output.widths.append(tree.width)
                output.decode_seconds = time.perf_counter() - opened  # reading the outcome waited for the device
                policy.observe(tree.width, len(emitted))
            output.wall_seconds = time.perf_counter() - started
            reason = "eos" if ended else full if len(output.token_ids) == room else None
            yield Round(emitted, min(max(len(settled.tokens) - 1, 0), len(emitted)), tree, settled.path, reason)
            if self.output is not output:
                raise UserError("another answer was begun on this decoder: give each a decoder of its own")
            if fault:
                self.reset()  # not-a-number left in a cache would survive masking
                raise UserError(fault)
            if reason:
                output.stop_reason = reason
                return
            tree = policy.trim(self._propose(request, token_ids, policy.width))  # 1 draft, 2 propose, 3 pack
            opened = opened or self._clock()
            settled = Settled.read(self._settle(request, self._rows(tree)))  # 4 verify, 5 walk, 6 commit
            state.commit(settled.tokens, request.tap)
            emitted = settled.tokens[1:] + [settled.next_token]

    def _policy(self, method: str | Method, width, prompt_tokens: int, new_tokens: int):
        """What chooses each round's width, see `minicast.width`. The first of a deployment measures costs."""
        if hasattr(width, "observe"):
            return width
        if isinstance(width, Integral):
            return FixedWidth(checked(clamp_width, width))
        if width not in ("auto", "round"):
            raise UsageError(f"unknown width {width!r}: choose auto, round or a number from 0 to {MAX_WIDTH}")
        own_method = callable(method) and method not in METHODS.values()
        if self.draft is None or new_tokens == 0 or not (own_method or method in ("cast", best_first)):
            return FixedWidth(UNINFORMED)
        if self.deployment is None:
            from minicast.probe import Deployment

            self.deployment = Deployment(self)
        return self.deployment.policy(width, own_method, prompt_tokens, new_tokens)

    def _request(self, method, width: int, rank_cap: int | None, params: SamplingParams, verifier: str) -> Request:
        """The request, checked."""
        if isinstance(method, str):
            if method not in METHODS:
                raise UsageError(f"unknown method {method!r}: choose from {', '.join(METHODS)}")
            method = METHODS[method]
        if method is best_first and width == 0:
            method = no_tree
        if self.draft is None and method in (chain, best_first):
            raise UsageError("this method needs a draft head; give one, or use method 'ar'")
        if rank_cap is not None and rank_cap < 1:
            raise UsageError(f"rank_cap must be at least 1, or None to keep all ranks, got {rank_cap}")
        if verifier not in ("direct", "stochastic"):
            raise UsageError(f"unknown verifier {verifier!r}: choose from direct, stochastic")
        return Request(
            method=method,
            rank_cap=rank_cap,
            params=params,
            stochastic=verifier == "stochastic" and not params.greedy,
            tap=self.draft is not None and method is not no_tree,
            deepest=self.state.depth if method in METHODS.values() else MAX_WIDTH,
        )

    def _room(self, prompt_ids: Sequence[int], max_new_tokens: int) -> tuple[int, str]:
        """How many new tokens fit, and the stop reason when they are all there."""
        length, context = len(prompt_ids), self.target.context
        if length == 0:
            raise UsageError("the prompt has no tokens; give at least one")
        if not all(0 <= token < self.target.vocab_size for token in prompt_ids):
            raise UsageError(f"the prompt has ids outside the target's vocabulary of {self.target.vocab_size}")
        if length > context:
            raise UsageError(f"the prompt has {length} tokens, the target's context is {context}; shorten the prompt")
        if max_new_tokens < 0:
            raise UsageError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
        return min(max_new_tokens, context - length), "length" if max_new_tokens <= context - length else "context"

    def _begin(self, token_ids: list[int], room: int, request: Request) -> None:
        """Make room, and keep the longest cached prefix of the prompt; its last token runs again for its logits."""
        state = self.state
        self._reserve(len(token_ids) + room)
        state.seed.fill_(request.params.seed)
        shared = 0
        for cached, token in zip(state.cached_ids, token_ids[:-1]):
            if cached != token:
                break
            shared += 1
        state.keep(min(shared, state.tapped) if request.tap else shared)

    def _reserve(self, positions: int) -> None:
        """Room for an answer that ends at `positions`; static caches have few sizes, so that they seldom grow."""
        if self.state.static:
            positions = min(1 << (max(positions, self.max_length) - 1).bit_length(), self.target.context)
        if self.state.reserve(positions) and self.graphs:
            self.graphs.clear(f"caches grew to {positions} positions")

    def _first_token(self, token_ids: list[int], request: Request) -> int:
        """Prefill, and the target's choice after the prompt, which becomes b."""
        logits = prefill(self.state, token_ids, request.tap)
        self.state.root.copy_(target_choices(logits, request.params, self.state.P))
        return self.state.root.item()  # host sync: the first token

    def _propose(self, request: Request, token_ids: Sequence[int], width: int) -> Tree:
        """`propose`, replayed where graphs are in use and the method can be captured."""
        if width == 0 and request.method is best_first:  # a policy's pause: the drafter rests
            request = replace(request, method=no_tree)
        state, method = self.state, request.method
        while state.static and request.tap and state.prefix - state.drafted > state.depth + 1:
            read_features(state, min(state.prefix - state.drafted, PREFILL_ROWS))  # after rounds without a draft
        if not (self.graphs and getattr(method, "capturable", False)):
            return propose(state, request, token_ids, width)
        if method is no_tree:  # nothing to pack: a step of AR is the one replay that follows
            return no_tree(Proposal(token_ids, 0, None, None, True, state.P.device))
        drafted = state.drafted
        tree = self.graphs.run(
            ("propose", method, width, request.rank_cap), lambda: propose(state, request, (), width),
            state.buffers(), f"{method.__name__} of width {width}",
        )
        # A replay runs nothing on the host, and recording ran it too often.
        state.drafted = min(drafted + state.depth + 1, state.prefix)
        return tree.to(state.P.device, copy=True)

    def _settle(self, request: Request, n: int) -> Tensor:
        """`settle`, replayed where graphs are in use."""
        state = self.state
        if not self.graphs:
            return settle(state, request, n)
        return self.graphs.run(
            ("settle", n, request.constants()), lambda: settle(state, request, n), state.buffers(), f"{n} rows"
        )

    def _rows(self, tree: Tree) -> int:
        """Packed rows that this round runs: those of the tree, or of the bucket that holds it."""
        n = tree.width + 1
        return next(bucket for bucket in BUCKETS if bucket >= n) if self.state.static else n

    def _clock(self) -> float:
        """Seconds, with the device caught up (paper, Appendix D)."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


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
