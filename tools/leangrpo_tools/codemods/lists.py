"""Append to a comma-separated list so that it looks as its author would have written it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import libcst as cst

Item = TypeVar("Item", cst.Arg, cst.Param)


def without_comment(space: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """The same line break and indentation, less the comment that stood in it."""
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return space
    first = space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
    return space.with_changes(first_line=first, empty_lines=[])


def append(items: Sequence[Item], new: Item, tail: str, opening: cst.BaseParenthesizableWhitespace) -> list[Item]:
    """``items`` and ``new`` after them.

    ``tail`` names the field that holds the space before the closing bracket (of the last item), ``opening`` is the
    space after the opening one. The old last item's comma, or its absence, becomes the new item's; a comment behind it
    stays with the old item.
    """
    if not items:
        return [new]
    *rest, last = items
    values: Any = last
    between = without_comment(opening)
    if rest:
        between = without_comment(getattr(rest[-1].comma, "whitespace_after", cst.SimpleWhitespace(" ")))
    if not isinstance(between, cst.ParenthesizedWhitespace):
        between = cst.SimpleWhitespace(" ")
    comma = values.comma
    if isinstance(comma, cst.Comma):
        closing = comma.whitespace_after
        between = _with_comment_of(between, closing)
        new = new.with_changes(comma=comma.with_changes(whitespace_after=without_comment(closing)))
        last = last.with_changes(comma=comma.with_changes(whitespace_after=between))
    else:
        closing = getattr(last, tail)
        between = _with_comment_of(between, closing)
        new = new.with_changes(**{tail: without_comment(closing)})
        last = last.with_changes(**{tail: cst.SimpleWhitespace("")}, comma=cst.Comma(whitespace_after=between))
    return [*rest, last, new]


def _with_comment_of(
    between: cst.BaseParenthesizableWhitespace, closing: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """What followed the old last item on its line, a comment or stray space, stays there."""
    if not isinstance(closing, cst.ParenthesizedWhitespace):
        return between
    if not isinstance(between, cst.ParenthesizedWhitespace):
        if closing.first_line.comment is None and not closing.empty_lines:
            return between
        return closing
    return closing.with_changes(last_line=between.last_line, indent=between.indent)


def lone_generator(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Arguments that allow another one: ``f(x for x in y)`` needs brackets first."""
    if len(args) == 1 and isinstance(args[0].value, cst.GeneratorExp) and not args[0].value.lpar:
        value = args[0].value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return [args[0].with_changes(value=value)]
    return list(args)
