"""The training of a head: what one many-anchor pass computes, the loss, resuming, the format, and a head that learns."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import random_tensors, tiny_target_config, write_byte_tokenizer, write_checkpoint, write_tiny_draft, write_tiny_target

from minicast import Decoder
from minicast.prompts import read_prompts
from model import load_draft, load_target, load_tokenizer, train_data, train_dflash, train_prompts
from model.config import Rope
from model.errors import UsageError, UserError
from model.files import claim
from model.train_data import (
    Example,
    LossHead,
    Reading,
    ReadingCache,
    Sampler,
    answer,
    make_batch,
    read_responses,
    split,
)
from model.train_dflash import WIDTH, Trainer, all_states, flags, held_out_rounds, prepare, read_inputs, unused_token
from model.train_head import SoftCrossEntropy, block_states, fresh_head, head_config, loaded_head, save_head
from model.train_prompts import before_user, own_prompts, template_prompts, template_words

DEPTH = 7


def random_example(seed: int, prompt: int = 5, response: int = 20, vocab: int = 250) -> Example:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (prompt + response,), generator=generator).tolist()
    return Example(tuple(tokens[:prompt]), tuple(tokens[prompt:]), f"domain{seed % 2}")


@pytest.fixture
def target(tmp_path):
    return load_target(write_tiny_target(tmp_path / "target"), device="cpu")


@pytest.fixture
def draft(tmp_path):
    return load_draft(write_tiny_draft(tmp_path / "draft"), device="cpu")


def trainable(tmp_path, target):
    """The tiny head of `draft`, not packed."""
    return loaded_head(str(write_tiny_draft(tmp_path / "head")), target)


def small_trainer(tmp_path, target, minutes=1.0, vocab=250) -> Trainer:
    examples = [random_example(seed, vocab=vocab) for seed in range(6)]
    draft = trainable(tmp_path, target)
    cache = ReadingCache(tmp_path / "out.training" / "readings", target, draft.taps, "tiny")
    lm_head = torch.randn(target.vocab_size, target.config.hidden, generator=torch.Generator().manual_seed(0))
    loss_head = LossHead.of(lm_head, {token for example in examples[2:] for token in example.response})
    options = dict(held_out=examples[:2], out=tmp_path / "out", minutes=minutes, rate=1e-3, target_name="tiny")
    return Trainer(draft, target, loss_head=loss_head, sampler=Sampler(examples[2:], cache), **options)


def test_many_anchors_in_one_pass_equal_the_decoders_draft_at_each(tmp_path, target, draft):
    """Two sequences of unlike length, three anchors each, padded: every block gives what DraftHead.score gives for
    its own prefix. Guards a block that sees its neighbour, the padding, or features at or after its root."""
    trained = trainable(tmp_path, target)
    features = torch.zeros(2, 32, 64)
    anchors = torch.tensor([[4, 9, 17], [2, 25, 30]])
    roots = torch.tensor([[11, 12, 13], [14, 15, 16]])
    generator = torch.Generator().manual_seed(3)
    features[0, :17] = torch.randn(17, 64, generator=generator)
    features[1, :30] = torch.randn(30, 64, generator=generator)
    states = block_states(trained, target, features, roots, anchors)
    for row in range(2):
        for column in range(3):
            expected = draft.score(features[row, : anchors[row, column]], int(roots[row, column]), target)
            got = target.logits(states[row, column]).log_softmax(-1)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_gradients_of_one_block_leave_the_other_context_alone(tmp_path, target):
    """The gradient of a block's states is zero at features from its root on. Guards a mask that leaks the future,
    which training would exploit: held-out loss falls and R does not."""
    trained = trainable(tmp_path, target).requires_grad_(True)
    features = torch.randn(1, 32, 64, requires_grad=True)
    states = block_states(trained, target, features, torch.tensor([[1, 2]]), torch.tensor([[6, 20]]))
    states[0, 0].sum().backward()
    touched = features.grad[0].abs().sum(-1) > 0
    assert touched[:6].all() and not touched[6:].any()


@pytest.mark.parametrize("size", [1, 100])
def test_soft_cross_entropy_is_the_plain_one(size):
    """Loss and gradient equal those of log_softmax under autograd. Guards the gradient written by hand, which no
    autograd checks, labels that come twice in a row, and logits too large for an exponential."""
    generator = torch.Generator().manual_seed(0)
    hidden = (size * torch.randn(9, 12, generator=generator)).requires_grad_(True)
    head = torch.randn(30, 12, generator=generator)
    labels = torch.randint(0, 30, (9, 5), generator=generator)  # some twice
    shares = torch.rand(9, 5, generator=generator)
    shares /= shares.sum(-1, keepdim=True)
    weights = torch.rand(9, generator=generator)
    loss, top = SoftCrossEntropy.apply(hidden, head, labels, shares, weights)
    (2 * loss).backward()
    got, hidden.grad = hidden.grad, None
    logits = hidden @ head.T
    dense = torch.zeros(9, 30).scatter_add_(-1, labels, shares)
    plain = -(weights[:, None] * dense * logits.log_softmax(-1)).sum()
    (2 * plain).backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, hidden.grad, atol=1e-5, rtol=1e-4)
    assert torch.equal(top, logits.argmax(-1))


def test_batch_labels_are_the_tokens_that_follow():
    """Block at place p, depth j: root is response[p], the label's hard part is response[p + j], weight 0 past the
    end, shares sum to 1. Guards an off-by-one between roots and labels, which trains a head for the wrong token."""
    example = random_example(0)
    tokens = sorted(set(example.response))
    head = LossHead.of(torch.eye(256), set(tokens))
    soft = torch.tensor([[token, 255] for token in example.response])  # 255 is no token of the loss
    soft[8] = 255
    reading = Reading(torch.randn(25, 64).bfloat16(), soft.int(), torch.full((20, 2), 0.4).half())
    places = torch.tensor([0, 7, 15])
    batch = make_batch([(example, reading, places)], DEPTH, head, "cpu")
    assert batch.roots[0].tolist() == [example.response[p] for p in places]
    assert batch.anchors[0].tolist() == [5, 12, 20]
    torch.testing.assert_close(batch.shares.sum(-1), torch.ones(1, 3, DEPTH))
    assert torch.equal(batch.features[0, :25], reading.features[: batch.features.shape[1]].to(batch.features))
    for column, place in enumerate(places.tolist()):
        for depth in range(DEPTH):
            ahead = place + depth + 1
            assert batch.weights[0, column, depth] == pytest.approx(0.75**depth * (ahead < 20))
            if ahead < 20:
                row = head.row[example.response[ahead]]
                assert batch.labels[0, column, depth, -1] == row
                share = batch.shares[0, column, depth][batch.labels[0, column, depth] == row].sum()
                torch.testing.assert_close(share, torch.tensor(1.0))  # the only other soft label is unknown


def test_half_of_a_label_is_what_the_target_held_probable():
    """Shared out among the tokens that the loss knows, in proportion; and the context reaches to the last anchor."""
    example = Example(tuple(range(60)), (7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8), "d")
    head = LossHead.of(torch.eye(256), {7, 8, 9})
    soft = torch.tensor([8, 9, 100]).expand(11, 3)
    reading = Reading(torch.randn(71, 64).bfloat16(), soft.int(), torch.tensor([0.3, 0.1, 0.6]).expand(11, 3).half())
    batch = make_batch([(example, reading, torch.tensor([0, 9]))], 2, head, "cpu")
    share = {token: batch.shares[0, 0, 0][batch.labels[0, 0, 0] == head.row[token]].sum().item() for token in (7, 8, 9)}
    assert share == pytest.approx({7: 0, 8: 0.5 + 0.375, 9: 0.125}, abs=1e-3)  # 8 came after place 0
    assert batch.features.shape[1] >= batch.anchors.max() == 69
    assert torch.equal(batch.features[0, :69], reading.features[:69])


def test_readings_are_the_targets_own_and_survive(tmp_path, target):
    """Features and labels equal target.score's, and a second cache finds the first one's files. Guards labels that
    are one row off, and a key that changes between starts."""
    example = random_example(1)
    cache = ReadingCache(tmp_path / "readings", target, (0, 1), "tiny")
    assert example not in cache
    first = cache.get(example)
    logits, features = target.score(example.tokens, (0, 1))
    assert torch.equal(first.features, features.bfloat16())
    assert torch.equal(first.label_ids[:, 0].long(), logits[4:-1].argmax(-1))
    again = ReadingCache(tmp_path / "readings", None, (0, 1), "tiny")
    assert example in again
    assert all(torch.equal(value, vars(first)[name]) for name, value in vars(again.get(example)).items())
    assert example not in ReadingCache(tmp_path / "readings", None, (0,), "tiny")
    assert example not in ReadingCache(tmp_path / "readings", None, (0, 1), "other")
    assert replace(example, prompt=example.tokens[:6], response=example.tokens[6:]) not in again
    sampler = Sampler([example, random_example(2)], again)
    assert (sampler.pool, sampler.waiting) == ({"domain1": [0]}, [1])  # it need not be read again to be drawn from


def test_batched_answers_are_the_decoders(tmp_path, target, monkeypatch):
    """Prompts of unlike length in one batch, rows ending at unlike times: each answer is what the decoder gives
    alone. A file cut in its last line is gone on with. Guards padding that is seen, rows mixed up when the batch
    shrinks, and an answer lost or doubled by a kill."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3, 9, 4, 4, 12, 7)]
    alone = [Decoder(target).generate(p, method="ar", max_new_tokens=30).token_ids for p in prompts]
    stop = {alone[0][4], alone[1][9], alone[3][2]}
    file = tmp_path / "answers.jsonl"
    monkeypatch.setattr(train_data, "AT_ONCE", 2 * 39)
    answer(target, prompts[:3], file, stop, max_new_tokens=30)
    whole = file.read_text()
    file.write_text(whole[:-20])
    monkeypatch.setattr(train_data, "AT_ONCE", 4 * 37)
    answer(target, prompts, file, stop, max_new_tokens=30)
    found = {example.prompt: list(example.response) for example in read_responses(file)}
    assert len(read_responses(file)) == len(prompts)
    for prompt in prompts:
        expected = Decoder(target).generate(prompt, method="ar", max_new_tokens=30, stop_ids=stop).token_ids
        assert found[tuple(prompt)] == expected


def test_replay_has_the_decoders_rounds(tmp_path, target, draft):
    """R told in training is R of the decoder: round lengths of chain and tree agree on the target's own answers.
    Guards a validation that flatters."""
    trained = trainable(tmp_path, target)
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        prompt = torch.randint(0, 256, (6,), generator=generator).tolist()
        response = Decoder(target).generate(prompt, method="ar", max_new_tokens=24).token_ids
        example = Example(tuple(prompt), tuple(response), "")
        _, features = target.score(example.tokens, (0, 1))
        reading = Reading(features, torch.empty(0), torch.empty(0))
        rounds = held_out_rounds(trained, target, example, reading)
        decoder = Decoder(target, draft)
        chain = decoder.generate(prompt, method="dflash", max_new_tokens=24).round_lengths
        tree = decoder.generate(prompt, method="cast", width=WIDTH, max_new_tokens=24).round_lengths
        assert rounds == {"chain": chain, "tree": tree}


def test_states_of_a_long_answer_are_those_of_one_pass(tmp_path, target):
    """They are computed in parts of 64 places."""
    trained, example = trainable(tmp_path, target), random_example(7, response=100)
    reading = Reading(torch.randn(105, 64).bfloat16(), torch.empty(0), torch.empty(0))
    roots, anchors = torch.tensor([example.response[:-1]]), torch.arange(5, 104)[None]
    expected = block_states(trained, target, reading.features[None], roots, anchors)[0]
    torch.testing.assert_close(all_states(trained, target, example, reading), expected)


def test_a_fresh_head_begins_as_the_targets_last_layers(tmp_path):
    """Of its sizes, but with its plain rotary embedding; the context that it reads at first is the last tap."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}
    changes = dict(num_hidden_layers=3, rope_theta=5e5, rope_scaling=scaling, rms_norm_eps=1e-4)
    target = load_target(write_tiny_target(tmp_path / "target", **changes), device="cpu", pack=False)
    config = head_config(target, 2, 8, (0, 2))
    assert config.rope == Rope(5e5) and (config.eps, config.context, config.target_layers) == (1e-4, 64, 3)
    draft = fresh_head(config, target)
    for layer, source in zip(draft.layers, target.layers[1:], strict=True):
        for name, value in source.state_dict().items():
            assert torch.equal(layer.state_dict()[name], value), name
        assert torch.equal(layer.self_attn.q_norm.weight, torch.ones(16))
    assert torch.equal(draft.hidden_norm.weight, target.layers[1].input_layernorm.weight)
    assert torch.equal(draft.norm.weight, target.norm.weight)
    torch.testing.assert_close(draft.fc.weight, torch.eye(32, 64).roll(32, 1), atol=0.02, rtol=0)
    for layers, taps in (12, (1, 3, 5, 7, 9)), (36, (1, 9, 17, 25, 33)):  # from the second to the third last
        deeper = SimpleNamespace(config=replace(target.config, layers=layers))
        assert head_config(deeper, layers, 8).taps == taps


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path, target):
    """Three steps, a checkpoint, two steps; from the checkpoint two steps again: same draws, loss and weights.
    Guards a checkpoint without the optimizer's or the sampler's state."""
    trainer = small_trainer(tmp_path, target)
    for _ in range(3):
        trainer.step()
    trainer.save()
    expected = [trainer.step() for _ in range(2)]
    resumed = small_trainer(tmp_path, target)
    resumed.resume()
    assert resumed.state.step == 3
    assert [resumed.step() for _ in range(2)] == expected
    for name, value in trainer.draft.state_dict().items():
        assert torch.equal(value, resumed.draft.state_dict()[name]), name


def test_a_step_descends_the_mean_of_the_weighted_losses(tmp_path, target):
    """The second step of a run: what it tells, its gradient and its rate are those of the plain formulas. Guards
    gradients of the step before, a token past the end that counts, and a hit that counts after a miss."""
    trainer = small_trainer(tmp_path, target, vocab=3)  # so few that there are hits
    trainer.step()
    trainer.save()
    other = small_trainer(tmp_path, target, vocab=3)
    other.resume()
    batch = make_batch(other.sampler.draw(*other.batch), DEPTH, other.loss_head, "cpu")
    states = block_states(other.draft, target, batch.features, batch.roots, batch.anchors)
    log_p = (states @ other.loss_head.weight.T).log_softmax(-1)
    losses = -(batch.shares * log_p.gather(-1, batch.labels)).sum(-1)
    loss = (batch.weights * losses).sum() / batch.weights.sum()
    loss.backward()
    hits = (log_p.argmax(-1) == batch.labels[..., -1]) & (batch.weights > 0)
    rounds = [1 + (*block, False).index(False) for block in hits.flatten(0, 1).tolist()]
    before = trainer.state.predicted
    assert trainer.step() == pytest.approx((loss.item(), sum(rounds) / len(rounds)), rel=1e-4)
    assert trainer.state.predicted - before == (batch.weights > 0).sum()
    norm = torch.stack([parameter.grad.norm() for parameter in other.draft.parameters()]).norm()
    assert norm > train_dflash.CLIP
    for parameter, plain in zip(trainer.draft.parameters(), other.draft.parameters()):
        torch.testing.assert_close(parameter.grad, plain.grad * train_dflash.CLIP / norm, atol=1e-4, rtol=1e-3)
    for group in trainer.optimizer.param_groups:
        assert group["lr"] == trainer.learning_rate()
        assert (group["weight_decay"] > 0) == all(parameter.ndim > 1 for parameter in group["params"])


def test_the_rate_rises_then_falls_to_the_end_of_the_budget(tmp_path, target):
    """And stays there where a step ran over it: a cosine that went on would rise again."""
    trainer = small_trainer(tmp_path, target)
    rates = []
    for part in (0, 0.03, 0.5, 1, 1.9):
        trainer.state.seconds = part * 60
        rates.append(trainer.learning_rate() / trainer.rate)
    assert rates == pytest.approx([0.02, 1, 0.51, 0.02, 0.02], abs=0.01)


def test_the_head_with_the_best_tree_is_kept(tmp_path, target, monkeypatch):
    """The longer chain of another does not count, nor is a head written that is no better."""
    trainer, saved = small_trainer(tmp_path, target), []
    monkeypatch.setattr(train_dflash, "save_head", lambda *_: saved.append(R) or trainer.weights.touch())
    monkeypatch.setattr(train_dflash, "held_out_rounds", lambda *_: {"chain": [R[0]], "tree": [R[1]]})
    for R in ((1, 2), (3, 1), (1, 3), (2, 3)):
        trainer.validate()
    assert saved == [(1, 2), (1, 3)] and trainer.state.best == 3
    assert "| 3.00 / 1.00 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("begun", [0, 600])
@pytest.mark.parametrize("cost", [6, 60])
def test_a_run_is_validated_and_saved_in_time(tmp_path, target, monkeypatch, cost, begun):
    """Four times or every six minutes, less often where it costs more than a tenth of the time, and at the end. What it finds is saved
    at once: a killed run would else go on with a lower R to beat. A run that goes on does not begin by it."""
    clock, events, trainer = [0.0], [], small_trainer(tmp_path, target, minutes=20)

    def take(seconds, name):
        events.append((name, trainer.state.seconds))
        clock[0] += seconds
        return 1.0, 1.0

    monkeypatch.setattr(train_dflash, "time", SimpleNamespace(thread_time=lambda: clock[0]))
    for part, seconds, name in ((trainer, 30, "step"), (trainer, cost, "validate"), (trainer, 0, "save"), (trainer.sampler, 0, "adopt")):
        monkeypatch.setattr(part, name, lambda seconds=seconds, name=name: take(seconds, name))
    trainer.run()
    trainer.out.mkdir()
    trainer.weights.touch()
    events.clear()
    trainer.state.seconds = begun
    trainer.run()
    validated = [at for name, at in events if name == "validate"]
    saved = [at for name, at in events if name == "save"]
    between = max(300, 10 * cost)
    assert validated[0] == begun + 300
    assert all(between <= after - before - cost < between + 30 for before, after in zip(validated, validated[1:-1]))
    names = [name for name, _ in events]
    assert names[-3:] == ["validate", "adopt", "save"]  # no step is left unseen
    assert all(names[at : at + 3] == ["validate", "adopt", "save"] for at, name in enumerate(names) if name == "validate")
    assert all(after - before < 150 + cost for before, after in zip([begun, *saved], saved))
    assert len(saved) < 2 + (1200 - begun) / 120 + len(validated)


def test_a_resumed_run_keeps_the_mask_token(tmp_path, target):
    """Chosen anew, since files joined that hold it, it would be another token than the weights were trained with."""
    trainer = small_trainer(tmp_path, target)
    trainer.draft.config = replace(trainer.draft.config, mask_token_id=77)
    trainer.save()
    resumed = small_trainer(tmp_path, target)
    assert resumed.draft.mask_token_id != 77
    resumed.resume()
    assert resumed.draft.mask_token_id == 77


def test_what_joins_later_moves_nothing_from_training_to_validation():
    """A prompt that was trained on would be learnt by heart, and R on it say nothing."""
    examples = [random_example(seed) for seed in range(40)]
    train, held_out = split(examples[:20], 3)
    assert len({example.prompt for example in held_out}) == 6 and len(train) == 14  # of each of two domains
    later_train, later = split(examples, 3)
    assert len(later) == 6 and not {example.prompt for example in train} & {example.prompt for example in later}
    assert {example.prompt for example in later_train} | {example.prompt for example in later} == \
        {example.prompt for example in examples}


def test_R_on_other_held_out_answers_begins_anew(tmp_path, target):
    """The best of easy ones would keep every later head of the same run from being saved."""
    trainer = small_trainer(tmp_path, target, minutes=1e-6)
    trainer.run()
    trainer.state.best = 99.0
    trainer.save()
    same, other = small_trainer(tmp_path, target, minutes=1e-6), small_trainer(tmp_path, target, minutes=1e-6)
    other.held_out = other.held_out[:1]
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(b"the best")
    for resumed, best in (same, 99.0), (other, pytest.approx(1.5, abs=0.6)):
        resumed.resume()
        resumed.run()
        assert resumed.state.best == best
        assert (weights.read_bytes() == b"the best") == (resumed is same)


def test_a_head_that_was_deleted_is_written_again(tmp_path, target):
    """A finished run would else name one that is not there; one with minutes left would end at the card."""
    small_trainer(tmp_path, target, minutes=1e-6).run()
    shutil.rmtree(tmp_path / "out")
    again = small_trainer(tmp_path, target, minutes=1e-6)
    again.resume()
    again.state.best = 99.0
    again.run()
    assert load_draft(tmp_path / "out", device="cpu").block_size == 8
    assert "head for tiny" in (tmp_path / "out" / "README.md").read_text()
    shutil.rmtree(tmp_path / "out")
    again.validate()  # deleted while it trained
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == \
        ["README.md", "config.json", "frequent_tokens.json", "model.safetensors"]


def few_responses(tmp_path) -> str:
    """The flags of a tiny run that needs no tokenizer."""
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps([[1, number], [3, 4, 5, 6]]) + "\n" for number in range(6)))
    target = write_tiny_target(tmp_path / "target")
    return f"--target {target} --responses {file} --layers 1 --minutes 1e-6 --out {tmp_path / 'out'} --held-out 1"


def test_the_same_command_goes_on(tmp_path, capsys):
    command = few_responses(tmp_path).split()
    assert train_dflash.main(command) == 0 and "going on" not in capsys.readouterr().err
    assert train_dflash.main(command) == 0 and "going on at minute" in capsys.readouterr().err


def test_a_mask_token_is_one_that_no_answer_holds(tmp_path):
    """But for a head to go on from, which has learnt its own."""
    command = few_responses(tmp_path)
    assert prepare(flags().parse_args(command.split())).draft.mask_token_id == 7
    init = ["--init", str(write_tiny_draft(tmp_path / "head"))]
    assert prepare(flags().parse_args([*command.split(), *init])).draft.mask_token_id == 255


def test_answers_of_one_token_teach_nothing(tmp_path):
    """Nothing comes after the token that a block would begin at."""
    command, file = few_responses(tmp_path), tmp_path / "answers.jsonl"
    file.write_text("[[9], [7]]\n" + file.read_text())
    trainer = prepare(flags().parse_args(command.split()))
    assert min(len(example.response) for example in trainer.sampler.examples + trainer.held_out) == 4
    file.write_text("[[9], [7]]\n[[8], [7]]\n")
    with pytest.raises(UserError, match="every answer has fewer than two tokens"):
        prepare(flags().parse_args(command.split()))


def test_answers_are_the_targets_to_the_prompts_that_were_given(tmp_path, monkeypatch):
    """Of every source, each up to its end or the limit; what a run answered that had more prompts is not learnt from."""
    monkeypatch.setattr(train_dflash, "faster_dtype", lambda device: torch.float32)  # as the decoder here
    monkeypatch.setattr(train_prompts, "OWN_BATCH", 16)
    target, tokenizer = talking_target(tmp_path, [*range(224, 256)])
    (tmp_path / "a.jsonl").write_text('"one"\n"two"\n"three"\n')
    (tmp_path / "own-words.jsonl").write_text('"joins"\n')
    command = f"--target {tmp_path / 'talking'} --out {tmp_path / 'out'} --layers 1 --held-out 1 --max-new-tokens 12"
    files = ["--prompts", str(tmp_path / "a.jsonl"), str(tmp_path / "own-words.jsonl")]

    def prompts():
        trainer, found = prepare(flags().parse_args([*command.split(), *files, "--own-prompts", "4"])), {}
        for example in (*trainer.sampler.examples, *trainer.held_out):
            found.setdefault(example.domain, set()).add(tokenizer.decode(example.prompt).removeprefix("<user>"))
            alone = Decoder(target).generate(example.prompt, method="ar", max_new_tokens=12, stop_ids=tokenizer.stop_ids)
            assert list(example.response) == alone.token_ids
        return found

    found = prompts()
    own = set(own_prompts(target, tokenizer, 4, tmp_path / "out.training" / "own-words.prompts"))
    assert found["a"] == {"one", "two", "three"} and {"joins"} < found["own-words"] <= {"joins"} | own
    (tmp_path / "a.jsonl").write_text('"one"\n"two"\n')
    assert prompts() == found | {"a": {"one", "two"}}
    (tmp_path / "a.jsonl").write_text(f'"{60 * "x"}"\n"{61 * "x"}"\n')
    only = [*command.split(), *files[:2]]
    with pytest.warns(UserWarning, match="2 of 2 prompts are left out"), pytest.raises(UserError, match="no prompt that the target"):
        prepare(flags().parse_args(only))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md"])
def test_a_head_of_somebody_elses_is_not_overwritten(tmp_path, name):
    """Only a checkpoint tells that it is of this run, and there is one from before the first head is written."""
    command = few_responses(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(UsageError, match=f"out holds {name} of another head: move it away"):
        prepare(flags().parse_args(command.split()))
    assert (tmp_path / "out" / name).read_text() == "mine" and not (tmp_path / "out.training").exists()
    (tmp_path / "out.training").mkdir()  # as of a run that ended before its first checkpoint
    with pytest.raises(UsageError, match="of another head"):
        prepare(flags().parse_args(command.split()))
    (tmp_path / "out" / name).unlink()
    trainer = prepare(flags().parse_args(command.split()))
    trainer.step = None  # killed before the first update
    with pytest.raises(TypeError):
        trainer.run()
    assert (tmp_path / "out" / name).exists() and prepare(flags().parse_args(command.split()))


def test_a_run_goes_on_with_its_own_settings_alone(tmp_path):
    """Answers that were trained on would else be held out, another --init or target change nothing, without a word.
    Before the first checkpoint, or without it, what concerns the answers alone is kept."""
    command, head = few_responses(tmp_path), write_tiny_draft(tmp_path / "head")
    other = write_tiny_target(tmp_path / "target2")
    prepare(flags().parse_args([*command.split(), "--held-out", "2"]))
    trainer = prepare(flags().parse_args(command.split()))
    trainer.save()
    for changed in (f"--target {other}", "--held-out 2", f"--init {head}"):
        with pytest.raises(UsageError, match="out.training holds answers of target .*give the same flags again"):
            prepare(flags().parse_args([*command.split(), *changed.split()]))
    trainer.checkpoint.unlink()
    prepare(flags().parse_args([*command.split(), "--held-out", "2"]))


@pytest.mark.parametrize("line", ["[[1, 2], [5, 99999, 7]]", "[[], [5, 6, 7]]", "[[-1], [5, 6, 7]]"])
def test_answers_that_are_not_the_targets_are_refused(tmp_path, line):
    (tmp_path / "few.jsonl").write_text("[[1], [3, 4, 5]]\n" + line + "\n")
    command = f"--target {write_tiny_target(tmp_path / 'target')} --out {tmp_path / 'head'} --layers 1 --held-out 1"
    with pytest.raises(UserError, match="few: every answer must be ids of the target's vocabulary of 256"):
        prepare(flags().parse_args([*command.split(), "--responses", str(tmp_path / "few.jsonl")]))


@pytest.mark.parametrize("line", ['["12", "34"]', "[[1], [2.7, 3]]", "[[true], [2]]", "[[1], [1e400]]", "[[1]]", "7"])
def test_answers_that_are_no_ids_are_refused(tmp_path, line):
    (tmp_path / "few.jsonl").write_text("[[1], [3, 4, 5]]\n" + line + "\n")
    with pytest.raises(UserError, match=r"few.jsonl, line 2: not \[prompt ids, response ids\]"):
        read_responses(tmp_path / "few.jsonl")


@pytest.mark.parametrize("end", ["", "\n"])
def test_answers_nested_too_deep_are_refused(tmp_path, end):
    (tmp_path / "deep.jsonl").write_text("[[1], [3, 4, 5]]\n" + "[" * 200_000 + end)
    with pytest.raises(UserError, match="deep.jsonl cannot be read as JSONL"):
        read_responses(tmp_path / "deep.jsonl")


def test_prompts_that_do_not_fit_are_counted(tmp_path, target):
    long = [1] * (target.context - 9)
    with pytest.warns(UserWarning, match=f"1 of 2 prompts are left out: .* exceed the context of {target.context}"):
        answer(target, [[1, 2], long], tmp_path / "answers.jsonl", (), max_new_tokens=10)
    assert [example.prompt for example in read_responses(tmp_path / "answers.jsonl")] == [(1, 2)]


def test_every_anchor_comes_once_before_any_comes_twice(tmp_path, target):
    """The anchors drawn from one sequence: each place of a deck once. Guards a deck that forgets its rest."""
    trainer = small_trainer(tmp_path, target)
    seen = {}
    for _ in range(60):
        for example, _, places in trainer.sampler.draw(2, 4):
            seen.setdefault(example, []).extend(places.tolist())
    assert len(seen) == 4
    for example, places in seen.items():
        size = len(example.response) - 1
        for start in range(0, len(places) - size, size):
            assert sorted(places[start : start + size]) == list(range(size))


@pytest.mark.parametrize("changes", [
    {}, {"rope_theta": 5e5, "rms_norm_eps": 1e-4, "attention_bias": True, "mlp_bias": True, "num_target_layers": None},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
                      "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "original_max_position_embeddings": 128}},
], ids=["plain", "biases", "llama3", "yarn"])
def test_a_saved_head_loads_as_a_published_one(tmp_path, target, changes):
    """save_head, load_draft: the file of --init again, and the same drafts, up to bfloat16. Guards fused rows split in
    the wrong order, and a head that runs as another than was trained."""
    published = load_file(write_tiny_draft(tmp_path / "head", **changes) / "model.safetensors")
    trained = loaded_head(str(tmp_path / "head"), target)
    save_head(trained, tmp_path / "saved", [5, 3])
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # or transformers refuses it
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
        assert set(file.keys()) == set(published)
        assert all(torch.equal(file.get_tensor(name), published[name].bfloat16()) for name in published)
    loaded = load_draft(tmp_path / "saved", device="cpu")
    assert loaded.config == trained.config
    trained.bfloat16().float()  # rounds in place, as the file did
    features = torch.randn(9, 64)
    torch.testing.assert_close(loaded.score(features, 3, target), trained.score(features, 3, target))


def test_prompts_are_read_from_every_kind_of_file(tmp_path):
    """Strings and objects with any of the known keys, first of several turns; templates give different prompts, the
    same ones each time. Guards a resumed run that asks other prompts."""
    file = tmp_path / "prompts.jsonl"
    lines = ["a", {"question": "b"}, {"turns": ["c", "d"]}, {"prompt": "e", "task_id": 1}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [prompt.text for prompt in read_prompts([file], None)] == ["a", "b", "c", "e"]
    texts = {name: "\n".join(prompts) for name, prompts in template_prompts(1000).items()}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    assert digests == {"chat": "0549d31f3ca800e9", "math": "ac06bc02fde4567c", "code": "7fb26748e82d3e53"}
    for domain, prompts in template_prompts(200).items():
        assert len(set(prompts)) == 200 and prompts == template_prompts(200)[domain]
        slots = {name for prompt in prompts for name in re.findall(r"{([a-z_]+)}", prompt)}
        assert slots <= {"pmatrix", "v", "w"}, "braces of LaTeX stay, slots are filled"
    for signature, (_, call, _) in template_words()["functions"].items():
        assert call.startswith(signature[: signature.index("(") + 1])


def test_answers_of_other_settings_are_not_taken_for_ones_own(tmp_path):
    """Of another target, or shorter ones: the work directory says whose it holds, once it holds any."""
    claim(tmp_path / "work", {"target": "b", "max_new_tokens": 9})
    (tmp_path / "work" / "none.jsonl").touch()
    claim(tmp_path / "work", {"target": "a", "max_new_tokens": 9})
    (tmp_path / "work" / "one.jsonl").write_text("{}\n")
    claim(tmp_path / "work", {"target": "a", "max_new_tokens": 9})
    with pytest.raises(UsageError, match="holds answers of target a, max_new_tokens 9: give the same flags"):
        claim(tmp_path / "work", {"target": "b", "max_new_tokens": 9})
    for damage in ("{", "7"):
        (tmp_path / "work" / "settings.json").write_text(damage)
        with pytest.raises(UserError, match="settings.json is damaged"):
            claim(tmp_path / "work", {"target": "a", "max_new_tokens": 9})


def test_prompt_files_of_one_name_are_all_read(tmp_path):
    """In different directories; the last one alone would be, where a name is a key."""
    for directory in "ab":
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "train.jsonl").write_text(f'"{directory}"\n')
    files = [str(tmp_path / directory / "train.jsonl") for directory in "ab"]
    arguments = flags().parse_args(["--target", "t", "--out", "o", "--held-out", "1", "--prompts", *files])
    assert read_inputs(arguments)[0] == {"train": ["a", "b"]}


@pytest.mark.parametrize("own, enough", [(8, False), (9, True)])
def test_too_few_prompts_are_refused_before_they_are_answered(tmp_path, own, enough):
    """Eight of each domain are held out by default; a file of one prompt adds nothing to train on."""
    (tmp_path / "one.jsonl").write_text('"a"\n')
    given = ["--prompts", str(tmp_path / "one.jsonl"), "--own-prompts", str(own)]
    arguments = flags().parse_args(["--target", "t", "--out", "o", *given])
    if enough:
        assert read_inputs(arguments)[0] == {"one": ["a"]}
    else:
        with pytest.raises(UsageError, match=r"9 prompts are too few with 8 of each file held out.*--held-out"):
            read_inputs(arguments)


def test_a_domain_is_not_called_what_stands_for_all_of_them(tmp_path):
    """Its answers would count twice in the R that the best head is chosen by. A domain is a file's name here, of
    prompts or of responses, whatever the lines say."""
    (tmp_path / "all.jsonl").write_text('{"prompt": "x", "domain": "own"}\n')
    (tmp_path / "mean.jsonl").write_text("[[1, 2], [3, 4, 5]]\n")
    for given in (["--prompts", str(tmp_path / "all.jsonl")], ["--responses", str(tmp_path / "mean.jsonl")]):
        with pytest.raises(UsageError, match=f"{given[1]}: .* is no name of a domain"):
            read_inputs(flags().parse_args(["--target", "t", "--out", "o", *given]))


@pytest.mark.slow
def test_a_head_learns_a_repeating_grammar_within_a_minute(tmp_path):
    """A random target whose layers say little: its next token is nearly a function of the last one, so its answers
    run into loops. Held-out R of the chain is about 1 before training and at least 3 after. Guards the whole command:
    answers, readings, labels, loss, schedule, validation, export. Seeds are fixed; only the time that a step takes
    varies, and a quarter of the steps of an idle core is enough."""
    torch.set_num_threads(1)
    config = tiny_target_config(vocab_size=64, max_position_embeddings=128)
    tensors = random_tensors(config)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.1
    directory = write_checkpoint(tmp_path / "target", tensors, config)
    target = load_target(directory, device="cpu")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 60, (256, 4), generator=generator).tolist()
    answer(target, prompts, tmp_path / "answers.jsonl", (), max_new_tokens=40)
    command = f"--target {directory} --responses {tmp_path / 'answers.jsonl'} --out {tmp_path / 'head'} --layers 1"
    trainer = prepare(flags().parse_args([*command.split(), "--minutes", "1", "--rate", "3e-3"]))
    trainer.run()
    start, end = trainer.state.curve[0]["R"]["all"], trainer.state.curve[-1]["R"]["all"]
    assert start["chain"] < 1.2
    assert end["chain"] >= 3
    head = load_draft(tmp_path / "head", device="cpu")
    rounds = Decoder(target, head).generate(prompts[0], method="dflash", max_new_tokens=24).round_lengths
    assert sum(rounds) / len(rounds) >= 2


def test_a_head_reads_the_layers_that_were_asked_for(tmp_path, capsys):
    """And a head to go on from has its own, which is said."""
    responses = tmp_path / "answers.jsonl"
    responses.write_text("".join(json.dumps([[1, number], [3, 4, 5, 6]]) + "\n" for number in range(3)))
    command = f"--target {write_tiny_target(tmp_path / 'target')} --responses {responses} --held-out 1"
    trainer = prepare(flags().parse_args([*command.split(), "--out", str(tmp_path / "a"), "--taps", "1,0", "--layers", "1"]))
    assert trainer.draft.taps == (1, 0) and not capsys.readouterr().err
    save_head(trainer.draft, tmp_path / "head", [])
    again = [*command.split(), "--out", str(tmp_path / "b"), "--init", str(tmp_path / "head"), "--taps", "1"]
    assert prepare(flags().parse_args(again)).draft.taps == (1, 0)
    assert "--taps: no effect with --init" in capsys.readouterr().err


@pytest.mark.parametrize("flags_given", ["--minutes 0", "--minutes nan", "--rate nan", "--rate 0"])
def test_budgets_that_train_nothing_are_refused(tmp_path, capsys, flags_given):
    command = f"--target nowhere --responses nothing --out {tmp_path / 'head'} {flags_given}"
    with pytest.raises(SystemExit) as stop:
        flags().parse_args(command.split())
    assert stop.value.code == 2
    flag, value = flags_given.split()
    rule = "must be a number above 0" + " and below 1" * (flag == "--rate")
    assert f"argument {flag}: {rule}, got {value!r} (see" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags_given",
    ["--layers 0", "--block 1", "--block 129", "--taps 1,1", "--held-out 0", "--max-new-tokens 1"],
)
def test_numbers_that_make_no_head_are_refused(flags_given):
    with pytest.raises(SystemExit) as stop:
        flags().parse_args(f"--target t --out o {flags_given}".split())
    assert stop.value.code == 2


@pytest.mark.parametrize(
    "flags_given, words",
    [
        ("", "nothing to learn from"),
        ("--responses {}/none.jsonl", "cannot read"),
        ("--prompts {}/none.jsonl", "cannot read"),
        ("--responses {}/few.jsonl", "too few with 8 of each file"),
        ("--target {}/empty --templates 2", "holds no config.json"),
        ("--init {}/nowhere --templates 9", "no such directory"),
        ("--responses {}/few.jsonl --held-out 1 --layers 1 --taps 1,2", "--taps 2: the target's layers are 0 to 1"),
        ("--responses {}/few.jsonl --held-out 1 --layers 3", "--layers 3: .* it has 2"),
        ("--responses {}/few.jsonl --held-out 1 --init {}/wide", "does not fit this target: its hidden size is 64"),
        ("--responses {}/few.jsonl --held-out 1 --out {}/few.jsonl/head", "is a file: name a directory"),
        ("--responses {}/few.jsonl --held-out 1 --out .", "give the directory a name of its own"),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(tmp_path, flags_given, words):
    """Nor the directory above the head's."""
    target = write_tiny_target(tmp_path / "target")
    write_tiny_draft(tmp_path / "wide", hidden_size=64)
    (tmp_path / "empty").mkdir()
    (tmp_path / "few.jsonl").write_text("[[1, 2], [3, 4, 5]]\n[[1, 3], [3, 4, 5]]\n")
    before = sorted(tmp_path.iterdir())
    command = f"--target {target} --out {tmp_path / 'runs' / 'head'} {flags_given.format(tmp_path, tmp_path)}"
    with pytest.raises(UserError, match=words):
        prepare(flags().parse_args(command.split()))
    assert sorted(tmp_path.iterdir()) == before


def test_one_prompt_that_is_answered_twice_leaves_none_to_train_on(tmp_path):
    command = few_responses(tmp_path)
    (tmp_path / "answers.jsonl").write_text(2 * "[[1, 2], [3, 4, 5]]\n")
    with pytest.raises(UserError, match="2 answers are too few with 1 of each file held out: see --held-out"):
        prepare(flags().parse_args(command.split()))


def test_templates_are_prompts_of_domains_of_their_own():
    arguments = flags().parse_args("--target t --out o --templates 9".split())
    assert read_inputs(arguments)[0] == {f"templates-{name}": texts for name, texts in template_prompts(9).items()}


def test_a_lack_of_memory_damages_no_checkpoint(tmp_path, target, monkeypatch):
    """To delete it would be the wrong way out."""
    trainer = small_trainer(tmp_path, target)
    trainer.save()
    monkeypatch.setattr(torch, "load", lambda *_, **how: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.resume()


def test_a_full_disk_at_a_checkpoint_is_told_in_one_line(tmp_path, target, monkeypatch):
    """Torch reports it as an error of its own; the checkpoint before stays whole."""
    trainer = small_trainer(tmp_path, target)
    trainer.save()
    before = trainer.checkpoint.read_bytes()

    def full(state, path):
        Path(path).write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed\nmore")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="cannot write .*checkpoint.pt: PytorchStreamWriter failed[^\n]*$"):
        trainer.save()
    assert trainer.checkpoint.read_bytes() == before


def test_answers_that_hold_every_token_leave_none_for_the_mask():
    with pytest.raises(UserError, match="all 4 tokens"):
        unused_token([Example((0, 1), (2, 3), "d")], 4)
    assert unused_token([Example((0, 1), (3,), "d")], 4) == 2


def test_a_checkpoint_of_another_head_or_none(tmp_path, target, capsys):
    """Another block has the same parameters, another number of layers has not; a file that is cut has none."""
    trainer = small_trainer(tmp_path, target)
    trainer.save()
    other = small_trainer(tmp_path, target)
    other.draft.config = replace(other.draft.config, block_size=other.draft.block_size // 2)
    with pytest.raises(UsageError, match="block 8.*block 4.*delete"):
        other.resume()
    state = torch.load(trainer.checkpoint, weights_only=True)
    for part in ("draft", "optimizer", "sampler", "progress"):
        torch.save(state | {part: {"nothing": 0}}, trainer.checkpoint)
        with pytest.raises(UserError, match="delete"):
            small_trainer(tmp_path, target).resume()
    torch.save({part: value for part, value in state.items() if part != "shape"}, trainer.checkpoint)
    with pytest.raises(UserError, match="delete"):
        small_trainer(tmp_path, target).resume()
    torch.save(state, trainer.checkpoint)
    whole = trainer.checkpoint.read_bytes()
    for length in (0, 100, len(whole) - 100):
        trainer.checkpoint.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged.*delete"):
            small_trainer(tmp_path, target).resume()


def talking_target(tmp_path, stop: list[int], template: str | None = None):
    """A tiny target with a byte tokenizer whose texts end at any of the tokens `stop`. -> target, tokenizer"""
    directory = write_tiny_target(tmp_path / "talking", eos_token_id=stop)
    write_byte_tokenizer(directory, *filter(None, [template]))
    return load_target(directory, device="cpu"), load_tokenizer(directory)


def test_prompts_in_the_targets_own_words(tmp_path):
    """Different ones, sampled after the template's opening, kept as they come: a resumed run asks the same ones and
    writes the rest. Guards prompts that hold the template or the token that ended them."""
    target, tokenizer = talking_target(tmp_path, [*range(0, 32), *range(128, 256)])
    assert before_user(tokenizer) == list(b"<user>")
    file = tmp_path / "own"
    few = own_prompts(target, tokenizer, 5, file)
    assert len(set(few)) == 5 and all(text and text.isascii() and text == text.strip() for text in few)
    lines = file.read_text()
    assert own_prompts(target, tokenizer, 5, file) == few and file.read_text() == lines
    more = own_prompts(target, tokenizer, len(lines.splitlines()) + 1, file)
    assert more[:5] == few and file.read_text().startswith(lines) and len(set(more)) == len(more)
    file.write_text(lines[:-3])  # a kill cut the last line
    again = own_prompts(target, tokenizer, len(lines.splitlines()) + 1, file)
    assert again[:5] == few and len(again) == len(set(again)) == len(more)
    assert [json.loads(line) for line in file.read_text().splitlines()][: len(again)] == again


def test_own_words_that_never_end_or_cannot_begin(tmp_path):
    target, tokenizer = talking_target(tmp_path, [])
    with pytest.warns(UserWarning, match="0 of 3 prompts"):
        assert own_prompts(target, tokenizer, 3, tmp_path / "own") == []
    _, tokenizer = talking_target(tmp_path, [], "{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(UserError, match="nothing before the user's words"):
        before_user(tokenizer)
