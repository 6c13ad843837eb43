"""The packages that the kit itself needs, and what to say where one is missing or too old."""

from __future__ import annotations

import sys

from leangrpo_tools.errors import KitError

PACKAGES = {
    "annotated_types": "pydantic", "click": "typer", "git": "gitpython", "gitdb": "gitpython", "libcst": "libcst",
    "pydantic": "pydantic", "pydantic_core": "pydantic", "rich": "rich", "tree_sitter": "tree-sitter",
    "tree_sitter_bash": "tree-sitter-bash", "typer": "typer", "typing_extensions": "pydantic", "yaml": "pyyaml",
}  # fmt: skip
"""What the commands import, and the package that brings it."""


def broken(error: ImportError) -> KitError | None:
    """The error for a package of the kit that cannot be imported, or not what the kit needs of it; else None."""
    module = (error.name or "").partition(".")[0]
    package = PACKAGES.get(module)
    if package is None:
        return None
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        what = f"{sys.executable} has no {package}, which the kit needs"
        cause = "the kit was installed without its dependencies, or for another interpreter"
    else:
        what = f"the {package} of {sys.executable} is not one that the kit can use: {error}"
        cause = "the version is too old: another project pins it here, as DanceGRPO does with pydantic 1.10"
    return KitError(
        "LG122", what, cause=cause,
        fix="install the kit in an environment of its own: python3 -m venv ENV; ENV/bin/pip install PATH/TO/KIT; "
        "verify-patch and bench-patch then take --python with the interpreter that trains",
    )  # fmt: skip
