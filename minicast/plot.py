"""Pictures of what bench, probe and replay measured, as PNG files; needs matplotlib (pip install matplotlib).

    python -m minicast.plot FILE.json... --out DIR

A file's content decides what is drawn; pictures are named after the file:

    probe     NAME-latency.png    a target pass against packed rows n, with the fitted line (paper, Figure 2);
                                  a bench has one for each prefix P: NAME-latency-P.png with --probe-full, and
                                  NAME-latency-auto-P.png of the costs that width "auto" went by
    bench     NAME-speedup.png    speedup over AR, mean of prompts, against width N, N* marked (paper, Figure 3)
    replay    NAME-lengths.png    R against N, replayed and as the drafter's scores promise
              NAME-scores.png     correction ranks, reliability, masses (paper, Figure 4), shapes (Appendix G)

Nothing is measured here, and nothing computed but the line.
"""

from minicast.program import Parser, start

start(__name__)  # before anything slow is imported

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minicast.command import guarded
from minicast.figures import chosen_width, usual_width
from minicast.prompts import EVERYTHING, MEAN
from minicast.width import FIT_FROM, CostModel
from model.errors import UsageError, UserError
from model.files import check_directory, read_text, write_atomically

NO_SWEEP = "has no speedup over AR at a fixed width: run bench with --methods ar,cast --widths N,..."
NO_MATPLOTLIB = "pictures need matplotlib: pip install matplotlib"
AXES_INCHES = (5.0, 3.6)


def new_figure(columns: int = 1, rows: int = 1):
    """A figure and its axes, row by row. matplotlib is only imported here, when there is something to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(NO_MATPLOTLIB) from error
    width, height = AXES_INCHES
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()


def label(axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


# One function for each picture: from the file's values to a figure

def latency(probe: dict):
    """Target pass against n; probe: {"packed": [n], "settle_ms": [ms]}."""
    figure, (axes,) = new_figure()
    cost = CostModel.fit(probe["packed"], probe["settle_ms"])
    axes.plot(cost.packed, cost.milliseconds, "o-", label="measured")
    ends = [cost.packed[0], cost.packed[-1]]
    fit = f"{cost.intercept:.1f} + {cost.slope:.3f} n, fitted from n = {FIT_FROM}"
    axes.plot(ends, [cost.intercept + cost.slope * n for n in ends], "--", label=fit)
    axes.set_ylim(bottom=0)
    label(axes, "One target pass", "packed rows n", "ms")
    return figure


def speedup(bench: dict):
    """Speedup over AR against N, a line for each domain; N* is that of width "auto", if it was run."""
    figure, (axes,) = new_figure()
    chains = {row["domain"]: mean_speedup(row) for row in bench["rows"] if row["arm"] == "dflash"}
    for domain, points in swept_widths(bench).items():
        style = {"color": "black", "linewidth": 2.5} if domain == MEAN else {}
        (line,) = axes.plot(sorted(points), [points[N] for N in sorted(points)], "o-", label=domain, **style)
        if chains.get(domain) is not None:
            axes.axhline(chains[domain], color=line.get_color(), linestyle=":", linewidth=1)
    for N in predicted_widths(bench):
        axes.axvline(N, color="tab:red", linestyle="--", label=f"predicted N* = {N}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    label(axes, "Speed against width (dotted: the chain)", "width N", "speedup over AR, mean of prompts")
    return figure


def swept_widths(bench: dict) -> dict[str, dict[int, float]]:
    """By domain and width N, the speedups that the file has; empty if AR was not run, or no N was fixed."""
    swept: dict[str, dict[int, float]] = {}
    for row in bench["rows"]:
        width = chosen_width(row["arm"])
        if width.isdigit() and mean_speedup(row) is not None:
            swept.setdefault(row["domain"], {})[int(width)] = mean_speedup(row)
    return swept


def mean_speedup(row: dict) -> float | None:
    """Over AR, the mean of prompts; None if AR was not run."""
    return row["prompt_speedup"] and row["prompt_speedup"]["mean"]


def predicted_widths(bench: dict) -> list[int]:
    """What width "auto" came to in each prompt domain, each once, ascending."""
    widths = {}
    for record in bench["records"]:
        if record["arm"].endswith("auto"):
            widths.setdefault(record["domain"], []).extend(record["output"]["widths"])
    return sorted({usual_width(each) for each in widths.values()})


def lengths(analysis: dict):
    """R against N for every domain, with what the drafter's scores promise."""
    figure, (axes,) = new_figure()
    for finding in analysis["findings"]:
        tree, chain = finding["tree"], finding["chain"]
        style = {"color": "black", "linewidth": 2.5} if finding["domain"] == EVERYTHING else {}
        (line,) = axes.plot(tree["widths"], tree["R"], label=finding["domain"], **style)
        axes.plot(tree["widths"], tree["predicted"], ":", color=line.get_color())
        axes.plot(chain["widths"][-1], chain["R"][-1], "s", color=line.get_color())
    label(axes, "R against width (dotted: promised; squares: the chain)", "width N", "tokens a round R")
    return figure


def scores(analysis: dict):
    """Four panels: ranks of corrections, reliability at depth one, sorted masses, shapes of equal size.

    The masses' panel shows the threshold if width policies were compared: without costs there is none.
    """
    figure, (ranks, reliable, masses, shapes) = new_figure(2, 2)
    findings = analysis["findings"]
    share = 0.8 / len(findings)  # of a group of bars

    def bars(axes, values: Sequence[dict[str, float]]) -> None:
        for place, (finding, heights) in enumerate(zip(findings, values)):
            left = [group + (place - (len(findings) - 1) / 2) * share for group in range(len(heights))]
            axes.bar(left, heights.values(), share, label=finding["domain"])
        axes.set_xticks(range(len(values[0])), values[0])

    bars(ranks, [finding["corrections"]["shares"] for finding in findings])
    label(ranks, "(a) Correction at the chain's first rejection", "rank in q", "share")
    for finding in findings:
        bins = finding["reliability"]
        reliable.plot([each["mean_q"] for each in bins], [each["hit_rate"] for each in bins], "o-",
                      label=finding["domain"])
        masses.plot(range(1, len(finding["masses"]) + 1), finding["masses"], label=finding["domain"])
    reliable.plot([0, 1], [0, 1], "--", color="grey", linewidth=0.8)
    label(reliable, "(b) Reliability at depth one", "drafter's probability", "hit rate")
    masses.set_yscale("log")
    threshold = analysis["policies"]["threshold"] if analysis["policies"] else 0.0
    if threshold > 0.0:  # costs that fall with the width have none
        masses.axhline(threshold, color="black", linestyle="--", linewidth=0.8, label=f"threshold {threshold:.2g}")
    label(masses, "(c) Sorted prefix masses", "candidate", "mean mass")
    bars(shapes, [finding["shapes"] for finding in findings])
    label(shapes, "(d) Shapes of one size, beside the chain", "", "tokens a round R")
    return figure


Draw = Callable[[dict], object]


def pictures(values: dict) -> dict[str, tuple[Draw, dict]]:
    """By the picture's name, how to draw it and from what; empty for a file of another kind."""
    if values.get("findings"):
        return {"lengths": (lengths, values), "scores": (scores, values)}
    if "rows" in values:
        probes = {f"latency-{probe['prefix']}": (latency, probe["costs"]) for probe in values["probes"]}
        probes |= {f"latency-auto-{prefix}": (latency, each) for prefix, each in values["costs"].items()}
        return ({"speedup": (speedup, values)} if swept_widths(values) else {}) | probes
    return {"latency": (latency, values["costs"])} if "costs" in values else {}


# The command line

def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m minicast.plot", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json",
                        help="of bench, replay or a probe")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="default: here")
    arguments = parser.parse_args(argv)
    return guarded("plot", lambda: run(arguments.files, arguments.out))


def run(files: Sequence[Path], out: Path) -> int:
    check_directory(out, "--out")
    if len({file.stem for file in files}) < len(files):
        raise UsageError("pictures are named after their files, and two of these share a name: draw them one by one")
    for file in files:
        values = read(file)
        try:
            drawn = {name: draw(part) for name, (draw, part) in pictures(values).items()}
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UsageError(f"{file} is not as bench, replay or a probe writes it ({error!r})") from error
        unswept = "rows" in values and "speedup" not in drawn
        if not drawn:
            other = "is not the output of bench, replay or a probe: there is nothing to draw"
            raise UsageError(f"{file} {NO_SWEEP if unswept else other}")
        if unswept:
            print(f"plot: {file} {NO_SWEEP}", file=sys.stderr)
        for name, figure in drawn.items():
            path = out / f"{file.stem}-{name}.png"
            try:
                out.mkdir(parents=True, exist_ok=True)
                write_atomically(path, lambda part: figure.savefig(part, dpi=150, format="png"))
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}") from error
            print(path)
    return 0


def read(file: Path) -> dict:
    try:
        values = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:  # no JSON, or nested too deep
        raise UsageError(f"{file} is not JSON: give the JSON output of bench, replay or a probe") from error
    return values if isinstance(values, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
