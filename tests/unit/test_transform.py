"""Bytes: what a patch does not touch stays as it is, in any encoding and style."""

from __future__ import annotations

import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.toytree import FLUX, WAN

from leangrpo_tools import recipe
from leangrpo_tools.errors import KitError
from leangrpo_tools.transform import Patched, describe, transform

EDITS = recipe.load("DanceGRPO").edits(["flux", "wan_2_1"])
FILE = "fastvideo/train_grpo_flux.py"


def patch(data: bytes, file: str = FILE) -> bytes:
    result = transform(file, data, EDITS[file])
    assert isinstance(result, Patched), [item.text() for item in result]
    return result.data


PLAIN = patch(FLUX.encode())


def tabs(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        depth = (len(line) - len(line.lstrip(" "))) // 4
        lines.append("\t" * depth + line[4 * depth :])
    return "\n".join(lines)


def test_crlf() -> None:
    assert patch(FLUX.replace("\n", "\r\n").encode()) == PLAIN.replace(b"\n", b"\r\n")


def test_tabs() -> None:
    assert patch(tabs(FLUX).encode()) == tabs(PLAIN.decode()).encode()


def test_byte_order_mark() -> None:
    assert patch(b"\xef\xbb\xbf" + FLUX.encode()) == b"\xef\xbb\xbf" + PLAIN


def test_no_final_newline() -> None:
    assert patch(FLUX.rstrip("\n").encode()) == PLAIN.rstrip(b"\n")


def test_non_ascii_and_other_encodings() -> None:
    words = "# Größe, été\n"
    assert patch((FLUX + words).encode()) == PLAIN + words.encode()
    cookie = "# -*- coding: latin-1 -*-\n"
    assert patch((cookie + FLUX + words).encode("latin-1")) == cookie.encode() + PLAIN + words.encode("latin-1")


@pytest.mark.parametrize("first", [True, False])
def test_bytes_that_are_no_text_are_refused(first: bool) -> None:
    odd = b"# \xff\n"  # in the first two lines Python looks for the encoding
    with pytest.raises(KitError) as caught:
        patch(odd + FLUX.encode() if first else FLUX.encode() + odd)
    assert caught.value.code in ("LG204", "LG205")


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(KitError):
        patch(b"# coding: no-such-thing\n" + FLUX.encode())


def test_form_feeds_backslashes_and_mixed_line_ends() -> None:
    extra = "\x0c\nx = 1 + \\\r\n    2\r\ny = '''a\r\nb'''\n"
    text = FLUX.replace("if __name__", extra + "if __name__").encode()
    assert patch(text) == PLAIN.replace(b"if __name__", extra.encode() + b"if __name__")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("file", "text"), [(FILE, FLUX), ("fastvideo/train_grpo_wan_2_1.py", WAN)])
def test_comments_anywhere_survive(file: str, text: str, seed: int) -> None:
    """Comments and blank lines at random places between lines: all are kept, in order, and the code is the same."""
    draw = random.Random(seed)
    lines = text.splitlines()
    for number in range(12):
        place = draw.randrange(3, len(lines))
        indent = " " * draw.choice((0, 2, 4, 9))
        lines.insert(place, draw.choice((f"{indent}# note {number}", "", f"{indent}# note {number} with ünïcode")))
    noisy = "\n".join(lines) + "\n"
    result = patch(noisy.encode(), file).decode()
    notes = [line.strip() for line in noisy.splitlines() if "# note" in line]
    assert sorted(line.strip() for line in result.splitlines() if "# note" in line) == sorted(notes)
    plain = patch(text.encode(), file).decode()
    assert _code(result) == _code(plain)


def _code(text: str) -> list[str]:
    import io
    import tokenize

    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return [item.string for item in tokenize.generate_tokens(io.StringIO(text).readline) if item.type not in skip]


def formatted(text: str) -> str:
    """As black would write it."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert ruff, "ruff is part of the dev extra"
    command = [ruff, "format", "--isolated", "--line-length", "88", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def moved(text: str) -> str:
    """The functions in reverse order."""
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    spans = [range(node.lineno - 1, node.end_lineno or 0) for node in functions]
    head = "".join(lines[: spans[0].start])
    inside = {line for span in spans for line in span} | set(range(spans[0].start))
    tail = "".join(line for number, line in enumerate(lines) if number not in inside)
    return head + "\n".join("".join(lines[span.start : span.stop]) for span in reversed(spans)) + tail


def documented(text: str) -> str:
    """A docstring and a comment in every function."""
    return re.sub(r"(?m)^(def .*\):)\n", r'\1\n    """Rewritten."""\n    # a remark\n', text)


def reordered(text: str) -> str:
    """The keyword arguments of every call of the network the other way round."""

    def turn(call: re.Match[str]) -> str:
        return call[1] + ", ".join(reversed([part.strip() for part in call[2].split(",")])) + ")"

    return re.sub(r"(transformer\()((?:\w+=\w+, )+\w+=\w+)\)", turn, text)


@pytest.mark.parametrize("change", [formatted, moved, documented, reordered], ids=lambda change: change.__name__)
def test_the_same_code_in_another_style(change: Callable[[str], str]) -> None:
    """Patched at the same places, and every other line stays as it was."""
    text = change(FLUX)
    assert text != FLUX
    result = patch(text.encode()).decode()
    ours = [line for line in PLAIN.decode().splitlines() if "lean" in line]
    assert sum("lean" in line for line in result.splitlines()) >= len(ours)
    gone = [line for line in difflib.ndiff(text.splitlines(), result.splitlines()) if line.startswith("- ")]
    assert len(gone) <= 2 * len(ours)


def test_a_patched_file_is_not_patched_twice() -> None:
    result = transform(FILE, PLAIN, EDITS[FILE])
    assert isinstance(result, list) and any(item.taken == "lean" for item in result)


def test_lines_are_those_of_the_original() -> None:
    result = transform(FILE, FLUX.encode(), EDITS[FILE])
    assert isinstance(result, Patched)
    lines = FLUX.splitlines()
    for place in result.places:
        for number in place.lines:
            word = place.anchor.split(" in ")[0].split("(")[0].removesuffix(" = ...").split()[-1].strip("`")
            assert place.codemod in ("insert_import", "wrap_in_with") or word.split(".")[-1] in lines[number - 1], place


def test_warnings_of_the_users_file_are_not_ours(recwarn: pytest.WarningsRecorder) -> None:
    patch(FLUX.replace("LIMIT = 3", "LIMIT = '\\d'").encode())
    assert not recwarn.list


def test_functions_are_listed_once_however_many_anchors_are_missing() -> None:
    edits = list(recipe.load("DanceGRPO").find("flux").edits)
    wrong = transform("a.py", b"import torch\n\n\ndef other(optimizer):\n    optimizer.step()\n", edits)
    assert isinstance(wrong, list) and len(wrong) > 5
    text = describe(wrong)
    assert text.count("a.py:4: def other") == 1
    assert "a.py:5: optimizer.step(" in text


def test_one_call_is_wrapped_for_one_script() -> None:
    """Two scripts that take their rollout from one file in this tree, and from two in the recipe."""
    text = b"def draw(self, i):\n    noise_pred = self.transformer(i)\n    return noise_pred\n"
    wraps = [
        replace(
            edit, file="a.py", address=f"{name}.rollout", params=edit.params.model_copy(update={"function": "draw"})
        )
        for name in ("sd3", "sd3_fast", "sd3_GRPO_Guard")
        for edit in recipe.load("flowGRPO").find(name).edits
        if edit.address.endswith(".rollout")
    ]
    assert wraps[0] == wraps[2] != wraps[1]
    with pytest.raises(KitError) as caught:
        transform("a.py", text, wraps[:2])
    assert caught.value.code == "LG201" and "a.py:2" in caught.value.what
    assert caught.value.fix.endswith("--script sd3")
    for one in wraps:
        assert isinstance(transform("a.py", text, [one]), Patched)
