"""Text to token ids and back: tokenizer.json through `tokenizers`, the chat template through jinja2.

The chat template is run as transformers runs it (same sandbox, whitespace rules and globals), so that a rendered prompt
has the ids that the model was trained on. The stop ids are those of every file in which a checkpoint may declare an end
of text. The streaming detokenizer gives out text as soon as it is final, and never half a character.

Only checkpoints with a tokenizer.json are read. A template's arguments for tools and documents cannot be given.
"""

import datetime
import json
import math
import os
from functools import cached_property
from pathlib import Path

import tokenizers

from model import hub
from model.errors import UsageError, UserError
from model.files import Progress, another_copy, read_json, read_text

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are not, or not yet, a character

Messages = list[dict[str, str]]  # [{"role": "system" | "user" | "assistant", "content": text}, ...]


def load_tokenizer(name: str | os.PathLike, progress: Progress | None = None) -> "Tokenizer":
    """The tokenizer of a known pair, a directory or a hub id; progress: as for `hub.resolve`.

    Raises:
        UsageError: the name is neither a directory, nor a known pair's name, nor the id of a repository on the hub
        UserError: a download failed, or a file of the tokenizer is missing or damaged
    """
    return Tokenizer(hub.resolve(name, "tokenizer", progress))


class Tokenizer:
    """A checkpoint's tokenizer, chat template and stop ids.

    Attributes:
        stop_ids: every id that ends a text, ascending
        special_tokens: the texts of special tokens by name ("bos_token", …), as the chat template gets them

    UserError where a file in `directory` is missing or damaged.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{self.directory} has no tokenizer.json, the only form that is read")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no class of its own
            raise UserError(f"{path} cannot be read: {error}; {another_copy(path)}") from error
        # A file may hold the truncation and padding of the training, but a prompt is never altered.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = {
            **read_object(self.directory / "special_tokens_map.json"),
            **read_object(self.directory / "tokenizer_config.json"),
        }
        declared = {name: self._config.get(name) for name in SPECIAL_TOKENS}
        self.special_tokens = {name: self._text_of(token) for name, token in declared.items() if token}
        try:
            self._add_declared()
        except (TypeError, ValueError, AttributeError) as error:
            where = self.directory / "tokenizer_config.json"
            raise UserError(f"{where} lists tokens in an unknown form: save the tokenizer anew") from error
        self.stop_ids = self._find_stop_ids()

    def encode(self, text: str) -> list[int]:
        """The ids of a text without the chat template, after a BOS if the tokenizer begins plain text with one.

        UsageError where it is not valid Unicode.
        """
        check_unicode(text, "the prompt")
        bos = self.special_tokens.get("bos_token")
        has_bos = bos is not None and text.startswith(bos)
        return self._tokenizer.encode(text, add_special_tokens=not has_bos).ids

    def least_tokens(self, text: str) -> int:
        """How many ids a text has at least, found without encoding it: no token covers more characters than it has, but
        for those that the tokenizer drops or joins beforehand."""
        return math.ceil(len(text) / max(map(len, self._tokenizer.get_vocab())))

    def encode_chat(
        self, conversation: str | Messages, system: str | None = None, enable_thinking: bool = False
    ) -> list[int]:
        """The ids of a conversation in the chat template, up to where the model's answer begins.

        Arguments and errors as for `render_chat`.
        """
        return self.encode_rendered(self.render_chat(conversation, system, enable_thinking))

    def render_chat(
        self, conversation: str | Messages, system: str | None = None, enable_thinking: bool = False
    ) -> str:
        """The text that the chat template makes of a conversation, with special tokens written out.

        Args:
            conversation: messages, or the text of one user message
            system: put in front as a system message
            enable_thinking: for templates with a thinking mode; others ignore it

        Raises:
            UsageError: these are no messages, or a text is not valid Unicode
            UserError: the chat template is missing or broken, refuses the conversation or ignores `system`
        """
        messages = conversation
        if isinstance(conversation, str):
            messages = [{"role": "user", "content": conversation}]
        if not is_conversation(messages):
            raise UsageError('a conversation is a text, or a list of {"role": "user" or another, "content": text}')
        for message in messages:
            check_unicode(message["content"], "the prompt" if message["role"] == "user" else "a message")
        if system is None:
            return self._render(messages, enable_thinking)
        check_unicode(system, "the system prompt")
        text, other = (
            self._render([{"role": "system", "content": content}, *messages], enable_thinking)
            for content in (system, system + ".")
        )
        if system.strip() and text == other:
            raise UserError(f"the chat template of {self.directory} ignores system prompts: leave out --system")
        return text

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of text from `render_chat`, or of a part of it, in which all special tokens are written out."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], special: bool = False) -> str:
        """The text of the ids, without special tokens unless `special`. Ids that have no token, as rows that pad the
        vocabulary, are left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def token_text(self, id: int) -> str:
        """One token for display, special tokens included."""
        return self._tokenizer.decode([id], skip_special_tokens=False) or f"<{id}>"

    def stream(self) -> "TextStream":
        """A detokenizer for one answer, token by token."""
        return TextStream(self)

    def _text_of(self, token: str | dict) -> str:
        """The text of a declared special token: it is declared as its text, or as an object that also says how it is
        matched. UserError for anything else."""
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise UserError(f"{self.directory}: a special token must be a text, or have one as content, got {token!r}")
        return text

    def _add_declared(self) -> None:
        """Take from the files beside tokenizer.json what transformers does: tokens that tokenizer.json lacks, as a
        fine-tuned model's may, and which tokens are special. UserError where another token has a token's id."""
        decoder = self._config.get("added_tokens_decoder") or {}
        file = self.directory / "added_tokens.json"
        listed = read_object(file)
        if not all(type(id) is int for id in listed.values()):
            raise UserError(f"{file} must give each token an id: save the tokenizer anew")
        listed |= {self._text_of(token): id for id, token in decoder.items()}
        also_special = self._config.get("additional_special_tokens") or []
        special = {*self.special_tokens.values(), *map(self._text_of, also_special)}
        special |= {self._text_of(token) for token in decoder.values() if token.get("special")}
        for text, id in sorted(listed.items(), key=lambda item: int(item[1])):
            if self._tokenizer.token_to_id(text) is None:
                self._tokenizer.add_tokens([tokenizers.AddedToken(text, special=text in special, normalized=False)])
                if self._tokenizer.token_to_id(text) != int(id):
                    stale = f"tokenizer.json lacks {text!r} and has another token as number {id}"
                    raise UserError(f"{self.directory}: {stale}: save the tokenizer anew")
        marked = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        known = sorted(text for text in special - marked if self._tokenizer.token_to_id(text) is not None)
        self._tokenizer.add_special_tokens(known)

    def _find_stop_ids(self) -> tuple[int, ...]:
        """The EOS ids of config.json, generation_config.json and the special tokens."""
        found = set()
        for name in ("config.json", "generation_config.json"):
            declared = read_object(self.directory / name).get("eos_token_id")
            ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
            if not all(type(id) is int and id >= 0 for id in ids):
                file = self.directory / name
                raise UserError(f"{file}: eos_token_id must be a token id or a list of them, got {declared!r}")
            found.update(ids)
        if "eos_token" in self.special_tokens:
            found.add(self._tokenizer.token_to_id(self.special_tokens["eos_token"]))
        return tuple(sorted(found - {None}))

    def _render(self, messages: Messages, enable_thinking: bool) -> str:
        template = self._template
        try:
            return template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True,
                enable_thinking=enable_thinking, **self.special_tokens,
            )
        except Exception as error:  # a template may divide by zero
            has_system = any(message["role"] == "system" for message in messages)
            raise UserError(
                f"the chat template of {self.directory} refuses this conversation: {one_line(error)}; "
                + ("leave out --system" if has_system else "run.py --raw does without it")
            ) from error

    @cached_property
    def _template(self):
        """The compiled chat template, of chat_template.jinja or else of tokenizer_config.json."""
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        path = self.directory / "chat_template.jinja"
        source = read_text(path) if path.is_file() else self._config.get("chat_template")
        if isinstance(source, list):  # several named templates: [{"name": ..., "template": ...}, ...]
            named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default")
            source = next(named, {}).get("template")
        if not isinstance(source, str):
            raise UserError(f"{self.directory} has no chat template: run.py --raw continues plain text without one")

        def raise_exception(message):
            raise jinja2.TemplateError(message)

        def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
            # jinja2's own filter escapes characters for HTML, which would change the prompt.
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        class Generation(jinja2.ext.Extension):
            """{% generation %} … {% endgeneration %} marks a reply for training. The text stays the same."""

            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template of {self.directory} cannot be read: {one_line(error)}; "
                "run.py --raw does without it"
            ) from error


class TextStream:
    """The text of a growing list of ids: the pieces from `push` and `finish` join to what decoding all ids would give.

    The text is the same however the ids are grouped. It differs from that of all ids only where a SentencePiece decoder
    meets bytes that are not UTF-8: of a run that holds such bytes it makes replacement characters only, and part of the
    run may have been given out as text before.

    A character may span several tokens, and some decoders treat the first token of a text differently. So a window of
    recent ids is decoded instead of single ones: those that gave the last piece, as context, and those that came since.
    Text is given out up to any replacement characters at its end, since these may be the beginning of a character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # ids at the start of the window whose text has all been given out
        self._shown = 0  # characters of the window's text that have been given out

    def push(self, ids: int | list[int]) -> str:
        """The text that becomes final with these ids, perhaps none."""
        return "".join(map(self._push, [ids] if isinstance(ids, int) else ids))

    def _push(self, id: int) -> str:
        self._window.append(id)
        text = self._tokenizer.decode(self._window)
        final = text.rstrip(REPLACEMENT)
        piece = final[self._shown :]
        if piece and len(final) == len(text):
            # The window ends between two characters: from here on, the ids of this piece are context enough.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._tokenizer.decode(self._window))
        else:
            self._shown = max(self._shown, len(final))
        return piece

    def finish(self) -> str:
        """The rest of the text, in which an unfinished character is now a replacement character."""
        return self._tokenizer.decode(self._window)[self._shown :]


def read_object(path: Path) -> dict:
    """The JSON object in a file, empty if there is no such file. UserError where it is damaged."""
    return read_json(path) if path.is_file() else {}


def is_conversation(messages) -> bool:
    """Whether these are `Messages`, in a list or a tuple."""
    return isinstance(messages, (list, tuple)) and all(
        isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        for message in messages
    )


def check_unicode(text: str, what: str) -> None:
    """UsageError unless this is valid Unicode: a byte that a terminal could not decode arrives as half of a surrogate
    pair, which no tokenizer accepts. what: what it is, for the error"""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid Unicode at character {error.start + 1}: pass it in UTF-8") from error


def one_line(error: Exception) -> str:
    """The error's message without line breaks."""
    return " ".join(str(error).split())
