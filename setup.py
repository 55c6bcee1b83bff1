"""Builds the C++17 extension `engine._C`; everything else about the package stands in pyproject.toml.

Each `*.cpp` below csrc/ is one translation unit of the extension. A unit whose name ends in one of the
suffixes of `ISA_FLAGS` is compiled with that row's flags where the compiler takes them. Where it does not
(another architecture, an old compiler) the unit is compiled without, and finds by the compiler's own macros
(`__AVX2__`, `__AVX512F__`, `__AMX_INT8__`, ...) that it has nothing to offer.

A failing build does not fail the installation: the package works without its CPU kernels and says so.
`PEAKSIM_NATIVE=required` in the environment turns the failure into an error, for developers and CI;
`PEAKSIM_NATIVE=skip` leaves the extension out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError
from setuptools.modified import newer_group

ROOT = Path(__file__).parent.resolve()
NATIVE = os.environ.get("PEAKSIM_NATIVE", "optional")

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# GCC 12 takes the undefined registers in its own AVX-512 headers for mistakes of ours.
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-Wno-maybe-uninitialized"]

# Suffix of the file's stem -> flags by kind of compiler. The longest suffix that fits wins.
ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "_avx2": {"unix": _AVX2, "msvc": ["/arch:AVX2"]},
    "_avx512": {"unix": _AVX512, "msvc": ["/arch:AVX512"]},
    "_avx512_vnni": {"unix": [*_AVX512, "-mavx512vnni"], "msvc": ["/arch:AVX512"]},
    "_avx512_bf16": {"unix": [*_AVX512, "-mavx512bf16"], "msvc": ["/arch:AVX512"]},
    "_amx": {"unix": [*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"], "msvc": ["/arch:AVX512"]},
}

# -ffp-contract=off: a*b+c is rounded alike in every unit and by every compiler unless a kernel asks for a fused
# operation. -ffast-math must never appear here:
# loading a library linked with it turns denormals off for the whole process.
BASE_FLAGS = {
    "unix": ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-g0", "-Wall", "-Wextra"],
    "msvc": ["/std:c++17", "/O2", "/EHsc"],
}


def isa_suffix(source: str) -> str | None:
    """The longest suffix of `ISA_FLAGS` that the file's stem ends with, or None."""
    stem = Path(source).stem
    return max((suffix for suffix in ISA_FLAGS if stem.endswith(suffix)), key=len, default=None)


class OptionalBuildExt(build_ext):
    """Compiles the units in parallel, each with its own flags, and survives a missing compiler."""

    def build_extension(self, ext: Extension) -> None:
        if NATIVE == "skip":
            return
        try:
            self._compile_and_link(ext)
        except (BaseError, CCompilerError, OSError) as error:
            if NATIVE == "required":
                raise
            print(
                f"peaksim: {ext.name} was not built ({type(error).__name__}: {error}). The installation goes "
                "on without the C++ CPU kernels; install a C++17 compiler and reinstall to have them.",
                file=sys.stderr,
            )

    def _compile_and_link(self, ext: Extension) -> None:
        kind = "msvc" if self.compiler.compiler_type == "msvc" else "unix"
        # Probed once per suffix and before the threads start: MSVC's first call also initialises it.
        isa = {
            suffix: self._accepted(ISA_FLAGS[suffix][kind])
            for suffix in set(map(isa_suffix, ext.sources))
            if suffix
        }
        jobs = self.parallel if isinstance(self.parallel, int) and self.parallel > 1 else os.cpu_count() or 1

        def compile_one(source: str) -> str:
            flags = [*BASE_FLAGS[kind], *isa.get(isa_suffix(source) or "", []), *ext.extra_compile_args]
            (target,) = self.compiler.object_filenames([source], output_dir=self.build_temp)
            if self.force or newer_group([source, *ext.depends], target):
                self.compiler.compile(
                    [source], output_dir=self.build_temp, include_dirs=ext.include_dirs, extra_postargs=flags
                )
            return target

        with ThreadPoolExecutor(max_workers=jobs) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=self.get_libraries(ext),
            library_dirs=ext.library_dirs,
            extra_postargs=["-pthread"] if kind == "unix" and sys.platform != "darwin" else [],
            export_symbols=self.get_export_symbols(ext),
            build_temp=self.build_temp,
            target_lang="c++",
        )

    def _accepted(self, flags: list[str]) -> list[str]:
        """`flags` if the compiler takes them on this architecture, else nothing."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.cpp")
            probe.write_text("int probe() { return 0; }\n", encoding="utf-8")
            try:
                self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=flags)
            except CCompilerError:
                return []
        return flags


def extension() -> Extension:
    """`engine._C`: every unit below csrc/, with the headers it depends on."""
    # Imported here: pybind11 is a requirement of the build alone, `setup.py --version` works without.
    import pybind11

    def relative(pattern: str) -> list[str]:
        return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob(pattern))

    return Extension(
        "engine._C",
        sources=relative("*.cpp"),
        depends=[*relative("*.hpp"), *relative("*.h"), "setup.py"],
        include_dirs=["csrc", pybind11.get_include()],
        language="c++",
        # Lets the in-place copy and the wheel go on when there is no library to copy.
        optional=NATIVE != "required",
    )


setup(
    # kernels/ lies at the top of the repository and is installed as engine.kernels, never as `kernels`:
    # that name belongs to another distribution, which transformers looks for.
    packages=[*find_packages(include=["engine", "engine.*"]), "engine.kernels"],
    package_dir={"engine": "engine", "engine.kernels": "kernels"},
    package_data={"engine": ["py.typed", "*.pyi", "assets/**/*"]},
    include_package_data=False,
    ext_modules=[extension()],
    cmdclass={"build_ext": OptionalBuildExt},
)
