"""Pictures of measured figures: what is drawn is what the files hold; without matplotlib, one clear line."""

import errno
import json
import sys
from pathlib import Path

import pytest

from minicast import plot

LENGTHS = {"widths": [1, 2, 3], "rounds": [9, 8, 7], "R": [1.5, 1.8, 2.0], "predicted": [1.6, 1.9, 2.2]}


def finding(domain: str) -> dict:
    return {
        "domain": domain,
        "tree": LENGTHS,
        "chain": {"widths": [1, 2], "rounds": [9, 8], "R": [1.5, 1.7], "predicted": [1.6, 1.8]},
        "corrections": {"events": 3, "shares": {"2-4": 0.5, "5-8": 0.25, "over 32": 0.25}},
        "reliability": [{"low": 0.0, "high": 0.1, "candidates": 4, "mean_q": 0.05, "hit_rate": 0.1}],
        "masses": [0.5, 0.2, 0.1],
        "shapes": {"chain": 1.7, "best first": 2.0},
    }


def bench() -> dict:
    arms = {"ar": 1.0, "dflash": 1.1, "cast N=7": 1.3, "cast N=15": 1.2, "cast N=auto": 1.3}
    domains = ("math", "mean")
    rows = [{"domain": domain, "arm": arm, "prompt_speedup": {"mean": arms[arm]}} for domain in domains for arm in arms]
    rows.append({"domain": "chat", "arm": "cast N=7", "prompt_speedup": None})
    record = {"arm": "cast N=auto", "domain": "math", "output": {"widths": [7, 0, 0, 7, 3, 0]}}  # it paused half of the time
    hard = record | {"domain": "chat", "output": {"widths": [3, 3, 0]}}  # another width than in maths: two predictions
    others = [{"arm": arm, "domain": "essays", "output": {"widths": [31]}} for arm in ("ar", "cast N=round")]
    return {"rows": rows, "costs": {}, "probes": [], "records": [record, hard, *others]}


FILES = {
    "replay": ({"findings": [finding("math"), finding("all")], "policies": None}, ["lengths", "scores"]),
    "bench": (bench(), ["speedup"]),
    "probe": ({"costs": {"packed": [1, 4, 16, 32], "settle_ms": [20.0, 21.0, 30.0, 46.0]}}, ["latency"]),
    "probed": (
        bench() | {"probes": [{"prefix": 99, "costs": {"packed": [16, 32], "settle_ms": [30.0, 46.0]}}]},
        ["speedup", "latency-99"],
    ),
    "prefixes": (
        bench() | {"costs": {P: {"packed": [1, 16], "settle_ms": [20.0, 30.0]} for P in ("256", "1024")}},
        ["speedup", "latency-auto-256", "latency-auto-1024"],
    ),
}


def write(path, values):
    path.write_text(json.dumps(values))
    return str(path)


def test_without_matplotlib_there_is_one_line(tmp_path, monkeypatch, capsys):
    """Exit status 1 and the way out, not an ImportError's traceback; the module itself imports without it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.main([write(tmp_path / "a.json", FILES["probe"][0]), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"plot: {plot.NO_MATPLOTLIB}\n"


def test_says_what_it_cannot_draw(tmp_path, capsys):
    """A missing file, no JSON, and JSON of another kind: one line each, with the file's name."""
    other = [write(tmp_path / f"{k}.json", values) for k, values in enumerate(({"a": 1}, [1], "x"))]
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    for file in [*other, *(str(tmp_path / f"{name}.json") for name in ("text", "deep", "none"))]:
        assert plot.main([file]) == 2
        message = capsys.readouterr().err
        assert file in message and message.count("\n") == 1


@pytest.mark.parametrize("kind", FILES)
def test_draws_every_kind_of_file(kind, tmp_path, capsys):
    """A PNG for each picture that the file's content asks for, and their names printed."""
    pytest.importorskip("matplotlib")
    values, names = FILES[kind]
    assert plot.main([write(tmp_path / f"{kind}.json", values), "--out", str(tmp_path / "new")]) == 0
    pictures = [tmp_path / "new" / f"{kind}-{name}.png" for name in names]
    assert capsys.readouterr().out.splitlines() == list(map(str, pictures))
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, capsys):
    """A full disk, halfway."""
    figure = pytest.importorskip("matplotlib.figure")
    (tmp_path / "a-latency.png").write_bytes(b"a good one")

    def full(self, file, **how):
        Path(file).write_bytes(b"half")
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(figure.Figure, "savefig", full)
    assert plot.main([write(tmp_path / "a.json", FILES["probe"][0]), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"plot: cannot write {tmp_path / 'a-latency.png'}: File too large\n"
    assert (tmp_path / "a-latency.png").read_bytes() == b"a good one" and len(list(tmp_path.iterdir())) == 2


def lines_of(figure) -> dict[str, tuple[list, list]]:
    lines = figure.axes[0].lines
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_lines_are_the_figures_of_the_file():
    """The line is the width rule's, from n = 16 on; a sweep is sorted by width; N* is what auto came to."""
    pytest.importorskip("matplotlib")
    drawn = lines_of(plot.latency(FILES["probe"][0]["costs"]))
    fitted = [line for name, line in drawn.items() if "fitted" in name]
    assert fitted == [([1, 32], [pytest.approx(15.0), pytest.approx(46.0)])]  # (30, 46) at (16, 32)
    figure = plot.speedup(bench())
    assert figure.axes[0].get_ylabel() == "speedup over AR, mean of prompts"
    speedups = lines_of(figure)
    assert speedups["math"] == ([7, 15], [1.3, 1.2])
    assert [(name, x) for name, (x, _) in speedups.items() if "predicted" in name] == [
        ("predicted N* = 3", [3, 3]), ("predicted N* = 7", [7, 7]),
    ]
    dotted = [list(line.get_ydata()) for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert dotted == [[1.1, 1.1]] * 2 and "chat" not in speedups  # the chain, of maths and of the mean
    solid, promised, chain = plot.lengths(FILES["replay"][0]).axes[0].lines[:3]
    assert (solid.get_label(), list(solid.get_xdata()), list(solid.get_ydata())) == ("math", [1, 2, 3], [1.5, 1.8, 2.0])
    assert (promised.get_linestyle(), list(promised.get_xdata()), list(promised.get_ydata())) == (":", [1, 2, 3], [1.6, 1.9, 2.2])
    assert (chain.get_marker(), list(chain.get_xdata()), list(chain.get_ydata())) == ("s", [2], [1.7])


def test_a_sweep_is_drawn_by_width():
    """Whatever the order in which its widths were given."""
    pytest.importorskip("matplotlib")
    values = bench()
    assert lines_of(plot.speedup(values | {"rows": values["rows"][::-1]}))["math"] == ([7, 15], [1.3, 1.2])


def test_four_panels_of_scores():
    pytest.importorskip("matplotlib")
    ranks, reliable, masses, shapes = plot.scores(FILES["replay"][0]).axes
    assert [bar.get_height() for bar in ranks.containers[0]] == [0.5, 0.25, 0.25]
    assert (list(reliable.lines[0].get_xdata()), list(reliable.lines[0].get_ydata())) == ([0.05], [0.1])
    assert (list(masses.lines[1].get_xdata()), list(masses.lines[1].get_ydata())) == ([1, 2, 3], [0.5, 0.2, 0.1])
    assert [bar.get_height() for bar in shapes.containers[1]] == [1.7, 2.0]


@pytest.mark.parametrize("policies, drawn", [
    ({"threshold": 0.12}, {"threshold 0.12": 0.12}), ({"threshold": -0.01}, {}), (None, {}),
], ids=str)
def test_the_stopping_threshold_is_among_the_masses(policies, drawn):
    """Where the analysis has one that a mass can meet; those without costs have none."""
    pytest.importorskip("matplotlib")
    masses = plot.scores(FILES["replay"][0] | {"policies": policies}).axes[2]
    found = {line.get_label(): line.get_ydata()[0] for line in masses.lines if "threshold" in line.get_label()}
    assert found == drawn and all(line.get_linestyle() == "--" for line in masses.lines if line.get_label() in found)


def without(values: dict, arm: str) -> dict:
    """The bench's file of a run in which `arm` had no part, so that its ratios are missing."""
    rows = [row | {"prompt_speedup": None if arm == "ar" else row["prompt_speedup"]} for row in values["rows"]]
    return values | {"rows": [row for row in rows if arm not in row["arm"]]}


@pytest.mark.parametrize("arm", ["ar", "cast"])
def test_a_run_without_speedups_has_no_empty_picture(arm, tmp_path, capsys, recwarn):
    """Not compared with AR, or without a fixed width: one line says so, and what else the file holds is drawn."""
    pytest.importorskip("matplotlib")
    alone = write(tmp_path / "alone.json", without(bench(), arm))
    assert plot.main([alone, "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--methods ar,cast" in message and not list(tmp_path.glob("*.png"))
    probed = write(tmp_path / "probed.json", without(FILES["probed"][0], arm))
    assert plot.main([probed, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == [str(tmp_path / "probed-latency-99.png")]
    assert captured.err.count("\n") == 1 and "--methods ar,cast" in captured.err and not recwarn.list


def test_pictures_of_files_of_one_name_are_refused(tmp_path, capsys):
    """The second would take the place of the first."""
    (tmp_path / "b").mkdir()
    files = [write(tmp_path / place / "a.json", FILES["probe"][0]) for place in (".", "b")]
    assert plot.main([*files, "--out", str(tmp_path / "new")]) == 2
    assert "share a name" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_file_in_place_of_the_directory(tmp_path, capsys):
    file = write(tmp_path / "a.json", FILES["probe"][0])
    assert plot.main([file, "--out", f"{file}/pictures"]) == 2
    assert "is a file: name a directory" in capsys.readouterr().err


@pytest.mark.parametrize("values", [
    {"findings": []}, {"rows": [{}]}, {"costs": {"packed": [1], "settle_ms": ["x"]}},
    {"costs": {"packed": [1, 2], "settle_ms": [1, 10**400]}},
], ids=range(4))
def test_figures_of_another_kind_are_one_line(tmp_path, capsys, values):
    """The right names with the wrong content."""
    pytest.importorskip("matplotlib")
    assert plot.main([write(tmp_path / "a.json", values), "--out", str(tmp_path)]) == 2
    assert "a.json is not " in capsys.readouterr().err
