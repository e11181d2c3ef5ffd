"""Costs probed once and kept, mass curves shipped or learned, widths chosen from them, on a tiny target.

Tests that ask what is decided replace the clock's figures by a table: no decision rests on this machine.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import linear_regression

import pytest
import torch

from graphs.capture import CompiledLayer
from graphs.masks import BODIES, TILE
from minicast import answer, back_off, paper_probe, probe
from minicast.curve import MassCurve
from minicast.answer import Options
from minicast.decode import Decoder
from minicast.methods import METHODS
from minicast.paper_probe import full_probe
from minicast.policy import AutoWidth, FixedWidth, RoundWidth
from minicast.probe import LEARNED, Costs, Deployment, Passes, Timings, interleaved
from minicast.round import BUCKETS
from minicast.tree import best_first_tree, chain_tree
from minicast.width import MAX_WIDTH, UNINFORMED, CostModel, stopping_width
from model.device import clock
from model.errors import UsageError, UserError
from model.linear import Linear
from model.transformer import Layer
from test_decode import DEPTH, autoregressive, prompt_of, tiny_draft, tiny_target

ROOT = Path(__file__).parents[1]

FLAT = {n: 20.0 for n in range(1, 129)}
STEEP = {n: 10.0 * n for n in range(1, 129)}
GOOD = [0.9 * 0.97**n for n in range(MAX_WIDTH)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target():
    return tiny_target(context=512)


@pytest.fixture
def draft(tmp_path):
    """A head with a directory, as if loaded from there."""
    draft = tiny_draft(context=512)
    draft.directory = tmp_path
    return draft


def ship(draft, masses=GOOD, **changes):
    """Lay a mass curve beside the head."""
    values = {"masses": masses, "chain_masses": masses[:DEPTH], "rounds": 1500, "depth": DEPTH} | changes
    (draft.directory / "curve.json").write_text(json.dumps(values))


@pytest.fixture
def table(monkeypatch):
    """Replaces measuring: passes run once and take what `table.ms` says. `table.asked` lists them."""

    class Table:
        ms, asked, protocol, draft_ms, spread = FLAT, [], {}, 5.0, 1.0

        def interleaved(self, passes, clock, worked, **protocol):
            self.protocol = protocol
            for (step, n), run in passes.items():
                run()
                self.asked.append(n if step == "settle" else -n)
            return Timings(
                {(step, n): self.ms[n] if step == "settle" else self.draft_ms for step, n in passes}, self.spread
            )

    table = Table()
    table.asked = []
    monkeypatch.setattr(probe, "interleaved", table.interleaved)
    monkeypatch.setattr(probe.Pace, "correction", 1.0)  # rounds take what the table says, not what they do here
    return table


PROPOSED = (-1, -DEPTH, -127)  # as `table.asked` tells the widths that proposals are timed at


# Measuring

def test_interleaved_takes_medians_in_turn():
    """Warm-ups do not count, one slow moment does not either, and passes alternate."""
    now, log = [1e6], []

    def takes(name, seconds):
        def run():
            log.append(name)
            now[0] += seconds[log.count(name) - 1]
        return run

    passes = {"a": takes("a", [9, 9, 1, 5, 3]), "b": takes("b", [9, 9, 2, 2, 70])}
    found = interleaved(passes, lambda: now[0], warm_ups=2, repeats=3, seconds=1000)
    assert found.ms == {"a": 3000, "b": 2000}
    assert log == ["a", "b"] * 5


def test_slow_passes_are_repeated_less():
    """A large model on a small machine is not probed for minutes."""
    now, runs = [0.0], []

    def run():
        runs.append(0)
        now[0] += 10.0

    assert interleaved({"a": run}, lambda: now[0], warm_ups=8, repeats=30, seconds=5).ms == {"a": 10_000}
    assert len(runs) == 1 + probe.LEAST_REPEATS


@pytest.mark.parametrize("times, share, steady", [
    ([10, 10, 11, 10, 10, 40, 10], 1.0, True),   # one slow moment is what medians are for
    ([10, 11, 25, 12, 24, 30, 10], 1.0, False),  # other work comes and goes
    ([40, 41, 40, 42, 41, 40, 40], 0.25, False),  # it is there all the time: an even fourth of a CPU
    ([40], 1.0, True),
], ids=["steady", "uneven", "starved", "one"])
def test_a_disturbed_probe_is_noticed(disturbable, times, share, steady):
    """By the first pass's quartiles and by this thread's CPU time; other passes may differ as they like."""
    now, cpu, left = [0.0], [0.0], list(times)

    def first():
        now[0] += left[0]
        cpu[0] += left.pop(0) * share

    def second():
        now[0] += len(left)
        cpu[0] += len(left) * share

    passes = {"first": first, "second": second}
    clocks = [lambda: now[0], lambda: (cpu[0], 0.0)]
    found = interleaved(passes, *clocks, warm_ups=0, repeats=len(times), seconds=1e9)
    assert found.worked == pytest.approx(share) and found.steady == steady


@pytest.mark.parametrize("others, cpus, steady", [(0.05, 2, True), (0.8, 2, False), (0.8, 3, True), (1.8, 3, False), (1, 1, False)])
def test_work_that_takes_a_cpu_from_spinning_threads_is_noticed(disturbable, monkeypatch, others, cpus, steady):
    """This thread always runs, and all is evenly slow; what others have of CPUs without a thread of ours costs nothing."""
    now = [0.0]

    def run():
        now[0] += 10.0

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(probe.os, "cpu_count", lambda: cpus)
    found = interleaved({"a": run}, lambda: now[0], lambda: (now[0], others * now[0]), seconds=1e9)
    assert found.lost == pytest.approx(max(others - max(cpus - 2, 0), 0), abs=1e-3) and found.steady == steady


def test_what_others_run_is_what_the_system_counts_less_what_this_program_runs(monkeypatch):
    """Time in programs, in the system and with other guests counts; idle time and waiting for disks does not, and time
    of guests of our own counts once."""
    before = probe.cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"], check=True)
    assert probe.cpu_seconds()[1] - before[1] > 0.9
    ticks = os.sysconf("SC_CLK_TCK")
    line = "cpu " + " ".join(str(count * ticks) for count in (1, 2, 4, 500, 600, 8, 16, 32, 700, 800))
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(f"{line}\ncpu0 1 1 1 1\n"))
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    assert probe.cpu_seconds()[1] == 1 + 2 + 4 + 8 + 16 + 32 - 3
    monkeypatch.setattr("builtins.open", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    assert probe.cpu_seconds()[1] == 0


class AsWritten:
    """In the place of a `CompiledLayer`; `fails`: its compiler does, at the first layer."""

    failed = fails = False

    def __call__(self, *arguments):
        self.failed |= self.fails
        return Layer.forward(*arguments)

    remember, run_linear = staticmethod(Layer.remember), staticmethod(Linear.__call__)


def test_costs_of_layers_that_did_not_compile_are_no_compiled_ones(target, draft, table):
    """They would be kept under that name, and chosen by at all later starts."""
    ship(draft)
    decoder = Decoder(target, draft)
    decoder.state.body.compiled_layer = AsWritten()
    decoder.state.body.compiled_layer.fails = True
    deployment = Deployment(decoder)
    key = probe.cost_key(decoder, 256)
    table.ms = STEEP
    costs = deployment.costs_at(20, 20)
    file, = (draft.directory / "cache" / "costs").iterdir()
    assert key["compiled"] and not json.loads(file.read_text())["key"]["compiled"]
    assert table.asked.count(1) == 2  # once more
    assert Deployment(Decoder(target, draft)).costs_at(20, 20) == costs == deployment.costs_at(20, 20)


def test_a_compiler_that_fails_in_an_answer_ends_what_was_measured_before(target, draft, table):
    ship(draft)
    decoder = Decoder(target, draft)
    decoder.state.body.compiled_layer = AsWritten()
    deployment = Deployment(decoder)
    deployment.costs_at(20, 20)
    table.asked.clear()
    decoder.state.body.compiled_layer.failed = True
    deployment.costs_at(20, 20)
    assert table.asked


def test_a_disturbed_probe_is_not_kept(disturbable, target, draft, table):
    """It serves the run that made it, with one line; the next process measures again, and keeps what is steady."""
    ship(draft)
    table.spread = 2.0
    decoder = Decoder(target, draft)
    with pytest.warns(UserWarning, match="disturbed by other work.*not kept") as caught:
        decoder.generate(prompt_of(5), max_new_tokens=9)
        decoder.generate(prompt_of(6), max_new_tokens=9)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert not list((draft.directory / "cache").rglob("*.json"))
    assert "disturbed" in "\n".join(full_probe(Deployment(decoder)).lines())
    table.asked.clear()
    table.spread = 1.2
    Deployment(Decoder(target, draft)).costs_at(5, 9)
    assert table.asked and list((draft.directory / "cache" / "costs").iterdir())


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_one_disturbed_part_makes_a_disturbed_probe(disturbable, target, draft, table, monkeypatch, disturbed):
    """Counts are measured in groups, and a quiet one says nothing of those before it, nor of those after."""
    ship(draft)
    groups = iter(range(99))

    def interleaved(*arguments, **protocol):
        return replace(table.interleaved(*arguments, **protocol), spread=2.0 if next(groups) == disturbed else 1.0)

    monkeypatch.setattr(probe, "interleaved", interleaved)
    with pytest.warns(UserWarning, match="disturbed"):
        assert not Deployment(Decoder(target, draft)).costs_at(5, 9).steady
    assert next(groups) > 2


def test_a_wider_proposal_never_costs_less(target, draft, monkeypatch):
    """Noise aside: a dip would make nodes free."""
    monkeypatch.setattr(Passes, "timings", lambda self, runs, **how: Timings(dict(zip(runs, (9.0, 5.0, 4.0, 6.0)))))
    costs = Passes(Decoder(target, draft), 64).costs((1,))
    assert (costs.proposed, costs.propose_ms) == ((1, DEPTH, MAX_WIDTH), (5.0, 5.0, 6.0))


@pytest.mark.parametrize("body", ["sdpa", "static"])
def test_probe_measures_and_leaves_nothing_behind(target, draft, body):
    """Real clock: all figures are positive, ascending counts; the cached prefix is forgotten, never wrong."""
    decoder = Decoder(target, draft, attention=body, max_length=256)
    ship(draft)
    costs = Deployment(decoder).costs_at(20, 20)
    assert list(costs.packed) == sorted(costs.packed) and costs.packed[0] == 1
    assert min(*costs.settle_ms, *costs.propose_ms) > 0
    assert body == "sdpa" or set(costs.packed) <= set(BUCKETS)
    assert decoder.state.prefix == 0 and not decoder.state.cached_ids
    assert body == "static" or decoder.state.slots == 0  # the probe's caches may be longer than an answer needs
    prompt = prompt_of(20)
    out = decoder.generate(prompt, width=7, max_new_tokens=20)
    assert out.token_ids == autoregressive(target, prompt, 20).token_ids


def test_what_is_timed_is_a_round_in_use(target, draft, monkeypatch):
    """The drafter catches up with a round before it drafts; what is verified is random, not the pack of the proposal
    before."""
    passes, read, extend = Passes(Decoder(target, draft), 64), [], draft.extend
    monkeypatch.setattr(draft, "extend", lambda *inputs: read.append(inputs[2].tolist()) or extend(*inputs))
    with torch.no_grad():
        passes.propose(3)
        assert read == [[62, 63]] and passes.state.tokens[1] != passes.tokens[1]
        passes.settle(16)
    assert passes.state.tokens[1:16].tolist() == passes.tokens[1:16].tolist() and len(set(passes.tokens.tolist())) > 64


def test_full_probe(target, draft, table):
    """The paper's counts and repeats; the fit leaves n = 1 out; N* is the rule's on the pair's masses."""
    ship(draft)
    table.ms = {n: 10 + 0.05 * n for n in range(2, 128)} | {1: 3.0, 128: 16.4 + 20}
    decoder = Decoder(target, draft)
    found = full_probe(Deployment(decoder))
    assert found.costs.packed == (1, 16, 24, 32, 48, 64, 96, 128)
    assert table.asked == [*found.costs.packed, *PROPOSED] \
        and (table.protocol["warm_ups"], table.protocol["repeats"]) == (8, 30)
    packed, milliseconds = found.costs.packed, found.costs.settle_ms
    assert milliseconds == tuple(table.ms[n] for n in packed)
    line = linear_regression(packed[1:], milliseconds[1:])
    assert (found.slope, found.intercept) == (pytest.approx(line.slope), pytest.approx(line.intercept))
    cost = CostModel.fit(packed, milliseconds)
    assert found.decision.width == stopping_width(GOOD, cost, table.draft_ms) == 82
    text = "\n".join(found.lines())
    assert found.prefix == 512 and "after 512 positions" in text  # 1,024 do not fit this context
    assert f"|---|{len(milliseconds) * '---:|'}\n| ms | {' | '.join(f'{ms:.1f}' for ms in milliseconds)} |\n" in text
    assert "draft with a tree of 1 5.00 ms, of 7 5.00 ms, of 127 5.00 ms\n" in text
    assert "N* = 82 follows" in text and f"{line.intercept:.2f} + {line.slope:.4f} n ms" in text
    assert not (draft.directory / "cache" / "costs").exists() and decoder.state.prefix == 0


def test_probe_goes_on_only_while_the_rule_adds(target, draft, table):
    """Few counts where verification is costly, all where it is flat, up to a step where there is one."""
    ship(draft)
    widest = {}
    for name, ms in {"steep": STEEP, "flat": FLAT, "step": FLAT | {n: 90.0 for n in range(33, 129)}}.items():
        table.ms, table.asked = ms, []
        costs = Deployment(Decoder(target, draft)).costs_at(20, 20)
        assert table.asked == [1, 4, 8, 16, *PROPOSED, *costs.packed[4:]]
        widest[name] = costs.packed[-1]
        for file in (draft.directory / "cache" / "costs").iterdir():
            file.unlink()
    assert widest == {"steep": 16, "flat": 128, "step": 48}


def test_a_best_width_at_the_end_of_what_was_measured_may_not_be_the_best():
    """Beyond the last row count costs are guessed, and a guess that is too high would stop there."""
    costs = Costs((1, 4, 8, 16), (10.0, 10.3, 10.7, 11.5), (4.0, 4.0), (1, 127))
    for worthy, more in ((14, False), (15, True), (16, True)):
        masses = [0.5] * worthy + [0.001] * (MAX_WIDTH - worthy)
        assert stopping_width(masses, costs.model(), costs.draft_ms) == worthy
        assert probe.wants_more(costs, masses, ()) == more


def test_nothing_is_probed_twice(target, draft, table):
    """Neither by this decoder, nor by the next, nor by another process: costs are on disk."""
    ship(draft)
    first = Deployment(Decoder(target, draft))
    costs = first.costs_at(20, 20)
    table.asked.clear()
    assert first.costs_at(30, 60) is costs
    assert ", probed in " in first.lines(20, 20)[0]
    assert ", probed by an earlier start: " in Deployment(Decoder(target, draft)).lines(20, 20)[0]
    assert Deployment(Decoder(target, draft)).costs_at(20, 20) == costs
    assert table.asked == []
    assert first.costs_at(20, 20, reprobe=True) == costs and table.asked
    table.asked.clear()
    first.costs_at(300, 20)  # a longer prefix is another deployment
    assert table.asked
    table.asked.clear()
    Deployment(Decoder(target, draft, attention="static")).costs_at(20, 20)  # so is another path
    assert table.asked


OTHER = '{"key": {}, "costs": {"packed": [1], "settle_ms": [1.0], "propose_ms": [1.0, 1.0]}}'


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', '{"key": {}, "costs": {"packed": [0]}}', OTHER])
def test_a_damaged_cache_is_probed_again(target, draft, table, damage):
    """A kill while writing, or an older format, must not stop anyone."""
    ship(draft)
    costs = Deployment(Decoder(target, draft)).costs_at(20, 20)
    file, = (draft.directory / "cache" / "costs").iterdir()
    file.write_text(damage)
    table.asked.clear()
    assert Deployment(Decoder(target, draft)).costs_at(20, 20) == costs and table.asked
    assert json.loads(file.read_text())["costs"]


def test_whatever_decides_what_a_round_costs_is_probed_for(draft, monkeypatch):
    """Costs of another layout, precision, head or machine would choose a width for that."""
    target, keys = tiny_target(context=512), []

    def note(decoder, prefix=256):
        keys.append(probe.cost_key(decoder, prefix))

    def decoder(**options):
        return Decoder(target, draft, **options)

    plain = decoder()
    note(plain), note(plain, 1024), note(decoder(attention="static", max_length=128))
    note(decoder(attention="static", max_length=256))
    note(Decoder(target, tiny_draft(block_size=4, context=512)))
    for patched, value in (
        ((torch, "get_num_threads"), lambda: 99), ((probe, "device_name"), lambda device: "another"),
        ((probe, "code_digest"), lambda: "another"),
        ((torch, "__version__"), "0"), ((plain.state.body, "compiled_layer"), AsWritten()),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*patched, value)
            note(plain)
    restricted = tiny_draft(context=512)
    restricted.restrict(range(100), target)
    note(Decoder(target, restricted))
    target.lm_head.weight.data = target.lm_head.weight.data.bfloat16().float()
    target.lm_head.pack()
    note(plain)
    monkeypatch.setattr(probe, "weight_bytes", lambda *modules: 7)  # weights may be held in 16 bits in float32, too
    note(plain)
    target, draft = tiny_target(context=512).bfloat16(), tiny_draft(context=512).bfloat16()
    note(decoder())
    assert len({json.dumps(key) for key in keys}) == len(keys) == 14


@pytest.mark.parametrize("attention", BODIES)
def test_all_files_that_a_round_runs_through_are_timed(draft, attention):
    """A version that is pulled, or a fork's idea, is probed for; so whatever it may change must be in the costs' key."""
    decoder = Decoder(tiny_target(context=512), draft, attention=attention)
    if attention == "sdpa":
        decoder.state.body.compiled_layer = CompiledLayer(backend=lambda graph, inputs: graph.forward)
    passes, ran = Passes(decoder, 256), set()
    passes.costs((1, 16), warm_ups=1, repeats=2)  # compiles
    sys.setprofile(lambda frame, event, argument: ran.add(frame.f_code.co_filename))
    try:
        passes.costs((1, 16), warm_ups=1, repeats=2)
    finally:
        sys.setprofile(None)
    ran = {Path(path).relative_to(ROOT) for path in ran if path.startswith(str(ROOT))}
    ours = {path for path in ran if path.parts[0] != "tests"}
    assert {"minicast/round", "model/device"} < {str(path.with_suffix("")) for path in ours} <= set(probe.TIMED)


def test_costs_belong_to_the_code_that_was_measured(monkeypatch, tmp_path):
    for package in ("graphs", "minicast", "model"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "heads"))
    monkeypatch.setattr(probe, "__file__", str(tmp_path / "minicast" / "probe.py"))
    found = [probe.code_digest(), probe.code_digest.__wrapped__()]
    for name in ("minicast/terminal", *probe.TIMED):
        with (tmp_path / f"{name}.py").open("a") as file:
            file.write("# an idea\n")
        found.append(probe.code_digest.__wrapped__())
    assert found[0] == found[1] == found[2] and len(set(found)) == 1 + len(probe.TIMED)


def test_the_middle_of_an_answer_chooses_the_prefix_that_stands_for_it(target, draft):
    """Not where it begins, nor where it ends; a length that was measured stands for itself."""
    deployment = Deployment(Decoder(target, draft))
    sizes = {(200, 100): 256, (230, 100): 512, (206, 100): 256, (207, 100): 512}  # 512: the context
    assert {size: deployment.prefix_for(*size) for size in sizes} == sizes


def test_an_unwritable_cache_stops_nobody(target, draft, table, monkeypatch):
    ship(draft)
    (draft.directory / "file").touch()
    monkeypatch.setenv("MINICAST_CACHE", str(draft.directory / "file"))
    with pytest.warns(UserWarning, match="cannot keep .*: Not a directory; the next start probes again"):
        assert Deployment(Decoder(target, draft)).costs_at(20, 20).packed


@pytest.mark.parametrize("body", ["sdpa", "static"])
def test_a_probe_between_two_turns_keeps_the_conversation(target, draft, body):
    """The second turn falls under another prefix length, whose costs nobody knows: what is cached lies below."""
    ship(draft)
    decoder = Decoder(target, draft, attention=body)
    prompt = prompt_of(150)
    first = decoder.generate(prompt, width="auto", max_new_tokens=30)
    prompt += first.token_ids + prompt_of(120)
    probed = decoder.deployment.probed
    out = decoder.generate(prompt, width="auto", max_new_tokens=30)
    assert decoder.deployment.probed > probed and len(decoder.deployment.costs) == 2
    assert out.reused >= 150
    assert out.token_ids == autoregressive(target, prompt, 30).token_ids
    tree = decoder.generate(prompt, width=7, max_new_tokens=30)
    fresh = Decoder(target, draft, attention=body).generate(prompt, width=7, max_new_tokens=30)
    assert (tree.token_ids, tree.round_lengths) == (fresh.token_ids, fresh.round_lengths)  # features hold, too
    short = decoder.generate(prompt_of(5), width="auto", max_new_tokens=9)
    decoder.deployment.costs_at(5, 9, reprobe=True)  # below the cached prefix: it goes
    assert short.token_ids == decoder.generate(prompt_of(5), width="auto", max_new_tokens=9).token_ids


@pytest.mark.parametrize("body", ["sdpa", "static"])
@pytest.mark.parametrize("above", [0, 1, 2, 3])
def test_a_conversation_is_kept_where_no_slot_of_it_is_written(target, draft, body, above):
    """The drafter catches up with two positions before the prefix that is probed at: one that reaches there is forgotten."""
    decoder = Decoder(target, draft, attention=body, max_length=256)
    decoder.generate(prompt_of(30), width=3, max_new_tokens=1)
    state = decoder.state
    assert state.prefix == 30
    before = [cache.data[..., :30, :].clone() for cache in (state.target_cache, state.draft_cache)]
    passes = Passes(decoder, 30 + above)
    passes.propose(7), passes.settle(8)
    passes.close()
    assert state.prefix == (30 if above >= 2 else 0)
    if state.prefix:
        after = [cache.data[..., :30, :] for cache in (state.target_cache, state.draft_cache)]
        assert all(map(torch.equal, before, after))


def test_a_probe_between_two_rounds_keeps_the_answer(target, draft):
    """The pending root, too, which is in no cache."""
    expected = autoregressive(target, prompt_of(20), 12).token_ids
    decoder, tokens = Decoder(target, draft), []
    for step in decoder.stream(prompt_of(20), width=3, max_new_tokens=12):
        tokens += step.token_ids
        passes = Passes(decoder, 256)
        passes.settle(4)
        passes.close()
    assert tokens == expected


def test_an_interrupted_probe_leaves_the_counters_as_they_were(target, draft, monkeypatch):
    """Else the next turn would trust keys that the drafter never wrote."""
    decoder = Decoder(target, draft)
    decoder.generate(prompt_of(20), width=3, max_new_tokens=12)
    state = decoder.state
    before = state.prefix, state.tapped, state.drafted, state.P.item(), state.D.item()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder, "propose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Passes(decoder, 256)
    assert (state.prefix, state.tapped, state.drafted, state.P.item(), state.D.item()) == before


def test_overhead_goes_straight_between_the_widths_measured():
    costs = Costs((1, 16), (10.0, 12.0), (4.0, 4.0 + 1.26), (1, 127))
    assert costs.draft_ms == 4.0
    assert [costs.overhead_ms(N) for N in (1, 64, 127)] == pytest.approx([0, 0.63, 1.26])
    assert costs.times(())[0] == 10.0
    assert costs.times(())[15] == pytest.approx(12 + 4 + 0.14)
    bent = Costs((1, 16), (10.0, 12.0), (4.0, 5.0, 6.2), (1, 7, 127))
    assert [bent.overhead_ms(N) for N in (1, 4, 7, 67, 127)] == pytest.approx([0, 0.5, 1.0, 1.6, 2.2])


def test_costs_are_told_with_what_they_are_of():
    assert str(Costs((1, 16), (10.0, 12.0), (4.0, 5.0, 6.5), (1, 7, 127))) == (
        "ms of a draft by nodes: 4.0 (1), 5.0 (7), 6.5 (127); ms by packed rows, of which 1 is AR: 10.0 (1), 12.0 (16)"
    )


# Mass curves

def test_curve_is_the_mean_of_rounds():
    """By rank over rounds, missing candidates counting as zero; the chain's by depth."""
    generator = torch.Generator().manual_seed(0)
    curve, masses, chains = MassCurve.empty(3), [], []
    for spread in (1.0, 5.0, 40.0):
        log_q = torch.log_softmax(spread * torch.randn(3, 20, generator=generator), -1)
        tree = best_first_tree(log_q, MAX_WIDTH, rank_cap=4)
        curve.add(tree.log_mass.exp().tolist(), tree.depths.tolist())
        masses.append(torch.nn.functional.pad(tree.log_mass.exp(), (0, MAX_WIDTH - tree.width)))
        chains.append(chain_tree(log_q, 3).log_mass.exp())
    assert curve.rounds == 3
    assert curve.masses == pytest.approx(torch.stack(masses).mean(0).tolist(), abs=1e-6)
    assert curve.chain_masses == pytest.approx(torch.stack(chains).mean(0).tolist(), abs=1e-6)


RANGE = "masses and shares lie between 0 and 1"


@pytest.mark.parametrize("name, values, words", [
    ("masses", [1.5], RANGE), ("masses", [float("nan")], RANGE), ("masses", [0.5, -0.5], RANGE),
    ("chain_masses", [-0.5] * DEPTH, RANGE), ("accepted", [1.5] * MAX_WIDTH, RANGE),
    ("chain_accepted", [1.5] * DEPTH, RANGE), ("masses", "high", "could not convert string to float"),
    ("masses", [0.5] * 128, "it has 128 masses, and no tree is wider than 127"),
    ("accepted", [0.5], "it has 127 masses and 1 shares accepted"),
    ("chain_accepted", [0.5], "it has 7 masses of the chain and 1 shares accepted"),
    ("chain_masses", [0.5], "it is of a block of 2, the head's is 8"), ("rounds", None, "of another kind"),
    ("rounds", -1, "means of -1 rounds"), ("rounds", float("inf"), "infinity"), ("masses", [10**400], "too large"),
])
def test_a_wrong_shipped_curve_is_named(target, draft, name, values, words):
    """One line with the file, what is wrong and a way out, not a width from nonsense."""
    ship(draft, **{"chain_masses": GOOD[:DEPTH], name: values})
    with pytest.raises(UserError, match=f"curve.json: .*{words}.*; delete it"):
        Decoder(target, draft).generate(prompt_of(5))


def test_a_shipped_file_of_another_kind_is_named(target, draft):
    for text in ("[]", "{", "7", "[" * 200_000):
        (draft.directory / "curve.json").write_text(text)
        with pytest.raises(UserError, match="curve.json.*delete it"):
            Deployment(Decoder(target, draft))


def test_a_curve_is_learned_kept_and_used(target, draft, table):
    """Without one each round goes by its own masses; with enough rounds there is one N*, on disk too."""
    decoder = Decoder(target, draft)
    expected = autoregressive(target, prompt_of(5), 60).token_ids
    out = decoder.generate(prompt_of(5), max_new_tokens=60)
    assert out.token_ids == expected
    assert 0 < decoder.deployment.curve.rounds < LEARNED
    while decoder.deployment.curve.rounds < LEARNED:
        decoder.deployment.learn([0.99**n for n in range(1, DEPTH + 1)], range(1, DEPTH + 1))
    learned = decoder.deployment.curve
    for one in (decoder, Decoder(target, draft)):
        policy = one.policy(Options("cast", "auto"), 5, 60)
        assert isinstance(policy, AutoWidth) and policy.best >= DEPTH
    again = Decoder(target, draft)
    again.generate(prompt_of(5), max_new_tokens=2)
    assert again.deployment.curve == learned
    other = tiny_draft(seed=7, context=512)
    stranger = Deployment(Decoder(target, other))
    assert stranger.curve.rounds == 0  # another head of the same shapes


def test_a_curve_is_on_disk_after_a_few_rounds(target, draft):
    """Short answers, too, are learned from."""
    deployment = Deployment(Decoder(target, draft))
    for rounds in range(1, 2 * probe.SAVED_EVERY):
        deployment.learn([0.5, 0.25], [1, 2])
        assert Deployment(deployment.decoder).curve.rounds == rounds // probe.SAVED_EVERY * probe.SAVED_EVERY


def test_the_chains_speed_is_by_what_was_recorded_of_it():
    """What its scores promise only where that is all there is."""
    costs, recorded = Costs((1, 128), (10.0, 20.0), (2.0, 3.0), (1, 127)), [0.4] * DEPTH
    both, told = MassCurve(GOOD, [0.9] * DEPTH, [], recorded), MassCurve(GOOD, recorded, [], [])
    speeds = [probe.decide_by(curve, costs).tokens_per_second["dflash"] for curve in (both, told)]
    assert speeds[0] == speeds[1] > 0


def test_a_width_a_round_is_priced_by_what_runs():
    """It proposes the widest tree whatever it keeps, all of one to learn from; its time is worth the decoder's own rate."""
    costs = Costs((1, 16), (10.0, 11.0), (2.0, 6.0, 126.0), (1, 15, 127))
    decision = probe.decide_by(MassCurve(GOOD[:15], GOOD[:DEPTH], [], []), costs)
    known = probe.policy_of("round", decision, costs, (), back_off.BackOff())
    N = decision.width
    assert N > 0 and known.rate == pytest.approx((1 + sum(GOOD[:N])) / costs.times(())[N])
    assert (known.width, known.draft_ms, known.times) == (15, 6.0, costs.times((), 15))
    young = probe.policy_of("round", None, costs, (), back_off.BackOff())
    assert (young.width, young.draft_ms, young.times) == (15, 6.0, costs.times((), 15))
    learning = probe.policy_of("round", None, costs, (), back_off.BackOff(), learn=print)
    assert (learning.width, learning.draft_ms, learning.times) == (MAX_WIDTH, 126.0, costs.times((), 127))
    assert len(learning.times) == len(young.times) == 16
    assert learning.rate == 1 / 10.0  # AR's


def test_a_shipped_curve_is_used_as_it_is(target, draft, table):
    """However few its rounds: nothing is learned into a file that somebody laid beside the head."""
    ship(draft, rounds=3)
    before = (draft.directory / "curve.json").read_bytes()
    decoder = Decoder(target, draft)
    for width in ("auto", "round"):
        decoder.generate(prompt_of(5), width=width, max_new_tokens=60)
    assert isinstance(decoder.policy(Options("cast", "auto"), 5, 60), AutoWidth)
    assert (draft.directory / "curve.json").read_bytes() == before and decoder.deployment.curve.rounds == 3


def test_a_head_of_fewer_tokens_learns_its_own_curve(target, draft, table):
    """The shipped one is of all tokens: mass that such a head cannot propose is spread over those it can."""
    ship(draft)
    draft.restrict(list(range(100)), target)
    decoder = Decoder(target, draft)
    decoder.generate(prompt_of(5), max_new_tokens=20)
    assert not decoder.deployment.shipped and 0 < decoder.deployment.curve.rounds < LEARNED


def test_a_curve_is_learned_from_usual_trees_alone(target, draft, table):
    """It serves answers to come, so no request's own rank cap, nor a head that scores few tokens, may shape it."""
    decoder = Decoder(target, draft)
    decoder.generate(prompt_of(5), max_new_tokens=20, rank_cap=1)
    assert decoder.deployment.curve.rounds == 0
    restricted = tiny_draft(context=512)
    restricted.restrict(list(range(100)), target)
    names = {probe.pair_digest(Decoder(target, head)) for head in (draft, restricted)}
    assert len(names) == 2


def test_auto_and_round_do_not_share_a_purse(target, draft, table):
    """What one of them saved is not the other's to lose; how long rounds take is the same for both."""
    ship(draft, accepted=GOOD)
    decoder = Decoder(target, draft)
    one, other = (decoder.policy(Options("cast", width), 5, 60).back_off for width in ("auto", "round"))
    assert one is not other and one.pace is other.pace
    pace = one.pace
    assert decoder.policy(Options("cast", "auto"), 300, 60).back_off is one and one.pace is not pace  # by costs


def test_a_target_that_is_not_finite_is_told_by_the_answer(target, draft, table):
    """The probe runs first, and has no token to go on with either."""
    ship(draft)
    broken = tiny_target(context=512)
    broken.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match="non-finite logits"):
        Decoder(broken, draft).generate(prompt_of(5), max_new_tokens=9)


def test_explaining_reserves_what_the_answer_may_take(target, draft, table):
    """More new tokens than the context holds are no reason for more memory; a prompt that is too long is refused."""
    ship(draft)
    decoder = Decoder(target, draft)
    asked = {"max_new_tokens": 10**7, "reprobe": True, "width": True, "full": False}
    assert paper_probe.explain(decoder, prompt_of(5), **asked)
    assert decoder.state.slots <= target.context + 2 * MAX_WIDTH + TILE
    with pytest.raises(UsageError, match="context"):
        paper_probe.explain(decoder, prompt_of(600), **asked)


# Policies

SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.mark.parametrize("body", ["sdpa", "static"])
@pytest.mark.parametrize("width, ms, options", [
    ("auto", FLAT, {}), ("auto", FLAT, SAMPLED), ("round", FLAT, SAMPLED), ("round", STEEP, {}),
], ids=["auto", "auto-sampled", "round-sampled", "round-steep"])
def test_adaptive_widths_give_the_autoregressive_tokens(target, draft, table, body, width, ms, options):
    """Trimmed trees, pauses and drafts after pauses change no token, and the caches serve a next turn."""
    ship(draft, accepted=GOOD)
    table.ms = ms
    decoder = Decoder(target, draft, attention=body, max_length=128)
    prompt = prompt_of(9)
    for _ in range(2):
        expected = autoregressive(target, prompt, 40, **options).token_ids
        out = decoder.generate(prompt, width=width, max_new_tokens=40, **options)
        assert out.token_ids == expected
        prompt = prompt + out.token_ids + prompt_of(4, seed=1)
    if ms is FLAT:
        pauses = [len(list(run)) for width, run in groupby(out.widths) if width == 0]
        assert max(pauses) > 2 and max(out.widths) > 0  # it drafted, and it paused: a comparison takes but two


def test_costly_verification_is_ar(target, draft, table, monkeypatch):
    """Where every row costs, auto never drafts, taps nothing, and says why: both lengths, a way out."""
    ship(draft, [0.5 * 0.8**n for n in range(MAX_WIDTH)])
    table.ms = STEEP
    decoder = Decoder(target, draft)
    policy = decoder.policy(Options("cast", "auto"), 9, 20)
    assert policy == FixedWidth(0)
    monkeypatch.setattr(draft, "forward", None)  # a draft would fail
    out = decoder.generate(prompt_of(9), max_new_tokens=20)
    assert set(out.widths) == {0} and out.token_ids == autoregressive(target, prompt_of(9), 20).token_ids
    assert decoder.state.tapped == 0
    text = "\n".join(decoder.deployment.lines(9, 20))
    for words in ("width 0, which is AR", "needed to be as fast as AR", "--method cast --width"):
        assert words in text


def test_flat_cost_is_a_wide_tree(target, draft, table):
    ship(draft)
    policy = Decoder(target, draft).policy(Options("cast", "auto"), 9, 20)
    assert isinstance(policy, AutoWidth) and policy.width > 60


def test_which_methods_get_which_policy(target, draft, table, monkeypatch):
    """A method of one's own gets one width, by name or not, and is never silenced; ar and dflash are not probed for."""
    def own(proposal):
        return chain_tree(proposal.draft(), 3)

    decoder = Decoder(target, draft)
    for method in ("ar", "dflash"):
        decoder.generate(prompt_of(5), method=method, max_new_tokens=3)
    assert table.asked == []
    policy = decoder.policy(Options(own, "auto"), 5, 9)
    assert isinstance(policy, FixedWidth) and policy.width > 0
    young = decoder.policy(Options("cast", "round"), 5, 9)
    assert isinstance(young, RoundWidth) and young.look and young.rate == 1 / FLAT[1]
    ship(draft)
    monkeypatch.setitem(METHODS, "own", own)
    named, unnamed = (Decoder(target, draft).policy(Options(method, "auto"), 5, 9) for method in ("own", own))
    assert named == unnamed and isinstance(named, FixedWidth) and named.width > UNINFORMED
    deployment = Deployment(decoder)
    known = deployment.policy(Options("cast", "round"), False, 5, 9)
    speeds = deployment.decision(deployment.costs_at(5, 9)).tokens_per_second
    assert known.look is None and known.rate == max(speeds.values()) / 1e3 > 2 * young.rate
    ship(draft, [0.1] * MAX_WIDTH)
    table.ms = STEEP
    decoder = Decoder(target, draft, max_length=64)
    assert decoder.policy(Options("cast", "auto"), 300, 9).width == 0
    assert decoder.policy(Options(own, "auto"), 300, 9).width > 0
    with pytest.raises(UsageError, match="width must be auto, round, .* got 'wide'"):
        decoder.generate(prompt_of(5), width="wide")
    with pytest.raises(UsageError, match="draft head"):
        Decoder(target).generate(prompt_of(5))


def test_probe_time_is_no_answer_time(target, draft, monkeypatch):
    """The probe comes before the clocks of the answer start."""
    ship(draft)
    decoder = Decoder(target, draft)
    order, costs = [], Costs((1, 128), (1.0, 1.0), (1.0, 1.0), (1, 127))
    monkeypatch.setattr(probe, "measure_costs", lambda *known: order.append("probe") or costs)
    monkeypatch.setattr(answer, "clock", lambda device: order.append("clock") or clock(device))
    decoder.generate(prompt_of(5), max_new_tokens=3)
    assert order[0] == "probe" and "probe" not in order[1:]


@pytest.mark.parametrize("accepted, ends", [
    ([0.9] * MAX_WIDTH, True), ([], False), ([0.0] * MAX_WIDTH, False),
], ids=["pays", "unknown", "does not"])
def test_a_pair_that_was_recorded_to_pay_is_tried_again_in_the_next_answer(target, draft, table, accepted, ends):
    """Scores promise, records tell: with promises alone, or a record that speaks against drafting, a pause goes on."""
    ship(draft, [0.9] * MAX_WIDTH, accepted=accepted)
    decoder = Decoder(target, draft)
    decoder.policy(Options("cast", "round"), 5, 9).back_off.ar_tokens_left = 50
    assert decoder.policy(Options("cast", "round"), 5, 9).back_off.drafting == ends
