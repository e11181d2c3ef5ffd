"""What makes compiled layers fast on a CPU: loops that prefetch weights, and calls that go past Dynamo.

A decoding step on a CPU waits for weights to come from memory, so they should never stop coming: neither within a loop nor
between one layer's loops and the next's. Which functions are compiled, and when, is in `capture`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FunctionType

import torch
from torch import Tensor

from model.transformer import Layer, Pair, Window

# For Inductor: multiply and add in one instruction. (Its checks of sizes take a twentieth of the default model's AR step, but
# stay: without them torch 2.11 runs code that was made for another number of live slots.)
OPTIONS = {"cpp.enable_floating_point_contract_flag": "fast"}
AHEAD = 1024  # weights between the one that a loop reads and the one that it prefetches


@contextmanager
def prefetching() -> Iterator[None]:
    """Within this context the loops that Inductor writes for a CPU prefetch the 16-bit values that they read: weights.

    A processor prefetches by itself, but only to the end of a page of 4 KB, so that a loop over weights stalls at each page.
    (The default model's layers take 22 ms over 8 rows with this and 27 without, on an Intel Xeon with AVX-512.) Inductor
    has no setting for it, so an instruction is added here to the C++ that it writes for a load. What other threads compile
    meanwhile stays as it is, since the tag that keeps such code apart in torch's cache is this thread's own. Dynamo holds a lock
    while it compiles, so this is never entered twice at once.
    """
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.codegen.cpp_utils import cexpr_index

    written, thread = CppVecKernel._get_vec_load_line, get_ident()

    def line(kernel, var, index, dtype, load_mask=None):
        load = written(kernel, var, index, dtype, load_mask)
        prefetch = f"__builtin_prefetch({var} + {cexpr_index(index)} + {AHEAD})"
        return f"({prefetch}, {load})" if dtype.itemsize == 2 and get_ident() == thread else load

    CppVecKernel._get_vec_load_line = line
    config = torch.compiler.config
    try:
        with config.patch(cache_key_tag=f"{config.cache_key_tag} {AHEAD} ahead"):  # else torch's cache has code without, too
            yield
    finally:
        CppVecKernel._get_vec_load_line = written


class Direct:
    """A function of a layer that was compiled with sizes left open, called past Dynamo wherever it has been before.

    At every call Dynamo takes over the frame and checks all that the compiled code rests on. That is not much, but by then
    the last layer's weights have driven it out of the CPU's caches: a fifth of the default model's AR step is Dynamo's. So
    only a layer's first calls with tensors of these shapes go through it, to find or make the code that fits; later ones
    go straight to that code. What may differ between them is the number of live slots. Dynamo may have specialised the code
    on that number, if it equalled another size; so code is reused for that number alone until Dynamo has accepted it for
    a second one.

    Attributes:
        function: `Layer.forward` or `Layer.remember`
        compiled: the same, by torch.compile
        codes: the code that fits, as a function, by what it rests on, and by the live slots where it may fit no others
        first: the live slots of the first pass that such code served
    """

    def __init__(self, function: Callable, compiled: Callable):
        self.function, self.compiled, self.codes, self.first = function, compiled, {}, {}

    def __call__(self, layer: Layer, x: Tensor, rope: Pair, cache: Pair, where: Window | Tensor) -> Tensor | None:
        """As `function`: x (B, T, H); where: its window, or its slots (T,), where there are no live ones."""
        live, key = getattr(where, "live", None), (layer, x.shape, cache[0].shape, getattr(where, "mask", None) is None)
        if code := self.codes.get(key) or self.codes.get((key, live)):
            return code(layer, x, rope, cache, where)
        result = self.compiled(layer, x, rope, cache, where)
        entries = getattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list", lambda function: [])(self.function)
        if entries:  # the last used comes first; none if compiling is off, or in a torch that does not tell
            code = entries[0].code
            fits_any = live is None or live != self.first.setdefault((key, code), live)
            self.codes[key if fits_any else (key, live)] = FunctionType(code, self.function.__globals__)
        return result
