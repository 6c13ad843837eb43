"""Every error code has a test that does what its fix says, or a reason why none can."""

import re
from pathlib import Path

from support.fixes import NOT_FOLLOWED

from leangrpo_core.errors import CODES as OF_THE_RUNTIME
from leangrpo_tools.errors import CODES

TESTS = Path(__file__).parents[1]


def followed() -> set[str]:
    """The codes of all tests that are marked so, read from their text."""
    marks = [re.findall(r"^@follows\((.*)\)$", path.read_text(), re.M) for path in TESTS.glob("*/test_fixes_*.py")]
    return {code for lines in marks for line in lines for code in re.findall(r'"(LG\d{3})"', line)}


def test_each_code_is_followed_or_has_a_reason() -> None:
    known = set(CODES) | set(OF_THE_RUNTIME)
    assert followed() | set(NOT_FOLLOWED) == known
    assert not followed() & set(NOT_FOLLOWED)
    assert all(len(reason) > 20 for reason in NOT_FOLLOWED.values())
    assert len(followed()) >= 45
