# SPDX-License-Identifier: Apache-2.0
"""The build of the engine patch, which puts a copy of `events` into the patch; all else is in pyproject.toml.

The router's distribution owns `kvrouter/events`. No file may belong to two distributions, and neither requires the
other, so the patch's wheel has the same modules as `kvrouter/engine_patch/events`, with every import of
`kvrouter.events` renamed. A development install copies nothing: there both use the one `kvrouter.events`.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import tokenize
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
# In a clone `events` lies beside this folder, in an unpacked sdist inside.
EVENTS = next(folder for folder in (HERE / "events", HERE.parent / "events") if (folder / "__init__.py").is_file())
SHARED = "kvrouter.events"
PATCH = "kvrouter.engine_patch"
COPY = f"{PATCH}.events"
MODULE_NAME = re.compile(re.escape(SHARED) + r"(\.\w+)*")


class NotRenamed(Exception):
    """A name of `kvrouter.events` in a form that the build does not rename."""


def renamed(name: str) -> str:
    """Return the module's name in the wheel."""
    return COPY + name[len(SHARED) :] if MODULE_NAME.fullmatch(name) else name


class Renaming(ast.NodeTransformer):
    """A module's syntax tree with the names of the wheel. Raises NotRenamed at every form that is not covered."""

    def __init__(self, name: str) -> None:
        self._name = name

    def refuse(self, node: ast.AST, why: str) -> NotRenamed:
        """Return the error that names the place and the reason."""
        return NotRenamed(f"{self._name}, line {getattr(node, 'lineno', '?')}: {why}")

    def imported(self, node: ast.AST, name: str) -> str:
        """Return the imported module's name in the wheel."""
        if name.partition(".")[0] == "kvrouter" and not f"{name}.".startswith((f"{SHARED}.", f"{PATCH}.")):
            raise self.refuse(node, f"imports {name}, which the wheel of the patch does not have")
        return renamed(name)

    def visit_Import(self, node: ast.Import) -> ast.Import:
        """Rename in `import MODULE as NAME`."""
        for alias in node.names:
            if renamed(alias.name) != alias.name and alias.asname is None:
                raise self.refuse(node, f"`import {alias.name}` binds `kvrouter`: import names from the module")
            alias.name = self.imported(node, alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        """Rename in `from MODULE import NAME`."""
        if node.level or node.module is None:
            raise self.refuse(node, "a relative import")
        node.module = self.imported(node, node.module)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Refuse `kvrouter.events`, which only exists where the router is installed."""
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("kvrouter", "events"):
            raise self.refuse(node, f"uses {SHARED} as an attribute: import names from the module")
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Leave docstrings unchanged: they are prose and name no module to the program."""
        is_docstring = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return node if is_docstring else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Rename a text that is a module's name, as for `importlib.import_module`."""
        if isinstance(node.value, str):
            if renamed(node.value) == node.value and (SHARED in node.value or node.value == "kvrouter."):
                raise self.refuse(
                    node, f"the text {node.value!r} may become a module's name: write the whole name alone"
                )
            node.value = renamed(node.value)
        return node


def rewritten(source: str, name: str) -> str:
    """Return a module's source with the names of the wheel; `name` is the module's in messages.

    The text is changed where the names stand. Then it must have the syntax tree in which the names were changed: a form
    that only one of the two knows fails the build.
    """
    tree = Renaming(name).visit(ast.parse(source))
    lines = list(io.StringIO(source))
    tokens = list(tokenize.generate_tokens(iter(lines).__next__))
    # From the end, so that the columns before a change stay right.
    for at in range(len(tokens) - 1, -1, -1):
        token = tokens[at]
        if token.type == tokenize.STRING and SHARED in token.string:
            text = renamed(token.string[1:-1])
            replaced = f"{token.string[0]}{text}{token.string[-1]}"
        elif [each.string for each in tokens[max(at - 2, 0) : at + 1]] == ["kvrouter", ".", "events"]:
            replaced = COPY.removeprefix("kvrouter.")
        else:
            continue
        (row, start), (last_row, end) = token.start, token.end
        if row == last_row:
            line = lines[row - 1]
            lines[row - 1] = line[:start] + replaced + line[end:]
    text = "".join(lines)
    if ast.dump(ast.parse(text)) != ast.dump(tree):
        raise NotRenamed(f"{name}: a name of {SHARED} has a form that the build does not rename")
    return text


class BuildWithEvents(build_py):
    """Builds the patch's packages and the copy of `events`, all with the names of the wheel."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of each module; this file is none."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if Path(module[2]).resolve() != HERE / "setup.py"]

    def run(self) -> None:
        """Add the packages of the copy, and leave out the files of earlier builds, which the wheel would have too."""
        if not self.editable_mode:
            folders = sorted(path.parent.relative_to(EVENTS) for path in EVENTS.rglob("__init__.py"))
            self.packages = [*self.packages, *(".".join((COPY, *folder.parts)) for folder in folders)]
            self.package_dir = {**self.package_dir, COPY: os.path.relpath(EVENTS, HERE)}
            shutil.rmtree(Path(self.build_lib, "kvrouter"), ignore_errors=True)
        super().run()

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        """Write a module with the names of the wheel."""
        outfile = Path(self.get_module_outfile(self.build_lib, package.split("."), module))
        outfile.parent.mkdir(parents=True, exist_ok=True)
        outfile.write_text(rewritten(Path(module_file).read_text(encoding="utf-8"), module_file), encoding="utf-8")
        return str(outfile), True


class SourcesWithEvents(sdist):
    """Packs the patch's files with `events` inside, so that the sdist builds without a clone."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Make the tree that becomes the archive, with `events`; a build before this one may have listed it outside."""
        super().make_release_tree(base_dir, [name for name in files if Path(name).resolve().is_relative_to(HERE)])
        # The compiled module's fallback runs in the patch.
        ignored = shutil.ignore_patterns("__pycache__", "*.pyx", "*.so", "*.c")
        shutil.copytree(EVENTS, Path(base_dir, "events"), ignore=ignored, dirs_exist_ok=True)


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithEvents, "sdist": SourcesWithEvents})
