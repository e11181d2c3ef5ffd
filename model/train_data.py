"""What a DFlash head learns from: the target's own answers, and what the target computes as it reads them.

There are three steps. Each can be resumed, so a run may be killed at any moment:

1. prompts: from JSONL files, from templates, or written by the target itself, see model/train_prompts.py
2. responses: the target's greedy answers, in a JSONL file of [prompt ids, response ids]. Only the target's own text
   will do: the head has to say what the target says next, not what somebody else would
3. readings: one pass of the target over each answer gives the tap features that the head reads, and the target's most
   probable tokens at each position, from which it learns. Each answer's reading is kept in a file of its own

Batches are made from these. Each file of prompts or responses is a domain: training draws from all domains, and
held-out R is reported for each. The label of a position is half the token that came and half what the target found
probable there. The first half is what greedy acceptance asks for; the second says how sure the target was, and a tree
ranks by that. The softmax of the loss runs only over tokens that occur in the answers.

Symbols: B sequences, L block depth, T positions, H hidden size, F = taps·H, V vocabulary, V' tokens of the loss. Other
dimensions are spelled out. A place is an index into a response, and an anchor is the same position in the whole
sequence.
"""

import json
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.errors import UserError
from model.files import Progress, digest, open_tensors, read_text, save_tensors, write_atomically
from model.transformer import KVCache, Target, Window

LABELS = 32  # most probable tokens kept at each position
HARD = 0.5  # share of the label that goes to the token that came
DECAY = 0.75  # weight of a depth over that of the depth before: a token counts only if all before it were accepted
AT_ONCE = 40_000  # positions in one batch of answers: with SmolLM2 in float32 they take 1.8 GB
PAD = 64  # contexts are padded to a multiple of this, so that a compiled pass meets few shapes


@dataclass(frozen=True)
class Example:
    """One answer of the target.

    Attributes:
        prompt: the token ids that the target saw, chat template included
        response: the token ids that it answered, EOS included if reached
        domain: the name of the file it came from
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    domain: str

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.response


def read_lines(file: str | Path) -> list:
    """The JSON values of a JSONL file; a last line that a kill cut short is left out. UsageError for no such file,
    UserError for one that cannot be read or is not JSONL."""
    lines = read_text(file).split("\n")
    if lines[-1] and not _is_json(lines[-1]):
        lines.pop()
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError) as error:  # no JSON, or nested too deep
        raise UserError(f"{file} cannot be read as JSONL ({error}): one JSON value a line is expected") from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except RecursionError:  # not cut short, but nested too deep to be read
        return True
    except ValueError:
        return False
    return True


def read_responses(file: str | Path) -> list[Example]:
    """The answers in a JSONL file of [prompt ids, response ids]. Raises as `read_lines`, and UserError for a line of
    another form."""
    examples = []
    for number, line in enumerate(read_lines(file), 1):
        try:
            prompt, response = map(tuple, line)
            if not all(type(token) is int for token in prompt + response):
                raise TypeError("an id is a whole number")
        except (TypeError, ValueError) as error:
            raise UserError(f"{file}, line {number}: not [prompt ids, response ids]") from error
        examples.append(Example(prompt, response, Path(file).stem))
    return examples


@torch.no_grad()
def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    file: str | Path,
    stop_ids: Iterable[int],
    max_new_tokens: int = 160,
    progress: Progress | None = None,
) -> None:
    """Append to `file` the target's greedy answers to those `prompts` (token ids) that it holds no answer to yet.

    Prompts of similar length share a batch, of as many as have AT_ONCE positions with their answers. Raises as
    `read_responses`.
    """
    file = Path(file)
    whole = read_responses(file) if file.exists() else []
    lines = "".join(answer_line(example.prompt, example.response) for example in whole)
    write_atomically(file, lines)  # without a line that was cut short
    answered = {example.prompt for example in whole}
    fitting = {tuple(prompt) for prompt in prompts if len(prompt) + max_new_tokens <= target.context}
    if lost := sum(len(prompt) + max_new_tokens > target.context for prompt in prompts):
        left_out = f"{lost} of {len(prompts)} prompts are left out"
        warnings.warn(f"{left_out}: with {max_new_tokens} new tokens they exceed the context of {target.context}")
    todo = sorted(fitting - answered, key=lambda prompt: (len(prompt), prompt))
    done, total, batches = len(answered), len(answered) + len(todo), []
    while todo:
        rows = max(AT_ONCE // (len(todo[-1]) + max_new_tokens), 1)
        batches.append(todo[-rows:])
        del todo[-rows:]
    random.Random(0).shuffle(batches)  # so that an interrupted run leaves answers to prompts of all lengths
    for rows in batches:
        responses = continue_batch(target, rows, set(stop_ids), max_new_tokens)
        with open(file, "a", encoding="utf-8") as out:
            out.writelines(map(answer_line, rows, responses))
        done += len(rows)
        if progress:
            progress(done, total)


def answer_line(prompt: Sequence[int], response: Sequence[int]) -> str:
    """One line of a responses file."""
    return json.dumps([list(prompt), list(response)]) + "\n"


def likeliest(logits: Tensor) -> Tensor:
    """logits (B, V) -> the token (B,) with the highest logit in each row."""
    return logits.max(-1).indices  # in bfloat16 on a CPU, `argmax` takes five times as long


@torch.no_grad()
def continue_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    stop: set[int],
    limit: int,
    choose: Callable[[Tensor], Tensor] = likeliest,
) -> list[list[int]]:
    """Up to `limit` tokens after each of B prompts; a response that a token of `stop` ended includes that token.

    Prompts are padded on the left. Rotary positions are relative, so one position for each column serves all rows. Rows
    that have ended leave the batch as soon as they are a quarter of it.

    choose: logits (B, V) -> tokens (B,)
    """
    device, width = target.device, max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    first = torch.tensor([width - len(p) for p in prompts], device=device)  # (B,) the first column that is not padding
    cache = KVCache(target.config, width + limit, target.dtype, device, len(prompts))
    columns = torch.arange(width + limit, device=device)
    visible = columns >= first[:, None, None, None]  # (B, 1, 1, S)
    own = torch.eye(width, dtype=torch.bool, device=device)  # padding sees itself: a softmax needs something
    causal = columns[:width, None] >= columns[:width]
    mask = visible[..., :width] & causal | own
    hidden, _ = target(padded, cache, Window(columns[:width], columns[:width], mask, width))
    responses = [[] for _ in prompts]
    rows = list(responses)  # those of the batch, None once they have ended
    for live in range(width + 1, width + limit + 1):
        tokens = choose(target.logits(hidden[:, -1]))
        for row, token in enumerate(tokens.tolist()):
            if rows[row] is not None:
                rows[row].append(token)
                if token in stop:
                    rows[row] = None
        kept = [row for row, response in enumerate(rows) if response is not None]
        if not kept or live == width + limit:
            break
        if len(kept) <= 0.75 * len(rows):
            index = torch.tensor(kept, device=device)
            rows, tokens, visible = [rows[row] for row in kept], tokens[index], visible[index]
            cache.data = cache.data[:, :, index]
            cache.layers = [(layer[0], layer[1]) for layer in cache.data]
        slot = columns[live - 1 : live]
        hidden, _ = target(tokens[:, None], cache, Window(slot, slot, visible[..., :live], live))
    return responses


@dataclass(frozen=True)
class Reading:
    """What the target computed as it read the T tokens of prompt and response.

    Attributes:
        features: (T, F) bfloat16, outputs of the tap layers
        label_ids: (response, labels) int32, the tokens that the target found most probable at each response position
        label_probs: (response, labels) float16, their probabilities
    """

    features: Tensor
    label_ids: Tensor
    label_probs: Tensor


class ReadingCache:
    """Readings by one target, each computed when it is first asked for and then kept in a file.

    `identity` names the target, on which a reading depends besides its tokens and the taps.
    """

    def __init__(self, directory: str | Path, target: Target, taps: Sequence[int], identity: str):
        self.directory, self.target, self.taps = Path(directory), target, tuple(taps)
        self.identity = f"{identity} {self.taps} {LABELS}"
        self.directory.mkdir(parents=True, exist_ok=True)

    def path(self, example: Example) -> Path:
        """The file that keeps the reading of `example`."""
        key = f"{self.identity} {len(example.prompt)} {example.tokens}"
        return self.directory / f"{digest(key)[:20]}.safetensors"

    def __contains__(self, example: Example) -> bool:
        return self.path(example).exists()

    def get(self, example: Example) -> Reading:
        """The reading of `example`, on the CPU. Raises as `save_tensors`."""
        if example not in self:
            reading = read(self.target, example, self.taps)
            save_tensors(self.path(example), vars(reading))
        with open_tensors(self.path(example)) as file:
            return Reading(**{name: file.get_tensor(name) for name in file.keys()})


@torch.no_grad()
def read(target: Target, example: Example, taps: Sequence[int]) -> Reading:
    """One pass of the target over prompt and response, its results brought to the CPU."""
    hidden, features = target.read(example.tokens, taps)
    rows = hidden[len(example.prompt) - 1 : -1]  # the row before a position predicts it
    top = torch.softmax(target.logits(rows).float(), -1).topk(min(LABELS, target.vocab_size))
    return Reading(features.bfloat16().cpu(), top.indices.int().cpu(), top.values.half().cpu())


# ---- batches ----


@dataclass(frozen=True)
class LossHead:
    """The LM head's rows for those tokens that the loss runs over.

    Attributes:
        weight: (V', H) frozen
        row: (V,) int64, each token's row in `weight`, or -1
    """

    weight: Tensor
    row: Tensor

    @classmethod
    def of(cls, weight: Tensor, tokens: set[int]) -> "LossHead":
        """The rows of `tokens` in an LM head (V, H)."""
        kept = torch.tensor(sorted(tokens))
        row = torch.full((len(weight),), -1)
        row[kept] = torch.arange(len(kept))
        return cls(weight.detach()[kept.to(weight.device)], row)


@dataclass(frozen=True)
class Batch:
    """The blocks of one step.

    Attributes:
        features: (B, T, F) bfloat16, 0 after a sequence's end
        roots, anchors: (B, anchors) int64, token id and position of each block's root
        labels: (B, anchors, L, labels + 1) int64, rows of the loss head; the last is the token that came
        shares: (B, anchors, L, labels + 1), the share of each in the label
        weights: (B, anchors, L), 0 past the end of an answer
    """

    features: Tensor
    roots: Tensor
    anchors: Tensor
    labels: Tensor
    shares: Tensor
    weights: Tensor


def make_batch(items: Sequence[tuple[Example, Reading, Tensor]], depth: int, head: LossHead, device) -> Batch:
    """Of each (example, reading, places), the blocks with roots at `places` (anchors,) of the response."""
    length = max(len(example.prompt) + int(places.max()) for example, _, places in items)
    length = -(-length // PAD) * PAD
    columns = {name: [] for name in ("features", "roots", "anchors", "labels", "shares", "weights")}
    for example, reading, places in items:
        response = torch.tensor(example.response)
        soft_rows = head.row[reading.label_ids.long()]  # (response, labels)
        soft = reading.label_probs.float() * (soft_rows >= 0)
        soft *= (1 - HARD) / soft.sum(-1, keepdim=True).clamp_min(1e-6)
        rows = torch.cat((soft_rows.clamp_min(0), head.row[response][:, None]), -1)
        shares = torch.cat((soft, 1 - soft.sum(-1, keepdim=True)), -1)
        ahead = places[:, None] + torch.arange(1, depth + 1)  # (anchors, L)
        inside = ahead < len(response)
        ahead = ahead.clamp_max(len(response) - 1)
        known = reading.features[:length]
        columns["features"].append(F.pad(known, (0, 0, 0, length - len(known))))
        columns["roots"].append(response[places])
        columns["anchors"].append(places + len(example.prompt))
        columns["labels"].append(rows[ahead])
        columns["shares"].append(shares[ahead])
        columns["weights"].append(DECAY ** torch.arange(depth) * inside)
    return Batch(**{name: torch.stack(parts).to(device) for name, parts in columns.items()})


class Sampler:
    """Draws sequences and anchors.

    A domain is drawn in proportion to the square root of its size, so that a large one does not drown the others and a
    small one is not learnt by heart. The anchors of a sequence are dealt from a shuffled deck, so that none comes twice
    before all have come once. Only sequences that have been read are drawn, and one more is read at every step, so that
    training need not wait until all are read, and does not learn a few by heart.
    """

    def __init__(self, examples: list[Example], cache: ReadingCache):
        self.examples, self.cache = examples, cache
        self.waiting = list(range(len(examples)))  # numbers of examples without a reading
        self.pool: dict[str, list[int]] = {}  # numbers of examples with a reading, by domain
        self.decks: dict[str, list[int]] = {}  # places left to deal, by the name of the reading's file
        self.random = random.Random(0)
        self.adopt()

    def adopt(self) -> None:
        """Add every sequence whose reading is on disk to the pool."""
        ready = [number for number in self.waiting if self.examples[number] in self.cache]
        for number in ready:
            self._join(number)

    def _join(self, number: int) -> None:
        self.waiting.remove(number)
        self.pool.setdefault(self.examples[number].domain, []).append(number)

    def draw(self, sequences: int, anchors: int) -> list[tuple[Example, Reading, Tensor]]:
        """As many sequences, each with its reading and places (anchors,) in its response. Raises as
        `ReadingCache.get`."""
        if self.waiting:
            self.cache.get(self.examples[self.waiting[0]])
            self._join(self.waiting[0])
        domains = sorted(self.pool)
        drawn = self.random.choices(domains, [len(self.pool[domain]) ** 0.5 for domain in domains], k=sequences)
        return [self._deal(self.random.choice(self.pool[domain]), anchors) for domain in drawn]

    def _deal(self, number: int, anchors: int) -> tuple[Example, Reading, Tensor]:
        example = self.examples[number]
        deck = self.decks.setdefault(self.cache.path(example).stem, [])
        while len(deck) < anchors:
            fresh = list(range(len(example.response) - 1))  # after the last token comes none
            self.random.shuffle(fresh)
            deck[:0] = fresh
        return example, self.cache.get(example), torch.tensor([deck.pop() for _ in range(anchors)])

    def state(self) -> dict:
        """What a checkpoint keeps of it; the pool is found on disk again."""
        return {"decks": self.decks, "random": self.random.getstate()}

    def load_state(self, state: dict) -> None:
        """Go on from what `state` gave."""
        self.decks = state["decks"]
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))


def by_domain(examples: list[Example]) -> dict[str, list[Example]]:
    """The examples of each domain, in their order."""
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.domain, []).append(example)
    return groups


def interleave(examples: list[Example]) -> list[Example]:
    """The examples in a fixed shuffled order, any stretch of which holds all domains in proportion."""
    placed = []
    for group in by_domain(examples).values():
        random.Random(0).shuffle(group)
        placed += [((index + 0.5) / len(group), example) for index, example in enumerate(group)]
    return [example for _, example in sorted(placed, key=lambda pair: pair[0])]


def split(examples: list[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and the examples of `held_out` prompts of each domain to validate on.

    The prompts themselves decide, not their order, so that none moves from training to validation when others join.
    """
    ordered, apart = interleave(examples), set()
    for group in by_domain(examples).values():
        prompts = {example.prompt for example in group}
        apart.update(sorted(prompts, key=lambda prompt: digest(repr((prompt,))))[:held_out])
    kept = [example for example in ordered if example.prompt not in apart]
    return kept, [example for example in ordered if example.prompt in apart]
