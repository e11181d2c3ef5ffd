"""What this machine can do at best, and where the time of a round goes: the figures beside a measured time.

The streaming floor bounds a step of AR from below (all weights are read once); the share outside the models is
what trees, packing, walking and bookkeeping take of a round. Nothing here chooses a width: see `probe`.
"""

import statistics
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from minicast.decode import Decoder
from minicast.tree import RANK_CAP, ranked_tree
from minicast.width import MAX_WIDTH
from model.device import clock
from model.linear import linear_layers, weight_bytes
from model.transformer import Target

TREE_DEPTH = 15  # of the tree whose building is timed: a head of block 16


@dataclass(frozen=True)
class Floor:
    """No step can be faster than the weights stream from memory.

    Attributes:
        weight_bytes: what one step streams, in the layout the weights are held in
        weights: how many there are
        bytes_per_second: the fastest of several reads of that many bytes
    """

    weight_bytes: int
    weights: int
    bytes_per_second: float

    @property
    def ms(self) -> float:
        return self.weight_bytes / self.bytes_per_second * 1e3

    @property
    def ms_in_32_bits(self) -> float:
        """The floor of the same weights at four bytes each; layers hold them in two where nothing is lost."""
        return 4 * self.weights / self.bytes_per_second * 1e3


def measure_floor(target: Target, reads: int = 20) -> Floor:
    """Sum a buffer of the weights' size a few times. The fastest counts, so that the floor is not too high."""
    streamed = weight_bytes(target)
    buffer = torch.ones(streamed // 8, dtype=torch.int64, device=target.device)
    fastest = min(timed(buffer.sum, target.device) for _ in range(reads))
    weights = sum(layer.in_features * layer.out_features for layer in linear_layers(target))
    return Floor(streamed, weights, streamed / fastest)


def timed(run, device: torch.device) -> float:
    """Seconds that `run()` takes."""
    started = clock(device)
    run()
    return clock(device) - started


@dataclass
class Share:
    """Where the time of an answer's rounds went, in seconds.

    Attributes:
        target: in the target's passes, including any use of its LM head
        head: in the draft head's passes, including its scores where it has LM head rows of its own
        total: of all rounds, the first draft included
    """

    target: float = 0.0
    head: float = 0.0
    total: float = 0.0

    @property
    def outside(self) -> float:
        """Share of the time spent outside both models: trees, packing, walking, gathering, bookkeeping."""
        return 1 - (self.target + self.head) / self.total


def measure_share(decoder: Decoder, prompt_ids: Sequence[int], **options) -> Share:
    """Answer once with a clock around every call of a model. The decoder must not replay graphs.

    On a GPU the clock waits for the device, so rounds are slower.
    """
    share, device = Share(), decoder.target.device
    clocked = [(decoder.target, "target", ("forward", "logits"))]
    if decoder.draft:
        restricted = decoder.draft.vocabulary is not None  # else the target's LM head scores for it
        clocked.append((decoder.draft, "head", ("forward", "extend", "log_q")[: 2 + restricted]))
    decoder.reset()
    with clocks(clocked, share, device):
        for step in decoder.stream(prompt_ids, **options):
            if step.prefill:
                share.target = share.head = 0.0
                started = clock(device)
    share.total = clock(device) - started
    return share


@contextmanager
def clocks(clocked, share: Share, device: torch.device):
    """While open, add the time spent in a module's methods to a field of `share`; clocked: [(module, field, methods)]."""

    def wrap(function, field_name):
        def run(*arguments):
            started = clock(device)
            try:
                return function(*arguments)
            finally:
                setattr(share, field_name, getattr(share, field_name) + clock(device) - started)

        return run

    for module, field_name, names in clocked:
        for name in names:
            setattr(module, name, wrap(getattr(module, name), field_name))
    try:
        yield
    finally:
        for module, _, names in clocked:
            for name in names:
                delattr(module, name)  # of the instance: the class's method shows again


def measure_tree_builder(builds: int = 200) -> float:
    """Milliseconds of one best-first tree of MAX_WIDTH nodes from ranked lists (TREE_DEPTH, RANK_CAP), the median."""
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(builds):
        logits = 2 * torch.randn(TREE_DEPTH, 1000, generator=generator)
        log_q, tokens = logits.log_softmax(-1).topk(RANK_CAP)
        times.append(timed(partial(ranked_tree, tokens, log_q, MAX_WIDTH), log_q.device))
    return statistics.median(times) * 1e3
