"""Loading: each parameter gets the checkpoint's values; a checkpoint that does not fit is refused by name."""

import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    random_tensors,
    tiny_draft_config,
    tiny_target_config,
    write_checkpoint,
    write_tiny_draft,
    write_tiny_target,
)

from model import load_draft, load_target, memory
from model.config import draft_config, read_config, target_config
from model.dflash import DraftHead
from model.errors import UsageError, UserError
from model.linear import Linear
from model.load import default_placement
from model.random_weights import random_pair
from model.transformer import Target
from model.weights import load_weights

GOLDENS = Path(__file__).parent / "goldens"
ROOT = Path(__file__).parent.parent
INDEX = "model.safetensors.index.json"


def load(directory: Path, dtype=torch.float32, pack=False, progress=None) -> Target | DraftHead:
    """The checkpoint at `directory`, a target or a head, in a module that was built without memory."""
    values, tied = read_config(directory), None
    with torch.device("meta"):
        if "dflash_config" in values:
            module = DraftHead(draft_config(values))
        else:
            module = Target(target_config(values))
            tied = module.config.tied
    load_weights(module, directory, dtype=dtype, device="cpu", tied=tied, pack=pack, progress=progress)
    return module


def refusal(directory: Path) -> str:
    """The one line that loading `directory` ends with."""
    with pytest.raises(UserError) as caught:
        load(directory)
    message = str(caught.value)
    assert str(directory) in message and "\n" not in message
    return message


def expected_parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The slow, obvious name map: drop "model.", then put q, k, v and gate, up on top of each other."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    fused = {}
    for name in tensors:
        for whole, parts in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ):
            if f".{parts[0]}." in name:
                fused[name.replace(parts[0], whole)] = torch.cat(
                    [tensors[name.replace(parts[0], part)] for part in parts]
                )
    pieces = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return fused | {name: tensor for name, tensor in tensors.items() if name.split(".")[-2] not in pieces}


def assert_holds(module: torch.nn.Module, tensors: dict[str, torch.Tensor], dtype=torch.float32):
    expected = expected_parameters(tensors)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert parameter.dtype == dtype and not parameter.requires_grad, name
        assert torch.equal(parameter, expected[name].to(dtype)), name


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-dflash"])
def test_reference_checkpoints_fill_every_parameter(name):
    assert_holds(load(GOLDENS / name), load_file(GOLDENS / name / "model.safetensors"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("biases", [False, True])
def test_random_checkpoints_fill_every_parameter(tmp_path, family, shards, biases):
    """head_dim is not hidden / heads here, and shards part the pieces of one fused parameter."""
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    config = tiny_target_config(
        model_type=family, architectures=[architecture], attention_bias=biases, mlp_bias=biases
    )
    tensors = random_tensors(config)
    assert_holds(load(write_checkpoint(tmp_path, tensors, config, shards)), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_cast_once(tmp_path, dtype):
    assert_holds(load(write_tiny_target(tmp_path), dtype), random_tensors(tiny_target_config()), dtype)


@pytest.mark.parametrize("flag", ["absent", None, True])
def test_a_tied_head_is_the_embedding(tmp_path, flag):
    """With the flag absent and no LM head stored only the embedding is left; unpacked, they share memory."""
    config = tiny_target_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    config["tie_word_embeddings"] = flag
    if flag == "absent":
        del config["tie_word_embeddings"]
    target = load(write_checkpoint(tmp_path, tensors, config))
    assert target.lm_head.weight is target.embed_tokens.weight
    assert_holds(target, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})


@pytest.mark.parametrize("flag", ["absent", False])
def test_a_head_of_its_own_stays_its_own(tmp_path, flag):
    """A default of "tied" would drop the stored LM head without a word."""
    config = tiny_target_config()
    tensors = random_tensors(config)
    if flag == "absent":
        del config["tie_word_embeddings"]
    assert_holds(load(write_checkpoint(tmp_path, tensors, config)), tensors)


def test_a_missing_head_is_named(tmp_path):
    config = tiny_target_config()
    tensors = random_tensors(config)
    del tensors["lm_head.weight"]
    assert "lm_head.weight" in refusal(write_checkpoint(tmp_path, tensors, config))


def test_a_stored_copy_of_a_tied_head_must_be_a_copy(tmp_path):
    """Some exporters write both. Equal: tied. Different: versions of transformers disagree, so an error."""
    config = tiny_target_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    target = load(write_checkpoint(tmp_path / "equal", tensors, config))
    assert target.lm_head.weight is target.embed_tokens.weight
    tensors["lm_head.weight"][3, 3] += 1
    message = refusal(write_checkpoint(tmp_path / "different", tensors, config))
    assert "lm_head.weight differs" in message and "tie_word_embeddings" in message


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_packed_model_gives_the_same_logits(tmp_path, tied, stored):
    """Packing changes memory alone: logits stay, no Linear is left out, the table narrows where lossless."""
    config = tiny_target_config(tie_word_embeddings=tied)
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors(config).items()}
    directory = write_checkpoint(tmp_path, tensors, config)
    plain, packed = load(directory), load(directory, pack=True)
    tokens = torch.arange(40, 60)
    assert torch.allclose(packed.score(tokens)[0], plain.score(tokens)[0], atol=1e-4)
    table = packed.embed_tokens.weight
    assert table.dtype == stored and torch.equal(table, tensors["model.embed_tokens.weight"])
    for name, layer in packed.named_modules():
        assert not isinstance(layer, Linear) or layer.weight is None or layer.weight is table, name


def test_a_linear_is_packed_when_its_last_piece_is_there(tmp_path, monkeypatch):
    """Packed too early, rows or biases are garbage; packed at the end, the model is in memory twice."""
    config = tiny_target_config(attention_bias=True, tie_word_embeddings=True)
    tensors = random_tensors(config)
    expected = expected_parameters(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    packed, events = {}, []

    def spy(self):
        events.append("packed")
        packed[self] = {name: parameter.clone() for name, parameter in self.named_parameters()}

    monkeypatch.setattr(Linear, "pack", spy)
    directory = write_checkpoint(tmp_path, tensors, config)
    target = load(directory, pack=True, progress=lambda *_: events.append("tensor"))
    for name, layer in target.named_modules():
        if isinstance(layer, Linear):
            for leaf, value in packed.pop(layer).items():
                assert torch.equal(value, expected[f"{name}.{leaf}"]), f"{name}.{leaf}"
    assert not packed
    assert events.index("packed") <= 2 and events.count("packed") == 1 + 4 * config["num_hidden_layers"]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("load, write", [(load_target, write_tiny_target), (load_draft, write_tiny_draft)])
def test_loaders_by_name(tmp_path, monkeypatch, load, write, pack):
    """What they are asked for reaches the weights, packing by default; a tied head is found, a mistake has its place."""
    seen, tied, kinds = [], {"tie_word_embeddings": True}, set()
    monkeypatch.setattr("model.load.resolve", lambda name, kind, progress: kinds.add(kind) or name)
    model = load(write(tmp_path / "model", **tied), torch.float64, "cpu", lambda *step: seen.append(step), pack)
    assert seen[-1][0] == seen[-1][1] and not model.training
    assert kinds == {"target" if load is load_target else "draft"}
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.float64}
    laid_out = load(tmp_path / "model", device="cpu", **({} if pack else {"pack": False}))
    assert (laid_out.layers[0].mlp.gate_up_proj.weight is None) == pack
    assert getattr(model, "directory", tmp_path / "model") == tmp_path / "model"
    write(tmp_path / "model", head_dim=15)
    with pytest.raises(UserError, match=f"^{tmp_path / 'model'}.*: head_dim 15 is odd"):
        load(tmp_path / "model")


def test_a_dtype_that_no_model_runs_in_is_refused():
    for dtype in ("float32", torch.int8):
        with pytest.raises(UsageError, match=f"torch.float32, torch.bfloat16 or another of floating point, not {dtype!r}"):
            load_target("smollm2", dtype)


def test_where_a_model_runs_in_which_precision(monkeypatch):
    for found in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
        cpu, cuda = torch.device("cpu"), torch.device("cuda")
        assert default_placement(None, None) == ((cuda, torch.bfloat16) if found else (cpu, torch.float32))
        assert default_placement("cpu", None) == (cpu, torch.float32) and default_placement("cuda", None) == (cuda, torch.bfloat16)
        assert default_placement("cpu", torch.bfloat16) == (cpu, torch.bfloat16) and default_placement("cuda:1", torch.float32)[1] == torch.float32


MEASURE_GROWTH = """
import sys, torch
from model.config import read_config, target_config
from model.transformer import Target
from model.weights import load_weights

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

with torch.device("meta"):
    target = Target(target_config(read_config(sys.argv[1])))
before = resident("VmRSS")
load_weights(target, sys.argv[1], dtype=torch.float32, device="cpu", tied=True)
print((resident("VmHWM") - before) / sum(parameter.nbytes for parameter in target.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory of a process")
def test_peak_memory_is_the_weights_once(tmp_path):
    """A state dict read whole, or the file's pages kept mapped, would add half of the weights or more."""
    config = tiny_target_config(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=4, tie_word_embeddings=True
    )
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()}
    directory = write_checkpoint(tmp_path, tensors, config)
    command = [sys.executable, "-c", MEASURE_GROWTH, str(directory)]
    growth = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert float(growth) < 1.2


def test_weights_that_memory_cannot_hold_are_told_of(tmp_path, monkeypatch):
    """Linux would kill the program without a word. On a GPU, and where nothing is known of memory, nothing is refused."""
    config = tiny_target_config()
    write_checkpoint(tmp_path, {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()}, config)
    weights = sum(parameter.numel() for parameter in load(tmp_path).parameters())
    for make in (lambda: load(tmp_path), lambda: random_pair("tiny", torch.float32, "cpu")):
        monkeypatch.setattr(memory, "free_memory", lambda: 1000)
        with pytest.raises(UserError, match="weights .* take 0.0 GB of memory, and 0.0 GB are free: ") as caught:
            make()
        assert "\n" not in str(caught.value)
        monkeypatch.setattr(memory, "free_memory", lambda: None)
        make()
    memory.require_memory(10**18, "x", "cuda")
    write_tiny_target(tmp_path / "float32")
    for directory, pack, bytes in (tmp_path, True, 2), (tmp_path, False, 4), (tmp_path / "float32", True, 4):
        monkeypatch.setattr(memory, "free_memory", lambda: bytes * weights)
        load(directory, pack=pack)
        monkeypatch.setattr(memory, "free_memory", lambda: bytes * weights - 1)
        with pytest.raises(UserError):
            load(directory, pack=pack)


def test_free_memory_is_what_the_system_says(monkeypatch):
    assert 10**7 < memory.free_memory() < 10**15
    lines = "MemTotal: 9 kB\nMemAvailable: 5 kB\nSwapFree: 2 kB\nHugePages_Total: 0\n"
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(lines))
    assert memory.free_memory() == 7 * 1024
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO("MemTotal: 9 kB\n"))
    assert memory.free_memory() is None


def test_free_memory_ends_at_the_limit_of_a_container(monkeypatch, tmp_path):
    """The tightest of a process's group and those around it; a cache of files is no use of memory."""
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    for place, most, current, files in (group, "max", 0, 0), (group.parent, "1000", 700, 200), (tmp_path, "5000", 100, 0):
        (place / "memory.max").write_text(f"{most}\n")
        (place / "memory.current").write_text(f"{current}\n")
        (place / "memory.stat").write_text(f"anon 9\nactive_file {files // 2}\ninactive_file {files // 2}\n")
    (tmp_path / "cgroup").write_text("4:memory:/other\n0::/outer/inner\n")
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(tmp_path / "cgroup" if str(path) == "/proc/self/cgroup" else path))
    assert memory._free_in_groups(tmp_path) == 1000 - 700 + 200
    (tmp_path / "cgroup").write_text("0::/\n")
    assert memory._free_in_groups(tmp_path) == 4900
    assert memory._free_in_groups(tmp_path / "outer" / "none") == math.inf
    monkeypatch.setattr(memory, "_free_in_groups", lambda root: 3)
    lines = "MemAvailable: 5 kB\nSwapFree: 2 kB\n"
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(lines))
    assert memory.free_memory() == 3 + 2048


def test_progress_counts_every_byte(tmp_path):
    """A bar that ends early or late lies; tied weights and half precision change what there is to count."""
    for config in (tiny_target_config(), tiny_target_config(tie_word_embeddings=True), tiny_draft_config()):
        tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()}
        steps = []
        directory = write_checkpoint(tmp_path, tensors, config)
        load(directory, progress=lambda *step, steps=steps: steps.append(step))
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert steps[-1] == (size, size) and len(steps) == len(tensors)
        assert steps == sorted(steps) and {total for _, total in steps} == {size}


@pytest.mark.parametrize(
    "change, named",
    [
        (
            {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)},
            "model.layers.0.self_attn.q_norm.weight",
        ),
        ({"model.layers.0.self_attn.sinks": torch.ones(4)}, "model.layers.0.self_attn.sinks"),
        ({"model.layers.2.input_layernorm.weight": torch.ones(32)}, "model.layers.2.input_layernorm.weight"),
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(48)}, "model.layers.0.mlp.up_proj.bias"),
        ({"model.layers.1.self_attn.k_proj.weight": None}, "layers.1.self_attn.k_proj.weight"),
        ({"model.norm.weight": None}, "norm.weight"),
        ({"model.embed_tokens.weight": None}, "embed_tokens.weight"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 32)}, "shape (64, 32), expected (32, 32)"),
        ({"lm_head.weight": torch.ones(255, 32)}, "shape (255, 32), expected (256, 32)"),
        ({"norm.weight": torch.ones(32)}, "norm.weight twice"),
        (
            {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)},
            "up_proj.weight_scale_inv (F32) belongs to",
        ),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(48, 32).to(torch.float8_e4m3fn)}, "F8_E4M3"),
        (
            {"model.layers.0.mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.int8)},
            "(I8) belongs to a quantised",
        ),
    ],
)
def test_a_tensor_too_many_too_few_or_too_large_is_named(tmp_path, change, named):
    """strict=False loading runs with what it has: a bias or a norm skipped, a layer left at random values."""
    config = tiny_target_config()
    tensors = random_tensors(config) | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert named in refusal(write_checkpoint(tmp_path, tensors, config))


def test_derived_buffers_of_old_exporters_are_no_error(tmp_path):
    config = tiny_target_config()
    tensors = random_tensors(config)
    extra = {f"model.{owner}rotary_emb.inv_freq": torch.ones(8) for owner in ("", "layers.0.self_attn.")}
    assert_holds(load(write_checkpoint(tmp_path, tensors | extra, config, shards=2)), tensors)


def test_fc_width_must_be_taps_times_hidden(tmp_path):
    """Three taps in config.json, two in the weights."""
    directory = write_tiny_draft(tmp_path)
    config = tiny_draft_config(dflash_config={"mask_token_id": 255, "target_layer_ids": [0, 1, 1]})
    (directory / "config.json").write_text(json.dumps(config))
    message = refusal(directory)
    assert "fc.weight has shape (32, 64), expected (32, 96), taps × hidden wide" in message


def test_a_head_that_brings_its_own_embedding_is_refused(tmp_path):
    """The target's is used; a head trained with another would load and draft nonsense."""
    config = tiny_draft_config()
    tensors = random_tensors(config) | {"embed_tokens.weight": torch.ones(256, 32)}
    assert "embed_tokens.weight" in refusal(write_checkpoint(tmp_path, tensors, config))


def test_a_missing_shard_is_named(tmp_path):
    directory = write_tiny_target(tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(directory)
    (directory / INDEX).unlink()
    assert INDEX in refusal(directory)


def test_a_stray_single_file_beside_an_index_is_not_merged_in(tmp_path):
    """Left by a conversion: other values, or tensors that would be "unknown"."""
    directory = write_tiny_target(tmp_path, shards=2)
    stray = random_tensors(tiny_target_config(), seed=9) | {"stray.weight": torch.ones(3)}
    save_file(stray, directory / "model.safetensors")
    assert_holds(load(directory), random_tensors(tiny_target_config()))


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    directory = write_tiny_target(tmp_path, shards=2)
    index = json.loads((directory / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    right = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.weight"] = first if right == second else second
    (directory / INDEX).write_text(json.dumps(index))
    assert "lacks model.norm.weight" in refusal(directory)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": 3}',
        '{"weight_map": {"a": "../b.safetensors"}}',
    ],
)
def test_a_malformed_index_is_named(tmp_path, text):
    """And not passed over for the single file."""
    directory = write_tiny_target(tmp_path)
    (directory / INDEX).write_text(text)
    assert INDEX in refusal(directory)


@pytest.mark.parametrize(
    "cut, named",
    [
        (lambda data: data[:-1], "damaged or incomplete"),
        (lambda data: data[:100], "damaged or incomplete"),
        (lambda data: data[:3], "damaged or incomplete"),
        (lambda data: b"", "empty"),
        (lambda data: b"\x00" * len(data), "damaged or incomplete"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_damaged_file_is_named_before_anything_is_read(tmp_path, cut, named, shards):
    """Cut downloads, empty files and git-lfs pointers, alone or as the last shard."""
    directory = write_tiny_target(tmp_path, shards=shards)
    path = max(directory.glob("*.safetensors"))
    path.write_bytes(cut(path.read_bytes()))
    message = refusal(directory)
    assert str(path) in message and named in message


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    directory = write_tiny_target(tmp_path)
    path = directory / "model.safetensors"
    opened = type(path).open

    def refuse(self, *mode, **how):  # a file's mode would not keep root out
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *mode, **how)

    monkeypatch.setattr(type(path), "open", refuse)
    assert refusal(directory) == f"{path} may not be read: change its permissions"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_was_built_here_is_built_again(tmp_path, monkeypatch, name):
    """Nobody can download a file of the cache, and the next start rebuilds what is not there."""
    directory = write_tiny_target(tmp_path / "model")
    (directory / name).write_bytes(b"{")
    assert "download it again" in refusal(directory)
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path))
    assert f"delete {directory}, and the next start builds it again" in refusal(directory)


def test_a_directory_without_safetensors_is_refused(tmp_path):
    directory = write_tiny_target(tmp_path)
    shutil.move(directory / "model.safetensors", directory / "pytorch_model.bin")
    assert "only safetensors weights are read" in refusal(directory)


@pytest.mark.parametrize("content, told", [(None, "is missing: download it"), (b"{", "is not JSON"), (b"[]", "is not a JSON object")])
def test_what_is_wrong_with_a_config_is_told(tmp_path, content, told):
    """Another copy would be no help where there is none."""
    file = write_tiny_target(tmp_path) / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    assert f"{file} {told}" in refusal(tmp_path)
