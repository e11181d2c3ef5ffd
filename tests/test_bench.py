"""The bench: what it times, what it compares, what it computes from it, and that a killed run goes on.

Clocks are replaced by counters where times matter, so nothing here depends on the machine's speed.
"""

import json
import random
import shutil
import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from graphs import capture
from minicast import audit, bench, figures, machine, paper_probe, probe, prompts, report, round
from minicast.bench import Arm, Journal, Plan
from minicast.command import Checkpoints
from minicast.answer import Output
from minicast.decode import Decoder
from minicast.figures import Departure, Estimate, Record
from minicast.policy_replay import Measured
from minicast.prompts import MEAN, Prompt, Question
from minicast.sampling import SamplingParams, gumbel_noise, shape_logits
from minicast.subject import load_random_head
from minicast.table import markdown
from model import load_draft, load_target, load_tokenizer
from model.errors import UsageError, UserError
from model.files import write_atomically
from model.linear import linear_layers, weight_bytes
from tiny import write_byte_tokenizer, write_tiny_draft, write_tiny_target

ARMS = [Arm("ar"), Arm("dflash"), Arm("cast", 7)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    target = write_tiny_target(directory / "target", max_position_embeddings=256)
    write_byte_tokenizer(target)
    return str(target), str(write_tiny_draft(directory / "draft", max_position_embeddings=256))


@pytest.fixture(scope="module")
def decoder(models):
    return Decoder(load_target(models[0]), load_draft(models[1]))


# Prompts

def test_reads_prompts_of_every_form(tmp_path):
    """The first turn of a dialogue, any of the usual names; the limit counts each domain for itself."""
    file = tmp_path / "maths.jsonl"
    lines = [
        "a", {"question": "b", "answer": "no"}, {"text": "c", "domain": "own"},
        {"problem": "d"}, {"turns": ["e", "later"]}, {"domain": "own", "prompt": "f"},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8-sig")  # with the mark of some editors
    everything = [Prompt("own" if text in "cf" else "maths", text) for text in "abcdef"]
    assert prompts.read_prompts([file], None) == everything
    assert [prompt.text for prompt in prompts.read_prompts([file], 1)] == ["a", "c"]
    file.write_text('"a\u2028b\x85c"\n"d"', encoding="utf-8")  # in JSON no ends of lines
    assert [prompt.text for prompt in prompts.read_prompts([file], None)] == ["a\u2028b\x85c", "d"]


def test_names_the_line_it_cannot_read(tmp_path):
    file = tmp_path / "broken.jsonl"
    broken = {"{": "JSON", '{"title": "x"}': "question", "[1]": "array.* a line", '{"turns": []}': "turns"}
    broken |= {"3": "question", '{"prompt": "x", "domain": 3}': "domain", '{"prompt": "x", "domain": ["a"]}': "domain"}
    broken |= {'{"prompt": "x", "domain": "a|b"}': "table", '{"prompt": "x", "domain": "a\\n"}': "table"}
    broken |= {"[" * 100_000: "JSON"}
    for line, word in broken.items():
        file.write_text('{"prompt": "fine"}\n' + line)
        with pytest.raises(UsageError, match=f"broken.jsonl:2.*{word}"):
            prompts.read_prompts([file], None)
    file.write_text('{"prompt": "fine"}\n{"prompt": "\\ud800"}')
    with pytest.raises(UserError, match="broken.jsonl:2.*Unicode"):
        prompts.read_prompts([file], None)
    file.write_bytes(b'{"prompt": "\xff"}')
    for unreadable in (file, tmp_path / "absent.jsonl"):
        with pytest.raises(UserError, match=unreadable.name):
            prompts.read_prompts([unreadable], None)
    file.write_text("\n")
    with pytest.raises(UsageError, match="broken.jsonl: no prompts in there"):
        prompts.read_prompts([file], None)


@pytest.mark.parametrize("name", ["all", "mean"])
def test_a_domain_is_not_called_what_stands_for_all_of_them(name, tmp_path, capsys):
    """A table's row of totals would be told from it by nothing, and the file's figures would count twice."""
    file, own = tmp_path / f"{name}.jsonl", tmp_path / "own.jsonl"
    file.write_text('"x"\n')
    own.write_text(json.dumps({"prompt": "x", "domain": name}))
    for prompt_file in (file, own):
        assert bench.main(["--prompts", str(prompt_file)]) == 2
        said = f"bench: {prompt_file}:1: {name!r} is no name of a domain, it stands for all of them: give it another\n"
        assert capsys.readouterr().err == said


def test_own_prompts_cover_three_domains():
    own = prompts.read_prompts([prompts.PROMPTS], None)
    assert 20 <= len(own) <= 40 and {prompt.domain for prompt in own} == {"math", "code", "chat"}
    assert len({prompt.text for prompt in own}) == len(own)


def test_prompts_are_cut_to_a_prefix(models):
    """At most so many tokens, template included, the text's beginning kept; a shorter prompt stays as it is."""
    tokenizer = load_tokenizer(models[0])
    whole = tokenizer.encode_chat("Zürich, Genève")
    template = len(tokenizer.encode_chat(""))
    for limit in range(template + 1, len(whole) + 3):
        ids = prompts.encode("Zürich, Genève", tokenizer, limit)
        assert len(ids) <= limit and ids[:template] == whole[:template]
        assert len(ids) >= min(limit, len(whole)) - 3  # no character is cut in two
    assert ids == whole == prompts.encode("Zürich, Genève", tokenizer, None)
    with pytest.raises(UsageError, match=f"--prefix {template - 1}"):
        prompts.encode("hello", tokenizer, template - 1)


def test_a_sweep_is_a_domain_a_cell(models):
    """Prefixes and lengths are told apart in every table; where only one is asked for, its domain is as ever."""
    tokenizer, own = load_tokenizer(models[0]), [Prompt("maths", "1 + 1 = what?"), Prompt("chat", "hi")]
    swept = prompts.questions(own, tokenizer, [10, 99], [5, 7])
    cells = [f"prefix {prefix}, {length} new" for prefix in (10, 99) for length in (5, 7)]
    assert [question.domain for question in swept] == [f"{kind}, {cell}" for cell in cells for kind in ("maths", "chat")]
    assert [question.max_new_tokens for question in swept] == [5, 5, 7, 7] * 2
    assert [len(question.prompt_ids) <= 10 for question in swept[::2]] == [True, True, False, False]
    assert [question.domain for question in prompts.questions(own, tokenizer, [10], [5])] == ["maths", "chat"]
    assert prompts.questions(own, tokenizer, [], [5])[0].prompt_ids == tokenizer.encode_chat("1 + 1 = what?")


# Times

@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_timer_follows_the_paper(decoder, monkeypatch, arm):
    """Prefill is outside the decoding time and so is the first draft; later drafts are inside (Appendix D).

    A pass of the target takes 1000 ticks, one of the head 1: the sum tells how many of each the timer saw.
    """
    ticks = [0]
    monkeypatch.setattr("minicast.answer.time.perf_counter", lambda: float(ticks[0]))
    for model, cost in ((decoder.target, 1000), (decoder.draft, 1)):

        def forward(*arguments, original=model.forward, cost=cost):
            ticks[0] += cost
            return original(*arguments)

        monkeypatch.setattr(model, "forward", forward)
    output = bench.measure_answer(decoder, arm, [1, 2, 3], {"max_new_tokens": 20})
    rounds = len(output.round_lengths)
    drafts = 0 if arm.method == "ar" else rounds
    assert output.decode_seconds == 1000 * rounds + max(drafts - 1, 0)
    assert output.prefill_seconds == 1000 and output.wall_seconds == 1000 * (rounds + 1) + drafts


def test_every_answer_starts_from_empty_caches(decoder, monkeypatch):
    """A prefix left by one method would spare the next one its prefill."""
    seen = []
    stream = Decoder.stream

    def watched(self, prompt_ids, **options):
        seen.append((self.state.prefix, options["method"], options["width"]))
        return stream(self, prompt_ids, **options)

    monkeypatch.setattr(Decoder, "stream", watched)
    for _ in range(2):
        bench.race(dict.fromkeys(ARMS, decoder), [1, 2, 3], {"max_new_tokens": 5}, None, random.Random(0))
    assert sorted(seen, key=str) == sorted(2 * [(0, arm.method, arm.width) for arm in ARMS], key=str)


@pytest.mark.parametrize("stop", [False, True])
def test_methods_take_turns(models, monkeypatch, stop):
    """Each decodes at least `turn` tokens and stops at the end of that round; every answer is whole, and its clock
    stands while others decode: a tick is a pass of the target, which all of them share.
    """
    target, draft, ticks, turns = load_target(models[0]), load_draft(models[1]), [0], []
    answer = Decoder(target).generate([1, 2, 3], method="ar", max_new_tokens=30).token_ids
    monkeypatch.setattr("minicast.answer.time.perf_counter", lambda: float(ticks[0]))
    forward, stream = target.forward, Decoder.stream

    def clocked(*arguments):
        ticks[0] += 1
        return forward(*arguments)

    def watched(self, prompt_ids, **options):
        for step in stream(self, prompt_ids, **options):
            turns.append((options["method"], len(step.token_ids)))
            yield step

    monkeypatch.setattr(target, "forward", clocked)
    monkeypatch.setattr(Decoder, "stream", watched)
    decoders = {arm: Decoder(target, draft) for arm in ARMS}
    options = {"max_new_tokens": 30, "stop_ids": answer[20:21] if stop else ()}
    found = bench.race(decoders, [1, 2, 3], options, 4, random.Random(0))
    assert list(found) == ARMS and len({tuple(output.token_ids) for output in found.values()}) == 1
    assert {output.stop_reason for output in found.values()} == {"eos" if stop else "length"}
    for output in found.values():
        assert output.decode_seconds == len(output.round_lengths) and output.prefill_seconds == 1
    methods = [method for method, _ in turns]
    changes = [i for i in range(1, len(turns)) if methods[i] != methods[i - 1]]
    taken = [sum(tokens for _, tokens in turns[a:b]) for a, b in zip([0, *changes], changes)]
    assert len(changes) >= 5 and max(taken) < 2 * (4 + 8)
    assert min(taken[:3]) >= 4  # while all of them run; two turns on end, across cycles, look like a longer one


def test_floor_counts_the_weights_as_they_are_held(decoder):
    """Two bytes a weight where sixteen bits hold it, else four; the embedding's table is not streamed."""
    target, config = decoder.target, decoder.target.config
    layer = config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim
    layer += config.heads * config.head_dim * config.hidden + 3 * config.hidden * config.intermediate
    weights = config.layers * layer + config.vocab_size * config.hidden
    floor = machine.measure_floor(target, reads=2)
    assert floor.weights == weights and floor.weight_bytes in (2 * weights, 4 * weights)
    assert floor.ms == pytest.approx(floor.weight_bytes / floor.bytes_per_second * 1e3)
    assert floor.ms_in_32_bits == pytest.approx(floor.ms * 4 * weights / floor.weight_bytes)


def test_the_floor_is_the_fastest_read_of_as_many_bytes(decoder, monkeypatch):
    """A slow read was disturbed; a smaller or a larger buffer would be another bandwidth."""
    read, seconds = [], iter([4.0, 2.0, 8.0])
    monkeypatch.setattr(machine, "timed", lambda run, device: read.append(run.__self__.nbytes) or next(seconds))
    floor = machine.measure_floor(decoder.target, reads=3)
    assert floor.bytes_per_second == floor.weight_bytes / 2 and set(read) == {floor.weight_bytes // 8 * 8}


@pytest.fixture
def ticking(monkeypatch):
    """A clock that is one second on at each reading."""
    ticks = count(1)
    monkeypatch.setattr(machine, "clock", lambda device: float(next(ticks)))


def test_share_counts_models_once_and_leaves_them_as_they_were(decoder, ticking):
    """Time inside the models, nested calls not counted twice; afterwards no clock is left in them."""
    before = [set(vars(model)) for model in (decoder.target, decoder.draft)]
    share = machine.measure_share(decoder, [1, 2, 3], width=7, max_new_tokens=12)
    rounds = len(decoder.output.round_lengths)
    # A tick passes between the two readings of each clock: one a call. A round calls the target once and its
    # LM head twice; the draft head once, and once more to read new features, which before the first round the
    # prefill has done.
    assert share.target == 3 * rounds and share.head == 2 * rounds - 1
    assert 0 < share.outside < 1 and machine.Share(target=2.0, head=1.0, total=4.0).outside == 0.25
    assert [set(vars(model)) for model in (decoder.target, decoder.draft)] == before
    alone = machine.measure_share(Decoder(decoder.target), [1, 2, 3], method="ar", max_new_tokens=12)
    assert alone.head == 0 and alone.target == 2 * 11


def test_share_counts_a_restricted_head_as_the_drafters(models, ticking):
    """With fewer tokens to score, the head's own rows take the place of the target's LM head in every draft."""
    target, draft = load_target(models[0]), load_draft(models[1])
    draft.restrict(range(100), target)
    decoder = Decoder(target, draft)
    share = machine.measure_share(decoder, [1, 2, 3], width=7, max_new_tokens=12)
    rounds = len(decoder.output.round_lengths)
    assert share.target == 2 * rounds and share.head == 3 * rounds - 1
    assert "log_q" not in vars(draft)


def test_tree_builder_is_timed(ticking, monkeypatch):
    """Of the widest tree, in milliseconds."""
    widths, build = [], machine.ranked_tree
    monkeypatch.setattr(machine, "ranked_tree", lambda *lists: widths.append(build(*lists).width))
    assert machine.measure_tree_builder(builds=3) == 1000 and widths == [127] * 3


# Tokens

def test_finds_the_first_departure(decoder):
    """Position, both tokens and the gap of the target's two best scores, by a pass of its own."""
    prompt = [1, 2, 3]
    sampled = {"temperature": 0.8, "seed": 5}
    for options in ({}, sampled, sampled | {"top_k": 9, "top_p": 0.7}):
        answer = bench.measure_answer(decoder, Arm("ar"), prompt, {"max_new_tokens": 10} | options).token_ids
        assert audit.first_departure(decoder.target, prompt, answer, list(answer), options) is None
        other = answer[:6] + [(answer[6] + 1) % 256] + answer[7:]
        departure = audit.first_departure(decoder.target, prompt, answer, other, options)
        assert (departure.position, departure.expected, departure.got) == (6, answer[6], other[6])
        short = audit.first_departure(decoder.target, prompt, answer, answer[:6], options)
        assert short == replace(departure, got=None)
        scores = decoder.target.score(prompt + answer[:6])[0][-1:]
        if options:  # what a token was drawn by is its noise too
            scores = shape_logits(scores, SamplingParams(**options)) + gumbel_noise(5, torch.tensor([9]), 256)
        best, second = scores[0].topk(2)[0].tolist()
        assert scores.argmax() == answer[6] and departure.gap == pytest.approx(best - second, abs=1e-4)
    logits = decoder.target.score(prompt)[0][-1]
    first = audit.first_departure(decoder.target, prompt, [int(logits.argmax())], [0], {})
    assert first.gap == pytest.approx(float(logits.topk(2).values @ torch.tensor([1.0, -1.0])))


def test_stochastic_samples_are_not_compared(decoder):
    """They follow the same law with other tokens: a departure is no fault. Greedily both verifiers agree."""
    sampled = {"temperature": 1.0, "verifier": "stochastic"}
    assert audit.first_departure(decoder.target, [1], [2], [3], sampled) is None
    assert audit.first_departure(decoder.target, [1], [2], [3], {"verifier": "stochastic"})


def test_only_a_wide_gap_in_float32_is_a_failure():
    assert not audit.is_failure(None, torch.float32)
    assert not audit.is_failure(Departure(0, 1, 2, 9e-4), torch.float32)
    assert audit.is_failure(Departure(0, 1, 2, 2e-3), torch.float32)
    assert not audit.is_failure(Departure(0, 1, 2, 0.2), torch.bfloat16)


# The audit

def test_audit_finds_every_token_that_is_not_the_best(decoder):
    """Against one pass a token: positions, tokens and gaps, of a right answer, a changed one and of none."""
    prompt, target = [1, 2, 3], decoder.target
    answer = bench.measure_answer(decoder, Arm("ar"), prompt, {"max_new_tokens": 12}).token_ids
    assert audit.audit(target, prompt, answer) == audit.audit(target, prompt, []) == []
    changed = answer[:4] + [(answer[4] + 1) % 256] + answer[5:]
    expected = []
    for place, token in enumerate(changed):
        scores = target.score(prompt + changed[:place])[0][-1]
        if int(scores.argmax()) != token:
            expected.append(Departure(place, int(scores.argmax()), token, float(scores.max() - scores[token])))
    found = audit.audit(target, prompt, changed)
    assert found[0].position == 4 and len(found) == len(expected) > 1
    for ours, slow in zip(found, expected):
        assert replace(ours, gap=0) == replace(slow, gap=0) and ours.gap == pytest.approx(slow.gap, abs=1e-4)


def test_audit_counts_equal_texts_once_and_bounds_gaps(decoder):
    """Methods that gave one text are named together; a gap above the bound of the dtype is a failure."""
    answer = bench.measure_answer(decoder, Arm("ar"), [1], {"max_new_tokens": 6}).token_ids
    other = answer[:-1] + [(answer[-1] + 1) % 256]
    records = [a_record("ar"), a_record("dflash"), a_record("cast N=3"), a_record("ar", repeat=1)]
    for record, tokens in zip(records, (answer, answer, other, answer)):
        record.output.token_ids = tokens
    found = audit.Audit.of(decoder.target, records, [Question("d", [1], 6)])
    assert (found.answers, found.tokens, found.bound, found.dtype) == (2, 12, 1e-3, "float32")
    (slip,) = found.slips
    assert (slip.arms, slip.departure.position, slip.departure.got) == (["cast N=3"], 5, other[-1])
    assert found.failures == [slip] and str(slip).startswith(f"cast N=3, d prompt 0: token 5 is {other[-1]}, and ")
    near = replace(slip, departure=replace(slip.departure, gap=0.24))
    assert replace(found, dtype="bfloat16", bound=audit.AUDIT_BOUNDS[torch.bfloat16], slips=[near]).failures == []
    wide = replace(slip, departure=replace(slip.departure, gap=0.26))
    assert replace(found, bound=0.25, slips=[near, wide]).failures == [wide]
    lines = list(found.lines())
    assert lines[2].split(" | ")[1:-1] == ["cast N=3", "0", "5", str(other[-1]), str(slip.departure.expected)]
    assert "1 are not the target's best" in lines[-1]


# Running and resuming

def a_record(arm="ar", domain="d", prompt=0, repeat=0, tokens=4, rounds=3, seconds=1.0, wall_seconds=2.0):
    lengths = [1] * (rounds - 1) + [tokens - rounds] if rounds else []
    output = Output(list(range(tokens)), lengths, [0] * rounds, "length", 0.5, seconds, wall_seconds)
    return Record(arm, domain, prompt, repeat, 5, output)


def test_journal_survives_a_cut_anywhere(tmp_path):
    """A kill may leave any part of the last line; complete lines come back, and the next is appended."""
    path = tmp_path / "run.journal.jsonl"
    settings = {"seed": 0, "stop_ids": (1, 2)}
    groups = [[a_record(prompt=0)], [replace(a_record(prompt=1), departure=Departure(1, 2, None, 0.5))]]
    journal = Journal(path, settings)
    header = path.stat().st_size
    journal.append(groups[0])
    first = path.stat().st_size
    journal.append(groups[1])
    whole = path.read_bytes()
    ends = {0, header - 1, header, header + 5, first - 1, first, first + 3, len(whole) - 1, len(whole)}
    for size in sorted(ends | set(range(0, len(whole), 41))):
        path.write_bytes(whole[:size])
        resumed = Journal(path, settings)
        kept = groups[: (size >= first) + (size == len(whole))]
        assert resumed.records == [record for group in kept for record in group], size
        resumed.append(groups[1])
        assert Journal(path, settings).records == resumed.records
    with pytest.raises(UsageError, match=r"other settings \(seed\): delete it"):
        Journal(path, settings | {"seed": 1})
    for damaged in (whole[1:], whole[:header] + b"[1]\n", whole[:header] + b"[" * 200_000 + b"\n"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged.* delete it"):
            Journal(path, settings)
        assert path.read_bytes() == damaged


def test_a_run_that_finished_nothing_blocks_no_other(tmp_path):
    """Its settings may have been the mistake."""
    path = tmp_path / "run.journal.jsonl"
    Journal(path, {"seed": 0})
    assert Journal(path, {"seed": 1}).records == []
    Journal(path, {"seed": 1}).append([a_record()])
    with pytest.raises(UsageError, match="other settings"):
        Journal(path, {"seed": 0})


@pytest.mark.parametrize("turn", [None, 2])
def test_killed_run_goes_on(decoder, tmp_path, monkeypatch, turn):
    """Finished prompts are not measured again; the order of methods does not depend on the interruption."""
    decoders = {arm: Decoder(decoder.target, decoder.draft) if turn else decoder for arm in ARMS}
    asked = [Question("a", [1, 2], 3), Question("a", [3], 3), Question("b", [4, 5, 6], 4)]
    plan = Plan(asked, repeats=2, seed=0, options={}, turn=turn)
    order = []
    answer = bench.answer

    def watched(decoder, arm, prompt_ids, options):
        if len(order) == killed_at:
            raise KeyboardInterrupt
        order.append((arm, tuple(prompt_ids)))
        yield from answer(decoder, arm, prompt_ids, options)

    monkeypatch.setattr(bench, "answer", watched)

    def run(path):
        journal = Journal(path, {})
        bench.run_plan(decoders, plan, journal)
        return journal.records

    killed_at = None
    records = run(tmp_path / "whole")
    whole, order[:] = list(order), []
    assert [(r.repeat, r.prompt, r.domain) for r in records[:: len(ARMS)]] == [
        (repeat, index, question.domain) for repeat in range(2) for index, question in enumerate(asked)
    ]
    assert len({tuple(arm for arm, _ in whole[i : i + 3]) for i in range(0, 18, 3)}) > 1  # orders differ
    killed_at = 8  # in the third group
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed")
    assert {len(r.output.token_ids) for r in records if r.domain == "b"} == {4}
    order[:], killed_at = [], None
    resumed = run(tmp_path / "killed")
    assert order == whole[6:]
    assert [r.output.token_ids for r in resumed] == [r.output.token_ids for r in records]


# Figures

def test_figures_from_known_times():
    """Ratios of pooled domain times, then the mean over domains: not the ratio of all times together."""
    records = []
    for domain, ar, dflash, cast in (("a", 8.0, 4.0, 2.0), ("b", 80.0, 80.0, 40.0)):
        for arm, seconds, rounds in (("ar", ar, 3), ("dflash", dflash, 2), ("cast N=7", cast, 1)):
            records.append(a_record(arm, domain, rounds=rounds, seconds=seconds, wall_seconds=seconds + 8))
    rows = {(row.domain, row.arm): row for row in figures.summarise(records, seed=0)}
    row = rows["a", "cast N=7"]
    assert (row.ms_per_token, row.wall_ms_per_token, row.round_ms) == (500, 2500, 2000)
    assert (row.speedup, row.gain, row.R) == (4, 1, 3)
    assert row.wall_speedup == 1.6 and row.break_even == 2000 / (8000 / 3)
    mean = rows[MEAN, "cast N=7"]
    assert mean.speedup == (4 + 2) / 2 and mean.gain == 1 and mean.ms_per_token is None
    assert mean.R == 3 and mean.break_even == pytest.approx((0.75 + 1.5) / 2)
    assert mean.wall_speedup == pytest.approx((1.6 + 88 / 48) / 2)
    assert rows["a", "ar"].speedup is rows["a", "ar"].gain is rows["a", "dflash"].gain is None
    assert rows["a", "dflash"].speedup == 2
    assert row.R_difference.mean == 3 - 1.5 and rows["a", "ar"].R_difference is None
    table = list(figures.speed_table(list(rows.values())))
    assert len({line.count("|") for line in table}) == 1 and len(table) == 2 + 9


@pytest.mark.parametrize("flags, words", [
    ([], "nothing is kept: with --out FILE.json"), (["--out", "b.json"], "goes on after the prompts"),
    (["--gpu-check"], "stages that were finished"),
], ids=str)
def test_interrupted_it_says_what_is_kept(monkeypatch, capsys, tmp_path, flags, words):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run", stop)
    assert bench.main(flags) == 130
    err = capsys.readouterr().err
    assert err.startswith("bench: stopped; ") and words in err and err.count("\n") == 1


def test_results_go_to_regular_files(tmp_path, capsys):
    """A device stays what it is; a link stays, and what it leads to is replaced, which is said before."""
    with pytest.raises(UsageError, match="/dev/null is not a regular file: name another"):
        bench.check_outputs(Path("/dev/null"))
    for directory in (tmp_path, Path("")):
        with pytest.raises(UsageError, match="is a directory: name a file in it"):
            bench.check_outputs(directory)
    for name in ("t.md", "t.journal.jsonl"):
        (tmp_path / name).mkdir()
        with pytest.raises(UsageError, match=f"{name} is a directory or a device: move it away"):
            bench.check_outputs(tmp_path / "t.json")
        (tmp_path / name).rmdir()
    bench.check_outputs(tmp_path / "new.json")
    assert capsys.readouterr().err == ""
    (tmp_path / "real.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    bench.check_outputs(link)
    assert capsys.readouterr().err == f"bench: {link} will be replaced\n"
    write_atomically(link, "new")
    assert link.is_symlink() and (tmp_path / "real.json").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"real.json", "link.json"}


def test_results_replace_only_results(tmp_path, capsys):
    """Notes of one's own lie where the table would; two runs whose names have dots shared one table and journal."""
    (tmp_path / "notes.md").write_text("by hand")
    with pytest.raises(UsageError, match="would replace .*notes.md, which lies .*: move that, or name another"):
        bench.check_outputs(tmp_path / "notes.json")
    (tmp_path / "notes.json").write_text("{}")
    bench.check_outputs(tmp_path / "notes.json")
    assert capsys.readouterr().err.endswith("notes.json and " + str(tmp_path / "notes.md") + " will be replaced\n")
    names = {"run.json": "run.md", "run": "run.md", "run.1": "run.1.md", "run.1.json": "run.1.md", "run.2": "run.2.md"}
    assert {name: bench.beside(Path(name), ".md").name for name in names} == names


def test_a_prompts_ratio_is_the_median_of_its_repeats():
    """Each of two answers timed together: neither a slow answer, nor a slow minute of both, changes it."""
    records = []
    for repeat, (ar, cast) in enumerate([(4, 2), (40, 20), (4, 90), (90, 2), (5, 2)]):
        records += [a_record("ar", repeat=repeat, seconds=ar, wall_seconds=ar + 2)]
        records += [a_record("cast N=3", repeat=repeat, seconds=cast, wall_seconds=cast + 1)]
        records += [adaptive("cast N=auto", "d", 2 * cast, [3], repeat)]
    rows = figures.summarise(records, seed=0)
    assert rows[1].prompt_speedup.mean == 2 and rows[1].wall_prompt_speedup.mean == 2
    assert rows[1].speedup == pytest.approx(143 / 116)  # of all together
    found = figures.predictions(records, rows, 0)[0]
    assert (found.oracle, found.oracle_speedup, found.speedup) == ("cast N=3", 2, 1) and found.gap.mean == 100


def test_of_sampled_repeats_the_mean_counts():
    """Seeds give other texts: an outlier among them is no disturbance. One that ended at once has no ratio."""
    records = []
    for repeat, (ar, cast, rounds) in enumerate([(2, 1, 3), (2, 1, 3), (6, 1, 3), (2, 1, 0)]):
        seconds = cast if rounds else 0.0
        records += [a_record("ar", repeat=repeat, seconds=ar), a_record("dflash", repeat=repeat, seconds=2 * ar)]
        records += [a_record("cast N=3", repeat=repeat, seconds=seconds, rounds=rounds)]
        records += [adaptive("cast N=auto", "d", 2 * cast, [3], repeat)]
    rows = figures.summarise(records, seed=0, sampled=True)
    assert rows[2].prompt_speedup.mean == rows[6].prompt_speedup.mean == pytest.approx((2 + 2 + 6) / 3)
    assert rows[2].prompt_gain.mean == rows[6].prompt_gain.mean == pytest.approx((4 + 4 + 12) / 3 - 1)
    assert figures.summarise(records, seed=0)[2].prompt_speedup.mean == 2
    found = figures.predictions(records, rows, 0, sampled=True)[0]
    assert found.gap.mean == pytest.approx(100 * (10 / 3 - (1 + 1 + 3 + 1) / 4))


def test_seeds_have_a_mean_and_a_range():
    """Of each seed's pooled ratios (paper, Table 10); the mean row's are of its domains' means, seed by seed."""
    records = []
    for repeat in range(2):
        for domain, times in (("a", ((8, 4), (6, 2))), ("b", ((3, 3), (10, 2)))):
            dflash, cast = times[repeat]
            for prompt in range(2):  # unlike prompts, so that the mean of their ratios is another figure
                longer = 1 + 9 * prompt
                records += [a_record("ar", domain, prompt, repeat, seconds=2 * dflash * longer)]
                records += [a_record("dflash", domain, prompt, repeat, seconds=dflash * longer)]
                records += [a_record("cast N=3", domain, prompt, repeat, seconds=cast * (longer if prompt else 3))]
    rows = {(row.domain, row.arm): row for row in figures.summarise(records, seed=0, sampled=True)}
    pooled = 11 / 13  # what the first prompt's longer time makes of every ratio
    gains = {"a": (2 * pooled - 1, 3 * pooled - 1), "b": (pooled - 1, 5 * pooled - 1)}
    gains[MEAN] = (1.5 * pooled - 1, 4 * pooled - 1)
    for domain, (low, high) in gains.items():
        found = rows[domain, "cast N=3"].repeat_gain
        assert (found.mean, found.low, found.high) == pytest.approx(((low + high) / 2, low, high))
    spread = rows["a", "cast N=3"].repeat_speedup
    assert (spread.low, spread.high) == pytest.approx((4 * pooled, 6 * pooled))
    spread = rows[MEAN, "cast N=3"].repeat_speedup
    assert (spread.low, spread.high) == pytest.approx((3 * pooled, 8 * pooled))
    assert rows["a", "dflash"].repeat_gain is rows["a", "ar"].repeat_speedup is None
    table = list(figures.repeat_table(list(rows.values()), "seeds"))
    assert "gain over DFlash, range over seeds" in table[0] and len(table) == 2 + 6 + 1
    assert f"| {gains['a'][0]:.2f} to {gains['a'][1]:.2f} |" in table[3]
    single = [record for record in records if record.repeat == 0]
    rows = figures.summarise(single, seed=0)
    assert {row.repeat_gain for row in rows} == {None} and list(figures.repeat_table(rows, "repeats")) == []


def test_the_widest_tree_warms_up_first(monkeypatch):
    """A width that is chosen may be the widest there is."""
    order = []
    monkeypatch.setattr(bench, "measure_answer", lambda decoder, arm, *_: order.append(str(arm)))
    arms = [Arm("ar"), Arm("cast", 7), Arm("cast", "auto"), Arm("cast", 126), Arm("dflash"), Arm("cast", "round")]
    bench.warm_up(dict.fromkeys(arms), [1], {})
    assert order[:4] == ["cast N=auto", "cast N=round", "cast N=126", "cast N=7"]


def test_lengths_are_compared_prompt_by_prompt():
    """R less DFlash's: a prompt on which both commit much adds nothing to the interval, nor do more repeats.

    Pooled rounds, or unpaired resamples, would give a wide interval here, which contains 0.
    """
    records = []
    for prompt in range(12):
        for repeat in range(2):
            records += [a_record("dflash", "d", prompt, repeat, tokens=5 + 4 * prompt, rounds=2)]
            records += [a_record("cast N=7", "d", prompt, repeat, tokens=7 + 4 * prompt, rounds=2)]
    rows = figures.summarise(records, seed=0)
    for row in rows:
        found = row.R_difference
        assert row.arm == "dflash" or (found.mean, found.low, found.high) == (1, 1, 1)
    assert [line.split("interval that ")[1] for line in figures.difference_lines(rows)] == ["lies above 0"]
    rivals = {
        Estimate(0, -1, 1): "contains 0", Estimate(-2, -3, -1): "lies below 0",
        Estimate(0.1, 0.004, 0.2): "[0.00, 0.20], an interval that contains 0",  # as it is shown
    }
    for estimate, verdict in rivals.items():
        assert verdict in next(figures.difference_lines([replace(rows[-1], R_difference=estimate)]))


def test_shape_alone_is_compared_at_the_chains_size():
    """The tree of L nodes beside the chain of L, per domain and in the mean; nothing where one was not run."""
    records = []
    for domain, seconds in (("a", 4.0), ("b", 3.0)):
        records += [a_record("dflash", domain, rounds=3, seconds=6.0), a_record("cast N=3", domain, seconds=1.0)]
        records += [a_record("cast N=7", domain, rounds=2, seconds=seconds)]
    rows = figures.summarise(records, seed=0)
    lines = list(figures.shape_table(rows, depth=7))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:-1]]
    assert cells[0] == ["a", "cast N=7", "1.00", "1.50", "1500.00", "1000.00", "0.50", "0.50"]
    assert [row[0] for row in cells] == ["a", "b", MEAN] and cells[2][6] == "0.75" and "8 packed rows" in lines[0]
    assert list(figures.shape_table(rows, depth=15)) == []
    assert list(figures.shape_table([row for row in rows if row.arm != "dflash"], depth=7)) == []


def adaptive(arm, domain, seconds, widths, repeat=0):
    """An answer of four tokens in three rounds of these widths."""
    record = a_record(arm, domain, repeat=repeat, seconds=seconds)
    return replace(record, output=replace(record.output, widths=widths))


def test_prediction_beside_the_sweep():
    """The oracle is the fastest fixed width of the domain, AR included, never the chain nor another choice.

    Over all domains it is one arm, of the best mean speedup; a rule's pauses are not its prediction.
    """
    records = []
    times = {"a": (8.0, 2.0, 5.0, 4.0, 5.0), "b": (8.0, 4.0, 10.0, 16.0, 8.0)}
    for domain, (ar, dflash, three, seven, auto) in times.items():
        fixed = {"ar": ar, "dflash": dflash, "cast N=3": three, "cast N=7": seven, "cast N=round": 1.0}
        records += [a_record(arm, domain, seconds=seconds) for arm, seconds in fixed.items()]
        records += [adaptive("cast N=auto", domain, auto, [7, 7, 15, 0] if domain == "a" else [0, 0, 0])]
    rows = figures.summarise(records, seed=0)
    predictions = figures.predictions(records, rows, 0)
    found = {each.domain: each for each in predictions if each.arm == "cast N=auto"}
    assert (found["a"].width, found["a"].oracle, found["a"].drafted) == (7, "cast N=7", 3 / 4)
    assert found["a"].gap.mean == pytest.approx(100 * (8 / 4 - 8 / 5))
    assert found["a"].gain_gap == pytest.approx(100 * (2 / 4 - 2 / 5))
    assert (found["b"].width, found["b"].oracle, found["b"].gap.mean) == (0, "ar", 0)
    mean = found[MEAN]  # speedups: AR 1 and 1, N = 3 1.6 and 0.8, N = 7 2 and 0.5
    assert (mean.oracle, mean.oracle_speedup, mean.width) == ("cast N=7", 1.25, 7)
    assert mean.gap.mean == pytest.approx(100 * (1.25 - 1.3))
    table = list(figures.prediction_table(found.values()))
    assert len({line.count("|") for line in table}) == 1 and "0 (AR)" in table[3]
    for left_out in ("ar", "cast N="):  # nothing to compare with
        some = [record for record in records if not record.arm.startswith(left_out) or "auto" in record.arm]
        assert figures.predictions(some, figures.summarise(some, 0), 0) == []


def test_the_gap_in_gain_is_a_mean_of_prompts():
    """It is the difference of two gains in the table: a ratio of mean speedups is another figure, here even above 0."""
    records = []
    for prompt, times in enumerate([(8, 2, 1, 2), (8, 16, 8, 4)]):
        records += [a_record(arm, prompt=prompt, seconds=s) for arm, s in zip(("ar", "dflash", "cast N=7"), times)]
        auto = adaptive("cast N=auto", "d", times[3], [7])
        records.append(replace(auto, prompt=prompt))
    rows = figures.summarise(records, seed=0)
    gains = {row.arm: row.prompt_gain and row.prompt_gain.mean for row in rows if row.domain == MEAN}
    for found in figures.predictions(records, rows, 0):
        assert found.oracle == "cast N=7"
        assert found.gain_gap == pytest.approx(100 * (gains["cast N=7"] - gains["cast N=auto"])) == -50


def test_bootstrap_keeps_pairs_together():
    """A slow prompt is slow for both methods: equal ratios have an interval of no width."""
    noise = random.Random(0)
    records = []
    for prompt in range(20):
        slow = noise.uniform(1, 100)
        for repeat in range(3):
            records += [a_record("ar", "d", prompt, repeat, seconds=2 * slow, wall_seconds=3 * slow)]
            records += [a_record("cast", "d", prompt, repeat, seconds=slow, wall_seconds=2 * slow)]
    rows = figures.summarise(records, seed=0)
    for row in (rows[1], rows[-1]):  # the domain, and the mean over domains
        assert (row.prompt_speedup.low, row.prompt_speedup.high) == (2, 2)
        assert (row.wall_prompt_speedup.low, row.wall_prompt_speedup.high) == (1.5, 1.5)
    # Independent ratios: the interval is near the normal one, mean ± 1.96 standard errors. The seed is fixed.
    ratios = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    estimate = figures.bootstrap([ratios], seed=0)
    half = 1.96 * float(ratios.std()) / 20
    assert estimate.mean == pytest.approx(float(ratios.mean()))
    assert estimate.low == pytest.approx(estimate.mean - half, abs=0.1 * half)
    assert estimate.high == pytest.approx(estimate.mean + half, abs=0.1 * half)
    two = figures.bootstrap([ratios, ratios.new_full((3,), 7.0)], seed=0)  # domains weigh alike, not prompts
    assert two.mean == pytest.approx((estimate.mean + 7) / 2)


def test_figures_without_rounds_or_references():
    """An answer of one token has no rounds, and a run need not include AR: nothing is divided by nothing."""
    empty = a_record("cast", tokens=1, rounds=0, seconds=0.0)
    rows = figures.summarise([empty, a_record("ar", tokens=1, rounds=0, seconds=0.0)], seed=0)
    assert rows[0].speedup is rows[0].R is rows[0].prompt_speedup is None
    alone = figures.summarise([a_record("cast")], seed=0)[0]
    assert alone.ms_per_token == 250 and alone.speedup is alone.gain is alone.break_even is None
    assert len(list(figures.speed_table(rows))) == 2 + len(rows)
    assert list(figures.gain_table(rows)) == []  # without DFlash
    lines = figures.comparison_lines([empty, a_record("ar")])
    assert [line.split()[0] for line in lines] == ["method", "cast", "ar"]


def cells(lines, place=0):
    """A row of a table, by head."""
    heads, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line]
    return dict(zip(heads, rows[place], strict=True))


def test_every_figure_stands_under_its_own_head():
    """Each field of a row has a number of its own, so that no column can hold another's."""
    def estimate(value):
        return Estimate(value, value - 0.5, value + 0.5)

    row = figures.Row(
        "d", "cast N=7", R=1, ms_per_token=2, wall_ms_per_token=3, round_ms=4, break_even=5, speedup=6, wall_speedup=7,
        prompt_speedup=estimate(8), wall_prompt_speedup=estimate(9), gain=10, prompt_gain=estimate(11),
        repeat_speedup=figures.Spread(12, 11.5, 12.5), repeat_gain=figures.Spread(13, 12.5, 13.5),
        R_difference=estimate(14),
    )
    assert cells(figures.speed_table([row])) == {
        "domain": "d", "method": "cast N=7", "ms/token": "2.00", "wall ms/token": "3.00", "R": "1.00",
        "break-even R": "5.00", "speedup over AR, pooled": "6.00",
        "speedup over AR, mean of prompts": "8.00 [7.50, 8.50]", "by wall time, pooled": "7.00",
        "by wall time, mean of prompts": "9.00 [8.50, 9.50]",
    }
    assert cells(figures.gain_table([row])) == {
        "domain": "d", "method": "cast N=7", "gain over DFlash, pooled": "10.00", "gain over DFlash, mean of prompts": "11.00 [10.50, 11.50]",
        "R - R of DFlash, mean of prompts": "14.00 [13.50, 14.50]",
    }
    assert cells(figures.repeat_table([row], "seeds")) == {
        "domain": "d", "method": "cast N=7",
        "speedup over AR, pooled, mean of seeds": "12.00", "speedup over AR, range over seeds": "11.50 to 12.50",
        "gain over DFlash, pooled, mean of seeds": "13.00", "gain over DFlash, range over seeds": "12.50 to 13.50",
    }
    chain = figures.Row("d", "dflash", R=21, ms_per_token=22)
    assert cells(figures.shape_table([chain, row], depth=7)) == {
        "domain": "d", "8 packed rows": "cast N=7", "R of DFlash": "21.00", "R": "1.00", "ms/token of DFlash": "22.00",
        "ms/token": "2.00", "shape gain, pooled": "10.00", "shape gain, mean of prompts": "11.00 [10.50, 11.50]",
    }
    prediction = figures.Prediction("d", "cast N=auto", 7, 0.25, 1, "cast N=3", 2, estimate(3), 4)
    assert cells(figures.prediction_table([prediction])) == {
        "domain": "d", "method": "cast N=auto", "predicted N": "7", "rounds drafted": "25%",
        "speedup over AR, mean of prompts": "1.00", "oracle": "cast N=3", "its speedup, mean of prompts": "2.00",
        "gap, points": "3.00 [2.50, 3.50]", "gap in gain over DFlash": "4.00",
    }


@pytest.mark.parametrize("names, line", [(1, "|---|---:|---:|"), (2, "|---|---|---:|"), (3, "|---|---|---|")])
def test_names_are_aligned_left_and_figures_right(names, line):
    rows = ["| 1 | 2 | 3 |", "| x |  | y |"]
    assert list(markdown("abc", ["123", ["x", "", "y"]], names)) == ["| a | b | c |", line, *rows]


def test_a_column_of_figures_that_no_row_has_is_left_out():
    """As all that compares with DFlash, in a run without it; a name may be blank."""
    rows = [["x", "", "", "1", ""], ["y", "", "", "", "2"]]
    assert list(markdown("abcde", rows, 2)) == ["| a | b | d | e |", "|---|---|---:|---:|", "| x |  | 1 |  |", "| y |  |  | 2 |"]


def test_a_comparison_has_each_methods_own_figures():
    """Of --compare, for people and as JSON: speedups over the first, R of the method's own rounds, what became of texts."""
    first, equal, other, departed = (
        a_record(arm, rounds=rounds, seconds=seconds)
        for arm, rounds, seconds in (("ar", 3, 8.0), ("dflash", 2, 4.0), ("cast N=3", 1, 16.0), ("cast N=7", 1, 2.0))
    )
    other.output.token_ids[-1] = 9
    departed = replace(departed, departure=Departure(3, 1, 2, 0.5))
    records = [first, equal, other, departed]
    expected = [("ar", 2000, 1, 1), ("dflash", 1000, 1.5, 2), ("cast N=3", 4000, 3, 0.5), ("cast N=7", 500, 3, 4)]
    names = ("arm", "ms_per_token", "mean_committed_per_round", "speedup")
    assert [tuple(each[name] for name in names) for each in figures.comparison(records)] == expected
    verdicts = ["equal", "equal", "not comparable", "token 3 is 2, not 1; the top-two gap there is 0.5"]
    head, *lines = figures.comparison_lines(records)
    assert head.split() == ["method", "tokens", "ms/token", "R", "speedup", "tokens", "against", "ar's"]
    assert [line.split("  ", 1)[0].strip() for line in lines] == [record.arm for record in records]
    for line, (arm, ms, R, speedup), verdict in zip(lines, expected, verdicts, strict=True):
        assert line[12:].split(maxsplit=4) == ["4", f"{ms:.2f}", f"{R:.2f}", f"{speedup:.2f}", verdict]
    assert figures.located(replace(departed, domain="math", prompt=4, repeat=1)) == f"cast N=7, math prompt 4: {verdicts[3]}"


# The report

def a_report(records, **changes) -> report.Report:
    settings = {
        "options": {"temperature": 0.0}, "arms": ["ar", "dflash", "cast N=7"], "prefix": [], "turn": None, "repeats": 1,
    }
    values = dict.fromkeys(("remark", "audit")) | {
        "depth": 7, "settings": settings, "environment": {"hardware": "H"}, "ar_over_floor": 1.25,
        "floor": machine.Floor(weight_bytes=2_000_000_000, weights=1_500_000_000, bytes_per_second=4e10),
        "outside_share": {"ar": 0.125}, "tree_builder_ms": 0.5, "rows": figures.summarise(records, 0),
        "predictions": [], "costs": {}, "buckets": (), "probes": [], "records": records, "failures": [],
    }
    return report.Report(**values | changes)


def test_a_report_tells_the_figures_that_were_found():
    """Each with its own unit: what a reader compares with another machine."""
    records = []
    for prompt, lengths in enumerate([(5, 9), (7, 12)]):
        records += [a_record("ar", prompt=prompt), a_record("dflash", prompt=prompt, tokens=lengths[0])]
        records += [a_record("cast N=7", prompt=prompt, tokens=lengths[1])]
    records[0] = replace(records[0], prompt_tokens=3)
    records[4] = replace(records[4], departure=Departure(1, 2, 3, 0.25))
    found = a_report(records)
    lines = found.to_markdown().splitlines()
    for line in (
        "- prompts of 3 to 5 tokens", "- 1 texts differ: 4 answers compared, token by token, with those of ar",
        "- dflash, d prompt 1: token 1 is 3, not 2; the top-two gap there is 0.25",
        "- streaming floor 50.0 ms a token: 2000 MB of weights at 40.0 GB/s (150.0 ms if held in 32 bits)",
        "- AR step over the floor: 1.25", "- ar: 12.5% of a round is spent outside the models", "- hardware: H",
        "- best-first tree, 127 nodes, depth 15, 8 ranks: 0.500 ms without ranking",
        "- R of cast N=7 less R of dflash, over all prompts: 1.50 [1.33, 1.67], an interval that lies above 0",
    ):
        assert line in lines
    assert json.loads(found.to_json())["floor"] == {
        "weight_bytes": 2_000_000_000, "weights": 1_500_000_000, "bytes_per_second": 4e10, "ms": 50.0, "ms_in_32_bits": 150.0,
    }


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_report_names_its_commit(tmp_path, monkeypatch):
    """Marked where the code differs from it; results, which the bench itself writes, are no code. Without git: unknown."""
    monkeypatch.setattr(report, "__file__", str(tmp_path / "minicast" / "report.py"))
    files = [tmp_path / "minicast" / "report.py", tmp_path / "results" / "a.md"]
    for file in files:
        file.parent.mkdir()
        file.write_text("old")
    assert report.commit() == "unknown"
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    commit = report.commit()
    assert len(commit) == 12 and set(commit) <= set("0123456789abcdef")
    files[1].write_text("new")
    assert report.commit() == commit
    files[0].write_text("new")
    assert report.commit() == f"{commit} with changes"


# The command line

@pytest.fixture
def flags(models, tmp_path):
    """Tiny models and two domains of one short prompt."""
    for domain in ("math", "chat"):
        (tmp_path / f"{domain}.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "left out"}\n')
    files = [str(tmp_path / f"{domain}.jsonl") for domain in ("math", "chat")]
    small = ["--limit", "1", "--max-new-tokens", "6"]
    return ["--model", models[0], "--draft-model", models[1], "--prompts", *files, *small]


def test_program_writes_table_and_json(flags, tmp_path, monkeypatch, capsys):
    out, floors, measure_floor = tmp_path / "results" / "tiny.json", [], bench.measure_floor
    monkeypatch.setattr(bench, "measure_floor", lambda target: floors.append(measure_floor(target)) or floors[-1])
    assert bench.main([*flags, "--width", "5", "--out", str(out), "--repeats", "2"]) == 0
    report = json.loads(out.read_text())
    assert len(report["records"]) == 2 * 3 * 2 and report["failures"] == []
    ar = [record["output"] for record in report["records"] if record["arm"] == "ar"]
    step_ms = 1e3 * sum(output["decode_seconds"] for output in ar) / sum(output["rounds"] for output in ar)
    assert report["ar_over_floor"] == pytest.approx(step_ms / report["floor"]["ms"])
    assert report["floor"]["ms"] == min(floor.ms for floor in floors) and len(floors) == 2  # the floor should not flatter
    assert report["costs"] == {} and report["buckets"] == []
    tables = out.with_suffix(".md").read_text()
    assert "| gain over DFlash, range over repeats |" in tables and "the median of its repeats" in tables
    assert "speedup over AR, pooled | speedup over AR, mean of prompts |" in tables
    assert {row["domain"] for row in report["rows"]} == {"math", "chat", MEAN}
    assert report["ar_over_floor"] > 1 and set(report["outside_share"]) == {"ar", "dflash", "cast N=5"}
    environment = report["environment"]
    assert set(environment) >= {"command", "commit", "hardware", "versions", "dtype", "weights"}
    assert "--repeats 2" in environment["command"] and report["settings"]["seed"] == 0
    assert environment["commit"] == report["settings"]["commit"]  # of the run's begin: HEAD may move meanwhile
    assert out.with_suffix(".md").read_text() == capsys.readouterr().out
    assert sorted(path.name for path in out.parent.iterdir()) == ["tiny.json", "tiny.md"]  # no journal left
    capsys.readouterr()
    assert bench.main([*flags, "--methods", "ar", "--turn", "3", "--shape", "tiny"]) == 0  # needs neither head nor file
    captured = capsys.readouterr()
    assert "repeats" not in captured.out  # there is one
    assert "bench: --turn: no effect on one method alone\n" in captured.err
    assert "bench: --shape: no effect without --gpu-check\n" in captured.err


def test_answers_without_rounds_leave_a_report(flags, monkeypatch, tmp_path):
    """Else what was measured is lost at the end, or rows are blank without a word. Shares are of what has rounds."""
    asked, out = Plan.asked, tmp_path / "blank.json"
    for blank in (["math"], ["math", "chat"]):

        def stops_at_once(plan, index, repeat=0):
            options = asked(plan, index, repeat)
            return options | {"stop_ids": range(256)} if plan.questions[index].domain in blank else options

        monkeypatch.setattr(Plan, "asked", stops_at_once)
        assert bench.main([*flags, "--out", str(out)]) == 0
        report = json.loads(out.read_text())
        assert {row["domain"] for row in report["rows"] if row["ms_per_token"]} == {"math", "chat"} - {*blank}
        assert list(report["outside_share"]) == (["ar", "dflash", "cast N=15"] if len(blank) == 1 else [])
        assert f"- all answers of {', '.join(blank)} ended at their first token" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize("beyond", [0, 1, 300])
def test_an_answer_must_have_room(flags, models, capsys, beyond):
    """Cut short by the context it is another length than asked for, or has no rounds at all: told before the run."""
    tokenizer = load_tokenizer(models[0])
    room = 256 - len(tokenizer.encode_chat("hi"))
    assert bench.main([*flags, "--methods", "ar", "--max-new-tokens", str(room + beyond)]) == (2 if beyond else 0)
    *_, last = capsys.readouterr().err.splitlines()
    assert ("context of 256: leave it out, or choose a smaller --prefix" in last) == (beyond > 0)
    assert ("math.jsonl:1: the prompt's " in last) == (beyond > 0)


def test_a_run_goes_on_only_as_it_began(flags, tmp_path, monkeypatch, capsys):
    """Whatever would make the other prompts' records another measurement is named; the same command goes on."""
    out, race, raced = tmp_path / "cut.json", bench.race, []

    def cut(*arguments):
        raced.append(arguments)
        if len(raced) == 2:
            raise KeyboardInterrupt
        return race(*arguments)

    monkeypatch.setattr(bench, "race", cut)
    command = [*flags, "--methods", "ar,cast", "--out", str(out)]
    assert bench.main(command) == 130
    changes = {
        "seed": ["--seed", "1"], "draft_vocabulary": ["--draft-vocabulary", "9"], "options": ["--temperature", "1"],
        "turn": ["--turn", "3"], "arms": ["--width", "3"], "repeats": ["--repeats", "2"], "placement": ["--dtype", "bfloat16"],
        "attention": ["--attention", "static"], "compile": ["--eager"], "threads": [], "questions": [],
    }
    capsys.readouterr()
    for name, more in changes.items():
        with monkeypatch.context() as patch:
            if name == "threads":
                patch.setattr(torch, "get_num_threads", lambda: 99)
            if name == "questions":
                patch.setattr(prompts, "encode", lambda *_: [7, 8])
            assert bench.main([*command, *more]) == 2, name
        message = capsys.readouterr().err
        assert "unfinished run with other settings (" in message and name in message
    assert bench.main(command) == 0
    assert "bench: going on after 1 prompts\n" in capsys.readouterr().err and len(raced) == 3


@pytest.mark.parametrize("late", [False, True])
def test_layers_that_do_not_compile_are_not_measured(flags, tmp_path, monkeypatch, capsys, late):
    """They run all the same, and a report would call them compiled. A shape may fail when some prompts are finished:
    those are kept, for a run that compiles.
    """
    out, race, finished = tmp_path / "compiled.json", bench.race, []

    def fails(decoders, *arguments):
        finished.append(decoders)
        if len(finished) == 2:
            decoders[Arm("ar")].state.body.compiled_layer.failed = True
        return race(decoders, *arguments)

    monkeypatch.setattr(capture.CompiledLayer, "_compile", lambda self, function, *_, **__: function)
    if late:
        monkeypatch.setattr(bench, "race", fails)
    else:
        monkeypatch.setattr(capture.CompiledLayer, "try_out", lambda self: setattr(self, "failed", True))
    one = [*flags, "--methods", "ar", "--compile", "--out", str(out)]
    assert bench.main(one) == 1
    assert "layers did not compile" in capsys.readouterr().err.splitlines()[-1] and not out.exists()
    monkeypatch.setattr(capture.CompiledLayer, "try_out", lambda self: None)
    assert bench.main(one) == 0
    assert ("going on after 1 prompts" in capsys.readouterr().err) == late


def test_a_report_that_is_nowhere_else_is_not_lost(flags, tmp_path, monkeypatch, capsys):
    """A stdout that takes nothing: the table goes to stderr, unless --out holds it."""
    for to_file in (False, True):
        monkeypatch.setattr("sys.stdout", open("/dev/full", "w"))
        assert bench.main([*flags, "--methods", "ar", *(["--out", str(tmp_path / "r.json")] if to_file else [])]) == 1
        err = capsys.readouterr().err
        assert "cannot write to stdout" in err.splitlines()[-1] and ("| ar |" in err) != to_file
    assert not list(tmp_path.glob("*.journal.jsonl"))  # the run is finished


def test_program_sweeps_widths_and_samples(flags, tmp_path, monkeypatch, capsys):
    """Fixed and chosen widths in one run, a seed a repeat, sampled texts equal by every arm, none kept."""
    out = tmp_path / "sweep.json"
    seen = set()
    stream = Decoder.stream

    def watched(self, prompt_ids, **options):
        yield from stream(self, prompt_ids, **options)
        if options["max_new_tokens"] == 6:  # not the warm-up
            seen.add((options["seed"], options["temperature"], options["top_k"], options["verifier"]))
            texts.setdefault((options["seed"], tuple(prompt_ids)), set()).add(tuple(self.output.token_ids))

    texts = {}
    monkeypatch.setattr(Decoder, "stream", watched)
    one = [*flags, "--prompts", str(tmp_path / "chat.jsonl")]
    sampled = ["--temperature", "1", "--top-k", "50", "--repeats", "3", "--seed", "3"]
    assert bench.main([*one, *sampled, "--widths", "7,auto,round", "--turn", "2", "--out", str(out)]) == 0
    assert seen == {(seed, 1.0, 50, "direct") for seed in (3, 4, 5)}
    assert all(len(answers) == 1 for answers in texts.values())
    report, markdown = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    arms = ["ar", "dflash", "cast N=7", "cast N=auto", "cast N=round"]
    assert list(report["outside_share"]) == arms
    assert "all texts are equal: 12 answers compared" in markdown and "methods took turns of 2 tokens" in markdown
    assert "sampled at T = 1, top_k 50, seed 3 + repeat, direct verifier" in markdown
    assert "| gain over DFlash, range over seeds |" in markdown and "the mean of its seeds" in markdown
    assert all(row["repeat_gain"] for row in report["rows"] if row["arm"].startswith("cast"))
    seconds = {arm: [r["output"]["decode_seconds"] for r in report["records"] if r["arm"] == arm] for arm in arms}
    ratios = [ar / cast for ar, cast in zip(seconds["ar"], seconds["cast N=7"])]  # texts of equal length
    assert report["rows"][2]["prompt_speedup"]["mean"] == pytest.approx(sum(ratios) / 3)
    assert len(report["predictions"]) == 2 * 2 and "| predicted N |" in markdown
    auto = report["predictions"][0]
    speeds = [[ar / own for ar, own in zip(seconds["ar"], seconds[arm])] for arm in (auto["oracle"], auto["arm"])]
    assert auto["gap"]["mean"] == pytest.approx(100 * (sum(speeds[0]) - sum(speeds[1])) / 3)  # texts differ: the mean
    for record in report["records"]:
        output = record["output"]
        assert output["tokens"] == 6 and ("widths" in output) == record["arm"].endswith(("auto", "round"))
        assert not {"token_ids", "round_lengths"} & set(output)
    assert "R of cast N=7 less R of dflash" not in markdown  # one prompt has no interval
    assert "| 8 packed rows |" in markdown
    stochastic = ["--temperature", "1", "--verifier", "stochastic", "--methods", "dflash,cast"]
    assert bench.main([*one, *stochastic]) == 0
    assert "texts are not compared" in capsys.readouterr().out


def test_program_probes_as_the_paper_does(flags, tmp_path, monkeypatch, capsys):
    """The table and its fit stand in both files; without the flag there is neither."""
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path))  # no curve was learned there
    monkeypatch.setattr(paper_probe, "WARM_UPS", 0)
    monkeypatch.setattr(paper_probe, "REPEATS", 1)
    out = tmp_path / "probed.json"
    assert bench.main([*flags, "--methods", "ar", "--probe-full", "--out", str(out)]) == 0
    probed = json.loads(out.read_text())["probes"][0]
    assert probed["costs"]["packed"] == [1, 16, 24, 32, 48, 64, 96, 128] and min(probed["costs"]["settle_ms"]) > 0
    fit = f"{probed['intercept']:.2f} + {probed['slope']:.4f} n ms"
    assert fit in out.with_suffix(".md").read_text() and probed["decision"] is None
    assert bench.main([*flags, "--methods", "ar", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["probes"] == [] and "fit from" not in out.with_suffix(".md").read_text()


def test_program_sweeps_prefixes_and_lengths(flags, tmp_path, monkeypatch):
    """One table, a row a cell; the probe asks at the same prefixes."""
    monkeypatch.setattr(paper_probe, "WARM_UPS", 0)
    monkeypatch.setattr(paper_probe, "REPEATS", 1)
    out = tmp_path / "cells.json"
    swept = ["--max-new-tokens", "3,6", "--prefix", "8,99", "--methods", "ar,cast", "--probe-full"]
    assert bench.main([*flags, "--prompts", str(tmp_path / "chat.jsonl"), *swept, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    cells = [f"chat, prefix {prefix}, {length} new" for prefix in (8, 99) for length in (3, 6)]
    assert list(dict.fromkeys(row["domain"] for row in report["rows"])) == [*cells, MEAN]
    assert [record["output"]["tokens"] for record in report["records"]] == [3, 3, 6, 6] * 2
    assert [probed["prefix"] for probed in report["probes"]] == [8, 99]
    assert ", cut to at most 8, 99\n" in out.with_suffix(".md").read_text()


def test_a_seed_that_repeats_would_lift_beyond_all_seeds_is_told_before_hours_go_by(flags, capsys):
    last = ["--seed", str(2**63 - 1), "--methods", "ar"]
    assert bench.main([*flags, *last, "--repeats", "2"]) == 2
    assert capsys.readouterr().err.startswith("bench: --seed: each repeat adds 1 to it")
    assert bench.main([*flags, *last, "--repeats", "1", "--temperature", "1"]) == 0


def test_a_table_that_cannot_be_written_is_printed_and_can_be_written_again(flags, tmp_path, monkeypatch, capsys):
    """A full disk: what was measured is on the screen, and the journal has it."""
    out, write = tmp_path / "full.json", bench.write_atomically

    def fails(path, content):
        if path != out:
            return write(path, content)
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(bench, "write_atomically", fails)
    assert bench.main([*flags, "--methods", "ar", "--out", str(out)]) == 1
    told = capsys.readouterr()
    assert "| math | ar |" in told.out and f"{out}: No space left on device" in told.err
    monkeypatch.setattr(bench, "write_atomically", write)
    assert bench.main([*flags, "--methods", "ar", "--out", str(out)]) == 0
    assert "bench: going on after 2 prompts" in capsys.readouterr().err and out.exists()


def test_arms_of_a_method_that_was_added_have_the_widths_asked_for(flags, monkeypatch, capsys):
    """README: a name is one line in two tables."""
    asked, cast = set(), bench.METHODS["cast"]
    monkeypatch.setitem(bench.METHODS, "mine", lambda proposal: asked.add(proposal.width) or cast(proposal))
    assert bench.main([*flags, "--methods", "ar,mine", "--widths", "2,5"]) == 0
    told = capsys.readouterr()
    assert asked == {2, 5} and "no effect" not in told.err
    assert all(f"| math | {arm} |" in told.out for arm in ("ar", "mine N=2", "mine N=5"))


def test_program_shows_auto_beside_ar(flags, tmp_path, capsys):
    """Never slower than AR is a promise about either timer: both ratios of each domain have an interval."""
    out = tmp_path / "auto.json"
    assert bench.main([*flags, "--methods", "ar,cast", "--widths", "auto", "--repeats", "2", "--out", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["arm"] == "cast N=auto"]
    assert [row["domain"] for row in rows] == ["math", "chat", MEAN]
    table = capsys.readouterr().out
    for row in rows:
        assert row["speedup"] > 0 and row["wall_speedup"] > 0
        for name in ("prompt_speedup", "wall_prompt_speedup"):
            assert f"| {Estimate(**row[name])} |" in table


def test_program_measures_random_weights(tmp_path, monkeypatch, capsys):
    """A shape without a checkpoint: prompts of random ids, and the table and the JSON say what it is."""
    monkeypatch.setattr(paper_probe, "WARM_UPS", 0)
    monkeypatch.setattr(paper_probe, "REPEATS", 1)
    out, tiny = tmp_path / "shape.json", ["--random-weights", "tiny"]
    some = [*tiny, "--prefix", "40", "--max-new-tokens", "5", "--limit", "2", "--audit", "--probe-full"]
    assert bench.main([*some, "--out", str(out)]) == 0
    report, text = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert {row["domain"] for row in report["rows"]} == {"random", MEAN}
    assert [record["prompt_tokens"] for record in report["records"]] == [40] * 2 * 3
    assert text.startswith(f"**{report['remark']}**\n") and "R mean nothing" in report["remark"]
    assert report["environment"]["weights"] == "random weights of the shape tiny"
    assert report["probes"][0]["prefix"] == 40
    for wrong, word in (
        (["--prefix", "1024"], "--prefix"), (["--model", "smollm2"], "leave out --model"),
        (["--model", ""], "leave out --model"), (["--draft-vocabulary", "9"], "leave out --draft-vocabulary"),
        (["--prefix", "9,1000", "--max-new-tokens", "5,25"], "prompt and answer of 1025 tokens exceed the 1024 of tiny"),
    ):
        capsys.readouterr()
        assert bench.main([*tiny, *wrong]) == 2 and word in capsys.readouterr().err
    place = bench.Placement.choose("cpu", "float32")

    def asked(*more):
        return bench.Subject.of(bench.parse_arguments([*tiny, "--prefix", "1000", *more]), place, True).questions

    longest = asked("--max-new-tokens", "24")  # they fill the context
    assert longest[0].max_new_tokens == 24 and len(longest) == 4 and len({str(each) for each in longest}) == 4
    assert asked("--max-new-tokens", "24") == longest != asked("--max-new-tokens", "24", "--seed", "1")
    with pytest.raises(SystemExit):
        bench.main(["--random-weights", "qwen9"])
    assert "qwen3-8b" in capsys.readouterr().err


def test_program_measures_a_random_head(flags, models, tmp_path):
    """The chosen target with a head of the chosen head's shape: other weights, the target's own texts."""
    out = tmp_path / "head.json"
    assert bench.main([*flags, "--random-weights", "head", "--out", str(out)]) == 0
    report, text = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert "head has random weights" in text and "all texts are equal" in text
    assert report["environment"]["weights"].endswith(", whose weights are random")
    assert bench.main([*flags, "--random-weights", "head", "--methods", "ar"]) == 0  # which needs none
    real, placement = load_draft(models[1]), bench.Placement.choose("cpu", "float32")
    target, random_head = load_random_head(Checkpoints(*models, None), placement)
    assert random_head.config == real.config and random_head.directory is None
    weights = sum(layer.in_features * layer.out_features for layer in linear_layers(random_head))
    assert weight_bytes(random_head) == 2 * weights  # as those of published heads, so it takes as long
    assert not torch.equal(random_head.norm.weight, real.norm.weight)
    assert torch.equal(target.norm.weight, load_target(models[0]).norm.weight)


def test_program_measures_a_restricted_head(flags, models, monkeypatch):
    """Its report says so, and speeds are another head's."""
    file, made = Path(models[1]) / "frequent_tokens.json", []
    file.write_text('{"tokens": [9, 4, 200, 7]}')
    decoders_of = bench.decoders_of
    monkeypatch.setattr(bench, "decoders_of", lambda *given: made.append(decoders_of(*given)) or made[0])
    try:
        assert bench.main([*flags, "--draft-vocabulary", "3"]) == 0
    finally:
        file.unlink()
    assert {tuple(decoder.draft.vocabulary.tolist()) for decoder in made[0].values()} == {(4, 9, 200)}


def test_costs_are_told_for_every_prefix(models, tmp_path, monkeypatch):
    """What auto went by on short prompts it did not go by on long ones: each has a line, and replay finds them."""
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "PREFIXES", (16, 64))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": 40 * "a"}) + '\n{"prompt": "hi"}\n')
    out = tmp_path / "auto.json"
    files = ["--model", models[0], "--draft-model", models[1], "--prompts", str(tmp_path / "chat.jsonl")]
    auto = ["--methods", "ar,cast", "--widths", "auto", "--max-new-tokens", "6", "--attention", "static"]
    assert bench.main([*files, *auto, "--out", str(out)]) == 0
    report, text = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert list(report["costs"]) == ["16", "64"] and report["buckets"] == list(round.BUCKETS)
    for prefix in (16, 64):
        assert f"- costs that auto went by at a prefix of {prefix} positions: ms of a draft by nodes: " in text
    assert "- rounds are padded to 1, 16, 24, " in text
    measured = Measured.read(out)
    assert list(measured.costs) == [16, 64] and measured.buckets == round.BUCKETS


def test_program_audits(flags, tmp_path, monkeypatch, capsys):
    """Right tokens pass, half precision too; a fault that every method shares does not: only the audit sees it."""
    out = tmp_path / "audited.json"
    assert bench.main([*flags, "--audit", "--out", str(out)]) == 0
    assert "audit: 2 texts of 12 tokens" in capsys.readouterr().out
    assert json.loads(out.read_text())["audit"]["slips"] == []
    assert bench.main([*flags, "--audit", "--dtype", "bfloat16"]) == 0
    assert "0.25 is allowed in bfloat16" in capsys.readouterr().out
    assert bench.main([*flags, "--audit", "--temperature", "0.5"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    walk_on_host = round.walk_on_host
    monkeypatch.setattr(round, "walk_on_host", lambda *given: walk_on_host(*given[:2], given[2].roll(1, 1), *given[3:]))
    assert bench.main([*flags, "--audit", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "| the target's best |" in captured.out and "is better by" in captured.err
    report = json.loads(out.read_text())
    assert len(report["failures"]) == len(report["audit"]["slips"]) == 2 * 5  # the prefill's token is right


def test_program_fails_on_a_real_departure(flags, monkeypatch, capsys):
    """Other tokens at a wide gap in float32 end with exit status 1 and are named."""
    departure = Departure(3, 1, 2, 0.5)
    monkeypatch.setattr(bench, "first_departure", lambda *_: departure)
    assert bench.main(flags) == 1
    assert "rounding does not explain" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--width", "0"), ("--width", "128"), ("--widths", "3,3"), ("--widths", "3,wide"), ("--limit", "0"),
        ("--methods", "ar,beam"), ("--methods", "ar,ar"), ("--verifier", "theirs"),
        ("--max-new-tokens", "1"), ("--max-new-tokens", "8,8"), ("--prefix", "0"), ("--prefix", "a"),
        ("--temperature", "-1"), ("--temperature", "nan"), ("--top-p", "0"), ("--top-p", "1.1"), ("--top-k", "0"),
        ("--seed", str(2**63)),
    ],
)
def test_program_refuses_bad_flags(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main([flag, value])
    assert stop.value.code == 2 and flag in capsys.readouterr().err


def test_one_prompt_has_no_interval():
    """A resample of one is always the same: [x, x] would say that x is certain. One such domain spoils the mean's."""
    one, two = torch.tensor([2.0], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    for values in ([one], [one, two]):
        estimate = figures.bootstrap(values, seed=0)
        assert estimate == Estimate(2.0, None, None) and str(estimate) == "2.00"
    assert str(figures.bootstrap([two], seed=0)) == "2.00 [1.00, 3.00]"


def test_a_prompt_file_that_is_not_there_is_a_usage_error(tmp_path, capsys):
    for file in (tmp_path / "none.jsonl", tmp_path):
        assert bench.main(["--prompts", str(file)]) == 2
        assert str(file) in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.touch()
    assert bench.main(["--random-weights", "tiny", "--out", str(blocked / "x.json")]) == 2
    assert bench.main(["--random-weights", "tiny", "--out", str(tmp_path / "x.md")]) == 2  # the table would replace it
    assert "is a file" in capsys.readouterr().err
