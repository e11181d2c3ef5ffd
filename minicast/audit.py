"""Whether answers are the target's own (paper, Appendix D.2).

Methods round differently, since a product over n rows adds up in another order than one over a single row. So where
two texts differ, or a token is not the target's best, the gap between the scores says whether rounding explains it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from minicast.answer import Options
from minicast.figures import Departure, Record
from minicast.prompts import Question
from minicast.sampling import gumbel_noise, shape_logits
from minicast.table import markdown
from model.transformer import Target

NEAR_TIE = 1e-3  # largest top-two gap that rounding may flip in float32; a departure at a larger one is a bug
AUDIT_BOUNDS = {torch.float32: NEAR_TIE, torch.bfloat16: 0.25}  # largest gap that a greedy token may have


def first_departure(
    target: Target, prompt_ids: Sequence[int], reference: list[int], answer: list[int], options: dict
) -> Departure | None:
    """Where `answer` leaves `reference`; options: how tokens were chosen

    The stochastic verifier draws other tokens from the same law: its samples are not compared.
    """
    params = Options(**options).sampling
    if answer == reference or (not params.greedy and options.get("verifier") == "stochastic"):
        return None
    shared = 0
    while shared < min(len(reference), len(answer)) and reference[shared] == answer[shared]:
        shared += 1
    expected, got = [tokens[shared] if shared < len(tokens) else None for tokens in (reference, answer)]
    prefix = [*prompt_ids, *reference[:shared]]
    scores = next_scores(target, prefix, 1)
    if not params.greedy:
        position = torch.tensor([len(prefix)], device=scores.device)
        scores = shape_logits(scores, params) + gumbel_noise(params.seed, position, scores.shape[1])
    best, second = scores[0].topk(2).values.tolist()
    return Departure(shared, expected, got, best - second)


def is_failure(departure: Departure | None, dtype: torch.dtype) -> bool:
    """Whether rounding cannot explain this departure. In half precision it may always, so nothing is a failure there."""
    return departure is not None and dtype == torch.float32 and departure.gap > NEAR_TIE


@torch.no_grad()
def next_scores(target: Target, token_ids: Sequence[int], count: int) -> Tensor:
    """The target's logits after each of the last `count` ids, by one uncached pass: (count, V) float32."""
    hidden, _ = target.read(token_ids)
    return target.logits(hidden[-count:]).float()


# The audit of greedy answers

def audit(target: Target, prompt_ids: Sequence[int], answer: Sequence[int]) -> list[Departure]:
    """Where a greedy answer's token is not the target's best, given all before it; gap: by how much.

    This uses no method, cache or tree, so it also finds faults that all methods share.
    """
    if not answer:
        return []
    scores = next_scores(target, [*prompt_ids, *answer[:-1]], len(answer))
    best, expected = scores.max(1)
    gaps = best - scores.gather(1, torch.tensor(answer, device=scores.device)[:, None])[:, 0]  # (len(answer),)
    places = gaps.nonzero()[:, 0].tolist()
    return [Departure(place, int(expected[place]), answer[place], float(gaps[place])) for place in places]


@dataclass(frozen=True)
class Slip:
    """A token that is not the target's best. arms: all that gave this text"""

    arms: list[str]
    domain: str
    prompt: int
    departure: Departure

    def cells(self) -> list[str]:
        """Its row of the table."""
        found = self.departure
        numbers = (self.prompt, found.position, found.got, found.expected)
        return [self.domain, ", ".join(self.arms), *map(str, numbers), f"{found.gap:.2g}"]

    def __str__(self) -> str:
        found = self.departure
        return (
            f"{', '.join(self.arms)}, {self.domain} prompt {self.prompt}: token {found.position} is {found.got}, and "
            f"{found.expected} is better by {found.gap:.2g}"
        )


@dataclass(frozen=True)
class Audit:
    """What the audit of a run found.

    Attributes:
        answers, tokens: how many were audited, equal answers to a prompt counted once
        dtype, bound: the precision, and the largest gap that rounding may explain in it
    """

    answers: int
    tokens: int
    dtype: str
    bound: float
    slips: list[Slip]

    @classmethod
    def of(cls, target: Target, records: Sequence[Record], questions: Sequence[Question]) -> "Audit":
        """questions: by the records' `prompt`."""
        texts: dict[tuple, list[Record]] = {}
        for record in records:
            texts.setdefault((record.prompt, *record.output.token_ids), []).append(record)
        slips = []
        for (prompt, *answer), same in tqdm(texts.items(), "auditing", unit="answer", leave=False, disable=None):
            arms = list(dict.fromkeys(record.arm for record in same))
            found = audit(target, questions[prompt].prompt_ids, answer)
            slips += [Slip(arms, same[0].domain, prompt, departure) for departure in found]
        tokens = sum(len(text) - 1 for text in texts)
        return cls(len(texts), tokens, str(target.dtype).removeprefix("torch."), AUDIT_BOUNDS[target.dtype], slips)

    @property
    def failures(self) -> list[Slip]:
        return [slip for slip in self.slips if slip.departure.gap > self.bound]

    def lines(self) -> Iterator[str]:
        """Markdown."""
        found = "every token is the target's best"
        if self.slips:
            heads = ("domain", "methods", "prompt", "position", "token", "the target's best", "gap")
            yield from markdown(heads, [slip.cells() for slip in self.slips])
            yield ""
            widest = max(slip.departure.gap for slip in self.slips)
            found = f"{len(self.slips)} are not the target's best, by {widest:.2g} at most"
        yield (
            f"- audit: {self.answers} texts of {self.tokens} tokens, each in one uncached pass of the target: {found}; "
            f"{self.bound:g} is allowed in {self.dtype}"
        )
