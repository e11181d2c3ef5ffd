"""Several turns in one conversation, at a terminal or from a pipe (`run.py --chat`).

Every turn sends the whole conversation, and the decoder keeps the longest prefix that both its caches, the target's
and the drafter's (paper, §2, Round state), already hold: a turn prefills little more than its own message. This
module only makes sure that the ids begin the same way. How they are decoded is in `decode`.
"""

import sys
from dataclasses import dataclass

from minicast.decode import Decoder
from minicast.program import Terminated
from minicast.terminal import Screen, ShownAnswer, mean, show_answer
from model.errors import UserError
from model.tokenizer import Tokenizer

HELP = """\
/reset   start over: forget the conversation
/stats   figures of the conversation, and how much of the last turn was in the caches
/help    this
/quit    leave; so does Ctrl-D
Ctrl-C during a reply stops it and keeps what was shown. A pasted text of several lines is one message.
A message that begins with a slash: put a space before it."""


@dataclass(frozen=True)
class Turn:
    """A message on its way.

    Attributes:
        message: the user's
        text, ids: the conversation up to where the reply begins
    """

    message: str
    text: str
    ids: list[int]


class Conversation:
    """What was said, in the two forms that the next turn needs.

    The chat template decides what the model reads, and is rendered again for each turn. If its text only adds to what
    was said, the earlier ids stay: the caches hold what the model chose, and a tokenizer may split the same text in
    another way. If the template rewrites history (some leave out the model's thoughts), all of it is tokenised again,
    and reuse ends where the ids first differ.

    Attributes:
        messages: for the template, without the system prompt
        text, ids: the same as the template's text, including special tokens, and as token ids
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None, enable_thinking: bool = False):
        """UserError if the chat template is missing, or refuses the system prompt."""
        self.tokenizer, self.system, self.enable_thinking = tokenizer, system, enable_thinking
        self.reset()
        self.turn("")

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.text, self.ids = "", []

    def turn(self, message: str) -> Turn:
        """The user's next message, ready to be answered. Nothing is kept yet."""
        messages = [*self.messages, {"role": "user", "content": message}]
        text = self.tokenizer.render_chat(messages, self.system, self.enable_thinking)
        ids = self.tokenizer.encode_rendered(text)
        if self.ids and text.startswith(self.text):
            added = self.tokenizer.encode_rendered(text[len(self.text) :])
            if ids[-len(added) :] == added:  # no token spans the seam
                ids = self.ids + added
        return Turn(message, text, ids)

    def keep(self, turn: Turn, reply_ids: list[int]) -> None:
        """Add a finished turn with its reply (stop id included)."""
        reply = self.tokenizer.decode(reply_ids)
        self.messages += [{"role": "user", "content": turn.message}, {"role": "assistant", "content": reply}]
        self.text = turn.text + self.tokenizer.decode(reply_ids, special=True)
        self.ids = turn.ids + reply_ids


class Chat:
    """Reads messages and shows replies: text on the screen, all else on stderr.

    Args:
        options: method, width and the other options of `Decoder.stream`, for every turn
    """

    def __init__(self, decoder: Decoder, conversation: Conversation, options: dict, screen: Screen):
        self.decoder, self.conversation, self.options, self.screen = decoder, conversation, options, screen
        self.interactive = bool(sys.stdin) and sys.stdin.isatty() and screen.stream.isatty()
        self.answers: list[ShownAnswer] = []
        self.refused = False  # whether a turn was: without a terminal only the exit status can say so
        self.commands = {"/reset": self.reset, "/stats": self.stats, "/help": lambda: note(HELP)}

    def run(self) -> int:
        """Chat until /quit or the end of input. Returns the exit status. KeyboardInterrupt after a second Ctrl-C in a row at
        the prompt or, without a terminal, after any."""
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")  # so that a turn with invalid bytes is refused with a message
        if self.interactive:
            line_editing()
            note("/help lists the commands, /quit leaves")
        warned = False
        while True:
            try:
                message = input("> " if self.interactive else "")
                warned = False
                if message.rstrip() == "/quit":
                    return self.status
                self.take(message)
            except EOFError:
                if self.interactive:
                    note("")
                return self.status
            except KeyboardInterrupt as stop:
                if warned or not self.interactive or isinstance(stop, Terminated):
                    raise
                warned = True
                note("\n(Ctrl-C again, Ctrl-D or /quit leaves)")

    @property
    def status(self) -> int:
        return int(self.refused and not self.interactive)

    def take(self, message: str) -> None:
        """A command or a message."""
        if message.startswith("/"):
            name, *rest = message.split()
            if name not in (*self.commands, "/quit"):
                note(f"there is no command {name}: see /help")
            elif rest:
                note(f"{name} stands alone: leave out {' '.join(rest)!r}, or put a space before a message")
            else:
                self.commands[name]()
        elif message.strip():
            try:
                self.reply(message)
            except UserError as error:  # this turn fails; the conversation goes on without it
                note(f"run.py: {error}")
                self.refused = True

    def reply(self, message: str) -> None:
        """One turn, kept as far as its reply was shown."""
        turn = self.conversation.turn(message)
        length, context = len(turn.ids), self.decoder.target.context
        if length >= context:
            raise UserError(
                f"not sent: the conversation would take {length} tokens and leave no room for a reply in the context "
                f"of {context}; say it in fewer words, or start over with /reset"
            )
        answer = show_answer(self.decoder, self.conversation.tokenizer, turn.ids, self.options, self.screen)
        if answer.token_ids:
            self.conversation.keep(turn, answer.token_ids)
            self.answers.append(answer)
        if answer.error:
            raise answer.error
        if answer.stop_reason == "interrupted" and not self.interactive:
            raise KeyboardInterrupt
        reasons = {
            "interrupted": "stopped" if answer.token_ids else "stopped before the reply began: this turn is not kept",
            "length": f"the reply was cut at --max-new-tokens {self.options['max_new_tokens']}",
            "context": f"the context of {context} positions is full: /reset starts over",
        }
        if answer.stop_reason in reasons:
            note(f"({reasons[answer.stop_reason]})")

    def reset(self) -> None:
        self.conversation.reset()
        self.answers.clear()
        note("(a new conversation)")

    def stats(self) -> None:
        """Figures of the conversation so far."""
        if not self.answers:
            note("no turn yet")
            return
        tokens = sum(len(answer.token_ids) for answer in self.answers)
        rounds = [R for answer in self.answers for R in answer.output.round_lengths]
        ms = sum(answer.output.decode_seconds for answer in self.answers) * 1e3
        length, context = len(self.conversation.ids), self.decoder.target.context
        last = self.answers[-1]
        reused = last.output.reused
        note(f"turns    {len(self.answers)}; the conversation takes {length} of {context} positions")
        speed = f", {ms / tokens:.1f} ms a token, mean R {mean(rounds):.2f}" if rounds else ""
        note(f"replies  {tokens} tokens{speed}")
        note(f"last     {reused} prompt tokens were in the caches, {last.prompt_tokens - reused} were prefilled")


def line_editing() -> None:
    """Arrow keys and history in `input`; pasted text of several lines is one message."""
    try:
        import readline
    except ImportError:  # not on every platform
        return
    readline.parse_and_bind("set enable-bracketed-paste on")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
