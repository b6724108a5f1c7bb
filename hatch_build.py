"""Runs when dualform is installed: compiles its few loops in C, if there is a compiler."""

import runpy
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileKernels(BuildHookInterface[Any]):
    """Adds the compiled library to a wheel, which then fits one kind of machine, but any Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is built."""
        made = runpy.run_path(f"{self.root}/src/dualform/native/compile.py")["compiled"]()
        if made is not None:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(f"src/dualform/native/{made.name}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
