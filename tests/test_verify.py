"""The walk and the stochastic verifier: every fast form equals a slow obvious one, and the law is the
target's.

All randomness is keyed or seeded, so these tests pass or fail for good. Where a docstring states a
false-alarm probability, it is the chance that a correct implementation with another hash would fail.
"""

import itertools
import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from minicast import theorem3
from minicast.sampling import (
    ACCEPTANCE,
    PROPOSAL,
    SamplingParams,
    choose,
    gumbel,
    gumbel_noise,
    keyed_uniform,
    log_probabilities,
)
from minicast.theorem3 import Siblings, acceptance, siblings, stochastic_choices
from minicast.verify import (
    Walk,
    child_rows,
    target_choices,
    walk,
    walk_on_host,
    walk_rows,
)

# ---------------------------------------------------------------------------------------------- the walk


@dataclass
class Packed:
    """A packed tree. tokens, parents (n,) int64; visible (n, n) bool; log_mass (n,)."""

    tokens: torch.Tensor
    parents: torch.Tensor
    visible: torch.Tensor
    log_mass: torch.Tensor


def random_packed(rng, nodes, max_depth, vocab_size, padding=0, root_parent=0):
    """A random tree of at most `nodes` nodes with distinct siblings, padded with rows that are their own
    parent."""
    tokens, parents, depths, log_mass = [int(rng.integers(vocab_size))], [root_parent], [0], [0.0]
    taken = set()
    for _ in range(nodes):
        parent = int(rng.integers(len(tokens)))
        token = int(rng.integers(vocab_size))
        if depths[parent] < max_depth and (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            log_mass.append(log_mass[parent] - float(rng.exponential()))
    for _ in range(padding):
        parents.append(len(tokens))
        tokens.append(int(rng.integers(vocab_size)))
        log_mass.append(-math.inf)
    n = len(tokens)
    visible = torch.eye(n, dtype=torch.bool)
    for row in range(1, n - padding):
        visible[row] |= visible[parents[row]]
    visible[n - padding :: 2, 0] = True  # some hang off the root, as what fills up a tree of fixed shape does
    log_mass = torch.tensor(log_mass, dtype=torch.float64)
    return Packed(torch.tensor(tokens), torch.tensor(parents), visible, log_mass)


def slow_walk(packed, choices):
    """Follows the definition: from b, look through all rows for a child that carries the choice."""
    path = [0]
    while True:
        matches = [
            row
            for row in range(1, len(packed.tokens))
            if packed.parents[row] == path[-1] != row and packed.tokens[row] == choices[path[-1]]
        ]
        if not matches:
            return path, int(choices[path[-1]])
        (row,) = matches
        path.append(row)


@pytest.mark.parametrize("root_parent", [0, -1])
def test_walks_agree(root_parent):
    """Tensor walk, host walk and slow walk take the same path on random trees, with and without padding rows.

    Choices follow the tree half of the time, so that deep paths occur. Guards against accepting a row whose
    ancestor was rejected, padding that matches, and a path in anything but root-to-leaf order.
    """
    rng = np.random.default_rng(3)
    lengths = set()
    for _ in range(300):
        max_depth = int(rng.integers(1, 7))
        nodes, padding = int(rng.integers(0, 40)), int(rng.integers(0, 4))
        packed = random_packed(rng, nodes, max_depth, 5, padding, root_parent)
        choices = torch.from_numpy(rng.integers(0, 5, len(packed.tokens)))
        for row in range(1, len(choices)):
            if rng.random() < 0.5:
                choices[packed.parents[row]] = packed.tokens[row]
        path, next_root = slow_walk(packed, choices)

        fast = walk(packed.tokens, packed.parents, packed.visible, choices, max_depth)
        accepted = len(path) - 1
        assert fast.accepted == accepted
        assert fast.path.tolist() == path + list(range(accepted + 1, max_depth + 1))
        assert fast.next_root == next_root

        visits = []

        def choice_at(row, depth):
            visits.append((row, depth))
            return int(choices[row])

        children = child_rows(packed.tokens.tolist(), packed.parents.tolist())
        assert walk_rows(children, choice_at) == (path, next_root)
        # One draw a node: a second one would give a prefix shared by several paths extra chances.
        assert visits == [(row, depth) for depth, row in enumerate(path)]
        lengths.add(accepted)
    assert lengths >= {0, 1, 2, 3, 4}


def test_an_invalid_choice_ends_the_walk():
    """-1, the choice at a row of non-finite logits, matches no token, padding included, and reaches the
    caller."""
    packed = random_packed(np.random.default_rng(0), 10, 3, 4, padding=2)
    packed.tokens[-2:] = -1
    fast = walk(packed.tokens, packed.parents, packed.visible, torch.full_like(packed.tokens, -1), 3)
    assert (fast.accepted, fast.next_root) == (0, -1)


def test_nothing_reaches_the_host():
    """The captured path has static shapes and no copy to the host; a fake tensor has no value to copy."""
    packed = random_packed(np.random.default_rng(0), 10, 3, 4, padding=2)
    n, vocab_size = len(packed.tokens), 16
    for params in (SamplingParams(), SamplingParams(0.7), SamplingParams(0.7, top_k=3, top_p=0.9)):
        with FakeTensorMode() as mode:
            tree = (packed.tokens, packed.parents, packed.visible, packed.log_mass)
            tokens, parents, visible, log_mass = (mode.from_tensor(values) for values in tree)
            positions = visible.sum(dim=1) + 7
            logits = torch.randn(n, vocab_size)
            seed = torch.zeros((), dtype=torch.int64)
            noise = gumbel_noise(seed, positions, vocab_size)
            direct = walk(tokens, parents, visible, choose(logits, params, noise), 3)
            log_p = log_probabilities(logits, params)
            children = siblings(tokens, parents, log_mass, 4)
            choices = stochastic_choices(log_p, children, seed, positions, noise)
            stochastic = walk(tokens, parents, visible, choices, 3)
        for fast in (direct, stochastic):
            assert (fast.accepted.shape, fast.path.shape, fast.next_root.shape) == ((), (4,), ())


# ------------------------------------------------------------------------------- the stochastic verifier


def test_siblings_gathers_each_rows_children():
    """Equals a loop over rows; padding is nobody's child, and a row's log q is its mass less its parent's."""
    rng = np.random.default_rng(5)
    for trial in range(50):
        packed = random_packed(rng, 30, 4, 5, padding=trial % 3, root_parent=-(trial % 2))
        table = siblings(packed.tokens, packed.parents, packed.log_mass, 5)
        for row in range(len(packed.tokens)):
            rows = [r for r in range(1, len(packed.tokens)) if packed.parents[r] == row != r]
            assert table.tokens[row, : len(rows)].tolist() == packed.tokens[rows].tolist()
            assert torch.equal(table.log_q[row, : len(rows)], packed.log_mass[rows] - packed.log_mass[row])
            assert (table.log_q[row, len(rows) :] == -torch.inf).all()


def theorem_3(p, candidates, log_q, proposal_noise, uniform, final_noise):
    """The rule of Theorem 3, line by line over the full vocabulary, at one node.

    p, final_noise: (V,) float64; candidates: list of tokens; log_q, proposal_noise, uniform: one each a
    candidate.
    Returns (committed token, number of candidates rejected).
    """
    mu = p.copy()
    available = list(range(len(candidates)))
    while available:
        weights = np.exp(log_q[available] - log_q[available].max())
        proposal = np.zeros_like(p)
        proposal[[candidates[i] for i in available]] = weights / weights.sum()
        # Gumbel-max: a draw from the proposal.
        drawn = max(available, key=lambda i: log_q[i] + proposal_noise[i])
        candidate = candidates[drawn]
        if uniform[drawn] < min(1.0, mu[candidate] / proposal[candidate]):
            return candidate, len(candidates) - len(available)
        mu = np.maximum(mu - proposal, 0)
        mu /= mu.sum()
        available.remove(drawn)
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(mu) + final_noise)), len(candidates)


def random_node(rng, vocab_size, children):
    """A law p, sometimes sparse, and a proposal that is near p at some nodes and far at others. fp64."""
    log_p = 2 * rng.normal(size=vocab_size)
    if rng.random() < 0.3:
        log_p[rng.permutation(vocab_size)[: vocab_size // 2]] = -np.inf
    log_p -= np.log(np.exp(log_p).sum())
    tokens = rng.permutation(vocab_size)[:children]
    log_q = rng.choice([0.3, 3.0]) * rng.normal(size=children) + np.maximum(log_p[tokens], -5)
    return log_p, tokens, log_q


def test_stochastic_choices_follow_theorem_3():
    """At 3,000 random nodes of 0 to 5 children the tensor form commits the token of the line-by-line
    reference.

    Both read the same uniforms. All rows go through in one call, so a row that leaked into another would
    show. Every way out of the recursion has to occur.
    """
    rng = np.random.default_rng(7)
    nodes, vocab_size, most = 3000, 8, 5
    log_p = np.empty((nodes, vocab_size))
    tokens, log_q = np.zeros((nodes, most), dtype=np.int64), np.full((nodes, most), -np.inf)
    counts = rng.integers(0, most + 1, nodes)
    for node, count in enumerate(counts):
        log_p[node], tokens[node, :count], log_q[node, :count] = random_node(rng, vocab_size, count)
    positions = torch.arange(nodes)
    children = Siblings(torch.from_numpy(tokens), torch.from_numpy(log_q))
    noise = gumbel_noise(11, positions, vocab_size, torch.float64)
    proposal_noise = gumbel(keyed_uniform(11, positions, children.tokens, PROPOSAL, torch.float64)).numpy()
    uniform = keyed_uniform(11, positions, children.tokens, ACCEPTANCE, torch.float64).numpy()
    fast = stochastic_choices(torch.from_numpy(log_p), children, 11, positions, noise)

    ways = set()
    for node, count in enumerate(counts):
        expected, rejected = theorem_3(
            np.exp(log_p[node]), tokens[node, :count].tolist(), log_q[node, :count],
            proposal_noise[node], uniform[node], noise[node].numpy(),
        )  # fmt: skip
        assert fast[node] == expected, node
        ways.add((count, rejected))
    assert ways >= {(count, rejected) for count in range(most + 1) for rejected in range(min(count, 3) + 1)}


def test_committed_law_is_exactly_the_targets():
    """Summing the recursion over every order of the candidates gives p to 1e-12: no draws, no tolerance for
    chance.

    Each order has its probability under drawing without replacement; within one, `acceptance` gives the
    probability of each way out. Guards against q renormalised over all siblings, residuals not clamped or not
    normalised.
    """
    rng = np.random.default_rng(13)
    for trial in range(60):
        count = trial % 5
        log_p, tokens, log_q = random_node(rng, 6, count)
        p, q = np.exp(log_p), np.exp(log_q)
        law = np.zeros(6)
        for order in itertools.permutations(range(count)):
            reach, left = 1.0, q.sum()
            for i in order:
                reach, left = reach * q[i] / left, left - q[i]
            picked = tokens[list(order)]
            accept = []
            if count:
                here, proposed = torch.from_numpy(p[picked]), torch.from_numpy(log_q[list(order)])
                accept = acceptance(here[None], proposed[None])[0]
            for token, probability in zip(picked, accept):
                law[token] += reach * float(probability)
                reach *= 1 - float(probability)
            final = p.copy()
            final[tokens] = 0
            if final.sum() > 0:
                law += reach * final / final.sum()
            else:
                assert reach < 1e-12
        np.testing.assert_allclose(law, p, atol=1e-12)


def test_recursion_keeps_to_the_support():
    """A proposal that is all but sure of a token which p excludes, and a p with no mass outside the children.

    fp32, where probabilities sum to 1 give or take rounding. Guards against dividing by an empty residual,
    and against committing an excluded token, or token 0, because nothing was left.
    """
    vocab_size, rows = 6, 4000
    logits = torch.tensor([-torch.inf, 3.0, -torch.inf, 0.1, -torch.inf, 2.0]).expand(rows, -1)
    log_p = logits.log_softmax(dim=1)
    positions = torch.arange(rows)
    noise = gumbel_noise(0, positions, vocab_size)
    for tokens in ([2, 1], [1, 3, 5], [5, 3, 1, 2], [0, 2, 4], [4, 5, 3]):
        unlikely = [-40.0] * (len(tokens) - 1)
        for log_q in ([0.0] * len(tokens), [0.0] + unlikely, unlikely + [0.0]):
            children = Siblings(torch.tensor(tokens).expand(rows, -1), torch.tensor(log_q).expand(rows, -1))
            committed = stochastic_choices(log_p, children, 0, positions, noise)
            assert set(committed.tolist()) == {1, 3, 5}


def test_stochastic_choice_reports_non_finite_rows():
    """A NaN in one row gives -1 there, as `choose` does, and leaves the others alone."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    logits[1, 2] = torch.nan
    children = Siblings(torch.tensor([[0, 1]] * 3), torch.zeros(3, 2))
    positions = torch.arange(3)
    log_p = log_probabilities(logits, SamplingParams(1.0))
    committed = stochastic_choices(log_p, children, 0, positions, gumbel_noise(0, positions, 6))
    assert (committed < 0).tolist() == [False, True, False]


# ----------------------------------------------------------------------------- the law of committed tokens

VOCAB, DEPTH, COMMITTED, PREFIX = 6, 4, 3, 10


class Toy:
    """A target that looks at the last two tokens, and a drafter that is partly right about it.

    The drafter's q_j is 0.6 of the true law j tokens ahead and 0.4 of a random one, so first siblings, later
    siblings, none and leaves are all reached.
    """

    def __init__(self, params, seed=0):
        rng = np.random.default_rng(seed)
        self.params = params
        # Both by (second last, last, next).
        self.logits = torch.from_numpy(1.2 * rng.normal(size=(VOCAB, VOCAB, VOCAB)))
        self.p = log_probabilities(self.logits.view(-1, VOCAB), params).exp().view(VOCAB, VOCAB, VOCAB)
        self.guess = torch.from_numpy(rng.dirichlet(np.full(VOCAB, 0.5), size=(VOCAB, VOCAB, DEPTH)))

    def log_q(self, before, root):
        """(DEPTH, VOCAB) log marginals of the tokens after (before, root)."""
        pair = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        pair[before, root] = 1
        marginals = []
        for _ in range(DEPTH):
            pair = torch.einsum("ab,abc->bc", pair, self.p)
            marginals.append(pair.sum(dim=0))
        return (0.6 * torch.stack(marginals) + 0.4 * self.guess[before, root]).log()

    def packed(self, before, root, width):
        """The chain of top tokens for width "chain", else the `width` prefixes of largest mass, found by
        sorting all.

        Returns the packed tree and the (second last, last) tokens of each row, (n,) each.
        """
        log_q = self.log_q(before, root).tolist()
        if width == "chain":
            top = [max(range(VOCAB), key=marginal.__getitem__) for marginal in log_q]
            prefixes = [tuple(top[: depth + 1]) for depth in range(DEPTH)]
        else:
            every = [y for depth in range(DEPTH) for y in itertools.product(range(VOCAB), repeat=depth + 1)]
            every.sort(key=lambda y: -sum(log_q[d][t] for d, t in enumerate(y)))  # stable: shallower first
            prefixes = every[:width]
        rows = {(): 0} | {y: row + 1 for row, y in enumerate(prefixes)}
        parents = torch.tensor([0] + [rows[y[:-1]] for y in prefixes])
        visible = torch.eye(len(rows), dtype=torch.bool)
        for row in range(1, len(rows)):
            visible[row] |= visible[parents[row]]
        tokens = torch.tensor([root] + [y[-1] for y in prefixes])
        log_mass = [sum(log_q[d][t] for d, t in enumerate(y)) for y in rows]
        second_last = tokens[parents].clone()
        second_last[0] = before
        return Packed(tokens, parents, visible, torch.tensor(log_mass, dtype=torch.float64)), second_last


# A verifier: (log p of each packed row (n, V), tree, packed row of each run (m,), seeds (m,), positions (m,))
# -> (m,).


def direct(log_p, packed, rows, seeds, positions):
    # The processors are in log p already: `choose` at temperature 1 adds the noise and nothing else.
    return choose(log_p[rows], SamplingParams(1.0), gumbel_noise(seeds, positions, VOCAB, torch.float64))


def stochastic(log_p, packed, rows, seeds, positions):
    table = siblings(packed.tokens, packed.parents, packed.log_mass, VOCAB)
    children = Siblings(table.tokens[rows], table.log_q[rows])
    noise = gumbel_noise(seeds, positions, VOCAB, torch.float64)
    return stochastic_choices(log_p[rows], children, seeds, positions, noise)


def biased(log_p, packed, rows, seeds, positions):
    """The mistake that the tests have to see: a draw that is no child is thrown away and another one made."""
    drawn = direct(log_p, packed, rows, seeds, positions)
    table = siblings(packed.tokens, packed.parents, packed.log_mass, VOCAB)
    is_child = ((table.tokens[rows] == drawn[:, None]) & (table.log_q[rows] > -torch.inf)).any(dim=1)
    return torch.where(is_child, drawn, direct(log_p, packed, rows, seeds, positions + 1000))


def by_prefix(committed):
    """Runs that have committed the same tokens: (m, done) -> pairs of a prefix and the indices of its
    runs."""
    done = committed.shape[1]
    codes = (committed * VOCAB ** torch.arange(done)).sum(dim=1)
    for prefix in itertools.product(range(VOCAB), repeat=done):
        here = (codes == sum(token * VOCAB**i for i, token in enumerate(prefix))).nonzero()[:, 0]
        if len(here):
            yield prefix, here


def decode(toy, width, verifier, seeds, ways=None):
    """The first COMMITTED tokens after (0, 0) for many seeds at once, round by round. (draws,) -> (draws,
    COMMITTED).

    Runs that have committed the same tokens share their tree, so they make a round together; each row a walk
    visits is chosen by `verifier`. `ways` collects how often a walk took the first sibling, a later one,
    none, or ended at a leaf.
    """
    committed = torch.full((len(seeds), COMMITTED + DEPTH + 1), -1)
    length = torch.zeros_like(seeds)
    for done in range(COMMITTED):
        waiting = (length == done).nonzero()[:, 0]
        for prefix, here in by_prefix(committed[waiting, :done]):
            runs = waiting[here]
            before, root = ((0, 0) + prefix)[-2:]
            packed, second_last = toy.packed(before, root, width)
            log_p = log_probabilities(toy.logits[second_last, packed.tokens], toy.params)  # (n, V)
            child_of = torch.full((len(packed.tokens), VOCAB), -1)
            child_of[packed.parents[1:], packed.tokens[1:]] = torch.arange(1, len(packed.tokens))
            rows = torch.zeros_like(runs)
            depth = 0
            while len(runs):
                positions = torch.full_like(runs, PREFIX + done + depth + 1)
                choices = verifier(log_p, packed, rows, seeds[runs], positions)
                committed[runs, done + depth] = choices
                length[runs] = done + depth + 1
                stepped = child_of[rows, choices]
                if ways is not None:
                    children = child_of[rows]
                    first = torch.where(children >= 0, children, 10**6).amin(dim=1)  # the lowest row
                    leaf = (children < 0).all(dim=1)
                    ways["leaf"] += int(leaf.sum())
                    ways["none"] += int((~leaf & (stepped < 0)).sum())
                    ways["first"] += int((stepped == first).sum())
                    ways["later"] += int(((stepped >= 0) & (stepped != first)).sum())
                runs, rows = runs[stepped >= 0], stepped[stepped >= 0]
                depth += 1
    return committed[:, :COMMITTED]


def excess(toy, committed, alarm):
    """Largest total variation over its Monte-Carlo floor, over the laws of token 1, 2, 3 after each prefix.

    The floor of m draws from p is what a correct sampler stays under with probability 1 - alarm: the mean of
    the total variation, at most sum_x sqrt(p(x) (1 - p(x)) / m) / 2, plus sqrt(log(1 / alarm) / (2 m))
    (McDiarmid: one draw moves it by at most 1 / m).
    """
    worst = 0.0
    for done in range(COMMITTED):
        for prefix, here in by_prefix(committed[:, :done]):
            m = len(here)
            p = toy.p[((0, 0) + prefix)[-2:]]
            drawn = torch.bincount(committed[here, done], minlength=VOCAB) / m
            variation = 0.5 * float((drawn - p).abs().sum())
            floor = 0.5 * float((p * (1 - p) / m).sqrt().sum()) + math.sqrt(math.log(1 / alarm) / (2 * m))
            worst = max(worst, variation / floor)
    return worst


PROCESSORS = {
    "plain": SamplingParams(0.9),
    "top-k": SamplingParams(0.9, top_k=4),
    "top-p": SamplingParams(0.9, top_p=0.8),
    "both": SamplingParams(1.1, top_k=5, top_p=0.85),
}


# Every width meets every set of processors; by default one each.
BY_DEFAULT = {("chain", "top-k"), (3, "plain"), (15, "both"), (63, "top-p")}
CASES = [
    pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(("chain", 3, 15, 63), PROCESSORS)
]


@pytest.mark.parametrize("width, processors", CASES)
@pytest.mark.parametrize("verifier", [direct, stochastic])
def test_committed_tokens_have_the_law_of_ar_sampling(verifier, width, processors):
    """fp64, 200,000 runs: the law of the first to third committed token, by prefix, is within the Monte-Carlo
    floor.

    Floor: 0.009 for the first token of six; larger where a prefix was reached less often. A correct verifier
    exceeds one of the at most 43 floors with probability below 43e-8 a case, 1.4e-5 over all 32 cases (the
    floor's own alarm is 1e-8). The drafter is partly right, and every branch of the walk has to be taken. The
    direct walk must moreover repeat AR's text, token for token.
    """
    toy = Toy(PROCESSORS[processors])
    seeds = torch.arange(200_000)
    ways = dict.fromkeys(("first", "later", "none", "leaf"), 0)
    committed = decode(toy, width, verifier, seeds, ways)
    assert excess(toy, committed, alarm=1e-8) < 1
    for way, count in ways.items():
        assert count > 500 or (width == "chain" and way == "later"), (way, count)
    if verifier is direct:
        assert torch.equal(committed[:20_000], decode(toy, 0, direct, seeds[:20_000]))


def test_a_biased_verifier_is_seen():
    """A fresh redraw on mismatch, the classic mistake, exceeds three times the floor that the test above
    checks."""
    toy = Toy(PROCESSORS["plain"])
    assert excess(toy, decode(toy, 3, biased, torch.arange(200_000)), alarm=1e-8) > 3


def test_static_form_equals_visited_rows():
    """Choosing at all rows and then walking, the captured path, gives the Walk of asking at visited rows, the
    CPU's.

    Greedy, direct and stochastic, processors off and on. Guards against a choice that depends on the other
    rows, and against noise keyed by anything but the position: siblings' subtrees share the noise of their
    depth.
    """
    lengths = set()
    for processors, width in (("plain", 15), ("both", 63)):
        toy = Toy(PROCESSORS[processors])
        packed, second_last = toy.packed(0, 0, width)
        logits = toy.logits[second_last, packed.tokens]
        depths = packed.visible.sum(dim=1) - 1
        table = siblings(packed.tokens, packed.parents, packed.log_mass, VOCAB)
        P = torch.tensor([PREFIX])
        for seed in range(40):
            for params, children in (
                (SamplingParams(), None),
                (replace(toy.params, seed=seed), None),
                (replace(toy.params, seed=seed), table),
            ):
                choices = target_choices(logits, params, P + depths + 1, children)
                everywhere = walk(packed.tokens, packed.parents, packed.visible, choices, DEPTH)
                visited = walk_on_host(packed.tokens, packed.parents, logits, params, P, children, DEPTH)
                for field in fields(Walk):
                    name = field.name
                    assert torch.equal(getattr(everywhere, name), getattr(visited, name)), name
                lengths.add(int(visited.accepted))
    assert len(lengths) >= 3


def test_four_tokens_against_the_drafters_opposite_order():
    """p = (.4, .3, .2, .1) drafted by q = (.1, .2, .3, .4), one node: frequencies are p within 0.005.

    200,000 draws; the largest standard deviation is 0.0011, so a false alarm has probability 3e-5 for each
    verifier. The drafted token is itself drawn from q, as samplers of other decoders do; the law must not
    care.
    """
    draws = 200_000
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    positions = torch.arange(draws)
    noise = gumbel_noise(1, positions, 4, torch.float64)
    drafted = (q.log() + gumbel_noise(2, positions, 4, torch.float64)).argmax(dim=1, keepdim=True)
    log_p = p.log().expand(draws, -1)
    for committed in (
        choose(log_p, SamplingParams(1.0), noise),
        stochastic_choices(log_p, Siblings(drafted, q.log()[drafted]), 1, positions, noise),
        stochastic_choices(log_p, Siblings(torch.arange(4).expand(draws, -1), q.log().expand(draws, -1)), 1,
                           positions, noise),
    ):  # fmt: skip
        assert (torch.bincount(committed, minlength=4) / draws - p).abs().max() < 0.005


def test_a_token_without_mass_is_not_accepted_for_want_of_another():
    """Its proposal is so small that the rest of it is 1 when rounded: nothing is left of mu, and it must wait all the same."""
    p, log_q = torch.tensor([[0.0, 1.0]]).double(), torch.tensor([[-80.0, 0.0]]).double()
    assert acceptance(p, log_q).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("shift", [1e6, -1e12])
def test_log_masses_count_up_to_a_constant_of_any_size(shift):
    """A method of one's own may score as it likes. Beside a huge score the noise would be rounded away, and with it the law."""
    positions, tokens, log_q = torch.arange(200), torch.arange(4).expand(200, -1), torch.tensor([0.0, 1.0, 3.0, 5.0]).double()
    log_p = torch.randn(200, 9, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    graded = [Siblings(tokens, (log_q + by).expand(200, -1)) for by in (0.0, shift)]
    equal = [Siblings(tokens, torch.full((200, 4), by)) for by in (0.0, -1e30)]
    noise = gumbel_noise(0, positions, 9)
    for pair in (graded, equal):
        one, other = (stochastic_choices(log_p, each, 0, positions, noise) for each in pair)
        assert torch.equal(one, other) and len(set(one.tolist())) == 9


@pytest.mark.parametrize("below", [-500.0, -1e5, -1e17, -3e38, -1e300])
@pytest.mark.parametrize("parent", [0.0, 3e38])
def test_siblings_however_far_below_the_best_keep_the_law(below, parent):
    """Their order must stay as random as acceptance takes it to be, though noise is nothing beside such numbers."""
    draws = 100_000
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    tokens, parents = torch.arange(4) - 1, torch.tensor([0, 0, 0, 0])
    log_mass = parent + torch.tensor([0.0, 0.0, below, below], dtype=torch.float64)
    children = siblings(tokens, parents, log_mass if below < -1e38 * 3.1 else log_mass.float(), 3).row(0)
    children = Siblings(children.tokens.expand(draws, -1), children.log_q.expand(draws, -1))
    positions = torch.arange(draws)
    noise = gumbel_noise(1, positions, 3, torch.float64)
    committed = stochastic_choices(p.log().expand(draws, -1), children, 1, positions, noise)
    assert (torch.bincount(committed, minlength=3) / draws - p).abs().max() < 0.007


def test_without_mass_elsewhere_the_last_child_that_has_any_is_taken(monkeypatch):
    """Rounding may reject all children of a row whose law lies on them: neither token 0 nor a child without mass will do."""
    monkeypatch.setattr(theorem3, "acceptance", lambda p, log_q: torch.zeros_like(p))
    log_p = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).log()
    positions = torch.arange(1)
    noise = gumbel_noise(0, positions, 4)
    for log_q, expected in (([0.0, -40.0, -80.0], 2), ([-40.0, 0.0, -80.0], 1)):  # drawn in the order of these
        children = Siblings(torch.tensor([[1, 2, 3]]), torch.tensor([log_q]))
        assert stochastic_choices(log_p, children, 0, positions, noise).tolist() == [expected]
