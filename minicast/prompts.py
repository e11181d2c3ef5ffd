"""Prompts from JSONL files, one a line, by domain, and the questions that a bench makes of them.

Our own small set is prompts.jsonl, beside this file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model.errors import UsageError
from model.files import read_text
from model.tokenizer import Tokenizer, check_unicode

PROMPTS = Path(__file__).parent / "prompts.jsonl"
PROMPT_FIELDS = ("prompt", "question", "text", "problem")
EVERYTHING, MEAN = "all", "mean"  # in a domain's place in figures: all domains pooled, or averaged


@dataclass(frozen=True)
class Prompt:
    """where: file and line, for messages"""

    domain: str
    text: str
    where: str = field(default="", compare=False)


def read_prompts(files: Sequence[Path], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each domain. A line's domain is its `domain`, else the file's name."""
    prompts, counts = [], {}
    for file in files:
        for number, line in enumerate(read_text(file).split("\n"), start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            text, domain = _read_prompt(line, where)
            check_unicode(text, f"{where}: the prompt")  # JSON can contain half of a surrogate pair
            domain = domain_name(domain or file.stem, where)
            counts[domain] = counts.get(domain, 0) + 1
            if limit is None or counts[domain] <= limit:
                prompts.append(Prompt(domain, text, where))
    if not prompts:
        raise UsageError(f"{', '.join(map(str, files))}: no prompts in there, give one a line")
    return prompts


def domain_name(name: str, where: Path | str) -> str:
    """The name itself. UsageError for one that stands for all domains, or breaks a table; where: for the message"""
    if name in (EVERYTHING, MEAN):
        raise UsageError(f"{where}: {name!r} is no name of a domain, it stands for all of them: give it another")
    if "|" in name or not name.isprintable():
        raise UsageError(f"{where}: {name!r} is no name of a domain, it would break a table: give it another")
    return name


def _read_prompt(line: str, where: str) -> tuple[str, str | None]:
    """The text of a JSON line, an object or a string, and its domain if it names one."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: a prompt file has one JSON object, or string, a line") from error
    if isinstance(values, str):
        return values, None
    if isinstance(values, list):
        raise UsageError(f"{where} is a JSON array: a prompt file has one JSON object, or string, a line")
    if isinstance(values, dict):
        turns = values.get("turns")
        first = turns[:1] if isinstance(turns, list) else []
        for text in [values.get(name) for name in PROMPT_FIELDS] + first:
            if isinstance(text, str):
                domain = values.get("domain")
                if not isinstance(domain, str | None):
                    raise UsageError(f"{where}: domain must be a string, got {json.dumps(domain)}")
                return text, domain
    raise UsageError(f"{where} has no prompt: none of {', '.join(PROMPT_FIELDS)} or turns")


# Questions

@dataclass(frozen=True)
class Question:
    """One thing to measure: a prompt and how long the answer may be.

    Attributes:
        domain: of the prompt; in a sweep also says which prefix and length
        prompt_ids: P token ids
        max_new_tokens: tokens that the answer may have
        where: the prompt's file and line; not in `repr`, by which a resumed run recognises its questions
    """

    domain: str
    prompt_ids: list[int]
    max_new_tokens: int
    where: str = field(default="", compare=False, repr=False)


def questions(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, prefixes: Sequence[int], lengths: Sequence[int]
) -> list[Question]:
    """Every prompt, cut to each of the prefixes, with each of the lengths. No prefixes: not cut."""
    return [
        Question(
            domain_title(prompt.domain, prefix, length, prefixes, lengths), encode(prompt.text, tokenizer, prefix), length,
            prompt.where,
        )
        for prefix in prefixes or [None]
        for length in lengths
        for prompt in prompts
    ]


def domain_title(domain: str, prefix: int | None, length: int, prefixes: Sequence[int], lengths: Sequence[int]) -> str:
    """A domain's name with what is swept: in tables each cell of a sweep is a domain of its own."""
    swept = [f"prefix {prefix}"] if len(prefixes) > 1 else []
    swept += [f"{length} new"] if len(lengths) > 1 else []
    return ", ".join([domain, *swept])


def encode(text: str, tokenizer: Tokenizer, limit: int | None) -> list[int]:
    """The text as a chat, cut at its end so that it has at most `limit` tokens, template included."""
    ids, kept = tokenizer.encode_chat(text), tokenizer.encode(text)
    while limit is not None and len(ids) > limit:
        if not kept:
            raise UsageError(f"--prefix {limit}: the chat template alone has {len(ids)} tokens")
        kept = kept[: limit - len(ids)]
        ids = tokenizer.encode_chat(tokenizer.decode(kept))
    return ids


def random_questions(
    vocab_size: int, count: int, prefixes: Sequence[int], lengths: Sequence[int], seed: int
) -> list[Question]:
    """`count` prompts of random ids for each prefix and length, for a model without a tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Question(
            domain_title("random", prefix, length, prefixes, lengths),
            torch.randint(vocab_size, (prefix,), generator=generator).tolist(),
            length,
        )
        for prefix in prefixes
        for length in lengths
        for _ in range(count)
    ]
