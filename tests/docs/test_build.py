"""The documentation builds without a warning, and its generated pages are complete."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import lazytensor as lt

DOCS = Path(__file__).parents[2] / "docs"


def words(page: Path) -> str:
    """The text of a page, without its markup."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_the_site_builds_without_a_warning_and_its_generated_pages_are_complete(tmp_path: Path) -> None:
    """One test, since the site is built once."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-d", str(tmp_path / "cache")]
    site = tmp_path / "site"
    done = subprocess.run([*command, str(DOCS), str(site)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reference, keywords = (site / "reference.html").read_text(encoding="utf-8"), words(site / "keywords.html")
    for name in lt.__all__:
        module = isinstance(getattr(lt, name), ModuleType)
        if not name.startswith("__"):
            assert (f"lt.{name}" if module else f'id="lazytensor.{name}"') in reference, f"no reference of {name}"
            assert re.search(rf"\blt\.{name}\b", keywords), f"{name} is not in the keyword index"
    settings = words(site / "settings.html")
    for setting in lt.settings.all_settings():
        assert setting.env in settings
        assert setting.help in settings
    ops = words(site / "ops.html")
    for name in ("add.Tensor", "add_.Tensor", "split.Tensor", "_foreach_add.List", "native_batch_norm", "detach"):
        assert name in ops
    assert "concepts" in (site / "searchindex.js").read_text(encoding="utf-8")


def test_every_error_has_a_page() -> None:
    listed = (DOCS / "errors" / "index.md").read_text(encoding="utf-8")
    for name, kind in vars(lt.errors).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, lt.errors.LazyTensorError)
            and kind is not lt.errors.LazyTensorError
        ):
            page = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
            assert f"\n{page}\n" in listed, f"{name} has no page docs/errors/{page}.md"
            assert (DOCS / "errors" / f"{page}.md").read_text(encoding="utf-8").startswith(f"# {name}\n")
