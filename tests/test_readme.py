"""The README runs as it stands: its Python blocks, its commands, its sample of output, its links into the code."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", re.sub("~~~.*?~~~", "", README, flags=re.DOTALL), re.DOTALL)
COMMAND_BLOCKS = [  # one command a line; those that need what a test machine lacks say so in a comment
    block.replace("\\\n", " ").splitlines() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
]
COMMANDS = sum(COMMAND_BLOCKS, [])
ELSEWHERE = ("# needs the hub", "# another program")
INSTALL_AND_TEST = ("pip install", "python -m pytest")
FEWER = {  # flags appended, so that a command that trains for an hour does so for a second: the last flag counts
    "model.train_dflash": "--minutes 0.02 --own-prompts 8 --max-new-tokens 12 --held-out 1",
    "minicast.bench": "--limit 1 --max-new-tokens 8",
    "minicast.replay": "--limit 1 --max-new-tokens 8",
}


def run(arguments: list[str], where: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, cwd=where, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)


@pytest.mark.real
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, tmp_path):
    """Samples in a README rot first; this one is also what the forks section promises: at most 25 lines each."""
    assert len(block.splitlines()) <= 25
    (tmp_path / "block.py").write_text(block)
    done = run([sys.executable, "block.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


SAMPLES = re.findall(r"```sh\n([^`]*?)```\n+(```|~~~)\n(.*?)\2", README, re.DOTALL)
SAMPLES = [(commands, sample) for commands, _, sample in SAMPLES]  # what the last command prints
DIGITS = re.compile(r"(?<=\.\d\d)\d\d\b")  # of probabilities: the last two may be the processor's, too
COMPARED = re.compile(r" +\d+\.\d\d( +\d\.\d\d) +\d\.\d\d(?=  equal)")  # ms a token, R, speedup
VARIES = re.compile(r"\d+(\.\d+)?(?= (s,|s;|tok/s|ms a token|MB at peak))")  # times and memory are the machine's


@pytest.mark.real
@pytest.mark.parametrize("commands, sample", SAMPLES, ids=range(len(SAMPLES)))
def test_sample_is_what_the_command_prints(commands, sample, tmp_path):
    """All of it but times and memory: the text, the rounds, the tree, the walk."""
    arguments = shlex.split(commands.splitlines()[-1])[1:]
    done = run([sys.executable, str(ROOT / arguments[0]), *arguments[1:]], tmp_path)
    printed, sample = (
        VARIES.sub("", COMPARED.sub(r"\1", DIGITS.sub("", text))) for text in (done.stdout + done.stderr, sample)
    )
    assert len(SAMPLES) >= 4 and sample.strip()
    rest = iter(printed.splitlines())
    for line in sample.splitlines():
        assert line in rest, line  # in this order


def runnable() -> list[list[str]]:
    """By block, those that no sample above runs already."""
    sampled = {commands.splitlines()[-1] for commands, _ in SAMPLES}
    missing = ELSEWHERE + (() if find_spec("matplotlib") else ("# needs matplotlib",))

    def runs(line: str) -> bool:
        return not line.endswith(missing) and not line.startswith(INSTALL_AND_TEST) and line not in sampled

    blocks = [[line for line in block if runs(line)] for block in COMMAND_BLOCKS]
    return [block for block in blocks if block]


@pytest.mark.real
@pytest.mark.parametrize("commands", runnable(), ids=lambda commands: commands[0])
def test_commands_run(commands, tmp_path):
    """The commands of each block, one after the other in a directory of its own; what takes hours is made shorter."""
    (tmp_path / "run.py").symlink_to(ROOT / "run.py")
    for command in commands:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "python"
        fewer = next((flags for name, flags in FEWER.items() if name in arguments), "")
        done = run([sys.executable, *arguments, *fewer.split()], tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() or any(tmp_path.iterdir())


def test_ci_runs_the_install_and_test_commands():
    """The two of them that everybody needs; what is slow is for releases."""
    ci = (ROOT / ".ci" / "run").read_text().replace('"$fresh/venv/bin/python" -m ', "python -m ")
    for command in ("pip install --quiet -r requirements.txt", "pytest tests", "pytest tests -q -m real"):
        assert f"python -m {command}" in ci
    assert any("pip install -r requirements.txt" in line for line in COMMANDS)
    assert any(line.startswith("python -m pytest tests ") for line in COMMANDS)


def test_links_point_at_the_code():
    links = re.findall(r"\[`(\w+)`\]\(([\w/]+\.py)\)", README)
    assert len(links) >= 7
    for name, path in links:
        assert re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), (name, path)
    for page in (ROOT / "README.md", ROOT / "results" / "README.md"):
        text = page.read_text()
        headings = {line.replace(" ", "-").lower() for line in re.findall(r"^#+ (.*)", text, re.MULTILINE)}
        for path, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", text):
            assert (page.parent / path).exists() and (path or anchor in headings), (path, anchor)
