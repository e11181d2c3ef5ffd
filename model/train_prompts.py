"""Prompts to train on without a collection of them: from templates, or written by the target. The target answers them.
"""

import json
import random
import re
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from model.errors import UserError
from model.files import Progress, read_json, write_atomically
from model.tokenizer import Tokenizer
from model.train_data import continue_batch, read_lines
from model.transformer import Target

# Of prompts that the target writes:
OWN_TOKENS = 96  # longest, in tokens
OWN_TOP_K = 50  # likeliest tokens that each token is drawn from
OWN_BATCH = 192  # written at a time


@cache
def template_words() -> dict[str, dict]:
    """What the prompts from templates are made of.

    templates: by domain. Slots such as {topic} are filled in; other braces are LaTeX and stay.
    slots: by name, what may be filled in
    functions: by signature, what the function does, a call of it, and the call's result
    """
    return read_json(Path(__file__).with_suffix(".json"))


def template_prompts(count: int) -> dict[str, list[str]]:
    """By domain, `count` different prompts or as many as its templates give; the same ones at every call."""
    return {domain: filled(domain, templates, count) for domain, templates in template_words()["templates"].items()}


def filled(domain: str, templates: list[str], count: int) -> list[str]:
    """Up to `count` different prompts from these templates, which take turns. The domain's name is the random seed."""
    draw = random.Random(domain)
    prompts: dict[str, None] = {}  # in order
    for number in range(20 * count):
        prompts.setdefault(fill(templates[number % len(templates)], draw))
        if len(prompts) == count:
            break
    return list(prompts)


def fill(template: str, draw: random.Random) -> str:
    """The template with a random value in each slot."""
    words = template_words()
    slots = words["slots"]
    values = {slot: draw.choice(choices) for slot, choices in slots.items()}
    for slot, first in ("other_topic", "topic"), ("other_thing", "thing"), ("second_sentence", "sentence"):
        values[slot] = draw.choice([choice for choice in slots[first] if choice != values[first]])
    values["function"], (values["does"], values["call"], result) = draw.choice(list(words["functions"].items()))
    values["example"] = f"{values['call']}\n    {result}"
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def own_prompts(
    target: Target, tokenizer: Tokenizer, count: int, file: str | Path, progress: Progress | None = None
) -> list[str]:
    """`count` different prompts written by the target, added to `file` as they come, one JSON string on a line.

    A chat model was trained on what users write, so it can write like one: given the chat template up to where a user's
    words begin, it goes on with such words (Magpie, arXiv 2406.08464). Tokens are drawn at temperature 1 from the
    likeliest OWN_TOP_K. Prompts that do not end within OWN_TOKENS tokens are left out. If a batch brings nothing new,
    there are fewer, with a warning.

    progress: counts prompts. Raises as `read_lines`, and UserError for a chat template without words before the user's.
    """
    file, stop, opening = Path(file), set(tokenizer.stop_ids), before_user(tokenizer)
    texts = dict.fromkeys(read_lines(file)) if file.exists() else {}
    write_atomically(file, "".join(json.dumps(text) + "\n" for text in texts))  # without a line that was cut short
    generator = torch.Generator(target.device).manual_seed(len(texts))

    def choose(logits: Tensor) -> Tensor:
        """logits (B, V) -> tokens (B,) drawn from them."""
        top = logits.float().topk(min(OWN_TOP_K, logits.shape[-1]))
        drawn = top.values.softmax(-1).multinomial(1, generator=generator)
        return top.indices.gather(-1, drawn)[:, 0]

    while len(texts) < count:
        rows = continue_batch(target, [opening] * OWN_BATCH, stop, OWN_TOKENS, choose)
        ended = [tokenizer.decode(row[:-1]).strip() for row in rows if row[-1] in stop]
        fresh = [text for text in dict.fromkeys(ended) if text and text not in texts]
        if not fresh:
            warnings.warn(f"{len(texts)} of {count} prompts in the target's own words: it writes no more that end")
            break
        with open(file, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(text) + "\n" for text in fresh)
        texts |= dict.fromkeys(fresh)
        if progress:
            progress(min(len(texts), count), count)
    return list(texts)[:count]


def before_user(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the user's words begin. UserError where it has nothing there."""
    words = "THE-WORDS-OF-THE-USER"
    opening, found, _ = tokenizer.render_chat(words).partition(words)
    ids = tokenizer.encode_rendered(opening)
    if not found or not ids:
        raise UserError("--own-prompts: the chat template of this target has nothing before the user's words")
    return ids
