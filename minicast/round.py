"""One round: the static state and the two functions over it (paper, §3.4 and Appendix C).

Symbols: P committed positions in both caches, b pending root (emitted, in neither cache), L block depth, N nodes
proposed, n = N + 1 packed rows, A accepted nodes, R = A + 1 tokens committed a round, S cache slots, V vocabulary,
F = taps·H width of the features, the outputs of the target's layers that the drafter taps.

    `propose`   1 draft, 2 propose, 3 pack
    `settle`    4 verify, 5 walk, 6 commit

Both read and write `State` alone, at fixed addresses, so that the same two functions run as they are on a CPU and are
replayed from CUDA graphs on a GPU (`graphs.capture`). Step 7, emit, is in `answer`, and what repeats it all in `decode`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from graphs.capture import ROWS
from graphs.masks import EVERYTHING, TILE
from minicast.methods import Method, Proposal, no_tree
from minicast.sampling import NO_CHOICE, SamplingParams, is_integer
from minicast.tree import NonFinite, Tree
from minicast.verify import target_choices, walk, walk_on_host
from minicast.width import MAX_WIDTH
from model.device import to_host
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.linear import Linear
from model.transformer import CAUSAL, KVCache, Layer, Target, Window

MAX_ROWS = MAX_WIDTH + 1  # packed rows of the widest tree
BUCKETS = (1, 16, 24, 32, 48, 64, 96, MAX_ROWS)  # packed rows that static rounds are padded to
COMPILED_BUCKETS = tuple(sorted({*ROWS, *BUCKETS}))  # and compiled ones that are not static
PREFILL_ROWS = 512  # prompt positions a pass: bounds the memory of a long prompt
NON_FINITE_SCORES = -2
FAULTS = {  # what a round reports in place of the next token
    NO_CHOICE: "the target gave non-finite logits; try --dtype float32, or check the checkpoint",
    NON_FINITE_SCORES: "the drafter gave non-finite scores; check its checkpoint, or use method 'ar'",
}


@dataclass(frozen=True)
class Request:
    """What stays the same through all rounds of one answer.

    Attributes:
        method: proposes each round's tree
        rank_cap: K, ranks kept at each depth; None keeps all
        params: how the target's choice is made
        stochastic: by the paper's verifier rather than the direct walk
        custom: not a method of ours, so its trees are checked
        tap: collect features for the drafter
        deepest: most levels a tree can have, known without looking at it
    """

    method: Method
    rank_cap: int | None
    params: SamplingParams
    stochastic: bool
    custom: bool
    tap: bool
    deepest: int

    def constants(self) -> "Request":
        """What a captured `settle` has baked in, so the key it is kept under.

        Not the method, which only `propose` uses, nor the seed, which the graph reads from a buffer. Whether the method is
        ours says how many children a row may have, which only the stochastic verifier asks.
        """
        return replace(self, method=no_tree, custom=self.custom and self.stochastic, params=replace(self.params, seed=0))


class State:
    """Everything that lives across rounds, at fixed addresses.

    Attributes:
        depth: L; slots: S; body: attention and masks, see `graphs.masks`
        P: (1,) int64, committed positions; `prefix` is the same on the host, equal at the start of every round
        D: (1,) int64, positions that the drafter has read into its cache, ≤ P; `drafted` on the host
        root: (1,) int64, b; seed: (1,) int64, the request's
        target_cache, draft_cache: slots < P, and < D, hold committed positions; above is scratch of the running round
        features: (1, S, F), tap features of committed positions, written by `prefill` and `settle`; those of positions
            from D on wait for the drafter, those below have been read
        rows: 0, 1, 2, … int64, to index with
        tapped: positions whose features are there; less than P after rounds that did not tap
        tokens, parents, depths: (MAX_ROWS,) int64, log_mass: (MAX_ROWS,) float32, visible: (MAX_ROWS, MAX_ROWS)
            bool, the pack: row 0 is the root, parents are packed rows, a padding row is its own parent and sees
            only itself; written by `pack`, read by `settle`
        cached_ids: token ids of the committed positions, for reuse by a prompt that starts with them
        static: shapes are fixed, and no pass of a round depends on a host value that changes between rounds
        visits: the target chooses only at the rows that the walk visits: on a CPU, where each choice costs a pass over
            the vocabulary and host reads are free. Elsewhere all rows choose at once, so that the walk needs no host
    """

    def __init__(self, target: Target, draft: DraftHead | None, body):
        self.target, self.draft, self.body, self.static = target, draft, body, body.static
        self.depth = draft.block_size - 1 if draft else 0
        device = target.device
        self.visits = device.type == "cpu" and not body.static
        self.P, self.D, self.root, self.seed = torch.zeros(4, 1, dtype=torch.int64, device=device)
        self.rows = torch.arange(max(MAX_ROWS, PREFILL_ROWS), device=device)
        self.tokens = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.parents = self.rows[:MAX_ROWS].clone()
        self.depths = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.log_mass = torch.zeros(MAX_ROWS, device=device)
        self.visible = torch.eye(MAX_ROWS, dtype=torch.bool, device=device)
        self.slots = 0
        self.reset()

    @property
    def compiled(self) -> bool:
        """Whether layers run compiled; not where compiling has failed."""
        return self.body.compiled_layer is not None and not self.body.compiled_layer.failed

    @property
    def run_linear(self) -> Callable:
        """Runs a linear layer that is in no layer, (layer, x) -> y."""
        return self.body.compiled_layer.run_linear if self.body.compiled_layer else Linear.__call__

    @property
    def buckets(self) -> tuple[int, ...]:
        """Packed rows that rounds are padded to, ascending; none: a round runs as many as it has."""
        return BUCKETS if self.static else COMPILED_BUCKETS if self.compiled else ()

    def place(self, prefix: int, drafted: int, tapped: int) -> None:
        """Set the counters, on the host and on the device."""
        self.prefix, self.drafted, self.tapped = prefix, drafted, tapped
        self.P.fill_(prefix)
        self.D.fill_(drafted)

    def reset(self) -> None:
        """Forget the cached prefix, and free the caches, unless graphs may hold their addresses."""
        self.place(0, 0, 0)
        self.cached_ids: list[int] = []
        if not self.static or not self.slots:
            self.slots = 0
            self.target_cache = self.draft_cache = self.features = None
            return
        for cache in (self.target_cache, self.draft_cache):
            if cache:
                cache.data.zero_()
        if self.features is not None:
            self.features.zero_()

    def reserve(self, positions: int) -> bool:
        """Room for `positions` committed positions and the widest round above them, in whole tiles.

        True where the caches grew: the prefix moves along, and what was captured holds addresses of old ones.
        """
        slots = positions + max(MAX_ROWS, self.depth + 1)
        slots += -slots % TILE
        if slots <= self.slots:
            return False
        P, target, draft = self.prefix, self.target, self.draft
        if P == 0:  # nothing to move: free the old caches before there are new ones
            self.slots = 0
            self.reset()
        target_cache = KVCache(target.config, slots, target.dtype, target.device)
        draft_cache = features = None
        if draft:
            draft_cache = KVCache(draft.config, slots, target.dtype, target.device)
            width = len(draft.taps) * target.config.hidden
            features = torch.zeros(1, slots, width, dtype=target.dtype, device=target.device)
        if P:
            target_cache.data[..., :P, :] = self.target_cache.data[..., :P, :]
        if P and draft:
            draft_cache.data[..., :P, :] = self.draft_cache.data[..., :P, :]
            features[:, :P] = self.features[:, :P]
        # All at once: where memory or a person's patience ends above, the old ones are still whole.
        self.slots, self.target_cache, self.draft_cache, self.features = slots, target_cache, draft_cache, features
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

    def rewind(self, prefix: int) -> None:
        """Keep the first `prefix` committed positions; what lies above is overwritten before it is read."""
        self.place(prefix, min(self.drafted, prefix), min(self.tapped, prefix))
        del self.cached_ids[prefix:]

    def window(self, offsets: Tensor, visible: Tensor | str) -> Window:
        """The pass of rows at P + offsets (n,) that see the prefix and, of each other, what `visible` says.

        visible: (n, n) bool, CAUSAL or EVERYTHING
        """
        return self.body.window(self.P, self.prefix, offsets, visible, self.slots)


def prefill(state: State, token_ids: Sequence[int], tap: bool) -> Tensor:
    """Commit the prompt's ids beyond the cached prefix, chunk by chunk -> logits (1, V) after its last token."""
    target, length = state.target, len(token_ids)
    bar = tqdm(desc="prompt", total=length, initial=state.prefix, unit=" tokens", delay=1, leave=False, disable=None)
    with bar:  # it shows itself on a terminal, once a second is over
        while state.prefix < length:
            chunk = list(token_ids[state.prefix : state.prefix + PREFILL_ROWS])
            tokens, taps = torch.tensor([chunk], device=target.device), state.draft.taps if tap else ()
            hidden, features = target(tokens, state.target_cache, state.window(state.rows[: len(chunk)], CAUSAL), taps)
            if tap:  # before `commit` counts them: after Ctrl-C in between, the next turn would read what is not there
                state.features[:, state.prefix : state.prefix + len(chunk)] = features
            state.commit(chunk, tap)
            state.P.fill_(state.prefix)
            if tap:
                read_features(state, state.prefix - state.drafted)
            bar.update(len(chunk))
    return target.logits(hidden[0, -1:], state.run_linear)


def read_features(state: State, count: int) -> None:
    """Feed the drafter's cache from the feature cache: `count` positions from D on, in passes like those of a prompt.

    Where shapes are fixed (compiled or captured) every draft reads L + 1 positions, however many were committed; what
    lies beyond P is overwritten before anything attends to it.
    """
    for first in range(0, count, PREFILL_ROWS):
        rows = min(count - first, PREFILL_ROWS)
        slots = state.D + state.rows[:rows]
        layer = state.body.compiled_layer if rows == state.depth + 1 else None  # other numbers of rows would each be compiled
        remember, run_linear = (layer.remember, state.run_linear) if layer else (Layer.remember, Linear.__call__)
        state.draft.extend(state.features.index_select(1, slots), state.draft_cache, slots, remember, run_linear)
        state.D.copy_(torch.minimum(state.D + rows, state.P))
        state.drafted = min(state.drafted + rows, state.prefix)


def draft(state: State, depth: int | None = None) -> Tensor:
    """Step 1: one pass of the drafter over [b, mask × L] at positions P..P+L -> log q (L, V), or its first `depth` rows."""
    if state.draft is None:
        raise UsageError("this method drafts, and the decoder has no draft head: give it one")
    if depth is not None and not (is_integer(depth) and depth >= 0):
        raise UsageError(f"the drafter scores a whole number of depths, from the first on, not {depth!r}")
    rows = state.depth + 1
    read_features(state, rows if state.buckets else state.prefix - state.drafted)
    block = torch.full((1, rows), state.draft.mask_token_id, device=state.P.device)
    block[:, :1] = state.root
    hidden = state.draft(block, state.draft_cache, state.window(state.rows[:rows], EVERYTHING), state.target)
    return state.draft.log_q(hidden[0, :depth], state.target, state.run_linear)


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
    if state.buckets:  # padding rows see themselves alone, at b's position
        state.parents[n:] = rows[n:]
        state.depths[n:].zero_()
        state.log_mass[n:].zero_()
        state.visible[n:] = torch.eye(MAX_ROWS, dtype=torch.bool, device=rows.device)[n:]


def propose(state: State, request: Request, token_ids: Sequence[int], width: int) -> Tree:
    """Steps 1–3: draft, propose, pack. The method decides whether to draft at all."""
    proposal = Proposal(list(token_ids), width, request.rank_cap, partial(draft, state), state.static, state.P.device)
    try:
        tree = request.method(proposal)
        if request.custom:
            from minicast.custom_method import check_tree

            check_tree(tree, state.target.vocab_size)
        tree = tree.to(state.P.device)
    except NonFinite as error:  # builders of fixed shape cannot raise: `settle` reports for them
        raise UserError(FAULTS[NON_FINITE_SCORES]) from error
    if tree.width:  # else one row is run, and row 0 is the same in every pack but for its token
        pack(state, tree)
    return tree


def settle(state: State, request: Request, n: int) -> Tensor:
    """Steps 4–6: verify the pack's first n rows, walk, commit the accepted path.

    Returns what the host needs to know as one tensor (2 + 2M,) int64, M = deepest + 1 the longest path: A, the
    target's own next token (below 0: a key of FAULTS), the path's tokens (M,) and its packed rows (M,), of which
    the first A + 1 count. `Settled.read` is its reader.
    """
    tokens, parents, depths, visible = state.tokens[:n], state.parents[:n], state.depths[:n], state.visible[:n, :n]
    deepest = min(n - 1, request.deepest)
    tokens[:1] = state.root  # there already, unless nothing was proposed and so nothing packed
    # 4 verify
    taps = state.draft.taps if request.tap else ()
    hidden, features = state.target(tokens[None], state.target_cache, state.window(depths, visible), taps)
    logits = state.target.logits(hidden[0], state.run_linear)
    # 5 walk
    children = None
    if request.stochastic and n > 1:
        from minicast.theorem3 import siblings

        most = n - 1 if request.custom else min(n - 1, request.rank_cap or n - 1)
        children = siblings(tokens, parents, state.log_mass[:n], most)
    if not state.visits:
        positions = state.P + 1 + state.rows[: deepest + 1]
        choices = target_choices(logits, request.params, positions, children, state.seed, depths)
        walked = walk(tokens, parents, visible, choices, deepest)
    else:
        walked = walk_on_host(tokens, parents, logits, request.params, state.P, children, deepest)
    # 6 commit: the path's rows move down to slots P, P + 1, …; entries past A copy themselves and stay scratch
    slots = state.P + state.rows[: deepest + 1]
    state.target_cache.move(state.P + walked.path, slots)
    if request.tap:
        state.features.index_copy_(1, slots, features.index_select(1, walked.path))
    state.P += walked.accepted + 1
    state.root.copy_(walked.next_root)
    next_token = torch.where(state.log_mass[:n].isnan().any(), NON_FINITE_SCORES, walked.next_root)
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

    @property
    def fault(self) -> str | None:
        """Why there is no next token, or None."""
        return FAULTS.get(self.next_token)

    @classmethod
    def read(cls, outcome: Tensor) -> "Settled":
        """Copy the outcome of `settle`, (2 + 2M,), to the host: the one host sync of a round whose tree needs none."""
        accepted, next_token, *rest = to_host(outcome).tolist()
        tokens, path = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return cls(tokens[: accepted + 1], path[: accepted + 1], next_token)
