"""What a person sees of an answer: coloured text, the packed tree of a round, the figures at the end.

It shows what a decoder does: nothing here decides a token or measures.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from minicast.answer import Output, Round, ms_per_token
from minicast.decode import Decoder
from minicast.methods import UNSIZED
from minicast.program import Terminated
from model.errors import UserError
from model.tokenizer import Tokenizer

PLAIN, GREEN, DIM = "", "\033[32m", "\033[2m"
RESET = "\033[0m"


class Screen:
    """Text to a stream, at once. Colours only on a terminal, and not under NO_COLOR (no-color.org)."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.colours = self.stream.isatty() and not os.environ.get("NO_COLOR")
        self.line_open = False
        if hasattr(self.stream, "reconfigure"):
            self.stream.reconfigure(errors="replace")  # characters that the terminal lacks become question marks

    def write(self, text: str, style: str = PLAIN) -> None:
        if not text:
            return
        self.line_open = not text.endswith("\n")  # set before writing, since Ctrl-C may come right after it
        self.stream.write(style + text + RESET if style and self.colours else text)
        self.stream.flush()

    def end_line(self) -> None:
        if self.line_open:
            self.write("\n")


@dataclass
class ShownAnswer:
    """One answer as it was shown, and what was asked for.

    Attributes:
        method, width: as asked for
        prompt_tokens: how many the prompt has
        output: what the decoder measured
        accepted: for every round, how many of the tokens emitted were drafted
        pieces: the text in (text, style); drafted tokens that were accepted are green
        stop_reason: the decoder's, or "interrupted", or "error"
        error: what ended it early, to be raised once the text is shown
        token_ids: those of the text; the decoder may have more if it was interrupted
    """

    method: str
    width: int | str
    prompt_tokens: int
    output: Output = field(default_factory=Output)
    accepted: list[int] = field(default_factory=list)
    pieces: list[tuple[str, str]] = field(default_factory=list)
    stop_reason: str = "interrupted"
    error: UserError | Terminated | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def figures(self) -> dict:
        """Everything, for JSON. If interrupted, the decoder may be a round ahead of what was shown."""
        output, shown = self.output, len(self.accepted)
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "stop_reason": self.stop_reason,
            "method": self.method,
            "width": self.width,
            "prompt_tokens": self.prompt_tokens,
            "round_lengths": output.round_lengths[:shown],
            "accepted": self.accepted,
            "widths": output.widths[:shown],
            "mean_committed_per_round": mean(output.round_lengths[:shown]),
            "mean_accepted_per_round": mean(self.accepted),
            "ms_per_token": ms_per_token([output]),
            "prefill_seconds": output.prefill_seconds,
            "decode_seconds": output.decode_seconds,
            "wall_seconds": output.wall_seconds,
            "setup_seconds": output.setup_seconds,
        }

    def lines(self) -> list[str]:
        """The figures for people."""
        output, tokens = self.output, len(self.output.token_ids)
        prompt = f"prompt   {self.prompt_tokens} tokens{rate(self.prompt_tokens, output.prefill_seconds)}"
        decode = f"decode   {tokens} tokens{rate(tokens, output.decode_seconds)}"
        setup = [f"compile  {output.setup_seconds:.1f} s for new shapes, or weights laid out anew, in none of these times"]
        setup = setup if output.setup_seconds >= 0.05 else []
        if not output.round_lengths:
            return [prompt, f"{decode}; stopped: {self.stop_reason}", *setup]
        decode += f", {ms_per_token([output]):.1f} ms a token; prompt to last token {output.wall_seconds:.2f} s"
        width = f" (N = {self._widths()})" if self.method not in UNSIZED else ""
        accepted = self.accepted or [0]  # if interrupted, the decoder may be a round ahead of what was shown
        (R, rounds), *others = sorted(Counter(output.round_lengths).items())
        return [
            prompt,
            f"{decode}; stopped: {self.stop_reason}",
            *setup,
            f"rounds   {len(output.round_lengths)} of {self.method}{width}",
            f"mean R   {mean(output.round_lengths):.2f} tokens committed a round, "
            f"{mean(accepted):.2f} of them accepted drafts and the others the target's own",
            ", ".join([f"lengths  R = {R} in {rounds} round{'s' if rounds > 1 else ''}",
                       *(f"{R} in {rounds}" for R, rounds in others)]),
        ]

    def _widths(self) -> str:
        """The width in use; if the decoder chose it, how often it took which."""
        if isinstance(self.width, int):
            return str(max(self.output.widths))  # not self.width, which may be beyond the widest tree
        counts = sorted(Counter(self.output.widths).items(), reverse=True)
        return f"{self.width}: " + ", ".join(f"{N} in {rounds} round{'s' if rounds > 1 else ''}" for N, rounds in counts)


def show_answer(
    decoder: Decoder, tokenizer: Tokenizer, prompt_ids: list[int], options: dict, screen: Screen, live: bool = True,
    trees: bool = False,
) -> ShownAnswer:
    """Decode an answer and show it as it comes. Ctrl-C ends it early, and so does a UserError once there is text.

    options: method, width and the other options of `Decoder.stream`
    live: show the text as it comes; trees: show each round's packed tree, and the text after the last one
    """
    answer = ShownAnswer(options["method"], options["width"], len(prompt_ids))
    text = tokenizer.stream()

    def show(piece: str, style: str) -> None:
        answer.pieces.append((piece, style))
        if live:
            screen.write(piece, style)

    try:
        for step in decoder.stream(prompt_ids, **options):
            # A character that spans tokens appears with the last of them, in its colour.
            show(text.push(step.token_ids[: step.accepted]), GREEN)
            show(text.push(step.token_ids[step.accepted :]), PLAIN)
            answer.token_ids += step.token_ids
            if not step.prefill:
                answer.accepted.append(step.accepted)
            if trees:
                for line, style in tree_lines(step, len(answer.accepted), tokenizer.token_text):
                    screen.write(line + "\n", style)
        answer.stop_reason = decoder.output.stop_reason
    except KeyboardInterrupt as stop:
        answer.stop_reason, answer.error = "interrupted", stop if isinstance(stop, Terminated) else None
    except UserError as error:
        if not answer.token_ids:
            raise
        answer.stop_reason, answer.error = "error", error
    finally:
        show(text.finish(), PLAIN)
        if trees:
            for piece, style in answer.pieces:
                screen.write(piece, style)
        screen.end_line()
    answer.output = decoder.output
    return answer


def mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def rate(tokens: int, seconds: float) -> str:
    return f", {seconds:.2f} s, {tokens / seconds:.1f} tok/s" if seconds > 0 else ""


def tree_lines(step: Round, number: int, token_text: Callable[[int], str]) -> Iterator[tuple[str, str]]:
    """The packed tree of a round, a line a node with its style: mass, depth, "+" if accepted, token.

    Children stand below their parent and further right, the likeliest first.
    """
    R, emitted = len(step.token_ids), "".join(token_text(token) for token in step.token_ids)
    if step.prefill:
        yield f"prefill: {emitted!r}", PLAIN
        return
    tree = step.tree.real()
    yield f"round {number}: N = {tree.width}, R = {R}, accepted {step.accepted}: {emitted!r}", PLAIN
    tokens, parents, depths = tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
    masses = tree.log_mass.exp().tolist()
    kept = {row - 1 for row in step.path[1 : step.accepted + 1]}  # packed row v holds node v - 1
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    waiting = children.get(-1, [])[::-1]
    while waiting:
        node = waiting.pop()
        waiting += children.get(node, [])[::-1]
        mark, style = ("+", GREEN) if node in kept else (" ", DIM)
        indent = "  " * depths[node]
        yield f"{masses[node]:8.4f} {depths[node]:3d} {mark} {indent}{token_text(tokens[node])!r}", style
