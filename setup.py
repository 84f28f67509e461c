"""Builds the four C extensions; all metadata is in pyproject.toml.

They keep to the limited API, so that one build, `_aio.abi3.so`, and one wheel serve every Python from LIMITED_API on; a free-threaded
Python, which has no such API, gets its own.

INFINITY_WERROR=1 makes warnings errors, as in .ci/run; not everywhere, since compilers to come may warn of more.
INFINITY_SANITIZE=1 builds them with ASan and UBSan, INFINITY_SANITIZE=thread with TSan, for the tests of `make sanitize` and `make
sanitize-thread`. (Into another place: `build_ext --build-lib build/asan --build-temp build/asan-temp`, first on PYTHONPATH then.)
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

WARNINGS = ["-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
if os.environ.get("INFINITY_WERROR") == "1":
    WARNINGS.append("-Werror")
SANITIZERS = {
    None: [],
    "1": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer", "-g"],
}[os.environ.get("INFINITY_SANITIZE")]
IS_LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
LIMITED_API = (3, 11)  # as requires-python


class BuildWithChecks(build_ext):
    """Says what to install before a compiler says that it misses it."""

    def build_extensions(self):
        compiler = self.compiler.compiler_so  # with CFLAGS
        if shutil.which(compiler[0]) is None:
            raise SystemExit(f"infinity needs a C compiler and found no `{compiler[0]}`: apt install gcc (or set CC)")
        probe = subprocess.run([*compiler, "-E", "-x", "c", "-"], input="#include <libaio.h>\n", text=True, capture_output=True)
        if probe.returncode:
            raise SystemExit(
                "infinity needs the header <libaio.h>: Debian and Ubuntu: apt install libaio-dev; "
                "Fedora and RHEL: dnf install libaio-devel; Arch: pacman -S libaio"
            )
        super().build_extensions()

    def copy_extensions_to_source(self):
        """In place; what was built for one Python alone goes, since Python would go on taking that."""
        super().copy_extensions_to_source()
        for extension in self.extensions if IS_LIMITED else ():
            *folders, name = extension.name.split(".")
            for old in Path(*folders).glob(f"{name}.cpython-*.so"):
                old.unlink()


def extension(name, sources, *, depends=(), flags=(), libraries=()):
    return Extension(
        name,
        sources,
        depends=list(depends),
        libraries=list(libraries),
        define_macros=[("Py_LIMITED_API", "0x{:02X}{:02X}0000".format(*LIMITED_API))] if IS_LIMITED else [],
        py_limited_api=IS_LIMITED,
        extra_compile_args=WARNINGS + list(flags) + SANITIZERS,
        extra_link_args=["-pthread"] + SANITIZERS,
    )


setup(
    packages=[*find_packages(include=["infinity", "infinity.*", "aio_ext"]), "infinity_offload"],
    package_dir={"infinity_offload": "infinity/alias/infinity_offload"},
    cmdclass={"build_ext": BuildWithChecks},
    options={"bdist_wheel": {"py_limited_api": "cp{}{}".format(*LIMITED_API)}} if IS_LIMITED else {},
    ext_modules=[
        extension(
            "aio_ext._aio",
            ["aio_ext/aio.c", "aio_ext/core.c", "aio_ext/crc32c.c", "aio_ext/faults.c"],
            depends=["aio_ext/core.h", "aio_ext/crc32c.h", "aio_ext/faults.h"],
            flags=["-O2"],
            libraries=["dl"],  # libaio is opened when it is used
        ),
        extension("infinity.optim._adam", ["infinity/optim/_adam.c"], depends=["infinity/optim/_eight_bit.h"], flags=["-O3", "-ffp-contract=off"]),
        extension("infinity.model._mt19937", ["infinity/model/_mt19937.c"], flags=["-O3"]),
        extension("infinity.tiers._huffman", ["infinity/tiers/_huffman.c"], flags=["-O3"]),
    ],
)
