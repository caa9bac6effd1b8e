# SPDX-License-Identifier: Apache-2.0
"""The modules that are compiled where there is a C compiler; all else is in pyproject.toml.

They are those that have a `.pxd` beside them, which gives their C types; each is plain Python that runs uncompiled too.
A `.pyx` has a plain module of its name beside it, which runs in its place.
`KVROUTER_CHECK_BOUNDS=1` builds them with every access checked, `KVROUTER_SANITIZE=1` with the compiler's sanitizers
(`tests/fuzz/sanitize.py`).
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

BUILD = Path("build", "cython")

# Cython finds what one module takes from another by its full name.
names = BUILD / "kvrouter"
names.mkdir(parents=True, exist_ok=True)
if not (names / "router").is_symlink():
    (names / "router").symlink_to(Path("router").resolve())

typed = [path.with_suffix(".py") for path in Path("router").rglob("*.pxd")]
extensions = cythonize(
    [
        Extension(
            ".".join(("kvrouter", *path.with_suffix("").parts)),
            [str(path)],
            include_dirs=[str(path.parent)],
            depends=sorted(map(str, path.parent.glob("*.h"))),
        )
        for path in sorted([*typed, *Path("router").rglob("*.pyx")])
    ],
    include_path=[str(BUILD)],
    build_dir=str(BUILD / "c"),
    compiler_directives={
        "language_level": 3,
        # The hints are numpy's; C types are in the .pxd files.
        "annotation_typing": False,
        "boundscheck": os.environ.get("KVROUTER_CHECK_BOUNDS") == "1",
        "wraparound": False,
        "initializedcheck": False,
    },
)
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
sanitized = os.environ.get("KVROUTER_SANITIZE") == "1"
for extension in extensions:
    extension.extra_compile_args = ["-O1", "-g", *SANITIZERS] if sanitized else ["-O3", "-g0"]
    extension.extra_link_args = SANITIZERS if sanitized else []
    # Without a compiler the modules run as they stand.
    extension.optional = True

setup(ext_modules=extensions, options={"build_ext": {"parallel": os.cpu_count()}})
