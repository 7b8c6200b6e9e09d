"""Graphs as text, dot, Python, the backend's text and a picture, each with the lines of the program."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from marked import here

import lazytensor as lt
from lazytensor.inspect import draw, dump, events


def made() -> torch.Tensor:
    x = torch.arange(6.0).reshape(2, 3).to("ltc")
    y = x.exp() * 2.5  # <exp>
    return y.sum(1, keepdim=True)  # <sum>


def test_text() -> None:
    z = made()
    text = lt.dump(z, "text")
    assert text.startswith("IR {\n")
    assert f"float32[2, 3] aten::exp(%x0)  # tests/inspect/test_dump.py:{here('exp')}" in text.replace(
        str(Path.cwd()) + "/", ""
    )
    assert re.search(r"aten::sum.dim_IntList\(%v\d+, dim=\[1\], keepdim=True, dtype=None\), ROOT=0", text)
    assert "%n0 = float lazytensor::number()" in text
    assert events.cuts == []


def test_dot() -> None:
    text = lt.dump([made()], "dot")
    assert text.startswith("digraph G {")
    assert text.count("aten::") == 3
    assert re.search(r"i0 -> n0 \[label=\"i=0\"\];", text)
    assert f"test_dump.py:{here('sum')}" in text


def test_python_is_a_program_that_runs(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(lt.dump(made(), "python"))
    assert f"test_dump.py:{here('exp')}" in file.read_text()
    runpy.run_path(str(file), run_name="__main__")


def test_backend_text_is_that_of_the_backend() -> None:
    assert "torch.ops.aten.exp.default" in lt.dump(made(), "backend")
    before = lt.current_backend()
    lt.set_backend("ts")
    try:
        text = lt.dump(made(), "backend")
        assert text.startswith("graph(")
        assert "Tensor = aten::exp" in text
    finally:
        lt.set_backend(before)


def test_svg_is_well_formed_and_has_every_node() -> None:
    root = xml.etree.ElementTree.fromstring(lt.dump(made(), "svg"))
    name = "{http://www.w3.org/2000/svg}"
    titles = [t.text or "" for t in root.iter(f"{name}title")]
    assert len(titles) == 4  # the input and three operations
    assert sum(f"test_dump.py:{here('exp')}" in t for t in titles) == 2
    assert len(list(root.iter(f"{name}path"))) == 3


def test_a_node_stands_below_what_it_uses() -> None:
    feeds = {"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": []}
    assert draw.layers(["a", "b", "c", "d"], lambda n: feeds[n]) == [["a"], ["b", "c"], ["d"]]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="Unrecognized IR format: hlo; known are text, dot"):
        lt.dump(made(), "hlo")


def test_a_tensor_that_has_its_value_is_one_input() -> None:
    x = torch.ones(2).to("ltc")
    assert lt.dump(x, "text") == "IR {\n  %x0 = float32[2] lazytensor::data(), ROOT=0\n}\n"


def saved(file: Path, format: str) -> list[str]:
    """The graphs in the file after two equal cuts and a third, one entry each."""
    with lt.settings.scope(save_tensors_file=str(file), save_tensors_format=format):
        dump.save_graphs()
        x = torch.ones(3).to("ltc")
        for _ in range(2):
            y = x.exp()
            lt.sync()  # <cut>
        y = x.sin()
        lt.sync()
        del y
    dump.save_graphs()
    (x + 1).cpu()  # no longer saved
    return file.read_text().split("[ScheduleSyncTensorsGraph]\n")[1:]


def test_every_cut_is_saved_hits_too(tmp_path: Path) -> None:
    parts = saved(tmp_path / "graphs.txt", "text")
    assert len(parts) == 3
    hashes = [re.search(r"Hashes: \((\w+)\)", part)[1] for part in parts]  # type: ignore[index]
    assert hashes[0] == hashes[1] != hashes[2]
    for part, name in zip(parts, ("exp", "exp", "sin"), strict=True):
        assert re.search(rf"## BEGIN_GRAPH\nIR {{\n(.*\n)*.*aten::{name}.*\n}}\n## END_GRAPH", part)
    assert f'File "{__file__}", line {here("cut")}, in saved' in parts[0]
    assert "site-packages/torch" not in parts[0]


def test_saving_as_dot_and_in_a_format_that_does_not_exist(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "digraph G" in saved(tmp_path / "graphs.dot", "dot")[0]
    assert "IR {" in saved(tmp_path / "graphs.txt", "hash")[0]
    assert "Invalid save graph format: hash" in caplog.text


def test_saving_is_set_by_the_environment_of_torch_lazy() -> None:
    named = {s.env: s.name for s in lt.settings.all_settings()}
    assert named["LTC_SAVE_TENSORS_FILE"] == "save_tensors_file"
    assert named["LTC_SAVE_TENSORS_FMT"] == "save_tensors_format"
