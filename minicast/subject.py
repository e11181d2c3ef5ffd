"""What a bench measures: a target, a head and questions, with real or random weights.

Random weights of a published shape give the latencies of a model whose checkpoint is not available. A random head
beside a real target is the worst case. What either commits says nothing about trained ones, so every table made with
them carries the subject's remark.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from minicast.command import Checkpoints, Placement
from minicast.prompts import PROMPTS, Question, questions, random_questions, read_prompts
from model import check_pair, hub
from model.config import draft_config, read_config
from model.dflash import DraftHead
from model.errors import UsageError
from model.random_weights import SHAPES, random_head, random_pair
from model.transformer import Target

HEAD = "head"    # in the place of a shape's name: only the head's weights are random
PREFIX = 1024    # tokens of a random prompt, by default
QUESTIONS = 4    # random prompts, by default


@dataclass(frozen=True)
class Subject:
    """What is measured, loaded only when it is needed.

    Attributes:
        source: where the weights come from, for people
        remark: what a reader of any figure has to know; None: nothing special
        stop_ids: token ids that end an answer
        load: returns target and head on a placement; the head is None if none is needed
    """

    source: str
    remark: str | None
    questions: list[Question]
    stop_ids: Sequence[int]
    load: Callable[[Placement], tuple[Target, DraftHead | None]]

    @classmethod
    def of(cls, arguments: argparse.Namespace, placement: Placement, drafts: bool) -> "Subject":
        """From the flags of `bench`; drafts: whether a head is needed"""
        if arguments.random_weights and arguments.draft_vocabulary:
            raise UsageError("random weights have no frequent tokens: leave out --draft-vocabulary")
        if arguments.random_weights in SHAPES:
            return cls.of_shape(arguments.random_weights, arguments)
        only_head = arguments.random_weights == HEAD
        checkpoints = Checkpoints.of(arguments.model, arguments.draft_model, placement.device, drafts or only_head)
        prompts = read_prompts(arguments.prompts or [PROMPTS], arguments.limit)  # before any download: it may fail
        tokenizer = checkpoints.tokenizer()
        asked = questions(prompts, tokenizer, arguments.prefix, arguments.max_new_tokens)
        if not only_head:
            load = partial(checkpoints.load, vocabulary=arguments.draft_vocabulary)
            return cls(checkpoints.source(), None, asked, tokenizer.stop_ids, load)
        source = f"{checkpoints.source()}, whose weights are random"
        remark = "The head has random weights: R is the least that any head commits, and times are those of a real one."
        return cls(source, remark, asked, tokenizer.stop_ids, partial(load_random_head, checkpoints))

    @classmethod
    def of_shape(cls, name: str, arguments: argparse.Namespace) -> "Subject":
        """A whole pair of random weights. It has no tokenizer, so prompts are random ids."""
        for flag in ("prompts", "model", "draft_model"):
            if getattr(arguments, flag) is not None:
                dashed = flag.replace("_", "-")
                raise UsageError(f"--random-weights {name} is a model and its prompts: leave out --{dashed}")
        config, prefixes, lengths = SHAPES[name].target, arguments.prefix or [PREFIX], arguments.max_new_tokens
        longest = max(prefixes) + max(lengths)
        if longest > config.context:
            context = f"the {config.context} of {name}: choose a smaller --prefix or --max-new-tokens"
            raise UsageError(f"prompt and answer of {longest} tokens exceed {context}")
        count = arguments.limit or QUESTIONS
        asked = random_questions(config.vocab_size, count, prefixes, lengths, arguments.seed)
        source = f"random weights of the shape {name}"
        remark = f"Weights and prompts are random, the shape is that of {name}: times count, texts and R mean nothing."
        return cls(source, remark, asked, (), lambda place: random_pair(name, place.dtype, place.device))


def load_random_head(checkpoints: Checkpoints, placement: Placement) -> tuple[Target, DraftHead]:
    """The target, and a head that has only the chosen one's shape."""
    directory = hub.resolve(checkpoints.draft, "draft")
    config = draft_config(read_config(directory), directory)
    target, _ = replace(checkpoints, draft=None).load(placement)
    check_pair(config, target.config)
    return target, random_head(config, placement.dtype, placement.device)
