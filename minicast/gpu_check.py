"""Everything to check and measure on a GPU in one short visit: `python -m minicast.bench --gpu-check --out DIR`.

Stages run in order, each in a process of its own under its own time limit, so that one that hangs or breaks the
device does not cost the others' results. Each finding is written at once, to DIR/gpu-check.json and, as a table below
what was measured and how, to DIR/gpu-check.md. Models have published shapes and random weights: latencies are real,
texts are not. `--shape tiny` runs the same stages on a tiny model, on any device: a rehearsal, whose figures mean
nothing.

A stage, and with it the command, fails if something that has to be right is not; its other figures are written first.
These have to be right: in float32, the tokens of every replayed method, which must equal eager AR's; the noise, which
depends on the seed alone; attention, within MOST_ERROR. In 16 bits a near-tie may go either way, so no tokens are
compared there.

Each time is listed with its floor: the bytes that the pass has to read, over the copy bandwidth of this device.
"""

from minicast.program import Parser, start

start(__name__)  # before anything slow is imported

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from graphs.capture import CompiledLayer
from graphs.masks import BitMask, flex
from minicast.back_off import BackOff
from minicast.command import Placement, guarded
from minicast.decode import Decoder
from minicast.methods import Proposal, capturable, no_tree
from minicast.policy import AutoWidth
from minicast.probe import Passes
from minicast.report import commit, environment
from minicast.round import Settled
from minicast.sampling import CHOICE, gumbel_noise, keyed_uniform
from minicast.table import markdown
from minicast.tree import Tree, ancestor_matrix
from model.device import clock, device_name
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.files import check_directory, write_atomically
from model.linear import weight_bytes
from model.random_weights import SHAPES, random_pair
from model.transformer import Target, dot_product_attention

PROMPT = tuple(range(7, 29))
OTHERS = ("llama3.1-8b", "qwen3-4b")  # shapes measured beside the one asked for

# Largest error of attention over its largest output, for a prefix of 1,000. Rounding alone makes 3e-3 in bfloat16 and
# some 5e-6 in float32; one slot too few or too many makes 2e-2 or more, and TF32 products in float32 5e-4.
MOST_ERROR = {torch.bfloat16: 8e-3, torch.float32: 1e-4}
# Largest error of noise. Its largest values, near 20, have steps of 2e-6; a device's logarithm may be off by one or two.
MOST_NOISE_ERROR = 1e-5


@dataclass
class Check:
    """What a stage needs to know.

    Attributes:
        name: of the large models' shape
        device, dtype: where and how the large models run
        report: called with a name and a figure; writes it down at once
        layers: those compiled for this stage; one that `failed` ran uncompiled, which is another measurement
        wrong: names of figures that had to be right and are not
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    report: Callable[[str, object], None]
    layers: list[CompiledLayer] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def tiny(self) -> bool:
        return self.name == "tiny"

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    @property
    def longest(self) -> int:
        """Positions of all caches: a cache's length is a shape, and a single shape is compiled once for all stages."""
        return self.size(16384, 512)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """One `run()` once warm: the median of a few groups, each of several passes in a row."""
        groups, passes = self.size(5, 1), self.size(10, 1)
        run()
        times = []
        for _ in range(groups):
            started = clock(self.device)
            for _ in range(passes):
                run()
            times.append((clock(self.device) - started) / passes * 1e3)
        return statistics.median(times)

    @cached_property
    def bytes_per_second(self) -> float:
        """Read plus written by the copy of a large buffer: what "bandwidth" means here."""
        buffer = torch.zeros(self.size(2**31, 2**22), dtype=torch.uint8, device=self.device)
        other = torch.empty_like(buffer)
        return 2 * buffer.numel() / self.milliseconds(partial(other.copy_, buffer)) * 1e3

    def pair(self, name: str) -> tuple[Target, DraftHead]:
        """Models of that shape with random weights."""
        self.bytes_per_second  # measured first: its buffers may not fit beside the models
        return random_pair(name, self.dtype, self.device)

    def require(self, what: str, holds: bool, figure: object = None) -> None:
        """Report a figure that has to be right; without a figure, whether it is."""
        self.report(what, holds if figure is None else figure)
        if not holds:
            self.wrong.append(what)

    def timed(self, what: str, ms: float, read: int) -> None:
        """Report a time with its floor. read: bytes that the pass has to read"""
        floor = read / self.bytes_per_second * 1e3
        self.report(what, {"ms": ms, "floor_ms": floor, "over_floor": ms / floor})

    def decoder(self, pair: tuple[Target, DraftHead], **options) -> Decoder:
        """Rounds replayed from graphs or, without CUDA, the same static functions uncaptured."""
        if self.device.type != "cuda":
            return Decoder(*pair, attention="flex", **options)
        decoder = Decoder(*pair, compile=True, **options)
        self.layers.append(decoder.state.body.compiled_layer)
        return decoder


# Bytes that a pass has to read

def cache_bytes(model: Target | DraftHead, positions: int) -> int:
    config, item = model.config, model.norm.weight.element_size()
    return 2 * config.layers * config.kv_heads * config.head_dim * positions * item


def settle_bytes(target: Target, prefix: int) -> int:
    return weight_bytes(target) + cache_bytes(target, prefix)


def propose_bytes(target: Target, draft: DraftHead, prefix: int) -> int:
    return weight_bytes(draft, target.lm_head) + cache_bytes(draft, prefix)


# Stages

def basics(check: Check) -> None:
    """Versions, what the device can do, and whether the calls that everything depends on work here."""
    report, device = check.report, check.device
    report("torch", torch.__version__)
    if device.type == "cuda":
        report("device", device_name(device))
        report("capability", ".".join(map(str, torch.cuda.get_device_capability(device))))
        report("memory GB", torch.cuda.get_device_properties(device).total_memory / 1e9)
        x, graph = torch.zeros(4, device=device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
        graph.replay()
        check.require("a graph replays", bool((x == 1).all()))
    report("copy GB/s", check.bytes_per_second / 1e9)
    size = check.size(8192, 128)
    a, b = (torch.randn(size, size, dtype=check.dtype, device=device) for _ in range(2))  # zeros are multiplied faster
    report(f"{check.dtype} product TFLOP/s", 2 * size**3 / check.milliseconds(partial(torch.mm, a, b)) / 1e9)
    cases = [(torch.float32, 24, 8), *((check.dtype, n, 8) for n in (1, 24, 64, 128))]
    for dtype, n, heads in [*cases, (check.dtype, 24, 6)]:  # groups of 4 heads, and of 3: another kernel
        if check.tiny and n not in (24, 64):  # uncompiled; one row and a folded pass run in tests/test_masks.py
            continue
        out, expected = attention_of(check, n, prefix=check.size(1000, 100), dtype=dtype, heads=heads)
        error = float((out.float() - expected).abs().max() / expected.abs().max())
        what = f"flex attention of {n} rows, {heads} heads over 2, in {dtype}, error over largest output"
        check.require(what, error <= MOST_ERROR[dtype], error)


def attention_of(check: Check, n: int, prefix: int, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
    """FlexAttention of a random tree's n rows after a prefix, and what it should be in float32: (1, heads, n, D).

    As in a layer, queries are computed in the compiled graph: of its inputs the compiler would know the strides.
    """
    slots, D = check.size(4224, 256), check.size(128, 16)
    generator = torch.Generator(check.device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=check.device)
    shapes = (1, n, heads * D), (1, 2, slots, D), (1, 2, slots, D)
    x, keys, values = (draw(*shape).to(dtype) for shape in shapes)
    parents = [random.Random(node).randrange(-1, node) for node in range(n - 1)]
    visible = ancestor_matrix(torch.tensor(parents, dtype=torch.int64, device=check.device), deepest=n)
    mask = BitMask(n, slots, visible, check.device)
    mask.fill(torch.tensor([prefix], device=check.device), visible)

    def queries(x: Tensor) -> Tensor:
        return 2 * x.unflatten(-1, (heads, D)).transpose(1, 2)

    def attend(x: Tensor) -> Tensor:
        return flex(queries(x), keys, values, mask)

    with torch.no_grad():
        out = (torch.compile(attend, fullgraph=True, dynamic=False) if check.device.type == "cuda" else attend)(x)
        dense = mask.dense().reshape(n, slots)
        return out, dot_product_attention(queries(x.float()), keys.float(), values.float(), dense)


def tokens(check: Check) -> None:
    """In float32 every replayed method gives eager AR's tokens: after changes of prefix, tree, seed and length."""
    pair = random_pair("tiny" if check.tiny else "small", torch.float32, check.device)
    eager, fast = Decoder(pair[0], compile=False), check.decoder(pair, max_length=256)
    count = check.size(40, 5)
    for sampling in ({}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95}):
        kind = "sampled" if sampling else "greedy"
        for method, width in (("cast", 127), ("cast", 63), ("cast", 15), ("dflash", 0), ("ar", 0)):
            equal = True
            for seed, prompt in enumerate((PROMPT, PROMPT[:5] * 9)):
                options = sampling | {"seed": seed, "max_new_tokens": count}
                expected = eager.generate(prompt, method="ar", **options).token_ids
                equal &= fast.generate(prompt, method=method, width=width, **options).token_ids == expected
            check.require(f"{kind} {method} {width} equals eager ar", equal)
    positions = torch.arange(3, 9)
    ids = torch.arange(2**15, dtype=torch.int32)
    here, there = (keyed_uniform(7, positions.to(d), ids.to(d), CHOICE).cpu() for d in ("cpu", check.device))
    check.require("keyed uniforms equal the CPU's", torch.equal(here, there))
    noise = [gumbel_noise(7, positions.to(d), 2**15).cpu() for d in ("cpu", check.device)]
    error = float((noise[0] - noise[1]).abs().max())
    check.require("keyed noise differs from the CPU's by", error <= MOST_NOISE_ERROR, error)
    check.report("one host sync a round", waits_once(fast, check))


def waits_once(decoder: Decoder, check: Check) -> bool | str:
    """Replay some rounds while any implicit wait raises. The one wait of a round is explicit."""
    if check.device.type != "cuda":
        return "needs CUDA"
    policy = AutoWidth(15, [1.0] * 16, BackOff())
    rounds = decoder.stream(PROMPT, method="cast", width=policy, max_new_tokens=60)
    next(rounds), next(rounds)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):  # the policy's AR rounds come later, and record a graph
            next(rounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def latencies(check: Check) -> None:
    """The passes of a round after 1,024 positions, replayed, and an eager step beside them."""
    prefix = check.size(1024, 64)
    pair = check.pair(check.name)
    target, draft = pair
    decoder = check.decoder(pair, max_length=check.longest)
    passes = Passes(decoder, prefix, check.size(1536, 128))
    verify = {}

    def time_verify(n: int) -> None:
        verify[n] = check.milliseconds(partial(passes.settle, n))
        check.timed(f"verify {n} rows", verify[n], settle_bytes(target, prefix))

    for n in (128, 64, 16):
        time_verify(n)
    draft_bytes, usual = propose_bytes(target, draft, prefix), passes.request
    passes.request = replace(usual, method=draft_alone)
    check.timed("draft without a tree", check.milliseconds(partial(passes.propose, 0)), draft_bytes)
    passes.request = usual
    check.timed("draft and a tree of 63", check.milliseconds(partial(passes.propose, 63)), draft_bytes)

    def cast_round():
        passes.propose(63)
        Settled.read(passes.settle(64))  # the next round waits for it, as in an answer

    round_bytes = draft_bytes + settle_bytes(target, prefix)
    check.timed("round of cast, N = 63", check.milliseconds(cast_round), round_bytes)
    time_verify(1)  # late, because tuning its kernels may take a minute
    for n in (16, 64, 128):
        check.report(f"verify {n} rows over 1 row", verify[n] / verify[1])
    passes.close()
    step = {}
    for kind, each in (("replayed", decoder), ("eager", Decoder(*pair, compile=False))):
        prompt = PROMPT * (prefix // len(PROMPT))
        each.generate(prompt, method="ar", max_new_tokens=3)  # records a graph of its own: without features
        out = each.generate(prompt, method="ar", max_new_tokens=check.size(48, 4))
        step[kind] = out.decode_seconds / len(out.round_lengths) * 1e3
        check.timed(f"ar a token, {kind}", step[kind], settle_bytes(target, prefix))
    check.report("eager over replayed", step["eager"] / step["replayed"])


@capturable
def draft_alone(proposal: Proposal) -> Tree:
    """A method that runs the drafter and proposes nothing."""
    proposal.draft()
    return no_tree(proposal)


def profile(check: Check) -> None:
    """Where a round's time goes: kernels of `propose` and `settle`, and the time between them."""
    prefix = check.size(1024, 64)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if check.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        with torch.profiler.profile(activities=activities):  # graphs recorded before the profiler's first use may crash
            pass
    pair = check.pair(check.name)
    decoder = check.decoder(pair, max_length=check.longest)
    passes = Passes(decoder, prefix, check.size(1536, 128))
    for what, run in (("settle 64", partial(passes.settle, 64)), ("propose 63", partial(passes.propose, 63))):
        wall = check.milliseconds(run)
        with torch.profiler.profile(activities=activities) as profiled:
            run()
            clock(check.device)  # the device has caught up
        kernels: dict[str, list[float]] = {}
        for event in profiled.events():
            if event.device_type.name.lower() == check.device.type:
                on_device = check.device.type == "cuda"
                us = event.device_time_total if on_device else event.self_cpu_time_total
                kernels.setdefault(event.name, []).append(us / 1e3)
        busy = sum(map(sum, kernels.values()))
        check.report(f"{what}: wall ms", wall)
        count = sum(map(len, kernels.values()))
        check.require(f"{what}: kernels", count > 0, count)  # a profiler that sees none would put all time between them
        check.report(f"{what}: ms in kernels", busy)
        check.report(f"{what}: ms between them", wall - busy)
        longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:15]
        for rank, (name, times) in enumerate(longest, start=1):
            check.report(f"{what}: {rank}. {name[:70]}", f"{sum(times):.3f} ms in {len(times)}")


def more_latencies(check: Check) -> None:
    """Other row counts, a long prefix, other widths; then the other shapes."""
    pair = check.pair(check.name)
    short, long = check.size(1024, 64), check.size(8192, 256)
    decoder = check.decoder(pair, max_length=check.longest)
    passes = Passes(decoder, short, long + 64)
    for n in (96, 65, 48, 32, 24):
        time_settle(check, passes, n, f"verify {n} rows")
    for width in (127, 31, 15):
        time_propose(check, passes, width, f"draft and a tree of {width}")
    passes.prefix = long
    for n in (64, 1):
        time_settle(check, passes, n, f"verify {n} rows after {long}")
    time_propose(check, passes, 63, f"draft and a tree of 63 after {long}")
    del pair, decoder, passes
    other_shapes(check, () if check.tiny else [name for name in OTHERS if name != check.name], short)


def other_shapes(check: Check, names: Sequence[str], prefix: int) -> None:
    """Those that fit: a device that holds the shape asked for has passed."""
    for name in names:
        gc.collect()  # compiled code keeps the previous pair's weights and caches alive in reference cycles
        if check.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            other_shape(check, name, prefix)
        except torch.OutOfMemoryError:
            check.report(name, "skipped: it does not fit this device's memory")


def other_shape(check: Check, name: str, prefix: int) -> None:
    pair = check.pair(name)
    passes = Passes(check.decoder(pair, max_length=check.longest), prefix, prefix + prefix // 2)
    time_settle(check, passes, 64, f"{name}: verify 64 rows")
    time_propose(check, passes, 63, f"{name}: draft and a tree of 63")
    time_settle(check, passes, 1, f"{name}: verify 1 rows")  # last: tuning it takes long


def time_settle(check: Check, passes: Passes, n: int, name: str) -> None:
    check.timed(name, check.milliseconds(partial(passes.settle, n)), settle_bytes(passes.state.target, passes.prefix))


def time_propose(check: Check, passes: Passes, width: int, name: str) -> None:
    ms = check.milliseconds(partial(passes.propose, width))
    check.timed(name, ms, propose_bytes(passes.state.target, passes.state.draft, passes.prefix))


def kernels(check: Check) -> None:
    """Layouts of the attention kernel, one layer of the large shape: those of `KERNELS` and their neighbours."""
    heads, kv_heads, D = check.size(32, 4), check.size(8, 2), check.size(128, 16)
    prefix, slots = check.size(1024, 64), check.size(4224, 256)
    dtype, device = check.dtype, check.device
    # A cache for each repetition, together more than the device's L2 holds: a round, too, reads it from memory.
    caches = torch.randn(check.size(20, 1), 2, 1, kv_heads, slots, D, dtype=dtype, device=device)
    sweep = {
        64: ({"SPLIT_KV": 4}, {"SPLIT_KV": 16}, {"num_warps": 8}, {"BLOCK_M": 32}, {"BLOCK_N": 128}, {"num_stages": 2}),
        16: ({"SPLIT_KV": 8}, {"SPLIT_KV": 32}),
        128: ({"SPLIT_KV": 4},),
    }
    for n, changes in sweep.items() if not check.tiny else [(16, ())]:
        q = torch.randn(1, heads, n, D, dtype=dtype, device=device)
        visible = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        usual = BitMask(n, slots, visible, device).options
        for change in ({}, *changes):
            options = usual | change
            mask = BitMask(n, slots, visible, device, options)
            mask.fill(torch.tensor([prefix], device=device), visible)
            name = f"{n} rows, " + ", ".join(f"{key} {value}" for key, value in options.items())
            try:
                ms = attention_milliseconds(check, q, caches, mask)
                check.report(name + (" (used)" if not change else ""), ms)
            except Exception as error:  # a layout that does not compile is a finding; the next one may
                check.report(name, told(error, 80).partition("\n")[0])
                if isinstance(error, torch.AcceleratorError):  # the device itself failed, and so would all that follows
                    raise


def attention_milliseconds(check: Check, q: Tensor, caches: Tensor, mask: BitMask) -> float:
    """One attention of q (1, Hq, n, D), without launching: replayed over each of the caches (C, 2, 1, Hkv, S, D)."""
    torch._dynamo.reset()
    with torch.no_grad():
        if check.device.type != "cuda":
            return check.milliseconds(partial(flex, q, *caches[0], mask))
        attend = torch.compile(flex, fullgraph=True, dynamic=False)
        attend(q, *caches[0], mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for keys, values in caches:
                attend(q, keys, values, mask)
        return check.milliseconds(graph.replay) / len(caches)


def default_model(check: Check) -> None:
    """A real pair, if it is on this machine already: real texts, real acceptance."""
    from model import hub, load_draft, load_target, load_tokenizer

    pair, _ = hub.default_pair(check.device.type == "cuda")
    if check.tiny or not hub.is_local(pair):
        check.report("default model", "skipped: a rehearsal" if check.tiny else f"skipped: {pair.name} is not on this machine")
        return
    tokenizer = load_tokenizer(pair.name)
    ids = tokenizer.encode_chat("How many positive divisors does 360 have? Explain step by step.")
    both = load_target(pair.name, device=check.device), load_draft(pair.name, device=check.device)
    decoder = check.decoder(both, max_length=check.longest)
    for method, width in (("cast", 63), ("cast", 15), ("dflash", 0), ("ar", 0)):
        options = dict(method=method, width=width, max_new_tokens=200, stop_ids=tokenizer.stop_ids)
        decoder.generate(ids, **options)
        out = decoder.generate(ids, **options)
        rate = sum(out.round_lengths) / out.decode_seconds
        check.report(f"{pair.name} {method} {width} tok/s", rate)
        check.report(f"{pair.name} {method} {width} mean R", statistics.fmean(out.round_lengths))


@dataclass(frozen=True)
class Stage:
    """A stage and the most seconds it may take, including the start of its process.

    rests: whether its last figures are needed, so that running out of time is a failure
    """

    run: Callable[[Check], None]
    seconds: int
    rests: bool = True


VISIT = 520  # seconds for all stages, to stay under nine minutes in all; later stages may use what earlier ones left
STAGES = {
    "a": Stage(basics, 75),
    "b": Stage(tokens, 150),
    "c": Stage(latencies, 150),
    "d": Stage(profile, 80),
    "e": Stage(more_latencies, 160, rests=False),
    "f": Stage(kernels, 70, rests=False),
    "g": Stage(default_model, 30, rests=False),
}


# Running them and keeping what they find

INTERRUPTION = "interrupted, so figures are missing"
ABOUT = "about"  # stands in a stage's place: what was measured, where and how


class Findings:
    """What has been found, by stage and name; on disk after every figure."""

    def __init__(self, directory: Path):
        self.json, self.table = directory / "gpu-check.json", directory / "gpu-check.md"
        directory.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict:
        return json.loads(self.json.read_text()) if self.json.exists() else {}

    def add(self, stage: str, name: str, value: object) -> None:
        found = self.read()
        found.setdefault(stage, {})[name] = value
        for path, text in ((self.json, json.dumps(found, indent=1) + "\n"), (self.table, as_table(found))):
            write_atomically(path, text)

    def clear(self) -> None:
        for path in (self.json, self.table):
            path.unlink(missing_ok=True)


def as_table(found: dict) -> str:
    """All findings for people: what was measured, then a table for each stage."""
    about = found.get(ABOUT, {})
    lines = [f"- {name}: {value}" for name, value in about.items()] + [""] * bool(about)
    for stage, findings in found.items():
        if stage == ABOUT:
            continue
        title = STAGES[stage].run.__doc__.splitlines()[0] if stage in STAGES else stage
        rows = []
        for name, value in findings.items():
            if isinstance(value, dict):
                cells = [f"{value['ms']:.3f} ms", f"{value['floor_ms']:.3f} ms", f"{value['over_floor']:.2f}"]
            else:
                cells = [f"{value:.4g}" if isinstance(value, float) else str(value), "", ""]
            rows.append([name, *cells])
        lines += [f"## {stage}. {title}", "", *markdown(("", "", "floor", "over floor"), rows, names=4), ""]
    return "\n".join(lines)


def run_stage(stage: str, shape: str, findings: Findings) -> None:
    """Run one stage in this process. Its error is a finding, and so are wrong figures."""
    here = Placement.choose("auto", "auto")  # on a GPU, or rehearsed on the CPU

    def report(name: str, value: object) -> None:
        findings.add(stage, name, value)
        print(f"{stage}  {name}: {json.dumps(value)}", flush=True)

    started = time.perf_counter()
    try:
        check = Check(shape, here.device, here.dtype, report)
        with torch.no_grad():
            STAGES[stage].run(check)
        if any(layer.failed for layer in check.layers):
            raise RuntimeError("layers did not compile (see stderr), and what was found is of uncompiled ones")
        if check.wrong:
            raise UserError(f"wrong on this device, so decode with --eager on it: {'; '.join(check.wrong)}")
    except KeyboardInterrupt:
        report("stopped", INTERRUPTION)
        raise
    except BaseException as error:
        failure = told(error, 500)
        report("failed", failure + "; try --shape qwen3-4b" * ("out of memory" in failure))
        raise
    finally:
        report("seconds", time.perf_counter() - started)


def told(error: BaseException, most: int) -> str:
    """An error and, before it, the first of its chain: an error that ends a recording is hidden by another one."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    return ", then ".join(f"{type(each).__name__}: {str(each)[:most]}" for each in dict.fromkeys((first, error)))


def launch(stage: str, shape: str, findings: Findings, seconds: float) -> None:
    """Run one stage in a process of its own, ended after so many seconds."""
    command = [sys.executable, "-m", "minicast.gpu_check", "--stage", stage, "--shape", shape]
    try:
        done = subprocess.run([*command, "--out", findings.json.parent], timeout=seconds)
        if done.returncode and "failed" not in findings.read().get(stage, {}):  # it had no time to say so
            findings.add(stage, "failed", f"exit status {done.returncode}")
    except subprocess.TimeoutExpired:
        findings.add(stage, "stopped", f"after {seconds:.3g} s")
    except KeyboardInterrupt:  # which ends the stage's process, perhaps before it could say so
        findings.add(stage, "stopped", INTERRUPTION)
        raise


def main(arguments: argparse.Namespace) -> int:
    """For `bench --gpu-check`. arguments: out, a directory or None; shape, the name of a random pair"""
    if arguments.shape not in SHAPES:
        raise UsageError(f"--shape {arguments.shape}: choose from {', '.join(SHAPES)}")
    if arguments.shape != "tiny" and not torch.cuda.is_available():
        raise UserError("--gpu-check needs a CUDA device; rehearse it elsewhere with --shape tiny")
    out = arguments.out or Path("gpu-check")
    check_directory(out, "--out")
    findings = Findings(out)
    findings.clear()
    if not torch.cuda.is_available():
        rehearsal = "no CUDA device, so this is a rehearsal on the CPU: none of its figures is a GPU's"
        print(f"gpu-check: {rehearsal}", file=sys.stderr)
        findings.add(ABOUT, "remark", rehearsal)
    command = ["--gpu-check", "--shape", arguments.shape, "--out", str(out)]
    source = f"random ones of the shape {arguments.shape}, where nothing else is said: times count, texts mean nothing"
    for name, value in environment(Placement.choose("auto", "auto"), source, command, commit()).items():
        findings.add(ABOUT, name, value)
    end = time.monotonic() + VISIT
    for name, stage in STAGES.items():
        launch(name, arguments.shape, findings, min(stage.seconds, max(end - time.monotonic(), 0.0)))
    print(findings.table.read_text(), end="")
    found = findings.read()
    ends = [(stage.rests, found.get(name, {})) for name, stage in STAGES.items()]
    return int(any("failed" in each or ("stopped" in each and rests) for rests, each in ends))


def _main(argv: Sequence[str] | None = None) -> int:
    """One stage in its own process or, if none is named, all of them."""
    parser = Parser(prog="python -m minicast.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)

    def run() -> int:
        if arguments.stage is None:
            return main(arguments)
        run_stage(arguments.stage, arguments.shape, Findings(arguments.out or Path("gpu-check")))
        return 0

    return guarded("gpu_check", run)


if __name__ == "__main__":
    sys.exit(_main())
