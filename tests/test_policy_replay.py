"""Policies by replay: their rounds are the decoder's, their times what the costs say."""

import json
from dataclasses import replace

import pytest

from minicast import replay
from minicast.back_off import BackOff
from minicast.curve import MassCurve
from minicast.decode import Decoder
from minicast.policy import AutoWidth, FixedWidth, RoundWidth
from minicast.policy_replay import Measured, Policies, by_domain, compare, decode_ms
from minicast.probe import DISTURBED, Costs
from minicast.prompts import MEAN
from minicast.replay import Replayable
from model.errors import UsageError
from test_replay import PROMPTS, TOKENS, models, names, recorded  # noqa: F401  fixtures

COSTS = Costs((1, 4, 8, 16), (10.0, 11.0, 13.0, 20.0), (3.0, 4.0), (1, 127))
TIMES = COSTS.times(())


@pytest.fixture(scope="module")
def answers(models):  # noqa: F811
    return [Replayable.of(recorded(models, prompt)) for prompt in PROMPTS]


def policies_of(back_off):
    return {
        "fixed": FixedWidth(5),
        "ar": FixedWidth(0),
        "auto": AutoWidth(6, TIMES, back_off),
        "round": RoundWidth(TIMES, COSTS.draft_ms, 1.0 / TIMES[0], back_off),
    }


class OnTime:
    """A policy whose rounds all take what was predicted."""

    def __init__(self, policy):
        self.policy, self.keep = policy, policy.keep

    @property
    def width(self):
        return self.policy.width

    def observe(self, width, committed, seconds):
        self.policy.observe(width, committed, TIMES[width] / 1e3)


@pytest.mark.parametrize("name", policies_of(None))
@pytest.mark.parametrize("purse", [0.5, 50.0])
def test_rounds_and_times_are_those_of_the_decoder(models, answers, name, purse):  # noqa: F811
    """The decoder runs the same policy object on the same prompts, with pauses (a small purse) and without."""
    mine, its = policies_of(BackOff(purse))[name], policies_of(BackOff(purse))[name]
    drafted = 0
    for prompt, answer in zip(PROMPTS, answers):
        output = Decoder(*models).generate(prompt, width=OnTime(its), max_new_tokens=TOKENS)
        ms = 0.0
        for N, R in zip(output.widths, output.round_lengths):
            ms += TIMES[N]  # N = 0 is AR, unless a width a round drafted for nothing: not with these drafts
            drafted += N > 0
        assert decode_ms(answer, mine, TIMES, COSTS.draft_ms) == pytest.approx(ms)
        if name in ("auto", "round"):
            assert mine.back_off == its.back_off
    assert (drafted == 0) == (name == "ar")


class Drafting(BackOff):
    """Never pauses."""

    drafting = True


def test_a_round_that_drafts_for_nothing_pays_the_draft(answers):
    """A width a round may verify nothing: it costs the draft and AR's pass."""
    policy = RoundWidth(TIMES, COSTS.draft_ms, 1e9, Drafting())  # time is dear: no node pays
    last = len(answers[0].needs["cast"])
    assert decode_ms(answers[0], policy, TIMES, COSTS.draft_ms) == pytest.approx(last * (TIMES[0] + COSTS.draft_ms))


def test_speeds_are_tokens_over_time(answers):
    """AR is 1 by definition; the mean is that of the domains, not of their answers."""
    domains = {"a": answers[:1], "b": answers[1:]}
    assert by_domain(domains, lambda _: FixedWidth(0), TIMES, COSTS.draft_ms) == {"a": 1, "b": 1, MEAN: 1}
    speeds = by_domain(domains, lambda _: FixedWidth(3), TIMES, COSTS.draft_ms)
    rounds = len(answers[0].rounds("cast", 3))
    assert speeds["a"] == pytest.approx(len(answers[0].needs["cast"]) * TIMES[0] / (rounds * TIMES[3]))
    assert speeds[MEAN] == pytest.approx((speeds["a"] + speeds["b"]) / 2)


def test_the_table_names_the_best_width(answers):
    """Where drafting is free the widest tree is best, where it is dear AR is; auto follows."""
    domains, curve = {"tiny": answers}, MassCurve([0.5 / rank for rank in range(1, 128)], [0.0] * 7, [], [])
    free = compare(domains, curve, Costs((1, 4, 16), (10.0, 10.0, 10.0), (1e-6, 1e-6), (1, 127)))
    assert free.predicted == 15 and max(free.fixed["tiny"], key=free.fixed["tiny"].get) <= 15
    dear = compare(domains, curve, Costs((1, 4, 16), (10.0, 40.0, 160.0), (100.0, 101.0), (1, 127)))
    assert dear.predicted == 0 and dear.chosen["tiny"]["auto"] == 1
    assert "| tiny | 1.00 | 1.00 |" in dear.lines()[2] and "| AR | 1.00 | 0.0 |" in dear.lines()[2]


def test_a_row_of_the_table():
    """Each figure in its own column; the gap is what auto lacks."""
    fixed, chosen = {"d": {0: 1.0, 3: 1.5, 7: 2.0}}, {"d": {"auto": 1.75, "round": 1.6}}
    head, line, row = Policies(3, 0.1, fixed, chosen).lines()
    assert line == "|---|---:|---:|---:|---:|---:|---:|"
    heads, cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (head, row))
    assert dict(zip(heads, cells, strict=True)) == {
        "speed over AR": "d", "N* = 3": "1.50", "auto": "1.75", "round": "1.60", "best fixed": "N = 7",
        "its speed": "2.00", "gap of auto, points": "25.0",
    }


@pytest.mark.parametrize("rows", [10, 16])
def test_all_widths_that_costs_are_known_of_are_compared(answers, rows):
    """Those swept up to the widest, and N* itself wherever it lies."""
    curve = MassCurve([0.5 / rank for rank in range(1, 128)], [0.0] * 7, [], [])
    free = compare({"tiny": answers}, curve, Costs((1, rows), (10.0, 10.0), (1e-6, 1e-6), (1, 127)))
    assert free.predicted == rows - 1 and "| tiny |" in free.lines()[2]
    dear = compare({"tiny": answers}, curve, Costs((1, rows), (10.0, 900.0), (1e-6, 1e-6), (1, 127)))
    assert dear.predicted != rows - 1
    for found, own in ((free, {rows - 1}), (dear, {dear.predicted})):
        assert set(found.fixed["tiny"]) == {0, 1, 2, 3, 4, 5, 6, 7, *([11, 15] if rows == 16 else []), *own}


def test_answers_of_a_domain_are_one_session(answers):
    """What drafting lost in one answer is known in the next, as in a decoder; another domain begins anew."""
    seen = []

    def make(back_off):
        seen.append(back_off)
        return FixedWidth(3)

    by_domain({"a": answers[:2], "b": answers[2:]}, make, TIMES, COSTS.draft_ms)
    assert seen[0] is seen[1] and seen[1] is not seen[2]


def test_costs_from_a_file(tmp_path, capsys):
    """The bench's or the cache's; anything else is one line before anything is recorded."""
    wrong, right = tmp_path / "wrong.json", tmp_path / "right.json"
    assert replay.main(["--out", str(tmp_path / "rounds"), "--costs", str(wrong)]) == 2
    assert "No such file" in capsys.readouterr().err
    wrong.write_text("{}")
    assert replay.main(["--out", str(tmp_path / "rounds"), "--costs", str(wrong)]) == 2
    assert "holds no measured costs" in capsys.readouterr().err and not (tmp_path / "rounds").exists()
    values = {"packed": [1, 4], "settle_ms": [1.0, 2.0], "propose_ms": [1.0, 1.5], "proposed": [1, 127], "steady": True}
    costs = Costs((1, 4), (1.0, 2.0), (1.0, 1.5), (1, 127))
    bench = {"environment": {"weights": "W", "hardware": "H"}, "costs": {"256": values}, "buckets": [], "probes": []}
    more, probed = {"costs": {"256": values, "1024": values}, "buckets": [1, 16]}, {"probes": [{"prefix": 99, "costs": values}]}
    key = {"device": "D", "prefix": 256, "compiled": False, "positions": 0}
    for file, prefixes, buckets in [
        ({"costs": values, "key": key}, [256], ()),
        ({"costs": values, "key": key | {"compiled": True}}, [256], (1, 4)),
        ({"costs": values, "key": key | {"positions": 4096}}, [256], (1, 4)),
        (bench, [256], ()),
        (bench | {"costs": {}} | probed, [99], ()),
        (bench | more, [256, 1024], (1, 16)),
        (bench | more | probed, [99], (1, 16)),
    ]:
        right.write_text(json.dumps(file))
        source = "unnamed weights on D" if "key" in file else "W on H"
        assert Measured.read(right) == Measured(source, dict.fromkeys(prefixes, costs), buckets)
    nothings = [{"costs": {"256": values}}, bench | {"costs": {}}, bench | {"buckets": 3}, bench | {"costs": {"x": values}}]
    nothings += [bench | {"buckets": [1, float("inf")]}]  # as json writes and reads it, if nobody else
    nothings += [bench | {"costs": {"256": values | {name: [1.0, float("nan")]}}} for name in ("settle_ms", "propose_ms")]
    for text in (*map(json.dumps, nothings), "[" * 200_000):
        wrong.write_text(text)
        with pytest.raises(UsageError, match="holds no measured costs"):
            Measured.read(wrong)


def test_a_disturbed_probe_is_told_to_who_goes_by_it(tmp_path):
    """The bench keeps what it measured, and says so; who replays at these costs is told, too."""
    file, disturbed = tmp_path / "bench.json", replace(COSTS, steady=False)
    bench = {"environment": {"weights": "W", "hardware": "H"}, "buckets": [], "probes": []}
    file.write_text(json.dumps(bench | {"costs": {"256": vars(disturbed)}}))
    measured = Measured.read(file)
    assert measured.costs == {256: disturbed} and DISTURBED in measured.source and DISTURBED in str(disturbed)
    assert DISTURBED not in str(COSTS)
    file.write_text(json.dumps(bench | {"costs": {"256": vars(COSTS), "1024": vars(disturbed)}}))
    assert DISTURBED in Measured.read(file).source


def test_a_prefix_stands_for_what_it_stands_for_in_the_decoder():
    """The next longer one; beyond all of them the longest."""
    measured = Measured("W on H", dict.fromkeys((1024, 256, 4096), COSTS), ())
    assert [measured.prefix_for(n) for n in (1, 256, 257, 1024, 5000)] == [256, 256, 1024, 1024, 4096]


def test_padded_rounds_cost_their_bucket(answers):
    """Where rounds are padded a narrow tree takes what its bucket does: fixed widths, N* and both policies."""
    costs, buckets = Costs((1, 8, 16), (10.0, 12.0, 20.0), (3.0, 3.0), (1, 127)), (1, 8, 16)
    curve = MassCurve([0.4 / rank for rank in range(1, 128)], [0.0] * 7, [], [])
    padded, free = (compare({"tiny": answers[:1]}, curve, costs, each) for each in (buckets, ()))
    rounds, tokens = len(answers[0].rounds("cast", 2)), len(answers[0].needs["cast"])
    assert padded.fixed["tiny"][2] == pytest.approx(tokens * 10.0 / (rounds * (3.0 + 12.0)))
    assert free.fixed["tiny"][2] > padded.fixed["tiny"][2]
    assert padded.fixed["tiny"][7] == free.fixed["tiny"][7]  # fills its bucket
    narrow, cheap = MassCurve([0.9] * 3 + [1e-6] * 124, [0.0] * 7, [], []), Costs((1, 8), (10.0, 12.0), (0.1, 0.1), (1, 127))
    padded, free = (compare({"tiny": answers}, narrow, cheap, each) for each in ((1, 8), ()))
    assert (padded.predicted, free.predicted) == (7, 3)  # what a bucket holds beyond three nodes costs nothing
    assert padded.chosen["tiny"]["round"] == padded.chosen["tiny"]["auto"]  # which fills it, too, every time
    assert free.chosen["tiny"]["round"] != free.chosen["tiny"]["auto"]


def test_a_round_is_charged_what_it_proposes_not_what_it_keeps(answers):
    """`round` lets the drafter score all that the widest tree may reach, and keeps a node or two of it."""
    dear = Costs((1, 4, 16), (10.0, 10.0, 10.0), (0.1, 500.0, 500.0), (1, 7, 127))
    curve = MassCurve([0.5 / rank for rank in range(1, 128)], [0.0] * 7, [], [])
    assert compare({"tiny": answers}, curve, dear).chosen["tiny"]["round"] < 0.8
    steep = Costs((1, 16), (10.0, 1500.0), (0.1, 500.0, 500.0), (1, 7, 127))  # there it keeps nothing
    tokens = sum(len(answer.needs["cast"]) for answer in answers)
    assert compare({"tiny": answers}, curve, steep).chosen["tiny"]["round"] == pytest.approx(tokens * 10 / (tokens * 10 + 500))
