"""Declares the native extension; everything else is in pyproject.toml.

Built with the stable ABI where CPython's has the buffer protocol (3.11 and later), so one build
serves every later interpreter; on 3.10 the same source builds for that version alone.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

STABLE_ABI = sys.version_info >= (3, 11) and sys.implementation.name == "cpython"


class StableWheel(bdist_wheel):
    """Names the wheel after the oldest interpreter that can load it."""

    def finalize_options(self) -> None:
        if STABLE_ABI:
            self.py_limited_api = "cp311"
        super().finalize_options()


setup(
    ext_modules=[
        Extension(
            "lookaside._native",
            sources=["lookaside/_native.c"],
            depends=["lookaside/_copycore.h", "lookaside/_cudacore.h", "lookaside/_guard.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
            py_limited_api=STABLE_ABI,
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-Wall",
                "-Wextra",
                "-fvisibility=hidden",
                "-pthread",
            ],
            libraries=["dl", "pthread"],
        )
    ],
    cmdclass={"bdist_wheel": StableWheel},
)
