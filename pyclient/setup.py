"""Declares the native extension, and what a wheel holds beside the package; everything else is in
pyproject.toml.

Built with the stable ABI where CPython's has the buffer protocol (3.11 and later), so one build
serves every later interpreter; on 3.10 the same source builds for that version alone.

scripts/wheel.sh builds for machines other than this one, and sets:

- ``LOOKASIDE_CC``: a C compiler for the machine that the wheel is for. It is run with the flags
  below and no others: the ones that this Python was built with would make each build differ.
- ``LOOKASIDE_STAGE``: a directory with ``bin/lookaside``, the sidecar, which becomes a command of
  the wheel, ``share``, which is installed as it is, and ``sboms``, which goes beside the metadata.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

STABLE_ABI = sys.version_info >= (3, 11) and sys.implementation.name == "cpython"
CC = os.environ.get("LOOKASIDE_CC", "")
STAGE = os.environ.get("LOOKASIDE_STAGE", "")
FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
FLAGS += ["-ffp-contract=off"]  # every build of a codec computes the same


class StableWheel(bdist_wheel):
    """Names the wheel after the oldest interpreter that can load it."""

    def finalize_options(self) -> None:
        if STABLE_ABI:
            self.py_limited_api = "cp311"
        super().finalize_options()

    def write_wheelfile(self, wheelfile_base: str, *args: Any, **more: Any) -> None:
        super().write_wheelfile(wheelfile_base, *args, **more)
        if STAGE:
            shutil.copytree(Path(STAGE, "sboms"), Path(wheelfile_base, "sboms"))


class CrossExtension(build_ext):
    """Compiles by LOOKASIDE_CC where that is set."""

    def build_extension(self, ext: Extension) -> None:
        if not CC:
            super().build_extension(ext)
            return
        out = self.get_ext_fullpath(ext.name)
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        command = [CC, *FLAGS, "-DNDEBUG", "-fPIC", "-shared", "-s", "-o", out]
        command += [f"-D{name}={value}" for name, value in ext.define_macros]
        command += [*ext.sources, *(f"-l{name}" for name in ext.libraries)]
        subprocess.run(command, check=True)


class SidecarScript(Command):
    """Installs the sidecar among the commands. distutils' own class reads a script as text."""

    def initialize_options(self) -> None:
        self.build_dir: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_scripts", "build_dir"))

    def run(self) -> None:
        assert self.build_dir is not None
        Path(self.build_dir).mkdir(parents=True, exist_ok=True)
        for script in self.get_source_files():
            shutil.copy(script, self.build_dir)

    def get_source_files(self) -> list[str]:
        return self.distribution.scripts or []


def staged_files() -> list[tuple[str, Sequence[str]]]:
    """What share holds, by directory, as setup() takes it."""
    if not STAGE:
        return []
    return [
        (
            os.path.relpath(directory, STAGE),
            [os.path.join(directory, name) for name in sorted(names)],
        )
        for directory, _, names in sorted(os.walk(os.path.join(STAGE, "share")))
        if names
    ]


setup(
    ext_modules=[
        Extension(
            "lookaside._native",
            sources=["lookaside/_native.c"],
            depends=[
                "lookaside/_codec.h",
                "lookaside/_copycore.h",
                "lookaside/_cudacore.h",
                "lookaside/_guard.h",
            ],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
            py_limited_api=STABLE_ABI,
            extra_compile_args=FLAGS,
            libraries=["dl", "pthread"],
        )
    ],
    scripts=[os.path.join(STAGE, "bin", "lookaside")] if STAGE else [],
    data_files=staged_files(),
    cmdclass={
        "bdist_wheel": StableWheel,
        "build_ext": CrossExtension,
        "build_scripts": SidecarScript,
    },
)
