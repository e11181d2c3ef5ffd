"""The bench: what it times, what it compares, what it computes from it, and that a killed run goes on.

Clocks are replaced by counters where times matter, so nothing here depends on the machine's speed.
"""

import json
import random
from dataclasses import replace

import pytest
import torch

from minicast import bench, decode, figures
from minicast.bench import Arm, Journal, Prompt
from minicast.decode import Decoder, Output
from minicast.figures import MEAN, Departure, Estimate, Record
from model import load_draft, load_target
from model.errors import UsageError, UserError
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
        {"prompt": "a"}, {"question": "b", "answer": "no"}, {"text": "c", "domain": "own"},
        {"problem": "d"}, {"turns": ["e", "later"]}, {"domain": "own", "prompt": "f"},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    everything = [Prompt("own" if text in "cf" else "maths", text) for text in "abcdef"]
    assert bench.read_prompts([file], None) == everything
    assert [prompt.text for prompt in bench.read_prompts([file], 1)] == ["a", "c"]


def test_names_the_line_it_cannot_read(tmp_path):
    file = tmp_path / "broken.jsonl"
    broken = {"{": "JSON", '{"title": "x"}': "question", "[1]": "question", '{"turns": []}': "turns"}
    for line, word in broken.items():
        file.write_text('{"prompt": "fine"}\n' + line)
        with pytest.raises(UserError, match=f"broken.jsonl:2.*{word}"):
            bench.read_prompts([file], None)
    file.write_bytes(b'{"prompt": "\xff"}')
    for unreadable in (file, tmp_path / "absent.jsonl"):
        with pytest.raises(UserError, match=unreadable.name):
            bench.read_prompts([unreadable], None)
    file.write_text("\n")
    with pytest.raises(UsageError):
        bench.read_prompts([file], None)


def test_own_prompts_cover_three_domains():
    prompts = bench.read_prompts([bench.PROMPTS], None)
    assert 20 <= len(prompts) <= 40 and {prompt.domain for prompt in prompts} == {"math", "code", "chat"}
    assert len({prompt.text for prompt in prompts}) == len(prompts)


# Times

@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_timer_follows_the_paper(decoder, monkeypatch, arm):
    """Prefill is outside the decoding time and so is the first draft; later drafts are inside (Appendix D).

    A pass of the target takes 1000 ticks, one of the head 1: the sum tells how many of each the timer saw.
    """
    ticks = [0]
    monkeypatch.setattr(decode.time, "perf_counter", lambda: float(ticks[0]))
    for model, cost in ((decoder.target, 1000), (decoder.draft, 1)):

        def forward(*arguments, original=model.forward, cost=cost):
            ticks[0] += cost
            return original(*arguments)

        monkeypatch.setattr(model, "forward", forward)
    output = bench.measure(decoder, arm, [1, 2, 3], {"max_new_tokens": 20})
    rounds = len(output.round_lengths)
    drafts = 0 if arm.method == "ar" else rounds
    assert output.decode_seconds == 1000 * rounds + max(drafts - 1, 0)
    assert output.prefill_seconds == 1000 and output.wall_seconds == 1000 * (rounds + 1) + drafts


def test_every_answer_starts_from_empty_caches(decoder, monkeypatch):
    """A prefix left by one method would spare the next one its prefill."""
    seen = []
    generate = Decoder.generate

    def watched(self, prompt_ids, **options):
        seen.append((self.state.prefix, options["method"], options["width"]))
        return generate(self, prompt_ids, **options)

    monkeypatch.setattr(Decoder, "generate", watched)
    bench.contest(decoder, ARMS, [1, 2, 3], {"max_new_tokens": 5})
    assert seen == [(0, arm.method, arm.width) for arm in ARMS]


def test_floor_counts_the_weights_as_they_are_held(decoder):
    """Two bytes a weight where sixteen bits hold it, else four; the embedding's table is not streamed."""
    target, config = decoder.target, decoder.target.config
    layer = config.hidden * (config.heads + 2 * config.kv_heads) * config.head_dim
    layer += config.heads * config.head_dim * config.hidden + 3 * config.hidden * config.intermediate
    weights = config.layers * layer + config.vocab_size * config.hidden
    floor = bench.measure_floor(target, reads=2)
    assert floor.weights == weights and floor.weight_bytes in (2 * weights, 4 * weights)
    assert floor.ms == pytest.approx(floor.weight_bytes / floor.bytes_per_second * 1e3)
    assert floor.ms_in_32_bits == pytest.approx(floor.ms * 4 * weights / floor.weight_bytes)


def test_share_counts_models_once_and_leaves_them_as_they_were(decoder, monkeypatch):
    """Time inside the models, nested calls not counted twice; afterwards no clock is left in them."""
    ticks = [0]

    def clock(device):
        ticks[0] += 1
        return float(ticks[0])

    monkeypatch.setattr(bench, "clock", clock)
    before = [set(vars(model)) for model in (decoder.target, decoder.draft)]
    share = bench.measure_share(decoder, ARMS[2], [1, 2, 3], {"max_new_tokens": 12})
    rounds = len(decoder.output.round_lengths)
    # A tick passes between the two readings of each clock: one a call. A round calls the target once and its
    # LM head twice; the draft head once, and once more to read new features, which before the first round the
    # prefill has done.
    assert share.target == 3 * rounds and share.head == 2 * rounds - 1
    assert 0 < share.outside < 1
    assert [set(vars(model)) for model in (decoder.target, decoder.draft)] == before
    alone = bench.measure_share(Decoder(decoder.target), ARMS[0], [1, 2, 3], {"max_new_tokens": 12})
    assert alone.head == 0 and alone.target == 2 * 11


def test_tree_builder_is_timed():
    assert 0 < bench.measure_tree_builder(builds=3) < 1000


# Tokens

def test_finds_the_first_departure(decoder):
    """Position, both tokens and the gap of the target's two best scores, by a pass of its own."""
    prompt = [1, 2, 3]
    sampled = {"temperature": 0.8, "seed": 5}
    for options in ({}, sampled, sampled | {"top_k": 9, "top_p": 0.7}):
        answer = bench.measure(decoder, Arm("ar"), prompt, {"max_new_tokens": 10} | options).token_ids
        assert bench.first_departure(decoder.target, prompt, answer, list(answer), options) is None
        other = answer[:6] + [(answer[6] + 1) % 256] + answer[7:]
        departure = bench.first_departure(decoder.target, prompt, answer, other, options)
        assert (departure.position, departure.expected, departure.got) == (6, answer[6], other[6])
        short = bench.first_departure(decoder.target, prompt, answer, answer[:6], options)
        assert short == replace(departure, got=None)
        assert departure.gap > 0
    logits = decoder.target.score(prompt)[0][-1]
    first = bench.first_departure(decoder.target, prompt, [int(logits.argmax())], [0], {})
    assert first.gap == pytest.approx(float(logits.topk(2).values @ torch.tensor([1.0, -1.0])))


def test_stochastic_samples_are_not_compared(decoder):
    """They follow the same law with other tokens: a departure is no fault. Greedily both verifiers agree."""
    sampled = {"temperature": 1.0, "verifier": "stochastic"}
    assert bench.first_departure(decoder.target, [1], [2], [3], sampled) is None
    assert bench.first_departure(decoder.target, [1], [2], [3], {"verifier": "stochastic"})


def test_only_a_wide_gap_in_float32_is_a_failure():
    assert not bench.is_failure(None, torch.float32)
    assert not bench.is_failure(Departure(0, 1, 2, 9e-4), torch.float32)
    assert bench.is_failure(Departure(0, 1, 2, 2e-3), torch.float32)
    assert not bench.is_failure(Departure(0, 1, 2, 0.2), torch.bfloat16)


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
    with pytest.raises(UsageError, match="other settings"):
        Journal(path, settings | {"seed": 1})


def test_killed_run_goes_on(decoder, tmp_path, monkeypatch):
    """Finished prompts are not measured again; the order of methods does not depend on the interruption."""
    prompts = [Prompt("a", ""), Prompt("a", ""), Prompt("b", "")]
    prompt_ids = [[1, 2], [3], [4, 5, 6]]
    options = {"max_new_tokens": 3}
    order = []
    measure = bench.measure

    def watched(decoder, arm, prompt_ids, options):
        if len(order) == killed_at:
            raise KeyboardInterrupt
        order.append((arm, tuple(prompt_ids)))
        return measure(decoder, arm, prompt_ids, options)

    monkeypatch.setattr(bench, "measure", watched)

    def run(path):
        journal = Journal(path, {})
        bench.run_prompts(decoder, ARMS, prompts, prompt_ids, 2, 0, options, journal)
        return journal.records

    killed_at = None
    records = run(tmp_path / "whole")
    whole, order[:] = list(order), []
    assert [(r.repeat, r.prompt, r.domain) for r in records[:: len(ARMS)]] == [
        (repeat, index, prompt.domain) for repeat in range(2) for index, prompt in enumerate(prompts)
    ]
    assert len({tuple(arm for arm, _ in whole[i : i + 3]) for i in range(0, 18, 3)}) > 1  # orders differ
    killed_at = 8  # in the third group
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed")
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
    assert rows["a", "ar"].speedup is rows["a", "ar"].gain is rows["a", "dflash"].gain is None
    assert rows["a", "dflash"].speedup == 2
    assert row.R_difference.mean == 3 - 1.5 and rows["a", "ar"].R_difference is None
    table = list(figures.table(list(rows.values())))
    assert len({line.count("|") for line in table}) == 1 and len(table) == 2 + 9


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
    rivals = {Estimate(0, -1, 1): "contains 0", Estimate(-2, -3, -1): "lies below 0"}
    for estimate, verdict in rivals.items():
        assert verdict in next(figures.difference_lines([replace(rows[-1], R_difference=estimate)]))


def adaptive(arm, domain, seconds, widths):
    """An answer of four tokens in three rounds of these widths."""
    record = a_record(arm, domain, seconds=seconds)
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
        records += [adaptive("cast N=auto", domain, auto, [7, 7, 0] if domain == "a" else [0, 0, 0])]
    rows = figures.summarise(records, seed=0)
    predictions = figures.predictions(records, rows, 0)
    found = {each.domain: each for each in predictions if each.arm == "cast N=auto"}
    assert (found["a"].width, found["a"].oracle, found["a"].drafted) == (7, "cast N=7", 2 / 3)
    assert found["a"].gap == pytest.approx(100 * (8 / 4 - 8 / 5)) == found["a"].prompt_gap.mean
    assert found["a"].gain_gap == pytest.approx(100 * (2 / 4 - 2 / 5))
    assert (found["b"].width, found["b"].oracle, found["b"].gap) == (0, "ar", 0)
    mean = found[MEAN]  # speedups: AR 1 and 1, N = 3 1.6 and 0.8, N = 7 2 and 0.5
    assert (mean.oracle, mean.oracle_speedup, mean.width) == ("cast N=7", 1.25, 7)
    assert mean.gap == pytest.approx(100 * (1.25 - 1.3)) == mean.prompt_gap.mean
    table = list(figures.prediction_table(found.values()))
    assert len({line.count("|") for line in table}) == 1 and "0 (AR)" in table[3]
    for left_out in ("ar", "cast N="):  # nothing to compare with
        some = [record for record in records if not record.arm.startswith(left_out) or "auto" in record.arm]
        assert figures.predictions(some, figures.summarise(some, 0), 0) == []


def test_bootstrap_keeps_pairs_together():
    """A slow prompt is slow for both methods: equal ratios have an interval of no width."""
    noise = random.Random(0)
    records = []
    for prompt in range(20):
        slow = noise.uniform(1, 100)
        for repeat in range(3):
            records += [a_record("ar", "d", prompt, repeat, seconds=2 * slow)]
            records += [a_record("cast", "d", prompt, repeat, seconds=slow)]
    row = figures.summarise(records, seed=0)[1]
    assert (row.prompt_speedup.low, row.prompt_speedup.high) == (2, 2)
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
    assert len(list(figures.table(rows))) == 2 + len(rows)
    lines = figures.comparison_lines([empty, a_record("ar")])
    assert [line.split()[0] for line in lines] == ["method", "cast", "ar"]


# The command line

@pytest.fixture
def flags(models, tmp_path):
    """Tiny models and two domains of one short prompt."""
    for domain in ("math", "chat"):
        (tmp_path / f"{domain}.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "left out"}\n')
    files = [str(tmp_path / f"{domain}.jsonl") for domain in ("math", "chat")]
    small = ["--limit", "1", "--max-new-tokens", "6"]
    return ["--model", models[0], "--draft-model", models[1], "--prompts", *files, *small]


def test_program_writes_table_and_json(flags, tmp_path, capsys):
    out = tmp_path / "results" / "tiny.json"
    assert bench.main([*flags, "--width", "5", "--out", str(out), "--repeats", "2"]) == 0
    report = json.loads(out.read_text())
    assert len(report["records"]) == 2 * 3 * 2 and report["failures"] == []
    assert {row["domain"] for row in report["rows"]} == {"math", "chat", MEAN}
    assert report["ar_over_floor"] > 1 and set(report["outside_share"]) == {"ar", "dflash", "cast N=5"}
    environment = report["environment"]
    assert set(environment) >= {"command", "commit", "hardware", "versions", "dtype", "weights", "threads"}
    assert "--repeats 2" in environment["command"] and report["settings"]["seed"] == 0
    assert environment["commit"] == report["settings"]["commit"]  # of the run's begin: HEAD may move meanwhile
    assert out.with_suffix(".md").read_text() == capsys.readouterr().out
    assert sorted(path.name for path in out.parent.iterdir()) == ["tiny.json", "tiny.md"]  # no journal left
    assert bench.main([*flags, "--methods", "ar"]) == 0  # needs neither head nor file


def test_program_sweeps_widths_and_samples(flags, tmp_path, monkeypatch, capsys):
    """Fixed and chosen widths in one run, a seed a repeat, sampled texts equal by every arm, none kept."""
    out = tmp_path / "sweep.json"
    seen = set()
    generate = Decoder.generate

    def watched(self, prompt_ids, **options):
        output = generate(self, prompt_ids, **options)
        if options["max_new_tokens"] == 6:  # not the warm-up
            seen.add((options["seed"], options["temperature"], options["top_k"], options["verifier"]))
            texts.setdefault((options["seed"], tuple(prompt_ids)), set()).add(tuple(output.token_ids))
        return output

    texts = {}
    monkeypatch.setattr(Decoder, "generate", watched)
    one = [*flags, "--prompts", str(tmp_path / "chat.jsonl")]
    sampled = ["--temperature", "1", "--top-k", "50", "--repeats", "2", "--seed", "3"]
    assert bench.main([*one, *sampled, "--widths", "7,auto,round", "--out", str(out)]) == 0
    assert seen == {(seed, 1.0, 50, "direct") for seed in (3, 4)}
    assert all(len(answers) == 1 for answers in texts.values())
    report, markdown = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    arms = ["ar", "dflash", "cast N=7", "cast N=auto", "cast N=round"]
    assert list(report["outside_share"]) == arms
    assert "all texts are equal: 8 answers compared" in markdown
    assert "sampled at T = 1, top_k 50, seed 3 + repeat, direct verifier" in markdown
    assert len(report["predictions"]) == 2 * 2 and "| predicted N |" in markdown
    for record in report["records"]:
        output = record["output"]
        assert output["tokens"] == 6 and ("widths" in output) == record["arm"].endswith(("auto", "round"))
        assert not {"token_ids", "round_lengths"} & set(output)
    assert "R of cast N=7 less R of dflash" in markdown
    stochastic = ["--temperature", "1", "--verifier", "stochastic", "--methods", "dflash,cast"]
    assert bench.main([*one, *stochastic]) == 0
    assert "texts are not compared" in capsys.readouterr().out
    assert bench.main([*flags, "--temperature", "-1"]) == 2


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
    ],
)
def test_program_refuses_bad_flags(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main([flag, value])
    assert stop.value.code == 2 and flag in capsys.readouterr().err
