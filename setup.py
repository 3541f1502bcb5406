# SPDX-License-Identifier: Apache-2.0
"""The extension module. Metadata stands in pyproject.toml, build options in setup.cfg."""

import os
import subprocess
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


def has_header(name: str) -> bool:
    command = [*os.environ.get("CC", "cc").split(), "-E", "-include", name, "-x", "c", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


class BuildExt(build_ext):
    """Builds again when the flags changed, not only when a file did."""

    def build_extension(self, ext: Extension) -> None:
        used = Path(self.build_temp, f"flags.{ext.name}")
        flags = " ".join(ext.extra_compile_args)
        self.force = self.force or not used.exists() or used.read_text() != flags
        super().build_extension(ext)
        used.write_text(flags)

    def get_ext_filename(self, fullname: str) -> str:
        """Bindings of other libraries are opened by the core, not imported: no Python's name or version in them."""
        if fullname.rpartition(".")[2].startswith("_provider_"):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)


sources = sorted({"_native/_core.pyx", *glob("_native/*.c")} - {"_native/_core.c"})
depends = sorted([*glob("_native/*.h"), *glob("_native/*.px[di]")])
core = Extension("aiohixl._core", sources, depends=depends, extra_compile_args=CFLAGS, extra_link_args=LDFLAGS)
binding = Extension(
    "aiohixl._provider_hixl",
    ["_native/provider_hixl.cc"],
    depends=["_native/hixl.h"],
    language="c++",
    extra_compile_args=["-std=c++17", *CFLAGS[1:]],
    extra_link_args=LDFLAGS,
    optional="-Werror" not in CFLAGS,  # without a C++ compiler all other transports work
)
verbs = Extension(
    "aiohixl._provider_verbs",
    ["_native/provider_verbs.c"],
    depends=["_native/verbs.h"],
    define_macros=[("HX_VERBS_BINDING", "1")],
    libraries=["ibverbs"],
    extra_compile_args=CFLAGS,
    extra_link_args=LDFLAGS,
)
setup(
    ext_modules=[core, binding, *([verbs] if has_header("infiniband/verbs.h") else [])],
    cmdclass={"build_ext": BuildExt},
)
