"""Time autoregressive decoding here against transformers' generate: float32 on a CPU, the same weights.

    python tests/tools/compare_transformers.py --model smollm2 --new-tokens 64 --repeats 5

Run by hand where transformers is installed beside requirements.txt; the project never needs it. A step is
(time of n tokens - time of one) / (n - 1), so that prefill and set-up count for neither. Both run in turn, in
random order, and the median step of each is printed with their ratio, as Markdown.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, from anywhere

from minicast import Decoder  # noqa: E402
from minicast.bench import check_compiled  # noqa: E402
from minicast.machine import measure_floor  # noqa: E402
from minicast.report import commit  # noqa: E402
from model import load_target, load_tokenizer  # noqa: E402
from model.device import device_name  # noqa: E402
from model.hub import resolve, source  # noqa: E402

PROMPT = "Explain in a few paragraphs how a steam engine works."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="minicast's layers compiled; transformers as it is")
    arguments = parser.parse_args()
    count = arguments.new_tokens

    directory = resolve(arguments.model, "target")
    prompt_ids = load_tokenizer(arguments.model).encode_chat(PROMPT)
    target = load_target(arguments.model, torch.float32, "cpu")
    decoder = Decoder(target, compile=arguments.compile)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # both give exactly so many tokens
    inputs = torch.tensor([prompt_ids])

    def minicast_tokens(new_tokens: int) -> list[int]:
        decoder.reset()
        return decoder.generate(prompt_ids, method="ar", max_new_tokens=new_tokens).token_ids

    @torch.no_grad()
    def transformers_tokens(new_tokens: int) -> list[int]:
        every = torch.ones_like(inputs)
        ids = theirs.generate(
            inputs, attention_mask=every, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
        return ids[0, len(prompt_ids) :].tolist()

    programs = {"minicast": minicast_tokens, "transformers": transformers_tokens}
    tokens = {name: run(8) and run(count) for name, run in programs.items()}  # warm-up
    steps: dict[str, list[float]] = {name: [] for name in programs}
    floor_ms = measure_floor(target).ms
    for repeat in range(arguments.repeats):
        order = list(programs)
        random.Random(repeat).shuffle(order)
        for name in order:
            one, many = [seconds(programs[name], new_tokens) for new_tokens in (1, count)]
            steps[name].append((many - one) * 1e3 / (count - 1))
        latest = ", ".join(f"{name} {values[-1]:.1f} ms" for name, values in steps.items())
        print(f"repeat {repeat}: {latest}", file=sys.stderr)
    floor_ms = min(floor_ms, measure_floor(target).ms)
    check_compiled([decoder])

    medians = {name: statistics.median(values) for name, values in steps.items()}
    print("| program | ms a step, median | fastest | slowest | over the streaming floor |")
    print("|---|---:|---:|---:|---:|")
    for name, values in steps.items():
        cells = (medians[name], min(values), max(values), medians[name] / floor_ms)
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    print(f"\n- transformers over minicast: {medians['transformers'] / medians['minicast']:.2f}")
    print(f"- tokens equal: {tokens['minicast'] == tokens['transformers']}")
    print(f"- streaming floor of minicast's weights: {floor_ms:.1f} ms")
    weights = source(arguments.model, "target")
    print(f"- weights: {weights}, float32, {count} tokens, {arguments.repeats} repeats")
    print(f"- command: python tests/tools/compare_transformers.py {' '.join(sys.argv[1:])}")
    load = os.getloadavg()[0]
    print(f"- hardware: {device_name(torch.device('cpu'))}; load average {load:.1f}")
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"- versions: Python {platform.python_version()}, {libraries}; commit {commit()}")


def seconds(run, new_tokens: int) -> float:
    started = time.perf_counter()
    run(new_tokens)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
