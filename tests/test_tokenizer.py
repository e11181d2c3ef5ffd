"""Tokenizer, chat template, stop ids and the streaming detokenizer, on tokenizers built here."""

import datetime
import json
import math
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from model.errors import UsageError, UserError
from model.tokenizer import Tokenizer, load_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
SPECIAL = ["<bos>", "<eos>", "<turn>"]
BOS, EOS, TURN = range(3)
CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %} think{% endif %}{% endif %}"
)
TEXTS = [
    "plain", "👋🏽 wave", "日本語のテキスト", "naïve – “quotes”", "a\N{REPLACEMENT CHARACTER}b", "👩‍👩‍👧‍👦",
    " lead and trail ", "a 👋",
]


def byte_level(merges=()):
    """A byte-level BPE: one token a byte, so every character outside ASCII spans several, and a few
    merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *alphabet, *map("".join, merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


FULL_CONFIG = {
    "bos_token": "<bos>", "eos_token": {"content": "<eos>", "special": True}, "chat_template": CHAT,
}


def save(directory, tokenizer=None, tokenizer_config=FULL_CONFIG, **files):
    """A checkpoint's tokenizer, from a directory of the JSON files named."""
    directory.mkdir(exist_ok=True)
    (tokenizer or byte_level()).save(str(directory / "tokenizer.json"))
    for stem, value in {"tokenizer_config": tokenizer_config, **files}.items():
        (directory / f"{stem}.json").write_text(json.dumps(value))
    return Tokenizer(directory)


def test_template_that_writes_the_bos_gives_exactly_one(tmp_path):
    """The tokenizer's own BOS and the template's must not add up, in a chat or in raw text that quotes
    one."""
    tokenizer = byte_level()
    add_bos = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.post_processor = add_bos
    tokenizer = save(tmp_path, tokenizer)
    for ids in (tokenizer.encode_chat("hi"), tokenizer.encode("hi"), tokenizer.encode("<bos>hi")):
        assert ids[0] == BOS and ids.count(BOS) == 1
    assert tokenizer.encode("hi") == tokenizer.encode("<bos>hi")


def test_template_file_wins_over_the_config(tmp_path):
    """Newer checkpoints keep chat_template.jinja beside a tokenizer_config.json with an older template."""
    assert save(tmp_path).decode(save(tmp_path).encode_chat("hi")) == "[user] hi[assistant]"
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat("hi")) == "file: hi"


def test_system_prompt_thinking_and_conversations(tmp_path):
    """Every argument reaches the template; a text is a conversation of one user message."""
    tokenizer = save(tmp_path)
    assert tokenizer.encode_chat("hi") == tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokenizer.encode_chat("hi", system="S")) == "[system] S[user] hi[assistant]"
    assert tokenizer.decode(tokenizer.encode_chat("hi", enable_thinking=True)) == "[user] hi[assistant] think"
    said = (("user", "a"), ("assistant", "b"), ("user", "c"))
    turns = [{"role": role, "content": text} for role, text in said]
    text = tokenizer.decode(tokenizer.encode_chat(turns, system="S"))
    assert text == "[system] S[user] a[assistant] b[user] c[assistant]"


def test_system_prompts_that_a_template_has_or_demands(tmp_path):
    """One that repeats the template's own default is not ignored, and a template may refuse a conversation without."""
    default = "{% if messages[0].role != 'system' %}[S]{% else %}[{{ messages[0].content }}]{% endif %}{{ messages[-1].content }}"
    assert save(tmp_path, tokenizer_config={"chat_template": default}).render_chat("hi", system="S") == "[S]hi"
    demands = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    assert save(tmp_path, tokenizer_config={"chat_template": demands}).render_chat("hi", system="S") == "S"
    ignores = "{{ messages[-1].content }}"
    assert save(tmp_path, tokenizer_config={"chat_template": ignores}).render_chat("hi", system=" ") == "hi"  # nothing is lost


def test_template_runs_as_checkpoints_expect(tmp_path):
    """Block lines vanish whole, JSON is not escaped for HTML, and the globals templates call are there."""
    template = (
        "{% for message in messages %}\n"
        "    {% if loop.index0 >= 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ message | tojson }}{% endgeneration %}\n\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') }}"
    )
    named = [{"name": "default", "template": template}]
    tokenizer = save(tmp_path, tokenizer_config={"chat_template": named})
    text = tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "<é>"}] * 2))
    assert text == f'{{"role": "user", "content": "<é>"}}\n{datetime.datetime.now().year}'


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "no chat template.*--raw"),
        ("{% for %}", "cannot be read"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('No\nsystem role') }}{% endif %}",
         "No system role; leave out --system"),
        ("{{ messages[-1].content }}", "ignores system prompts: leave out --system"),
        ("{{ messages.__class__.__mro__ }}", "refuses this conversation"),
        ("{{ 1 / 0 }}", "refuses this conversation: division by zero"),
        ("{{ tools | length }}", "refuses this conversation"),
        ([{"name": "tool_use", "template": "x"}, "y"], "no chat template"),
        ({"default": "x"}, "no chat template"),
    ],
)
def test_templates_that_cannot_serve_say_so_in_one_line(tmp_path, template, message):
    """A system prompt that would be dropped silently is an error too; a hostile template stays in its
    sandbox."""
    tokenizer = save(tmp_path, tokenizer_config={} if template is None else {"chat_template": template})
    with pytest.raises(UserError, match=message) as error:
        tokenizer.encode_chat("hi", system="S")
    assert "\n" not in str(error.value)


def test_stop_ids_are_the_union_of_all_sources(tmp_path):
    """Checkpoints declare their end as an int, a list, or in one file only: text must stop at each of
    them."""

    def stop_ids(**files):
        return save(tmp_path / "_".join(files), **files).stop_ids

    several = {"eos_token_id": [EOS, 7]}
    assert stop_ids(config={"eos_token_id": TURN}, generation_config=several) == (EOS, TURN, 7)
    assert stop_ids(config={"eos_token_id": None}) == (EOS,)
    assert stop_ids(config={"eos_token_id": 7}) == (EOS, 7)  # the tokenizer's own, too
    assert stop_ids(special_tokens_map={"eos_token": "<turn>"}) == (EOS,)  # the older file says less
    for wrong in ("</s>", [EOS, "7"], {"id": 2}, True, -1):
        with pytest.raises(UserError, match="config.json: eos_token_id must be a token id or a list of them"):
            stop_ids(config={"eos_token_id": wrong})
    assert stop_ids(tokenizer_config={}) == ()
    assert stop_ids(tokenizer_config={}, generation_config={"eos_token_id": TURN}) == (TURN,)
    assert stop_ids(tokenizer_config={}, special_tokens_map={"eos_token": "<eos>"}) == (EOS,)
    assert stop_ids(tokenizer_config={"eos_token": "<absent>"}, config={"eos_token_id": TURN}) == (TURN,)


def pieces(tokenizer, ids, cuts):
    """The stream's pieces when ids arrive in groups that end at `cuts`."""
    stream = tokenizer.stream()
    parts = [stream.push(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)])]
    return [*parts, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_concatenate_to_the_text(tmp_path, text):
    """Token by token, and in two groups split at every point: the pieces are the text, and none ends in half
    a character (a replacement character that the text does not have)."""
    tokenizer = save(tmp_path, byte_level([("a", "i"), ("Ã", "©"), ("Ġ", "l"), ("Ġ", "ð")]))
    ids = tokenizer.encode(text)
    for cuts in (range(1, len(ids)), *([split] for split in range(len(ids) + 1))):
        parts = pieces(tokenizer, ids, cuts)
        assert "".join(parts) == text == tokenizer.decode(ids)
        assert all(part in text for part in parts)
    single = tokenizer.stream()
    assert "".join(single.push(id) for id in ids) + single.finish() == text


def test_streamed_pieces_concatenate_to_the_decode_of_any_ids(tmp_path):
    """Ids that no text has: broken UTF-8, special tokens and padded rows between the bytes of one
    character."""
    tokenizer = save(tmp_path)
    generator = random.Random(0)
    high = [byte_level().token_to_id(token) for token in pre_tokenizers.ByteLevel.alphabet() if token > "~"]
    for _ in range(200):
        pool = high if generator.random() < 0.7 else range(300)
        ids = [generator.choice(pool) for _ in range(generator.randrange(40))]
        cuts = sorted(generator.sample(range(len(ids) + 1), generator.randrange(len(ids) + 1)))
        assert "".join(pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def test_streaming_keeps_the_spaces_of_sentencepiece_tokens(tmp_path):
    """Decoded alone, "▁a" loses its space: a window that starts there needs context before it."""
    wave = [f"<0x{byte:02X}>" for byte in "👋".encode()]
    tokens = [*SPECIAL, "▁", "▁a", "▁b", "a", "b", *wave]
    ids_of = {token: id for id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids_of, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer = save(tmp_path, tokenizer)
    parts = [[ids_of[token]] for token in ("▁", "▁a", "▁b", "a", "b", "<eos>")]
    parts += [[ids_of[token] for token in wave], [len(tokens) + 5]]
    generator = random.Random(0)
    for _ in range(200):
        ids = sum(generator.choices(parts, k=12), [])
        cuts = sorted(generator.sample(range(len(ids)), generator.randrange(len(ids))))
        assert "".join(pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def test_a_long_answer_is_not_decoded_anew_for_each_token(tmp_path, monkeypatch):
    """Its time would grow with the square of its length."""
    tokenizer, decoded = save(tmp_path), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    text = 20 * "plain é "
    assert "".join(pieces(tokenizer, tokenizer.encode(text), range(1, 180))) == text
    assert max(decoded) <= 4


def test_streamed_text_does_not_depend_on_how_ids_are_grouped(tmp_path):
    """Rounds of different lengths must show one text, even of bytes that are no UTF-8, which this decoder turns into
    replacement characters by the run."""
    tokens = [*SPECIAL, "▁a", "<0x0A>", *(f"<0x{byte:02X}>" for byte in "👋é".encode())]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = save(tmp_path, tokenizer)
    generator = random.Random(0)
    for _ in range(300):
        ids = generator.choices(range(3, len(tokens)), k=8)
        cuts = sorted(generator.sample(range(len(ids)), 3))
        assert "".join(pieces(tokenizer, ids, cuts)) == "".join(pieces(tokenizer, ids, range(1, len(ids))))


def test_tokens_that_only_other_files_declare(tmp_path):
    """A fine-tuned model's tokenizer.json may lack its chat tokens: as plain text they would make another prompt, and
    an end that nothing stops at. transformers adds them, and leaves out of a text what is special by name alone."""
    tokenizer, size = byte_level(), byte_level().get_vocab_size()
    tokenizer.add_tokens(["<think>"])
    new = {size + 1: {"content": "<|end|>", "special": True}, size + 2: {"content": "<tool>", "special": False}}
    config = {"eos_token": "<|end|>", "additional_special_tokens": ["<think>"], "chat_template": CHAT}
    listed = {token["content"]: id for id, token in new.items()}
    for files in (
        {"tokenizer_config": config | {"added_tokens_decoder": {str(id): token for id, token in new.items()}}},
        {"tokenizer_config": config, "added_tokens": dict(reversed(listed.items()))},
    ):
        loaded = save(tmp_path / str(len(files)), tokenizer, **files)
        assert loaded.encode("<|end|><tool><think>") == [size + 1, size + 2, size]
        assert loaded.decode([size + 1, size + 2, size]) == "<tool>" and loaded.stop_ids == (size + 1,)
    with pytest.raises(UserError, match=f"lacks '<tool>' and has another token as number {size}"):
        save(tmp_path / "taken", tokenizer, tokenizer_config=config, added_tokens={"<tool>": size})
    for wrong in ({"bos_token": 3}, {"bos_token": {"a": 1}}, {"bos_token": ["a"]}, {"added_tokens_decoder": {"x": "<a>"}},
                  {"added_tokens_decoder": [3]}, {"additional_special_tokens": 3}):
        with pytest.raises(UserError, match="a special token must|lists tokens in an unknown form"):
            save(tmp_path / "wrong", tokenizer, tokenizer_config=wrong)
    for wrong in ({"<a>": None}, {"<a>": "7"}):
        with pytest.raises(UserError, match="added_tokens.json must give each token an id"):
            save(tmp_path / "wrong", tokenizer, tokenizer_config=config, added_tokens=wrong)


def test_a_special_token_is_matched_as_its_file_says(tmp_path):
    """Declared once more beside it by name alone, it would no longer take the space before it."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<pad>", lstrip=True, special=True)])
    tokenizer = save(tmp_path, tokenizer, tokenizer_config=FULL_CONFIG | {"pad_token": "<pad>"})
    assert len(tokenizer.encode("a <pad>")) == 2


def test_ids_without_a_token(tmp_path):
    """Rows that pad a vocabulary can be sampled: they decode to nothing, and show as their number."""
    tokenizer = save(tmp_path)
    assert tokenizer.decode([*tokenizer.encode("a"), 100_000, *tokenizer.encode("b")]) == "ab"
    assert tokenizer.token_text(100_000) == "<100000>"
    assert tokenizer.token_text(EOS) == "<eos>" and tokenizer.decode([EOS]) == ""
    assert tokenizer.decode([EOS, TURN], special=True) == "<eos><turn>"


def test_short_prompts_are_no_errors_here(tmp_path):
    """Only zero tokens are too few, and it is the decoder that says so; a chat is never empty."""
    tokenizer = save(tmp_path)
    assert tokenizer.encode("") == [] and len(tokenizer.encode(" ")) == 1
    assert tokenizer.decode(tokenizer.encode_chat("")) == "[user] [assistant]"


def test_text_that_is_no_unicode_is_refused_in_one_line(tmp_path):
    """A terminal's undecodable byte arrives as half a surrogate pair, which no tokenizer takes. Its place is counted
    in what was given, not in what the template makes of it."""
    tokenizer = save(tmp_path)
    for encode in (tokenizer.encode, tokenizer.encode_chat, lambda text: tokenizer.encode_chat(text, system="be brief")):
        with pytest.raises(UserError, match="^the prompt is not valid Unicode at character 2: pass it in UTF-8$"):
            encode("a\udc80")
    with pytest.raises(UserError, match="^the system prompt is not valid Unicode at character 3"):
        tokenizer.encode_chat("fine", system="ab\udc80")
    with pytest.raises(UserError, match="^a message is not valid Unicode at character 1"):
        tokenizer.encode_chat([{"role": "assistant", "content": "\udc80"}])


@pytest.mark.parametrize("conversation", [
    5, ["hello"], [{"role": "user"}], [{"content": "hello"}], [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
], ids=str)
def test_what_is_no_conversation_is_refused(tmp_path, conversation):
    with pytest.raises(UsageError, match=r'^a conversation is a text, or a list of \{"role": "user" or another, "content": text\}$'):
        save(tmp_path).encode_chat(conversation)


def test_a_text_has_at_least_as_many_tokens_as_is_known_before_it_is_encoded(tmp_path):
    tokenizer = save(tmp_path, byte_level([("a", "b"), ("ab", "ab")]))
    for text in [*TEXTS, "", "abab" * 9, "abababa", "<turn>ab<turn>", "<turn>" * 3]:
        least = math.ceil(len(text) / len("<turn>"))
        assert least == tokenizer.least_tokens(text) <= len(tokenizer.encode(text)), text


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    """Some checkpoints store the settings of their training: a prompt must not be cut or padded by them."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(save(tmp_path, tokenizer).encode("0123456789")) == 10


def test_directories_without_a_readable_tokenizer(tmp_path):
    """Absent, cut, or no JSON: one line with the path."""
    with pytest.raises(UserError, match="no tokenizer.json"):
        Tokenizer(tmp_path)
    save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="tokenizer_config.json is not a JSON object"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole[:100])
    with pytest.raises(UserError, match="tokenizer.json cannot be read") as error:
        Tokenizer(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.real
def test_default_model_renders_and_reads_as_its_reference():
    """Ids of rendered prompts, with the template's own system prompt, and texts of answers: an independent
    implementation's."""
    tokenizer = load_tokenizer("smollm2")
    cases = json.loads((GOLDENS / "smollm2-greedy.json").read_text())
    assert cases and tokenizer.stop_ids == (2,)
    for case in cases:
        assert tokenizer.encode_chat(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["new_ids"]) == case["text"]
        assert "".join(pieces(tokenizer, case["new_ids"], range(1, len(case["new_ids"])))) == case["text"]
    text = tokenizer.decode(tokenizer.encode_chat("hi", system="Be brief."))
    assert text == "system\nBe brief.\nuser\nhi\nassistant\n"  # its own default is gone
