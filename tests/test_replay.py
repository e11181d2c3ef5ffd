"""Offline replay: its rounds are the decoder's, its trees the tree builder's, its figures what they say.

Tiny random models of a small vocabulary, so that trees do hold what the target says. Tokens and lengths are
compared exactly; seeds are fixed, so there are no false alarms.
"""

import errno
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minicast import record, replay
from minicast.curve import MassCurve
from minicast.decode import Decoder
from minicast.probe import Costs
from minicast.record import Drafts, Recording, draft_answer
from minicast.replay import Replayable, Shape, Step, needed, rounds_of
from minicast.tree import best_first_tree, chain_tree
from model import files, load_draft, load_target, train_data
from tiny import write_byte_tokenizer, write_tiny_draft, write_tiny_target

VOCABULARY, DEPTH, TOKENS = 12, 7, 40
WIDTHS = (1, 3, 15, 63, 127)
PROMPTS = ([3, 1, 4, 1, 5], [2], [7, 7, 0, 11, 9, 2, 6])


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    target = write_tiny_target(directory / "target", vocab_size=VOCABULARY, max_position_embeddings=128)
    mask = {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [0, 1]}
    draft = write_tiny_draft(directory / "draft", vocab_size=VOCABULARY, dflash_config=mask)
    return str(target), str(draft)


@pytest.fixture(scope="module")
def models(names):
    return load_target(names[0]), load_draft(names[1])


def recorded(models, prompt, stop_ids=()):
    """An answer of the decoder, with its drafts."""
    target, draft = models
    answer = Decoder(target).generate(prompt, method="ar", max_new_tokens=TOKENS, stop_ids=stop_ids).token_ids
    return draft_answer(target, draft, prompt, answer, "tiny")


@pytest.fixture(scope="module")
def answers(models):
    return [Replayable.of(recorded(models, prompt)) for prompt in PROMPTS]


# Against the decoder

def test_scores_in_half_precision_are_the_decoders(names):
    """Rounded to 16 bits they would tie, and rank, where the decoder's do not."""
    target, draft = (load(name, torch.bfloat16) for load, name in zip((load_target, load_draft), names))
    drafts = recorded((target, draft), PROMPTS[0]).drafts
    decoder, first = Decoder(target, draft), []

    def watching(proposal):
        log_q = proposal.draft()
        first.append(log_q)
        return chain_tree(log_q, 1)

    decoder.generate(PROMPTS[0], method=watching, max_new_tokens=3)
    ranked = first[0].sort(dim=1, descending=True).values
    assert ranked[0].unique().numel() == drafts.log_q[0, 0].unique().numel() == VOCABULARY
    assert torch.allclose(drafts.log_q[0, 0], ranked[0], atol=0.02)

@pytest.mark.parametrize("stop", [False, True])
def test_rounds_are_those_of_the_decoder(models, stop):
    """Every R of every round, the cut last one included: chains, and trees of every width.

    Guards against drafts at the wrong position or that see what comes after their root, a continuation
    shifted by one, and rounds that count tokens past a stop id or the limit.
    """
    accepted = 0
    for prompt in PROMPTS:
        stop_ids = (recorded(models, prompt).answer[TOKENS // 2],) if stop else ()
        answer = Replayable.of(recorded(models, prompt, stop_ids))
        for policy, width in [("dflash", DEPTH)] + [("cast", width) for width in WIDTHS]:
            output = Decoder(*models).generate(
                prompt, method=policy, width=width, max_new_tokens=TOKENS, stop_ids=stop_ids
            )
            assert output.token_ids == answer.recording.answer
            assert [step.R for step in answer.rounds(policy, width)] == output.round_lengths, (policy, width)
            accepted += sum(output.round_lengths) - len(output.round_lengths)
    assert accepted > 30  # else nothing was tested


def test_drafts_are_those_of_a_single_block(models):
    """Many blocks in a pass give what the drafter gives for each alone, whole block and half.

    Guards against blocks that see each other, or the text behind their root. Takes more than one pass.
    """
    target, draft = models
    prompt, recording = PROMPTS[0], recorded(models, PROMPTS[0])
    assert len(recording.answer) > record.BLOCKS + 1
    text = [*prompt, *recording.answer]
    _, features = target.score(text, draft.taps)
    for position in (0, 1, record.BLOCKS - 1, record.BLOCKS, TOKENS - 2):
        log_q = draft.score(features[: len(prompt) + position], recording.answer[position], target)
        kept = recording.drafts.log_q[position]
        torch.testing.assert_close(kept, log_q.gather(1, recording.drafts.tokens[position].long()))
        torch.testing.assert_close(kept, log_q.sort(descending=True).values)
    assert recording.short.depth == (DEPTH + 1) // 2 - 1
    fewer_masks = recording.short.log_q[:, 0]
    assert not torch.allclose(fewer_masks, recording.drafts.log_q[:, 0])


@pytest.mark.real
def test_rounds_of_the_default_pair_are_those_of_the_decoder():
    """As above, on real text. One pass over the text rounds otherwise than a decode, and could in principle
    flip a tie of two candidates: not on these prompts.
    """
    target, draft = load_target("smollm2"), load_draft("smollm2")
    tokenizer = record.Checkpoints("smollm2", "smollm2", None).tokenizer()
    for text in ("What is 17 times 23? Show each step.", "Write a Python function that reverses a string."):
        prompt, options = tokenizer.encode_chat(text), {"max_new_tokens": 32, "stop_ids": tokenizer.stop_ids}
        answer = Decoder(target).generate(prompt, method="ar", **options).token_ids
        rounds = Replayable.of(draft_answer(target, draft, prompt, answer))
        for policy, width in [("dflash", draft.block_size - 1), ("cast", 15)]:
            output = Decoder(target, draft).generate(prompt, method=policy, width=width, **options)
            assert output.token_ids == answer
            assert [step.R for step in rounds.rounds(policy, width)] == output.round_lengths, (policy, width)


# Trees and their lengths

def random_drafts(positions=20, depth=4, ranks=6, seed=0) -> Drafts:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(positions, depth, ranks, generator=generator)
    ranked = logits.log_softmax(-1).sort(-1, descending=True)
    return Drafts(ranked.indices.int(), ranked.values)


def accepted(tree, continuation) -> int:
    """A by its definition: the longest prefix of the continuation among the tree's paths."""
    paths = {(): 0}
    for node in range(tree.width):
        path, up = (), node
        while up >= 0:
            path, up = (tree.tokens[up].item(), *path), tree.parents[up].item()
        paths[path] = len(path)
    return max(paths.get(tuple(continuation[:length]), 0) for length in range(len(continuation) + 1))


def test_one_tree_holds_the_lengths_of_all_widths():
    """`needed` of the widest tree, cut at N, against the tree of N nodes and all its paths."""
    chooser, drafts = random.Random(0), random_drafts()
    for position in range(20):
        tokens = drafts.tokens[position].long()
        log_q = torch.empty(4, 6).scatter(1, tokens, drafts.log_q[position])
        continuation = [chooser.choice(row[:3].tolist()) for row in tokens]
        nodes = needed(drafts.tree(position, 127, 6), continuation)
        for width in WIDTHS:
            A = sum(count <= width for count in nodes)
            assert A == accepted(best_first_tree(log_q, width, rank_cap=6), continuation)
        chain = needed(drafts.tree(position, 4, 1), continuation)
        assert len(chain) == accepted(chain_tree(log_q, 4), continuation)


def test_a_replayed_decode_jumps_by_what_it_commits():
    """By hand: a round at 0 that holds two tokens, one at 3 that holds none, and a last one that is cut."""
    needs = [[1, 5], [], [], [], [2, 3, 9]]
    assert rounds_of(needs, 4) == [Step(0, 2), Step(2, 1), Step(3, 1), Step(4, 1)]
    assert rounds_of(needs, 5) == [Step(0, 3), Step(3, 1), Step(4, 1)]
    assert rounds_of([[1, 2]], 7) == [Step(0, 1)]
    assert rounds_of([], 7) == []


def test_shapes_are_full_level_by_level():
    """The paper's schedule at 47: 8, 4 below each, then 7 of two below each; binary: 2, 4, 8, 16, 17."""
    drafts = random_drafts(depth=7, ranks=10)
    counts = {"schedule": (replay.SCHEDULE, [8, 32, 7]), "binary": ((2,) * 7, [2, 4, 8, 16, 17])}
    for branching, expected in counts.values():
        tree = Shape.of(branching, drafts).tree(drafts, 3)
        assert tree.depths.bincount()[1:].tolist() == expected
        for node, (parent, depth) in enumerate(zip(tree.parents.tolist(), tree.depths.tolist())):
            siblings = (tree.parents[:node] == parent).sum()
            assert tree.tokens[node] == drafts.tokens[3, depth - 1, siblings]
            assert depth == (1 if parent < 0 else tree.depths[parent] + 1)
    drafts = random_drafts(depth=2, ranks=3)
    narrow = Shape.of(replay.SCHEDULE, drafts).tree(drafts, 0)
    assert narrow.depths.bincount()[1:].tolist() == [3, 9]  # fewer ranks and levels than the schedule wants


# Figures

def test_figures_equal_slow_ones(answers):
    """Everything in a finding that is a mean or a share, recomputed round by round from its definition."""
    finding = replay.analyse(answers)
    chain_rounds, ranks = 0, []
    claims = []
    for answer in answers:
        recording = answer.recording
        drafts, position = recording.drafts, 0
        while position < len(recording.answer) - 1:
            rest = recording.answer[position + 1 :]
            A = 0
            while A < min(DEPTH, len(rest)) and drafts.tokens[position, A, 0] == rest[A]:
                A += 1
            if A < min(DEPTH, len(rest)):
                ranks.append(drafts.tokens[position, A].tolist().index(rest[A]) + 1)  # of 12: all recorded
            for token, log_q in list(zip(drafts.tokens[position, 0].tolist(), drafts.log_q[position, 0]))[:8]:
                claims.append((log_q.exp().item(), token == rest[0]))
            chain_rounds += 1
            position += min(A + 1, len(rest))
    tokens = sum(len(answer.recording.answer) - 1 for answer in answers)
    assert (finding.prompts, finding.tokens) == (len(PROMPTS), tokens)
    assert finding.chain.rounds[-1] == chain_rounds
    assert finding.chain.R[-1] == pytest.approx(tokens / chain_rounds) == finding.shapes["chain"]
    assert finding.corrections.events == len(ranks) > 20
    shares = finding.corrections.shares
    assert shares["2-4"] == pytest.approx(sum(2 <= rank <= 4 for rank in ranks) / len(ranks))
    assert shares["9-32"] == pytest.approx(sum(rank >= 9 for rank in ranks) / len(ranks))
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(each.candidates for each in finding.reliability) == len(claims)
    for each in finding.reliability:
        inside = [(q, hit) for q, hit in claims if each.low <= q < each.high]
        assert each.candidates == len(inside)
        assert each.mean_q == pytest.approx(sum(q for q, _ in inside) / len(inside))
        assert each.hit_rate == pytest.approx(sum(hit for _, hit in inside) / len(inside))


def test_promises_are_means_of_masses(answers):
    """`predicted` and the curve, from trees built anew at every round visited."""
    finding = replay.analyse(answers)
    sums, tables, taken = [], [], torch.zeros(127)
    for answer in answers:
        for step in answer.rounds("cast", replay.CURVE_WIDTH):
            masses = answer.recording.drafts.tree(step.position, 127, 8).log_mass.exp()
            sums.append(masses[: replay.CURVE_WIDTH].sum().item())
            tables.append(masses)
            for nodes in answer.needs["cast"][step.position]:
                taken[nodes - 1] += 1
    place = finding.tree.widths.index(replay.CURVE_WIDTH)
    assert finding.tree.predicted[place] == pytest.approx(1 + sum(sums) / len(sums))
    assert finding.tree.rounds[place] == len(sums)
    assert finding.masses == pytest.approx(torch.stack(tables).mean(0).tolist())
    assert sorted(finding.masses, reverse=True) == finding.masses
    assert finding.accepted == pytest.approx((taken / len(sums)).tolist())
    held, R = 1 + sum(finding.accepted[: replay.CURVE_WIDTH]), finding.tree.R[place]
    assert R <= held <= R + len(answers) / len(sums)  # an answer's last round is cut by a token at most
    chains, chain_taken = [], torch.zeros(DEPTH)
    for answer in answers:
        for step in answer.rounds("dflash", DEPTH):
            chains.append(answer.recording.drafts.log_q[step.position, :, 0].cumsum(0).exp())
            chain_taken[: len(answer.needs["dflash"][step.position])] += 1
    assert finding.chain_masses == pytest.approx(torch.stack(chains).mean(0).tolist())
    assert finding.chain_accepted == pytest.approx((chain_taken / len(chains)).tolist()) and max(chain_taken) > 0
    curve = replay.mass_curve(finding, "a", "b")
    assert (curve.rounds, curve.target, curve.draft, curve.rank_cap) == (len(sums), "a", "b", 8)
    for name in ("masses", "chain_masses", "accepted", "chain_accepted"):
        assert getattr(curve, name) == pytest.approx(getattr(finding, name), rel=1e-4)


def test_the_table_has_the_replayed_length_and_beside_it_the_promised_one(answers):
    """Of each width its own, domain by domain, the whole chain first."""
    findings = [replay.analyse(answers[:1], "a"), replay.analyse(answers)]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in replay.length_table(findings)]
    assert head == ["R (promised)", "a", "all"]
    expected = {f"chain, N = {DEPTH}": [(finding.chain, DEPTH) for finding in findings]}
    expected |= {f"tree, N = {N}": [(finding.tree, N) for finding in findings] for N in replay.TABLE_WIDTHS}
    assert [row[0] for row in rows] == list(expected)
    for (_, *told), lengths in zip(rows, expected.values()):
        places = [each.widths.index(N) for each, N in lengths]
        assert told == [f"{each.R[k]:.2f} ({each.predicted[k]:.2f})" for (each, _), k in zip(lengths, places)]
        assert all(each.R[k] != each.predicted[k] for (each, _), k in zip(lengths, places))


@pytest.mark.parametrize("answer, events, shares", [
    ([5, 0, 0], 0, {}), ([5, 0], 0, {}),  # all of the chain was accepted, or the answer ended with it
    ([5, 3, 0, 0], 1, {"2-4": 1}), ([5, 4, 0, 0], 1, {"5-8": 1}), ([5, 7, 0, 0], 1, {"5-8": 1}), ([5, 8, 0, 0], 1, {"9-32": 1}),
    ([5, 31, 0, 0], 1, {"9-32": 1}), ([5, 32, 0, 0], 1, {"over 32": 1}),
], ids=str)
def test_corrections_by_hand(answer, events, shares):
    """Token k has rank k + 1 everywhere, of 32 that are recorded: ranks at the ends of their groups, and beyond them."""
    ranks = torch.arange(32), torch.arange(32.0).neg().log_softmax(0)
    ranked = [values.repeat(len(answer) - 1, 2, 1) for values in ranks]
    found = replay.corrections([Replayable.of(Recording("", answer, Drafts(*ranked), Drafts(*ranked)))])
    assert found.events == events
    assert {name: share for name, share in found.shares.items() if share} == shares


def test_a_candidate_that_is_sure_has_a_bin():
    """Probability 1 ends the last one."""
    ranked = torch.tensor([[[7, 8]]]), torch.tensor([[[0.0, -torch.inf]]])
    recording = Recording("", [5, 7], Drafts(*ranked), Drafts(*ranked))
    first, last = replay.reliability([Replayable.of(recording)])
    assert (first.low, first.candidates, first.mean_q, first.hit_rate) == (0, 1, 0, 0)
    assert (last.low, last.high, last.candidates, last.mean_q, last.hit_rate) == (0.9, 1, 1, 1, 1)


def test_costs_are_those_of_the_middle_of_a_typical_answer(tmp_path):
    """The median prompt: a long one, or one answer that was short, is not typical."""
    lines = [[[1] * length, [2]] for length in (90, 3, 5)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay.middle(tmp_path, {"max_new_tokens": 40}) == 5 + 20


def test_shapes_caps_and_blocks_against_decodes_of_their_own_trees(answers):
    """R of every policy beside the two main ones, by a decode that builds a tree at each of its positions."""

    def R(tree_at) -> float:
        lengths = []
        for answer in answers:
            position, said = 0, answer.recording.answer
            while position < len(said) - 1:
                rest = said[position + 1 :]
                lengths.append(min(accepted(tree_at(answer.recording, position), rest) + 1, len(rest)))
                position += lengths[-1]
        return sum(lengths) / len(lengths)

    def log_q(drafts: Drafts, position: int) -> torch.Tensor:
        shape = drafts.depth, VOCABULARY
        return torch.empty(shape).scatter(1, drafts.tokens[position].long(), drafts.log_q[position])

    def best(name: str, N: int, ranks: int | None = 8):
        return lambda recording, i: best_first_tree(log_q(getattr(recording, name), i), N, ranks)

    def chain(name: str, N: int):
        return lambda recording, i: chain_tree(log_q(getattr(recording, name), i), N)

    def shape(branching):
        return lambda recording, i: Shape.of(branching, recording.drafts).tree(recording.drafts, i)

    finding = replay.analyse(answers)
    assert finding.shapes == pytest.approx({
        "chain": R(chain("drafts", DEPTH)), "schedule": R(shape(replay.SCHEDULE)), "binary": R(shape((2,) * DEPTH)),
        "best first": R(best("drafts", replay.SHAPE_WIDTH)),
    })
    for cap in finding.rank_cap:
        assert cap.R == pytest.approx(R(best("drafts", cap.width)))
        assert cap.R_every_rank == pytest.approx(R(best("drafts", cap.width, None)))
    block, half = DEPTH + 1, (DEPTH + 1) // 2
    expected = [
        (half, "dflash", half, R(chain("short", half - 1))), (half, "cast", half, R(best("short", half - 1))),
        (half, "cast", block, R(best("drafts", half - 1))), (block, "dflash", block, R(chain("drafts", DEPTH))),
        (block, "cast", block, R(best("drafts", DEPTH))),
    ]
    assert [tuple(vars(row).values())[:3] for row in finding.shrink] == [row[:3] for row in expected]
    assert [row.R for row in finding.shrink] == pytest.approx([row[3] for row in expected])
    assert expected[1][3] != expected[2][3] and expected[3][3] != expected[4][3]  # else swapped ones would pass


def test_every_rank_is_every_rank(answers):
    """Without the cap, and up to RANKS nodes, the replayed tree is the builder's own uncapped one."""
    for answer in answers:
        drafts, said = answer.recording.drafts, answer.recording.answer
        for position in range(0, len(drafts.tokens), 5):
            tokens = drafts.tokens[position].long()
            log_q = torch.empty(DEPTH, VOCABULARY).scatter(1, tokens, drafts.log_q[position])
            tree = best_first_tree(log_q, record.RANKS, rank_cap=None)
            rest = said[position + 1 : position + 1 + DEPTH]
            assert len(answer.needs["cast, every rank"][position]) == accepted(tree, rest)


def test_an_answer_of_one_token_has_no_round(models):
    """The first token comes from the prefill: with a stop id at once there is nothing to replay."""
    first = recorded(models, PROMPTS[0]).answer[0]
    recording = recorded(models, PROMPTS[0], stop_ids=(first,))
    assert recording.answer == [first]
    assert recording.drafts.tokens.shape == (0, DEPTH, VOCABULARY)
    assert Replayable.of(recording).rounds("cast", 15) == []


# The command

@pytest.fixture
def command(tmp_path):
    """Runs the command on tiny models of bytes; -> (status, the directory)."""
    target = write_tiny_target(tmp_path / "target", max_position_embeddings=256)
    write_byte_tokenizer(target)
    draft = write_tiny_draft(tmp_path / "draft", max_position_embeddings=256)
    prompts = tmp_path / "maths.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{k} + {k}?"}) for k in range(3)))
    out = tmp_path / "out"
    models = ["--model", str(target), "--draft-model", str(draft), "--device", "cpu"]

    def run(*extra):
        arguments = ["--prompts", str(prompts), *models, "--max-new-tokens", "12", "--out", str(out), *extra]
        return replay.main(arguments), out

    return run


def test_records_goes_on_and_analyses(command, tmp_path, monkeypatch, capsys):
    """Answers are the decoder's; a second run computes nothing; --analyse loads nothing."""
    curve_copy = tmp_path / "new" / "own.json"
    status, out = command("--curve", str(curve_copy))
    assert status == 0
    printed = capsys.readouterr()
    assert "| tree, N = 127 |" in printed.out and "rounds" in printed.err
    report, curve = [json.loads((out / name).read_text()) for name in ("analysis.json", "curve.json")]
    assert [finding["domain"] for finding in report["findings"]] == ["maths", "all"]
    assert curve == json.loads(curve_copy.read_text())
    read = MassCurve.read(out / "curve.json", DEPTH)  # as the width rule does
    assert asdict(read) == curve and read.draft == str(tmp_path / "draft")
    assert len(curve["masses"]) == 127 and curve["rounds"] == report["findings"][-1]["tree"]["rounds"][14]

    target = load_target(str(tmp_path / "target"))
    for example in train_data.read_responses(out / "answers.jsonl"):
        output = Decoder(target).generate(example.prompt, method="ar", max_new_tokens=12, stop_ids=())
        assert list(example.response) == output.token_ids

    monkeypatch.setattr(train_data, "continue_batch", None)
    monkeypatch.setattr(record, "draft_answer", None)
    assert command()[0] == 0
    monkeypatch.setattr(record.Checkpoints, "load", None)
    capsys.readouterr()
    assert command("--analyse")[0] == 0
    idle = "--device, --draft-model, --max-new-tokens, --model, --prompts: no effect on --analyse"
    assert f"replay: {idle}\n" in capsys.readouterr().err
    assert json.loads((out / "analysis.json").read_text())["findings"] == report["findings"]

    capsys.readouterr()
    measured = bench_of(tmp_path, {"256": Costs((1, 4, 16), (9.0, 10.0, 14.0), (2.0, 3.0), (1, 127))})
    assert command("--analyse", "--costs", str(measured))[0] == 0
    printed = capsys.readouterr().out
    assert "gap of auto" in printed and f"costs of W on H ({measured}), prefix 256\n" in printed
    policies = json.loads((out / "analysis.json").read_text())["policies"]
    assert set(policies["chosen"]) == {"maths", "mean"} and policies["threshold"] > 0
    assert policies["curve"] == "recorded in these rounds" and policies["costs"] == f"W on H ({measured}), prefix 256"


def bench_of(directory: Path, costs: dict[str, Costs]) -> Path:
    """A bench's file, as far as replay reads it."""
    values = {"environment": {"weights": "W", "hardware": "H"}, "buckets": [], "probes": []}
    file = directory / "bench.json"
    file.write_text(json.dumps(values | {"costs": {prefix: vars(each) for prefix, each in costs.items()}}))
    return file


def test_policies_go_by_the_curve_that_auto_would_use(command, tmp_path, capsys):
    """The one beside the head, unless it is young or of other weights, and the costs of these prompts' lengths."""
    dear = Costs((1, 16), (9.0, 99.0), (20.0, 30.0), (1, 127))
    level = Costs((1, 16), (9.0, 9.0), (1e-6, 1e-6), (1, 127))
    measured, shipped = bench_of(tmp_path, {"14": dear, "256": level, "1024": dear}), tmp_path / "draft" / "curve.json"
    _, out = command()

    def policies(rounds: int, mass: float) -> dict:
        if rounds:
            shipped.write_text(json.dumps(asdict(MassCurve([mass] * 127, [mass] * DEPTH, [], [], rounds))))
        assert command("--analyse", "--costs", str(measured))[0] == 0
        found = json.loads((out / "analysis.json").read_text())["policies"]
        assert f"- mass curve: {found['curve']}\n" in capsys.readouterr().out and found["costs"].endswith(", prefix 256")
        return found

    recorded = policies(0, 0.0)
    assert recorded["curve"] == "recorded in these rounds" and recorded["threshold"] == 0  # rows cost nothing
    assert policies(1500, 0.0)["predicted"] == 0 and policies(1500, 0.5)["predicted"] == 15
    assert "beside the head" in policies(1500, 0.5)["curve"]
    assert policies(3, 0.5) == policies(1500, 0.5)  # of however few rounds, as auto goes by it
    shipped.write_text("{}")
    assert command("--analyse", "--costs", str(measured))[0] == 1
    assert f"cannot use {shipped}" in capsys.readouterr().err
    write_tiny_draft(tmp_path / "draft", seed=9, max_position_embeddings=256)
    assert policies(1500, 0.0)["curve"] == "recorded in these rounds"


def test_a_new_head_drafts_again_over_the_same_answers(command, tmp_path, monkeypatch):
    """A head that was trained further keeps its name; its drafts must not mix with the old weights'."""
    _, out = command()
    old = {file.name: Recording.load(file) for file in out.glob("*.safetensors")}
    monkeypatch.setattr(train_data, "continue_batch", None)
    write_tiny_draft(tmp_path / "draft", seed=9, max_position_embeddings=256)
    assert command()[0] == 0
    new = {file.name: Recording.load(file) for file in out.glob("*.safetensors") if file.name not in old}
    assert sorted(each.answer for each in new.values()) == sorted(each.answer for each in old.values())
    assert json.loads((out / "analysis.json").read_text())["findings"][-1]["prompts"] == len(new) == 3


def test_an_answer_without_rounds_counts_nowhere(command, capsys):
    """It ended at its first token."""
    _, out = command()
    file = sorted(out.glob("*.safetensors"))[0]
    recording = Recording.load(file)
    empty = [Drafts(drafts.tokens[:0], drafts.log_q[:0]) for drafts in (recording.drafts, recording.short)]
    Recording("at once", recording.answer[:1], *empty).save(file)
    assert command("--analyse")[0] == 0 and "are drafted" not in capsys.readouterr().err
    found = json.loads((out / "analysis.json").read_text())["findings"]
    assert [(finding["domain"], finding["prompts"]) for finding in found] == [("maths", 2), ("all", 2)]


def test_figures_that_cannot_be_written_whole_leave_the_old_ones(command, monkeypatch):
    """A full disk, or Ctrl-C: half of a JSON file is no figure."""
    _, out = command()
    before = {file: file.read_bytes() for file in out.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    monkeypatch.setattr(replay, "BINS", 3)  # other figures
    for written in ("curve.json", "analysis.json"):
        assert command("--analyse")[0] == 1
        assert {file: file.read_bytes() for file in out.iterdir()} == before
        monkeypatch.setattr(files.os, "replace", lambda part, file: full() if file.name == "analysis.json" else part.unlink())


def test_failures_are_one_line(command, tmp_path, capsys):
    """Other settings in the same directory, nothing recorded, a place that cannot be written."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "settings.json").write_text('{"target": "a"}')  # of model.train_dflash
    for directory in ("nowhere", str(tmp_path / "other")):
        assert replay.main(["--analyse", "--out", directory]) == 2
        assert "run without --analyse" in capsys.readouterr().err
    _, out = command()
    capsys.readouterr()
    assert command("--max-new-tokens", "13")[0] == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert command("--out", str(out / "settings.json"))[0] == 2
    assert "is a file: name a directory" in capsys.readouterr().err


def test_a_damaged_recording_is_named(command, capsys):
    """Cut short, or of another program: one line with its name and what to do."""
    _, out = command()
    file = sorted(out.glob("*.safetensors"))[1]
    whole = file.read_bytes()
    save_file({"x": torch.zeros(1)}, file)
    for content in (whole[:-9], whole[:3], b"", file.read_bytes()):
        file.write_bytes(content)
        capsys.readouterr()
        assert command("--analyse")[0] == 1
        *_, message = capsys.readouterr().err.splitlines()
        assert message.startswith(f"replay: {file} is damaged (")
        assert message.endswith("delete it, and it is recorded again")


@pytest.mark.parametrize("changed", [{"head": 5}, {"target": None}, {"draft": ["x"]}, {"max_new_tokens": "x"}], ids=str)
def test_damaged_settings_are_named(command, capsys, changed):
    _, out = command()
    file = out / "settings.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    capsys.readouterr()
    assert command("--analyse")[0] == 1
    assert capsys.readouterr().err.endswith(f"replay: {file} is damaged: delete it, and run without --analyse\n")


def test_a_recording_that_may_not_be_read_is_not_called_damaged(command, capsys, monkeypatch):
    """Deleting it is no way out."""
    _, out = command()
    opened = Path.open

    def refuse(self, *mode, **how):  # a file's mode would not keep root out
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *mode, **how)

    monkeypatch.setattr(Path, "open", refuse)
    capsys.readouterr()
    assert command("--analyse")[0] == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"replay: {out}/") and message.endswith(".safetensors may not be read: change its permissions")


def test_a_directory_in_place_of_a_recording_is_named(command, capsys):
    _, out = command()
    head = json.loads((out / "settings.json").read_text())["head"]
    (out / f"{head[:8]}-0.safetensors").mkdir()
    capsys.readouterr()
    assert command("--analyse")[0] == 1
    assert "-0.safetensors is damaged (" in capsys.readouterr().err.splitlines()[-1]


def test_a_domain_is_not_called_what_stands_for_all_of_them(command, tmp_path, capsys):
    (tmp_path / "all.jsonl").write_text('"x"\n')
    status, out = command("--prompts", str(tmp_path / "all.jsonl"))
    assert status == 2 and not out.exists()
    assert "'all' is no name of a domain" in capsys.readouterr().err


def test_a_wrong_model_claims_no_directory(command, tmp_path, capsys):
    """What was claimed for one that is none would refuse the right one."""
    (tmp_path / "target" / "tokenizer.json").unlink()
    status, out = command()
    assert status == 1 and not out.exists() and "tokenizer.json" in capsys.readouterr().err


def test_a_head_that_does_not_fit_is_not_noted(command, tmp_path, capsys):
    """--analyse would look for rounds of it."""
    _, out = command()
    settings = (out / "settings.json").read_text()
    wrong = write_tiny_draft(tmp_path / "wrong", hidden_size=64)
    capsys.readouterr()
    assert command("--draft-model", str(wrong))[0] != 0
    assert "does not fit" in capsys.readouterr().err and (out / "settings.json").read_text() == settings
    assert command("--analyse")[0] == 0


def test_a_recording_that_was_interrupted_is_told(command, capsys):
    """Its figures are of what there is, and a domain may be missing."""
    _, out = command()
    assert "are drafted" not in capsys.readouterr().err
    sorted(out.glob("*.safetensors"))[1].unlink()
    assert command("--analyse")[0] == 0
    assert f"replay: 2 of 3 answers in {out} are drafted, figures are of these: " in capsys.readouterr().err


def test_prompts_go_by_the_domain_that_they_are_given_last(command, tmp_path, capsys):
    """Recorded under another name before, and in two files at once."""
    command()
    other = tmp_path / "sums.jsonl"
    other.write_text((tmp_path / "maths.jsonl").read_text())
    capsys.readouterr()
    status, out = command("--prompts", str(other))
    printed = capsys.readouterr()
    assert status == 0 and "| R (promised) | sums | all |\n|---|---|---|\n" in printed.out and "another domain" not in printed.err
    other.write_text('"another"\n' + other.read_text())
    assert command("--prompts", str(tmp_path / "maths.jsonl"), str(other))[0] == 0
    printed = capsys.readouterr()
    assert "replay: 3 of 7 prompts are of another domain, too: they count in the first\n" in printed.err
    found = json.loads((out / "analysis.json").read_text())["findings"]
    assert {finding["domain"]: finding["prompts"] for finding in found} == {"maths": 3, "sums": 1, "all": 4}
