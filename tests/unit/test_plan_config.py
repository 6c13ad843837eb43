"""A Python config read as text: the same values as running it gives, and where that cannot be known, saying so."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.preset import in_words
from leangrpo_tools.plan.pyeval import Evaluator
from leangrpo_tools.plan.pyvalues import Entries, Unknown

BASE = """
import ml_collections

def blank():
    made = ml_collections.ConfigDict()
    made.draw = draw = ml_collections.ConfigDict()
    draw.count = 4
    draw.scale = 1.5
    made.note = ""
    return made
"""
LOADERS = {
    "imp": 'import imp\nimport os\nlow = imp.load_source("low", os.path.join(os.path.dirname(__file__), "low.py"))',
    "importlib": """
        import importlib.util
        import os
        spec = importlib.util.spec_from_file_location("low", os.path.join(os.path.dirname(__file__), "low.py"))
        low = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(low)
    """,
    "loader": """
        from importlib.machinery import SourceFileLoader
        import os.path as p
        low = SourceFileLoader("low", p.join(p.dirname(__file__), "low.py")).load_module()
    """,
    "fallback": """
        try:
            import imp
        except ImportError:
            imp = None
        low = imp.load_source("low", __file__.removesuffix("high.py") + "low.py")
    """,
    "module": "from conf import low",
    "relative": "from . import low",
}


def made(folder: Path, body: str, loader: str = "imp", start: str = "") -> Entries:
    """The config of a preset with this body."""
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf/low.py").write_text(BASE)
    text = textwrap.dedent(LOADERS[loader]) + "\n" + textwrap.dedent(start)
    text += "\ndef preset():\n    config = low.blank()\n" + textwrap.indent(textwrap.dedent(body), "    ")
    text += "\n    return config\n\ndef get_config(name):\n    return globals()[name]()\n"
    (folder / "conf/high.py").write_text(text)
    evaluator = Evaluator(folder)
    found = evaluator.call(evaluator.load(folder / "conf/high.py"), "get_config", ["preset"])
    assert isinstance(found, Entries)
    return found


@pytest.mark.parametrize("loader", LOADERS)
def test_another_file_of_the_tree_is_read(tmp_path, loader) -> None:
    assert made(tmp_path, "config.draw.count = 9", loader).leaves() == {"draw.count": 9, "draw.scale": 1.5, "note": ""}


BODIES = [
    "n = 32\nconfig.a = int(48 / (n * 9 / 24))\nconfig.b = config.a // 2",
    "config.a = config.draw.count * 3 // 2 if config.draw.count > 1 else 1",
    "config.draw.scale = 3\nconfig.a = f'{config.draw.scale}/{config.draw.count:03d}'",
    "n = 100\nwhile n % 7:\n    n -= 1\n    if n < 3:\n        break\nelse:\n    config.e = 1\nconfig.a = n",
    "t = 0\nfor i, j in [(1, 2), (3, 4)]:\n    if i == 3:\n        continue\n    t += i * j\nconfig.a = t",
    "for i in range(9):\n    if i == 4:\n        break\nelse:\n    i = 70\nconfig.a = i",
    "a, (b, c) = 1, (2, [3])\nconfig.a = -a + b ** c[0] - abs(-b) % 5\nconfig.t = (a, 2.5, 'x', None, True)",
    "config.x = {'k': 0.5, 'n': {'m': [1, 2]}}\nconfig.x.k = 1\nconfig.a = config.x.n.m[-1] + len(config.x.n.m)",
    "def f(a, b=2, *, c=3):\n    return a * b - c\nconfig.a = f(4)\nconfig.b = f(4, c=1, b=5)",
    "config.a = 1 < config.draw.count <= 4 and not config.note or 7\nconfig.b = 'x' in ('x', 'y') and None is None",
    "config.update({'draw': {'count': 6}, 'new': 1})\nconfig.a = config.get('none', 5) + config.get('new', 0)",
    "d = config.draw\nd.count += 1\nalias = d\nalias.scale *= 2\nconfig.a = d.count",
    "v = [1]\nw = v\nw.append(2)\nconfig.a = sum(v)\nconfig.b = sorted(v, reverse=True)[0]\nconfig.c = v[0:1]",
    "config.a = max(2, 3) + min([4, 5]) + round(2.6) + int('7') + float(1)\nconfig.b = str(3) + 'a' * 2",
    "assert config.draw.count % 2 == 0, 'even'\nif config.draw.scale > 2:\n    raise ValueError\nconfig.a = 1",
    "import math\nconfig.a = math.ceil(2.1)\nconfig.b = bool([]) or bool('x')\nconfig.c = 7 / 2 + 7 % 4 + (6 | 1)",
    "with config.unlocked():\n    config.a = 3\nconfig['b'] = 4\nconfig.c = config['b']",
    "n: int = 5\nconfig.a = n if (n > 3) != (n > 7) else 0\nconfig.b = 'a-b'.split('-')[1].upper()",
    "import os\nconfig.a = os.path.basename(os.path.join('x', 'y'))\nif 'draw' in config:\n    config.b = 1",
]
STUB = """
import sys
class ConfigDict:
    def __init__(self):
        object.__setattr__(self, "_v", {})
    def __getattr__(self, name):
        try:
            return self._v[name]
        except KeyError:
            raise AttributeError(name)
    def __setattr__(self, name, value):
        if isinstance(value, dict):
            new = ConfigDict()
            for key, item in value.items():
                setattr(new, key, item)
            value = new
        old = self._v.get(name)
        self._v[name] = float(value) if type(old) is float and type(value) is int else value
    __getitem__, __setitem__ = __getattr__, __setattr__
    def __contains__(self, name):
        return name in self._v
    def get(self, name, default=None):
        return self._v.get(name, default)
    def update(self, other):
        for key, item in other.items():
            old = self._v.get(key)
            old.update(item) if isinstance(old, ConfigDict) else setattr(self, key, item)
    def unlocked(self):
        return self
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def leaves(self, before=""):
        out = {}
        for key, item in self._v.items():
            out |= item.leaves(before + key + ".") if isinstance(item, ConfigDict) else {before + key: item}
        return out
sys.modules["ml_collections"] = sys.modules[__name__]
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> list[dict[str, object]]:
    """What running each body gives, in one process of its own."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "stub.py").write_text(STUB)
    code = f"import stub\nexec({BASE!r})\nout = []\nfor body in {BODIES!r}:\n    config = blank()\n"
    code += "    names = {'config': config}\n    exec(body, names)\n    out.append(config.leaves())\nprint(repr(out))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return eval(done.stdout)


@pytest.mark.parametrize("place", range(len(BODIES)))
def test_same_as_running_it(tmp_path, ran, place) -> None:
    found = made(tmp_path, BODIES[place]).leaves()
    assert found == ran[place] and list(map(type, found.values())) == list(map(type, ran[place].values()))
    assert "a" in found


def unknown(value: object, says: str = "") -> bool:
    return isinstance(value, Unknown) and says in value.why and value.file.name == "high.py" and value.line > 1


OUTSIDE = "import os, helper\n"


@pytest.mark.parametrize(
    ("body", "lost", "kept"),
    [
        ("config.a = int(os.environ['N'])\nconfig.b = config.a + 1\nconfig.c = 1", "a b", "c note"),
        ("if helper.big:\n    config.a = 1\n    config.draw.count = 2\nconfig.c = 1", "a draw.count", "c draw.scale"),
        ("while helper.go():\n    config.a = 1\nconfig.c = 1", "a", "c draw.count"),
        ("for i in helper.many:\n    config.a = i\nconfig.c = 1", "a", "c draw.count"),
        ("for i in range(3):\n    if helper.x:\n        break\n    config.a = i\nconfig.c = 1", "a", "c draw.count"),
        ("helper.tune(config)\nconfig.c = 1", "note draw.count", "c"),
        ("helper.tune(config.draw)\nconfig.c = 1", "draw.count draw.scale", "c note"),
        ("v = [1]\nw = v\nhelper.tune(v)\nconfig.a = w[0]\nconfig.c = 1", "a", "c note"),
        ("print(config)\nconfig.a = [x for x in (1, 2)]\nconfig.c = 1", "a", "c note draw.count"),
        ("config.a = [helper.tune(config) for x in (1, 2)]\nconfig.c = 1", "a note", "c"),
        ("config.a = helper.x or 3\nconfig.b = helper.x == 3\nconfig.c = not helper.x", "a b c", "note"),
        ("config.a = 10 ** 10 ** 10\nconfig.b = 'x' * 10 ** 9\nconfig.c = f'{1:999999999}'", "a b c", "note"),
        ("config.a = 1 / 0\nconfig.b = missing\nconfig.c = config.nothing\nconfig.d = 1", "a b c", "d"),
        ("try:\n    config.a = helper.x()\nexcept ValueError:\n    config.a = 2\nconfig.c = 1", "a", "c note"),
        ("n = 0\nif helper.x:\n    n = 1\nconfig.a = n\nconfig.c = 1", "a", "c note"),
        ("config.a = [helper.x] == [1]\nconfig.b = 2 in [helper.x, 3]\nconfig.c = len([helper.x])", "a b", "c"),
        ("x = config if helper.x else None\nx.note = 'n'\nconfig.c = 1", "note draw.count", "c"),
        ("x = config if helper.x else 1\nif helper.y:\n    x.note = 'n'\nconfig.c = 1", "note draw.count", "c"),
        ("x = config if helper.x else 1\nx['note'] = 'n'\nconfig.c = 1", "note draw.count", "c"),
        ("def f():\n    if helper.x:\n        return 1\n    return 2\nconfig.a = f()\nconfig.c = 1", "a", "c note"),
        ("config.a = str([helper.x])\nv = [helper.x, 1]\nconfig.b = v.index(1)\nconfig.c = 1", "a b", "c note"),
        ("s = 'x'\nfor _ in range(18):\n    s = s + s\nconfig.a = s\nconfig.c = 1", "a", "c note"),
        ("config.a = (lambda: 1)()\nconfig.c = 1", "a", "c"),
        ("v = [1]\nw = v\nv += [2]\nconfig.a = w[0]\nconfig.b = v[1]", "a", "b"),
    ],
)
def test_what_is_not_understood_is_lost_and_the_rest_stays(tmp_path, body, lost, kept) -> None:
    found = made(tmp_path, body, start=OUTSIDE)
    leaves = found.leaves()
    for name in lost.split():
        before = name.rpartition(".")[0]
        owner = found.values["draw"] if before else found
        assert isinstance(owner, Entries) and unknown(leaves.get(name, owner.others)), (name, leaves)
    assert not [name for name in kept.split() if isinstance(leaves.get(name, Unknown("", Path(), 0)), Unknown)], leaves


def test_the_place_that_stops_it_is_named(tmp_path) -> None:
    value = made(tmp_path, "n = 3\nk = n * int(os.environ['N'])\nconfig.a = k + 1", start=OUTSIDE).leaves()["a"]
    assert isinstance(value, Unknown) and "os.environ['N']" in value.why
    line = (tmp_path / "conf/high.py").read_text().split("\n")[value.line - 1]
    assert "os.environ" in line and value.place.endswith(f"high.py:{value.line}")


def test_nothing_is_run(tmp_path) -> None:
    mark = tmp_path / "ran"
    body = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nopen({str(mark)!r}, 'w')\nexec('x')\n"
    body += f"import os\nos.system('touch {mark}')\n__import__('os').mkdir({str(mark)!r})\n"
    body += f"().__class__.__base__.__subclasses__()\n''.format.__globals__\nprint(file=open({str(mark)!r}, 'w'))"
    made(tmp_path, body, start=body)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("assert config.draw.count % 3 == 0, 'three'", "LG505", "three"),
        ("if config.draw.count:\n    raise ValueError('no')", "LG505", "raise ValueError"),
        ("while True:\n    pass", "LG508", "does not end"),
        ("config.a = " + "(" * 3000 + "1" + ")" * 3000, "LG508", "high.py"),
        ("def (", "LG508", "high.py:"),
    ],
)
def test_configs_that_end_in_an_error(tmp_path, body, code, says) -> None:
    with pytest.raises(KitError) as caught:
        made(tmp_path, body)
    assert caught.value.code == code and says in str(caught.value) and caught.value.fix


def test_files_outside_the_tree_are_not_read(tmp_path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "secret.py").write_text("number = 7\n")
    (tmp_path / "tree/link.py").symlink_to(tmp_path / "secret.py")
    body = "config.a = imp.load_source('s', '../secret.py').number\nconfig.b = imp.load_source('s', 'link.py').number"
    leaves = made(tmp_path / "tree", body).leaves()
    assert unknown(leaves["a"]) and unknown(leaves["b"])


def test_calls_without_end_and_missing_presets(tmp_path) -> None:
    assert unknown(made(tmp_path, "config.a = loop(1)", start="def loop(n):\n    return loop(n + 1)\n").leaves()["a"])
    evaluator = Evaluator(tmp_path)
    with pytest.raises(KitError, match="no function nothing; it has get_config, loop, preset") as caught:
        evaluator.call(evaluator.load(tmp_path / "conf/high.py"), "nothing", [])
    assert caught.value.code == "LG508"


def test_words_of_a_command() -> None:
    words = ["--config=a.py:x", "--config.p.q", "3", "--config.r=-1", "--other", "5", "--config.flag", "--noconfig.s"]
    assert in_words(words, "config") == (
        "a.py:x", [("p.q", "3"), ("r", "-1"), ("flag", None), ("s", "false")],
    )  # fmt: skip
