# SPDX-License-Identifier: Apache-2.0
"""The modules that are compiled where there is a C compiler; all else is in pyproject.toml.

They are those that have a `.pxd` beside them, which gives their C types; each is plain Python that runs uncompiled too.
A `.pyx` has a plain module of its name beside it, which runs in its place. Cython's own functions, such as those of
memoryviews, are compiled once, into the module SHARED: that halves the time of a build.

| variable | |
|---|---|
| `KVROUTER_COMPILE=0` | compiles nothing, and needs neither Cython nor a C compiler |
| `CYTHON_CACHE_DIR` | Cython keeps the C files there, and uses those whose sources and settings are the same |
| `KVROUTER_CHECK_BOUNDS=1` | compiles with every access checked |
| `KVROUTER_SANITIZE=1` | compiles with the compiler's sanitizers (`tests/fuzz/sanitize.py`) |
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CHECKED, SANITIZED = (os.environ.get(name) == "1" for name in ("KVROUTER_CHECK_BOUNDS", "KVROUTER_SANITIZE"))
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
SHARED = "kvrouter.router.base.common.cython_shared"
DIRECTIVES = {
    "language_level": 3,
    # The hints are numpy's; C types are in the .pxd files.
    "annotation_typing": False,
    "boundscheck": CHECKED,
    "wraparound": False,
    "initializedcheck": False,
    # Functions are Python's built-in kind, which is called faster than Cython's. This pays for the calls into SHARED.
    "binding": False,
}


def extensions() -> list[Extension]:
    """Return the modules that are compiled."""
    typed = [path.with_suffix(".py") for path in Path("router").rglob("*.pxd") if not path.with_suffix(".pyx").exists()]
    sources = sorted([*typed, *Path("router").rglob("*.pyx"), *Path("events").rglob("*.pyx")])
    names = [".".join(("kvrouter", *path.with_suffix("").parts)) for path in sources]
    # Cython writes the source of the shared module.
    written = Path(*SHARED.split(".")).with_suffix(".c")
    return [
        Extension(
            name,
            [str(path)],
            include_dirs=[str(path.parent)],
            depends=sorted(map(str, path.parent.glob("*.h"))),
            extra_compile_args=["-O1", "-g", *SANITIZERS] if SANITIZED else ["-O3", "-g0"],
            extra_link_args=SANITIZERS if SANITIZED else [],
            # Without a compiler, the Python source of the modules runs instead.
            optional=True,
        )
        for name, path in [*zip(names, sources, strict=True), (SHARED, written)]
    ]


class BuildChanged(build_ext):
    """The build step that compiles. It keeps its results, because each development install builds in a new folder."""

    # The folder with the kept results. Its name depends on the version of Cython, the settings and this file's content.
    folder: Path

    def build_extensions(self) -> None:
        """Translate the modules that changed to C, and compile."""
        # Imported here, because other steps of a build need no Cython.
        from Cython import __version__ as cython
        from Cython.Build import cythonize

        key = repr((cython, CHECKED, SANITIZED, Path(__file__).read_bytes()))
        self.folder = Path("build", "cython", hashlib.sha256(key.encode()).hexdigest()[:12])
        # Cython looks for the .pxd file of an imported module under the module's full name.
        names = self.folder / "kvrouter"
        names.mkdir(parents=True, exist_ok=True)
        if not (names / "router").is_symlink():
            (names / "router").symlink_to(Path("router").resolve())
        translated = cythonize(
            self.extensions,
            include_path=[str(self.folder)],
            build_dir=str(self.folder / "c"),
            compiler_directives=DIRECTIVES,
            shared_utility_qualified_name=SHARED,
            cache="CYTHON_CACHE_DIR" in os.environ,
        )
        sources = {extension.name: extension.sources for extension in translated}
        for extension in self.extensions:
            extension.sources = sources[extension.name]
        super().build_extensions()
        if not Path(self.get_ext_fullpath(SHARED)).exists():
            # The other modules import it.
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)

    def build_extension(self, extension: Extension) -> None:
        """Compile a module if its C source or a header is newer than the kept result."""
        built = Path(self.get_ext_fullpath(extension.name))
        kept = self.folder / "lib" / self.get_ext_filename(extension.name)
        if kept.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(kept, built)
        try:
            super().build_extension(extension)
        except Exception:
            built.unlink(missing_ok=True)
            raise
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, kept)

    def get_output_mapping(self) -> dict[str, str]:
        """Return the files that a development install links, without the modules that could not be compiled."""
        return {built: linked for built, linked in super().get_output_mapping().items() if Path(built).exists()}


if os.environ.get("KVROUTER_COMPILE") == "0":
    setup()
else:
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildChanged},
        options={"build_ext": {"parallel": os.cpu_count()}},
    )
