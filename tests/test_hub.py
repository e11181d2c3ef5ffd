"""Names to directories: known pairs, paths, and hub ids against a model hub that this file serves on the
loopback."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny import write_tiny_draft, write_tiny_target

from model import default_model, hub
from model.errors import UserError

ROOT = Path(__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"

SINGLE = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights " * 1000,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
REPOSITORIES = {
    "org/single": {
        **SINGLE,
        "README.md": b"unwanted",
        "pytorch_model.bin": b"unwanted",
        "consolidated.safetensors": b"unwanted",
        "onnx/model.onnx": b"unwanted",
    },
    "org/sharded": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
        SHARDS[0]: b"first",
        SHARDS[1]: b"second",
        "curve.json": b"{}",
        "frequent_tokens.json": b"{}",
    },
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"unwanted"},
    "org/gated": SINGLE,
}
TEMPLATE_FILES = {"tokenizer.json", "chat_template.jinja"}
REFUSED = {"org/private": 401, "org/forbidden": 403, "org/missing": 404, "org/down": 500}


class FakeHub(BaseHTTPRequestHandler):
    """The few requests of the hub's protocol that a download makes."""

    def do_GET(self):
        self.server.requests.append(f"{self.command} {self.path}")
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        if repo in REFUSED:
            code = {404: "RepoNotFound"}.get(REFUSED[repo])
            return self.answer(REFUSED[repo], b"{}", {"X-Error-Code": code} if code else {})
        files = REPOSITORIES[repo]
        if api and "tree" in parts:
            listing = [
                {"type": "file", "path": path, "size": len(content), "oid": f"{index:040x}"}
                for index, (path, content) in enumerate(files.items())
            ]
            return self.answer(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
        if api:
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
            return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        if repo == "org/gated":  # the hub shows everyone what a gated repository holds, but hands out no file
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        path = "/".join(parts[4:])
        if path not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = f'"{list(files).index(path):040x}"'
        return self.answer(200, files[path], {"X-Repo-Commit": COMMIT, "ETag": etag})

    do_HEAD = do_GET

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


RESOLVE = """
import json, sys
from model.errors import UserError
from model.hub import resolve
for name, kind in json.loads(sys.argv[1]):
    try:
        print("OK", resolve(name, kind))
    except UserError as error:
        print("ERROR", f"(exit {error.exit_code}) {error}")
"""


def resolve_elsewhere(names, cache, **environment):
    """resolve() in a process of its own, because huggingface_hub reads its environment once. -> [(state,
    text), ...]"""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **environment,
    }
    command = [sys.executable, "-c", RESOLVE, json.dumps(names)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert len(lines) == len(names), f"an answer is not one line: {done.stdout}"
    return [tuple(line) for line in lines]


def present(directory):
    files = (path for path in Path(directory).rglob("*") if path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in files)


def test_download_fetches_what_is_needed_and_a_second_start_asks_nobody(server, tmp_path):
    """A tokenizer downloads no weights, a target no pickles; then the snapshot serves, with the hub and
    without.

    Guards against the check for a newer revision that every start would make, and against taking the snapshot
    that an earlier, smaller or interrupted download left for a whole one.
    """
    endpoint = f"http://127.0.0.1:{server.server_port}"
    names = [
        ("org/single", "tokenizer"),
        ("org/single", "target"),
        ("org/sharded", "draft"),
        ("org/sharded", "target"),
    ]
    (_, tokenizer), (_, single), (_, draft), (_, sharded) = first = resolve_elsewhere(
        names, tmp_path, HF_ENDPOINT=endpoint
    )
    assert [state for state, _ in first] == ["OK"] * 4
    assert tokenizer == single and present(single) == sorted(SINGLE)
    assert (Path(single) / "model.safetensors").read_bytes() == SINGLE["model.safetensors"]
    # As a draft the shards are complete without the tokenizer, and a target that is complete is taken as it
    # is.
    assert draft == sharded and present(sharded) == sorted({*REPOSITORIES["org/sharded"]} - TEMPLATE_FILES)

    server.requests.clear()
    assert resolve_elsewhere(names, tmp_path, HF_ENDPOINT=endpoint) == first
    assert server.requests == []

    # Offline, with a snapshot that an interrupted download left without a shard, and one that another tool
    # made.
    (Path(sharded) / SHARDS[1]).unlink()
    copied = hand_made_snapshot(
        tmp_path, "org/copied", ("config.json", "tokenizer.json", "model.safetensors")
    )
    (tmp_path / "models--org--absent" / ".no_exist" / COMMIT).mkdir(parents=True)  # as of a tool that found none
    (tmp_path / "models--org--absent" / ".no_exist" / COMMIT / "config.json").touch()
    (tmp_path / "models--org--absent" / "refs").mkdir()
    (tmp_path / "models--org--absent" / "refs" / "main").write_text(COMMIT)
    offline = [*names, ("org/copied", "target"), ("org/copied", "tokenizer"), ("org/absent", "target")]
    answers = resolve_elsewhere(offline, tmp_path, HF_HUB_OFFLINE="1")
    assert answers[:2] == first[:2] and answers[4:6] == [("OK", str(copied))] * 2
    for (name, _), (state, message) in zip(offline, answers):
        if name in ("org/sharded", "org/absent"):
            assert state == "ERROR" and name in message and "HF_HUB_OFFLINE" in message

    assert resolve_elsewhere(names[2:], tmp_path, HF_ENDPOINT=endpoint) == first[2:]
    assert (Path(sharded) / SHARDS[1]).read_bytes() == b"second"


def hand_made_snapshot(cache, repo, files):
    """A snapshot without the listing of its files that newer versions of huggingface_hub keep beside it."""
    repository = cache / f"models--{repo.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in files:
        (snapshot / name).write_bytes(b"{}")
    return snapshot


def test_refusals_are_one_line_with_the_repository_and_a_way_out(server, tmp_path):
    """Each status of the hub has its own way out; a traceback of a library's exception has none.

    huggingface_hub reports a 403 on the repository, or a broken hub, only as the cause of a "not in the
    cache".
    """
    endpoint = f"http://127.0.0.1:{server.server_port}"
    names = ["org/gated", "org/private", "org/forbidden", "org/missing", "org/down", "org/pickled"]
    answers = resolve_elsewhere([(name, "target") for name in names], tmp_path, HF_ENDPOINT=endpoint)
    for name, (state, message) in zip(names, answers):
        assert state == "ERROR" and name in message
    gated, private, forbidden, missing, down, pickled = (message for _, message in answers)
    for message, status in ((gated, "403"), (private, "401"), (forbidden, "403")):
        assert status in message and "hf auth login" in message and "HF_TOKEN" in message
    assert "not found" in missing and "log in" not in missing and "(exit 2)" in missing  # the name is wrong
    assert "500" in down and "(exit 1)" in down
    assert "no model.safetensors" in pickled


def test_unreachable_hub_and_unwritable_cache(server, tmp_path):
    """No network, or no place to write: the message says which, not that the repository does not exist."""
    single = [("org/single", "target")]
    hand_made_snapshot(tmp_path, "org/partly", ("config.json", "tokenizer.json"))  # as of a tool that reads no weights
    both = [*single, ("org/partly", "target")]
    for (name, _), (state, message) in zip(both, resolve_elsewhere(both, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")):
        assert state == "ERROR" and name in message and "check the name and the network" in message
    [(state, message)] = resolve_elsewhere(both[1:], tmp_path, HF_HUB_OFFLINE="1")
    assert state == "ERROR" and "org/partly" in message and "HF_HUB_OFFLINE" in message
    (tmp_path / "file").write_text("")
    [(state, message)] = resolve_elsewhere(
        single, tmp_path / "file" / "cache", HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}"
    )
    assert state == "ERROR" and "HF_HOME" in message


def test_full_disk_is_named(tmp_path, monkeypatch):
    """An OSError of the operating system is about the cache, not about the network."""
    import huggingface_hub

    def no_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_space)
    with pytest.raises(UserError, match="No space left on device; set HF_HOME"):
        hub.download("org/single", "target")


def test_directories_files_and_what_is_neither(tmp_path, monkeypatch):
    """What looks like a path is never asked of the hub; a directory of that name goes before a hub id."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert hub.resolve(tmp_path, "target") == tmp_path
    assert hub.resolve("org/name", "target") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/org/name", "target") == tmp_path / "org" / "name"  # no shell has spoken where flags are quoted
    for name in ("/no/such/place", "./nothing", "../nothing", "~/nothing-here", "~nobody-here/x", "a/b/c", "nothing/", ".x",
                 "models/a--b", "模型/目录", "x/y.git", "x/y-", "x/llama-3.", "x/" + 97 * "a"):
        with pytest.raises(UserError, match="no such directory") as error:
            hub.resolve(name, "target")
        assert name in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="is a file"):
        hub.resolve("weights.safetensors", "target")
    for name in ("qwen9-8b", "", "gpt2"):
        with pytest.raises(UserError, match="unknown model.*smollm2.*qwen3-8b"):
            hub.resolve(name, "target")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_not_downloaded_again(tmp_path, index):
    """The loader names it."""
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert hub.missing_files(tmp_path, "target") == []


def test_known_names_stand_for_target_head_and_tokenizer(monkeypatch):
    """One name is right for all three loads, whatever its case."""
    monkeypatch.setattr(hub, "cached_snapshot", lambda repo, kind: Path("/cache") / repo / kind)
    builds = []
    monkeypatch.setattr(default_model, "default_model", lambda progress: builds.append(progress) or Path("/cache/default"))
    assert hub.resolve("smollm2", "target", print) == Path("/cache/default") and builds == [print]
    assert hub.resolve("smollm2", "target") == hub.resolve("SmolLM2", "tokenizer") == Path("/cache/default")
    assert hub.resolve("smollm2", "draft") == hub.HEADS / "smollm2-135m-dflash"
    assert hub.resolve("Qwen3-8B", "target") == Path("/cache/Qwen/Qwen3-8B/target")
    assert hub.resolve("qwen3-8b", "draft") == Path("/cache/z-lab/Qwen3-8B-DFlash-b16/draft")
    assert hub.resolve("qwen3-8b", "tokenizer") == Path("/cache/Qwen/Qwen3-8B/tokenizer")
    assert hub.source("smollm2", "target") == default_model.SOURCE
    assert hub.source("smollm2-hub", "target") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub.source("smollm2", "draft") == "model/heads/smollm2-135m-dflash"
    assert hub.source("qwen3-8b", "draft") == "z-lab/Qwen3-8B-DFlash-b16"


def test_a_name_is_checked_as_what_it_is_given_for(tmp_path):
    """Before anything is loaded: each kind has another config.json, and a mistake in it is told with its place."""
    directories = {"target": write_tiny_target(tmp_path / "target"), "draft": write_tiny_draft(tmp_path / "draft")}
    for kind, other in ("target", "draft"), ("draft", "target"):
        for name in ("smollm2", "Qwen3-8B", "Qwen/Qwen3-8B", str(directories[kind])):
            hub.check_name(name, kind)
        with pytest.raises(UserError, match=f"^{directories[other]}/config.json: this is a "):
            hub.check_name(str(directories[other]), kind)


def test_head_of_a_target():
    """The head is found by the table only: a path that happens to hold a model's name gets none."""
    assert hub.pair_for_target("smollm2").draft == hub.HEADS / "smollm2-135m-dflash"
    assert hub.pair_for_target("Qwen/Qwen3-8B") is hub.pair_for_target("qwen3-8b")
    assert hub.pair_for_target("huggingfacetb/smollm2-135m-instruct").name == "smollm2-hub"
    assert hub.pair_for_target("/models/Qwen3-8B") is None
    for pair in hub.PAIRS:
        if isinstance(pair.draft, Path):
            assert hub.missing_files(pair.draft, "draft") == []


def test_default_pair_never_surprises_with_a_download(monkeypatch):
    """A GPU alone is no reason to fetch gigabytes: both halves must be cached, else a hint says what they
    cost."""
    assert hub.default_pair(cuda=False) == (hub.known_pair("smollm2"), None)
    for cached in ((), ("target",), ("draft", "tokenizer")):
        monkeypatch.setattr(hub, "cached_snapshot", lambda repo, kind: Path("/x") if kind in cached else None)
        pair, hint = hub.default_pair(cuda=True)
        assert pair.name == "smollm2" and "--model qwen3-4b" in hint and "a download of 9.1 GB" in hint
    monkeypatch.setattr(hub, "cached_snapshot", lambda repo, kind: Path("/x"))
    assert hub.default_pair(cuda=True) == (hub.known_pair("qwen3-4b"), None)


def test_the_default_model_is_local_once_it_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path))
    built = tmp_path / default_model.DIRECTORY
    built.mkdir()
    for name in default_model.FILES:
        assert not hub.is_local(hub.known_pair("smollm2"))
        (built / name).touch()
    assert hub.is_local(hub.known_pair("smollm2"))
