"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(metavar="NAME", help="The upstream, in any case; `leangrpo list` shows them.")]
Target = Annotated[
    str, typer.Argument(metavar="NAME|DEST", help="A patched folder, or the upstream it is named after.")
]
Source = Annotated[
    str | None,
    typer.Option(
        metavar="URL|PATH", help="Fetch from here instead: a repository; for a wheel the file, its folder or an index."
    ),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")]
