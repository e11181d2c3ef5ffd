"""Conversations on a tiny random model with a tokenizer of bytes: what is decoded, what is reused, what is kept.

A random model writes broken UTF-8, so its own ids and those of its text differ in nearly every reply. Seeds are fixed.
"""

import io
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import run
from graphs.masks import BODIES
from minicast import Decoder, command, decode, round
from minicast.chat import Chat, Conversation
from minicast.program import Terminated
from minicast.round import State, prefill, read_features
from minicast.terminal import Screen
from model import load_draft, load_target, load_tokenizer
from model.errors import UserError
from test_tokenizer import byte_level, save
from tiny import write_byte_tokenizer, write_tiny_draft, write_tiny_target

CONTEXT = 1024
TEMPLATE = (  # ends each message, and opens the reply
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ message.content }}", "{{ message.content | upper }}")  # rewrites what was said
NEW = 10  # tokens of a reply
REQUEST = dict(method="cast", width=5, max_new_tokens=NEW, temperature=0.0, stop_ids=())


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Directories of a tiny target and its head."""
    directory = tmp_path_factory.mktemp("models")
    target = write_tiny_target(directory / "target", max_position_embeddings=CONTEXT)
    write_byte_tokenizer(target, TEMPLATE)
    return str(target), str(write_tiny_draft(directory / "draft", max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def models(names):
    return load_target(names[0]), load_draft(names[1])


@pytest.fixture
def tokenizer(names):
    return load_tokenizer(names[0])


class Terminal(io.StringIO):
    """Both ends of a terminal: what is typed, or what is shown."""

    def isatty(self):
        return True


@pytest.fixture
def talk(models, tokenizer, monkeypatch, capsys):
    """Type messages into a chat; one that is an exception is raised at the prompt.

    Returns the chat, what was shown, what stderr got, and the exit status ("interrupted": a KeyboardInterrupt).
    """

    def call(*messages, attention=None, terminal=True, decoder=None, **changes):
        monkeypatch.setattr(sys, "stdin", Terminal() if terminal else io.StringIO())
        typed = iter(messages)

        def typing(sign):
            assert sign == ("> " if terminal else "")
            message = next(typed, EOFError())
            if isinstance(message, BaseException):
                raise message
            return message

        monkeypatch.setattr("builtins.input", typing)
        shown = Terminal()
        decoder = decoder or Decoder(*models, attention=attention)
        room = Chat(decoder, Conversation(tokenizer), REQUEST | changes, Screen(shown))
        try:
            status = room.run()
        except KeyboardInterrupt:
            status = "interrupted"
        return room, shown.getvalue(), capsys.readouterr().err, status

    monkeypatch.setenv("NO_COLOR", "1")
    return call


def assert_caches_equal_a_fresh_prefill(state: State):
    """The target's keys and values, the drafter's, and the features, of every committed position."""
    fresh = State(state.target, state.draft, BODIES["sdpa"]())
    fresh.reserve(CONTEXT)
    with torch.no_grad():
        prefill(fresh, state.cached_ids, tap=True)
        read_features(state, state.prefix - state.drafted) if state.drafted < state.prefix else None
    P = state.prefix
    assert P == fresh.prefix == int(state.P) == state.tapped == state.drafted == len(state.cached_ids) > 0
    for ours, theirs in (
        (state.target_cache.data[..., :P, :], fresh.target_cache.data[..., :P, :]),
        (state.draft_cache.data[..., :P, :], fresh.draft_cache.data[..., :P, :]),
        (state.features[:, :P], fresh.features[:, :P]),
    ):
        assert torch.allclose(ours, theirs, atol=1e-4)


# Turns

@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("options", [dict(), dict(method="dflash", temperature=0.8, seed=3)], ids=str)
def test_every_turn_equals_a_fresh_decoder(models, tokenizer, body, options):
    """Reused caches are a fast path: the same tokens, rounds and caches as a prefill of all ids; and they are reused,
    by the rows that the target ran. Messages are long enough for the caches to grow between turns."""
    target, draft = models
    decoder, conversation, kept, slots = Decoder(target, draft, attention=body), Conversation(tokenizer), 0, set()
    request, rows = REQUEST | options, []
    for message in ("hello", "and again " * 16, "bye"):
        turn = conversation.turn(message)
        hook = target.register_forward_pre_hook(lambda module, arguments: rows.append(arguments[0].shape[1]))
        out = decoder.generate(turn.ids, **request)
        hook.remove()
        assert out.reused == kept and rows[0] == len(turn.ids) - kept
        expected = Decoder(target, draft, attention=body).generate(turn.ids, **request)
        assert (out.token_ids, out.round_lengths) == (expected.token_ids, expected.round_lengths)
        assert out.token_ids == Decoder(target).generate(turn.ids, **request | {"method": "ar"}).token_ids
        assert_caches_equal_a_fresh_prefill(decoder.state)
        conversation.keep(turn, out.token_ids)
        kept = decoder.state.prefix
        slots.add(decoder.state.slots)
        rows.clear()
    assert len(slots) == (3 if body == "sdpa" else 1)  # static caches have their size at once


def test_the_ids_that_the_model_chose_are_kept(models, tokenizer):
    """Broken UTF-8 has no ids of its own once it is text: only the model's own ids can be found in the caches."""
    decoder, conversation = Decoder(*models), Conversation(tokenizer)
    turn = conversation.turn("hello")
    out = decoder.generate(turn.ids, **REQUEST)
    conversation.keep(turn, out.token_ids)
    again = conversation.turn("next")
    assert again.text == f"<user>hello</><assistant>{tokenizer.decode(out.token_ids)}</><user>next</><assistant>"
    assert again.ids == turn.ids + out.token_ids + tokenizer.encode("</><user>next</><assistant>")
    assert again.ids != tokenizer.encode(again.text)
    said = len(turn.ids) + len(out.token_ids)
    assert decoder.generate(again.ids, **REQUEST).reused in (said - 1, said)  # the last id may be b, in no cache


@pytest.mark.parametrize("stop", ["}", "]"])
def test_a_stop_id_is_part_of_what_was_said(tmp_path, stop):
    """The template writes the end of a reply, and so did the model: once is enough. Where they write different ends,
    the template's is what the next turn has."""
    template = (
        "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer = save(tmp_path, tokenizer_config={"chat_template": template})
    conversation = Conversation(tokenizer)
    turn, reply = conversation.turn("hi"), tokenizer.encode("yes" + stop)
    conversation.keep(turn, reply)
    conversation.messages[-1]["content"] = "yes"  # as where the stop id is a special token
    assert conversation.turn("so").ids == tokenizer.encode("u:hi}a:yes}u:so}a:")


def test_a_template_that_rewrites_history_wins(tmp_path, models):
    """Some leave out what the model thought: then the ids are the template's, and reuse ends where they differ."""
    write_byte_tokenizer(tmp_path, FORGETFUL)
    tokenizer, target, draft = load_tokenizer(tmp_path), *models
    decoder, conversation = Decoder(target, draft), Conversation(tokenizer)
    for reused, message in ((0, "hello"), (len("<user>HELLO</><assistant>"), "next")):
        turn = conversation.turn(message)
        assert turn.ids == tokenizer.encode(turn.text)
        out = decoder.generate(turn.ids, **REQUEST)
        assert reused <= out.reused <= reused + 2  # a letter in capitals may be the same letter
        assert out.token_ids == Decoder(target).generate(turn.ids, **REQUEST | {"method": "ar"}).token_ids
        assert_caches_equal_a_fresh_prefill(decoder.state)
        conversation.keep(turn, out.token_ids)


def test_a_token_across_the_seam_is_tokenised_as_the_template_has_it(tmp_path):
    """Text after the reply, tokenised alone, may split otherwise than in its place."""
    end = "{% if message.role == 'assistant' %}x{% endif %}"
    template = "{% for message in messages %}{{ message.content }}" + end + "{% endfor %}"
    tokenizer = save(tmp_path, byte_level([("a", "x")]), tokenizer_config={"chat_template": template})
    for reply, seam in (("ba", True), ("ab", False)):
        conversation = Conversation(tokenizer)
        turn = conversation.turn("hi")
        split = [tokenizer.encode(letter)[0] for letter in reply]
        conversation.keep(turn, split)
        whole = tokenizer.encode(f"hi{reply}xso")
        assert conversation.turn("so").ids == whole
        assert (whole == tokenizer.encode("hi") + split + tokenizer.encode("xso")) is not seam


def test_flags_reach_every_turn(names, monkeypatch):
    """System prompt, thinking and decoding options: the second turn has them too."""
    seen = []

    def stream(self, prompt_ids, **options):
        seen.append((bytes(prompt_ids).decode(), options))
        return iter(())

    monkeypatch.setattr(Decoder, "stream", stream)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    flags = ["--system", "be brief", "--top-k", "7", "--seed", "5", "--method", "dflash", "--max-new-tokens", "9"]
    assert run.main(["--chat", "--model", names[0], "--draft-model", names[1], *flags]) == 0
    assert [text for text, _ in seen] == [f"<system>be brief</><user>{word}</><assistant>" for word in ("one", "two")]
    for _, options in seen:
        assert (options["top_k"], options["seed"], options["method"], options["max_new_tokens"]) == (7, 5, "dflash", 9)


def test_a_missing_template_is_found_before_loading(names, tmp_path, monkeypatch, capsys):
    """Not after minutes of loading, at the first message."""
    for file in Path(names[0]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(command, "load_target", lambda *_, **__: pytest.fail("weights were loaded"))
    assert run.main(["--chat", "--model", str(tmp_path), "--method", "ar"]) == 1
    assert "no chat template" in capsys.readouterr().err


# The terminal

def test_replies_are_shown_and_end_of_input_leaves(talk, models, tokenizer):
    room, shown, err, status = talk("hello", "  ", "", "a pasted\ntext of lines", "/quit", "never read")
    assert status == 0 and len(room.answers) == 2
    assert room.conversation.messages[2]["content"] == "a pasted\ntext of lines"
    conversation, expected = Conversation(tokenizer), ""
    for message in ("hello", "a pasted\ntext of lines"):
        turn = conversation.turn(message)
        ids = Decoder(*models).generate(turn.ids, **REQUEST).token_ids
        conversation.keep(turn, ids)
        text = tokenizer.decode(ids)
        expected += text if text.endswith("\n") else text + "\n"
    assert shown == expected and err.count(f"cut at --max-new-tokens {NEW}") == 2
    assert (room.conversation.ids, room.conversation.messages) == (conversation.ids, conversation.messages)
    assert talk("hello")[3] == 0  # Ctrl-D


def test_accepted_tokens_are_green(talk, monkeypatch):
    """Shared with run.py's single answer."""
    monkeypatch.setenv("NO_COLOR", "")
    room, shown, _, _ = talk("hello", "again", "more", max_new_tokens=30)
    green = sum(sum(answer.accepted) for answer in room.answers)
    assert ("\033[32m" in shown) is (green > 0) and green > 0


def test_stats(talk):
    """From the answers themselves; the last turn's reuse is what the decoder found."""
    room, _, err, _ = talk("/stats", "hello", "what else?", "/stats")
    first, second = room.answers
    rounds = first.output.round_lengths + second.output.round_lengths
    ms = (first.output.decode_seconds + second.output.decode_seconds) * 1e3
    reused = second.output.reused
    assert first.prompt_tokens + NEW - reused in (0, 1) and len(room.conversation.ids) == second.prompt_tokens + NEW
    for words in (
        "no turn yet", f"turns    2; the conversation takes {second.prompt_tokens + NEW} of {CONTEXT} positions",
        f"replies  {2 * NEW} tokens, {ms / (2 * NEW):.1f} ms a token, mean R {sum(rounds) / len(rounds):.2f}",
        f"last     {reused} prompt tokens were in the caches, {second.prompt_tokens - reused} were prefilled",
    ):
        assert words in err
    assert "1 tokens\n" in talk("hello", "/stats", max_new_tokens=1)[2]  # no round, no speed


def test_reset_help_and_unknown_commands(talk):
    room, shown, err, _ = talk("hello", "/reset", "/stats", "hello", "/help", "/rest now", " /not a command")
    assert len(room.answers) == 2 and len(room.conversation.messages) == 4
    assert "a new conversation" in err and "no turn yet" in err and "there is no command /rest: see /help" in err
    assert all(name in err for name in (*room.commands, "/quit", "Ctrl-C"))
    assert room.conversation.messages[2]["content"] == " /not a command"
    assert shown.startswith(2 * talk("hello")[1])  # the same question, and nothing before it


def test_ctrl_c_at_the_prompt_leaves_the_second_time(talk):
    """It is easily pressed a moment after a reply has ended, and the conversation would be gone."""
    stop = KeyboardInterrupt()
    room, _, err, status = talk("hello", stop, "more", stop, stop, "never read")
    assert status == "interrupted" and len(room.answers) == 2 and err.count("Ctrl-C again") == 2
    assert talk("hello", stop, terminal=False)[3] == "interrupted"
    room, _, err, status = talk("hello", Terminated(), "never read")  # nobody is there to press it again
    assert status == "interrupted" and len(room.answers) == 1 and "Ctrl-C again" not in err


def test_ctrl_c_in_a_reply_to_a_pipe_ends_the_chat(talk, monkeypatch):
    """Nobody is there to type the next message: the others are not answered."""
    stream, turns = Decoder.stream, []

    def interrupted(self, *arguments, **options):
        turns.append(arguments)
        yield next(stream(self, *arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "stream", interrupted)
    room, shown, _, status = talk("hello", "never answered", terminal=False)
    assert status == "interrupted" and len(turns) == len(room.answers) == 1 and len(shown.rstrip("\n")) == 1


def test_ctrl_c_stops_the_reply_and_keeps_what_was_shown(talk, models, tokenizer, monkeypatch):
    """The next turn goes on from there, as a fresh decoder would; nothing shown, nothing kept."""
    stream, interrupted_after = Decoder.stream, {0: 3, 1: 0}
    turns = iter(range(9))

    def interrupted(self, *arguments, **options):
        last = interrupted_after.get(next(turns))
        for number, step in enumerate(stream(self, *arguments, **options)):
            if number == last:
                raise KeyboardInterrupt
            yield step

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "stream", interrupted)
        room, shown, err, status = talk("hello", "too early", "go on", "/stats")
    cut, last = room.answers
    whole = Decoder(*models).generate(Conversation(tokenizer).turn("hello").ids, **REQUEST).token_ids
    assert cut.stop_reason == "interrupted" and whole[: len(cut.token_ids)] == cut.token_ids and len(cut.token_ids) >= 3
    assert shown.startswith(tokenizer.decode(cut.token_ids)) and "(stopped)" in err and "not kept" in err
    assert [message["content"] for message in room.conversation.messages[::2]] == ["hello", "go on"]
    assert room.conversation.messages[1]["content"] == tokenizer.decode(cut.token_ids)
    prompt = Conversation(tokenizer)
    prompt.keep(prompt.turn("hello"), cut.token_ids)
    assert last.token_ids == Decoder(*models).generate(prompt.turn("go on").ids, **REQUEST).token_ids
    assert status == 0 and f"replies  {len(cut.token_ids) + len(last.token_ids)} tokens" in err


@pytest.mark.parametrize("where", ["draft", "settle", "commit", "rewind", "prefill", "reserve"])
def test_ctrl_c_anywhere_in_a_round_leaves_caches_that_hold(talk, models, monkeypatch, where):
    """It may come between any two statements: half of a round's bookkeeping must not be taken for a prefix."""
    decoder, calls = Decoder(*models), []
    owner = {"draft": round, "settle": decode, "prefill": decode}.get(where, State)
    function = getattr(owner, where)

    def interrupts(*arguments, **options):
        calls.append(where)
        if len(calls) == 2:
            raise KeyboardInterrupt
        result = function(*arguments, **options)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, where, interrupts)
    room, _, err, status = talk("hello", "and " * 30, "more " * 30, "then " * 30, "so", decoder=decoder)
    assert err.count("stopped") == 2 and status == 0
    assert_caches_equal_a_fresh_prefill(decoder.state)
    reply_ids = room.answers[-1].token_ids
    prompt_ids = room.conversation.ids[: -len(reply_ids)]
    assert reply_ids == Decoder(*models).generate(prompt_ids, **REQUEST).token_ids


def test_interrupted_half_way_through_the_books_of_a_commit(models):
    """The ids are noted, their number is not yet: what is reused next has its keys and values."""
    decoder = Decoder(*models)
    prompt_ids = list(range(30))
    rounds = decoder.stream(prompt_ids, **REQUEST)
    next(rounds), next(rounds)
    state = decoder.state
    state.cached_ids += [1, 2]  # as `State.commit` begins
    rounds.close()
    again = prompt_ids + decoder.output.token_ids + [1, 2, 3]
    out = decoder.generate(again, **REQUEST)
    assert out.token_ids == Decoder(*models).generate(again, **REQUEST).token_ids
    assert_caches_equal_a_fresh_prefill(state)


def test_interrupted_right_after_the_books_of_a_prompt(models, monkeypatch):
    """What the books call tapped has its features: rounds are as good as those of a fresh decoder."""
    decoder, prompt_ids, commit = Decoder(*models), list(range(30)), State.commit

    def interrupts(*arguments):
        commit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(State, "commit", interrupts)
        decoder.generate(prompt_ids, **REQUEST)
    out, fresh = decoder.generate(prompt_ids, **REQUEST), Decoder(*models).generate(prompt_ids, **REQUEST)
    assert out.reused > 0 and out.token_ids == fresh.token_ids and out.round_lengths == fresh.round_lengths
    assert_caches_equal_a_fresh_prefill(decoder.state)


def test_a_full_context_refuses_the_turn_and_loses_nothing(talk):
    """One line with the way out; what was said is still there, and shorter words still fit."""
    long = "x" * (CONTEXT - 40)
    room, shown, err, status = talk("hello", long, "still there?", "/reset", long, "y" * 40)
    assert status == 0 and [answer.stop_reason for answer in room.answers] == ["length"]
    assert room.conversation.messages[0]["content"] == long
    refused = [line for line in err.splitlines() if "not sent" in line]
    assert len(refused) == 2 and all("/reset" in line and str(CONTEXT) in line for line in refused)
    before = talk("hello", "still there?")[1]
    assert shown.startswith(before)


@pytest.mark.parametrize("room_left", [0, 1])
def test_a_message_that_leaves_no_room_for_a_reply_is_not_sent(talk, room_left):
    room, _, err, _ = talk("x" * (CONTEXT - len("<user></><assistant>") - room_left))
    assert len(room.answers) == room_left and ("not sent" in err) == (room_left == 0)


def test_a_reply_that_fills_the_context_says_so(talk):
    fill = "x" * (CONTEXT - len("<user></><assistant>") - 5)
    room, _, err, _ = talk(fill, "more")
    assert room.answers[0].stop_reason == "context" and len(room.answers[0].token_ids) == 5
    assert f"the context of {CONTEXT} positions is full: /reset" in err and "not sent" in err


def test_an_error_costs_its_turn_alone(talk, models, monkeypatch):
    """What the decoder or the template refuses is one line, and the conversation goes on."""
    stream, turns = Decoder.stream, iter(range(9))

    def failing(self, *arguments, **options):
        if next(turns) == 1:
            raise UserError("cannot")
        return stream(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "stream", failing)
    room, _, err, status = talk("one", "two", "a\udc80", "three")
    assert status == 0 and len(room.answers) == 2 and "run.py: cannot\n" in err
    assert "run.py: the prompt is not valid Unicode at character 2: pass it in UTF-8\n" in err


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("last", [[], ["/quit"]])
def test_a_refused_turn_is_in_the_exit_status_where_nobody_sees_it(talk, terminal, last):
    assert talk("hello", *last, terminal=terminal)[3] == 0
    assert talk("a\udc80", *last, terminal=terminal)[3] == (0 if terminal else 1)


def test_messages_from_a_pipe(names, monkeypatch, capsys):
    """A line is a message; only replies on stdout; bytes that are no text cost one turn, and the status tells."""
    lines = "hello\n/stats\n".encode() + b"\xff\xfe\n" + "naïve".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    flags = ["--width", "5", "--max-new-tokens", "9"]
    assert run.main(["--chat", "--model", names[0], "--draft-model", names[1], *flags]) == 1
    captured = capsys.readouterr()
    assert "turns    1;" in captured.err
    tokenizer = load_tokenizer(names[0])
    decoder, conversation, text = Decoder(load_target(names[0])), Conversation(tokenizer), ""
    for message in ("hello", "naïve"):
        turn = conversation.turn(message)
        ids = decoder.generate(turn.ids, method="ar", max_new_tokens=9).token_ids
        conversation.keep(turn, ids)
        text += tokenizer.decode(ids).removesuffix("\n") + "\n"
    assert captured.out == text and captured.err.count("not valid Unicode at character 1") == 1


ALONE = ["--raw", "--json", "--show-tree", "--compare", "--explain", "--reprobe", "--explain-round"]


@pytest.mark.parametrize("flags", [["--chat", "-p", "x"], *(["--chat", flag] for flag in ALONE), []], ids=str)
def test_refuses_what_has_no_place_in_a_chat(flags, capsys):
    """Before anything is loaded, in one line that names the flags; and one of --chat and --prompt is needed."""
    with pytest.raises(SystemExit) as stop:
        run.main(flags)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(flag in err for flag in ("--chat", *flags) if flag.startswith("-"))


@pytest.mark.real
def test_in_a_terminal(names):
    """A process on a pseudo-terminal: the sign, a paste of two lines as one message, Ctrl-C, and Ctrl-D."""
    leader, follower = pty.openpty()
    flags = ["--chat", "--model", names[0], "--method", "ar", "--max-new-tokens", "900"]
    process = subprocess.Popen(
        [sys.executable, run.__file__, *flags], stdin=follower, stdout=follower, stderr=follower,
        env=os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it is ignored in background jobs
    )
    os.close(follower)
    shown = bytearray()

    def until(words: bytes) -> bytes:
        """Read up to these words, and take all that away."""
        while words not in shown:
            assert select.select([leader], [], [], 60)[0], shown
            shown.extend(os.read(leader, 4096))
        end = shown.index(words) + len(words)
        seen = bytes(shown[:end])
        del shown[:end]
        return seen

    until(b"> ")
    os.write(leader, b"\x1b[200~two\rlines\x1b[201~\r")
    until(b"\x1b[?2004l\r")  # the line is read, the reply comes
    while len(shown) < 30:  # some of the reply, not only the end of the line
        assert select.select([leader], [], [], 60)[0], shown
        shown.extend(os.read(leader, 4096))
    process.send_signal(signal.SIGINT)
    until(b"(stopped)")
    until(b"> ")
    os.write(leader, b"/stats\r")
    assert b"turns    1;" in until(b"prefilled")
    until(b"> ")
    os.write(leader, b"\x04")
    assert process.wait(20) == 0
    os.close(leader)


@pytest.mark.real
def test_two_turns_of_the_default_model_equal_a_fresh_prefill(monkeypatch):
    """Real weights and the real template: the whole first turn is found again, and nothing departs."""
    target, draft, tokenizer = load_target("smollm2"), load_draft("smollm2"), load_tokenizer("smollm2")
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n"))
    request = dict(method="cast", width=7, max_new_tokens=48, temperature=0.0, stop_ids=tokenizer.stop_ids)
    shown = io.StringIO()
    room = Chat(Decoder(target, draft), Conversation(tokenizer), request, Screen(shown))
    ends, stream = [], room.decoder.stream

    def watched(*arguments, **options):
        for round in stream(*arguments, **options):
            if round.stop_reason:
                ends.append(round)
            yield round

    monkeypatch.setattr(room.decoder, "stream", watched)
    assert room.run() == 0
    (first, second), last = room.answers, ends[0]
    assert "Paris" in first.text and first.stop_reason == "eos" and "user" not in shown.getvalue()
    said = first.prompt_tokens + len(first.token_ids)
    assert second.output.reused == said - (last.accepted < len(last.token_ids))  # the stop id only where a tree held it
    ids = tokenizer.encode_chat([*room.conversation.messages[:2], {"role": "user", "content": "And of Italy?"}])
    assert room.conversation.ids[: -len(second.token_ids)] == ids  # the ids kept are those the template would give
    fresh = Decoder(target, draft).generate(ids, **request)
    assert (second.token_ids, second.output.round_lengths) == (fresh.token_ids, fresh.round_lengths)


def test_commands_take_no_argument(talk):
    """What is wrong with it is said, and it is neither sent nor obeyed."""
    typed = ["hello", "/reset all", "/stats 3", "/quit now", "/nope", "/", " /stats 3", " /quit"]
    room, shown, err, status = talk(*typed)
    assert len(room.answers) == 3 and status == 0  # the first message, and the last two: they begin with a space
    lines = [line for line in err.splitlines() if "leave out" in line]
    for name, extra in (("/reset", "all"), ("/stats", "3"), ("/quit", "now")):
        assert any(name in line and repr(extra) in line for line in lines)
    assert "there is no command /nope" in err and "there is no command /:" in err


@pytest.mark.parametrize("flags, number, told", [
    (["--chat"], signal.SIGTERM, ""), (["-p", "hello"], signal.SIGTERM, "rounds"), (["-p", "hello"], signal.SIGHUP, "rounds"),
], ids=["chat", "answer", "hangup"])  # fmt: skip
@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def test_what_ends_a_program_ends_what_ctrl_c_stops(names, flags, number, told, interrupt):
    """An answer is shown as far as it came, with its figures; a chat does not wait for another message. A shell's background
    job ignores Ctrl-C, and is ended all the same."""
    options = ["--model", names[0], "--method", "ar", "--max-new-tokens", "900"]
    process = subprocess.Popen(
        [sys.executable, run.__file__, *flags, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: (signal.signal(signal.SIGINT, interrupt), signal.signal(signal.SIGHUP, signal.SIG_DFL)),
    )
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    shown, figures = process.stdout.read(), process.stderr.read().decode()
    assert shown.endswith(b"\n") and told in figures and "Traceback" not in figures
    process.stdin.close()
