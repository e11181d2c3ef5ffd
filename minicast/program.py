"""How a command line begins and ends: its flags, Ctrl-C before anything runs, and streams that are closed or full.

Nothing here imports torch: that takes seconds, too long for --help or a mistyped flag.
"""

import argparse
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

INTERRUPTED = 130  # what shells report after Ctrl-C


class Parser(argparse.ArgumentParser):
    """Reports a mistake in the flags in one line; argparse alone would print the usage before it.

    The namespace has one more attribute, `changed`: the names of the flags that are not at their default.
    """

    def parse_args(self, argv: Sequence[str] | None = None, namespace=None):
        for number, text in enumerate(sys.argv[1:] if argv is None else argv, start=1):
            if any("\ud800" <= character <= "\udfff" for character in text):  # Python's stand-in for other bytes
                self.error(f"argument {number} is not valid Unicode: pass it in UTF-8")
        arguments = super().parse_args(argv, namespace)
        arguments.changed = {name for name, value in vars(arguments).items() if value != self.get_default(name)}
        return arguments

    @property
    def name(self) -> str:
        """The prefix of the program's messages."""
        return self.prog if self.prog.endswith(".py") else self.prog.rpartition(".")[2]

    def error(self, message: str):
        if message.endswith("expected one argument"):  # argparse takes a value that begins with - for a flag
            message += ", written --flag=VALUE if it begins with -"
        self.exit(2, f"{self.name}: {' '.join(message.split())} (see {self.prog} --help)\n")

    def exit(self, status: int = 0, message: str | None = None):
        if message:
            complain(message.rstrip("\n"))
        settle_streams()
        sys.exit(status)

    def print_help(self, file: TextIO | None = None) -> None:
        if sys.stdout is None:
            self.exit(1, f"{self.name}: cannot write to stdout: it is closed")
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except BrokenPipeError:  # the reader, `head` perhaps, has enough
            self.exit(0)
        except OSError as error:
            self.exit(1, f"{self.name}: cannot write to stdout: {error.strerror}")


def at_least(least: int, **words):
    """An argparse type: a whole number of at least `least`, or the value of one of the words."""
    rule = " or ".join(filter(None, (", ".join(words), f"a whole number of at least {least}")))
    parse = number(rule, lambda value: value >= least, int)
    return lambda text: words[text] if text in words else parse(text)


def number(rule: str, holds: Callable[[float], bool], kind: type = float):
    """An argparse type: a number of this kind for which `holds` is true; rule: the same in words."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return value

    return parse


def each_once(least: int):
    """An argparse type: different whole numbers of at least `least`, as in 1,8,14."""

    def parse(text: str) -> list[int]:
        values = [at_least(least)(value) for value in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"must name each number once, got {text!r}")
        return values

    return parse


# Flags of several programs. Choices are written out here: the modules that define them import torch

def model_flags(group, vocabulary: bool = True) -> None:
    """Which checkpoints, and where they run. vocabulary: add --draft-vocabulary"""
    group.add_argument("--model", help="directory, hub id or known name; default: smollm2, on a GPU qwen3-4b if it was "
                                       "downloaded before")
    group.add_argument("--draft-model", help="likewise; default: the head known for the model")
    if vocabulary:
        group.add_argument("--draft-vocabulary", type=at_least(1), metavar="V",
                           help="the head scores only the V most frequent tokens: faster drafts, the same text")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
                       help="auto: float32 on a CPU, bfloat16 on a GPU")


def sampling_flags(group, seed: str) -> None:
    """How the target chooses its tokens. seed: help text, what else the seed decides"""
    temperature = number("a finite number of at least 0", lambda T: 0 <= T < math.inf)
    top_p = number("a number above 0 and at most 1", lambda p: 0 < p <= 1)
    seeds = number("a whole number from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63, int)
    group.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="default: 0, greedy")
    group.add_argument("--top-k", type=at_least(1), metavar="K", help="sample from the K likeliest; default: all")
    group.add_argument("--top-p", type=top_p, metavar="P",
                       help="and from the likeliest that hold mass P together; default: 1")
    group.add_argument("--seed", type=seeds, default=0, help=f"of samples{seed}; default: %(default)s")
    group.add_argument("--verifier", choices=("direct", "stochastic"), default="direct",
                       help="for T > 0; what stochastic draws depends on the width, too")


def compile_flags(group) -> None:
    """How layers run."""
    group.add_argument("--attention", choices=("sdpa", "static", "flex"),
                       help="default: sdpa on a CPU, flex on a GPU; static, over the whole cache, is there to compare")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--compile", action="store_true", default=None,
                        help="on a CPU: compile the layers; a minute at the first start, seconds later")
    either.add_argument("--eager", action="store_false", dest="compile", default=None,
                        help="on a GPU: compile and capture nothing")


# Threads

SPINS = "30000"  # a millisecond or so, longer than the time between two products of a step


def share_cores() -> None:
    """Called before torch is imported: threads that wait for each other at the end of a product soon go to sleep.

    By default libgomp, which runs them on Linux, has them spin ten times as long. Where another program keeps one of
    two cores busy, decoding then takes 7 to 10 times as long, with SPINS 4 to 5 times (results/cpu-busy-core.md). Fewer
    spins help more there, but slow down a quiet machine. Settings in the environment take precedence.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


# Ctrl-C

def start(name: str) -> None:
    """Called before torch is imported, with __name__: until the program is `interruptible`, Ctrl-C just ends it.

    An interrupted import may swallow the exception, or end in a traceback. SIGINT stays ignored where it is, as in
    background jobs. Without torch the program ends here. A module that is only imported changes nothing.
    Also calls `share_cores`.
    """
    if name != "__main__":
        return
    if find_spec("torch") is None:
        complain(f"{Path(sys.argv[0]).name}: torch is not installed: pip install -r requirements.txt")
        sys.exit(1)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    share_cores()


class Terminated(KeyboardInterrupt):
    """SIGTERM, sent by `timeout` and at shutdown, or SIGHUP, sent when a terminal is closed. It ends whatever Ctrl-C ends,
    and then the program, with the status that shells report after this signal.
    """

    def __init__(self, number: int = signal.SIGTERM):
        super().__init__()
        self.status = 128 + number


ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _terminate(number: int, frame) -> None:
    raise Terminated(number)


def _raise_again(unraisable) -> None:
    """`sys.unraisablehook`: Python drops an exception raised in `__del__`; raise the signal again 10 ms later."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(unraisable)
    status = getattr(unraisable.exc_value, "status", INTERRUPTED)
    threading.Timer(0.01, signal.raise_signal, [status - 128]).start()


@contextmanager
def interruptible() -> Iterator[None]:
    """In here Ctrl-C is a KeyboardInterrupt, as before `start`; so are the signals of ENDS, unless they are ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_DFL, signal.SIG_IGN):  # not called from a program of ours
        yield
        return
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hook, sys.unraisablehook = sys.unraisablehook, _raise_again
    ends = [number for number in ENDS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ends:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


# Streams

class Unwritable(Exception):
    """stdout cannot be written to; the message says why. Not an OSError, which could be about any file."""


class Watched:
    """A standard stream that calls `failed` with the OSError of a write or a flush, and is otherwise unchanged."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]):
        self.stream, self.failed = stream, failed

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Callable, *arguments) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self.failed(error)


@contextmanager
def watched_streams() -> Iterator[None]:
    """A failing stdout raises `Unwritable`, or BrokenPipeError; a failing or closed stderr is silent.

    Python sets a stream that was closed at its start to None.
    """
    for descriptor in range(3):  # a file opened later would get the number of a closed one
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)

    def unwritable(error: OSError) -> None:
        raise error if isinstance(error, BrokenPipeError) else Unwritable(error.strerror)

    streams = sys.stdout, sys.stderr
    try:
        if sys.stdout is None:
            raise Unwritable("it is closed; /dev/null is a place, too")
        sys.stdout = Watched(sys.stdout, unwritable)
        sys.stderr = Watched(sys.stderr or open(os.devnull, "w"), failed=lambda error: None)
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = streams


def complain(line: str) -> None:
    """Print a line to stderr, or to stdout if that fails."""
    for stream in (sys.stderr, sys.stdout):
        try:
            if stream is not None:
                print(line, file=stream, flush=True)
                return
        except OSError:
            pass


def settle_streams() -> None:
    """Drop what cannot be written: Python would try once more at exit, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
