"""What the drafter says at every position of greedy answers, recorded once for `replay`.

The target answers all prompts in batches, the drafter drafts at every position of the answers, many blocks in a pass,
and the best tokens of each depth are kept: a directory with the answers, and a file of drafts for each prompt.

Symbols: T tokens of an answer, b pending root, L block depth, A positions drafted at. A round can start at T - 1
positions, since the last token of an answer is never a root.
"""

import argparse
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from minicast.command import Checkpoints, Placement
from minicast.prompts import read_prompts
from minicast.tree import Tree, ranked_tree, top_ranked
from model import hub, train_data
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.files import SETTINGS, claim, claimed, digest, open_tensors, save_tensors
from model.transformer import KVCache, Target, Window

RANKS = 32   # tokens kept at each depth
BLOCKS = 32  # blocks drafted in one pass: bounds the memory of their logits


@dataclass(frozen=True)
class Drafts:
    """What the drafter said at A positions, best first.

    Attributes:
        tokens: (A, L, ranks) int32
        log_q: (A, L, ranks) float32
    """

    tokens: Tensor
    log_q: Tensor

    @property
    def depth(self) -> int:
        """L."""
        return self.tokens.shape[1]

    def tree(self, position: int, width: int, rank_cap: int) -> Tree:
        """The best-first tree of a round there."""
        return ranked_tree(self.tokens[position, :, :rank_cap], self.log_q[position, :, :rank_cap], width)


@dataclass(frozen=True)
class Recording:
    """One greedy answer, and the drafts at every position of it where a round can start.

    Attributes:
        domain: of the prompt
        answer: T token ids
        drafts: of the whole block, T - 1 positions; position i is the round with b = answer[i]
        short: the same from the drafter run on half its block, with fewer masks (paper, Table 15)
    """

    domain: str
    answer: list[int]
    drafts: Drafts
    short: Drafts

    def save(self, path: Path) -> None:
        """Write a whole file or none."""
        tensors = {"answer": torch.tensor(self.answer, dtype=torch.int64)}
        for name in ("drafts", "short"):
            tensors |= {f"{name}.{field}": tensor for field, tensor in vars(getattr(self, name)).items()}
        save_tensors(path, tensors, {"domain": self.domain})

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """UserError for a file that is truncated, not from here, or may not be read."""
        try:
            with open_tensors(path) as file:
                def drafts(name: str) -> Drafts:
                    return Drafts(file.get_tensor(f"{name}.tokens"), file.get_tensor(f"{name}.log_q"))

                answer = file.get_tensor("answer").tolist()
                return cls(file.metadata()["domain"], answer, drafts=drafts("drafts"), short=drafts("short"))
        except (SafetensorError, OSError, TypeError, KeyError) as error:
            raise UserError(f"{path} is damaged ({error}): delete it, and it is recorded again") from error


@torch.no_grad()
def draft_answer(
    target: Target, draft: DraftHead, prompt_ids: Sequence[int], answer: Sequence[int], domain: str = ""
) -> Recording:
    """Draft at every position of the target's own greedy answer. domain: only stored"""
    tokens = torch.tensor([*prompt_ids, *answer], device=target.device)
    _, features = target.read(tokens[:-1], draft.taps)
    anchors = torch.arange(len(prompt_ids), len(tokens) - 1, device=target.device)
    sizes = (draft.block_size, max(draft.block_size // 2, 2))
    drafts = [draft_at(target, draft, features[None], tokens, anchors, size) for size in sizes]
    return Recording(domain, list(answer), *drafts)


def draft_at(
    target: Target, draft: DraftHead, features: Tensor, tokens: Tensor, anchors: Tensor, size: int
) -> Drafts:
    """Draft a block of `size` tokens at each of the positions `anchors` (A,), BLOCKS of them in a pass.

    features (1, P, F) of the text's first P positions; tokens (P + 1,) int64, the text. A block sees the
    features before its root and itself, just as if it were alone.
    """
    prefix, device = features.shape[1], tokens.device
    cache = KVCache(draft.config, prefix + BLOCKS * size, target.dtype, device)
    draft.extend(features, cache, torch.arange(prefix, device=device))
    ranks = min(RANKS, target.vocab_size)
    parts = [(torch.empty(0, size - 1, ranks, dtype=torch.int32), torch.empty(0, size - 1, ranks))]
    for first in range(0, len(anchors), BLOCKS):
        roots = anchors[first : first + BLOCKS]
        log_q = draft_blocks(target, draft, cache, prefix, tokens[roots], roots, size)
        ranked = [part.unflatten(0, (len(roots), -1)).cpu() for part in top_ranked(log_q, ranks)]
        parts.append((ranked[0].int(), ranked[1]))
    return Drafts(*(torch.cat(column) for column in zip(*parts)))


def draft_blocks(
    target: Target, draft: DraftHead, cache: KVCache, prefix: int, roots: Tensor, anchors: Tensor, size: int
) -> Tensor:
    """One pass over A blocks with roots (A,) at positions `anchors` (A,) -> log q (A · L, V), blocks in turn.

    cache: the drafter's, slots < prefix hold the text; the blocks go to the slots behind it.
    """
    count, device = len(roots), roots.device
    blocks = torch.full((count, size), draft.mask_token_id, device=device)
    blocks[:, 0] = roots
    offsets = torch.arange(size, device=device)
    block = torch.arange(count, device=device).repeat_interleave(size)  # of each row
    before_root = torch.arange(prefix, device=device) < anchors[block][:, None]
    mask = torch.cat((before_root, block[:, None] == block), dim=1)
    slots = prefix + torch.arange(count * size, device=device)
    positions = (anchors[:, None] + offsets).flatten()
    window = Window(slots, positions, mask, live=prefix + count * size)
    hidden = draft(blocks.flatten()[None], cache, window, target)[0]  # (A · size - 1, H): not the first row
    masked = block * size + offsets.repeat(count) - 1
    hidden = hidden[masked[offsets.repeat(count) > 0]]
    return draft.log_q(hidden, target)


def record_prompts(arguments: argparse.Namespace) -> None:
    """Record what the directory does not hold yet, so that a killed run resumes where it was.

    Answers are the target's and stay when the head changes. Drafts are one file a prompt, named after the head.
    """
    prompts = read_prompts(arguments.prompts, arguments.limit)
    placement = Placement.choose(arguments.device, arguments.dtype)
    checkpoints = Checkpoints.of(arguments.model, arguments.draft_model, placement.device, drafts=True)
    head, tokenizer = head_digest(checkpoints.draft), checkpoints.tokenizer()
    target, draft = checkpoints.load(placement)  # before anything is written: both names exist, and fit
    claim(
        arguments.out,
        {
            "target": checkpoints.target,
            "weights": hub.source(checkpoints.target, "target"),
            "placement": str(placement),
            "max_new_tokens": arguments.max_new_tokens,
        },
        {"draft": hub.source(checkpoints.draft, "draft"), "head": head},
    )
    domains, elsewhere = {}, 0
    for prompt in prompts:
        elsewhere += domains.setdefault(tuple(tokenizer.encode_chat(prompt.text)), prompt.domain) != prompt.domain
    if elsewhere:
        warnings.warn(f"{elsewhere} of {len(prompts)} prompts are of another domain, too: they count in the first")
    file = arguments.out / "answers.jsonl"
    with tqdm(total=len(domains), desc="answering", unit="prompt", disable=None) as bar:
        train_data.answer(
            target, list(domains), file, tokenizer.stop_ids, arguments.max_new_tokens,
            progress=lambda done, total: bar.update(done - bar.n),
        )
    examples = [example for example in train_data.read_responses(file) if example.prompt in domains]
    for example in tqdm(examples, "drafting", unit="prompt", disable=None):
        path = arguments.out / f"{head[:8]}-{digest(str(example.prompt))[:16]}.safetensors"
        if not path.exists():
            draft_answer(target, draft, example.prompt, example.response, domains[example.prompt]).save(path)
        elif (recording := Recording.load(path)).domain != domains[example.prompt]:  # the prompt file was renamed
            replace(recording, domain=domains[example.prompt]).save(path)


def head_digest(name: str) -> str:
    """SHA-256 of the head's weights, as a head that is trained further keeps its name."""
    found = hashlib.sha256()
    for file in sorted(hub.resolve(name, "draft").glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def read_recordings(directory: Path) -> tuple[dict, list[Recording]]:
    """The settings, and every answer with rounds that their head drafted, in the files' order.

    If the head drafted only some of the answers, after a kill or for fewer prompts, a line says so.
    """
    settings = claimed(directory)
    if settings is None or "head" not in settings:
        raise UsageError(f"{directory} holds no recorded rounds: run without --analyse first")
    kinds = {"head": str, "target": str, "draft": str, "max_new_tokens": int}
    if not all(isinstance(settings.get(name), kind) for name, kind in kinds.items()):
        raise UserError(f"{directory / SETTINGS} is damaged: delete it, and run without --analyse")
    files = sorted(directory.glob(f"{settings['head'][:8]}-*.safetensors"))
    recordings = [recording for recording in map(Recording.load, files) if len(recording.answer) > 1]
    if not recordings:
        raise UserError(f"{directory} holds no recorded rounds: give prompts that fit the context, and no --analyse")
    answered = len(train_data.read_responses(directory / "answers.jsonl"))
    if len(files) < answered:
        rest = "run without --analyse, with all prompts, for the rest"
        warnings.warn(f"{len(files)} of {answered} answers in {directory} are drafted, figures are of these: {rest}")
    return settings, recordings
