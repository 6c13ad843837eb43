"""A bash launch file, read as text: its commands as lists of words. Nothing is ever executed.

tree-sitter parses it (`tree.py`); statements are followed in order (`statements.py`, `commands.py`), their words
expanded as bash does (`words.py`, `arithmetic.py`). What is rare or differs between ways is not known: such a word
keeps a dollar sign, and is `Hidden` where it stands for whole words.
"""

from leangrpo_tools.plan.shell.reading import Command, Hidden, Reading
from leangrpo_tools.plan.shell.statements import read
from leangrpo_tools.plan.shell.words import OUTPUT

__all__ = ["OUTPUT", "Command", "Hidden", "Reading", "read"]
