"""How command lines begin and end: Ctrl-C before torch is there, closed and full streams, mistakes in the flags."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import run
from minicast import bench, command, gpu_check, plot, program, replay
from minicast.command import guarded, note_idle_flags
from minicast.decode import Decoder
from minicast.program import Parser
from model import train_dflash
from model.errors import UsageError, UserError
from model.files import check_file, claim, read_text, save_tensors, write_atomically
from tiny import write_byte_tokenizer, write_tiny_draft, write_tiny_target

ROOT = Path(run.__file__).parent
SLOW_TORCH = """
import signal, sys, time
print("ignored" if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else "importing", flush=True)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    sys.exit(7)
try:
    time.sleep(60)
except BaseException:
    pass
"""
PROGRAMS = {
    "run": ["run.py", "-p", "hello"],
    "bench": ["-m", "minicast.bench"],
    "replay": ["-m", "minicast.replay", "--out", "nowhere"],
    "plot": ["-m", "minicast.plot", "none.json"],
    "gpu check": ["-m", "minicast.gpu_check"],
    "train": ["-m", "model.train_dflash", "--target", "t", "--out", "nowhere"],
}


@pytest.fixture
def slow_torch(tmp_path):
    """Start a program whose torch takes a minute to import, and swallows every exception meanwhile, once it does."""
    (tmp_path / "torch.py").write_text(SLOW_TORCH)

    def begin(arguments, interrupt=signal.SIG_DFL):
        """interrupt: what SIGINT does at the start, whatever it does to the tests, which may be a background job"""
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, **pipes,
            preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
        )
        return process, process.stdout.readline().strip()

    return begin


# Ctrl-C

@pytest.mark.parametrize("arguments", PROGRAMS.values(), ids=PROGRAMS)
def test_interrupt_while_torch_is_imported(slow_torch, arguments):
    process, state = slow_torch(arguments)
    assert state == "importing"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == -signal.SIGINT


def test_an_ignored_interrupt_stays_ignored(slow_torch):
    """As in a background job of a script, which Ctrl-C is not meant for."""
    process, state = slow_torch(PROGRAMS["run"], interrupt=signal.SIG_IGN)
    process.communicate(timeout=30)
    assert (state, process.returncode) == ("ignored", 7)


def test_interrupt_is_an_exception_once_something_runs():
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        assert guarded("x", lambda: 5 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 0) == 5
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_comes_while_an_object_is_taken_apart_is_not_dropped(number, status, capsys):
    """There Python prints an exception and goes on, as in the callbacks by which a compiler's caches are cleared."""
    class Interrupted:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # a line on which it arrives

    def run():
        Interrupted()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return 0

    before, hook = signal.signal(signal.SIGINT, signal.SIG_DFL), sys.unraisablehook
    try:
        assert guarded("x", run) == status
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Traceback" not in capsys.readouterr().err and sys.unraisablehook is hook


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_what_ends_a_program_is_an_exception_while_something_runs(handler, number, status):
    """And is afterwards what it was before; where somebody ignores it, as nohup does, it stays ignored."""
    before = [signal.signal(signal.SIGINT, signal.SIG_DFL), signal.signal(number, handler)]

    def run():
        if handler is signal.SIG_DFL:
            assert signal.getsignal(number) is not handler
        os.kill(os.getpid(), number) if signal.getsignal(number) is not signal.SIG_DFL else None
        return 0

    try:
        assert guarded("x", run) == (status if handler is signal.SIG_DFL else 0)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(signal.SIGINT, before[0]), signal.signal(number, before[1])


# Streams

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    target = write_tiny_target(directory / "target", max_position_embeddings=256)
    write_byte_tokenizer(target)
    draft = write_tiny_draft(directory / "draft", max_position_embeddings=256)
    return ["--model", str(target), "--draft-model", str(draft), "--width", "3", "--max-new-tokens", "5"]


def full():
    """A file that takes nothing."""
    return open("/dev/full", "w")


ONE = [["-p", "a", "--raw"], ["-p", "a", "--json"], ["-p", "a", "--show-tree"], ["-p", "a", "--compare"], ["--chat"]]


@pytest.mark.parametrize("stdout", [full, lambda: None], ids=["full", "closed"])
@pytest.mark.parametrize("task", ONE, ids=str)
def test_stdout_that_takes_nothing(flags, monkeypatch, capsys, tmp_path, task, stdout):
    """One line on stderr, exit status 1, and nothing left for Python to complain of at its end."""
    (tmp_path / "typed").write_text("hello\nagain\n")
    monkeypatch.setattr(sys, "stdin", open(tmp_path / "typed"))
    monkeypatch.setattr(sys, "stdout", stdout())
    assert run.main([*task, *flags]) == 1
    err = capsys.readouterr().err
    assert err.startswith("run.py: cannot write to stdout: ") and err.count("\n") == 1
    if sys.stdout:
        sys.stdout.flush()


def test_what_was_printed_and_not_yet_written_counts_too(monkeypatch, capsys):
    """A short table waits in a buffer until the program ends, which must not be a success."""
    monkeypatch.setattr(sys, "stdout", full())
    assert guarded("x", lambda: print("| a table |") or 0) == 1
    assert capsys.readouterr().err == "x: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("stderr", [full, lambda: None], ids=["full", "closed"])
@pytest.mark.parametrize("task", ONE, ids=str)
def test_stderr_that_takes_nothing(flags, monkeypatch, capsys, tmp_path, task, stderr):
    """The answer is the same, and alone; an error goes where it can be read."""
    def call(*more):
        monkeypatch.setattr(sys, "stdin", open(tmp_path / "typed"))
        status = run.main([*task, *flags, *more])
        if sys.stderr:
            sys.stderr.flush()  # as Python does at its end
        return status, capsys.readouterr().out

    (tmp_path / "typed").write_text("hello\nagain\n")
    monkeypatch.setattr(bench, "warm_up", lambda *_: None)
    status, expected = call()
    assert status == 0
    monkeypatch.setattr(sys, "stderr", stderr())
    found = call("--top-k", "3")  # has no effect, which would be said
    if not {"--json", "--compare"} & set(task):  # these hold times
        assert found == (0, expected)
    assert found[0] == 0 and len(found[1].split()) == len(expected.split())
    monkeypatch.setattr(sys, "stderr", stderr())
    assert call("--device", "x") == (2, "run.py: --device must be auto, cpu, cuda or cuda:N, got 'x'\n")


def test_stdin_that_is_closed(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert run.main(["-p", "a", *flags]) == 0
    capsys.readouterr()
    monkeypatch.setattr(command, "load_target", lambda *_: pytest.fail("refused only after loading"))
    for task in (["-p", "-"], ["--chat"]):
        try:
            status = run.main([*task, *flags])
        except SystemExit as leaving:  # a mistake in the flags
            status = leaving.code
        assert status == 2
        err = capsys.readouterr().err
        assert "closed" in err and err.count("\n") == 1


def test_no_later_file_takes_the_place_of_a_closed_stream(tmp_path):
    """Its number is free, so it would: what is printed to stderr by a library would land in the file."""
    code = "from minicast.command import guarded; guarded('x', lambda: print(open('free', 'w').fileno()) or 0)"
    command = f'cd {tmp_path} && PYTHONPATH={ROOT} {sys.executable} -c "{code}" 2>&- <&-'
    assert int(subprocess.run(command, shell=True, capture_output=True, timeout=60).stdout) > 2


A_NUMBER = "must be a whole number of at least 1"


@pytest.mark.parametrize(
    "command, status, out, err",
    [
        ("--help >/dev/full", 1, "", "run.py: cannot write to stdout: No space left on device\n"),
        ("--help >&-", 1, "", "run.py: cannot write to stdout: it is closed\n"),
        ("-p x --top-k y 2>&-", 2, f"run.py: argument --top-k: {A_NUMBER}, got 'y' (see run.py --help)\n", ""),
        ("-p x --top-k y 2>/dev/full", 2, f"run.py: argument --top-k: {A_NUMBER}, got 'y' (see run.py --help)\n", ""),
    ],
)
def test_help_and_mistakes_on_streams_that_take_nothing(command, status, out, err):
    result = subprocess.run(
        f"{sys.executable} run.py {command}", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (status, out, err)


def test_help_whose_reader_has_enough_ends_quietly(monkeypatch, capsys):
    """`--help | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as stop:
            run.main(["--help"])
    assert stop.value.code == 0 and capsys.readouterr().err == ""


def test_stdin_that_is_no_text_is_told_where(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert run.main(["-p", "-", *flags]) == 2
    assert capsys.readouterr().err == "run.py: --prompt -: stdin is not UTF-8 at byte 3\n"


def test_memory_is_told_in_bytes():
    """A process with torch in it takes more than 50 MB, and no more than the machine has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 50e6 < command.peak_memory(torch.device("cpu")) < total


def test_a_failing_file_is_not_taken_for_a_stream(capsys):
    assert guarded("x", lambda: open("/nowhere/file", "w")) == 1
    assert capsys.readouterr().err == "x: /nowhere/file: No such file or directory\n"


def test_a_full_disk_is_one_line(capsys):
    """The error of a write, other than that of opening, names no file."""
    with open("/dev/full", "w") as file:
        assert guarded("x", lambda: file.write("text") and file.flush()) == 1
        with pytest.raises(OSError):
            file.close()
    assert capsys.readouterr().err.startswith("x: cannot write a file: No space left on device")
    def broken():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError):  # of no file and no stream: nobody could do anything with one line
        guarded("x", broken)
    for error in (errno.EDQUOT, errno.EFBIG):

        def over(error=error):
            raise OSError(error, "too much", "f")

        assert guarded("x", over) == 1
        assert capsys.readouterr().err == "x: cannot write f: too much; free some, or write elsewhere\n"


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_file_that_cannot_be_written_whole_leaves_no_part(tmp_path, failure):
    """The old one stays."""
    def write(partial):
        partial.write_text("ha")
        raise failure

    (tmp_path / "file").write_text("old")
    with pytest.raises(type(failure)) as caught:
        write_atomically(tmp_path / "file", write)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    assert getattr(caught.value, "filename", str(tmp_path / "file")) == str(tmp_path / "file")


@pytest.mark.parametrize("name", ["nowhere/file", "file/file", 250 * "x"])
def test_a_file_where_none_can_be_is_named_as_it_was_given(tmp_path, name):
    """Not by the name of its part, which nobody knows, and which is not removed either."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / name, "text")
    assert caught.value.filename == str(tmp_path / name)


def test_a_file_that_is_being_read_stays_as_it_was(tmp_path):
    """It is replaced, and not written over, at any moment of which the writer may be killed."""
    (tmp_path / "file").write_text("old")
    with open(tmp_path / "file") as reader:
        write_atomically(tmp_path / "file", "new")
        assert reader.read() == "old"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_a_file_that_cannot_be_read_is_told_by_its_cause(tmp_path, monkeypatch):
    """A name that is wrong is a mistake in the flags; a disk that fails is none."""
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="cannot read .*latin: it is not UTF-8"):
        read_text(tmp_path / "latin")
    for name, cause in ("none", "No such file"), ("", "Is a directory"), ("latin/x", "Not a directory"):
        with pytest.raises(UsageError, match=f"cannot read .*: {cause}"):
            read_text(tmp_path / name)
    monkeypatch.setattr(Path, "read_text", lambda *_, **how: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(UserError, match="cannot read .*latin: Input/output error") as caught:
        read_text(tmp_path / "latin")
    assert caught.type is UserError


def test_a_place_where_nothing_can_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    check_file(tmp_path / "new" / "deep" / "file", "--out")
    with pytest.raises(UsageError, match="--out .*: .*file is a file: name a directory"):
        check_file(tmp_path / "file" / "deep" / "file", "--out")
    with pytest.raises(UserError, match="cannot write to .*file/x: Not a directory"):
        claim(tmp_path / "file" / "x", {"a": 1})


def test_notes_of_a_directory_may_change(tmp_path):
    """Its settings may not: the answers in there are of these."""
    (tmp_path / "answers.jsonl").write_text("{}\n")
    claim(tmp_path, {"a": 1}, {"width": 3})
    claim(tmp_path, {"a": 1}, {"width": 4})
    claim(tmp_path, {"a": 1, "width": 4})
    with pytest.raises(UsageError, match="holds answers of a 1, width 4: give the same flags again"):
        claim(tmp_path, {"a": 1, "width": 3})
    for damaged in "[" * 100_000, "[]", "5":
        (tmp_path / "settings.json").write_text(damaged)
        with pytest.raises(UserError, match="settings.json is damaged"):
            claim(tmp_path, {"a": 1})


def test_what_is_no_file_is_no_answer(tmp_path):
    claim(tmp_path, {"a": 1})
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    claim(tmp_path, {"a": 2})


def test_without_torch_every_program_says_what_to_install(monkeypatch, capsys):
    """The wrong virtual environment is the first thing to go wrong; --help does not import torch, and says so, too."""
    monkeypatch.setattr(program, "find_spec", lambda package: None)
    monkeypatch.setattr(sys, "argv", ["somewhere/bench.py", "--help"])
    program.start("an import")
    with pytest.raises(SystemExit) as ended:
        program.start("__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "bench.py: torch is not installed: pip install -r requirements.txt\n"


def test_what_does_not_compile_does_not_wait_for_the_compiler():
    """Importing it takes a second and 60 MB."""
    code = "import sys, minicast, model, minicast.bench; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("said", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_a_program_shares_its_cores_unless_told_how(monkeypatch, said):
    environment = dict(said)
    monkeypatch.setattr(program.os, "environ", environment)
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    program.start("an import")
    assert environment == said
    program.start("__main__")
    assert environment == (said or {"GOMP_SPINCOUNT": program.SPINS})


def test_tensors_that_cannot_be_written_whole_are_one_line(tmp_path, monkeypatch):
    """safetensors tells of a full disk by an error of its own; the old file stays."""
    def full(tensors, path, metadata):
        path.write_bytes(b"ha")
        raise SafetensorError("I/O error: No space left on device")

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match="cannot write .*file: .*No space left on device"):
        save_tensors(tmp_path / "file", {"a": torch.zeros(2)})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_file_is_as_readable_as_others_whoever_wrote_it(tmp_path):
    """A head in a shared directory is there to be read."""
    (tmp_path / "text").write_text("")
    write_atomically(tmp_path / "file", lambda path: save_file({"a": torch.zeros(2)}, path))
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "text").stat().st_mode


def test_only_a_lack_of_memory_is_called_so(capsys):
    def fail(message):
        raise RuntimeError(message)

    assert guarded("x", lambda: fail("CUDA out of memory. Tried to allocate 2 GiB")) == 1
    assert guarded("x", lambda: fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")) == 1
    assert capsys.readouterr().err.count("x: out of memory") == 2
    with pytest.raises(RuntimeError):
        guarded("x", lambda: fail("CUDA error: an illegal memory access was encountered"))


# Flags

MAINS = [run.main, bench.main, replay.main, plot.main, gpu_check._main, train_dflash.main]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
@pytest.mark.parametrize("argv", [["--no-such-flag", "two\nlines"], ["--out", "caf\udce9"]], ids=["unknown", "bytes"])
def test_mistakes_in_flags_are_one_line(main, argv, capsys):
    """Not the whole usage; and an argument that is no text is named before anything is made of it."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert "UTF-8" in err if "--out" in argv else "usage:" not in err


def test_a_value_that_begins_with_a_dash_is_told_how_to_write(capsys):
    with pytest.raises(SystemExit):
        run.main(["-p", "-hello"])
    assert "written --flag=VALUE if it begins with -" in capsys.readouterr().err


def test_parser_notes_what_was_changed():
    parser = Parser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--json", action="store_true")
    assert parser.parse_args([]).changed == set()
    assert parser.parse_args(["--seed", "0", "--top-k", "3", "--json"]).changed == {"top_k", "json"}


@pytest.mark.parametrize(
    "given, words",
    [
        (["--top-k", "3", "--seed", "5"], ["--top-k, --seed", "temperature 0"]),
        (["--top-p", "0.5", "--verifier", "stochastic"], ["--top-p, --verifier", "temperature 0"]),
        (["--method", "ar", "--rank-cap", "3"], ["--width, --rank-cap", "only on cast"]),
        (["--method", "dflash", "--rank-cap", "none"], ["--width, --rank-cap", "only on cast"]),
        (["--method", "dflash", "--compare"], ["--method", "--compare"]),
        (["--temperature", "1", "--top-k", "3", "--seed", "5", "--verifier", "stochastic", "--rank-cap", "3"], []),
    ],
    ids=str,
)
def test_flags_without_effect_are_named(flags, monkeypatch, capsys, given, words):
    monkeypatch.setattr(Decoder, "stream", lambda self, prompt_ids, **options: iter(()))
    monkeypatch.setattr("minicast.bench.show_comparison", lambda *_, **how: 0)
    assert run.main(["-p", "a", *flags, *given]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    about = [line for line in notes if "--draft-model" not in line]
    assert len(about) == bool(words) and all(word in line for word in words for line in about)
    assert (len(notes) > len(about)) == ("ar" in given)


def test_bench_names_flags_without_effect(capsys):
    """Its seed orders the arms, so that one always counts."""
    changed = {"seed", "top_k", "widths", "draft_model"}
    note_idle_flags("bench", Namespace(temperature=0.0, changed=changed), ["ar"], drafts=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and not any("--seed" in line for line in lines)
    for method in ("cast", "of one's own"):
        note_idle_flags("bench", Namespace(temperature=0.0, changed={"seed", "widths"}), ["ar", method], drafts=True)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError):
        bench.run(bench.parse_arguments(["--gpu-check", "--shape", "nope", "--limit", "3", "--eager"]), [])
    assert "--compile or --eager, --limit: no effect on --gpu-check" in capsys.readouterr().err
