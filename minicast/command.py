"""What the command lines share: loading a target with its head, failing in one line, naming flags without effect.

Each program defines its own flags; `program` reads them. Nothing here knows how text is made or shown.
"""

import argparse
import errno
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from minicast.methods import UNSIZED
from minicast.program import (
    INTERRUPTED, Terminated, Unwritable, complain, interruptible, settle_streams, watched_streams,
)
from model import check_pair, hub, load_draft, load_target, load_tokenizer
from model.config import read_config, target_config
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.files import read_json
from model.load import default_placement
from model.tokenizer import Tokenizer
from model.transformer import Target

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FLAGS = {"compile": "--compile or --eager"}  # of settings whose flag has another name
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")  # not "illegal memory access", which is a bug


def guarded(program: str, run: Callable[[], int], stopped: str = "") -> int:
    """The exit status of `run()`. Errors that a user can cause end in one line on stderr, never in a traceback.

    stopped: what to say after Ctrl-C
    """
    warnings.showwarning = lambda message, *where: print(f"{program}: {message}", file=sys.stderr)
    try:
        with watched_streams(), interruptible():
            return run()
    except UserError as error:
        complain(f"{program}: {error}")
        return error.exit_code
    except Unwritable as error:
        complain(f"{program}: cannot write to stdout: {error}")
        return 1
    except KeyboardInterrupt as stop:
        if stopped:
            complain(f"{program}: stopped; {stopped}")
        return stop.status if isinstance(stop, Terminated) else INTERRUPTED
    except BrokenPipeError:  # the reader, `head` perhaps, has enough
        return 0
    except OSError as error:
        if error.errno in FULL:
            file = error.filename or "a file"  # the error of a failed write may not name it
            complain(f"{program}: cannot write {file}: {error.strerror}; free some, or write elsewhere")
        elif error.filename is None:
            raise
        else:
            complain(f"{program}: {error.filename}: {error.strerror}")
        return 1
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        complain(f"{program}: out of memory; try a smaller model, a shorter prompt or fewer new tokens")
        return 1
    finally:
        settle_streams()


def read_stdin() -> str:
    """The prompt from stdin, without its last newline."""
    if sys.stdin is None:
        raise UsageError("--prompt -: stdin is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt -: stdin is not UTF-8 at byte {error.start + 1}") from error
    except OSError as error:
        raise UsageError(f"--prompt -: stdin cannot be read: {error.strerror}") from error


def check_length(text: str, tokenizer: Tokenizer) -> None:
    """UsageError where a prompt can't fit, however it is encoded: to encode a huge one takes minutes and gigabytes."""
    context = target_config(read_config(tokenizer.directory), tokenizer.directory).context
    if len(text) > context and (least := tokenizer.least_tokens(text)) > context:
        size = f"{len(text)} characters, at least {least} tokens"
        raise UsageError(f"the prompt has {size}, the target's context is {context}; shorten the prompt")


def note_idle_flags(program: str, arguments: argparse.Namespace, methods: Sequence[str], drafts: bool) -> None:
    """Say on stderr which of the flags given have no effect, and why.

    arguments: from a `Parser`; methods: those that run; drafts: whether a head is needed
    """
    idle = {}
    if arguments.temperature == 0:
        idle["at temperature 0"] = ["top_k", "top_p", "verifier"]
        if program == "run.py":  # elsewhere the seed has other uses
            idle["at temperature 0"].append("seed")
    if set(methods) <= set(UNSIZED):
        idle[f"on {' and '.join(methods)}, only on cast"] = ["width", "widths", "rank_cap"]
    if not drafts:
        verifier = ["verifier"] if arguments.temperature > 0 else []  # at 0 it is in the list already
        idle["where nothing is drafted"] = ["draft_model", "draft_vocabulary", *verifier]
    if getattr(arguments, "compare", False):
        idle["on --compare, which runs all methods"] = ["method"]
    for reason, names in idle.items():
        note_no_effect(program, [name for name in names if name in arguments.changed], reason)


def note_no_effect(program: str, names: Sequence[str], reason: str) -> None:
    flags = ", ".join(FLAGS.get(name, "--" + name.replace("_", "-")) for name in names)
    if flags:
        print(f"{program}: {flags}: no effect {reason}", file=sys.stderr)


@dataclass(frozen=True)
class Placement:
    """Where a model runs, and in which precision."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, device: str, dtype: str) -> "Placement":
        """From the values of --device and --dtype, "auto" included."""
        return cls(*default_placement(_device(device), None if dtype == "auto" else getattr(torch, dtype)))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device}"


def _device(name: str) -> torch.device | None:
    if name == "auto":
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"--device {name}: torch sees {count} CUDA devices; try --device cpu")
    return device


@dataclass(frozen=True)
class Checkpoints:
    """Which checkpoints to load, by any name that `model.hub` resolves.

    Attributes:
        target: the target, which the tokenizer comes with
        draft: its head; None: none is needed
        pair: the target's entry in the table of known pairs, if it has one
    """

    target: str
    draft: str | None
    pair: hub.KnownPair | None

    @classmethod
    def of(cls, target: str | None, draft: str | None, device: torch.device, drafts: bool) -> "Checkpoints":
        """From the values of --model and --draft-model, None if not given; drafts: whether a head is needed"""
        if target is None:
            pair, hint = hub.default_pair(device.type == "cuda")
            target = pair.name
            if hint:
                print(hint, file=sys.stderr)
        else:
            pair = hub.pair_for_target(target)
        hub.check_name(target, "target")  # a wrong path is the likelier mistake
        if not drafts:
            return cls(target, None, pair)
        if draft is None and pair is None:
            needless = "run.py --method ar needs none, but for --compare, --explain or --reprobe"
            way_out = f"name one with --draft-model ({needless})"
            raise UsageError(f"no draft head is known for {target}: {way_out}")
        if draft is not None:
            hub.check_name(draft, "draft")  # before the target is loaded
        return cls(target, pair.name if draft is None else draft, pair)

    def note_thinking(self, program: str, enabled: bool) -> None:
        """Say so if the head was trained on answers in the chat template's other mode."""
        if self.draft and self.pair and self.pair.thinking not in (None, enabled):
            trained = f"the head of {self.pair.name} was trained with{'' if self.pair.thinking else 'out'}"
            print(f"{program}: {trained} --enable-thinking: expect short rounds", file=sys.stderr)

    def source(self) -> str:
        """Where the weights come from, for people."""
        head = f" with head {hub.source(self.draft, 'draft')}" if self.draft else ""
        return hub.source(self.target, "target") + head

    def tokenizer(self) -> Tokenizer:
        with LoadingBar(self.target) as bar:
            return load_tokenizer(self.target, bar)

    def load(self, placement: Placement, vocabulary: int | None = None) -> tuple[Target, DraftHead | None]:
        """Both models, with a bar on stderr while they download or load.

        vocabulary: how many of the most frequent tokens the head scores; None: all
        """
        draft = None
        if self.draft:  # first: it is small, and its errors are reported before the target is downloaded
            with LoadingBar(f"head of {self.draft}") as bar:
                draft = load_draft(self.draft, placement.dtype, placement.device, progress=bar)
            frequent = frequent_tokens(draft)[:vocabulary] if vocabulary is not None else []
            if len(frequent) < (vocabulary or 0):
                listed = f"{len(frequent)} tokens are listed beside the head"
                warnings.warn(f"--draft-vocabulary {vocabulary}: {listed}", stacklevel=2)
        with LoadingBar(self.target) as bar:
            target = load_target(self.target, placement.dtype, placement.device, progress=bar)
        if draft:
            check_pair(draft.config, target.config)
            if frequent:
                if max(frequent) >= target.vocab_size:
                    file = draft.directory / hub.FREQUENT_TOKENS
                    raise UserError(f"{file} holds ids beyond the target's vocabulary of {target.vocab_size}")
                draft.restrict(frequent, target)
        return target, draft


def frequent_tokens(draft: DraftHead) -> list[int]:
    """The token ids listed beside a head, the most frequent first; at least one."""
    file = draft.directory / hub.FREQUENT_TOKENS
    form = '{"tokens": [different token ids, the most frequent first]}'
    if not file.is_file():
        missing = f"{file} is missing; heads of model.train_dflash have one, for others write {form} there"
        raise UsageError(f"--draft-vocabulary: {missing}")
    tokens = read_json(file).get("tokens")
    known = isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens)
    if not known or len(set(tokens)) < len(tokens):
        raise UserError(f"{file} must hold {form}")
    return tokens


class LoadingBar:
    """A bar on stderr if that is a terminal. Call it with (bytes done, bytes in all)."""

    def __init__(self, what: str):
        self.what, self.bar = what, None

    def __call__(self, done: int, total: int) -> None:
        if self.bar is None or total != self.bar.total:  # another step began
            self.close()
            self.bar = tqdm(
                desc=self.what, total=total, unit="B", unit_scale=True, leave=False, disable=None
            )
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> "LoadingBar":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def peak_memory(device: torch.device) -> int:
    """The most bytes used so far: on the device if it has its own memory, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as status:  # ru_maxrss may be the parent's, from before this program
            peak = next(line for line in status if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):  # not every system has this file, or this line in it
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
