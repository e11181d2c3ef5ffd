"""Prompts from JSONL files, one a line, by domain. The small set of our own is prompts.jsonl, beside this file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.errors import UsageError, UserError

PROMPTS = Path(__file__).parent / "prompts.jsonl"
PROMPT_FIELDS = ("prompt", "question", "text", "problem")


@dataclass(frozen=True)
class Prompt:
    domain: str
    text: str


def read_prompts(files: Sequence[Path], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each domain. A line's domain is its `domain`, else the file's name."""
    prompts, counts = [], {}
    for file in files:
        for number, line in enumerate(_read_lines(file), start=1):
            if not line.strip():
                continue
            text, domain = _read_prompt(line, f"{file}:{number}")
            domain = domain or file.stem
            counts[domain] = counts.get(domain, 0) + 1
            if limit is None or counts[domain] <= limit:
                prompts.append(Prompt(domain, text))
    if not prompts:
        raise UsageError("--prompts holds no prompts")
    return prompts


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"cannot read {file}: {reason}") from error


def _read_prompt(line: str, where: str) -> tuple[str, str | None]:
    """The text and the domain, if it names one, of a JSON line."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: a prompt file has one JSON object a line") from error
    if isinstance(values, dict):
        turns = values.get("turns")
        first = turns[:1] if isinstance(turns, list) else []
        for text in [values.get(name) for name in PROMPT_FIELDS] + first:
            if isinstance(text, str):
                return text, values.get("domain")
    raise UserError(f"{where} has no prompt: none of {', '.join(PROMPT_FIELDS)} or turns")
