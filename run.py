"""Text from a prompt: flags in, text out.

    python run.py --prompt "What is the capital of France?"

Text goes to stdout as it is decoded, everything else to stderr. How it is decoded is in minicast/decode.py.
"""

import argparse
import json
import sys

from minicast.program import INTERRUPTED, Parser, at_least, compile_flags, model_flags, sampling_flags, start

METHODS = ("ar", "dflash", "cast")  # of `minicast.methods`, which imports torch, for which --help should not wait
OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "rank_cap", "verifier")  # of the decoder
ASKED = (*OPTIONS, "attention", "draft_vocabulary", "raw", "system", "enable_thinking")  # told beside the figures


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="run.py", description="Decode a prompt with a speculative tree (CAST).")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("-p", "--prompt", help='"-" reads stdin, less its last newline')
    task.add_argument("--chat", action="store_true", help="several turns in one conversation; /help there says more")
    model_flags(parser.add_argument_group("model"))
    group = parser.add_argument_group("prompt")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument("--enable-thinking", action="store_true", help="where the chat template has this mode")
    group.add_argument("--raw", action="store_true", help="continue the prompt, no chat template")
    group = parser.add_argument_group("decoding")
    group.add_argument("--max-new-tokens", type=at_least(0), default=256, metavar="N", help="default: %(default)s")
    sampling_flags(group, seed="")
    group.add_argument("--method", choices=METHODS, default="cast", help="default: %(default)s")
    group.add_argument("--width", type=at_least(0, auto="auto", round="round"), default="auto", metavar="N",
                       help="nodes of cast's tree, cut to 127; auto, the default: as many as pay on this machine; "
                       "round: likewise, for each round anew")
    group.add_argument("--reprobe", action="store_true", help="measure this machine again for auto and round")
    group.add_argument("--probe-full", action="store_true", help="the paper's long probe, and the N* it gives, on stderr")
    group.add_argument("--rank-cap", type=at_least(1, none=None), default=8, metavar="K",
                       help="tokens kept at each depth of the tree, or none; default: %(default)s")
    compile_flags(group)
    group = parser.add_argument_group("output")
    group.add_argument("--show-tree", action="store_true", help="each round's packed tree, then the text")
    group.add_argument("--explain-round", type=at_least(1), nargs="?", const=1, metavar="K",
                       help="decode up to round K, 1 if left out, tell that round step by step, and stop")
    group.add_argument("--compare", action="store_true", help="all methods on the prompt, side by side")
    group.add_argument("--explain", action="store_true", help="costs, masses and the width that follows, on stderr")
    group.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments = parser.parse_args(argv)

    if arguments.prompt is None and not arguments.chat:
        parser.error('say what to decode: --prompt "...", or --chat')
    if arguments.raw and (arguments.system is not None or arguments.enable_thinking):
        parser.error("--raw uses no chat template, so --system and --enable-thinking have no place in it")
    if arguments.show_tree and (arguments.json or arguments.compare):
        parser.error("--show-tree goes with neither --json nor --compare")
    alone = ("raw", "show_tree", "explain_round", "compare", "explain", "reprobe", "probe_full", "json")
    if arguments.chat and any(getattr(arguments, name) for name in alone):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in alone)
        parser.error(f"--chat goes with none of {flags}")
    if arguments.chat and sys.stdin is None:
        parser.error("--chat reads messages from stdin, which is closed")
    if arguments.explain_round and (arguments.show_tree or arguments.compare or arguments.json):
        parser.error("--explain-round goes with none of --show-tree, --compare, --json")
    return arguments


def encode_prompt(arguments: argparse.Namespace, tokenizer) -> list[int]:
    from minicast.command import check_length, read_stdin

    text = read_stdin() if arguments.prompt == "-" else arguments.prompt
    check_length(text, tokenizer)
    chat = {"system": arguments.system, "enable_thinking": arguments.enable_thinking}
    ids = tokenizer.encode(text) if arguments.raw else tokenizer.encode_chat(text, **chat)
    if ids and not text.strip():
        print("run.py: the prompt is blank, and is answered all the same", file=sys.stderr)
    return ids


def run(arguments: argparse.Namespace) -> int:
    from minicast.command import Checkpoints, Placement, note_idle_flags, peak_memory
    from minicast.decode import Decoder
    from minicast.terminal import Screen, show_answer

    placement = Placement.choose(arguments.device, arguments.dtype)
    autoregressive = arguments.method == "ar" or (arguments.method == "cast" and arguments.width == 0)
    probes = arguments.explain or arguments.reprobe or arguments.probe_full
    drafts = arguments.compare or probes or not autoregressive
    note_idle_flags("run.py", arguments, METHODS if arguments.compare else (arguments.method,), drafts)
    checkpoints = Checkpoints.of(arguments.model, arguments.draft_model, placement.device, drafts)
    checkpoints.note_thinking("run.py", arguments.enable_thinking)
    tokenizer = checkpoints.tokenizer()
    if arguments.chat:
        from minicast.chat import Chat, Conversation

        conversation = Conversation(tokenizer, arguments.system, arguments.enable_thinking)
    else:
        prompt_ids = encode_prompt(arguments, tokenizer)
    target, draft = checkpoints.load(placement, arguments.draft_vocabulary)
    if arguments.explain_round:
        from minicast.narrate import Watcher, explain_round
    decoder_class = Watcher if arguments.explain_round else Decoder
    decoder = decoder_class(target, draft, compile=arguments.compile, attention=arguments.attention)
    common = {name: getattr(arguments, name) for name in OPTIONS} | {"stop_ids": tokenizer.stop_ids}
    options = common | {"method": arguments.method, "width": arguments.width}
    screen = Screen()
    if arguments.chat:
        return Chat(decoder, conversation, options, screen).run()
    if probes:
        from minicast.paper_probe import explain

        asked = {"width": arguments.explain, "reprobe": arguments.reprobe, "full": arguments.probe_full}
        for line in explain(decoder, prompt_ids, arguments.max_new_tokens, **asked):
            print(line, file=sys.stderr)
    if arguments.compare:
        from minicast.bench import show_comparison

        return show_comparison(decoder, tokenizer, prompt_ids, arguments.width, common, screen, as_json=arguments.json)
    if arguments.explain_round:
        explain_round(decoder, tokenizer, prompt_ids, options, arguments.explain_round, screen)
        return 0
    live = not (arguments.json or arguments.show_tree)
    answer = show_answer(decoder, tokenizer, prompt_ids, options, screen, live, arguments.show_tree)
    memory = peak_memory(placement.device)
    if arguments.json:
        where = {"weights": checkpoints.source(), "placement": str(placement), "peak_memory_bytes": memory}
        asked = {name: getattr(arguments, name) for name in ASKED} | {"compiled": decoder.state.compiled}
        screen.write(json.dumps(answer.figures() | where | {"options": asked}) + "\n")
    else:
        last = [f"memory   {memory / 1e6:.0f} MB at peak", f"weights  {checkpoints.source()}; {placement}"]
        print(*answer.lines(), *last, sep="\n", file=sys.stderr)
    if answer.error:
        raise answer.error
    return INTERRUPTED if answer.stop_reason == "interrupted" else 0


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    from minicast.command import guarded  # imports torch, so --help and a wrong flag do not wait for it

    return guarded("run.py", lambda: run(arguments))


if __name__ == "__main__":
    start(__name__)
    sys.exit(main())
