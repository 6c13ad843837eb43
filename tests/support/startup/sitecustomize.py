"""In a rehearsal's interpreter: matrix products as in `support/rounding.py`, from its start on.

Python imports this module by itself where its folder is on PYTHONPATH; `tests/conftest.py` puts it there.
"""

import importlib.util
import sys
from pathlib import Path

if "leangrpo_rehearsal.server" in sys.orig_argv:
    _spec = importlib.util.spec_from_file_location("_rounding", Path(__file__).parents[1] / "rounding.py")
    assert _spec is not None and _spec.loader is not None
    _rounding = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_rounding)
    _rounding.install()
