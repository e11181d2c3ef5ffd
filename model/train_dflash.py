"""Train a DFlash head for a target: python -m model.train_dflash --target T --own-prompts N --out DIR

The target answers the prompts, and the head learns to draft these answers: from the tap features before a position
and the token at it (the root), it drafts the L tokens after it. Every position of an answer is such an anchor, and one
pass trains many of them (model/train_head.py).

The loss at depth j has weight DECAY^(j-1), since a later token counts only if all before it were accepted. Embedding
and LM head are the target's and stay as they are. Progress is measured by R, the tokens a round commits, on held-out
answers.

Answers, readings and checkpoint are kept in `DIR.training` as they come, so the same command goes on where a killed run
stopped. DIR holds the best head so far, in the published format, with a model card. Products run in bfloat16 where the
machine is faster at it (any GPU, a CPU with matrix units), else in float32; weights, sums and the optimizer stay in
float32. On a GPU the pass is compiled. The target is never trained.
"""

from minicast.program import Parser, at_least, each_once, number, start

start(__name__)  # before anything slow is imported

import argparse
import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from minicast.command import guarded, note_no_effect
from minicast.prompts import EVERYTHING, domain_name, read_prompts
from minicast.record import Drafts
from minicast.replay import needed, rounds_of
from minicast.tree import RANK_CAP, top_ranked
from minicast.width import MAX_WIDTH
from model.device import device_name
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.files import check_directory, claim, digest, write_atomically
from model.hub import check_name
from model.linear import linear_layers
from model.load import load_target
from model.tokenizer import load_tokenizer
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
from model.train_head import SoftCrossEntropy, block_states, fresh_head, head_config, loaded_head, save_head
from model.train_prompts import own_prompts, template_prompts
from model.transformer import Target

BATCH = {"cpu": (4, 32), "cuda": (32, 32)}  # sequences in a step, and blocks of each
WARMUP = 0.03  # share of the budget over which the learning rate rises
FLOOR = 0.02  # share of the peak rate at which it begins and ends
BETAS = (0.9, 0.98)  # AdamW's decay of its running means of the gradient and its square
WEIGHT_DECAY = 0.01  # AdamW's, of matrices only
CLIP = 1.0  # largest norm of a step's gradient
VALIDATE_MINUTES = 6.0  # between validations, or a quarter of a shorter budget
SAVE_MINUTES = 2.0  # between checkpoints
WIDTH = 15  # N of the tree whose R is reported
OWN = "own-words"  # the domain of the prompts that the target wrote


@dataclass
class RunState:
    """How far a run has come.

    Attributes:
        step: number of updates made
        seconds: spent on training and validation since the run first began; the main thread's own CPU time, so that a
            machine that is suspended or busy with other work does not use up the budget
        predicted: number of tokens in the loss so far
        best: highest held-out R of the tree so far
        held_out: digest of the held-out prompts; with others, R cannot be compared
        curve: for each validation its minutes, steps and predicted, and R by domain and method
    """

    step: int = 0
    seconds: float = 0.0
    predicted: int = 0
    best: float = 0.0
    held_out: str = ""
    curve: list[dict] = field(default_factory=list)


class Trainer:
    """One run: the head, its optimizer, and what a checkpoint keeps of them."""

    def __init__(
        self,
        draft: DraftHead,
        target: Target,
        *,
        loss_head: LossHead,
        sampler: Sampler,
        held_out: list[Example],
        out: Path,
        minutes: float,
        rate: float,
        target_name: str,
    ):
        """Args:
            loss_head: the target's LM head, as the loss uses it
            sampler: draws the examples to train on
            held_out: examples to validate on
            out: where the best head goes
            minutes: the budget
            rate: peak learning rate
            target_name: what the model card calls the target
        """
        self.draft, self.target, self.loss_head, self.target_name = draft, target, loss_head, target_name
        self.sampler, self.held_out, self.out, self.budget, self.rate = sampler, held_out, out, minutes * 60, rate
        self.state = RunState()
        counts = Counter(token for example in sampler.examples for token in example.response)
        self.frequent = [token for token, _ in counts.most_common()]
        draft.requires_grad_(True)
        vectors = [p for p in draft.parameters() if p.ndim == 1]
        matrices = [p for p in draft.parameters() if p.ndim > 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)
        kind = target.device.type
        self.batch = BATCH[kind]
        self.autocast = torch.autocast(kind, torch.bfloat16, enabled=target.dtype == torch.bfloat16)
        self.block_states = torch.compile(block_states, dynamic=False) if kind == "cuda" else block_states

    @property
    def checkpoint(self) -> Path:
        """The file that `save` writes."""
        return checkpoint_of(self.out)

    @property
    def weights(self) -> Path:
        """The file of the best head's weights."""
        return self.out / "model.safetensors"

    def learning_rate(self) -> float:
        """Of the next step: a linear rise times a cosine down to FLOOR, both by the share of the budget used."""
        part = min(self.state.seconds / self.budget, 1.0)
        cosine = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * part)) / 2
        return self.rate * cosine * min(1.0, FLOOR + part / WARMUP)

    def step(self) -> tuple[float, float]:
        """One update. -> the weighted mean loss of a token, and R of the chain on this step's blocks."""
        depth = self.draft.block_size - 1
        batch = make_batch(self.sampler.draw(*self.batch), depth, self.loss_head, self.target.device)
        weights = batch.weights / batch.weights.sum()
        with self.autocast:
            states = self.block_states(self.draft, self.target, batch.features, batch.roots, batch.anchors)
            rows = (part.flatten(0, 2) for part in (batch.labels, batch.shares, weights))
            loss, top = SoftCrossEntropy.apply(states.flatten(0, 2), self.loss_head.weight, *rows)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), CLIP)
        self.optimizer.step()
        real = batch.weights > 0
        self.state.step += 1
        self.state.predicted += int(real.sum())
        hits = (top.view_as(real) == batch.labels[..., -1]) & real
        return loss.item(), 1 + hits.cumprod(-1).sum(-1).float().mean().item()

    def validate(self) -> None:
        """Measure R of chain and tree on the held-out answers, by domain and over all; save a head that is the best."""
        lengths: dict[str, dict[str, list[int]]] = {EVERYTHING: {"chain": [], "tree": []}}
        for example in self.held_out:
            with self.autocast:
                rounds = held_out_rounds(self.draft, self.target, example, self.sampler.cache.get(example))
            own = lengths.setdefault(example.domain, {"chain": [], "tree": []})
            for method, values in rounds.items():
                own[method] += values
                lengths[EVERYTHING][method] += values
        R = {domain: {m: sum(v) / len(v) for m, v in methods.items()} for domain, methods in lengths.items()}
        state = self.state
        minutes = round(state.seconds / 60, 1)
        state.curve.append({"minutes": minutes, "steps": state.step, "predicted": state.predicted, "R": R})
        self.out.mkdir(parents=True, exist_ok=True)
        if R[EVERYTHING]["tree"] > state.best or not self.weights.exists():
            state.best = R[EVERYTHING]["tree"]
            save_head(self.draft, self.out, self.frequent)
        write_atomically(self.out / "README.md", model_card(self))
        told = ", ".join(f"{domain} {r['chain']:.2f} / {r['tree']:.2f}" for domain, r in R.items())
        tell(f"minute {minutes}, {state.predicted} tokens predicted, R of chain / tree: {told}")

    def shape(self) -> str:
        """In words, what the head must have in common with the checkpoint that it goes on from."""
        config = self.draft.config
        sizes, taps = f"{config.hidden} and {config.intermediate}", ", ".join(map(str, config.taps))
        return f"{config.layers} layers of {sizes}, block {config.block_size}, taps {taps}"

    def save(self) -> None:
        """Write the checkpoint. UserError or OSError where that fails."""
        kept = {
            "shape": self.shape(),
            "mask_token_id": self.draft.mask_token_id,  # stays, even if files that join later hold it
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state(),
            "progress": dataclasses.asdict(self.state),
        }
        try:
            write_atomically(self.checkpoint, lambda path: torch.save(kept, path))
        except RuntimeError as error:  # as torch reports a full disk
            reason = str(error).partition("\n")[0]
            raise UserError(f"cannot write {self.checkpoint}: {reason}") from error

    def resume(self) -> None:
        """Go on from the checkpoint if there is one. UsageError if it is of another head, UserError if damaged."""
        if not self.checkpoint.exists():
            return
        way_out = f"to begin anew, delete {self.checkpoint} and move {self.out} away, answers are kept"
        try:
            kept = torch.load(self.checkpoint, map_location=self.target.device, weights_only=True)
            shape = kept["shape"]
            if shape == self.shape():
                self.draft.config = dataclasses.replace(self.draft.config, mask_token_id=kept["mask_token_id"])
                self.draft.load_state_dict(kept["draft"])
                self.optimizer.load_state_dict(kept["optimizer"])
                self.sampler.load_state(kept["sampler"])
                self.state = RunState(**kept["progress"])
        except Exception as error:  # a damaged file fails in many ways
            if "memory" in str(error):
                raise
            raise UserError(f"{self.checkpoint} is damaged: {way_out}") from error
        if shape != self.shape():
            raise UsageError(
                f"the checkpoint is of a head with {shape}, the flags ask for {self.shape()}: "
                f"give the same flags again; {way_out}"
            )
        tell(f"going on at minute {self.state.seconds / 60:.1f}")

    def run(self) -> None:
        """Train until the budget is used up. UserError or OSError where a file cannot be written."""
        state = self.state
        now = digest(repr(tuple(sorted(example.prompt for example in self.held_out))))[:20]
        if state.held_out != now or not self.weights.exists():  # a new run, new files, or no head any more
            self.save()  # first: a head without a checkpoint is taken for somebody else's
            state.held_out, state.best = now, 0.0
            self.validate()
        validate_every = min(VALIDATE_MINUTES * 60, self.budget / 4)
        due, saved = state.seconds + validate_every, state.seconds
        means = Means()
        while state.seconds < self.budget:
            began, predicted = time.thread_time(), state.predicted
            loss, chain = self.step()
            elapsed = time.thread_time() - began
            state.seconds += elapsed
            means.add(loss=loss, chain=chain, tokens=state.predicted - predicted, seconds=elapsed)
            bar(state.seconds / self.budget, f"step {state.step}, {means}", self.budget - state.seconds)
            if state.seconds >= min(due, self.budget):
                began = time.thread_time()
                self.validate()
                self.sampler.adopt()
                took = time.thread_time() - began
                state.seconds += took
                due = state.seconds + max(validate_every, 10 * took)  # at most a tenth of the time
                saved = -math.inf  # at once: resumed from before, a run would let a worse head replace the best
            if state.seconds >= min(saved + SAVE_MINUTES * 60, self.budget):
                self.save()
                saved = state.seconds
                if not sys.stderr.isatty():
                    tell(f"minute {saved / 60:.1f}, step {state.step}, {means}")
        tell(f"done: the best head is in {self.out}; try it with run.py --draft-model {self.out}")


# ---- held-out R ----


@torch.no_grad()
def held_out_rounds(draft: DraftHead, target: Target, example: Example, reading: Reading) -> dict[str, list[int]]:
    """The rounds in which the decoder would write this answer with this head: {"chain": [R, …], "tree": [R, …]}.

    Greedy decoding writes the same answer whatever is drafted, so the drafts alone decide what is accepted, and the
    target need not run.
    """
    response, depth = example.response, draft.block_size - 1
    ranked = []  # tokens and log q (L, RANK_CAP) of each place, from 32 places at a time: logits take memory
    for states in all_states(draft, target, example, reading).split(32):
        log_q = target.logits(states.flatten(0, 1)).float().log_softmax(-1)
        ranked.append([part.unflatten(0, (-1, depth)) for part in top_ranked(log_q, RANK_CAP)])
    drafts = Drafts(*(torch.cat(parts) for parts in zip(*ranked)))
    rounds = {}
    for method, width, rank_cap in ("chain", depth, 1), ("tree", WIDTH, RANK_CAP):
        trees = [drafts.tree(place, width, rank_cap) for place in range(len(response) - 1)]
        needs = [needed(tree, response[place + 1 :]) for place, tree in enumerate(trees)]
        rounds[method] = [step.R for step in rounds_of(needs, width)]
    return rounds


def all_states(draft: DraftHead, target: Target, example: Example, reading: Reading) -> Tensor:
    """Draft states (response - 1, L, H) at every place of the answer but the last, after which nothing comes."""
    roots = torch.tensor([example.response[:-1]], device=target.device)
    anchors = torch.arange(roots.shape[1], device=target.device)[None] + len(example.prompt)
    features = reading.features[None].to(target.device)
    parts = zip(roots.split(64, dim=1), anchors.split(64, dim=1))
    return torch.cat([block_states(draft, target, features, *part)[0] for part in parts])


# ---- reports ----


class Means:
    """Running means over about the last 50 steps."""

    def __init__(self):
        self.values: dict[str, float] = {}

    def add(self, **values: float) -> None:
        """Take in one step's values, by name."""
        for name, value in values.items():
            self.values[name] = value + 0.98 * (self.values.get(name, value) - value)

    def __str__(self) -> str:
        v = self.values
        return f"loss {v['loss']:.2f}, chain R {v['chain']:.2f}, {v['tokens'] / v['seconds']:.0f} tokens/s"


def bar(done: float, text: str, seconds_left: float | None = None) -> None:
    """Draw a progress bar if standard error is a terminal. done: from 0 to 1"""
    if sys.stderr.isatty():
        left = "" if seconds_left is None else f", {seconds_left / 60:.0f} min left"
        print(f"\r\x1b[K{'█' * round(20 * done):·<20} {text}{left}", end="", file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Print a line in place of the bar."""
    print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def model_card(trainer: Trainer) -> str:
    """The head's README: what it is, how it was trained, and R as training went on."""
    config, state = trainer.draft.config, trainer.state
    parameters = sum(p.numel() for p in trainer.draft.parameters()) / 1e6
    hardware, (sequences, anchors) = device_name(trainer.target.device), trainer.batch
    domains = list(state.curve[-1]["R"])
    rows = []
    for entry in state.curve:
        told = (entry["R"].get(domain) for domain in domains)  # none of a file that joined later
        R = (f"{r['chain']:.2f} / {r['tree']:.2f}" if r else "" for r in told)
        rows.append(f"| {entry['minutes']} | {entry['steps']} | {entry['predicted']} | {' | '.join(R)} |")
    return "\n".join([
        f"# {trainer.out.name}",
        "",
        f"A DFlash head for {trainer.target_name}: {config.layers} layers, block {config.block_size},"
        f" {parameters:.1f}M parameters, reads the outputs of target layers {', '.join(map(str, config.taps))}.",
        "",
        f"Trained by `python -m model.train_dflash` for {round(state.seconds / 60, 1):g} minutes on {hardware}:"
        f" {state.step} steps of {sequences} × {anchors} blocks, {state.predicted} predicted tokens, from"
        f" {len(trainer.sampler.examples)} greedy answers of the target.",
        "",
        f"R (tokens a round) on {len(trainer.held_out)} held-out answers, greedy, chain / tree of {WIDTH} nodes:",
        "",
        f"| minutes | steps | predicted tokens | {' | '.join(domains)} |",
        "|" + "---|" * (3 + len(domains)),
        *rows,
        "",
    ])  # fmt: skip


# ---- the command ----


def work_directory(out: Path) -> Path:
    """The directory of answers, readings and checkpoint."""
    return out.with_name(out.name + ".training")


def checkpoint_of(out: Path) -> Path:
    """The checkpoint of the run that trains the head in `out`."""
    return work_directory(out) / "checkpoint.pt"


def read_inputs(arguments: argparse.Namespace) -> tuple[dict[str, list[str]], list[Example]]:
    """The given prompts by domain, and the given responses.

    UsageError for none, for fewer than are held out, for a file that does not exist, and for a name that no domain may
    have; UserError for a file that cannot be read.
    """
    prompts: dict[str, list[str]] = {}
    for file in (*arguments.prompts, *arguments.responses):
        domain_name(file.stem, file)
    for file in arguments.prompts:  # files of one name, in different directories, are one domain
        prompts.setdefault(file.stem, []).extend(prompt.text for prompt in read_prompts([file], None))
    if arguments.templates:
        for domain, texts in template_prompts(arguments.templates).items():
            prompts.setdefault(f"templates-{domain}", []).extend(texts)
    responses = [example for file in arguments.responses for example in read_responses(file)]
    if not any(prompts.values()) and not responses and not arguments.own_prompts:
        raise UsageError("nothing to learn from: give --prompts, --own-prompts, --templates or --responses")
    counts = Counter(example.domain for example in responses)
    counts.update({name: len(texts) for name, texts in prompts.items()})
    counts[OWN] += arguments.own_prompts
    if max(counts.values()) <= arguments.held_out:  # known before hours of answering
        held_out_of = f"{arguments.held_out} of each file held out"
        raise UsageError(f"{counts.total()} prompts are too few with {held_out_of}: give more, or a smaller --held-out")
    return prompts, responses


def gather_answers(
    target: Target, arguments: argparse.Namespace, prompts: dict[str, list[str]], responses: list[Example]
) -> list[Example]:
    """The given responses, and the target's answers to the given prompts, which are written first.

    UsageError where the work directory is of a run with other settings. UserError for responses that are not of the
    target's vocabulary, where nothing is left to learn from, and as `load_tokenizer`, `own_prompts` and `answer`.
    """
    for example in responses:  # what `answer` writes needs no check
        if not example.prompt or not all(0 <= token < target.vocab_size for token in example.tokens):
            what = f"ids of the target's vocabulary of {target.vocab_size}"
            raise UserError(f"{example.domain}: every answer must be {what}, after a prompt of at least one")
    examples, work = list(responses), work_directory(arguments.out)
    if prompts or arguments.own_prompts:
        tokenizer = load_tokenizer(arguments.target)
    settings = {"target": arguments.target, "max_new_tokens": arguments.max_new_tokens}
    # These may change while there is no checkpoint: answers do not depend on them.
    begun = {"init": arguments.init, "held_out": arguments.held_out}
    claim(work, settings | begun if checkpoint_of(arguments.out).exists() else settings, begun)
    if count := arguments.own_prompts:
        written = lambda done, total: bar(done / total, f"{done} of {total} prompts in the target's own words")
        own = own_prompts(target, tokenizer, count, work / f"{OWN}.prompts", written)
        prompts = prompts | {OWN: [*prompts.get(OWN, ()), *own]}
    for domain, texts in prompts.items():
        file = work / f"{domain}.jsonl"

        def progress(done: int, total: int, domain=domain):
            bar(done / total, f"{domain}: {done} of {total} prompts answered")

        encoded = {tuple(tokenizer.encode_chat(text)) for text in texts}
        answer(target, list(encoded), file, tokenizer.stop_ids, arguments.max_new_tokens, progress=progress)
        examples += (example for example in read_responses(file) if example.prompt in encoded)
    if not examples:
        raise UserError("nothing to learn from: there is no prompt that the target could answer")
    examples = [example for example in examples if len(example.response) > 1]
    if not examples:
        raise UserError("nothing to learn from: every answer has fewer than two tokens")
    return examples


def faster_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 or float32, whichever `device` multiplies matrices in faster; a CPU is timed for a few milliseconds."""
    if device.type == "cuda":
        return torch.bfloat16

    def seconds(dtype: torch.dtype) -> float:
        # Small ones: some CPUs emulate bfloat16, slowly.
        x, w = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            x @ w
            times.append(time.perf_counter() - began)
        return min(times)

    return min(torch.float32, torch.bfloat16, key=seconds)


def unused_token(examples: list[Example], vocab_size: int) -> int:
    """The lowest token id that occurs in none of the examples, to stand for a position to be drafted. UserError where
    all occur."""
    used = {token for example in examples for token in example.tokens}
    unused = next((token for token in range(vocab_size) if token not in used), None)
    if unused is None:
        raise UserError(f"the answers hold all {vocab_size} tokens of the vocabulary, and a head needs one for itself")
    return unused


def check_free(out: Path) -> None:
    """UsageError where `out` holds a head or a card, and there is no run to go on with."""
    if checkpoint_of(out).exists():
        return
    for name in ("model.safetensors", "config.json", "README.md"):
        if (out / name).exists():
            raise UsageError(f"--out {out} holds {name} of another head: move it away, or name another directory")


def prepare(arguments: argparse.Namespace) -> Trainer:
    """Do everything up to the first step. UsageError or UserError for whatever the flags or files get wrong."""
    if not arguments.out.name:
        raise UsageError(f"--out {arguments.out}: give the directory a name of its own")
    check_directory(arguments.out, "--out")
    check_free(arguments.out)
    check_name(arguments.target, "target")
    if arguments.init is not None:
        check_name(arguments.init, "draft")
        note_no_effect("train_dflash", sorted(arguments.changed & {"layers", "block", "taps"}), "with --init")
    given = read_inputs(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(arguments.target, faster_dtype(device), device, pack=False)
    # Packing drops the plain weights, so what training needs of them is taken first.
    lm_head = target.lm_head.weight.detach()
    if arguments.init is not None:
        draft = loaded_head(arguments.init, target)
    else:
        draft = fresh_head(head_config(target, arguments.layers, arguments.block, arguments.taps), target)
    for layer in linear_layers(target):
        layer.pack()

    examples = gather_answers(target, arguments, *given)
    if arguments.init is None:
        draft.config = dataclasses.replace(draft.config, mask_token_id=unused_token(examples, target.vocab_size))
    train, held_out = split(examples, arguments.held_out)
    if not train:
        held_out_of = f"{arguments.held_out} of each file held out: see --held-out"
        raise UserError(f"{len(examples)} answers are too few with {held_out_of}")
    loss_head = LossHead.of(lm_head, {token for example in train for token in example.response})
    readings = ReadingCache(work_directory(arguments.out) / "readings", target, draft.taps, arguments.target)
    return Trainer(
        draft, target, loss_head=loss_head, sampler=Sampler(train, readings), held_out=held_out, out=arguments.out,
        minutes=arguments.minutes, rate=arguments.rate, target_name=arguments.target,
    )


def flags() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(prog="python -m model.train_dflash", description="Train a DFlash head.")
    minutes = number("a number above 0", lambda value: 0 < value < math.inf)
    block = number(f"a whole number from 2 to {MAX_WIDTH + 1}", lambda value: 2 <= value <= MAX_WIDTH + 1, int)
    rate = number("a number above 0 and below 1", lambda value: 0 < value < 1)
    parser.add_argument("--target", required=True, help="directory, hub id or known pair's name")
    parser.add_argument("--prompts", nargs="+", type=Path, default=[],
                        help="JSONL files of prompts, which the target answers first")
    parser.add_argument("--own-prompts", type=at_least(0), default=0, metavar="N",
                        help="prompts in the target's own words, of a chat model")
    parser.add_argument("--templates", type=at_least(0), default=0, metavar="N",
                        help="prompts from each of the built-in sets of templates")
    parser.add_argument("--responses", nargs="+", type=Path, default=[],
                        help="JSONL files of [prompt ids, response ids]")
    parser.add_argument("--out", type=Path, required=True, help="the head's directory; OUT.training holds the rest")
    parser.add_argument("--minutes", type=minutes, default=60.0,
                        help="of training, not counting the answering of prompts; default: %(default)g")
    parser.add_argument("--init", help="a head to go on from; default: start at the target's last layers")
    parser.add_argument("--layers", type=at_least(1), default=3, help="of the head; default: %(default)s")
    parser.add_argument("--block", type=block, default=8,
                        help="positions drafted in one pass, the root's included; default: %(default)s")
    parser.add_argument("--taps", type=each_once(0), default=[], metavar="I,I,...",
                        help="target layers that the head reads, from 0; default: five, evenly spread")
    parser.add_argument("--rate", type=rate, default=1.2e-3,
                        help="peak learning rate; with --init, give about half of the default, %(default)s")
    parser.add_argument("--max-new-tokens", type=at_least(2), default=160, help="of each answer; default: %(default)s")
    parser.add_argument("--held-out", type=at_least(1), default=8,
                        help="answers of each file kept for validation; default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags and train. -> the exit code"""
    arguments = flags().parse_args(argv)
    return guarded("train_dflash", lambda: train(arguments), "the same command goes on with what it has kept")


def train(arguments: argparse.Namespace) -> int:
    """Prepare, go on from a checkpoint if there is one, and train. -> 0"""
    trainer = prepare(arguments)
    trainer.resume()
    trainer.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
