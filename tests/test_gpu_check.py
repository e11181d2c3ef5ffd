"""The one command for a GPU visit, rehearsed on a CPU: a slip in it would cost the visit."""

import errno
import json
import subprocess
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch

from minicast import Decoder, bench, gpu_check
from minicast.gpu_check import STAGES, Findings, Stage, launch, main, run_stage
from model import files
from model.errors import UserError
from model.linear import weight_bytes
from model.random_weights import SHAPES, random_pair
from model.transformer import KVCache, Target


@pytest.fixture(autouse=True)
def no_git(monkeypatch):
    """Where processes are replaced, those of git would be too."""
    monkeypatch.setattr(gpu_check, "commit", lambda: "of the code")


@pytest.fixture
def in_process(monkeypatch):
    """Stages in this process: starting one takes seconds."""

    def run(stage, shape, findings, seconds):
        try:
            run_stage(stage, shape, findings)
        except Exception:
            pass

    monkeypatch.setattr(gpu_check, "launch", run)


@pytest.mark.filterwarnings("ignore")
def test_every_stage_runs_on_a_tiny_shape(tmp_path, in_process, capsys):
    """End to end, less the processes: no stage fails, tokens agree, and each time stands beside its floor."""
    assert main(Namespace(out=tmp_path, shape="tiny")) == 0
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(found) == ["about", *STAGES]
    assert all(value is True for name, value in found["b"].items() if "equal" in name)
    assert sum("equal" in name for name in found["b"]) == 11
    names = "verify 1 rows", "verify 128 rows", "draft without a tree", "round of cast, N = 63", "ar a token, eager"
    for name in names:
        figure = found["c"][name]
        assert figure["ms"] > 0 and figure["floor_ms"] > 0
        assert figure["over_floor"] == pytest.approx(figure["ms"] / figure["floor_ms"])
    c, d = found["c"], found["d"]
    for n in (16, 64, 128):
        assert c[f"verify {n} rows over 1 row"] == pytest.approx(c[f"verify {n} rows"]["ms"] / c["verify 1 rows"]["ms"])
    slow, fast = (c[f"ar a token, {kind}"]["ms"] for kind in ("eager", "replayed"))
    assert c["eager over replayed"] == pytest.approx(slow / fast)
    parts = [c[name]["floor_ms"] for name in ("draft and a tree of 63", "verify 64 rows")]
    assert c["round of cast, N = 63"]["floor_ms"] == pytest.approx(sum(parts))
    for what in ("settle 64", "propose 63"):
        busy, idle = d[f"{what}: ms in kernels"], d[f"{what}: ms between them"]
        assert busy > 0 and d[f"{what}: wall ms"] == pytest.approx(busy + idle)
    table = (tmp_path / "gpu-check.md").read_text()
    told = capsys.readouterr()
    assert table.strip() in told.out and "no CUDA device, so this is a rehearsal" in told.err
    time = c["verify 64 rows"]
    assert f"| verify 64 rows | {time['ms']:.3f} ms | {time['floor_ms']:.3f} ms | {time['over_floor']:.2f} |\n" in table
    assert found["about"]["commit"] == "of the code" and "shape tiny" in found["about"]["weights"]
    head, _ = table.split("## a.")
    assert f"- command: python -m minicast.bench --gpu-check --shape tiny --out {tmp_path}\n" in head
    assert torch.cuda.is_available() or "- remark: no CUDA device, so this is a rehearsal" in head


def a_check(name="large", found=None) -> gpu_check.Check:
    found = {} if found is None else found
    return gpu_check.Check(name, torch.device("cpu"), torch.float32, found.__setitem__)


def test_times_are_medians_of_groups_in_milliseconds(monkeypatch):
    """Of one pass: groups of ten that take 1, 2, 7, 1 and 3 seconds, less the first pass, which is not timed."""
    now, runs = [0.0], []

    def clock(device):
        if len(runs) % 10 == 1 and len(runs) > 1:  # a group has ended
            now[0] += [1, 2, 7, 1, 3][len(runs) // 10 - 1] * (now[-1] != len(runs))
            now[1:] = [len(runs)]
        return now[0]

    monkeypatch.setattr(gpu_check, "clock", clock)
    assert a_check().milliseconds(lambda: runs.append(0)) == pytest.approx(200) and len(runs) == 1 + 5 * 10


def test_a_floor_is_the_bytes_over_the_bandwidth(monkeypatch):
    """Of a copy, which reads and writes; and a time stands beside it."""
    found = {}
    check = a_check("tiny", found)
    monkeypatch.setattr(gpu_check.Check, "milliseconds", lambda self, run: 2.0)
    assert check.bytes_per_second == 2 * 2**22 / 2e-3
    check.timed("a pass", 6.0, read=2**23)
    assert found == {"a pass": {"ms": 6.0, "floor_ms": pytest.approx(2.0), "over_floor": pytest.approx(3.0)}}


def test_a_pass_reads_its_weights_and_its_caches():
    """Both kinds of keys and values of every layer; a draft also the rows of the target's LM head."""
    target, draft = random_pair("tiny", torch.bfloat16, "cpu")
    caches = [KVCache(model.config, 50, torch.bfloat16, "cpu").data for model in (target, draft)]
    assert [gpu_check.cache_bytes(model, 50) for model in (target, draft)] == [cache.nbytes for cache in caches]
    assert gpu_check.settle_bytes(target, 50) == weight_bytes(target) + caches[0].nbytes
    head = weight_bytes(target.lm_head)
    assert head > 0 and gpu_check.propose_bytes(target, draft, 50) == weight_bytes(draft) + head + caches[1].nbytes


def test_an_earlier_check_leaves_no_figures(tmp_path, in_process, monkeypatch):
    """Of stages that this one does not reach."""
    def stage(check):
        """A stage."""
        check.report("new", 1)

    Findings(tmp_path).add("a", "old", 2)
    monkeypatch.setattr(gpu_check, "STAGES", {"a": Stage(stage, 9)})
    assert main(Namespace(out=tmp_path, shape="tiny")) == 0
    found = Findings(tmp_path)
    assert "old" not in found.read()["a"] and found.read()["a"]["new"] == 1 and "old" not in found.table.read_text()


def test_a_figure_that_cannot_be_written_costs_none_of_those_before(tmp_path, monkeypatch):
    """A full disk, or the end of the visit."""
    found = Findings(tmp_path)
    found.add("a", "first", 1)
    before = {path: path.read_text() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError):
        found.add("a", "second", 2)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_what_a_stage_said_of_its_failure_is_kept(tmp_path, monkeypatch):
    """Its exit status says less."""
    Findings(tmp_path).add("a", "failed", "ValueError: why")
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    launch("a", "tiny", Findings(tmp_path), 9)
    assert Findings(tmp_path).read()["a"] == {"failed": "ValueError: why"}


def test_wrong_tokens_fail_their_stage(tmp_path, in_process, monkeypatch):
    """A table of wrong tokens that ends in status 0 is taken for a pass. Every figure is found all the same."""
    monkeypatch.setattr(gpu_check, "STAGES", {"b": STAGES["b"]})
    generate = Decoder.generate

    def one_token_off(self, prompt_ids, **options):
        out = generate(self, prompt_ids, **options)
        if options["method"] == "cast" and options["width"] == 15 and options.get("temperature"):
            out.token_ids[-1] ^= 1
        return out

    monkeypatch.setattr(Decoder, "generate", one_token_off)
    assert main(Namespace(out=tmp_path, shape="tiny")) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())["b"]
    assert [name for name, value in found.items() if value is False] == ["sampled cast 15 equals eager ar"]
    assert found["failed"].endswith(": sampled cast 15 equals eager ar")
    assert "one host sync a round" in found  # the last one


@pytest.mark.parametrize("stage, function, name", [
    ("b", "keyed_uniform", "keyed uniforms equal the CPU's"),
    ("b", "gumbel_noise", "keyed noise differs from the CPU's by"),
    ("a", "flex", "error over largest output"),
])
def test_wrong_numbers_fail_their_stage(tmp_path, monkeypatch, stage, function, name):
    """Noise of its own gives this device other texts; attention that misses a slot is off by a few hundredths."""
    original, calls = getattr(gpu_check, function), []

    def every_other_is_off(*arguments):
        calls.append(arguments)
        return original(*arguments) + 0.01 * (len(calls) % 2)

    monkeypatch.setattr(gpu_check, function, every_other_is_off)
    monkeypatch.setattr(gpu_check, "waits_once", lambda *_: True)
    with pytest.raises(UserError, match=name):
        run_stage(stage, "tiny", Findings(tmp_path))
    assert name in json.loads((tmp_path / "gpu-check.json").read_text())[stage]["failed"]


def test_the_visit_ends_in_time(tmp_path, monkeypatch):
    """It has nine minutes as a whole. A stage has its own share of them, and never more than is left."""
    now, allowed = [1e6], []

    def run(command, timeout):
        allowed.append(timeout)
        now[0] += timeout
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert main(Namespace(out=tmp_path, shape="tiny")) == 1
    shares = [stage.seconds for stage in STAGES.values()]
    assert sum(shares) > sum(allowed) == gpu_check.VISIT <= 520
    assert allowed[:4] == shares[:4] and all(each <= share for each, share in zip(allowed, shares, strict=True))


def test_a_stage_that_fails_does_so_alone(tmp_path, in_process, monkeypatch):
    """What was found before, and what comes after, must not be lost with it."""

    def breaks(check):
        check.report("figure", 1.5)
        raise RuntimeError("an illegal memory access")

    stages = {"a": Stage(breaks, 9), "b": Stage(lambda check: check.report("fine", True), 9)}
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    breaks.__doc__ = stages["b"].run.__doc__ = "A stage."
    stages["b"].run.__doc__ = "Another."
    assert main(Namespace(out=tmp_path, shape="tiny")) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["a"]["figure"] == 1.5
    assert found["a"]["failed"] == "RuntimeError: an illegal memory access"
    assert found["b"]["fine"] is True


def test_a_stage_that_hangs_is_stopped(tmp_path, monkeypatch):
    """A wrong kernel can wait for ever; the visit is short."""
    launch("g", "tiny", Findings(tmp_path), 0.05)
    assert json.loads((tmp_path / "gpu-check.json").read_text())["g"] == {"stopped": "after 0.05 s"}


@pytest.mark.parametrize("stage, status", [("c", 1), ("f", 0)])
def test_only_a_stage_that_something_rests_on_must_finish(tmp_path, monkeypatch, stage, status):
    """A sweep that is cut short has found what it has found; latencies without the one-row pass are no result."""
    def run(command, timeout):
        if command[command.index("--stage") + 1] == stage:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert main(Namespace(out=tmp_path, shape="tiny")) == status


def test_a_stage_that_dies_without_a_word_has_failed(tmp_path, monkeypatch):
    """A segmentation fault, or a process that was killed for memory."""
    died = subprocess.CompletedProcess([], -11)
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *_, **__: died)
    assert main(Namespace(out=tmp_path, shape="tiny")) == 1
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert {stage: found[stage] for stage in STAGES} == dict.fromkeys(STAGES, {"failed": "exit status -11"})


def test_other_shapes_are_measured_as_far_as_they_fit(monkeypatch):
    """A card of 24 GB holds Qwen3-8B, its caches and graphs, but neither the buffers that bandwidth is measured with
    beside them nor what the garbage collector has not yet found of the pair before."""
    found, events = {}, []
    check = gpu_check.Check("tiny", torch.device("cpu"), torch.float32, found.__setitem__)
    monkeypatch.setattr(gpu_check.gc, "collect", lambda: events.append("collect"))

    def make(name, *where):
        events.append(name)
        assert "bytes_per_second" in vars(check)
        if name == "qwen3-4b":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB")
        return random_pair(name, *where)

    monkeypatch.setattr(gpu_check, "random_pair", make)
    with torch.no_grad():
        gpu_check.other_shapes(check, ["qwen3-4b", "tiny"], prefix=16)
    assert events == ["collect", "qwen3-4b", "collect", "tiny"]
    assert found.pop("qwen3-4b").startswith("skipped")
    assert list(found) == ["tiny: verify 64 rows", "tiny: draft and a tree of 63", "tiny: verify 1 rows"]


def test_a_shape_that_does_not_fit_names_one_that_may(tmp_path, monkeypatch):
    """Also where a recording was under way, whose own complaint comes last."""

    def stage(check):
        """A stage."""
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        finally:
            raise RuntimeError("error during capture")

    monkeypatch.setitem(STAGES, "a", Stage(stage, 9))
    with pytest.raises(RuntimeError):
        run_stage("a", "tiny", Findings(tmp_path))
    assert Findings(tmp_path).read()["a"]["failed"].endswith("; try --shape qwen3-4b")


@pytest.mark.parametrize("ended", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_stage_does_not_look_finished(tmp_path, monkeypatch, ended):
    """Some of its figures are there, and the seconds that it took."""

    def stage(check):
        """A stage."""
        check.report("ms", 1.0)
        raise ended

    monkeypatch.setitem(STAGES, "a", Stage(stage, 9))
    with pytest.raises(ended):
        run_stage("a", "tiny", Findings(tmp_path))
    mark = "stopped" if ended is KeyboardInterrupt else "failed"
    assert list(Findings(tmp_path).read()["a"]) == ["ms", mark, "seconds"]


def test_ctrl_c_marks_the_stage_that_ran(tmp_path, monkeypatch):
    """It ends the stage's process too, which may have had no time to say so."""

    def run(command, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        main(Namespace(out=tmp_path, shape="tiny"))
    assert Findings(tmp_path).read()["a"] == {"stopped": "interrupted, so figures are missing"}
    assert "| stopped | interrupted" in (tmp_path / "gpu-check.md").read_text()


def test_layers_that_did_not_compile_fail_their_stage(tmp_path, monkeypatch):
    """They run all the same, uncompiled: right tokens, and times of something else."""
    def stage(check):
        """A stage."""
        check.layers.append(Namespace(failed=True))
        check.report("ms", 1.0)

    monkeypatch.setitem(STAGES, "a", Stage(stage, 9))
    with pytest.raises(RuntimeError):
        run_stage("a", "tiny", Findings(tmp_path))
    found = json.loads((tmp_path / "gpu-check.json").read_text())["a"]
    assert found["ms"] == 1.0 and "did not compile" in found["failed"]


def test_what_ended_a_recording_is_told(tmp_path, monkeypatch):
    """torch ends a recording in any case, and its complaint of a broken one would be all that a reader learns."""

    def broken(check):
        """A stage."""
        try:
            raise ValueError("a value for the host")
        finally:
            raise RuntimeError("error during capture")

    monkeypatch.setitem(gpu_check.STAGES, "a", gpu_check.Stage(broken, 1))
    with pytest.raises(RuntimeError):
        gpu_check.run_stage("a", "tiny", Findings(tmp_path))
    found = Findings(tmp_path).read()["a"]
    assert found["failed"] == "ValueError: a value for the host, then RuntimeError: error during capture"


def test_the_flag_of_bench_leads_here(monkeypatch):
    """`python -m minicast.bench --gpu-check` is what people are told to type."""
    seen = []
    monkeypatch.setattr(gpu_check, "main", lambda arguments: seen.append(arguments) or 0)
    assert bench.main(["--gpu-check", "--out", "there", "--shape", "tiny"]) == 0
    assert (str(seen[0].out), seen[0].shape) == ("there", "tiny")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_only_a_rehearsal_runs(tmp_path):
    """Latencies of a CPU under a GPU's heading would be taken for real."""
    with pytest.raises(UserError, match="--shape tiny"):
        main(Namespace(out=tmp_path, shape="qwen3-8b"))


@pytest.mark.parametrize("name, billions, head_millions", [
    ("qwen3-8b", 8.19, 1048.6), ("qwen3-4b", 4.41, 537.4), ("llama3.1-8b", 8.03, 1048.6),
])
def test_random_shapes_have_the_published_sizes(name, billions, head_millions):
    """A floor computed from a wrong shape flatters or slanders. Qwen3-4B's tied matrix is counted twice
    here."""
    from model.dflash import DraftHead

    with torch.device("meta"):
        target, draft = Target(SHAPES[name].target), DraftHead(SHAPES[name].draft)
    assert sum(weight.numel() for weight in target.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
    head = sum(weight.numel() for weight in draft.parameters()) / 1e6
    assert head == pytest.approx(head_millions, abs=0.05)


def test_random_weights_depend_on_the_seed_alone():
    """Two processes must be able to speak of the same model."""
    a, b = (random_pair("tiny", torch.bfloat16, "cpu")[0] for _ in range(2))
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert float(a.lm_head.weight.std()) == pytest.approx(0.02, rel=0.05)
    other, _ = random_pair("tiny", torch.bfloat16, "cpu", seed=1)
    assert not torch.equal(other.lm_head.weight, a.lm_head.weight)


def test_refusals_leave_everything_as_it_was(tmp_path, capsys):
    """An unknown shape is named, with those that there are, before the device is; nothing is made or deleted."""
    kept = tmp_path / "gpu-check.json"
    kept.write_text("{}")
    for flags, status, words in (
        (["--shape", "nope", "--out", str(tmp_path)], 2, ["nope", *SHAPES]),
        (["--shape", "tiny", "--out", str(kept)], 2, ["is a file"]),
        (["--out", str(tmp_path / "new")], 1, ["needs a CUDA device"]),
    ):
        if status == 1 and torch.cuda.is_available():
            continue
        assert bench.main(["--gpu-check", *flags]) == status
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and all(word in err for word in words)
    assert [file.name for file in tmp_path.iterdir()] == ["gpu-check.json"] and kept.read_text() == "{}"


@pytest.mark.parametrize("error, reported", [(RuntimeError, 12), (torch.AcceleratorError, 1)])
def test_a_sweep_goes_on_after_a_layout_but_not_after_the_device(monkeypatch, error, reported):
    """A device that failed fails at all that follows, which would read as findings of the other layouts."""
    found = {}
    check = a_check("small", found)
    monkeypatch.setattr(gpu_check.Check, "size", lambda self, full, tiny: tiny)
    monkeypatch.setattr(gpu_check, "attention_milliseconds", lambda *_: (_ for _ in ()).throw(error("no such layout")))
    with pytest.raises(error) if reported == 1 else nullcontext():
        gpu_check.kernels(check)
    assert len(found) == reported and all("no such layout" in value for value in found.values())
