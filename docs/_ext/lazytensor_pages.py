"""Pages made from the program itself: settings, operations, the reference, and the keyword index."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from docutils import nodes
from myst_parser.mdit_to_docutils.base import default_slugify
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata
from typer.main import get_command

import lazytensor as lt
from lazytensor.cli.app import app
from lazytensor.device.module import DeviceModule

HERE = Path(__file__).parent.parent
MODULES = ("errors", "metrics", "settings", "testing")
GROUPS = {"inspect": "Diagnostics", "backend": "Backends", "execute": "Cuts and the cache", "codegen": "Codegen"}


# --- what there is ---------------------------------------------------------------------------------------


def members(module: ModuleType) -> list[str]:
    """The public functions and classes that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def methods(kind: type) -> list[str]:
    """The public methods and properties that a class defines itself."""
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    ]


class Identifier(NamedTuple):
    """A public name: how it is written, where the reference has it, and the words by which pages speak of it."""

    name: str
    target: str | None  # a Python object in the reference, or None
    words: tuple[str, ...]


def identifiers() -> Iterator[Identifier]:
    """Every public identifier."""
    for name in sorted(lt.__all__):
        value = getattr(lt, name)
        if isinstance(value, str):
            continue
        yield Identifier(f"lt.{name}", f"lazytensor.{name}", (f"lt.{name}", f"lazytensor.{name}"))
        if inspect.isclass(value):
            for method in methods(value):
                yield Identifier(f"lt.{name}.{method}", f"lazytensor.{name}.{method}", (f"{name}.{method}",))
    for module in MODULES:
        for name in members(getattr(lt, module)):
            words = (f"lt.{module}.{name}", f"lazytensor.{module}.{name}", name)
            yield Identifier(f"lt.{module}.{name}", f"lazytensor.{module}.{name}", words)
    for name in methods(DeviceModule):
        yield Identifier(f"torch.ltc.{name}", f"lazytensor.device.module.DeviceModule.{name}", (f"torch.ltc.{name}",))
    for command in get_command(app).commands:  # type: ignore[attr-defined]
        yield Identifier(f"lazytensor {command}", None, (f"lazytensor {command}",))
    for setting in lt.settings.all_settings():
        yield Identifier(f"lt.settings.{setting.name}", None, (setting.name,))
        yield Identifier(setting.env, None, (setting.env, setting.name))


# --- which section explains it ---------------------------------------------------------------------------


class Section(NamedTuple):
    """A section of a page."""

    page: str
    title: str
    slug: str
    text: str


def sections() -> list[Section]:
    """Every section of every page written in Markdown."""
    found = []
    for path in sorted(HERE.rglob("*.md")):
        page = path.relative_to(HERE).with_suffix("").as_posix()
        if page.startswith("_") or page in ("keywords", "index"):
            continue
        text = path.read_text(encoding="utf-8")
        if page == "settings":
            text += settings_text()
        fence = False
        title, body = "", []
        for line in text.splitlines():
            fence ^= line.startswith("```")
            heading = None if fence else re.fullmatch(r"#{1,4} (.+)", line)
            if heading:
                found.append(Section(page, title, default_slugify(plain(title)), "\n".join(body)))
                title, body = heading[1], []
            else:
                body.append(line)
        found.append(Section(page, title, default_slugify(plain(title)), "\n".join(body)))
    return [s for s in found if s.title]


def plain(title: str) -> str:
    """A heading without its markup."""
    return title.replace("`", "")


def explaining(identifier: Identifier, known: list[Section]) -> Section | None:
    """The section that explains a name: one whose title is the name, else the one that speaks of it most."""
    best: tuple[int, Section] | None = None
    for section in known:
        score = 0
        for word in identifier.words:
            pattern = rf"(?<![\w.]){re.escape(word)}(?![\w])"
            score += len(re.findall(pattern, section.text)) + 100 * (plain(section.title) == word)
        if score and (best is None or score > best[0]):
            best = (score, section)
    return best[1] if best else None


# --- the pages -------------------------------------------------------------------------------------------


def settings_text() -> str:
    """A section for each setting."""
    parts = []
    for s in lt.settings.all_settings():
        default = repr(s.default)
        parts.append(f"\n## `{s.name}`\n\n{s.help}\n\nDefault `{default}`; environment variable `{s.env}`.\n")
    return "\n".join(parts)


class Settings(SphinxDirective):
    """Every setting."""

    def run(self) -> list[nodes.Node]:
        """A section each."""
        return self.parse_text_to_nodes(settings_text(), allow_section_headings=True)


class Keywords(SphinxDirective):
    """Every public identifier with the section that explains it."""

    def run(self) -> list[nodes.Node]:
        """One table."""
        self.env.note_reread()
        known = sections()
        every = sorted(identifiers(), key=lambda i: i.name.lower())
        found = {identifier.name: explaining(identifier, known) for identifier in every}
        device = next(s for s in known if s.page == "concepts" and s.title == "The device")
        rows = ["| identifier | explained in |", "|---|---|"]
        for name, target, _ in every:
            # A method is explained where its class is, a function of the device module where the device is.
            section = (
                found[name] or found.get(name.rpartition(".")[0]) or (device if name.startswith("torch.") else None)
            )
            where = f"[{plain(section.title)}]({section.page}.md#{section.slug})" if section else "the reference"
            entry = f"{{py:obj}}`{name} <{target}>`" if target else f"`{name}`"
            rows.append(f"| {entry} | {where} |")
        return self.parse_text_to_nodes("\n".join(rows))


class Reference(SphinxDirective):
    """Everything public, from the docstrings."""

    def run(self) -> list[nodes.Node]:
        """A section for each part of the package, then one for each public module."""
        groups: dict[str, list[str]] = {}
        for name in sorted(lt.__all__):
            value = getattr(lt, name)
            if isinstance(value, ModuleType | str):
                continue
            package = getattr(value, "__module__", "lazytensor.api").split(".")[1]
            groups.setdefault(GROUPS.get(package, "Cuts and the cache"), []).append(name)
        lines = []
        for title, names in sorted(groups.items()):
            lines += [title, "-" * len(title), ""]
            for name in names:
                value = getattr(lt, name)
                kind = "autoclass" if inspect.isclass(value) else "autofunction"
                lines += [f".. {kind}:: lazytensor.{name}", *(["   :members:"] if kind == "autoclass" else []), ""]
        lines += [
            "torch.ltc",
            "---------",
            "",
            ".. autoclass:: lazytensor.device.module.DeviceModule",
            "   :members:",
            "",
        ]
        for name in MODULES:
            title = f"lt.{name}"
            lines += [title, "-" * len(title), "", f".. automodule:: lazytensor.{name}", "   :no-members:", ""]
            for member in members(getattr(lt, name)):
                value = getattr(getattr(lt, name), member)
                kind = "autoclass" if inspect.isclass(value) else "autofunction"
                lines += [
                    f".. {kind}:: lazytensor.{name}.{member}",
                    *(["   :members:"] if kind == "autoclass" else []),
                    "",
                ]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class Operations(SphinxDirective):
    """Every ATen overload with a kernel of its own, and how it is recorded."""

    def run(self) -> list[nodes.Node]:
        """One long table, with a field to filter it."""
        rows = "".join(
            f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(kind)}</td><td>{html.escape(remark)}</td></tr>"
            for name, kind, remark in operations()
        )
        table = (
            '<input id="op-filter" type="search" placeholder="filter" aria-label="filter the table">'
            '<div style="overflow-x: auto"><table class="docutils" id="op-table" style="width: 100%"><thead>'
            "<tr><th>overload</th><th>kind</th><th>remark</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
            "<script>document.getElementById('op-filter').addEventListener('input', e => {"
            "const w = e.target.value.toLowerCase();"
            "for (const r of document.querySelectorAll('#op-table tbody tr'))"
            " r.hidden = !r.textContent.toLowerCase().includes(w); });</script>"
        )
        return [nodes.raw("", table, format="html")]


def operations() -> list[tuple[str, str, str]]:
    """Overload, kind and remark, in the order of their names."""
    from lazytensor.codegen.backend_yaml import parse_backend_yaml
    from lazytensor.codegen.generate import SOURCE, device_kernels

    parsed = parse_backend_yaml(SOURCE)
    kernels, _ = device_kernels(parsed)
    rows: list[tuple[str, str, str]] = []
    for kernel in kernels:
        remark = kernel.kind.reason or (f"written as {kernel.functional}" if kernel.functional else "")
        rows.append((kernel.name, kernel.kind.name, remark))
    rows += [(str(op), "by hand", "") for op in parsed.supported]
    rows += [(str(op), "left to PyTorch", reason) for op, reason in parsed.exclusions.items()]
    return sorted(rows)


def list_other_pages(sphinx: Sphinx, page: str, text: list[str]) -> None:
    """Put the pages that no table of contents names where the front page has room for them."""
    if page == "index":
        named = set(re.findall(r"^[\w/]+$", text[0], re.MULTILINE)) | {"index"}
        others = sorted(p for p in sphinx.env.found_docs if p not in named and "/" not in p)
        text[0] = text[0].replace("(pages that no other list has)", "\n".join(others))


def setup(sphinx: Sphinx) -> ExtensionMetadata:
    """Register the pages."""
    directives: dict[str, Any] = {
        "lazytensor-settings": Settings,
        "lazytensor-keywords": Keywords,
        "lazytensor-reference": Reference,
        "lazytensor-ops": Operations,
    }
    for name, directive in directives.items():
        sphinx.add_directive(name, directive)
    sphinx.connect("source-read", list_other_pages)
    return {"parallel_read_safe": True}
