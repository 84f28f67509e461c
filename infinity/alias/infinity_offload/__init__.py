"""Another name of the package `infinity`, the same module: another project on the package index is imported as `infinity`, too.

Knows Python's import system. Must not know chunks or ranks. The wheel installs this folder beside `infinity`.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING

import infinity

if TYPE_CHECKING:
    from infinity import *  # noqa: F403


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `infinity.x` for `infinity_offload.x`."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(f"{__name__}.") or name == f"{__name__}.__main__":  # `python -m infinity_offload` runs a copy, as any program
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        sys.modules[module.__name__] = importlib.import_module("infinity" + module.__name__.removeprefix(__name__))


sys.meta_path.insert(0, _Finder())
sys.modules[__name__] = infinity
