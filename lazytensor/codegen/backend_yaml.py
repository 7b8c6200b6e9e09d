"""A backend's YAML: the list of operators a backend takes, checked against the installed torch.

The file a backend has for the C++ system loads unchanged. Python adds:

* `full_codegen: all`, and shell-style patterns wherever an operator can be named. A pattern takes only operators that
  reach a backend, so not those torch decomposes above autograd. When several entries name one operator the narrowest
  decides: a name before a pattern, a pattern before `all`. (`- all` inside a list is the operator `aten::all`.)
* `exclude`, a mapping from operator or pattern to the reason why the backend does not take it. It beats an equally
  narrow entry.
* Options: an entry may be `{op: add.Tensor, properties: [...], shape: my_shape_fn, structure: [alpha]}`; `structure`
  names the numbers that are part of a node, and `deterministic: true` is said of an operator that torch calls random
  but that draws nothing.

An operator of a user's library is named with its namespace, `mylib::op`; the library has to be loaded already.

Everything wrong with a file is found before anything is raised: `CodegenErrors` lists file, line, problem and nearest
name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchgen.model import (  # type: ignore[import-untyped,unused-ignore]
    BackendIndex,
    BackendMetadata,
    BaseTy,
    DispatchKey,
    FunctionSchema,
    NativeFunction,
    NativeFunctionsGroup,
    OperatorName,
)
from yaml.nodes import MappingNode, Node  # type: ignore[import-untyped,unused-ignore]

from .natives import Natives, load_native_functions, nearest
from .schema import (
    NATIVE_PROPERTIES,
    NON_NATIVE_PROPERTIES,
    LazyIrProperties,
    LazyIrSchema,
    SchemaError,
    base_type,
)
from .yaml_document import CodegenErrors, Document, Problem, is_empty, line_of, shown, string_of

KEYS = (
    *("backend", "namespace", "cpp_namespace", "class_name", "supported", "full_codegen", "ir_gen", "non_native"),
    *("autograd", "symint", "exclude", "use_out_as_primary", "device_guard", "extra_headers"),
)
KERNEL_SECTIONS = ("full_codegen", "supported", "autograd")
_BAD_SCHEMA = (AssertionError, RuntimeError, ValueError, LookupError)  # what torchgen's parser trips over
NAME, PATTERN, ALL = range(3)  # how much an entry takes; a smaller number is narrower and wins


@dataclass(frozen=True)
class OpOptions:
    """What a backend asked for one operator. `shape` is the name of the function that computes its shapes."""

    properties: LazyIrProperties = NATIVE_PROPERTIES
    shape: str | None = None
    structure: frozenset[str] = frozenset()
    deterministic: bool = False


@dataclass(frozen=True)
class ParsedExternalYaml:
    """What a backend's YAML says, patterns expanded and names resolved."""

    file: str
    backend_key: DispatchKey
    autograd_key: DispatchKey | None  # set when the backend has autograd kernels of its own
    class_name: str
    namespace: str
    full_codegen: tuple[OperatorName, ...]  # node class, kernel and registration are generated
    ir_gen: tuple[OperatorName, ...]  # the node class alone is generated
    supported: tuple[OperatorName, ...]  # the kernel is written by hand and registered
    autograd: tuple[OperatorName, ...]  # likewise, for the autograd key
    symint: frozenset[OperatorName]
    non_native: tuple[LazyIrSchema, ...]
    exclusions: Mapping[OperatorName, str]  # operator -> why the backend leaves it out
    options: Mapping[OperatorName, OpOptions]  # only operators whose entry has options
    schemas: Mapping[OperatorName, LazyIrSchema]  # of full_codegen and ir_gen
    lines: Mapping[OperatorName, int]  # where the entry of each operator stands
    backend_indices: Mapping[DispatchKey, BackendIndex]  # torch's own, this backend's and its autograd's
    warnings: tuple[Problem, ...]


@dataclass(frozen=True)
class _Entry:
    section: str
    text: str
    line: int
    width: int
    options: OpOptions | None = None
    reason: str = ""


def parse_backend_yaml(
    path: str | os.PathLike[str], backend_indices: Mapping[DispatchKey, BackendIndex] | None = None
) -> ParsedExternalYaml:
    """Read and check one YAML file; raise `CodegenErrors` with everything that is wrong with it.

    `backend_indices` are the backends already known, whose dispatch keys are taken: torch's own, unless given.
    """
    natives = load_native_functions()
    return _Reader(os.fspath(path), natives, backend_indices or natives.backend_indices).read()


@dataclass
class _Reader(Document):
    """What the file means: which operator goes where."""

    natives: Natives
    known: Mapping[DispatchKey, BackendIndex]

    def read(self) -> ParsedExternalYaml:
        keys = self.fields(self.load(), KEYS)
        backend = self.text(keys, "backend", "name a dispatch key, such as Lazy, XLA or PrivateUse1")
        if "namespace" in keys and "cpp_namespace" in keys:
            self.error(line_of(keys["cpp_namespace"]), '"cpp_namespace" is another name for "namespace"; keep one')
        spelling = "cpp_namespace" if "cpp_namespace" in keys else "namespace"
        namespace = self.text(keys, spelling, "say where the generated code belongs")
        class_name = self.text(keys, "class_name") or f"{backend}NativeFunctions"
        if "class_name" in keys and not class_name.isidentifier():
            self.error(line_of(keys["class_name"]), f'"class_name" must be a Python identifier, not {class_name}')
        use_out, guard = self.flag(keys, "use_out_as_primary"), self.flag(keys, "device_guard")
        claims = {s: self.claim(self.entries(keys, s)) for s in (*KERNEL_SECTIONS, "ir_gen", "symint")}
        claims["exclude"] = self.claim(self.exclusions(keys))
        non_native = self.non_native(keys)

        kernels = self.settle(claims)
        sections = {s: tuple(op for op, e in kernels.items() if e.section == s) for s in KERNEL_SECTIONS}
        full_codegen = {op: kernels[op] for op in sections["full_codegen"]}
        # What full_codegen takes has a node class already.
        nodes_only = {op: e for op, e in claims["ir_gen"].items() if op not in full_codegen}
        ir_gen = {op: e for op, e in nodes_only.items() if not self.excluded(op, e, claims)}
        lines = {op: entry.line for op, entry in (ir_gen | kernels).items()}
        symint = self.symint(claims["symint"], lines)
        schemas = self.schemas(full_codegen | ir_gen, symint)
        if not (self.errors or lines or non_native):
            self.error(1, f"nothing to generate: no operator under {', '.join(KERNEL_SECTIONS)}, ir_gen or non_native")

        backend_key = autograd_key = None
        if backend:
            backend_key = self.dispatch_key(backend, line_of(keys["backend"]), '"backend"')
        if sections["autograd"]:
            self.check_groups(kernels)
            if backend_key:
                line = line_of(keys["autograd"])
                autograd_key = self.dispatch_key(f"Autograd{backend}", line, 'the key for "autograd"')
        if self.errors or backend_key is None:
            raise CodegenErrors(self.errors)

        def index(key: DispatchKey, ops: Iterable[OperatorName]) -> BackendIndex:
            # C++ tells overloads apart by their arguments; Python needs a kernel name for each.
            names = {op: op.unambiguous_name() + ("_symint" if op in symint else "") for op in ops}
            metadata = {op: BackendMetadata(name, False, namespace) for op, name in names.items()}
            return BackendIndex(key, use_out_as_primary=use_out, device_guard=guard, external=True, index=metadata)

        indices = {**self.known, backend_key: index(backend_key, (*sections["full_codegen"], *sections["supported"]))}
        if autograd_key is not None:
            indices[autograd_key] = index(autograd_key, sections["autograd"])
        return ParsedExternalYaml(
            file=self.file,
            backend_key=backend_key,
            autograd_key=autograd_key,
            class_name=class_name,
            namespace=namespace,
            ir_gen=tuple(ir_gen),
            symint=symint,
            non_native=non_native,
            exclusions={op: entry.reason for op, entry in claims["exclude"].items() if op not in lines},
            options={op: e.options for op, e in (full_codegen | ir_gen).items() if e.options is not None},
            schemas=schemas,
            lines=lines,
            backend_indices=indices,
            warnings=tuple(self.warnings),
            **sections,
        )

    def entries(self, keys: Mapping[str, Node], section: str) -> list[_Entry]:
        if string_of(keys.get(section)) == "all":
            return [_Entry(section, "all", line_of(keys[section]), ALL)]
        found = []
        for item in self.items(keys, section, "operators"):
            name, options = string_of(item), None
            if isinstance(item, MappingNode):
                name, options = self.with_options(section, item)
            if name:
                found.append(_Entry(section, name, line_of(item), _width(name), options))
            else:
                self.error(line_of(item), f'"{section}" must name an operator here, not {shown(item)}')
        return found

    def with_options(self, section: str, item: Node) -> tuple[str, OpOptions]:
        keys = self.fields(item, ("op", "properties", "shape", "structure", "deterministic"))
        if section not in ("full_codegen", "ir_gen"):
            self.error(
                line_of(item), f'an operator under "{section}" has no options, since nothing is generated for it'
            )
        shape = self.text(keys, "shape")
        if not all(part.isidentifier() for part in shape.split(".") if shape):
            self.error(line_of(keys["shape"]), f'"shape" must name a Python function, not {shape}')
        structure = frozenset(self.names(keys, "structure"))
        properties, drawless = self.properties(keys, NATIVE_PROPERTIES), self.flag(keys, "deterministic")
        return self.text(keys, "op"), OpOptions(properties, shape or None, structure, drawless)

    def exclusions(self, keys: Mapping[str, Node]) -> list[_Entry]:
        node = keys.get("exclude")
        if not isinstance(node, MappingNode):
            if not is_empty(node):
                self.error(line_of(node), f'"exclude" must be a mapping from operator to reason, not {shown(node)}')
            return []
        found = []
        for name, (line, value) in self.pairs(node).items():
            reason = (string_of(value) or "").strip()
            if not reason:
                self.error(line, f"{name} is excluded without a reason")
            found.append(_Entry("exclude", name, line, _width(name), reason=reason))
        return found

    def non_native(self, keys: Mapping[str, Node]) -> tuple[LazyIrSchema, ...]:
        found: dict[str, LazyIrSchema] = {}
        for item in self.items(keys, "non_native", "mappings with func, opkind and properties"):
            if not isinstance(item, MappingNode):
                self.error(line_of(item), f'"non_native" must have a mapping here, not {shown(item)}')
                continue
            parts = self.fields(item, ("func", "opkind", "properties"))
            func = self.text(parts, "func", "write the schema of the node", item)
            properties, opkind = self.properties(parts, NON_NATIVE_PROPERTIES), self.text(parts, "opkind")
            if not func:
                continue
            try:
                schema = LazyIrSchema(FunctionSchema.parse(func), properties, symint=True, opkind=opkind)
            except SchemaError as error:
                self.error(line_of(parts["func"]), f"{func} cannot be a node: {error}")
                continue
            except _BAD_SCHEMA as error:
                text = f"{func} is not a schema such as 'name(Tensor self, int dim) -> Tensor' ({error})"
                self.error(line_of(parts["func"]), text)
                continue
            if found.setdefault(str(schema.name), schema) is not schema:
                self.error(line_of(parts["func"]), f"a non-native node called {schema.name} was there already")
        return tuple(found.values())

    def operators(self, entry: _Entry) -> list[NativeFunction]:
        if entry.width == NAME:
            try:
                function = self.natives.find(entry.text)
            except SchemaError as error:
                self.error(entry.line, f"{entry.text} cannot be generated: {error}")
                return []
            if function is None:
                foreign = "::" in entry.text.removeprefix("aten::")
                where = "; is its library loaded?" if foreign else ""
                self.error(entry.line, f"there is no operator {entry.text}{where}", self.natives.nearest(entry.text))
            return [function] if function else []
        found = self.natives.matching("*" if entry.width == ALL else entry.text)
        if entry.section not in ("autograd", "exclude"):
            found = [f for f in found if not f.has_composite_implicit_autograd_kernel]
        if entry.section == "symint":
            found = [f for f in found if f.func.has_symint()]
        if not found:
            text = f'the pattern {entry.text} matches no operator that "{entry.section}" could take'
            self.error(entry.line, text, self.natives.nearest(entry.text.strip("*?")))
        return found

    def claim(self, entries: Iterable[_Entry]) -> dict[OperatorName, _Entry]:
        """The narrowest entry of one section for each operator that the section names."""
        best: dict[OperatorName, _Entry] = {}
        for entry in entries:
            for function in self.operators(entry):
                held = best.setdefault(function.func.name, entry)
                if entry.width < held.width:
                    best[function.func.name] = entry
                elif held is not entry and entry.width == NAME:
                    text = f'{entry.text} is under "{entry.section}" twice; the entry on line {held.line} counts'
                    self.warnings.append(Problem(self.file, entry.line, text))
        return best

    def excluded(self, op: OperatorName, entry: _Entry, claims: Mapping[str, Mapping[OperatorName, _Entry]]) -> bool:
        exclusion = claims["exclude"].get(op)
        if exclusion is None or exclusion.width > entry.width:
            return False
        if entry.width == NAME:
            self.error(exclusion.line, f'{op} is excluded, but "{entry.section}" lists it on line {entry.line}')
        return True

    def settle(self, claims: Mapping[str, Mapping[OperatorName, _Entry]]) -> dict[OperatorName, _Entry]:
        """The one entry that says how each operator gets its kernel."""
        kernels: dict[OperatorName, _Entry] = {}
        for section in KERNEL_SECTIONS:
            for op, entry in claims[section].items():
                if self.excluded(op, entry, claims):
                    continue
                held = kernels.setdefault(op, entry)
                if entry.width < held.width:
                    kernels[op] = entry
                elif held is not entry and entry.width == held.width:
                    other = f'{held.text} under "{held.section}" on line {held.line}'
                    self.error(entry.line, f'{entry.text} under "{section}" takes an operator that {other} takes too')
        return kernels

    def symint(
        self, claimed: Mapping[OperatorName, _Entry], taken: Mapping[OperatorName, int]
    ) -> frozenset[OperatorName]:
        for op, entry in claimed.items():
            if op not in taken and entry.width == NAME:
                text = f'{op} is under "symint" but under no other section, so nothing comes of it'
                self.warnings.append(Problem(self.file, entry.line, text))
        return frozenset(claimed.keys() & taken.keys())

    def schemas(
        self, generated: Mapping[OperatorName, _Entry], symint: frozenset[OperatorName]
    ) -> dict[OperatorName, LazyIrSchema]:
        found: dict[OperatorName, LazyIrSchema] = {}
        arguments: dict[_Entry, set[str]] = {}
        for op, entry in generated.items():
            func, options = self.natives.function(op).func, entry.options or OpOptions()
            types = {a.name: a.type for a in func.arguments.flat_all}
            arguments.setdefault(entry, set()).update(types)
            way_out = "write its kernel by hand" if entry.width == NAME else "exclude it, with a reason"
            try:
                # A pattern's options hold for those of its operators that have such an argument.
                structure = options.structure & types.keys()
                found[op] = LazyIrSchema(func, options.properties, op in symint, structure=structure)
            except SchemaError as error:
                self.error(entry.line, f"{op} cannot be generated: {error}; {way_out}")
            bases = {base_type(typ) for typ in types.values()}
            if entry.section == "full_codegen" and not bases & {BaseTy.Tensor, BaseTy.Device}:
                text = "no argument is a tensor or a device, so its device is unknown"
                self.error(entry.line, f"{op} cannot be generated: {text}; {way_out}")
        for entry, names in arguments.items():
            for name in sorted(entry.options.structure - names if entry.options else ()):
                self.error(entry.line, f'"structure": {entry.text} has no argument {name}', nearest(name, names))
        return found

    def dispatch_key(self, name: str, line: int, role: str) -> DispatchKey | None:
        if name not in DispatchKey.__members__:
            text = f"{role} must be a dispatch key, and {name} is not one"
            self.error(line, text, nearest(name, DispatchKey.__members__))
            return None
        key = DispatchKey.parse(name)
        if key in self.known:
            self.error(line, f"{role} is {name}, which torch or another backend has already")
        return key

    def check_groups(self, kernels: Mapping[OperatorName, _Entry]) -> None:
        """torch chooses between a backend's kernel and its autograd kernel for all forms of an operator at once."""
        for group in self.natives.groups:
            if isinstance(group, NativeFunctionsGroup):
                forms = [f.func.name for f in group.functions() if f.func.name in kernels]
                above = [op for op in forms if kernels[op].section == "autograd"]
                below = [op for op in forms if kernels[op].section != "autograd"]
                if above and below:
                    where = f'{below[0]} under "{kernels[below[0]].section}" (line {kernels[below[0]].line})'
                    text = f'{above[0]} under "autograd" and {where} are forms of one operator; list both under one'
                    self.error(kernels[above[0]].line, text)


def _width(name: str) -> int:
    return PATTERN if any(mark in name for mark in "*?[") else NAME
