# SPDX-License-Identifier: Apache-2.0
"""The extension module. Metadata stands in pyproject.toml, build options in setup.cfg."""

import os
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CFLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
LDFLAGS = ["-pthread"]
if os.environ.get("AIOHIXL_WERROR") == "1":
    CFLAGS += ["-Werror"]
if os.environ.get("AIOHIXL_DEBUG"):  # Python's own flags define NDEBUG
    CFLAGS += ["-O0", "-g3", "-UNDEBUG", "-DAIOHIXL_DEBUG=1"]
if sanitizers := os.environ.get("AIOHIXL_SANITIZE"):  # e.g. address,undefined
    CFLAGS += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
    LDFLAGS += [f"-fsanitize={sanitizers}"]


class BuildExt(build_ext):
    """Builds again when the flags changed, not only when a file did."""

    def build_extension(self, ext: Extension) -> None:
        used = Path(self.build_temp, "flags")
        flags = " ".join(ext.extra_compile_args)
        self.force = self.force or not used.exists() or used.read_text() != flags
        super().build_extension(ext)
        used.write_text(flags)


sources = sorted({"_native/_core.pyx", *glob("_native/*.c")} - {"_native/_core.c"})
depends = sorted([*glob("_native/*.h"), *glob("_native/*.pxd")])
core = Extension("aiohixl._core", sources, depends=depends, extra_compile_args=CFLAGS, extra_link_args=LDFLAGS)
setup(ext_modules=[core], cmdclass={"build_ext": BuildExt})
