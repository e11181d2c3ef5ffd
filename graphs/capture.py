"""What makes a round fast on a GPU: layers compiled, and the round's two functions replayed from CUDA graphs.

Between two products of a decoding step there is little to compute and much to launch: run from Python, a
round can take longer to start its kernels than to run them. Two things take that away. Compiling a layer
fuses what lies between its products (`CompiledLayer`). Capturing a function of the round records its kernels
once, with their addresses and constants, and from then on starts all of them with one call (`Graphs`).

What a graph can hold, and why the code it holds looks as it does:

- Addresses are fixed: whatever changes from round to round is written into buffers that never move. Caches do
  not grow in place: when they must, all graphs are dropped and recorded again.
- Shapes are fixed: there is a graph for each packed-row bucket, and a pack is padded to the first that holds
  it.
- Host values are constants: the prefix length, the pending root, the seed and the tree are read from tensors.
  What a graph may not read from the host goes into the key that it is kept under.
- Nothing inside waits for the device: no `.item()`, no shape that depends on data, no copy from host memory.

Recording executes nothing. It is preceded by WARM_UPS runs, on the real buffers, that compile, tune and
allocate; afterwards the buffers are put back, and what these runs left in the caches lies above the prefix.
Graphs share one pool of memory, since no two run at once; so an output is read, or copied, before the next
replay. Larger graphs leave room that smaller ones fit into. If several graphs will be needed, record the
largest first.

Nothing here knows what a round is: that is in `minicast.round`, and on a CPU its functions run uncaptured.
"""

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from graphs.cpu import OPTIONS, Direct, prefetching
from model.errors import UserError
from model.linear import FEW_ROWS, Linear
from model.memory import trim
from model.transformer import Layer, Pair, Window

WARM_UPS = 2     # the first run compiles and tunes; the second allocates as the recorded one will
MOST_SHAPES = 1024  # compiled in one process
MAX_GRAPHS = 64  # kept at once, or all are dropped: a request's few, for several widths and ways of sampling
ROWS = (1, 4, 8, FEW_ROWS)  # packed rows that layers are compiled for on a CPU; wider packs take buckets of `minicast.round`


@dataclass
class SetupTime:
    """Seconds of one-off work: compiling layers, laying out weights for them, recording graphs. No timer of an answer
    includes them."""

    seconds: float = 0.0


class CompiledLayer:
    """Runs any layer of a target or a drafter, compiled once for each shape of a pass: `Window.run_layer`. On a CPU
    `run_linear` does so for their other linear layers: the LM head, and the drafter's fusion of features.

    All layers of a model are one function with other weights, so that the first compiles for all of them. Passes over
    the live slice leave the number of slots open, and are compiled for each number of rows. Where compiling fails, for
    want of a compiler mostly, there is one warning, and layers run as they are written.

    Attributes:
        backend: torch.compile's, in the place of Inductor
        failed: whether compiling did
        setup: what it took; shapes: how many were compiled so far
    """

    def __init__(self, backend: Callable | None = None):
        self.backend, self.failed, self.setup, self.shapes = backend, False, SetupTime(), 0
        try:
            from torch._dynamo import config  # imported here: it takes a second, and makes the cache's directory
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            raise UserError(f"the compiler's cache, see TORCHINDUCTOR_CACHE_DIR, cannot be made: {reason}") from error
        # All decoders' shapes count together, and beyond the limit a new one would be an error.
        config.recompile_limit = config.accumulated_recompile_limit = MOST_SHAPES
        config.specialize_float = True  # epsilon is a constant, where sizes are open too
        config.record_runtime_overhead = False  # for a profiler: a fiftieth of an AR step
        if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            self._fail("TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set")
        self.forward_any_rows = self._compile(Layer.forward, dynamic=False)
        # With one row a generated kernel streams the weight faster than cuBLAS does.
        self.forward_one_row = self._compile(Layer.forward, {"coordinate_descent_tuning": True}, dynamic=False)
        self.forward_live = Direct(Layer.forward, self._compile(Layer.forward, OPTIONS, dynamic=True))
        self.remember_static = self._compile(Layer.remember, dynamic=False)
        self.remember_live = Direct(Layer.remember, self._compile(Layer.remember, OPTIONS, dynamic=True))
        self.linear = self._compile(Linear.forward, OPTIONS, dynamic=False)

    def __call__(self, layer: Layer, x: Tensor, rope: Pair, cache: Pair | None, window: Window | None) -> Tensor:
        """As `Layer.forward`: x (B, T, H) -> (B, T, H)."""
        one = x.shape[1] == 1 and x.dtype != torch.float32  # tuning takes a while, and float32 is not for speed
        compiled = self.forward_live if window.live is not None else self.forward_one_row if one else self.forward_any_rows
        compiled = Layer.forward if layer.self_attn.o_proj.packed else compiled  # packed again by another decoder
        return self._run(compiled, Layer.forward, layer, x, rope, cache, window)

    def remember(self, layer: Layer, x: Tensor, rope: Pair, cache: Pair, slots: Tensor) -> None:
        """As `Layer.remember`: x (B, T, H), slots (T,), for few T. Caches of a GPU do not grow, those of a CPU do."""
        packed = layer.self_attn.o_proj.packed
        compiled = Layer.remember if packed else self.remember_static if x.is_cuda else self.remember_live
        self._run(compiled, Layer.remember, layer, x, rope, cache, slots)

    def run_linear(self, linear: Linear, x: Tensor) -> Tensor:
        """`linear(x)`, x (…, in_features) -> (…, out_features), for a linear layer outside of layers.

        Where the weights are in panels it runs compiled, FEW_ROWS rows at a time.
        """
        if linear.panels is None:
            return linear(x)
        rows = x.flatten(0, -2)
        if len(rows) > FEW_ROWS:
            y = torch.cat([self.run_linear(linear, few) for few in rows.split(FEW_ROWS)])
        else:
            padding = next(count for count in ROWS if count >= len(rows)) - len(rows)
            y = self._run(self.linear, Linear.forward, linear, F.pad(rows, (0, 0, 0, padding)))[: len(rows)]
        return y.view(*x.shape[:-1], linear.out_features)

    def try_out(self) -> None:
        """Compile a function that is no layer: whether anything compiles here is known before the first answer."""
        self._run(self._compile(torch.nn.functional.silu), torch.nn.functional.silu, torch.zeros(8))

    def _compile(self, function: Callable, options: dict | None = None, **how) -> Callable:
        def compiler(graph, inputs):
            self.shapes += 1
            if self.backend:
                return self.backend(graph, inputs)
            from torch._inductor import compile_fx, utils

            try:
                with tqdm(total=1, desc="compile", leave=False, disable=None), prefetching():
                    compiled = compile_fx.compile_fx(graph, inputs, config_patches=options)
            except BaseException:  # Ctrl-C ends the C++ compiler, too; what it left would count as failed from then on
                utils.clear_caches()
                raise
            gc.collect()  # what compiling took
            trim()
            return compiled

        return torch.compile(function, fullgraph=True, backend=compiler, **how)

    def _run(self, compiled: Callable, plain: Callable, *arguments) -> Tensor | None:
        if not self.failed:
            shapes, began = self.shapes, time.perf_counter()
            try:
                return compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:
                self._fail(str(error).split(" raised:\n", 1)[-1].strip().partition("\n")[0])  # a backend's own, less its name
            finally:
                if self.shapes > shapes:
                    self.setup.seconds += time.perf_counter() - began
        return plain(*arguments)

    def _fail(self, reason: str) -> None:
        self.failed = True
        warnings.warn(f"cannot compile, so layers run uncompiled and slower: {reason}", stacklevel=4)


class Graphs:
    """Functions of fixed buffers, each recorded at its first use under a key and replayed from then on."""

    def __init__(self, recorder: "CudaRecorder", setup: SetupTime):
        self.recorder, self.setup = recorder, setup
        self.captured: dict[Hashable, tuple[Any, Any]] = {}  # a graph; what it returned, whose tensors replays fill

    def run(self, key: Hashable, function: Callable[[], Any], buffers: Sequence[Tensor], label: str) -> Any:
        """Run `function`, by replay; returns its output, valid until the next replay of any graph.

        Args:
            key: all that is constant in the recording: two functions of one key do the same
            function: reads and writes tensors at fixed addresses only
            buffers: tensors that it changes and that matter: put back after warm-up
            label: names it on the progress bar
        """
        if key not in self.captured:
            if len(self.captured) >= MAX_GRAPHS:
                self.clear()  # all: freeing one may free a workspace of cuBLAS's that others on its stream still use
            before, began = self.setup.seconds, time.perf_counter()
            self.captured[key] = self._capture(function, buffers, label)
            self.setup.seconds = before + time.perf_counter() - began  # what was compiled meanwhile is in it
        graph, output = self.captured[key]
        graph.replay()
        return output

    def clear(self, reason: str = "") -> None:
        """Drop all graphs. `reason`, printed on stderr, says what moved: graphs hold raw addresses."""
        if reason and self.captured:
            print(f"minicast: {reason}; recording {len(self.captured)} graphs anew", file=sys.stderr)
        self.captured.clear()
        self.recorder.renew()

    def _capture(self, function: Callable[[], Any], buffers: Sequence[Tensor], label: str) -> tuple[Any, Any]:
        before = [buffer.clone() for buffer in buffers]
        with tqdm(total=WARM_UPS + 1, desc=f"capture {label}", leave=False, disable=None) as bar:
            for _ in range(WARM_UPS):
                self.recorder.warm_up(function)
                for buffer, values in zip(buffers, before):
                    buffer.copy_(values)
                bar.update()
            return self.recorder.record(function)


class CudaRecorder:
    """CUDA's side of `Graphs`: a stream to record on, and a pool of memory that all graphs share."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.renew()

    def renew(self) -> None:
        """Another pool: one whose graphs are all gone may not be recorded into again."""
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run for the side effects: kernels compiled, workspaces allocated on the recording stream."""
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                function()
            torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of `function`, and what it returned. What is not compiled by now is an error."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.compiler.set_stance("fail_on_recompile"):
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                output = function()
        return graph, output
