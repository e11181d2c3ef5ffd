"""Compiling and capturing, as far as a CPU can show it: the same functions, recorded and replayed.

A tape stands for a CUDA graph. It records the operations that a function ran, with their tensors and
constants, and replays them into the same memory. So a host value that a round reads is baked in, as in a
graph, and gives a wrong token the next round; and an operation that a graph cannot hold is refused when it is
recorded. Tokens are compared exactly in float32 with fixed seeds: no false alarms.
"""

import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from sympy import Integer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs import cpu
from graphs.capture import MAX_GRAPHS, CompiledLayer, Graphs, SetupTime
from graphs.cpu import AHEAD, prefetching
from graphs.masks import BODIES
from minicast import Decoder, decode
from minicast.back_off import Pace
from minicast.bench import Arm, warm_up
from minicast.curve import MassCurve
from minicast.answer import Options
from minicast.methods import METHODS, best_tree, capturable
from minicast.policy import FixedWidth
from minicast.probe import LEARNED, Costs, Deployment, Passes
from minicast.round import BUCKETS, COMPILED_BUCKETS, Settled, pack, prefill, propose, settle
from minicast.tree import candidate_pairs, device_tree, top_ranked
from minicast.verify import target_choices
from minicast.width import MAX_WIDTH
from model.linear import Linear, lay_out, linear_layers
from model.transformer import Layer, Window
from test_decode import CONTEXT, DEPTH, autoregressive, oracle, prompt_of, tiny_draft, tiny_target, tree_of

STATIC = ["static", "flex"]


class Tape(TorchDispatchMode):
    """The operations of a function, in order."""

    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        refuse(operation, arguments)
        for argument, declared in zip(arguments, operation._schema.arguments):
            if declared.alias_info and declared.alias_info.is_write:
                storage = argument.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = operation(*arguments, **(keywords or {}))
        self.calls.append((operation, arguments, keywords or {}, result))
        return result

    def undo(self):
        """As if nothing had run: recording a graph runs nothing."""
        for storage, values in self.before.values():
            storage.copy_(values)
        self.before.clear()

    def replay(self):
        for operation, arguments, keywords, result in self.calls:
            again = operation(*arguments, **keywords)
            for old, new in zip(tensors(result), tensors(again), strict=True):
                assert old.shape == new.shape
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(result) -> list[torch.Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def refuse(operation, arguments) -> None:
    """What stops a capture: a value copied to the host, a shape that depends on data, values from the
    host."""
    name = str(operation)
    boolean_index = False
    if name.startswith(("aten.index.", "aten.index_put")):
        boolean_index = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in arguments[1])
    elif torch.Tag.dynamic_output_shape in operation.tags:
        raise AssertionError(f"{name}: its shape depends on data")
    if boolean_index:
        raise AssertionError(f"{name}: a boolean index, whose size depends on data")
    if torch.Tag.data_dependent_output in operation.tags:
        raise AssertionError(f"{name}: a value for the host")
    if name.startswith("aten.lift_fresh"):
        raise AssertionError(f"{name}: a tensor made from host values")


class TapeRecorder:
    """CudaRecorder's part, played by tapes. Keeps them in the order of recording."""

    def __init__(self):
        self.tapes, self.warm_ups = [], 0

    def renew(self):
        pass

    def warm_up(self, function):
        self.warm_ups += 1
        function()

    def record(self, function):
        tape = Tape()
        with tape:
            output = function()
        tape.undo()
        self.tapes.append(tape)
        return tape, output


def replaying(target, draft, body="static", **options) -> Decoder:
    decoder = Decoder(target, draft, attention=body, **options)
    decoder.graphs = Graphs(TapeRecorder(), decoder.setup)
    return decoder


@pytest.fixture(scope="module")
def models():
    return tiny_target(), tiny_draft()


@pytest.mark.parametrize("body", STATIC)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}])
def test_replayed_rounds_give_the_autoregressive_tokens(models, body, sampling):
    """Prefix, tree, root and seed change between replays; one that was baked in repeats its first round."""
    target, draft = models
    decoder = replaying(target, draft, body)
    for seed in range(2):
        prompt = prompt_of(5 + 4 * seed, seed)
        expected = autoregressive(target, prompt, 10, seed=seed, **sampling).token_ids
        for method, width in (("ar", 0), ("dflash", 7), ("cast", 3), ("cast", 40)):
            options = dict(method=method, width=width, max_new_tokens=10, seed=seed)
            out = decoder.generate(prompt, **options, **sampling)
            assert out.token_ids == expected, (method, width)
    # AR is one replay a token, and 7 and 3 nodes share 16 rows.
    assert len(decoder.graphs.captured) == len(decoder.graphs.recorder.tapes) == 8 - 1 - 1


def deployed(decoder: Decoder) -> Decoder:
    """With costs and a mass curve that are given, so that nothing is measured or learned: 15 good candidates."""
    deployment = decoder.deployment = Deployment(decoder)
    deployment.curve = MassCurve([0.4] * 15 + [0.0] * (MAX_WIDTH - 15), [0.4] * DEPTH, [], [], rounds=LEARNED)
    costs = Costs(BUCKETS, (10.0, 11.0, 11.2, 11.5, 12.0, 12.5, 13.5, 15.0), (1.5, 1.5), (1, 127))
    deployment.costs_at = lambda prompt_tokens, new_tokens: costs
    return decoder


def knowing(decoder: Decoder, text: list[int], first: int) -> Decoder:
    """With a drafter that knows the text from position `first` on, some tokens better than others."""
    state, guess = decoder.state, decoder.draft.log_q
    tokens = torch.tensor([*text, *[0] * 2 * DEPTH])
    raised = (9.0 - 6.0 * (torch.arange(len(tokens)) % 4 == 0)) * (torch.arange(len(tokens)) >= first)

    def log_q(hidden, target, run_linear):
        positions = state.P + 1 + state.rows[:DEPTH]
        scores = guess(hidden, target, run_linear)
        return scores.scatter_add(1, tokens[positions, None], raised[positions, None]).log_softmax(-1)

    decoder.draft.log_q = log_q
    return decoder


@pytest.mark.parametrize("body", STATIC)
@pytest.mark.parametrize("width", ["auto", "round"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 50}])
def test_replayed_rounds_of_a_policy_that_pauses(models, monkeypatch, body, width, sampling):
    """The default: graphs of several buckets take turns, AR's stands in during a pause, and the drafter catches up
    after it."""
    monkeypatch.setattr(Pace, "correction", 1.0)  # no clock
    prompt, count = prompt_of(5), CONTEXT - 5
    expected = autoregressive(models[0], prompt, count, seed=1, **sampling).token_ids
    decoder = deployed(replaying(models[0], tiny_draft(), body))
    knowing(decoder, prompt + expected, first=len(prompt) + 20)
    back_off, pausing = decoder.deployment.back_offs[width], []
    for step in decoder.stream(prompt, width=width, max_new_tokens=count, seed=1, **sampling):
        pausing.append(back_off.ar_tokens_left > 0)
        if step.width and not step.stop_reason:  # the drafter had read all that was committed before this round
            assert int(decoder.state.D) == decoder.state.drafted == decoder.state.prefix - len(step.token_ids)
    out = decoder.output
    assert out.token_ids == expected
    paused, resumed = pausing.index(True), len(pausing) - pausing[::-1].index(True)
    assert resumed - paused >= 10 and not any(out.widths[resumed - 10 : resumed])
    assert max(out.round_lengths[:paused]) <= 2 and max(out.round_lengths[resumed:]) > 4
    assert len(set(out.widths[resumed:])) > (width == "round")


def test_replayed_stochastic_rounds_equal_uncaptured_ones(models):
    """The verifier's own uniforms, too, are keyed by buffers."""
    target, draft = models
    options = dict(max_new_tokens=10, temperature=1.0, verifier="stochastic", width=7)
    decoder, plain = replaying(target, draft), Decoder(target, draft, attention="static")
    for seed in range(2):
        prompt = prompt_of(6, seed)
        expected = plain.generate(prompt, seed=seed, **options).token_ids
        assert decoder.generate(prompt, seed=seed, **options).token_ids == expected


def test_replayed_rounds_reach_the_end_of_the_context(models):
    """The last rounds write padding behind the last position: there must be room, and the warm-ups' as
    well."""
    target, draft = models
    decoder = replaying(target, draft)
    for length in (CONTEXT - 5, CONTEXT - 1):
        prompt = prompt_of(length)
        for method in METHODS:
            out = decoder.generate(prompt, method=method, width=63, max_new_tokens=50)
            assert out.token_ids == autoregressive(target, prompt, 50).token_ids
            assert out.stop_reason == "context"


@pytest.mark.parametrize("stochastic", [False, True])
def test_whose_a_method_is_only_concerns_graphs_of_the_stochastic_verifier(models, stochastic):
    """Of our methods it knows how many children a row may have."""
    decoder = Decoder(*models)
    verifier = "stochastic" if stochastic else "direct"
    ours, own = (
        decoder.request(Options(method=method, temperature=1.0, verifier=verifier), drafts=True).constants()
        for method in ("cast", lambda proposal: None)
    )
    assert (ours.custom, own.custom) == (False, stochastic)
    assert ours.method is own.method


def test_recording_leaves_no_trace(models):
    """Warm-ups run on the real buffers. What they leave, P moved or the drafter's count, shifts the whole
    answer."""
    target, draft = models
    prompt = prompt_of(6)
    plain = Decoder(target, draft, attention="static")
    decoder = replaying(target, draft)
    ours = decoder.stream(prompt, width=15, max_new_tokens=30)
    for theirs in plain.stream(prompt, width=15, max_new_tokens=30):
        mine = next(ours)
        assert (mine.token_ids, mine.path) == (theirs.token_ids, theirs.path)
        for name in ("prefix", "drafted", "tapped"):
            assert getattr(decoder.state, name) == getattr(plain.state, name)
        assert int(decoder.state.P) == decoder.state.prefix and int(decoder.state.D) == decoder.state.drafted


def test_a_method_of_ones_own_runs_as_it_is(models):
    """It reads the text so far, which a graph cannot: only the rest of its rounds is replayed."""
    target, draft = models
    prompt = prompt_of(6)
    expected = autoregressive(target, prompt, 40).token_ids
    decoder = replaying(target, draft)
    method = oracle(expected, len(prompt), decoys=1)
    out = decoder.generate(prompt, method=method, width=15, max_new_tokens=40)
    assert out.token_ids == expected
    assert set(out.round_lengths[:-1]) == {draft.block_size}
    assert {key[0] for key in decoder.graphs.captured} == {"settle"}


def test_a_capturable_method_of_ones_own_is_replayed(models):
    """It builds with fixed shapes and says so. A check of its trees would read them on the host, where none is to."""
    target, draft = models
    pairs = candidate_pairs(15, 4)

    @capturable
    def hesitant(proposal):
        return device_tree(*top_ranked(proposal.draft() - 0.3, 4), 15, pairs)

    decoder, prompt = replaying(target, draft), prompt_of(6)
    expected = autoregressive(target, prompt, 30).token_ids
    for method in (hesitant, capturable(partial(hesitant))):  # an object has no name to show
        decoder.graphs.clear()
        assert decoder.generate(prompt, method=method, width=15, max_new_tokens=30).token_ids == expected
        assert {key[0] for key in decoder.graphs.captured} == {"propose", "settle"}


@pytest.mark.parametrize("replayed", [False, True])
def test_scores_of_ones_own_make_a_tree_wherever_a_round_runs(models, replayed):
    """`best_tree` builds by the heap or, in a graph, on the device: the method need not know which, nor that a policy may
    ask for no node at all."""
    target, draft = models

    @capturable
    def warmer(proposal):
        scores = (proposal.draft(3) / 2.0).log_softmax(-1)
        return best_tree(proposal, scores, proposal.width, proposal.rank_cap)

    class Alternating(FixedWidth):
        def observe(self, width, committed, seconds):
            self.width = 15 - width

    decoder = replaying(target, draft) if replayed else Decoder(target, draft)
    rounds = decoder.stream(prompt_of(6), method=warmer, width=Alternating(15), max_new_tokens=20)
    trees = [step.tree for step in rounds][1:]
    assert decoder.output.token_ids == autoregressive(target, prompt_of(6), 20).token_ids
    assert {tree.width for tree in trees[::2]} == {15} and {tree.width for tree in trees[1::2]} == {0}
    assert max(int(tree.depths.max()) for tree in trees[::2]) <= 3


def test_trees_yielded_are_the_callers_own(models):
    """A replay overwrites what the last one returned: a list of rounds must not hold one tree many times."""
    decoder = replaying(*models)
    seen = []
    kept = []
    for step in decoder.stream(prompt_of(6), width=15, max_new_tokens=12):
        if step.tree is not None:
            kept.append(step.tree)
            seen.append(step.tree.tokens.clone())
    assert len(kept) > 2 and all(torch.equal(tree.tokens, tokens) for tree, tokens in zip(kept, seen))


def test_the_number_of_graphs_is_bounded_by_the_buckets(models):
    """40 rounds over three widths: one graph a width to propose and one a bucket to settle, whatever the
    rounds."""
    decoder = replaying(*models)
    rounds = 0
    for width in (63, 20, 15) * 2:
        rounds += len(decoder.generate(prompt_of(5), width=width, max_new_tokens=30).round_lengths)
    settles = [key for key in decoder.graphs.captured if key[0] == "settle"]
    assert rounds >= 40
    assert [key[1] for key in settles] == [64, 24, 16]
    assert len(decoder.graphs.recorder.tapes) == 6
    assert decoder.graphs.recorder.warm_ups == 2 * 6


def test_a_seed_does_not_record_anew_but_a_temperature_does(models):
    """The seed is in a buffer; what is constant in a graph must be in its key."""
    decoder = replaying(*models)
    counts = []
    for temperature, seed in ((1.0, 1), (1.0, 2), (0.5, 2)):
        decoder.generate(prompt_of(5), width=7, temperature=temperature, seed=seed, max_new_tokens=6)
        counts.append(len(decoder.graphs.recorder.tapes))
    assert counts == [2, 2, 3]


def once_is_not_timed(decoder, now, expected) -> None:
    """Answer twice, by a clock that only the target's passes, by 1, and what is done once for a shape move, by at least 100."""
    heard, policy = [], FixedWidth(7)
    policy.observe = lambda width, committed, seconds: heard.append(seconds)
    first = decoder.generate(prompt_of(5), width=policy, max_new_tokens=12)
    rounds = list(heard)
    assert first.setup_seconds >= 200 and first.prefill_seconds == 1
    assert first.wall_seconds == 1 + sum(rounds) and sum(rounds) <= len(rounds) and first.decode_seconds <= sum(rounds)
    assert now[0] == first.wall_seconds + first.setup_seconds
    decoder.reset()
    again = decoder.generate(prompt_of(5), width=policy, max_new_tokens=12)
    assert again.token_ids == first.token_ids == expected and again.setup_seconds == 0.0
    assert again.wall_seconds == first.wall_seconds and again.decode_seconds == first.decode_seconds


@pytest.mark.parametrize("way", ["recorded", "compiled", "laid out"])
def test_what_is_done_once_for_a_shape_is_in_no_time_of_an_answer(models, monkeypatch, way):
    """Compiling and recording take longer than an answer: a first one, or one after a longer prompt, would look slow, and a
    policy would hear it of the rounds that happened to record."""
    target, draft = models
    expected = autoregressive(target, prompt_of(5), 12).token_ids
    now = [0.0]

    def after(seconds, function, *arguments):
        now[0] += seconds
        return function(*arguments)

    if way == "recorded":
        decoder = replaying(target, draft)
        recorder = decoder.graphs.recorder
        monkeypatch.setattr(recorder, "record", partial(after, 1000, recorder.record))
    elif way == "laid out":  # anew, after a decoder that holds weights its own way
        decoder, waits = Decoder(target, draft), [200]
        monkeypatch.setattr(decode, "lay_out", lambda *_, compiled: after(waits.pop() if waits else 0, lambda: None))
    else:
        torch._dynamo.reset()
        decoder = Decoder(target, draft)
        layer = CompiledLayer(backend=lambda graph, inputs: after(100, lambda: graph.forward))
        layer.setup, decoder.state.body.compiled_layer = decoder.setup, layer
    monkeypatch.setattr(target, "forward", partial(after, 1, target.forward))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    once_is_not_timed(decoder, now, expected)


def test_time_of_compiling_within_a_recording_counts_once(monkeypatch):
    now, setup, x = [0.0], SetupTime(), torch.zeros(1)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def compiles():
        now[0] += 5
        setup.seconds += 5
        return x

    Graphs(TapeRecorder(), setup).run("key", compiles, [x], "one")
    assert setup.seconds == now[0] == 15


def test_graphs_kept_are_bounded():
    """A server whose users choose temperatures freely must not fill the memory with graphs. Beyond the bound all go,
    never one of several."""
    graphs = Graphs(TapeRecorder(), SetupTime())
    x, kept = torch.zeros(1), []
    for key in range(MAX_GRAPHS + 5):
        graphs.run(key, lambda: x.add_(1), [x], "one")
        graphs.run(0, lambda: x.add_(1), [x], "one")
        kept.append(len(graphs.captured))
    assert kept[:MAX_GRAPHS] == list(range(1, MAX_GRAPHS + 1)) and kept[MAX_GRAPHS:] == [2, 3, 4, 5, 6]
    assert x == 2 * len(kept)


def test_growing_caches_drop_the_graphs(models, capsys):
    """Graphs hold the addresses of caches: growing ones are said in a line, and recorded anew."""
    target, draft = tiny_target(context=4096), tiny_draft(context=4096)
    decoder = replaying(target, draft, max_length=50)
    short, long = prompt_of(20), prompt_of(70)
    options = dict(width=7, max_new_tokens=8)
    decoder.generate(short, **options)
    assert decoder.state.slots == 256  # 64 positions and the widest pack, in whole tiles
    assert len(decoder.graphs.recorder.tapes) == 2
    decoder.reset()
    address = decoder.state.target_cache.data.data_ptr()
    decoder.generate(short, **options)
    assert decoder.state.target_cache.data.data_ptr() == address and len(decoder.graphs.recorder.tapes) == 2
    assert capsys.readouterr().err == ""
    out = decoder.generate([*long] * 2, **options)
    assert out.token_ids == autoregressive(target, [*long] * 2, 8).token_ids
    assert len(decoder.graphs.recorder.tapes) == 4
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("minicast: caches grew to ") and line.endswith("; recording 2 graphs anew")


@pytest.mark.parametrize("width, reads", [(15, ["tolist"]), ("auto", ["tolist"]), ("round", ["tolist"] * 2)])
def test_host_syncs_of_a_round(models, monkeypatch, width, reads):
    """Each copy to the host stalls the device. A replayed round has one, its outcome; with "round" also the masses,
    where no curve is learned from them."""
    prompt, decoder = prompt_of(5), deployed(replaying(models[0], tiny_draft()))
    knowing(decoder, prompt + autoregressive(models[0], prompt, 40).token_ids, first=0)
    decoder.generate(prompt, width=width, max_new_tokens=3)
    calls = []
    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *arguments, name=name, original=original):
            calls.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, spy)
    rounds = decoder.stream(prompt, width=width, max_new_tokens=40)
    next(rounds)
    for _ in range(3):
        calls.clear()
        assert next(rounds).width > 0
        assert calls == reads


class OneDevice(TorchDispatchMode):
    """No operation may see or make a tensor elsewhere: on a GPU that is an error, or a copy that ends a capture."""

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        found = tree_leaves((arguments, keywords, result))
        assert {each.device.type for each in found if isinstance(each, torch.Tensor)} <= {"meta"}, operation
        return result


@pytest.mark.parametrize("body, sampling", [
    ("static", {}), ("flex", {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "verifier": "stochastic"}),
])
def test_a_round_stays_on_its_device(body, sampling):
    """Elsewhere than on a CPU nothing may be made without saying where. Tensors without values show it on any machine."""
    target, draft = tiny_target().to("meta"), tiny_draft().to("meta")
    decoder = Decoder(target, draft, attention=body)
    decoder.state.body.compiled_layer = AsWritten()
    state, request, prompt = decoder.state, decoder.request(Options(**sampling), drafts=True), prompt_of(20)
    decoder.reserve(40)
    for model in (target, draft):  # computed on the CPU, and moved once
        model.rotary(state.P, torch.float32)
    with torch.no_grad(), OneDevice():
        state.root.copy_(target_choices(prefill(state, prompt, request.tap), request.params, state.P))
        propose(state, request, (), 31)
        assert settle(state, request, 32).shape == (2 + 2 * (DEPTH + 1),)


class AsWritten:
    """In the place of a `CompiledLayer`: rounds are padded for it, and nothing is compiled."""

    failed = False
    __call__, remember, run_linear = map(staticmethod, (Layer.forward, Layer.remember, Linear.__call__))


@pytest.mark.parametrize("body", BODIES)
def test_padding_changes_nothing_real(models, body):
    """Padding rows write keys, too: to free slots above the pack, never to a committed one, not even its bits. And
    whatever token lies there, the real rows are the same, bit for bit. On a CPU compiled rounds over the live slice are
    padded; here their layers run as they are written."""
    target, draft = models
    prompt, tree = prompt_of(9), tree_of([(5, -1), (6, 0)])
    for n in (BUCKETS if body in STATIC else COMPILED_BUCKETS)[1:]:
        results = []
        for padding in (0, 77):
            decoder = Decoder(target, draft, attention=body)
            decoder.state.body.compiled_layer = AsWritten() if body == "sdpa" else None
            rounds = decoder.stream(prompt, width=7, max_new_tokens=20)
            next(rounds), next(rounds)
            state = decoder.state
            P, real = state.prefix, state.prefix + 1 + tree.width
            before = state.target_cache.data[..., :P, :].clone(), state.features[:, :P].clone()
            request = decoder.request(Options(), drafts=True)
            with torch.no_grad():
                pack(state, tree)
                state.tokens[1 + tree.width :] = padding
                outcome = Settled.read(settle(state, request, n))
            assert torch.equal(state.target_cache.data[..., :P, :], before[0])
            assert torch.equal(state.features[:, :P], before[1])
            results.append((outcome, state.target_cache.data[..., :real, :], state.features[:, : state.P]))
        (outcome, *tensors), (other_outcome, *other_tensors) = results
        assert outcome == other_outcome
        assert all(map(torch.equal, tensors, other_tensors)), n


@pytest.mark.parametrize("body, tokens", [("static", 21), ("flex", 5)])
def test_layers_compile_once_a_bucket(models, body, tokens):
    """Some 40 rounds over 3 widths: the layers of target and drafter share code, and prefixes and trees
    change none of it. Past torch's limit a shape would run uncompiled without a word."""
    torch._dynamo.reset()
    target, draft = models
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs)
        return graph.forward

    decoder = Decoder(target, draft, attention=body)
    decoder.state.body.compiled_layer = CompiledLayer(backend=backend)
    prompt = prompt_of(5)
    expected = autoregressive(target, prompt, tokens).token_ids
    for width in (3, 15, 31) * (2 if body == "static" else 1):
        assert decoder.generate(prompt, width=width, max_new_tokens=tokens).token_ids == expected
    assert len(compiled) == 4  # 16 and 32 rows of the target; the drafter's block, and what it reads


def packed(*models):
    """Tiny models whose weights fit 16 bits, packed as a loaded model's are."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, Linear):
            module.weight.data = module.weight.bfloat16().float()
            module.pack()
    return models


def compiling(target, draft, compiled: list) -> Decoder:
    """A decoder over the live slice whose layers are compiled by a backend that only notes each graph."""
    torch._dynamo.reset()

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    decoder = Decoder(target, draft, attention="sdpa")
    decoder.state.body.compiled_layer = CompiledLayer(backend=backend)
    return decoder


@pytest.mark.parametrize("make", [tiny_target, tiny_draft], ids=["llama", "qwen3"])
def test_the_attention_kernel_is_given_a_view_of_the_queries(make):
    """Of computed queries, Inductor reads the strides before it decides them, and the kernel for few rows swaps heads and
    rows: seen in torch 2.13 on qwen3 layers, by interpreting the kernels generated for CUDA. A view's are decided."""
    torch._dynamo.reset()
    graphs, layer = [], make().layers[0]
    run = CompiledLayer(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    config = layer.self_attn
    keys, values = torch.zeros(2, 1, config.kv_heads, 256, config.head_dim)
    for n in (1, 16, 128):
        rows = torch.arange(n)
        window = BODIES["flex"](run).window(torch.tensor([3]), 3, rows, torch.eye(n, dtype=torch.bool), 256)
        x, angles = torch.zeros(1, n, layer.input_layernorm.weight.numel()), torch.zeros(n, config.head_dim)
        with torch.no_grad():
            run(layer, x, (angles, angles), (keys, values), window)
    attentions = [node for graph in graphs for node in graph.graph.nodes if "flex_attention" in str(node.target)]
    assert [node.args[0].target for node in attentions] == ["transpose"] * 3


def test_layers_compile_over_the_live_slice_once_for_a_number_of_rows():
    """No two passes see as many slots, and trees of one width differ: neither may compile anything again, and any
    width up to 15 makes do with 1, 4, 8 and 16 rows."""
    target, draft = packed(tiny_target(), tiny_draft())
    prompt, compiled = prompt_of(5), []
    expected = autoregressive(target, prompt, 12).token_ids
    decoder = compiling(target, draft, compiled)
    for round_trip in range(2):
        for width in (0, 1, 2, 3, 7, 12, 15):
            assert decoder.generate(prompt, width=width, max_new_tokens=12).token_ids == expected
        layers = [graph for graph in compiled if "scaled_dot_product" in graph.code]
        assert len(layers) == 5  # the target's for each number of rows, the drafter's for its block
        counts = len(compiled) if round_trip == 0 else counts
        decoder.reset()
    assert len(compiled) == counts


def live_pass(layer, run, n: int, live: int, slots: int, seed: int = 0, masked: bool = True):
    """One pass of n rows over `live` of `slots` slots, by `run` -> (rows out, keys and values as they are then)."""
    config, generator = layer.self_attn, torch.Generator().manual_seed(seed)
    noise = partial(torch.randn, generator=generator)
    cache = tuple(noise(1, config.kv_heads, slots, config.head_dim) for _ in range(2))
    angles, rows = (noise(n, config.head_dim), noise(n, config.head_dim)), torch.arange(live - n, live)
    mask = torch.ones(n, live, dtype=torch.bool).tril(live - n) if n > 1 and masked else None
    with torch.no_grad():
        return run(layer, noise(1, n, 32), angles, cache, Window(rows, rows, mask, live=live)), *cache


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chance", [2, 4, 16, 32, 64, 128])  # heads, D, H, the MLP's width, S
def test_what_is_compiled_where_sizes_are_equal_by_chance_holds_where_they_are_not(n, chance):
    """Code that is called directly is not checked again, so it may rest on no number of live slots, nor on all being live."""
    torch._dynamo.reset()
    layer = packed(tiny_target())[0].layers[0]
    lay_out(layer, compiled=True)
    run = CompiledLayer()
    for live in (chance, 40, 41, 127, 128, 42):
        got, expected = (live_pass(layer, how, n, live, slots=128) for how in (run, Layer.forward))
        for one, other in zip(got, expected):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert len([key for key in run.forward_live.codes if key[0] is layer]) == 1  # fits any number


def test_a_layer_passes_through_dynamo_twice_for_tensors_of_a_shape():
    """Afterwards its code is called directly: Dynamo, pushed out of the caches by the weights, takes longer than a check."""
    target, draft = packed(tiny_target(context=256), tiny_draft(context=256))
    decoder, prompt = compiling(target, draft, []), prompt_of(5)
    expected = autoregressive(target, prompt, 12).token_ids
    run, calls = decoder.state.body.compiled_layer, []
    for direct in (run.forward_live, run.remember_live):
        direct.compiled = lambda *passed, through=direct.compiled: calls.append(passed[0]) or through(*passed)
    for _ in range(3):
        for width in (0, 3, 7):
            assert decoder.generate(prompt, width=width, max_new_tokens=12).token_ids == expected
    rows = [key for key in run.forward_live.codes if isinstance(key[0], Layer)]  # that fit any number of live slots
    assert len(rows) == len(target.layers) * 3 + len(draft.layers)  # 1, 4 and 8 rows; the drafter's block
    passed = 2 * len(rows) + len(draft.layers)  # what the drafter reads knows no live slots
    assert len(calls) == passed
    decoder.generate(prompt, width=7, max_new_tokens=150)  # the caches grow
    assert len(calls) > passed
    calls.clear()
    layer = target.layers[0]
    for _ in range(3):
        live_pass(layer, run, 4, live=7, slots=300)
    assert len(calls) == 1  # another number would be the second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_outside_of_layers_is_compiled_for_few_numbers_of_rows(dtype, bias):
    """Of the LM head a draft wants any number of rows, up to L, and a wide tree more than a loop has room for."""
    torch._dynamo.reset()
    generator, graphs = torch.Generator().manual_seed(0), []
    linear = Linear(33, 7, bias)  # neither divides by a panel
    linear.weight.data = torch.randn(7, 33, generator=generator).to(dtype).float()
    if bias:
        linear.bias.data = torch.randn(7, generator=generator)
    weight = linear.weight.clone()
    linear.pack()
    if linear.weight is not None:
        pytest.skip("no packed layout on this CPU")
    run = CompiledLayer(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert torch.equal(run.run_linear(linear, torch.ones(3, 33)), linear(torch.ones(3, 33))) and not graphs
    lay_out(linear, compiled=True)
    for shape in (*((m, 33) for m in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 33, 128)), (1, 5, 33), (2, 20, 33)):
        x = torch.randn(shape, generator=generator)
        expected = x.double() @ weight.double().T + (linear.bias.double() if bias else 0.0)
        torch.testing.assert_close(run.run_linear(linear, x).double(), expected, rtol=1e-5, atol=1e-4)
    assert len(graphs) == 4  # 1, 4, 8 and 16 rows
    assert not run.failed


@pytest.mark.parametrize("vocabulary", [None, list(range(20))])
def test_no_round_widens_weights(vocabulary, monkeypatch):
    """In panels they are read by compiled loops: the LM head's in each pass, and the drafter's fusion, too."""
    target, draft = packed(tiny_target(), tiny_draft())
    if vocabulary:
        draft.restrict(vocabulary, target)
    if draft.fc.packed is None:
        pytest.skip("no packed layout on this CPU")
    prompt = prompt_of(5)
    expected = autoregressive(target, prompt, 12).token_ids
    decoder = compiling(target, draft, [])
    layer, calls = decoder.state.body.compiled_layer, []
    run_linear = layer.run_linear
    monkeypatch.setattr(layer, "run_linear", lambda linear, x: calls.append(linear) or run_linear(linear, x))
    rounds = decoder.stream(prompt, width=7, max_new_tokens=12)
    next(rounds)
    assert draft.fc not in calls  # a prompt's many rows are one product, of weights that are widened once
    monkeypatch.setattr(Linear, "dense", lambda linear: pytest.fail("the weights of a linear layer are widened"))
    assert len(list(rounds)) and decoder.output.token_ids == expected


@pytest.mark.parametrize("dtype, prefetches", [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_compiled_loops_over_16_bit_weights_prefetch(dtype, prefetches, monkeypatch):
    """In the C++ of the loop itself; what other programs compile with this torch is as it was, after an error, too."""
    torch._dynamo.reset()
    linear = Linear(64, 96)
    linear.weight.data = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    linear.pack()
    if linear.weight is not None:
        pytest.skip("no packed layout on this CPU")
    lay_out(linear, compiled=True)
    assert linear.panels.dtype == dtype
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.utils import run_and_get_code

    written = CppVecKernel._get_vec_load_line
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    for ahead in (AHEAD, AHEAD // 2, AHEAD):  # a fork's: what torch has in its cache of another figure does not stand for it
        torch._dynamo.reset()
        monkeypatch.setattr(cpu, "AHEAD", ahead)
        _, code = run_and_get_code(CompiledLayer().run_linear, linear, x)
        assert ("__builtin_prefetch" in code[0] and f" + {ahead})" in code[0]) == prefetches
    with pytest.raises(KeyError), prefetching():
        assert CppVecKernel._get_vec_load_line is not written
        raise KeyError
    assert CppVecKernel._get_vec_load_line is written


def test_loops_of_other_threads_do_not_prefetch(monkeypatch):
    from torch._inductor.codegen.cpp import CppVecKernel

    monkeypatch.setattr(CppVecKernel, "_get_vec_load_line", lambda kernel, *load: f"load{load}")
    load, lines = (None, "weights", Integer(3), torch.bfloat16, "mask"), []
    with prefetching():
        lines.append(CppVecKernel._get_vec_load_line(*load))
        other = Thread(target=lambda: lines.append(CppVecKernel._get_vec_load_line(*load)))
        other.start()
        other.join()
    plain = f"load{load[1:]}"
    assert lines == [f"(__builtin_prefetch(weights + static_cast<int64_t>(3L) + {AHEAD}), {plain})", plain]


def test_without_a_list_of_compiled_codes_layers_go_through_dynamo(monkeypatch):
    """It is no public part of torch."""
    target, draft = packed(tiny_target(), tiny_draft())
    prompt = prompt_of(5)
    expected = autoregressive(target, prompt, 12).token_ids
    decoder = compiling(target, draft, [])
    monkeypatch.delattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list")
    assert decoder.generate(prompt, width=3, max_new_tokens=12).token_ids == expected
    assert not decoder.state.body.compiled_layer.forward_live.codes


def test_a_pass_under_a_mask_and_one_without_get_code_of_their_own():
    torch._dynamo.reset()
    layer, run = packed(tiny_target())[0].layers[0], CompiledLayer(backend=lambda graph, inputs: graph.forward)
    lay_out(layer, compiled=True)
    for masked in (False, True, False):
        got, expected = (live_pass(layer, how, 4, 40, slots=128, masked=masked)[0] for how in (run, Layer.forward))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_layers_that_hold_their_weights_otherwise_get_code_of_their_own():
    """A weight that 16 bits do not hold stays in float32, beside layers that have 16: one layer's code would misread it."""
    torch._dynamo.reset()
    layers = packed(tiny_target())[0].layers
    layers[1].mlp.down_proj.packed = None
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    layers[1].mlp.down_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    layers[1].mlp.down_proj.pack()
    lay_out(layers, compiled=True)
    assert [layer.mlp.down_proj.panels.dtype for layer in layers] == [torch.bfloat16, torch.float32]
    run = CompiledLayer(backend=lambda graph, inputs: graph.forward)
    for live in (40, 41, 42):
        for layer in layers:
            got, expected = (live_pass(layer, how, 4, live, slots=128, seed=live)[0] for how in (run, Layer.forward))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert len({code.__code__ for code in run.forward_live.codes.values()}) == 2


def test_decoders_that_compile_and_that_do_not_share_a_target():
    """Each begins an answer by laying out the weights its own way; left the other's, they are slow, or do not run."""
    target, draft = packed(tiny_target(), tiny_draft())
    prompt = prompt_of(5)
    eager, compiled = Decoder(target, draft), compiling(target, draft, [])
    expected = eager.generate(prompt, width=7, max_new_tokens=8).token_ids
    held = {layer.weight_bytes() for layer in target.modules() if isinstance(layer, Linear)}
    for decoder in (compiled, eager, compiled, eager):
        decoder.reset()
        assert decoder.generate(prompt, width=7, max_new_tokens=8).token_ids == expected
        for layer in linear_layers(target, draft):
            assert (layer.packed is None) == (decoder is compiled)
            assert layer.panels is None or layer.panels.dtype == torch.bfloat16
        assert {layer.weight_bytes() for layer in target.modules() if isinstance(layer, Linear)} == held


def test_a_decoder_that_does_not_compile_may_answer_between_the_rounds_of_one_that_does():
    """Layers that hold the other's weights run as they are written, until the next answer lays them out again."""
    target, draft = packed(tiny_target(), tiny_draft())
    eager, compiled = Decoder(target, draft), compiling(target, draft, [])
    expected = eager.generate(prompt_of(5), width=3, max_new_tokens=12).token_ids
    tokens = []
    for step in compiled.stream(prompt_of(5), width=3, max_new_tokens=12):
        tokens += step.token_ids
        eager.generate(prompt_of(9), width=3, max_new_tokens=4)
    assert tokens == expected
    assert compiled.generate(prompt_of(5), width=3, max_new_tokens=12).token_ids == expected
    assert not compiled.state.body.compiled_layer.failed and target.layers[0].mlp.down_proj.panels is not None


def test_a_compiler_that_fails_at_a_layer_leaves_the_weights_packed():
    """Panels are slow without one. This answer has begun with them; the next does not."""
    target, draft = packed(tiny_target(), tiny_draft())
    expected = autoregressive(target, prompt_of(5), 8).token_ids
    torch._dynamo.reset()

    def backend(graph, inputs):
        raise RuntimeError("no such instruction")

    decoder = Decoder(target, draft, attention="sdpa")
    decoder.state.body.compiled_layer = CompiledLayer(backend=backend)
    with pytest.warns(UserWarning, match="cannot compile, .*: RuntimeError: no such instruction$"):
        assert decoder.generate(prompt_of(5), width=3, max_new_tokens=8).token_ids == expected
    assert decoder.generate(prompt_of(5), width=3, max_new_tokens=8).token_ids == expected
    assert all(layer.packed for layer in linear_layers(target, draft))


def test_sampled_rounds_over_padded_packs():
    """Padding rows are nobody's children, whichever walk meets them."""
    target, draft = packed(tiny_target(), tiny_draft())
    prompt, options = prompt_of(5), dict(temperature=0.8, max_new_tokens=12)
    texts = [autoregressive(target, prompt, 12, temperature=0.8, seed=seed).token_ids for seed in range(3)]
    decoder = compiling(target, draft, [])  # compiles once for all of them
    for seed, expected in enumerate(texts):
        for width in (2, 5, 10):
            assert decoder.generate(prompt, width=width, seed=seed, **options).token_ids == expected


def test_without_a_compiler_there_is_one_warning(models):
    """A machine without a C++ compiler must decode all the same, and say so once; the weights stay packed for it."""
    target, draft = packed(tiny_target(), tiny_draft())
    prompt = prompt_of(5)
    expected = autoregressive(target, prompt, 6).token_ids
    for body in (None, "flex"):
        torch._dynamo.reset()
        with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent")}):
            with pytest.warns(UserWarning, match="cannot compile") as caught:
                out = Decoder(target, draft, attention=body, compile=True).generate(prompt, width=7, max_new_tokens=6)
        assert len([warning for warning in caught if "cannot compile" in str(warning.message)]) == 1
        assert out.token_ids == expected
        assert all(layer.packed for layer in target.modules() if isinstance(layer, Linear))


def test_a_build_that_ctrl_c_ended_is_tried_again(tmp_path):
    """In a chat, after an answer that was interrupted: Ctrl-C ends the C++ compiler, and Inductor keeps that as its outcome."""
    stopped, compiler = tmp_path / "stopped", tmp_path / "g++"
    real = shutil.which(torch._inductor.cpp_builder.get_cpp_compiler())
    compiler.write_text(f'#!/bin/sh\ntest -e {stopped} && exit 130\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
        CompiledLayer().try_out()  # else what it can do would be found out once it is stopped
        stopped.touch()
        for ends in (True, False):
            layer = CompiledLayer()
            with pytest.warns(UserWarning, match="cannot compile") if ends else nullcontext():
                layer._run(layer._compile(torch.sin), torch.sin, torch.zeros(8))
            assert layer.failed == ends
            stopped.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_compiling_that_the_environment_turns_off_is_told(name, monkeypatch):
    """torch would run layers as they are written without a word, or end in a traceback."""
    monkeypatch.setenv(name, "1")
    target, draft = packed(tiny_target(), tiny_draft())
    expected = autoregressive(target, prompt_of(5), 6).token_ids
    with torch._dynamo.config.patch(disable=name == "TORCH_COMPILE_DISABLE"):  # as torch reads it when it is imported
        with pytest.warns(UserWarning, match=f"cannot compile, .*{name}") as caught:
            decoder = Decoder(target, draft, compile=True)
    assert len(caught) == 1 and not decoder.state.compiled
    assert decoder.generate(prompt_of(5), width=3, max_new_tokens=6).token_ids == expected


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    """The compiler makes it when it is imported."""
    (tmp_path / "file").touch()
    code = "from graphs.capture import CompiledLayer; CompiledLayer()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file")},
        cwd=Path(__file__).parents[1], capture_output=True, text=True,
    )
    named = f"TORCHINDUCTOR_CACHE_DIR, cannot be made: {tmp_path / 'file'}: File exists"
    assert f"UserError: the compiler's cache, see {named}" in done.stderr


def test_the_largest_graphs_are_recorded_first(models, monkeypatch):
    """They share a pool of memory: a smaller one fits where a larger one left room, but not the other way."""
    recorded = []
    capture = Graphs._capture
    monkeypatch.setattr(Graphs, "_capture", lambda self, *how: recorded.append(how[-1]) or capture(self, *how))
    passes = Passes(replaying(*models), prefix=8)
    passes.costs((1, 16, 32))
    assert [label for label in recorded if "rows" in label] == ["32 rows", "16 rows", "1 rows"]
    recorded.clear()
    arms = [Arm("ar", 0), Arm("cast", 7), Arm("cast", 40)]
    warm_up(dict.fromkeys(arms, replaying(*models)), prompt_of(5), {"max_new_tokens": 4})
    assert [label for label in recorded if "rows" in label] == ["48 rows", "16 rows", "1 rows"]


def test_a_rank_cap_records_anew(models):
    """It is constant in a proposal's graph: under another's key that one's trees would be proposed. `None` is no cap."""
    decoder, plain = replaying(*models), Decoder(*models)
    for rank_cap in (1, 8, None):
        options = dict(width=63, rank_cap=rank_cap, max_new_tokens=6)
        ours, theirs = ([step.tree for step in each.stream(prompt_of(5), **options) if step.tree] for each in (decoder, plain))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.real().parents, other.parents) and torch.equal(one.real().tokens, other.tokens)


def test_static_caches_end_with_the_context(models):
    """A default `max_length` beyond it would be memory for nothing."""
    decoder = Decoder(*models, attention="static")
    decoder.generate(prompt_of(5), width=7, max_new_tokens=3)
    assert decoder.state.slots == 256  # 64 positions and the widest pack, in whole tiles
