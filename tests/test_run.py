"""run.py from the flag to the last line on stderr, on a tiny random model with a tokenizer of bytes.

Nothing here is random but the models' weights, which have fixed seeds.
"""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

import run
from graphs import capture
from graphs.masks import BODIES
from minicast import bench, command, paper_probe, probe
from minicast.command import Checkpoints
from minicast.answer import Output, Round
from minicast.decode import Decoder
from minicast.methods import METHODS, best_first
from minicast.terminal import DIM, GREEN, PLAIN, RESET, Screen, ShownAnswer, show_answer, tree_lines
from minicast.tree import RANK_CAP, Tree
from model import hub, load_draft, load_target, load_tokenizer
from model.errors import UserError
from model.tokenizer import Tokenizer
from tiny import write_byte_tokenizer, write_tiny_draft, write_tiny_target

ROOT = Path(run.__file__).parent


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of a tiny target and its head."""
    directory = tmp_path_factory.mktemp("models")
    target = write_tiny_target(directory / "target", max_position_embeddings=256)
    write_byte_tokenizer(target)
    return str(target), str(write_tiny_draft(directory / "draft", max_position_embeddings=256))


@pytest.fixture
def cli(models, capsys):
    """Run the command line on the tiny model -> exit status, stdout, stderr."""

    def call(*flags: str) -> tuple[int, str, str]:
        try:
            status = run.main(["-p", "hello", "--model", models[0], "--draft-model", models[1], *flags])
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    call.target = models[0]
    return call


@pytest.fixture
def spy(monkeypatch):
    """What reaches `Decoder.stream`: a dict filled when it is called; nothing is decoded."""
    seen = {}

    def stream(self, prompt_ids, **options):
        seen.update(options, prompt_ids=prompt_ids, decoder=self)
        return iter(())

    monkeypatch.setattr(Decoder, "stream", stream)
    return seen


# Flags

@pytest.mark.parametrize(
    "flag, values",
    [
        ("--temperature", ["-1", "nan", "inf", "-inf", "hot"]),
        ("--top-p", ["0", "-0.1", "1.5", "nan"]),
        ("--top-k", ["-5", "0", "1.5"]),
        ("--max-new-tokens", ["-1", "x"]),
        ("--width", ["-1", "wide"]),
        ("--rank-cap", ["0", "-2", "all"]),
        ("--seed", ["-1", str(2**63)]),
        ("--method", ["beam"]),
        ("--verifier", ["lucky"]),
        ("--attention", ["flush"]),
        ("--dtype", ["int4"]),
        ("--device", ["toaster", "meta", "cuda:99", "cpu:1"]),
    ],
)
def test_refuses_bad_values_before_loading(cli, monkeypatch, flag, values):
    """A bad value is exit status 2 and one line that names the flag, and no weights are loaded for it."""
    monkeypatch.setattr(command, "load_target", lambda *_, **__: pytest.fail("weights were loaded"))
    for value in values:
        status, out, err = cli(flag, value)
        assert (status, out) == (2, "") and flag in err
        assert err.count("\n") == 1 and err.startswith("run.py: ")


def test_a_gpu_that_is_not_there_is_refused(cli, monkeypatch):
    """By its number, whatever the machine has; one that is there is taken."""
    for count, device, there in ((0, "cuda", False), (0, "cuda:0", False), (1, "cuda:1", False), (2, "cuda:1", True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        if there:
            assert command.Placement.choose(device, "float32").device == torch.device(device)
            continue
        said = f"run.py: --device {device}: torch sees {count} CUDA devices; try --device cpu\n"
        assert cli("--device", device) == (2, "", said)


@pytest.mark.parametrize(
    "flags",
    [
        ("--raw", "--system", "be brief"), ("--raw", "--enable-thinking"), ("--show-tree", "--json"),
        ("--explain-round", "--json"), ("--explain-round", "--show-tree"), ("--explain-round", "--compare"),
    ],
)
def test_refuses_flags_that_would_be_ignored(cli, flags):
    status, _, err = cli(*flags)
    assert status == 2 and all(flag in err for flag in flags if flag.startswith("--"))


def test_help_and_usage_errors_do_not_import_torch():
    """Importing torch takes seconds, which --help and a typing error should not."""
    wrong = {"--temperature": ("hot", "-1", "nan", "inf"), "--top-p": ("0", "1.5", "nan"), "--top-k": ("0",)}
    wrong |= {"--seed": ("-1", str(2**63)), "--rank-cap": ("0",), "--width": ("wide",)}
    lines = [["--help"], ["--raw"], *(["-p", "x", flag, value] for flag, values in wrong.items() for value in values)]
    code = (
        "import sys, run\n"
        f"for flags in {lines}:\n"
        "    try: run.main(flags)\n"
        "    except SystemExit: pass\n"
        "    else: sys.exit(str(flags))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_choices_are_what_the_decoder_offers():
    """The parser lists them itself, so as not to import them."""
    choices = {action.dest: action.choices for action in parser_actions()}
    assert set(choices["method"]) == set(METHODS) and set(run.METHODS) == set(METHODS)
    assert set(choices["attention"]) == set(BODIES)
    for dtype in choices["dtype"]:
        assert command.Placement.choose("cpu", dtype).dtype.is_floating_point
    assert {action.dest: action.default for action in parser_actions()}["rank_cap"] == RANK_CAP


DECODING = [  # flags, the option that must reach the decoder, its value there
    (("--method", "dflash"), "method", "dflash"),
    (("--width", "3"), "width", 3),
    (("--width", "round"), "width", "round"),
    (("--max-new-tokens", "7"), "max_new_tokens", 7),
    (("--temperature", "0.5"), "temperature", 0.5),
    (("--top-k", "9"), "top_k", 9),
    (("--top-p", "0.3"), "top_p", 0.3),
    (("--top-p", "1"), "top_p", 1.0),
    (("--seed", "11"), "seed", 11),
    (("--rank-cap", "2"), "rank_cap", 2),
    (("--rank-cap", "none"), "rank_cap", None),
    (("--verifier", "stochastic"), "verifier", "stochastic"),
]


@pytest.mark.parametrize("flags, option, value", DECODING)
def test_flag_reaches_the_decoder(cli, spy, flags, option, value):
    """A flag that is parsed and then forgotten changes nothing, and nobody notices."""
    assert cli()[0] == 0
    default = spy[option]
    assert cli(*flags)[0] == 0
    assert spy[option] == value and default != value


def test_defaults_reach_the_decoder(cli, spy):
    cli()
    expected = dict(method="cast", width="auto", max_new_tokens=256, temperature=0.0, top_k=None, top_p=None)
    assert {name: spy[name] for name in expected} == expected
    assert (spy["seed"], spy["rank_cap"], spy["verifier"], tuple(spy["stop_ids"])) == (0, 8, "direct", ())


def test_draft_vocabulary_reaches_the_head(cli, spy, models):
    """The most frequent tokens of the list beside the head; without a list, one line that says what is missing."""
    file = Path(models[1]) / "frequent_tokens.json"
    status, _, err = cli("--draft-vocabulary", "3")
    assert status == 2 and "frequent_tokens.json is missing" in err and err.count("\n") == 1
    file.write_text('{"tokens": [9, 4, 200, 7]}')
    try:
        status, _, err = cli("--draft-vocabulary", "3")
        assert status == 0 and "listed" not in err
        assert "--draft-vocabulary 5: 4 tokens are listed beside the head" in cli("--draft-vocabulary", "5")[2]
        status, _, err = cli("--draft-vocabulary", "4")  # as many as there are
        assert status == 0 and "listed" not in err
        assert cli("--draft-vocabulary", "3")[0] == 0
    finally:
        file.unlink()
    assert spy["decoder"].draft.vocabulary.tolist() == [4, 9, 200]
    assert cli("--draft-vocabulary", "0")[0] == 2
    form, beyond = 'must hold {"tokens": [different token ids', "holds ids beyond the target's vocabulary of 256"
    for damaged, told in (
        ('{"ids": [1]}', form), ('{"tokens": []}', form), ('{"tokens": ["a"]}', form), ('{"tokens": 7}', form),
        ('{"tokens": [1, -1, 2]}', form), ('{"tokens": [5, 6, 5]}', form), ('{"tokens": [1, 256, 2]}', beyond),
    ):
        file.write_text(damaged)
        status, _, err = cli("--draft-vocabulary", "3")
        assert status == 1 and told in err and err.count("\n") == 1


def test_attention_flag_reaches_the_decoder(cli, spy):
    for name, body in BODIES.items():
        cli("--attention", name)
        assert isinstance(spy["decoder"].state.body, body)


def test_explain_and_reprobe(cli, monkeypatch):
    """The rule's figures go to stderr, text stays alone on stdout; costs are measured again when asked, only then."""
    probed = []
    measure = probe.measure_costs
    monkeypatch.setattr(probe, "measure_costs", lambda *known: probed.append(0) or measure(*known))
    few = ("--raw", "--max-new-tokens", "4")
    assert cli(*few)[0] == 0
    probed.clear()
    status, text, err = cli(*few, "--reprobe")
    assert status == 0 and len(probed) == 1 and "costs on" not in err
    for flags in ((), ("--width", "round"), ("--method", "ar")):
        status, out, err = cli(*few, *flags, "--explain")
        assert status == 0 and out == text and "costs on" in err and "rounds" in err
    assert len(probed) == 1


def test_probe_full(cli, monkeypatch, tmp_path):
    """Table 5's counts on stderr, and N* or why there is none; the text is the same with it."""
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path))  # no curve was learned there
    monkeypatch.setattr(paper_probe, "WARM_UPS", 0)
    monkeypatch.setattr(paper_probe, "REPEATS", 1)
    few = ("--raw", "--max-new-tokens", "4", "--method", "ar")
    _, text, before = cli(*few)
    status, out, err = cli(*few, "--probe-full")
    assert status == 0 and out == text and "fit from n = 16" not in before
    for words in ("| packed rows n | 1 | 16 | 24 |", "after 256 positions", "fit from n = 16", "no N* follows yet"):
        assert words in err


def test_compile_and_eager_reach_the_decoder(cli, spy, monkeypatch):
    """Without it the decoder decides, by its device."""
    original, seen = Decoder.__init__, []

    def init(self, *models, **options):
        seen.append(options["compile"])
        original(self, *models, **options)

    monkeypatch.setattr(Decoder, "__init__", init)
    cli()
    cli("--eager")
    assert seen == [None, False]
    cli("--compile", "--max-new-tokens", "0")
    assert seen == [None, False, True]
    assert cli("--compile", "--eager")[0] == 2


def test_prompt_flags_reach_the_template(cli, spy, models, monkeypatch):
    tokenizer = load_tokenizer(models[0])
    cases = {
        (): "<user>hello",
        ("--system", "be brief"): "<system>be brief<user>hello",
        ("--enable-thinking",): "<user>hello<think>",
        ("--raw",): "hello",
    }
    for flags, text in cases.items():
        cli(*flags)
        assert spy["prompt_ids"] == tokenizer.encode(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("two\nlines é\n\n".encode())))
    cli("-p", "-", "--raw")
    assert spy["prompt_ids"] == tokenizer.encode("two\nlines é\n")


def test_model_flags_reach_the_loaders(cli, spy, models, monkeypatch):
    """Name, dtype and device go to both loaders, the head's first: what is wrong with it is told before the target is
    downloaded. A method that never drafts loads no head."""
    loaded = []

    def watch(kind, load):
        def watched(name, dtype, device, progress):
            loaded.append((kind, name, dtype, str(device)))
            return load(name, dtype, device, progress)

        return watched

    monkeypatch.setattr(command, "load_target", watch("target", load_target))
    monkeypatch.setattr(command, "load_draft", watch("draft", load_draft))
    cli("--device", "cpu", "--dtype", "bfloat16")
    assert loaded == [(kind, name, torch.bfloat16, "cpu") for kind, name in (("draft", models[1]), ("target", models[0]))]
    for flags in (("--method", "ar"), ("--width", "0")):
        loaded.clear()
        assert cli("--device", "cpu", *flags)[0] == 0
        assert loaded == [("target", models[0], torch.float32, "cpu")]
    loaded.clear()
    assert cli("--device", "cpu", "--method", "dflash", "--width", "0")[0] == 0  # the chain has no width
    assert [kind for kind, *_ in loaded] == ["draft", "target"]


def parser_actions():
    """The parser's actions, caught where parsing would begin."""
    caught = []

    class Caught(run.Parser):
        def parse_args(self, argv):
            caught.extend(self._actions)
            return super().parse_args(["-p", ""])

    parser, run.Parser = run.Parser, Caught
    try:
        run.parse_arguments([])
    finally:
        run.Parser = parser
    return caught


def test_every_flag_has_a_spy():
    """A flag that is added without a test above, or below for the output's, fails here."""
    watched = {option for _, option, _ in DECODING} | {"attention", "prompt", "system", "enable_thinking"}
    watched |= {"raw", "model", "draft_model", "device", "dtype", "show_tree", "compare", "json", "help"}
    watched |= {"explain", "reprobe", "probe_full", "compile", "draft_vocabulary"}
    watched |= {"chat", "explain_round"}  # in test_chat.py and test_narrate.py
    assert {action.dest for action in parser_actions()} == watched


# Text

@pytest.fixture(scope="module")
def expected(models):
    """The text of 40 greedy tokens after "hello", and their ids, by the decoder itself."""
    tokenizer = load_tokenizer(models[0])
    decoder = Decoder(load_target(models[0]))
    output = decoder.generate(tokenizer.encode("hello"), method="ar", max_new_tokens=40)
    return tokenizer.decode(output.token_ids), output.token_ids


def with_newline(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


@pytest.mark.parametrize("method", METHODS)
def test_streams_the_decoded_text(cli, expected, method):
    """Pieces that hold back half characters add up to the whole; stderr has the figures and both R's."""
    status, out, err = cli("--raw", "--max-new-tokens", "40", "--method", method)
    assert (status, out) == (0, with_newline(expected[0]))
    for word in ("tok/s", "ms a token", "committed", "accepted", "lengths", "peak", "stopped: length"):
        assert word in err
    assert f"of {method}" in err and "Traceback" not in err and "\033" not in out + err
    assert 50 < int(err.split("memory   ")[1].split(" MB at peak")[0]) < 50_000  # of this process, which has torch in it


def test_json_is_one_object(cli, expected, models):
    status, out, err = cli("--raw", "--max-new-tokens", "40", "--json")
    answer = json.loads(out)
    assert status == 0 and err == "" and (answer["text"], answer["token_ids"]) == expected
    assert sum(answer["round_lengths"]) == 39 and len(answer["widths"]) == len(answer["round_lengths"])
    assert [R - 1 for R in answer["round_lengths"]][:-1] == answer["accepted"][:-1]  # the last may be cut
    assert answer["method"] == "cast" and answer["stop_reason"] == "length" and models[0] in answer["weights"]
    assert answer["ms_per_token"] == pytest.approx(answer["decode_seconds"] * 1e3 / 40)
    assert answer["placement"] == "float32 on cpu" and 50e6 < answer["peak_memory_bytes"] < 50e9
    asked = {"seed": 3, "top_k": None, "temperature": 0.5, "attention": "static", "compiled": False}
    out = cli("--raw", "--json", "--seed", "3", "--temperature", "0.5", "--attention", "static")[1]
    assert asked.items() <= json.loads(out)["options"].items()
    assert json.loads(out)["options"]["raw"] is True and json.loads(out)["options"]["system"] is None


@pytest.mark.parametrize("works", [True, False])
def test_json_tells_whether_layers_ran_compiled(cli, monkeypatch, works):
    """Not whether that was asked for: times of the two are not to be compared. A shape may fail where another works."""
    def fails(*_):
        raise torch._dynamo.exc.TorchDynamoException("no such kernel")

    monkeypatch.setattr(capture.CompiledLayer, "_compile", lambda self, function, *_, **__: function if works else fails)
    monkeypatch.setattr(capture.CompiledLayer, "try_out", lambda self: None)
    out = cli("--raw", "--json", "--max-new-tokens", "2", "--method", "ar", "--compile")[1]
    assert json.loads(out)["options"]["compiled"] is works


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_exact_number_of_tokens(cli, count):
    """No token asked for is no text and success, not an error or a division by zero."""
    status, out, _ = cli("--raw", "--max-new-tokens", str(count), "--json")
    assert status == 0 and len(json.loads(out)["token_ids"]) == count
    if count == 0:
        assert cli("--raw", "--max-new-tokens", "0")[:2] == (0, "")


def test_user_errors_are_one_line(cli):
    """Exit status 2 for a request that cannot be served, 1 for a failure at run time; never a traceback."""
    cases = [
        (("-p", "x" * 300, "--raw"), 2, "256"),
        (("-p", "", "--raw"), 2, "no tokens"),
        (("--model", "/nowhere/at/all"), 2, "/nowhere/at/all"),
    ]
    for flags, expected_status, word in cases:
        status, out, err = cli(*flags)
        assert (status, out) == (expected_status, "") and word in err and err.count("\n") == 1


def test_target_without_known_head(capsys, models):
    """The way out is in the message, and AR needs no head."""
    assert run.main(["-p", "x", "--model", models[0]]) == 2
    err = capsys.readouterr().err
    assert "--draft-model" in err and "--method ar" in err
    assert run.main(["-p", "x", "--model", models[0], "--method", "ar", "--max-new-tokens", "2"]) == 0


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(cli, monkeypatch):
    """A file piped by mistake: to encode it would take minutes, and memory."""
    encoded = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encoded.append(text) or [1])
    for flags, status in ((("--prompt", "x" * 256), 0), (("--prompt", "x" * 257), 2)):  # a token is a byte, the context 256
        assert cli("--raw", "--max-new-tokens", "0", *flags)[0] == status
    assert encoded == ["x" * 256]
    _, out, err = cli("--prompt", "x" * 300)
    words = "300 characters, at least 300 tokens, the target's context is 256; shorten the prompt"
    assert out == "" and err == f"run.py: the prompt has {words}\n"


def test_warnings_are_one_line(cli):
    """A width above the widest tree is clamped, and says so without a line of source."""
    status, _, err = cli("--raw", "--width", "1000", "--max-new-tokens", "3")
    assert status == 0 and err.splitlines()[0].startswith("run.py: ") and "127" in err.splitlines()[0]


def test_interrupt_keeps_what_came(cli, expected, monkeypatch):
    """Ctrl-C mid-stream: the text so far, a line end, the figures, and no traceback."""
    stream = Decoder.stream

    def interrupted(self, *arguments, **options):
        for number, step in enumerate(stream(self, *arguments, **options)):
            if number == 6:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Decoder, "stream", interrupted)
    status, out, err = cli("--raw", "--max-new-tokens", "40", "--method", "ar")
    assert status == 130 and out.endswith("\n") and "stopped: interrupted" in err and "Traceback" not in err
    assert expected[0].startswith(out[:3]) and 0 < len(out.strip()) < len(expected[0])
    status, out, _ = cli("--raw", "--max-new-tokens", "40", "--method", "ar", "--json")
    assert status == 130 and json.loads(out)["stop_reason"] == "interrupted"


def test_interrupt_while_loading(cli, monkeypatch):
    def load_target(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load_target", load_target)
    status, out, err = cli()
    assert (status, out) == (130, "") and "Traceback" not in err


def test_closed_pipe_is_quiet(models, monkeypatch, capsys):
    """`run.py ... | head -1`: the reader goes away, and so does the program, without a word."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        flags = ["-p", "hello", "--raw", "--model", models[0], "--method", "ar", "--max-new-tokens", "9"]
        assert run.main(flags) == 0
    assert capsys.readouterr().err == ""


def test_program_in_an_ascii_terminal(models):
    """The program in its own process: characters that stdout lacks do not end it, side rooms stay closed."""
    code = (
        "import sys, run\n"
        "status = run.main(sys.argv[1:])\n"
        "sys.exit(status or 'minicast.bench' in sys.modules)"
    )
    flags = ["-p", "héé", "--raw", "--model", models[0], "--method", "ar", "--max-new-tokens", "30"]
    result = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0 and b"?" in result.stdout and b"Traceback" not in result.stderr


# What is shown

class Tty(io.StringIO):
    def isatty(self):
        return True


def test_colours_only_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = {}
    for name, stream, environment in (
        ("terminal", Tty(), {}), ("pipe", io.StringIO(), {}), ("no colour", Tty(), {"NO_COLOR": "1"}),
        ("empty", Tty(), {"NO_COLOR": ""}),
    ):
        with monkeypatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)
            screen = Screen(stream)
            screen.write("a", GREEN)
            screen.write("b", PLAIN)
            screen.write("", DIM)
            shown[name] = stream.getvalue()
    coloured = f"{GREEN}a{RESET}b"
    assert shown == {"terminal": coloured, "pipe": "ab", "no colour": "ab", "empty": coloured}


def test_accepted_tokens_are_green_and_own_ones_plain(models, monkeypatch):
    """The colour of every character is that of its token, by the rounds themselves."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    target, draft, tokenizer = load_target(models[0]), load_draft(models[1]), load_tokenizer(models[0])
    empty = no_nodes()
    rounds = [Round([97]), Round([98, 99, 100], accepted=2, tree=empty), Round([101], tree=empty)]
    decoder = Decoder(target, draft)
    monkeypatch.setattr(Decoder, "stream", lambda self, prompt_ids, **options: iter(rounds))
    stream = Tty()
    answer = show_answer(decoder, tokenizer, [1], {"method": "cast", "width": "auto"}, Screen(stream))
    assert stream.getvalue() == f"a{GREEN}bc{RESET}de\n"
    assert answer.text == "abcde" and answer.accepted == [2, 0] and answer.token_ids == [97, 98, 99, 100, 101]


def test_unprintable_characters_are_replaced():
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, encoding="ascii"))
    screen.write("naïve ✓")
    screen.end_line()
    assert raw.getvalue() == b"na?ve ?\n"


def no_nodes() -> Tree:
    nothing = torch.empty(0, dtype=torch.int64)
    return Tree(nothing, nothing, nothing, torch.empty(0))


def test_tree_lines_mark_the_accepted_path():
    """Nodes stand under their parents whatever their order in the pack; accepted are only emitted nodes."""
    tree = Tree(
        tokens=torch.tensor([10, 11, 12, 13]),
        parents=torch.tensor([-1, -1, 0, 1]),
        depths=torch.tensor([1, 1, 2, 2]),
        log_mass=torch.tensor([0.5, 0.25, 0.2, 0.125]).log(),
    )
    step = Round([11, 13, 7], accepted=2, tree=tree, path=[0, 2, 4])
    head, *lines = tree_lines(step, 3, str)
    assert head[0].startswith("round 3: N = 4, R = 3, accepted 2")
    assert [(line.split(), style) for line, style in lines] == [
        (["0.5000", "1", "'10'"], DIM),
        (["0.2000", "2", "'12'"], DIM),
        (["0.2500", "1", "+", "'11'"], GREEN),
        (["0.1250", "2", "+", "'13'"], GREEN),
    ]
    cut = Round([11], accepted=1, tree=tree, path=[0, 2, 4], stop_reason="eos")
    assert [style for _, style in tree_lines(cut, 1, str)] == [PLAIN, DIM, DIM, GREEN, DIM]


def test_show_tree_lists_every_round(cli, expected):
    status, out, _ = cli("--raw", "--max-new-tokens", "40", "--width", "5", "--show-tree")
    blocks = out.split("round ")[1:]
    assert status == 0 and out.endswith(with_newline(expected[0]))
    assert all("N = 5, R = " in block for block in blocks)
    assert out.startswith("prefill: ") and [int(block.split(":")[0]) for block in blocks] == [*range(1, len(blocks) + 1)]
    trees = out.removesuffix(with_newline(expected[0])).splitlines()  # the text comes once, after them
    assert all(line.startswith(("prefill: ", "round ")) or line[:8].strip().startswith("0.") for line in trees)
    nodes = [line for line in out.splitlines() if line[:8].strip().startswith("0.") and line.endswith("'")]
    assert len(nodes) == 5 * len(blocks)


def test_figures_of_an_answer():
    """Both R's and the histogram, from known rounds."""
    output = Output([1, 2, 3, 4, 5, 6, 7], [3, 1, 2], [15, 15, 15], "eos", 0.5, 1.4, 2.0)
    answer = ShownAnswer("cast", 15, 10, output, [2, 0, 2], [("ab", GREEN), ("c", PLAIN)], "eos")
    text = "\n".join(answer.lines())
    for words in (
        "10 tokens, 0.50 s, 20.0 tok/s", "7 tokens, 1.40 s, 5.0 tok/s, 200.0 ms a token",
        "3 of cast (N = 15)", "2.00 tokens committed", "1.33 of them accepted", "R = 1 in 1 round, 2 in 1, 3 in 1",
        "stopped: eos",
    ):
        assert words in text
    assert "prompt to last token 2.00 s" in text and answer.text == "abc"
    assert answer.figures() == {
        "text": "abc", "token_ids": [], "stop_reason": "eos", "method": "cast", "width": 15, "prompt_tokens": 10,
        "round_lengths": [3, 1, 2], "accepted": [2, 0, 2], "widths": [15, 15, 15], "mean_committed_per_round": 2,
        "mean_accepted_per_round": pytest.approx(4 / 3), "ms_per_token": pytest.approx(200), "prefill_seconds": 0.5,
        "decode_seconds": 1.4, "wall_seconds": 2.0, "setup_seconds": 0.0,
    }
    answer.output.setup_seconds = 61.23
    assert answer.lines()[2] == "compile  61.2 s for new shapes, or weights laid out anew, in none of these times" and len(answer.lines()) == 6
    answer.output.setup_seconds = 0.0
    answer.width = 1000  # as asked for, before it was cut
    assert "3 of cast (N = 15)" in answer.lines()[2]
    answer.width, answer.output.widths = "auto", [7, 0, 7]
    assert "3 of cast (N = auto: 7 in 2 rounds, 0 in 1 round)" in answer.lines()[2]


def test_figures_of_an_answer_interrupted_in_its_first_round():
    """The decoder has counted the round, and the screen has not seen it."""
    answer = ShownAnswer("ar", 0, 3, Output([1, 2], [1], [0], "", 0.5, 0.1, 0.6))
    assert any("1.00 tokens committed a round, 0.00 of them" in line for line in answer.lines())


def test_ids_in_json_are_those_of_the_text_shown():
    """Interrupted while a round was on its way to the screen, the decoder has that round already."""
    output = Output([1, 2, 3, 4], [2, 1], [3, 3], "", 0.5, 0.1, 0.6)
    answer = ShownAnswer("cast", 3, 3, output, [1], [("ab", "")], token_ids=[1, 2, 3])
    figures = answer.figures()
    assert figures["token_ids"] == [1, 2, 3] and figures["text"] == "ab"
    assert figures["round_lengths"] == [2] and figures["widths"] == [3] and figures["mean_committed_per_round"] == 2


def test_compare_prints_all_methods(cli, expected):
    status, out, _ = cli("--raw", "--max-new-tokens", "40", "--compare")
    text, table = out.split("method  ")
    assert status == 0 and text == with_newline(expected[0])
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == list(METHODS) and all(row[-1] == "equal" for row in rows)
    status, out, _ = cli("--raw", "--max-new-tokens", "9", "--compare", "--json")
    records = json.loads(out)
    assert status == 0 and [record["output"]["token_ids"] for record in records] == [expected[1][:9]] * 3
    out = cli("--raw", "--max-new-tokens", "9", "--compare", "--json", "--width", "3")[1]
    assert [record["arm"] for record in json.loads(out)] == ["ar", "dflash", "cast N=3"]
    assert cli("--raw", "--max-new-tokens", "0", "--compare")[0] == 0


def test_compare_asks_a_new_method_for_the_width(cli, expected, monkeypatch):
    """README: a name is one line in two tables."""
    monkeypatch.setitem(METHODS, "wider", lambda proposal: best_first(replace(proposal, width=proposal.width + 1)))
    records = json.loads(cli("--raw", "--max-new-tokens", "9", "--compare", "--json", "--width", "3")[1])
    assert [record["arm"] for record in records] == ["ar", "dflash", "cast N=3", "wider N=3"]
    assert set(records[3]["output"]["widths"]) == {4} and records[3]["output"]["token_ids"] == expected[1][:9]


def test_compare_fails_on_a_real_departure(cli, monkeypatch):
    """A tree that gives other tokens at a wide gap is a bug, and the exit status says so."""
    from minicast import round

    true_walk = round.walk_on_host

    def wrong(tokens, parents, logits, *others):
        return true_walk(tokens, parents, logits.roll(int(len(tokens) > 1), dims=1), *others)

    monkeypatch.setattr(round, "walk_on_host", wrong)
    status, out, _ = cli("--raw", "--max-new-tokens", "9", "--compare")
    assert status == 1 and "the top-two gap there is" in out


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (UserError("not finite"), 1)], ids=["Ctrl-C", "error"])
@pytest.mark.parametrize("at, texts", [(2, 0), (5, 2)], ids=["warming up", "third method"])
def test_compare_interrupted_shows_what_there_is(cli, expected, monkeypatch, at, texts, error, code):
    """Methods that were finished with their figures, or else the text so far."""
    calls, measure = [], bench.measure_answer

    def interrupted(decoder, *arguments):
        calls.append(arguments)
        if len(calls) > at:
            decoder.output = Output(expected[1][:3])  # it was on its way
            raise error
        return measure(decoder, *arguments)

    for flags in ([], ["--json"]):
        calls.clear()
        monkeypatch.setattr(bench, "measure_answer", interrupted)
        status, out, err = cli("--raw", "--max-new-tokens", "40", "--compare", *flags)
        missing = "cast N=auto" if texts else "ar, dflash, cast N=auto"
        assert status == code and f"run.py: stopped, not measured: {missing}\n" in err
        assert ("run.py: not finite\n" in err) == (code == 1)
        if flags:
            assert [record["arm"] for record in json.loads(out)] == ["ar", "dflash"][:texts]
        else:
            text, *table = out.split("method  ")
            assert text == with_newline(expected[0] if texts else load_tokenizer(cli.target).decode(expected[1][:3]))
            assert [line.split()[0] for line in "".join(table).splitlines()[1:]] == ["ar", "dflash"][:texts]


def test_an_error_loses_no_text(cli, expected, monkeypatch):
    """The target fails in mid-answer: its text before that is printed, as text, below trees and in JSON."""
    stream = Decoder.stream

    def failing(self, *arguments, **options):
        for number, step in enumerate(stream(self, *arguments, **options)):
            if number == 6:
                raise UserError("not finite")
            yield step

    monkeypatch.setattr(Decoder, "stream", failing)
    ar = ("--raw", "--max-new-tokens", "40", "--method", "ar")
    for flags in ([], ["--show-tree"], ["--json"]):
        status, out, err = cli(*ar, *flags)
        assert status == 1 and err.splitlines()[-1] == "run.py: not finite"
        if flags == ["--json"]:
            values = json.loads(out)
            assert values["stop_reason"] == "error" and values["token_ids"] == expected[1][:6]
        else:
            assert out.endswith(with_newline(load_tokenizer(cli.target).decode(expected[1][:6])))


def test_a_long_prompt_shows_a_bar_on_a_terminal(models, monkeypatch):
    """On stderr, gone when it is done; none where that is no terminal, or where there is little to do."""
    from minicast import round as rounds

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def shown(stream, delay):
        def bar(**options):
            return tqdm(**options | {"file": stream, "delay": delay, "mininterval": 0})

        monkeypatch.setattr(rounds, "tqdm", bar)
        decoder = Decoder(load_target(models[0]), load_draft(models[1]))
        decoder.generate(list(range(1, 200)), method="dflash", max_new_tokens=2)
        return stream.getvalue()

    monkeypatch.setattr(rounds, "PREFILL_ROWS", 64)
    text = shown(Terminal(), 1e-9)
    assert all(f"{done}/199" in text for done in (64, 128, 192)) and text.endswith("\r")
    assert shown(Terminal(), 60) == "" and shown(io.StringIO(), 1e-9) == ""


def test_a_blank_prompt_is_told(cli, capsys):
    """A variable of a shell may have been empty; an answer alone would not show it."""
    for flags in (["-p", " "], ["-p", "\n", "--raw"]):
        status, _, err = cli(*flags, "--max-new-tokens", "1", "--method", "ar")
        assert status == 0 and "run.py: the prompt is blank, and" in err
    assert "blank" not in cli("--max-new-tokens", "1", "--method", "ar")[2]


def test_no_task_and_a_stray_word(capsys):
    """Both lead to the flag that was meant."""
    for flags, words in ((["hi"], "unrecognized arguments: hi"), ([], '--prompt "..."')):
        with pytest.raises(SystemExit) as stop:
            run.main(flags)
        err = capsys.readouterr().err
        assert stop.value.code == 2 and words in err and err.count("\n") == 1


@pytest.mark.real
def test_default_model_answers(capsys):
    """The README's command on the default model."""
    assert run.main(["-p", "What is the capital of France?", "--max-new-tokens", "16"]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out and "SmolLM2-135M-Instruct" in captured.err


def test_names_that_are_none_are_refused_before_loading(capsys, models, tmp_path, monkeypatch):
    """Exit status 2, also where no head is needed; an empty name is no default, and the nearest mistake is named."""
    monkeypatch.setattr(command, "load_target", lambda *_, **__: pytest.fail("weights were loaded"))
    file = tmp_path / "file"
    file.touch()
    for name, word in (("", "unknown model ''"), ("nope", "nope"), ("/no/where", "no such directory"),
                       (str(file), "is a file"), (str(tmp_path), "holds no config.json")):
        for flags in (["--model", name], ["--model", name, "--method", "ar"],
                      ["--model", models[0], "--draft-model", name]):
            assert run.main(["-p", "x", *flags]) == 2
            err = capsys.readouterr().err
            assert word in err and err.count("\n") == 1


@pytest.mark.parametrize("target", ["smollm2", None])
def test_a_head_that_is_named_is_the_one_that_drafts(models, target):
    """Whether or not the target has a known one, which is the default alone."""
    assert Checkpoints.of(target, models[1], torch.device("cpu"), drafts=True).draft == models[1]
    assert Checkpoints.of(target, None, torch.device("cpu"), drafts=True).draft == "smollm2"


def test_the_mode_of_the_template_is_compared_with_the_heads(cli, spy, monkeypatch):
    """See below."""
    noted = []
    monkeypatch.setattr(Checkpoints, "note_thinking", lambda self, program, enabled: noted.append((program, enabled)))
    cli(), cli("--enable-thinking")
    assert noted == [("run.py", False), ("run.py", True)]


@pytest.mark.parametrize("pair, enabled, words", [
    ("qwen3-4b", True, "was trained without --enable-thinking: expect short rounds"), ("qwen3-4b", False, None),
    ("smollm2", True, None), ("smollm2", False, None),
])
def test_thinking_that_a_head_was_not_trained_for_is_told(capsys, pair, enabled, words):
    """In the other mode of a template acceptance collapses; a template without modes has no other one."""
    Checkpoints(pair, pair, hub.known_pair(pair)).note_thinking("run.py", enabled)
    assert capsys.readouterr().err == (f"run.py: the head of {pair} {words}\n" if words else "")
