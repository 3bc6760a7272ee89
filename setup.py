"""Build of the compiled kernels: one shared library with a C interface, loaded by `lade.native`.

The library is independent of Python's version, so there is one wheel per platform. Without a C++17 compiler the build
passes without it, and drafts are those of the paper's n-gram pool alone. All other metadata is in pyproject.toml.
"""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("lade/native")
SOURCES = runpy.run_path(str(FOLDER / "sources.py"))
LAYOUT = SOURCES["layout_beside"](FOLDER)
GNU = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-g0"]
GNU += ["-Wall", "-Wextra"]
MSVC = ["/std:c++17", "/O2", "/fp:precise", "/W3"]


class BuildLibrary(build_ext):
    """Build a plain shared library in place of an extension module."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the library without the tag of a Python version."""
        return str(Path(*fullname.split(".")[:-1], SOURCES["library_name"]()))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return no symbol: the sources mark what they export."""
        return []

    def get_libraries(self, ext: Extension) -> list[str]:
        """Return no library of Python's."""
        return list(ext.libraries)

    def build_extension(self, ext: Extension) -> None:
        """Add the compiler's flags, the digest by which the loader recognises other sources, and the constants."""
        ext.extra_compile_args = [*(MSVC if self.compiler.compiler_type == "msvc" else GNU), *ext.extra_compile_args]
        ext.define_macros = [*ext.define_macros, ("LADE_SOURCES", f'"{SOURCES["digest_of"](FOLDER)}"')]
        generated = Path(self.build_temp)
        generated.mkdir(parents=True, exist_ok=True)
        (generated / "layout.h").write_text(SOURCES["header_of"](LAYOUT), encoding="utf-8")
        ext.include_dirs = [*ext.include_dirs, str(generated)]
        super().build_extension(ext)


class PlatformWheel(bdist_wheel):
    """Tag a wheel for one platform and every version of Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "lade.native.kernels",
            sources=sorted(str(path) for path in FOLDER.glob("*.cpp")),
            depends=[*sorted(str(path) for path in FOLDER.glob("*.h")), str(LAYOUT)],
            language="c++",
            extra_link_args=[] if sys.platform in ("win32", "darwin") else ["-Wl,--no-undefined"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
