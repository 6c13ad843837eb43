"""Insert an import after the imports that open the file.

Before::

    import torch
    from tqdm import tqdm

    def train(): ...

After, with ``statement: from package._leangrpo import lean``::

    import torch
    from tqdm import tqdm
    from package._leangrpo import lean

    def train(): ...

The place is the last top-level import before the first function or class; without one, the top of the file below the
docstring. Refused when the file already binds the imported name.
"""

from __future__ import annotations

import libcst as cst

from leangrpo_tools.codemods.base import Found, Match, refuse_taken
from leangrpo_tools.codemods.params import InsertImport
from leangrpo_tools.codemods.source import Source


def find(source: Source, params: InsertImport) -> Found:
    """The statement next to which the import goes."""
    found = Found(f"the place for `{params.statement}`")
    new = source.new_statement(params.statement)
    for name in _bound(new):
        refuse_taken(source, name)
    last: cst.CSTNode | None = None
    for node in source.module.body:
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            break
        if isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[-1], (cst.Import, cst.ImportFrom)):
            last = node
    if last is not None:
        found.matches = [Match(last, source.line(last), after=[new])]
    elif source.module.body:
        first = source.module.body[0]
        spare = source.module.get_docstring() is not None
        found.matches = [Match(first, source.line(first), after=[new] if spare else [], before=[] if spare else [new])]
    return found


def _bound(statement: cst.BaseStatement) -> list[str]:
    assert isinstance(statement, cst.SimpleStatementLine)
    node = statement.body[0]
    assert isinstance(node, (cst.Import, cst.ImportFrom))
    if isinstance(node.names, cst.ImportStar):
        return []
    return [alias.evaluated_alias or alias.evaluated_name.split(".")[0] for alias in node.names]
