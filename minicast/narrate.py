"""One round, told step by step (`run.py --explain-round`; paper, Appendix C).

It tells what happened: `Watcher` is the decoder, and keeps what one of its rounds saw on the way. Nothing is drafted,
built or verified a second time here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from minicast.answer import Round
from minicast.decode import Decoder
from minicast.methods import UNSIZED, Proposal, best_first
from minicast.round import Request, Settled
from minicast.terminal import DIM, GREEN, PLAIN, Screen
from minicast.tree import Tree, top_ranked
from model.errors import UsageError, UserError
from model.tokenizer import Tokenizer

TABLE_RANKS = 4  # tokens shown of each q_d
TREE_NODES = 32  # nodes shown of a wider tree
MASK_ROWS = 16   # rows and columns shown of a larger mask

PROPOSES = {
    "ar": "nothing, this is autoregressive decoding",
    "dflash": "the likeliest token at each depth, a chain (paper, §2 One-pass block drafters)",
    "cast": "the N prefixes with the largest product of q, best first (paper, eq. 1 and Theorem 1)",
}
CHOOSES = {
    "greedy": "the argmax of its logits (paper, §2 Candidate trees and verification)",
    "direct": "one draw from the law of its logits (paper, Appendix C Stochastic verifier, the direct walk)",
    "stochastic": "drawn by the recursion over its children (paper, Theorem 3)",
}

Line = tuple[str, str]  # text, style
TokenText = Callable[[int], str]


@dataclass
class Seen:
    """What a round found and made on the way.

    Attributes:
        P, root: committed positions, and the id of b, when it began
        unread: committed positions that the drafter had not read yet
        log_q: (L, V), the drafter's scores; None where nothing was drafted
        positions: (n,) RoPE positions of the packed rows
        visible: (n, n), the ancestor mask
        settled: what was committed, and the target's next token
        P_after: committed positions when it ended
    """

    P: int
    root: int
    unread: int
    log_q: Tensor | None = None
    positions: list[int] = field(default_factory=list)
    visible: list[list[bool]] = field(default_factory=list)
    settled: Settled | None = None
    P_after: int = 0


class Watcher(Decoder):
    """A decoder that, while `watching`, keeps what its last round saw in `seen`."""

    watching = False
    seen: Seen | None = None

    def propose(self, request: Request, token_ids: Sequence[int], width: int) -> Tree:
        if not self.watching:
            return super().propose(request, token_ids, width)
        state, method = self.state, request.method
        seen = self.seen = Seen(state.prefix, state.root.item(), state.prefix - state.drafted)

        def watched(proposal: Proposal) -> Tree:
            def draft(depth: int | None = None) -> Tensor:
                seen.log_q = proposal.draft()
                return seen.log_q[:depth]

            return method(replace(proposal, draft=draft))

        if not (method is best_first and width == 0):  # else the decoder pauses drafting
            request = replace(request, method=watched)
        return super().propose(request, token_ids, width)

    def settle(self, request: Request, n: int) -> Tensor:
        if not self.watching:
            return super().settle(request, n)
        state, seen = self.state, self.seen
        seen.positions = (state.P + state.depths[:n]).tolist()
        seen.visible = state.visible[:n, :n].tolist()
        outcome = super().settle(request, n)
        seen.settled, seen.P_after = Settled.read(outcome), state.P.item()
        return outcome


def explain_round(
    decoder: Watcher, tokenizer: Tokenizer, prompt_ids: list[int], options: dict, number: int, screen: Screen
) -> None:
    """Decode up to round `number`, counted from 1, and explain that one.

    options: method, width and the other options of `Decoder.stream`
    UsageError if the answer has fewer rounds. Whatever ends it early, the text so far is shown.
    """
    rounds, so_far = 0, []
    try:
        for step in decoder.stream(prompt_ids, **options):
            rounds += not step.prefill
            if rounds == number:
                break
            so_far += step.token_ids
            decoder.watching = rounds + 1 == number
        else:
            raise UsageError(f"the answer has {rounds} rounds: --explain-round {number} is beyond its end")
        if decoder.seen.settled.fault:
            raise UserError(decoder.seen.settled.fault)
    except (KeyboardInterrupt, UserError):
        screen.write(tokenizer.decode(so_far))
        screen.end_line()
        raise
    method, width = options["method"], options["width"]
    verifier = options["verifier"] if options["temperature"] > 0 else "greedy"
    asked = method if method in UNSIZED else f"{method}, width {width}"
    screen.write(f"round {number} of {asked}; the answer so far: {tokenizer.decode(so_far)!r}\n")
    for line, style in round_lines(decoder.seen, step, method, verifier, tokenizer.token_text):
        screen.write(line + "\n", style)


def round_lines(seen: Seen, step: Round, method: str, verifier: str, token_text: TokenText) -> Iterator[Line]:
    """The round's seven steps, each with its meaning; verifier: a key of CHOOSES"""

    def name(token: int) -> str:
        return repr(token_text(token))

    def titled(title: str, meaning: str, lines: Iterator[Line]) -> Iterator[Line]:
        yield "", PLAIN
        yield f"{title}: {meaning}", PLAIN
        for line, style in lines:
            yield f"   {line}", style

    yield from titled(
        "1 draft", "one pass of the drafter over b and L masks gives q_1 to q_L (paper, §2 One-pass block drafters)",
        draft_lines(seen, name),
    )
    tree = step.tree.real()
    yield from titled("2 propose", PROPOSES.get(method, "what the method returns"), propose_lines(seen, tree, name))
    yield from titled(
        "3 pack", "a row sees the cached prefix, its ancestors and itself, # (paper, Appendix C Packed verification)",
        mask_lines(seen, [seen.root, *tree.tokens.tolist()], name),
    )
    yield from titled(
        "4 verify", "one pass of the target over all rows, as exact as one pass for each (paper, Lemma 1)",
        iter([(f"the target's choice at a row is {CHOOSES[verifier]}", PLAIN)]),
    )
    yield from titled(
        "5 walk", "from b on to the child with the target's choice, while there is one (paper, Appendix C The round)",
        walk_lines(seen, name),
    )
    yield from titled(
        "6 commit", "the path moves down to the slots after the prefix (paper, Appendix C KV gather and feature cache)",
        commit_lines(seen, name),
    )
    R, text = len(step.token_ids), "".join(map(token_text, step.token_ids))
    ends = f"; the answer ends here: {step.stop_reason}" if step.stop_reason else ""
    if beyond := len(seen.settled.path) - R:
        ends += f", and {beyond} more that followed {'is' if beyond == 1 else 'are'} cut"
    yield from titled(
        "7 emit", "R tokens, the accepted ones and the target's own (paper, §2 Speculative decoding)",
        iter([(f"R = {R}, of which {step.accepted} were drafted: {text!r}{ends}", PLAIN)]),
    )


def draft_lines(seen: Seen, name: Callable[[int], str]) -> Iterator[Line]:
    if seen.log_q is None:
        yield f"P = {seen.P} positions are committed, in the target's cache; b = {name(seen.root)} is emitted, not in it", PLAIN
        yield "the drafter does not run: this round is autoregressive; --method cast --width 15 drafts", PLAIN
        return
    yield f"P = {seen.P} positions are committed, in both caches; b = {name(seen.root)} is emitted, in neither", PLAIN
    L = len(seen.log_q)
    if seen.unread:
        yield f"the drafter first reads the target's features of {seen.unread} positions committed since it ran", PLAIN
    yield f"block [{name(seen.root)}, mask x {L}] at positions {seen.P} to {seen.P + L}", PLAIN


def propose_lines(seen: Seen, tree: Tree, name: Callable[[int], str]) -> Iterator[Line]:
    """The best tokens of each q_d, and the tree in the order of selection."""
    tokens, parents, depths = tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
    if seen.log_q is not None:
        yield f"the best {TABLE_RANKS} tokens at each depth; * is in the tree", PLAIN
        ranked_tokens, ranked_log_q = top_ranked(seen.log_q, TABLE_RANKS)
        placed = set(zip(depths, tokens))
        rows = zip(ranked_tokens.tolist(), ranked_log_q.exp().tolist())
        for depth, (ids, probabilities) in enumerate(rows, start=1):
            cells = (f"{q:.4f}{'*' if (depth, id) in placed else ' '}{name(id)}" for id, q in zip(ids, probabilities))
            yield f"q_{depth:<3}" + "".join(f"{cell:<22}" for cell in cells).rstrip(), PLAIN
    if not tokens:
        yield "N = 0: nothing is proposed, b goes alone", PLAIN
        return
    yield f"N = {len(tokens)} nodes; mass is the product of q down to the node, + was accepted", PLAIN
    yield "node    mass  depth  parent", PLAIN
    kept = {row - 1 for row in seen.settled.path[1:]}  # packed row v holds node v - 1
    for node, mass in enumerate(tree.log_mass.exp().tolist()[:TREE_NODES]):
        mark, style = ("+", GREEN) if node in kept else (" ", DIM)
        parent = "b" if parents[node] < 0 else parents[node] + 1
        yield f"{node + 1:4d}  {mass:.4f}  {depths[node]:5d}  {parent:>6} {mark} {name(tokens[node])}", style
    if len(tokens) > TREE_NODES:
        yield f"... and {len(tokens) - TREE_NODES} more (--show-tree lists them)", PLAIN


def mask_lines(seen: Seen, tokens: list[int], name: Callable[[int], str]) -> Iterator[Line]:
    """The pack [b, z_1 to z_N] with its ancestor mask. Row v is node v of the list above."""
    shown = min(len(tokens), MASK_ROWS)
    yield "row  position  " + "".join(f"{column:3d}" for column in range(shown)), PLAIN
    for row in range(shown):
        marks = "".join("  #" if seen.visible[row][column] else "  ." for column in range(shown))
        yield f"{row:3d}  {seen.positions[row]:8d}  {marks}  {name(tokens[row])}", PLAIN
    if len(tokens) > shown:
        yield f"... and {len(tokens) - shown} more rows and columns", PLAIN


def walk_lines(seen: Seen, name: Callable[[int], str]) -> Iterator[Line]:
    """The target's choice at each row visited, and how the drafter had ranked it."""
    path, choices = seen.settled.path, [*seen.settled.tokens[1:], seen.settled.next_token]
    for depth, (row, chosen) in enumerate(zip(path, choices)):
        thought = ""
        if seen.log_q is not None and depth < len(seen.log_q):
            log_q = seen.log_q[depth]
            rank = int((log_q > log_q[chosen]).sum()) + 1
            thought = f" (the drafter's number {rank} at depth {depth + 1}, q = {log_q[chosen].exp():.4f})"
            thought = thought if log_q[chosen].isfinite() else f" (at depth {depth + 1} the drafter does not score it)"
        accepted = depth + 1 < len(path)
        then = f"row {path[depth + 1]} carries it: accepted" if accepted else "no child carries it: the next b"
        yield f"row {row}: the target chooses {name(chosen)}{thought}; {then}", GREEN if accepted else PLAIN


def commit_lines(seen: Seen, name: Callable[[int], str]) -> Iterator[Line]:
    path = seen.settled.path
    rows, slots = (", ".join(map(str, values)) for values in (path, range(seen.P, seen.P + len(path))))
    yield f"keys, values and features of rows {rows} go to slots {slots}", PLAIN
    yield f"P = {seen.P} -> {seen.P_after}; b = {name(seen.root)} -> {name(seen.settled.next_token)}", PLAIN
