"""The house rules that a machine can check: sizes, one-way imports, no test tooling at run time."""

import ast
import io
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tiny import write_byte_tokenizer, write_tiny_draft, write_tiny_target

ROOT = Path(__file__).parents[1]
PURE = [f"minicast/{name}.py" for name in ("tree", "verify", "theorem3", "sampling", "nucleus", "width", "back_off", "policy")]
SOURCES = sorted(p for package in ("minicast", "model", "graphs") for p in (ROOT / package).glob("*.py")) + [ROOT / "run.py"]


ROOMS = ("figures", "table", "prompts", "machine", "paper_probe", "bench", "report", "record", "replay", "policy_replay")


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    source = path.read_text()
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def imports(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_run_stays_short():
    """Flags in, text out."""
    assert code_lines(ROOT / "run.py") < 250


# What turns ids into the next ids, whatever the width: flags, weights, both models, the round and its graphs.
PATH = ["run", "minicast/decode", "minicast/answer", "minicast/round", "minicast/methods", "minicast/tree", "minicast/verify"]
PATH += ["minicast/sampling", "model/device", "model/transformer", "model/dflash", "model/linear", "model/weights", "model/config"]
PATH += ["graphs/capture", "graphs/masks", "graphs/cpu"]


def test_the_path_of_a_token_stays_short():
    """Under 2,000 lines in all, to be read in an afternoon.

    It is not all that a default run imports. How wide to draft is decided in `width`, `back_off`, `policy`, `curve` and
    `probe`, and changes no text; prompts, templates, downloads and the terminal come before the ids and
    after them.
    """
    assert sum(code_lines(ROOT / f"{name}.py") for name in PATH) < 1970


def test_packages_import_one_way():
    """`model` knows no decoder and no graphs; trees, walk, sampling and widths know neither model nor graphs."""
    for path in SOURCES:
        package, names = path.parent.name, imports(path)
        imported = {name.split(".")[0] for name in names}
        if package == "model" and not path.name.startswith("train_"):
            assert not imported & {"minicast", "graphs"}, path
        if package == "graphs":
            assert "minicast" not in imported, path
        if str(path.relative_to(ROOT)) in PURE:
            assert not imported & {"model", "graphs"}, path
        assert "transformers" not in imported, path


def test_an_answer_loads_no_room_of_the_bench(tmp_path):
    """A default run, with its probe: neither statistics nor prompts nor what only the bench or replay measures."""
    target, draft = write_tiny_target(tmp_path / "target"), write_tiny_draft(tmp_path / "draft")
    write_byte_tokenizer(target)
    flags = ["--prompt", "a", "--raw", "--model", str(target), "--draft-model", str(draft), "--max-new-tokens", "4"]
    code = f"import run, sys\nassert run.main({flags}) == 0\nprint(*sys.modules, file=sys.stderr)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MINICAST_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "minicast.probe" in loaded and not loaded & {f"minicast.{room}" for room in ROOMS}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_fit_a_screen(path):
    """No function over 80 lines, and the round loop within 60, signature and docstring aside."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            length = node.end_lineno - first.lineno + 1
            assert length <= 80, f"{node.name} has {length} lines"
            if (path.name, node.name) == ("decode.py", "stream"):
                assert length <= 60
