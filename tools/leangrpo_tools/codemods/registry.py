"""The codemods by name. An edit reads the file as it was before any edit, so their order does not matter for finding;
edits of one node are made in the recipe's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leangrpo_tools.codemods import (
    add_argument,
    add_parameter,
    add_to_with,
    insert_before,
    insert_import,
    replace_expression,
    wrap_call,
    wrap_in_with,
)
from leangrpo_tools.codemods.base import Found

CODEMODS: dict[str, Callable[[Any, Any], Found]] = {
    "insert_import": insert_import.find,
    "add_parameter": add_parameter.find,
    "add_argument": add_argument.find,
    "wrap_call": wrap_call.find,
    "wrap_in_with": wrap_in_with.find,
    "add_to_with": add_to_with.find,
    "replace_expression": replace_expression.find,
    "insert_before": insert_before.find,
}
