"""The round loop on a tiny random target: exact tokens, exact caches, exact ends, for every method and body.

A random drafter accepts almost nothing and hides most faults of commit and walk, so most tests propose the target's
own continuation (an oracle) with planted decoys and errors. All targets are float32 and all comparisons of tokens
are exact; the seeds are fixed, so there are no false alarms.
"""

import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from graphs.masks import BODIES
from minicast import Decoder, generate, theorem3
from minicast.back_off import BackOff
from minicast.custom_method import check_tree
from minicast.methods import METHODS, best_first
from minicast.policy import AutoWidth, FixedWidth
from minicast.round import Settled, State, pack, prefill, read_features
from minicast.tree import Tree, best_first_tree
from model.config import DraftConfig, Rope, TargetConfig
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.transformer import Target

CONTEXT, VOCABULARY, DEPTH = 64, 256, 7
WIDTHS = (1, 3, 7, 15, 31, 63, 127)


def tiny_target(seed: int = 0, context: int = CONTEXT) -> Target:
    shape = dict(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16, eps=1e-6, rope=Rope(10000.0))
    config = TargetConfig(vocab_size=VOCABULARY, context=context, family="llama", tied=False, **shape)
    return randomised(Target(config), seed)


def tiny_draft(seed: int = 1, block_size: int = DEPTH + 1, context: int = CONTEXT) -> DraftHead:
    shape = dict(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16, eps=1e-6, rope=Rope(10000.0))
    config = DraftConfig(
        vocab_size=VOCABULARY, context=context, qk_norm=True, block_size=block_size, taps=(0, 1), mask_token_id=255,
        target_layers=2, **shape,
    )
    return randomised(DraftHead(config), seed)


def randomised(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        spread = 0.2 if parameter.dim() > 1 else 0.05
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread + (parameter.dim() == 1)
    return module


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_draft_vocabulary_bounds_what_is_proposed_and_changes_no_text(body, packed):
    """Its log q is the softmax over its own logits, other tokens have no mass, and the answer is the target's. Packed
    or not, the rows are the LM head's, bit for bit."""
    target, draft = tiny_target(), tiny_draft()
    target.lm_head.weight.data = target.lm_head.weight.data.bfloat16().float()
    rows = target.lm_head.weight.data.clone()
    if packed:
        target.lm_head.pack()
    prompt, tokens = prompt_of(9), list(range(0, 250, 3))
    expected = autoregressive(target, prompt, 20).token_ids
    hidden = torch.randn(DEPTH, 32)
    draft.restrict(tokens[::-1] + tokens[:5], target)
    assert torch.equal(draft.vocabulary_head(torch.eye(32)).T, rows[tokens])
    log_q = draft.log_q(hidden, target)
    torch.testing.assert_close(log_q[:, tokens], (hidden @ rows[tokens].T).log_softmax(-1))
    assert (log_q > -torch.inf).sum() == DEPTH * len(tokens)
    decoder, proposed = Decoder(target, draft, attention=body), set()
    for step in decoder.stream(prompt, width=31, max_new_tokens=20):
        proposed |= set(step.tree.tokens.tolist()) if step.tree else set()
    assert decoder.output.token_ids == expected
    assert len(proposed) > 10 and proposed <= set(tokens)


@pytest.mark.parametrize("tokens", [[], [3, -1], [3, VOCABULARY], [10**30]])
def test_a_draft_vocabulary_has_tokens_of_the_target(tokens):
    """At least one; what is refused changes nothing."""
    target, draft = tiny_target(), tiny_draft()
    with pytest.raises(UsageError, match=f"at least one token, and tokens are ids below {VOCABULARY}, .*: give others"):
        draft.restrict(tokens, target)
    assert draft.vocabulary is None
    draft.restrict([VOCABULARY - 1], target)


@pytest.mark.parametrize("words, change", [
    ("depth", dict(depths=torch.tensor([1, 1]))), ("depth", dict(depths=torch.tensor([1, 3]))),
    ("before its children", dict(parents=torch.tensor([1, -1]))),
    ("before its children", dict(parents=torch.tensor([-2, 0]))), ("vocabulary", dict(tokens=torch.tensor([-1, 5]))),
    ("vocabulary", dict(tokens=torch.tensor([5, VOCABULARY]))), ("lengths", dict(log_mass=torch.zeros(3))),
    ("same token", dict(tokens=torch.tensor([5, 5]), parents=torch.tensor([-1, -1]), depths=torch.tensor([1, 1]))),
    ("whole numbers", dict(parents=torch.tensor([-1.0, 0.0]))), ("whole numbers", dict(tokens=torch.tensor([True, False]))),
    ("one dimension", dict(tokens=torch.tensor([[5], [6]]))), ("one dimension", dict(tokens=[5, 6])),
    ("not a number", dict(log_mass=torch.tensor([0.0, torch.nan]))),
    ("infinite", dict(log_mass=torch.tensor([torch.inf, 0.0]))),
    ("infinite in float32", dict(log_mass=torch.tensor([1e39, 0.0], dtype=torch.float64))),
    ("floating point", dict(log_mass=torch.tensor([0, 0]))), ("floating point", dict(log_mass=torch.tensor([0j, 0j]))),
])  # fmt: skip
def test_a_tree_that_would_change_the_text_is_refused(words, change):
    """A wrong depth gives wrong positions, and so another text without a word."""
    sound = tree_of([(5, -1), (6, 0)])
    decoder, options = Decoder(tiny_target()), dict(width=2, max_new_tokens=6)
    decoder.generate(prompt_of(5), method=lambda proposal: sound, **options)
    with pytest.raises(UsageError, match=words):
        decoder.generate(prompt_of(5), method=lambda proposal: replace(sound, **change), **options)
    with pytest.raises(UsageError, match="returns a Tree"):
        decoder.generate(prompt_of(5), method=lambda proposal: [5, 6], **options)
    widest, wider = (tree_of([(5, node - 1) for node in range(nodes)]) for nodes in (127, 128))
    check_tree(widest, VOCABULARY)
    with pytest.raises(UsageError, match="it has 128 nodes, 127 at most can be packed"):
        check_tree(wider, VOCABULARY)


@pytest.fixture(scope="module")
def models():
    return tiny_target(), tiny_draft()


def autoregressive(target, prompt, count, **options):
    return Decoder(target).generate(prompt, method="ar", max_new_tokens=count, **options)


def tree_of(nodes: list[tuple[int, int]]) -> Tree:
    """A tree from (token, parent node or -1), parents first."""
    depths = []
    for _, parent in nodes:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    tokens, parents = zip(*nodes) if nodes else ((), ())
    as_ids = [torch.tensor(values, dtype=torch.int64) for values in (tokens, parents, depths)]
    return Tree(*as_ids, log_mass=-torch.arange(len(nodes)).float())


@pytest.mark.parametrize("body", BODIES)
def test_a_tree_may_be_padded(body, models):
    """Builders of fixed shape fill up with nodes of no mass where candidates run out, all with one token below the root."""
    prompt = prompt_of(6)
    decoder, widths = Decoder(*models, attention=body), set()

    def padded(proposal):
        tree = best_first(proposal)
        widths.add(tree.width)
        return tree

    out = decoder.generate(prompt, method=padded, width=15, rank_cap=1, max_new_tokens=20)
    assert out.token_ids == autoregressive(models[0], prompt, 20).token_ids
    assert widths == {15 if decoder.state.static else DEPTH}


def oracle(continuation, prompt_length, depth=DEPTH, wrong_at=None, decoys=0):
    """A method that proposes the known continuation, `decoys` wrong first children ahead of it at every level.

    `wrong_at` plants an error at that depth, counted from 1. The drafter runs too, so that its cache is exercised.
    """

    def method(proposal):
        log_q = proposal.draft()
        assert log_q.isfinite().all()
        start = len(proposal.token_ids) - prompt_length
        nodes, parent = [], -1
        for level, token in enumerate(continuation[start : start + depth], start=1):
            wrong = [(token + 1 + k) % VOCABULARY for k in range(decoys)]
            nodes += [(other, parent) for other in wrong]
            nodes.append(((token + 9) % VOCABULARY if level == wrong_at else token, parent))
            parent = len(nodes) - 1
        return tree_of(nodes)

    return method


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("rank_cap", [8, None])
def test_every_method_and_width_gives_the_autoregressive_tokens(models, body, rank_cap):
    """The contract: in float32 a method changes how fast tokens come, never which."""
    target, draft = models
    decoder = Decoder(target, draft, attention=body)
    for seed in range(2):
        prompt = prompt_of(5 + 3 * seed, seed)
        expected = autoregressive(target, prompt, 20).token_ids
        widths = (3, 15, 127) if body == "flex" else WIDTHS  # materialised masks are slow
        for method, width in [("dflash", 7)] + [("cast", width) for width in widths]:
            out = decoder.generate(prompt, method=method, width=width, max_new_tokens=20, rank_cap=rank_cap)
            assert out.token_ids == expected, (method, width)
            assert 1 + sum(out.round_lengths) == len(out.token_ids)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("decoys", [0, 1, 3])
@pytest.mark.parametrize("wrong_at", [None, 1, 3])
def test_caches_equal_a_fresh_prefill_after_every_round(models, body, decoys, wrong_at):
    """Accepted rows lie scattered in the pack (never the first child here); later rounds assume a dense prefix.

    Also the drafter's own cache: rewinding it by the wrong count leaves the output right and ruins acceptance.
    """
    target, draft = models
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 45).token_ids
    decoder = Decoder(target, draft, attention=body)
    state, rounds = decoder.state, 0
    method = oracle(expected, len(prompt), wrong_at=wrong_at, decoys=decoys)
    for step in decoder.stream(prompt, method=method, max_new_tokens=40):
        if not (step.prefill or step.stop_reason):  # the drafter has read all but what this round committed
            assert state.drafted == int(state.D) == state.prefix - len(step.path)
        fresh = State(target, draft, BODIES[body]())
        fresh.reserve(CONTEXT)
        with torch.no_grad():
            prefill(fresh, state.cached_ids, tap=True)
            if state.drafted < state.prefix:
                read_features(state, state.prefix - state.drafted)
        P = state.prefix
        assert P == fresh.prefix == int(state.P) == state.drafted
        for ours, theirs in (
            (state.target_cache.data, fresh.target_cache.data),
            (state.draft_cache.data, fresh.draft_cache.data),
        ):
            assert torch.allclose(ours[..., :P, :], theirs[..., :P, :], atol=1e-4)
        assert torch.allclose(state.features[:, :P], fresh.features[:, :P], atol=1e-4)
        rounds += not step.prefill
    assert decoder.output.token_ids == expected[:40]
    accepted = DEPTH if wrong_at is None else wrong_at - 1
    assert set(decoder.output.round_lengths[:-1]) == {accepted + 1}


@pytest.mark.parametrize("body", BODIES)
def test_packed_logits_equal_one_forward_per_node(models, body):
    """Lemma 1: siblings, and a child of the second sibling only. A flat index as RoPE position, or a mask that does
    not depend on which parent was chosen, is right until the first branch."""
    target, draft = models
    prompt = prompt_of(9)
    nodes = [(5, -1), (6, -1), (7, 1), (8, 1), (9, 3), (5, 0), (200, -1), (7, 6)]
    state = State(target, draft, BODIES[body]())
    state.reserve(CONTEXT)
    with torch.no_grad():
        prefill(state, prompt[:-1], tap=True)
        state.root.fill_(prompt[-1])
        pack(state, tree_of(nodes))
        n = len(nodes) + 1
        window = state.window(state.depths[:n], state.visible[:n, :n])
        hidden, _ = target(state.tokens[None, :n], state.target_cache, window)
        packed = target.logits(hidden[0])
    for node in range(-1, len(nodes)):
        path, parent = [], node
        while parent >= 0:
            token, parent = nodes[parent]
            path.insert(0, token)
        alone, _ = target.score(prompt + path)
        assert torch.allclose(packed[node + 1], alone[-1], atol=1e-5)


def test_a_stop_id_in_the_middle_of_a_block_ends_the_answer(models):
    """A stop test that looks at a round's last token only runs past it; counters must not count what came after."""
    target, draft = models
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 30).token_ids
    stop = next(token for index, token in enumerate(expected) if index >= 4 and token not in expected[:index])
    count, never = expected.index(stop) + 1, next(token for token in range(VOCABULARY) if token not in expected)
    for decoys in (0, 2):
        decoder = Decoder(target, draft)
        method = oracle(expected, len(prompt), decoys=decoys)
        out = decoder.generate(prompt, method=method, max_new_tokens=30, stop_ids=(never, stop))
        assert out.token_ids == autoregressive(target, prompt, 30, stop_ids=(stop,)).token_ids == expected[:count]
        assert out.stop_reason == "eos"
        assert 1 + sum(out.round_lengths) == count
        assert decoder.state.cached_ids == (prompt + expected[:count])[: decoder.state.prefix]


def test_a_stop_id_as_third_token_of_a_fully_accepted_block_counts_three(models):
    """Prefill's token, then a block of six accepted of which the third is the stop: four tokens, R = 3."""
    target, draft = models
    prompt = next(p for p in map(lambda s: prompt_of(6, s), range(50))
                  if len(set(autoregressive(target, p, 4).token_ids)) == 4)
    expected = autoregressive(target, prompt, 20).token_ids
    method = oracle(expected, len(prompt), depth=6)
    out = Decoder(target, draft).generate(prompt, method=method, max_new_tokens=20, stop_ids=(expected[3],))
    assert out.token_ids == expected[:4]
    assert out.round_lengths == [3]


@pytest.mark.parametrize("depth", [1, 4])
def test_full_acceptance_stays_full(models, depth):
    """The bonus token after a full accept must reach the drafter's cache as a committed position, not as noise."""
    target, draft = models
    prompt = prompt_of(7)
    expected = autoregressive(target, prompt, 41).token_ids
    out = Decoder(target, draft).generate(prompt, method=oracle(expected, len(prompt), depth=depth), max_new_tokens=41)
    assert out.token_ids == expected
    assert set(out.round_lengths[:-1]) == {depth + 1}


@pytest.mark.parametrize("width, nodes", [(0, {0}), (1, {1}), (127, {127}), (10000, {127})])
def test_any_width(models, width, nodes):
    """0 is autoregressive, 1 is one node, beyond 127 clamps with a warning; never an IndexError."""
    target, draft = models
    prompt = prompt_of(5)
    decoder = Decoder(target, draft)
    options = dict(width=width, max_new_tokens=12, rank_cap=1000)
    if width > 127:
        with pytest.warns(UserWarning, match="127"):
            out = decoder.generate(prompt, **options)
    else:
        out = decoder.generate(prompt, **options)
    assert out.token_ids == autoregressive(target, prompt, 12).token_ids
    assert set(out.widths) == nodes


def test_equal_top_logits_go_to_the_lower_id_in_every_method(models):
    """Ties broken differently by one row and by a pack make a tree depart from its own AR."""
    target, draft = tiny_target(), models[1]
    target.lm_head.weight.data[3] = target.lm_head.weight.data[7] = 3 * target.lm_head.weight.data.abs().amax(0)
    target.lm_head.weight.data[3:8:4] += 1
    prompt = prompt_of(5)
    outs = [Decoder(target, draft).generate(prompt, method=m, max_new_tokens=20) for m in ("ar", "dflash", "cast")]
    assert 3 in outs[0].token_ids and 7 not in outs[0].token_ids
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids


@pytest.mark.parametrize("method", ["ar", "cast"])
def test_non_finite_logits_are_an_error_and_do_not_poison_the_next_request(models, method):
    """NaN argmaxes to some token id; and NaN left in a cache above P survives masking (0 · NaN)."""
    target, draft = tiny_target(), models[1]
    decoder = Decoder(target, draft, attention="static")
    prompt, other = prompt_of(6), prompt_of(4, seed=3)
    rounds = decoder.stream(prompt, method=method, width=7, max_new_tokens=30)
    next(rounds), next(rounds)
    target.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="non-finite logits"):
        list(rounds)
    target.layers[0].mlp.down_proj.weight.data[0, 0] = 0.1
    again = decoder.generate(other, method=method, width=7, max_new_tokens=10)
    assert again.token_ids == Decoder(target, draft).generate(other, method="ar", max_new_tokens=10).token_ids


@pytest.mark.parametrize("body", BODIES)
def test_a_drafter_that_recovers_is_not_blamed_again(body):
    """Scores of a wide round that were not finite lay behind the rows of a narrower one, as padding."""
    target, draft = tiny_target(), tiny_draft()
    decoder = Decoder(target, draft, attention=body, max_length=128)
    good = draft.norm.weight.data.clone()
    draft.norm.weight.data[0] = torch.nan
    policy = AutoWidth(63, [1.0] * 64, BackOff())
    with pytest.raises(UserError, match="drafter gave non-finite scores"):
        decoder.generate(prompt_of(6), width=policy, max_new_tokens=30)
    assert policy.back_off == BackOff()
    draft.norm.weight.data.copy_(good)
    expected = autoregressive(target, prompt_of(6), 20).token_ids
    for width in (20, 15, 63):
        assert decoder.generate(prompt_of(6), width=width, max_new_tokens=20).token_ids == expected


def test_a_fault_behind_the_end_of_an_answer_is_not_told_and_not_kept(models, monkeypatch):
    """The limit cuts a round before the choice that was not finite: the text is whole, the caches are not to be reused."""
    target, draft = models
    expected = autoregressive(target, prompt_of(6), 30).token_ids
    decoder, read, method = Decoder(target, draft), Settled.read, oracle(expected, 6)
    with monkeypatch.context() as patch:
        patch.setattr(Settled, "read", lambda outcome: replace(read(outcome), next_token=-1))
        with pytest.raises(UserError, match="non-finite logits"):
            decoder.generate(prompt_of(6), method=method, max_new_tokens=30)
        assert decoder.output.token_ids == expected[: 1 + DEPTH]  # of the prompt, and of the round before the fault
        out = decoder.generate(prompt_of(6), method=method, max_new_tokens=1 + DEPTH)
    assert out.token_ids == expected[: 1 + DEPTH] and out.stop_reason == "length"
    assert decoder.state.prefix == 0
    assert decoder.generate(prompt_of(6), method=method, max_new_tokens=30).token_ids == expected


def test_what_the_caller_does_between_rounds_is_not_timed(models, monkeypatch):
    """By a clock that moves only between them."""
    decoder, now = Decoder(*models), [1.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for _ in decoder.stream(prompt_of(6), width=2, max_new_tokens=12):
        now[0] += 1.0
    assert len(decoder.output.round_lengths) > 3
    assert decoder.output.decode_seconds == decoder.output.wall_seconds == 0.0


def test_the_mask_token_is_a_token_like_any_other(models):
    """Stripping it, or stopping on it, by value loses text when the target really emits it."""
    target = models[0]
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 20).token_ids
    draft = tiny_draft()
    draft.config = DraftConfig(**{**vars(draft.config), "mask_token_id": expected[3]})
    for options in ({"width": 7}, {"method": oracle(expected, len(prompt))}):  # the latter drafts it, too
        assert Decoder(target, draft).generate(prompt, max_new_tokens=20, **options).token_ids == expected


def test_one_decoder_serves_many_requests_like_fresh_ones(models):
    """Long prompt, then short; a generator closed in mid-answer; a shared prefix; another method in between.

    Features that AR did not collect, taken for read, would leave the text right and ruin acceptance.
    """
    target, draft = models
    decoder = Decoder(target, draft)
    long, short = prompt_of(40, 1), prompt_of(3, 2)
    sibling = long[:20] + prompt_of(5, 4)

    def check(prompt, **options):
        fresh, options = Decoder(target, draft), dict(width=7, max_new_tokens=12) | options
        ours, expected = decoder.generate(prompt, **options), fresh.generate(prompt, **options)
        assert (ours.token_ids, ours.round_lengths) == (expected.token_ids, expected.round_lengths)
        P = fresh.state.drafted
        assert decoder.state.drafted == P or options.get("method") == "ar"
        ours, expected = (each.state.draft_cache.data[..., :P, :] for each in (decoder, fresh))
        assert torch.allclose(ours, expected, atol=1e-4)

    check(long)
    check(short)
    check(long, method="ar")
    check(long)
    check(sibling, method="ar")
    check(sibling)
    abandoned = decoder.stream(short, width=7, max_new_tokens=12)
    next(abandoned), next(abandoned)
    abandoned.close()
    check(short)
    out = decoder.generate(short, width=7, max_new_tokens=12)
    check(short + out.token_ids + [7, 8])


@pytest.mark.parametrize("body", BODIES)
def test_the_prefix_outlives_the_growth_of_the_caches(body):
    """Every turn of a conversation needs more room than the last; caches made anew would prefill it all again."""
    target, draft = tiny_target(context=1024), tiny_draft(context=1024)
    decoder = Decoder(target, draft, max_length=64, attention=body)
    rows, prompt, slots = [], prompt_of(20), 0
    hook = target.register_forward_pre_hook(lambda module, arguments: rows.append(arguments[0].shape[1]))
    for turn in range(3):
        assert turn == 0 or prompt[: decoder.state.prefix] == decoder.state.cached_ids
        kept = decoder.state.prefix
        rows.clear()
        out = decoder.generate(prompt, width=7, max_new_tokens=9)
        assert out.reused == kept and rows[0] == len(prompt) - kept and decoder.state.slots > slots
        assert out.token_ids == autoregressive(target, prompt, 9).token_ids
        fresh = Decoder(target, draft, attention=body)
        assert out.round_lengths == fresh.generate(prompt, width=7, max_new_tokens=9).round_lengths
        P = decoder.state.prefix
        for ours, theirs in zip(caches(decoder.state, P), caches(fresh.state, P)):
            assert torch.allclose(ours, theirs, atol=1e-4)
        slots = decoder.state.slots
        prompt = prompt + out.token_ids + prompt_of(150, turn)
    hook.remove()


def caches(state, P):
    """What the first P positions have in them: the target's keys and values, the drafter's, the features."""
    drafted = min(P, state.drafted)
    return state.target_cache.data[..., :P, :], state.draft_cache.data[..., :drafted, :], state.features[:, :P]


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_length_limit_is_exact(block_size):
    """The last round usually accepts more than there is room for."""
    target, draft = tiny_target(), tiny_draft(block_size=block_size)
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 40).token_ids
    decoder = Decoder(target, draft)
    for count in range(1, 21):
        method = oracle(expected, len(prompt), depth=block_size - 1)
        out = decoder.generate(prompt, method=method, max_new_tokens=count)
        assert out.token_ids == expected[:count]
        assert out.stop_reason == "length"


def test_no_tokens_asked_for_and_fewer_than_none(models):
    """Zero is an answer; a negative count is a mistake."""
    out = Decoder(*models).generate(prompt_of(5), max_new_tokens=0)
    assert (out.token_ids, out.round_lengths, out.stop_reason) == ([], [], "length")
    with pytest.raises(UsageError, match="max_new_tokens"):
        Decoder(*models).generate(prompt_of(5), max_new_tokens=-1)


@pytest.mark.parametrize("width", ["auto", "round"])
def test_one_token_is_no_reason_to_measure_costs(models, width):
    """The prompt's pass gives it: there is no round whose width would matter."""
    decoder = Decoder(*models)
    assert len(decoder.generate(prompt_of(5), width=width, max_new_tokens=1).token_ids) == 1
    assert decoder.deployment is None


@pytest.mark.parametrize("body", BODIES)
def test_the_end_of_the_context_is_exact(body):
    """A tree near the end has nodes beyond the last position; the answer must still fill the context exactly."""
    target, draft = tiny_target(), tiny_draft(block_size=16)
    decoder = Decoder(target, draft, attention=body)
    for length in range(60, CONTEXT + 1):
        prompt = prompt_of(length)
        for method in ("ar", "dflash", "cast"):
            out = decoder.generate(prompt, method=method, width=63, max_new_tokens=50)
            assert len(out.token_ids) == CONTEXT - length
            assert out.stop_reason == "context"
            assert out.token_ids == autoregressive(target, prompt, 50).token_ids
    with pytest.raises(UsageError, match="65.*64"):
        decoder.generate(prompt_of(CONTEXT + 1))


def test_a_drafter_with_a_shorter_context_still_works():
    """RoPE tables cut to the drafter's limit would fail, or wrap, in the middle of an answer."""
    target, draft = tiny_target(), tiny_draft(context=16)
    prompt = prompt_of(12)
    assert (
        Decoder(target, draft).generate(prompt, width=7, max_new_tokens=40).token_ids
        == autoregressive(target, prompt, 40).token_ids
    )


def test_the_shortest_prompts(models):
    """One token, id 0 among them, is a prompt; no token is not."""
    for prompt in ([0], [17]):
        expected = autoregressive(models[0], prompt, 10).token_ids
        assert Decoder(*models).generate(prompt, width=7, max_new_tokens=10).token_ids == expected
    with pytest.raises(UsageError, match="no tokens"):
        Decoder(*models).generate([])


@pytest.mark.parametrize("prompt", ["hello", ["a"], [1.5, 2.0], [[1, 2]], [-1], [VOCABULARY], [True], torch.tensor([[1, 2]])], ids=str)
def test_what_is_no_prompt_is_refused(models, prompt):
    with pytest.raises(UsageError, match=f"must be token ids below {VOCABULARY}: encode"):
        Decoder(*models).generate(prompt, max_new_tokens=3)


def test_ids_in_a_tensor_are_a_prompt_too(models):
    prompt = prompt_of(5)
    expected = Decoder(*models).generate(prompt, max_new_tokens=9, width=3).token_ids
    assert Decoder(*models).generate(torch.tensor(prompt), max_new_tokens=9, width=3).token_ids == expected


def test_a_long_prompt_prefills_in_chunks(monkeypatch):
    """Chunked and whole prefill agree, and no chunk is longer than the bound."""
    from minicast import round

    target, draft = tiny_target(context=2048), tiny_draft(context=2048)
    prompt = prompt_of(700)
    monkeypatch.setattr(round, "PREFILL_ROWS", 1024)
    whole = Decoder(target, draft).generate(prompt, max_new_tokens=20).token_ids
    monkeypatch.setattr(round, "PREFILL_ROWS", 64)
    rows = []
    target.register_forward_pre_hook(lambda module, arguments: rows.append(arguments[0].shape[1]))
    chunked = Decoder(target, draft).generate(prompt, width=7, max_new_tokens=20).token_ids
    assert chunked == whole
    assert max(rows) == 64 and sum(rows[:11]) == 700


def test_generate_keeps_one_decoder_on_the_target(models):
    """The convenience function must not allocate caches a call."""
    target, draft = models
    first = generate(target, draft, prompt_of(5), max_new_tokens=5)
    decoder = target.decoder
    assert generate(target, draft, prompt_of(5), max_new_tokens=5).token_ids == first.token_ids
    assert target.decoder is decoder


@pytest.mark.parametrize("body", BODIES)
def test_no_position_is_scored_that_the_tree_cannot_reach(models, body, monkeypatch):
    """A node's depth is at most N, and on a small target each scored position costs a pass over the LM head."""
    target, draft = models
    decoder, scored = Decoder(target, draft, attention=body), []
    score = draft.log_q
    monkeypatch.setattr(draft, "log_q", lambda hidden, *rest: scored.append(len(hidden)) or score(hidden, *rest))
    for method, width, rows in [("cast", 1, 1), ("cast", 3, 3), ("cast", 15, DEPTH), ("dflash", 3, DEPTH)]:
        scored.clear()
        decoder.generate(prompt_of(5), method=method, width=width, max_new_tokens=12)
        assert scored and set(scored) == {rows}, (method, width)


def test_a_round_copies_to_the_host_once_and_the_tree_once(models, monkeypatch):
    """Each copy is a device sync on a GPU. One `.tolist()` is the round's outcome, one the heap's input; the depth of
    the tree, and its building, read tensors that live on the host. No `.item()`, `.cpu()`, `.numpy()` at all."""
    target, draft = models
    decoder = Decoder(target, draft)
    decoder.state.visits = False  # as on a GPU
    calls = []
    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *arguments, name=name, original=original):
            calls.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, spy)
    rounds = decoder.stream(prompt_of(5), width=15, max_new_tokens=30)
    next(rounds)
    calls.clear()
    next(rounds)
    assert sorted(calls) == ["tolist", "tolist"], calls


@pytest.mark.parametrize("shaping", [dict(), dict(temperature=0.9), dict(temperature=0.9, verifier="stochastic")], ids=str)
def test_choices_at_all_rows_and_at_those_visited_give_one_text(models, shaping):
    """The live slice on a GPU chooses at all rows at once; on a CPU it asks at those that it visits."""
    outputs = []
    for visits in (True, False):
        decoder = Decoder(*models)
        decoder.state.visits = visits
        outputs.append(decoder.generate(prompt_of(9), width=15, max_new_tokens=40, seed=3, **shaping))
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[0].round_lengths == outputs[1].round_lengths


SHAPINGS = [dict(temperature=0.7), dict(temperature=1.0, top_k=20), dict(temperature=1.0, top_p=0.9)]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_sampled_text_depends_on_the_seed_alone(models, body, shaping):
    """Keyed noise: chain and tree at any width give AR's sampled tokens; a longer limit only extends them. The live
    slice chooses at the visited rows, the static body at all rows: a different support would show here."""
    target, draft = models
    decoder = Decoder(target, draft, attention=body)
    for seed in range(2):
        prompt = prompt_of(6, seed)
        expected = autoregressive(target, prompt, 30, seed=seed, **shaping).token_ids
        for method, width in (("ar", 0), ("dflash", 7), ("cast", 3), ("cast", 31)):
            options = dict(method=method, width=width, seed=seed, **shaping)
            assert decoder.generate(prompt, max_new_tokens=20, **options).token_ids == expected[:20], (method, width)
        method = oracle(expected, len(prompt), decoys=1)
        out = decoder.generate(prompt, method=method, max_new_tokens=30, seed=seed, **shaping)
        assert out.token_ids == expected
        assert max(out.round_lengths) == DEPTH + 1


@pytest.mark.parametrize("method", ["ar", "dflash", "cast"])
@pytest.mark.parametrize("verifier", ["direct", "stochastic"])
def test_one_seed_one_text_and_many_seeds_many(models, method, verifier):
    """A seed that is not used, or generator state that leaks from one request to the next."""
    decoder = Decoder(*models)

    def text(seed):
        options = dict(method=method, width=7, verifier=verifier, temperature=1.0, seed=seed, max_new_tokens=10)
        return tuple(decoder.generate(prompt_of(6), **options).token_ids)

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(1, 11)}) > 1


@pytest.mark.parametrize("top_k", [VOCABULARY, VOCABULARY + 1, 10**6])
def test_top_k_beyond_the_vocabulary_is_no_top_k(models, top_k):
    """An index error, or a different text, where the support is everything."""
    decoder, options = Decoder(*models), dict(width=7, temperature=1.0, seed=4, max_new_tokens=20)
    plain = decoder.generate(prompt_of(6), **options).token_ids
    assert decoder.generate(prompt_of(6), top_k=top_k, **options).token_ids == plain


def test_extreme_temperatures_and_nuclei_are_greedy(models):
    """Division by a temperature that underflows; a nucleus smaller than the first token's mass."""
    decoder = Decoder(*models)
    greedy = decoder.generate(prompt_of(6), method="ar", max_new_tokens=20).token_ids
    for options in ({"temperature": 1e-30}, {"temperature": 1e-320}, {"temperature": 1.0, "top_p": 1e-9}):
        assert decoder.generate(prompt_of(6), width=7, max_new_tokens=20, **options).token_ids == greedy


def test_requests_that_cannot_be_served_are_usage_errors(models):
    """Raw tracebacks, or values that one body refuses and another runs with."""
    decoder = Decoder(*models)
    for options in (
        dict(rank_cap=0), dict(width=-1), dict(width=3.5), dict(width="wide"), dict(temperature=-1.0), dict(top_p=2.0),
        dict(method="beam"), dict(method=["ar"]), dict(verifier="none"), dict(method=np.array(["ar", "x"])),
        dict(width=np.array([1, 2])), dict(verifier=np.array([1, 2])),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            decoder.generate(prompt_of(5), max_new_tokens=4, **options)
    with pytest.raises(UsageError, match="token ids below"):
        decoder.generate([5, VOCABULARY], max_new_tokens=4)
    for no_ids in ("a text", torch.ones(1, 5, dtype=torch.int64)):
        with pytest.raises(UsageError, match="ids"):
            decoder.generate(no_ids, max_new_tokens=4)
    for depth in (-1, 1.5, True):
        with pytest.raises(UsageError, match=f"a whole number of depths, from the first on, not {depth}"):
            decoder.generate(prompt_of(5), method=lambda proposal: best_first_tree(proposal.draft(depth), 3), width=3)
    with pytest.raises(UsageError, match="has no draft head"):
        Decoder(models[0]).generate(prompt_of(5), method=lambda proposal: best_first_tree(proposal.draft(), 3), width=3)


def test_a_method_cannot_change_the_answer_it_looks_at(models):
    target, draft = models

    def forgetful(proposal):
        proposal.token_ids.clear()
        return best_first_tree(proposal.draft(), proposal.width, proposal.rank_cap)

    out = Decoder(target, draft).generate(prompt_of(5), method=forgetful, width=3, max_new_tokens=12)
    assert out.token_ids == autoregressive(target, prompt_of(5), 12).token_ids


def test_a_policy_of_ones_own_may_ask_for_too_much(models):
    """One that doubles without end is held to the widest tree; a width that is none is named."""
    with pytest.warns(UserWarning, match="500.*127"):
        assert 127 in Decoder(*models).generate(prompt_of(5), width=FixedWidth(500), max_new_tokens=4).widths
    for width in (4.5, -1, None):
        with pytest.raises(ValueError, match=f"whole number.*{width}"):
            Decoder(*models).generate(prompt_of(5), width=FixedWidth(width), max_new_tokens=4)


@pytest.mark.parametrize("stop_ids", [5, None, 2.0, "2", "", b"2", b"", (7, -1), (-2,), ["2"], [2.0], [None], [[2]], [True]])
def test_stop_ids_that_are_no_sequence_are_a_usage_error(models, stop_ids):
    """One id in place of a sequence fails only in the middle of the answer, in words about iteration."""
    decoder = Decoder(*models)
    with pytest.raises(UsageError, match="stop_ids must be a collection of token ids, got") as error:
        decoder.generate(prompt_of(5), max_new_tokens=4, stop_ids=stop_ids)
    assert "\n" not in str(error.value)
    stop = decoder.generate(prompt_of(5), max_new_tokens=4).token_ids[2]
    for kind in (list, set, tuple):
        assert decoder.generate(prompt_of(5), stop_ids=kind([stop])).stop_reason == "eos"


def test_a_head_that_does_not_fit_is_refused():
    """Shapes that happen to agree run for a while, or fail with a message about tensors."""
    with pytest.raises(UsageError, match="block size"):
        Decoder(tiny_target(), tiny_draft(block_size=129))
    with pytest.raises(UsageError, match="float64"):
        Decoder(tiny_target(), tiny_draft().double())
    foreign = tiny_draft()
    foreign.config = DraftConfig(**{**vars(foreign.config), "target_layers": 36})
    with pytest.raises(UserError):
        Decoder(tiny_target(), foreign)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("width", [15, "round"])
def test_a_drafter_without_finite_scores_is_an_error(models, body, width):
    """A tree ordered by not-a-number; a static builder cannot raise, and must not go on as AR in silence, nor may a
    policy that finds no mass worth its time."""
    draft = tiny_draft()
    draft.norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="drafter"):
        Decoder(models[0], draft, attention=body).generate(prompt_of(5), width=width, max_new_tokens=10)


def test_a_second_answer_ends_the_first(models):
    """Two streams over one decoder would go on over each other's caches."""
    decoder = Decoder(*models)
    first = decoder.stream(prompt_of(5), width=7, max_new_tokens=20)
    next(first)
    second = decoder.stream(prompt_of(6, 1), width=7, max_new_tokens=20)
    next(second)
    with pytest.raises(UserError, match="another answer"):
        list(first)
    assert len([token for step in second for token in step.token_ids]) == 19


@pytest.mark.parametrize("body", BODIES)
def test_a_reset_ends_the_answer_that_runs(models, body):
    """Its caches are gone: one line says so."""
    decoder = Decoder(*models, attention=body, max_length=64)
    answer = decoder.stream(prompt_of(5), width=7, max_new_tokens=20)
    next(answer)
    decoder.reset()
    with pytest.raises(UserError, match="was reset"):
        next(answer)


def test_a_sampled_round_reads_one_choice_a_visited_row(models, monkeypatch):
    """On a CPU a read costs nothing and a choice a pass over the vocabulary; no row that is not visited pays."""
    decoder, reads = Decoder(*models), []
    item = torch.Tensor.item
    rounds = decoder.stream(prompt_of(5), width=15, temperature=1.0, max_new_tokens=30)
    next(rounds)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))
    step = next(rounds)
    assert len(reads) == len(step.path)


@pytest.mark.parametrize("body", BODIES)
def test_a_policy_may_begin_with_pauses(body):
    """A policy of one's own that starts at width 0 drafts later on, and the text stays AR's."""

    class Late:
        rounds = 0

        @property
        def width(self):
            return 5 if self.rounds >= 10 else 0

        def keep(self, tree):
            return tree.width

        def observe(self, width, committed, seconds):
            self.rounds += 1

    target, draft = tiny_target(), tiny_draft()
    expected = Decoder(target).generate(prompt_of(9), method="ar", max_new_tokens=30).token_ids
    out = Decoder(target, draft, attention=body, max_length=64).generate(prompt_of(9), width=Late(), max_new_tokens=30)
    assert out.token_ids == expected
    assert out.widths[:10] == [0] * 10 and set(out.widths[10:]) == {5}


class Fixed:
    """A policy of one's own: proposes `width` nodes, keeps `kept` of them."""

    def __init__(self, width, kept):
        self.width, self.kept, self.heard = width, kept, []

    def keep(self, tree):
        return self.kept

    def observe(self, width, committed, seconds):
        self.heard.append((width, committed))


@pytest.mark.parametrize("body", BODIES)
def test_nodes_that_a_policy_does_not_keep_are_not_verified(body):
    """Where rounds are padded, the rows behind the kept ones are padding, not the nodes that were proposed there."""
    target, draft = tiny_target(), tiny_draft()
    expected = Decoder(target).generate(prompt_of(9), method="ar", max_new_tokens=30).token_ids
    policy = Fixed(15, 1)
    decoder = Decoder(target, draft, attention=body, max_length=64)
    method = oracle(expected, 9)  # whose other nodes would all be accepted
    for step in decoder.stream(prompt_of(9), method=method, width=policy, max_new_tokens=29):
        assert step.prefill or (len(step.path), step.width) == (2, 1)
    assert decoder.output.token_ids == expected[:29]
    assert policy.heard == [(1, 2)] * 14


@pytest.mark.parametrize("kept", [-1, 16, None, 1.0, torch.tensor(7)], ids=str)
def test_a_policy_that_keeps_no_possible_number_is_refused(models, kept):
    """Told as it is: a tensor of 7 that reads "not 7" says nothing."""
    with pytest.raises(UsageError, match=re.escape(f"a whole number of nodes, here 0 to 15, not {kept!r}")):
        Decoder(*models).generate(prompt_of(9), width=Fixed(15, kept), max_new_tokens=30)


def test_what_is_no_policy_is_refused(models):
    class WithoutKeep:
        width = 4

        def observe(self, width, committed, seconds):
            pass

    for width in (WithoutKeep(), Fixed):  # a class is not its instance; what it lacks is in the message
        with pytest.raises(UsageError, match="width must be auto, round, one of 0 to 127, or an object with width, keep and observe"):
            Decoder(*models).generate(prompt_of(9), width=width, max_new_tokens=3)


def test_a_method_that_proposes_nothing_need_not_say_of_which_type(models):
    """A drafter finds nothing, and `torch.tensor([])` is of floats."""
    nothing = torch.tensor([])
    out = Decoder(models[0]).generate(prompt_of(5), method=lambda _: Tree(*[nothing] * 4), width=3, max_new_tokens=6)
    assert out.token_ids == autoregressive(models[0], prompt_of(5), 6).token_ids and set(out.widths) == {0}


@pytest.mark.parametrize("body", BODIES)
def test_a_method_of_ones_own_may_have_a_name(models, monkeypatch, body):
    """In METHODS, too, it is not one of ours: its trees may be deeper than the drafter's block. Taken for ours, a path was
    committed that had been cut there, in another text without a word."""
    target, draft = models
    expected = autoregressive(target, prompt_of(9), 30).token_ids
    monkeypatch.setitem(METHODS, "known", oracle(expected, 9, depth=DEPTH + 5))
    out = Decoder(target, draft, attention=body).generate(prompt_of(9), method="known", width=15, max_new_tokens=30)
    assert out.token_ids == expected and max(out.round_lengths) == DEPTH + 6


@pytest.mark.parametrize("body", BODIES)
def test_the_drafter_reads_all_that_a_long_pause_left(body):
    """More than one pass of a prompt takes: each position's keys and values are those of a drafter that never rested."""
    target, draft = tiny_target(context=1200), tiny_draft(context=1200)
    resting = Fixed(0, 0)
    decoder = Decoder(target, draft, attention=body, max_length=64)
    rounds = decoder.stream(prompt_of(9), width=resting, max_new_tokens=700)
    passes, extend = [], draft.extend
    draft.extend = lambda *arguments: passes.append(arguments) or extend(*arguments)
    for _ in range(650):
        next(rounds)
    assert len(passes) == 1  # the prompt: it rests
    resting.width = 3
    step = next(rounds)
    del draft.extend
    state = decoder.state
    assert state.drafted == state.prefix - len(step.path) > 650
    steady = Decoder(target, draft)
    steady.generate(prompt_of(9) + decoder.output.token_ids, width=3, max_new_tokens=2)
    count = min(state.drafted, steady.state.drafted)
    ours, theirs = (each.draft_cache.data[..., :count, :] for each in (state, steady.state))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("body", BODIES)
def test_a_reset_clears_the_drafters_cache_too(body):
    """Keys of features that were not finite lie above the next, shorter prompt, where masking does not hide them."""
    target, draft = tiny_target(), tiny_draft()
    decoder = Decoder(target, draft, attention=body, max_length=64)
    good = draft.hidden_norm.weight.data.clone()
    draft.hidden_norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="drafter gave non-finite scores"):
        decoder.generate(prompt_of(30), width=7, max_new_tokens=20)
    draft.hidden_norm.weight.data.copy_(good)
    expected = autoregressive(target, prompt_of(6, 1), 20).token_ids
    assert decoder.generate(prompt_of(6, 1), width=7, max_new_tokens=20).token_ids == expected


def test_a_stop_id_behind_the_limit_is_not_emitted(models):
    """A block accepted whole may hold one beyond the last token that there is room for."""
    target, draft = models
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 30).token_ids
    stop = next(token for index, token in enumerate(expected) if index >= 4 and token not in expected[:index])
    count = expected.index(stop)
    method = oracle(expected, len(prompt), depth=DEPTH)
    for room, reason in ((count, "length"), (count + 1, "eos")):
        decoder = Decoder(target, draft)
        out = decoder.generate(prompt, method=method, max_new_tokens=room, stop_ids=(stop,))
        assert out.token_ids == expected[:room] and out.stop_reason == reason


def test_an_answer_that_just_fits_the_context_ends_by_its_length(models):
    prompt = prompt_of(CONTEXT - 5)
    for count, reason in ((4, "length"), (5, "length"), (6, "context")):
        out = Decoder(*models).generate(prompt, width=7, max_new_tokens=count)
        assert len(out.token_ids) == min(count, 5) and out.stop_reason == reason


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("drafter", [False, True])
def test_a_tree_of_ones_own_may_be_deeper_than_the_drafters_block(models, body, drafter):
    """A path cut at the block's depth would commit the wrong rows, or not run."""
    target, draft = models
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 40).token_ids

    def method(proposal):
        start = len(proposal.token_ids) - len(prompt)
        return tree_of([(token, node - 1) for node, token in enumerate(expected[start : start + 2 * DEPTH])])

    decoder = Decoder(target, draft if drafter else None, attention=body, max_length=64)
    out = decoder.generate(prompt, method=method, max_new_tokens=40)
    assert out.token_ids == expected and out.round_lengths[0] == 2 * DEPTH + 1
    if drafter:  # rows that pad a later round are at the root's depth again, whose noise there is
        sampled = dict(temperature=1.0, seed=3)
        out = decoder.generate(prompt, width=3, max_new_tokens=12, **sampled)
        assert out.token_ids == autoregressive(target, prompt, 12, **sampled).token_ids


def test_generate_with_another_head_drafts_with_it(models):
    """A decoder kept on the target has the head of the last call."""
    target, draft = models
    generate(target, draft, prompt_of(5), max_new_tokens=5, width=3)
    other = tiny_draft(seed=5)
    generate(target, other, prompt_of(5), max_new_tokens=5, width=3)
    assert target.decoder.draft is other
    assert generate(target, None, prompt_of(5), max_new_tokens=5, method="ar").token_ids
    assert target.decoder.draft is None


@pytest.mark.parametrize("shaping", [dict(temperature=0.7), dict(temperature=1.0, verifier="stochastic")], ids=str)
def test_a_sampled_answer_goes_on_as_it_would_have(models, shaping):
    """A token's noise is keyed by its absolute position, the first token's too: two of one noise would repeat each other."""
    decoder, prompt = Decoder(*models), prompt_of(6)
    options = dict(method="ar", seed=2, **shaping)
    whole = decoder.generate(prompt, max_new_tokens=20, **options).token_ids
    for count in (1, 5):
        again = decoder.generate(prompt + whole[:count], max_new_tokens=20 - count, **options).token_ids
        assert again == whole[count:]


def test_top_k_of_one_is_greedy(models):
    """A top-k that is dropped on its way shows in no comparison of methods, for all drop it."""
    decoder = Decoder(*models)
    greedy = decoder.generate(prompt_of(6), method="ar", max_new_tokens=20).token_ids
    assert decoder.generate(prompt_of(6), width=7, temperature=3.0, top_k=1, max_new_tokens=20).token_ids == greedy


def test_the_stochastic_verifier_draws_its_own_text(models):
    """A verifier that is dropped on its way gives AR's text, and looks right."""
    decoder, texts = Decoder(*models), []
    for verifier in ("direct", "stochastic"):
        options = dict(width=31, temperature=1.0, verifier=verifier, max_new_tokens=40)
        texts.append([decoder.generate(prompt_of(6), seed=seed, **options).token_ids for seed in range(4)])
    assert texts[0] != texts[1]


def test_a_policy_hears_the_time_of_each_round_alone(models):
    """What went before, or what the caller does in between, would make drafting look slow."""
    policy, seconds = Fixed(3, 0), []
    policy.observe = lambda width, committed, took: seconds.append(took)
    decoder = Decoder(*models)
    for _ in decoder.stream(prompt_of(6), width=policy, max_new_tokens=9):
        time.sleep(0.02)
    assert len(seconds) == 8 and sum(seconds) <= decoder.output.wall_seconds


def test_a_decoder_without_a_head_has_a_width_of_0(models):
    """It is AR, which drafts nothing."""
    expected = autoregressive(models[0], prompt_of(5), 9).token_ids
    assert Decoder(models[0]).generate(prompt_of(5), width=0, max_new_tokens=9).token_ids == expected


def test_of_a_block_that_is_cut_only_what_was_emitted_counts_as_accepted(models):
    target, draft = models
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 20).token_ids
    steps = list(Decoder(target, draft).stream(prompt, method=oracle(expected, len(prompt)), max_new_tokens=4))
    assert [(len(step.token_ids), step.accepted) for step in steps] == [(1, 0), (3, 3)]


@pytest.mark.parametrize("body", BODIES)
def test_a_tree_of_ones_own_may_have_more_siblings_than_the_rank_cap(models, body, monkeypatch):
    """The stochastic verifier's table has a column for each: the cap is of our own trees."""
    asked, siblings = [], theorem3.siblings
    monkeypatch.setattr(theorem3, "siblings", lambda *given: asked.append(given[-1]) or siblings(*given))
    tree = tree_of([(token, -1) for token in range(20)])
    options = dict(method=lambda proposal: tree, verifier="stochastic", temperature=1.0, rank_cap=2, max_new_tokens=6)
    assert len(Decoder(*models, attention=body).generate(prompt_of(5), **options).token_ids) == 6
    assert asked and min(asked) >= 20
    asked.clear()
    Decoder(*models, attention=body).generate(prompt_of(5), **options | {"method": "cast", "width": 20})
    assert set(asked) == {2}


def test_a_draft_vocabulary_in_half_precision():
    """The rows are read back in the target's own type, and log q is float32 all the same."""
    target, draft = tiny_target().bfloat16(), tiny_draft().bfloat16()
    draft.restrict(range(100), target)
    assert torch.equal(draft.vocabulary_head.weight, target.lm_head.weight[:100])
    assert draft.log_q(torch.randn(DEPTH, 32).bfloat16(), target).dtype == torch.float32
