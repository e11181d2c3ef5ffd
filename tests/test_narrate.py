"""The narration of one round against the decoder's own account of it, on a tiny random pair with fixed seeds.

A random drafter accepts nothing, so the target's choices are made few: it nearly always takes one of four letters.
"""

import re

import pytest
import torch

import run
from graphs.masks import BODIES
from minicast import Decoder, methods, narrate
from minicast.narrate import Seen, Watcher
from minicast.round import Settled
from minicast.tree import Tree, best_first_tree, chain_tree
from model import load_draft, load_target, load_tokenizer
from tiny import random_tensors, tiny_target_config, write_byte_tokenizer, write_checkpoint, write_tiny_draft

PROMPT = list(b"hello")
METHODS = [("ar", 0), ("dflash", 0), ("cast", 5), ("cast", 31)]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Directories of a tiny target and its head."""
    directory = tmp_path_factory.mktemp("models")
    config = tiny_target_config(max_position_embeddings=256)
    tensors = random_tensors(config)
    tensors["lm_head.weight"][list(b"abcd")] *= 20
    target = write_checkpoint(directory / "target", tensors, config)
    write_byte_tokenizer(target, "{{ messages[0].content }}")
    return str(target), str(write_tiny_draft(directory / "draft", max_position_embeddings=256))


@pytest.fixture(scope="module")
def models(names):
    return load_target(names[0]), load_draft(names[1])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("shaping", [dict(), dict(temperature=0.9, verifier="stochastic")], ids=str)
def test_what_is_seen_is_what_the_decoder_did(models, body, shaping):
    """Watching changes nothing, and every figure seen is one of the round's: its tree by the scores, its ancestors, its
    path and its slots."""
    target, draft = models
    for method, width in METHODS[:3]:
        options = dict(method=method, width=width, max_new_tokens=16, **shaping)
        watcher, decoder = (kind(target, draft, attention=body) for kind in (Watcher, Decoder))
        watcher.watching, token_ids, accepted, unread = True, list(PROMPT), 0, 0
        for step, plain in zip(watcher.stream(PROMPT, **options), decoder.stream(PROMPT, **options), strict=True):
            assert (step.token_ids, step.path, step.accepted) == (plain.token_ids, plain.path, plain.accepted)
            if not step.prefill:
                seen, n = watcher.seen, step.width + 1
                assert (seen.P, seen.root) == (len(token_ids) - 1, token_ids[-1])
                assert torch.tensor(seen.visible)[:n, :n].equal(step.tree.ancestors())
                assert seen.positions[:n] == [seen.P] + (seen.P + step.tree.depths).tolist()
                assert seen.settled.path == step.path and seen.P_after == seen.P + len(step.path)
                emitted = [*seen.settled.tokens[1:], seen.settled.next_token]
                assert step.token_ids == emitted[: len(step.token_ids)]
                if method == "ar":
                    assert seen.log_q is None
                else:
                    assert seen.unread == unread  # of the prompt nothing, then what the round before committed
                    unread = len(step.path)
                    _, features = target.score(token_ids[:-1], draft.taps)
                    assert torch.allclose(seen.log_q, draft.score(features, seen.root, target), atol=1e-4)
                    build = chain_tree if method == "dflash" else best_first_tree
                    expected = build(seen.log_q, 7 if method == "dflash" else width)
                    assert torch.equal(expected.tokens, step.tree.tokens)
                    assert torch.equal(expected.parents, step.tree.parents)
                accepted += step.accepted
            token_ids += step.token_ids
        assert accepted or method == "ar"


def test_nothing_is_watched_unless_asked(models, monkeypatch):
    """A probe measures the decoder's own functions, and must not measure the notes that are taken."""
    watcher = Watcher(*models)
    watcher.generate(PROMPT, method="cast", width=3, max_new_tokens=4)
    assert watcher.seen is None


@pytest.mark.parametrize("body", BODIES)
def test_a_tree_that_is_smaller_than_asked_for_is_told_as_it_is(tell, body):
    """With one token a depth there are 7 nodes, whatever the width; builders of fixed shape fill up with nodes of no mass,
    which nobody is to see, and our own methods are not taken for somebody else's."""
    status, out, err = tell("1", "--attention", body, "--rank-cap", "1", "--width", "15")
    assert status == 0 and "N = 7 nodes" in out


def test_a_pause_of_drafting_stays_one(models):
    """A policy that rests the drafter must not have it run because someone looks."""
    class Resting:
        width = 3

        def keep(self, tree):
            return tree.width

        def observe(self, width, committed, seconds):
            pass

    watcher, policy = Watcher(*models), Resting()
    watcher.watching = True
    steps = watcher.stream(PROMPT, method="cast", width=policy, max_new_tokens=9)
    assert next(steps).prefill and next(steps).width == 3 and watcher.seen.log_q is not None
    policy.width = 0
    assert next(steps).width == 0 and watcher.seen.log_q is None


def test_the_drafters_thoughts_are_told_as_they_were():
    """By hand: what it read, its block, the rank and the probability that it gave to each choice of the target."""
    log_q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).log()
    seen = Seen(10, 2, 3, log_q, settled=Settled([2, 1], [0, 2], 0), P_after=12)
    tree = Tree(torch.tensor([0, 1]), torch.tensor([-1, -1]), torch.tensor([1, 1]), torch.tensor([0.5, 0.3]).log())

    def lines(told, *given):
        return [line for line, _ in told(seen, *given, str)]

    assert lines(narrate.draft_lines) == [
        "P = 10 positions are committed, in both caches; b = 2 is emitted, in neither",
        "the drafter first reads the target's features of 3 positions committed since it ran",
        "block [2, mask x 2] at positions 10 to 12",
    ]
    assert [line.split() for line in lines(narrate.propose_lines, tree) if line.startswith("q_")] == [
        ["q_1", "0.5000*0", "0.3000*1", "0.2000", "2"], ["q_2", "0.6000", "1", "0.3000", "2", "0.1000", "0"],
    ]
    assert lines(narrate.walk_lines) == [
        "row 0: the target chooses 1 (the drafter's number 2 at depth 1, q = 0.3000); row 2 carries it: accepted",
        "row 2: the target chooses 0 (the drafter's number 3 at depth 2, q = 0.1000); no child carries it: the next b",
    ]
    log_q[1, 0] = -torch.inf  # of a head of fewer tokens
    assert lines(narrate.walk_lines)[1] == (
        "row 2: the target chooses 0 (at depth 2 the drafter does not score it); no child carries it: the next b"
    )
    assert lines(narrate.commit_lines) == [
        "keys, values and features of rows 0, 2 go to slots 10, 11", "P = 10 -> 12; b = 2 -> 0",
    ]


def test_of_a_round_without_a_draft_nothing_is_told_about_the_drafters_cache():
    """There may be no drafter, and one that rests has not read what was committed since."""
    assert [line for line, _ in narrate.draft_lines(Seen(10, 2, 3), str)] == [
        "P = 10 positions are committed, in the target's cache; b = 2 is emitted, not in it",
        "the drafter does not run: this round is autoregressive; --method cast --width 15 drafts",
    ]


@pytest.fixture
def tell(names, capsys):
    """run.py --explain-round on the tiny models -> exit status, stdout, stderr."""

    def call(*flags):
        few = ("--model", names[0], "--draft-model", names[1], "--max-new-tokens", "30", "--width", "5")
        status = run.main(["-p", "hello", *few, "--explain-round", *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_a_named_method_of_ones_own_is_told_too(tell, monkeypatch):
    """What it proposes has no sentence here; its tree and the rest of the round have."""
    monkeypatch.setitem(methods.METHODS, "last", lambda proposal: best_first_tree(proposal.draft()[-1:], proposal.width))
    monkeypatch.setattr(run, "METHODS", (*run.METHODS, "last"))
    status, out, err = tell("1", "--method", "last", "--width", "3")
    assert status == 0 and "2 propose: what the method returns" in out and "7 emit" in out and "no effect" not in err


@pytest.mark.parametrize("method, width", METHODS)
@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_the_story_has_the_figures_of_the_round(tell, models, names, method, width, temperature):
    """The round that accepts most, told: seven steps, each with its meaning and where the paper has it."""
    tokenizer = load_tokenizer(names[0])
    options = dict(method=method, width=width, temperature=float(temperature), max_new_tokens=30)
    steps = list(Decoder(*models).stream(tokenizer.encode("hello"), **options))
    number = max(range(1, len(steps) - 1), key=lambda k: steps[k].accepted)
    assert steps[number].accepted or method == "ar"
    step, before = steps[number], sum((step.token_ids for step in steps[:number]), [])
    status, out, err = tell(str(number), "--method", method, "--width", str(width), "--temperature", temperature)
    assert status == 0 and all("no effect" in line for line in err.splitlines())
    head, *parts = re.split(r"\n\n(?=\d \w+: )", out)
    asked = f"{method}, width {width}" if method == "cast" else method
    assert head == f"round {number} of {asked}; the answer so far: {tokenizer.decode(before)!r}"
    titles = [part.splitlines()[0] for part in parts]
    steps_by_name = ["1 draft", "2 propose", "3 pack", "4 verify", "5 walk", "6 commit", "7 emit"]
    assert [title.split(":")[0] for title in titles] == steps_by_name
    assert all("paper, " in part for part in parts if method != "ar" or "propose" not in part)
    P, n, tree = 5 + len(before) - 1, step.width + 1, step.tree
    root, emitted = repr(tokenizer.token_text(before[-1])), "".join(map(tokenizer.token_text, step.token_ids))
    assert f"P = {P} positions" in parts[0] and f"b = {root} is emitted" in parts[0]

    nodes = re.findall(r"^ +(\d+)  (\d\.\d{4})  +(\d+)  +(b|\d+) (\+| ) (.*)$", parts[1], re.MULTILINE)
    expected = zip(
        range(1, n), tree.log_mass.exp().tolist(), tree.depths.tolist(), tree.parents.tolist(),
        ("+" if row in step.path else " " for row in range(1, n)), map(tokenizer.token_text, tree.tokens.tolist()),
    )
    assert nodes == [
        (str(i), f"{mass:.4f}", str(depth), "b" if parent < 0 else str(parent + 1), mark, repr(text))
        for i, mass, depth, parent, mark, text in expected
    ]
    assert ("N = 0: nothing is proposed, b goes alone" in parts[1]) is (method == "ar")
    if method != "ar":
        best = re.findall(r"^   q_\d +\d\.\d{4}([* ])", parts[1], re.MULTILINE)
        assert len(best) == 7 and [mark == "*" for mark in best] == [d in tree.depths for d in range(1, 8)]

    shown = min(n, 16)
    rows = re.findall(r"^ +(\d+)  +(\d+)  ((?:  [#.])+)  ", parts[2], re.MULTILINE)
    picture = [[mark == "#" for mark in marks.split()] for _, _, marks in rows]
    assert torch.tensor(picture).equal(tree.ancestors()[:shown, :shown])
    assert [int(position) for _, position, _ in rows] == ([P] + (P + tree.depths).tolist())[:shown]
    assert (f"... and {n - 16} more rows" in parts[2]) is (n > 16)

    chosen = re.findall(r"row (\d+): the target chooses (.*?)(?: \(.*?\))?; (row \d+ carries|no child)", parts[4])
    assert [int(row) for row, _, _ in chosen] == step.path
    assert [text for _, text, _ in chosen] == [repr(tokenizer.token_text(token)) for token in step.token_ids]
    assert [then for _, _, then in chosen] == [f"row {row} carries" for row in step.path[1:]] + ["no child"]
    slots = ", ".join(str(P + depth) for depth in range(len(step.path)))
    assert f"go to slots {slots}\n" in parts[5] and f"P = {P} -> {P + len(step.path)};" in parts[5]
    assert f"R = {len(step.token_ids)}, of which {step.accepted} were drafted: {emitted!r}" in parts[6]


def test_wide_trees_are_cut_and_say_so(tell):
    out = tell("--width", "60")[1]
    assert "... and 28 more (--show-tree lists them)" in out and "... and 45 more rows and columns" in out
    assert max(map(len, out.splitlines())) <= 140


def test_the_first_round_is_told_unless_another_is_named(tell):
    assert tell()[1] == tell("1")[1] != tell("2")[1]
    assert tell()[1].startswith("round 1 of cast, width 5; ")
    assert tell("--method", "dflash")[1].startswith("round 1 of dflash; ")  # it has no width


def test_the_verifier_is_named(tell):
    """What a choice is differs: the argmax, a draw, the recursion."""
    assert "argmax" in tell()[1] and "direct walk" in tell("--temperature", "1")[1]
    assert "Theorem 3" in tell("--temperature", "1", "--verifier", "stochastic")[1]


def test_the_last_round_says_why_it_is_the_last(tell, models, names):
    """Beyond it there is only the text."""
    decoder = Decoder(*models)
    rounds = len(list(decoder.stream(PROMPT, width=5, max_new_tokens=30))) - 1
    assert "the answer ends here: length" in tell(str(rounds))[1]
    status, out, err = tell(str(rounds + 1))
    assert status == 2 and out.rstrip("\n") == load_tokenizer(names[0]).decode(decoder.output.token_ids).rstrip("\n")
    assert err == f"run.py: the answer has {rounds} rounds: --explain-round {rounds + 1} is beyond its end\n"


def test_what_the_last_round_had_beyond_the_end_is_told(tell, models):
    for count in range(2, 30):
        steps = list(Decoder(*models).stream(PROMPT, width=5, max_new_tokens=count))
        beyond = len(steps[-1].path) - len(steps[-1].token_ids)
        if beyond > 0:
            break
    told = tell(str(len(steps) - 1), "--max-new-tokens", str(count))[1]
    assert f"the answer ends here: length, and {beyond} more that followed" in told


def test_a_fault_in_the_round_is_an_error(tell, monkeypatch):
    """No number stands for a token that there is none of. The text before it, the prefill's token, is not lost."""
    from minicast import verify

    monkeypatch.setattr(verify, "target_choices", lambda logits, *_, **__: torch.full((len(logits),), -1))
    status, out, err = tell()
    assert status == 1 and len(out.rstrip("\n")) == 1 and "non-finite" in err and err.count("\n") == 1


def test_interrupted_on_the_way_to_the_round_the_text_so_far_is_shown(tell, monkeypatch):
    stream = Watcher.stream

    def interrupted(self, *arguments, **options):
        for number, step in enumerate(stream(self, *arguments, **options)):
            if number == 4:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Watcher, "stream", interrupted)
    status, out, err = tell("6", "--method", "ar")
    assert status == 130 and len(out.rstrip("\n")) == 4 and "Traceback" not in err
