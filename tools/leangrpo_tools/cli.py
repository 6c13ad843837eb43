"""The commands' options. Everything heavy is imported when a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from leangrpo_tools.cliargs import Json, Name, Source, Target
from leangrpo_tools.clirehearsal import bench_command, verify_command
from leangrpo_tools.errors import KitError

USAGE: Any = typer.BadParameter.__bases__[0]
"""The parser's error for a command line: typer has it from click, or from a copy of its own."""
SETTINGS: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}}
APP: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


def apply_command(
    name: Name,
    dest: Annotated[Path | None, typer.Argument(help="Folder for the checkout; default: named after NAME.")] = None,
    source: Source = None,
    tree: Annotated[Path | None, typer.Option(help="Patch this checkout of your own instead.")] = None,
    script: Annotated[list[str] | None, typer.Option(metavar="S", help="Only this script; may be repeated.")] = None,
    script_as: Annotated[
        list[str] | None, typer.Option(metavar="S=FILE", help="Script S, which is called FILE here; may be repeated.")
    ] = None,
    anchor: Annotated[
        list[str] | None, typer.Option(metavar="EDIT=LINE", help="Which of several places is meant; error LG201 says.")
    ] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Patch the scripts that can be; exit 1 if one cannot.")
    ] = False,
    strict_pin: Annotated[
        bool, typer.Option("--strict-pin", help="Take no other commit or version than the pin.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the diff, write nothing.")] = False,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the upstream from a file of `leangrpo bundle`.")
    ] = None,
    vendor: Annotated[
        bool | None, typer.Option("--vendor/--no-vendor", help="Copy the runtime into the tree, or import it.")
    ] = None,
    json: Json = None,
) -> None:
    """Fetch an upstream at its pin and patch it."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.apply import apply

        result = apply(
            name,
            dest,
            source=source,
            tree=tree,
            scripts=script,
            script_as=script_as or (),
            anchors=anchor or (),
            allow_partial=allow_partial,
            strict_pin=strict_pin,
            dry_run=dry_run,
            bundle=bundle,
            vendored=vendor,
        )
        out.done(result, show.applied)


def bundle_command(
    name: Name,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    source: Source = None,
    json: Json = None,
) -> None:
    """Write one file for machines without network: the kit, its recipes and the upstream."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.bundle import make

        out.done(make(name, output, source), show.bundled)


def diff_command(
    target: Target,
    stat: Annotated[bool, typer.Option("--stat", help="Only the number of changed lines per file.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the diff to a file.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="With the vendored runtime.")] = False,
) -> None:
    """Show what the patch changed, as git shows it."""
    from leangrpo_tools import show

    with show.outcome(None):
        from leangrpo_tools.diff import diff
        from leangrpo_tools.names import folder_of

        colour = output is None and show.on_terminal()
        show.differs(diff(folder_of(target), stat=stat, colour=colour, everything=everything), output)


def revert_command(
    target: Target,
    abort: Annotated[bool, typer.Option("--abort", help="Undo a merge that left conflicts instead.")] = False,
    json: Json = None,
) -> None:
    """Undo the patch: every byte, mode and HEAD; edits made since then stay."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.names import folder_of
        from leangrpo_tools.revert import revert

        out.done(revert(folder_of(target), abort=abort), show.reverted)


def plan_command(
    name: Name,
    launch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Upstream's launch script; it is read, never run.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="[FILE:]NAME", help="A preset of upstream's Python config; it is read, too.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="S", help="The script: its file has another name, or the preset is your own."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A preset's entry, or a launch file's flag. Repeatable."),
    ] = None,
    line: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The line of the launch file that starts training.")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The network that is trained, in place of the path in the launch file."),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "--gpus", min=1, help="World size, one rank per GPU.")] = None,
    gpu_gb: Annotated[float, typer.Option(min=1, metavar="GB", help="Memory of a GPU, in 1e9 bytes.")] = 80.0,
    other_gb: Annotated[
        float, typer.Option(min=0, metavar="GB", help="What else stays on it: VAE, text encoders, reward model.")
    ] = 0.0,
    host_gb: Annotated[
        float, typer.Option(min=0, metavar="GB", help="Host memory per GPU for graphs that have no room on it.")
    ] = 0.0,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="What a forward reaches, in 1e12 operations per second.")
    ] = 300.0,
    link_gb: Annotated[
        float, typer.Option(min=0.001, metavar="GB", help="What a GPU receives from the others per second.")
    ] = 200.0,
    host_link_gb: Annotated[
        float, typer.Option(min=0.001, metavar="GB", help="What goes between a GPU and its host per second.")
    ] = 20.0,
    forward_seconds: Annotated[
        float | None,
        typer.Option(min=1e-9, metavar="S", help="Measured: a sample's forward; then --tflops is not used."),
    ] = None,
    grad_forward: Annotated[
        float | None, typer.Option(min=0.01, help="Measured: a forward with gradient costs so many without (1).")
    ] = None,
    backward: Annotated[
        float | None, typer.Option(min=0.01, help="Measured: a backward costs so many forwards without gradient.")
    ] = None,
    graph_gb: Annotated[
        float | None, typer.Option(min=1e-9, metavar="GB", help="Measured: the graph of one call of the network.")
    ] = None,
    rest_seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="Measured: what else a rollout and its updates take.")
    ] = 0.0,
    json: Json = None,
) -> None:
    """Say what a launch file or preset would gain and what to set, before anything is patched."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.plan import Machine, Speeds, plan

        speeds = Speeds(tflops, link_gb, forward_seconds, rest_seconds, host_link_gb)
        machine = Machine(gpu_gb, other_gb, host_gb, speeds, grad_forward, backward, graph_gb)
        report = plan(
            name, launch, ranks, preset=preset, script=script, overrides=set_ or (), network=network,
            machine=machine, line=line,
        )  # fmt: skip
        out.done(report, show.planned)


def list_command(json: Json = None) -> None:
    """List the upstreams and their scripts."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.status import listing

        out.done(listing(), show.listed)


def support_command(
    measure: Annotated[
        bool, typer.Option("--measure", help="Rehearse them first, and write down what comes out.")
    ] = False,
    name: Annotated[str, typer.Option("--upstream", metavar="NAME", help="This upstream only.")] = "",
    script: Annotated[str, typer.Option(metavar="S", help="This script only.")] = "",
    json: Json = None,
) -> None:
    """Print the table of supported scripts: what was rehearsed, how exact it is, and what it gains."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        if measure:
            from leangrpo_tools.supportrun import measure as run

            out.done(run(name, script, say=lambda text: print(text, file=sys.stderr, flush=True)), show.rehearsed)
        else:
            from leangrpo_tools.support import support

            out.done(support(name, script), show.rehearsed)


def status_command(
    target: Annotated[str, typer.Argument(metavar="NAME|DEST", help="A folder; default: the current one.")] = ".",
    json: Json = None,
) -> None:
    """Say whether a folder is patched, by which version, and what was edited since."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.names import folder_of
        from leangrpo_tools.status import status

        out.done(status(folder_of(target)), show.state)


def check_command(
    target: Annotated[str, typer.Argument(metavar="NAME|DEST", help="A folder; default: the current one.")] = ".",
    json: Json = None,
) -> None:
    """For CI: exit 0 only if a folder is patched, up to date, and the patch is whole."""
    from leangrpo_tools import show

    with show.outcome(json) as out:
        from leangrpo_tools.check import check
        from leangrpo_tools.names import folder_of

        out.done(check(folder_of(target)), show.checked)


def explain_command(code: Annotated[str, typer.Argument(metavar="CODE", help="Such as LG201.")]) -> None:
    """Say what an error code means, what causes it, and what to do."""
    from leangrpo_tools import show

    with show.outcome(None) as out:
        from leangrpo_tools.explain import explain

        out.done(explain(code), str)


COMMANDS = {
    "apply": apply_command,
    "bundle": bundle_command,
    "diff": diff_command,
    "revert": revert_command,
    "verify": verify_command,
    "bench": bench_command,
    "list": list_command,
    "support": support_command,
    "status": status_command,
    "check": check_command,
    "explain": explain_command,
    "plan": plan_command,
}


def _run(app: typer.Typer) -> None:
    """Run a command; what it cannot make sense of becomes LG121, with the parser's exit status."""
    from leangrpo_tools import output

    output.start()
    out = output.Outcome(output.json_wanted(sys.argv[1:]))
    try:
        status = app(standalone_mode=False)
        output.say("")
    except USAGE as err:
        if type(err).__name__ == "NoArgsIsHelpError":  # no mistake: it has the help's text
            err.show()
            raise SystemExit(err.exit_code) from None
        path = err.ctx.command_path if err.ctx else Path(sys.argv[0]).name
        usage = err.ctx.get_usage() + "; " if err.ctx else ""
        problem = KitError(
            "LG121",
            err.format_message().rstrip("."),
            cause="a typing error, or something that another command or version of the kit takes",
            fix=f"{usage}{path} --help says more",
        )
        raise SystemExit(output.failed(problem, out, err.exit_code)) from None
    except SystemExit as err:
        if isinstance(err.__context__, BrokenPipeError):  # the parser's own way with it
            raise SystemExit(output.ended(output.Unheard(), out)) from None
        raise
    except typer.Abort:  # Ctrl-C, as the parser has it
        raise SystemExit(output.ended(KeyboardInterrupt(), out)) from None
    except (Exception, KeyboardInterrupt) as err:
        raise SystemExit(output.ended(err, out)) from err
    raise SystemExit(status)


def umbrella() -> typer.Typer:
    """``leangrpo`` with every verb."""
    app = typer.Typer(**APP, **SETTINGS, no_args_is_help=True, help="Patch diffusion-RL training repositories.")
    for verb, command in COMMANDS.items():
        app.command(verb, **SETTINGS)(command)
    return app


def _alone(verb: str) -> None:
    app = typer.Typer(**APP)
    app.command(**SETTINGS)(COMMANDS[verb])
    _run(app)


def leangrpo() -> None:
    """Entry point."""
    _run(umbrella())


def apply_patch() -> None:
    """Entry point."""
    _alone("apply")


def diff_patch() -> None:
    """Entry point."""
    _alone("diff")


def revert_patch() -> None:
    """Entry point."""
    _alone("revert")


def verify_patch() -> None:
    """Entry point."""
    _alone("verify")


def bench_patch() -> None:
    """Entry point."""
    _alone("bench")
