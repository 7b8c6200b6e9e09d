"""The report: its data, the page made of it, and the page in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marked import here
from torch import nn
from typer.testing import CliRunner

import lazytensor as lt
from lazytensor.cli.mounts import MOUNTS, load
from lazytensor.inspect import report


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()  # <loss>


def train(sizes: tuple[int, ...] = (8, 8, 8, 7)) -> None:
    model = Model().to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, size in enumerate(sizes):
        batch = torch.randn(size, 8).to("ltc")
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        if number == 1:
            loss.item()
        optimizer.step()
        if number == 2:
            torch.nonzero(batch > 0)
        lt.sync()


def test_the_data_has_everything_and_is_plain() -> None:
    train()
    data = json.loads(json.dumps(report.data()))
    assert {s["kind"] for s in data["spans"]} >= {"record", "compile", "execute", "fallback"}
    assert [len(s["graphs"]) for s in data["history"]["steps"]] == [
        1,
        2,
        1,
        1,
    ]  # nothing is left to cut after a fallback
    assert data["fallbacks"][0]["op"] == "aten::nonzero"
    assert any(r["differences"] and r["differences"][0]["new"] == "7" for r in data["recompiles"])
    assert data["metrics"]["counters"]["UncachedCompile"] == len(data["graphs"])
    covered = {row["op"]: row for row in data["coverage"]}
    assert covered["aten::nonzero"]["fallbacks"] == 1
    assert covered["aten::gelu"]["ran"] == 3 * 4
    first = data["graphs"][0]
    assert len(first["memory"]) == first["ops"]
    assert first["peak"] >= max(first["memory"])
    assert "torch.ops.aten.gelu" in first["text"]


def test_the_columns_of_a_graph_agree_with_its_nodes() -> None:
    train((8,))
    graph = report.data()["graphs"][0]
    nodes, tables = graph["nodes"], graph["nodes"]["tables"]
    count = graph["inputs"] + graph["ops"]
    for column in ("op", "line", "module", "shape", "phase", "inputs", "name", "args", "bytes", "flops"):
        assert len(nodes[column]) == count
    for number, inputs in enumerate(nodes["inputs"]):
        assert all(each < number for each in inputs)
    mean = [tables["op"][i] for i in nodes["op"]].index("mean")
    line = tables["line"][nodes["line"][mean]]
    assert (line["file"], line["line"]) == (__file__, here("loss"))
    assert line["around"][2].endswith("# <loss>")
    assert tables["module"][nodes["module"][mean]] == "Model"
    modules = set(tables["module"])
    assert "Model.blocks.2.mlp.0" in modules


def test_the_page_needs_no_network_and_cannot_be_broken_by_the_program(tmp_path: Path) -> None:
    space: dict[str, Any] = {"torch": torch, "lt": lt}
    code = "x = torch.ones(2).to('ltc').exp()\nlt.sync()\n"
    exec(compile(code, "</script><script>alert(1)</script>.py", "exec"), space)
    page = lt.report(tmp_path / "run.html").read_text()
    assert "</script><script>alert(1)" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert "/*DATA*/" not in page


def test_the_command_makes_a_page_of_the_data(tmp_path: Path) -> None:
    train((8,))
    data = lt.report(tmp_path / "run.json")
    app = load(next(m for m in MOUNTS if m.name == "report"))
    done = CliRunner().invoke(app, [str(data)])
    assert done.exit_code == 0, done.output
    assert Path(done.output.strip().replace("\n", "")) == tmp_path / "run.html"
    assert (tmp_path / "run.html").read_text() == report.page(json.loads(data.read_text()))
    (tmp_path / "other.json").write_text("[]")
    refused = CliRunner().invoke(app, [str(tmp_path / "other.json")])
    assert refused.exit_code == 1
    assert "is not the data of a run" in refused.output


# --- in a browser ---------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver)")
    selenium = pytest.importorskip("selenium", reason="selenium, which drives the browser, is not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert selenium
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,900"):
        options.add_argument("--" + argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """A report in the browser."""

    def __init__(self, driver: Any, file: Path) -> None:
        self.driver = driver
        driver.get(file.as_uri())

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def frame(self) -> None:
        """Wait until what was asked to be drawn is drawn."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def errors(self) -> list[str]:
        return [e["message"] for e in self.driver.get_log("browser")]


PAINTED = """(() => {
  const c = document.getElementById("%s"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  let n = 0; for (let i = 3; i < d.length; i += 4) if (d[i]) n++;
  return n;
})()"""


def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    train()
    page = Page(browser, lt.report(tmp_path / "run.html"))
    assert "4" in page.find(".card b").text
    for tab in ("timeline", "memory", "graphs"):
        page.find(f"#tab-{tab}").click()
        page.frame()
        page.frame()
        assert page.run(PAINTED % f"{'graph' if tab == 'graphs' else tab}-canvas") > 1000, tab

    page.find("#search").send_keys("square\n")
    assert page.run("view.matches.length") > 0
    found = page.run("view.graph.nodes.tables.op[view.graph.nodes.op[view.items[view.chosen].node]]")
    assert found in ("pow.Tensor_Scalar", "pow", "square") or "square" in page.find("#detail").text
    assert f"test_report.py:{here('loss')}" in page.find("#detail-line").text
    assert "1 of" in page.find("#matches").text

    before = page.run("view.scale")
    page.find("#zoom-in").click()
    assert page.run("view.scale") > before * 1.2
    page.find("#zoom-out").click()
    assert page.run("view.scale") == pytest.approx(before)

    page.find("#expand").click()
    opened = page.run("view.items.length")
    assert opened == page.run("view.graph.nodes.op.length")
    page.find('[data-module="Model"]').click()
    folded = page.run("view.items.length")
    assert folded < opened / 2
    assert page.run("view.items.some(i => i.group && i.name === 'Model')")

    page.find("#show-text").click()
    assert "torch.ops.aten" in page.find("#text-body").text

    page.find("#tab-recompiles").click()
    diff = next(d for d in page.all("#recompiles details") if "8" in d.text and "7" in d.text)
    diff.find_element("css selector", "summary").click()
    assert "pad or drop the last batch" in diff.text
    assert diff.find_element("css selector", ".old").text == "8"
    assert diff.find_element("css selector", ".new").text == "7"

    for tab, words in {"syncs": "loss.item()", "fallbacks": "aten::nonzero", "operations": "aten::gelu"}.items():
        page.find(f"#tab-{tab}").click()
        assert words in page.find(f"#{tab}").text

    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.find("#theme").click()
    assert page.run("getComputedStyle(document.body).backgroundColor") != light
    assert page.errors() == []


def test_a_graph_of_ten_thousand_nodes(browser: Any, tmp_path: Path) -> None:
    x = torch.ones(4).to("ltc")
    for _ in range(5000):
        x = torch.sin(x) + 1
    lt.sync()
    page = Page(browser, lt.report(tmp_path / "large.html"))
    page.find("#tab-graphs").click()
    page.find("#expand").click()
    page.frame()
    assert page.run("view.items.length") == 10_001
    page.find("#search").send_keys("v9998")
    assert page.run("view.matches.length") == 1
    page.find("#next").click()
    page.frame()
    assert page.run("view.chosen !== null")
    assert page.run(PAINTED % "graph-canvas") > 1000
    assert page.errors() == []


def test_a_report_of_nothing(browser: Any, tmp_path: Path) -> None:
    page = Page(browser, lt.report(tmp_path / "empty.html"))
    for tab in page.all("nav button"):
        tab.click()
        page.frame()
    assert "No operation fell back" in page.run("document.getElementById('fallbacks').textContent")
    assert page.errors() == []
