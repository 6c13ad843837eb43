"""What each codemod is told by a recipe. Free of libcst, so that recipes can be read quickly.

Functions are named by their qualified name or its end (``step`` finds ``Trainer.step``), calls by the dotted text of
what is called (``optimizer.step``). Nothing is ever found by line number.
"""

from __future__ import annotations

import ast
import textwrap
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator


def _expression(text: str) -> str:
    try:
        ast.parse(textwrap.dedent(text).strip(), mode="eval")
    except SyntaxError as err:
        raise ValueError(f"not a Python expression: {err.msg}") from err
    return text


def _statement(text: str) -> str:
    try:
        body = ast.parse(textwrap.dedent(text)).body
    except SyntaxError as err:
        raise ValueError(f"not a Python statement: {err.msg}") from err
    if len(body) != 1:
        raise ValueError("must be exactly one statement")
    return text


def _import(text: str) -> str:
    if not isinstance(ast.parse(_statement(text)).body[0], (ast.Import, ast.ImportFrom)):
        raise ValueError("must be an import statement")
    return text


def _name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("must be a Python name")
    return text


def _dotted(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError("must be a dotted Python name")
    return text


Expression = Annotated[str, AfterValidator(_expression)]
Statement = Annotated[str, AfterValidator(_statement)]
Import = Annotated[str, AfterValidator(_import)]
Name = Annotated[str, AfterValidator(_name)]
Dotted = Annotated[str, AfterValidator(_dotted)]


class Params(BaseModel):
    """Base of all parameters."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class InsertImport(Params):
    """See ``codemods/insert_import.py``."""

    statement: Import


class AddParameter(Params):
    """See ``codemods/add_parameter.py``."""

    function: Dotted
    name: Name
    default: Expression


class AddArgument(Params):
    """See ``codemods/add_argument.py``."""

    function: Dotted
    call: Dotted
    name: Name
    value: Expression


class WrapCall(Params):
    """See ``codemods/wrap_call.py``."""

    function: Dotted
    call: Dotted
    wrapper: Dotted
    arguments: list[Expression] = []
    keywords: dict[Name, Expression] = {}
    assigns: Expression | None = None
    outside: Dotted | None = None


class WrapInWith(Params):
    """See ``codemods/wrap_in_with.py``."""

    function: Dotted
    call: Dotted
    context: Expression


class AddToWith(Params):
    """See ``codemods/add_to_with.py``."""

    function: Dotted
    call: Dotted
    beside: Expression
    context: Expression


class ReplaceExpression(Params):
    """See ``codemods/replace_expression.py``."""

    function: Dotted
    pattern: Expression
    replacement: Expression


class InsertBefore(Params):
    """See ``codemods/insert_before.py``."""

    function: Dotted
    call: Dotted | None = None
    assigns: Expression | None = None
    place: Literal["statement", "block"] = "statement"
    statement: Statement
    handed_on: bool = False
    ahead_of: list[Name] = []

    @model_validator(mode="after")
    def _one_anchor(self) -> InsertBefore:
        if (self.call is None) == (self.assigns is None):
            raise ValueError("give either call or assigns")
        if self.handed_on and "." not in (self.call or ""):
            raise ValueError("handed_on needs a call of an object's method")
        if self.ahead_of and self.place != "block":
            raise ValueError("ahead_of goes with place: block")
        return self


PARAMS: dict[str, type[Params]] = {
    "insert_import": InsertImport,
    "add_parameter": AddParameter,
    "add_argument": AddArgument,
    "wrap_call": WrapCall,
    "wrap_in_with": WrapInWith,
    "add_to_with": AddToWith,
    "replace_expression": ReplaceExpression,
    "insert_before": InsertBefore,
}
"""The names a recipe may use."""
