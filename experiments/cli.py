"""The command line: the functions of ``library.py`` and ``own_server.py`` as commands, with what is
a terminal's alone: ``--json``, ``--quiet``, ``--dry-run``, messages and exit codes.

Exit codes: 0 a result; 1 a run of a sweep, or what a command of the laboratory compares, failed; 2
whatever the user's input, files, machine or policy did, with a message; 70 an error of ours, with a
request to report it; 128 + N for signal N. ``sarathi-sim --help`` must be quick, hence nothing
heavy is imported at the top.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from io import BufferedWriter, FileIO, TextIOWrapper
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, NoReturn, TextIO, get_args, get_origin

import typer
from typer.core import TyperGroup

from sarathi_sim.profiler.storage.child import default_to_one_thread, silent
from sarathi_sim.profiler.storage.strict import UserError
from . import library, own_server
from .options import RUNS, Choosing
from .report.section import Result

# What a wrong option raises; typer handles it, but has no name for it.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]
# A message repeats what the user wrote, and a file may hold a value of megabytes.
_LONGEST_LINE, _LONGEST_USAGE, _MOST_LINES = 4000, 1000, 50
_REPORT = (
    "this is a bug in sarathi-sim, not your mistake: please report it, with the command and the "
    "output of sarathi-sim --debug COMMAND ..."
)
_OURS = 70  # EX_SOFTWARE of sysexits.h
_TYPES = (type, GenericAlias, UnionType)
_BOUNDS = (("min", "ge"), ("max", "le"))

MOVED = {
    "check": "run CONFIG --dry-run",
    "plan": "sweep CONFIG --dry-run",
    **{name: f"list {name}" for name in ("models", "devices", "policies", "support")},
    "replay": "score FILE --config CONFIG",
    **{
        name: f"lab {name}"
        for name in [
            "validate",
            "lockstep",
            "import",
            "accuracy",
            "calibrate",
            "reproduce",
            "first-light",
        ]
    },
    "profile-check": "fit DIR",
    "sensitivity": "capacity CONFIG --sensitivity",
    "advise": "recommend --policy sarathi --gpus TP",
}
"""Commands by their old names."""
MOVED_OPTIONS = {
    **dict.fromkeys(("--backend", "--address"), "--workers tcp://HOST:PORT"),
    **{
        f"--{name.replace('_', '-')}": f"--set {name}=VALUE"
        for name in (*Choosing.__dataclass_fields__, *own_server.Measuring.__dataclass_fields__)
    },
    **dict.fromkeys(("--peer", "--lengths", "--launch"), "sarathi-sim lab score"),
    "--fit": "sarathi-sim lab fit-host",
    "--workload": "sarathi-sim workload WHAT",
}
"""Options by their old names."""


class Commands(TyperGroup):
    """Commands in groups, which end in a message on stderr and an exit code, whatever goes wrong;
    ``--debug`` before the command shows the traceback, too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name == "lab":  # a door by its name: the product works without what is behind it
            return name, _laboratory(), args[1:]
        if name in MOVED and name not in self.commands:
            raise UserError(f"{name} is now: sarathi-sim {MOVED[name]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands panel by panel, each with the first sentence of its help."""
        width = max(map(len, self.commands))
        limit = formatter.width - width - 4
        panels: dict[Any, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = panels.setdefault(getattr(command, "rich_help_panel", None), [])
            panel.append((name.ljust(width), command.get_short_help_str(limit)))
        for title, rows in panels.items():
            with formatter.section(title or "Commands"):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _short_usage_errors():
            return super().parse_args(ctx, _degrees(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            with _short_usage_errors():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _ClickException):
            raise
        except BaseException as error:
            for note in getattr(error, "__notes__", ()):
                typer.echo(note, err=True)
            if signals_received or isinstance(error, KeyboardInterrupt):
                raise _interrupted() from None
            if ctx.find_root().params.get("debug"):
                typer.echo(traceback.format_exc(), err=True, nl=False)
            message, code = _message(error)
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(code) from None


def _degrees(args: list[str]) -> list[str]:
    """``profile --tp 1 2 4`` as ``--tp 1 --tp 2 --tp 4``."""
    found = list[str]()
    for arg in args:
        if "profile" in found and found[-2:-1] == ["--tp"] and not arg.startswith("-"):
            found.append("--tp")
        found.append(arg)
    return found


@contextmanager
def _short_usage_errors() -> Iterator[None]:
    """What is said of a wrong option repeats its value, which may be of any length; of one that has
    a new name, that."""
    try:
        yield
    except _ClickException as error:
        said: Any = error
        said.message = _shortened(said.message, _LONGEST_USAGE)
        option = getattr(error, "option_name", None)
        if option in MOVED_OPTIONS:
            raise UserError(f"{option} is now: {MOVED_OPTIONS[option]}") from None
        raise


signals_received: list[int] = []
"""The signals that asked this process to end. They are kept because compiled code may raise an
error of its own instead of ours: numpy's comparison ends in a TypeError when it is interrupted."""


def end_on_signals() -> None:
    """Let SIGTERM and SIGINT raise KeyboardInterrupt, except where they are ignored: scratch
    folders are removed on the way out, and no policy of the user's is blamed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _frame: object) -> NoReturn:
    signals_received.append(number)
    raise KeyboardInterrupt


def _interrupted() -> typer.Exit:
    number = signals_received[0] if signals_received else signal.SIGINT
    if number == signal.SIGINT:
        typer.echo("interrupted", err=True)
    return typer.Exit(128 + number)


def _message(error: BaseException) -> tuple[str, int]:
    """One shortened line per mistake, or one line in all for an unforeseen error; the exit code."""
    text, code = _of_the_user(error), 2
    if text is None:
        from sarathi_sim.policies.catalogue import error_line

        text, code = f"{error_line(error, '')}; {_REPORT}", _OURS
    lines = [_shortened(line) for line in text.splitlines()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more"]
    return "\n".join(lines), code


def _of_the_user(error: BaseException) -> str | None:
    """The message of an error that the user can mend; None for one of ours."""
    if isinstance(error, MemoryError):
        said = " ".join(str(error).split())
        return f"out of memory{': ' if said else ''}{said}"
    if isinstance(error, OSError) and error.strerror:  # a full disk, a missing file
        named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{named}{error.strerror}"
    simulation: Any = sys.modules.get("sarathi_sim.simulator.loop.simulation")  # if there was one
    ours = isinstance(error, UserError | OSError)
    simulated = simulation is not None and isinstance(error, simulation.SimulationError)
    return str(error) if ours or simulated else None


def _shortened(line: str, longest: int = _LONGEST_LINE) -> str:
    if len(line) <= longest:
        return line
    half = longest // 2
    return f"{line[:half]} ... {line[-half:]}"


def command(
    function: Callable[..., Any],
    *,
    dry: Callable[..., Any] | None = None,
    json: bool = True,
    quiet: bool = True,
    verbose: bool = True,
    aside: bool = True,
    out: object = None,
    result: Callable[..., Any] = lambda found, out: found,
) -> Callable[..., None]:
    """A function of the library as a command: its options are in its signature, its help is its
    docstring. ``json``, ``quiet`` and ``verbose``: whether it has these; ``aside``: whether --json
    has the answer on stderr. With ``dry``, --dry-run calls this function in its place. ``out`` is
    where it writes if --out is left out. ``result`` makes a Result of what the function returns."""
    options = _options(function)

    def called(**given: Any) -> None:
        from .report.render import ProgressBar, consoles, print_result
        from .report.render import as_json as answer_as_json

        as_json = given.pop("json", False)
        quietly = given.pop("quiet", as_json and not aside)
        lines = given.pop("lines", None) is not None
        whole = given.pop("verbose", not verbose)
        used = dry if given.pop("dry_run", False) and dry is not None else function
        if "out" in given and given["out"] is None:
            given["out"] = out
        taken = signature(used).parameters
        passed = {n: value for n, value in given.items() if value is not None and n in taken}
        found: Any = None
        answers: Any = None
        try:
            with ProgressBar(consoles()[1], enabled=not quietly) as progress:
                told = {"progress": progress, "say": silent if quietly else progress.say}
                passed |= {name: value for name, value in told.items() if name in taken}
                found = answers = used(**passed)
                for found in answers if isinstance(answers, Iterator) else ():
                    if lines:
                        typer.echo(answer_as_json(found, None), nl=False)
                    elif found.section is not None:
                        progress.show(found.section)
        except KeyboardInterrupt as stop:
            if isinstance(found, Result) and found is not answers:
                answers.close()  # which keeps what is known
                stop.add_note("stopped: finished work is kept; the same command continues it")
                if not lines:
                    print_result(found, json=as_json, quiet=quietly, verbose=whole)
            raise
        if lines:
            return
        answer = found if used is dry else result(found, given.get("out"))
        print_result(answer, json=as_json, quiet=quietly, verbose=whole)
        if answer.code:
            raise typer.Exit(answer.code)

    flags = {
        "dry_run": f"{(dry.__doc__ or '').partition('.')[0]}." if dry else "",
        "json": "Print one JSON object on stdout, and no table." * json,
        "quiet": "Print neither progress nor table." * quiet,
        "verbose": "Print all tables and assumptions." * verbose,
    }
    for name, said in flags.items():
        if said:
            kind: Any = Annotated[bool, _option(name, False, [said])]
            options[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind)
    if get_origin(signature(function).return_annotation) is Iterator:
        said = "json: print each partial answer, and the final one, as a line of JSON on stdout."
        kind = Annotated[Literal["json"] | None, _option("lines", None, ["--progress", said])]
        options["lines"] = Parameter("lines", Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    called.__signature__ = Signature([*options.values()])  # type: ignore[attr-defined]
    called.__annotations__ = {name: one.annotation for name, one in options.items()}
    called.__doc__ = function.__doc__
    return called


def _options(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters that are options: Annotated with one, or with its help (see options.py)."""
    found = {}
    for name, one in signature(function).parameters.items():
        kind, *about = get_args(one.annotation) or (None,)
        option = next((each for each in about if hasattr(each, "param_decls")), None)
        option = option or _option(name, one.default, about)
        if option is None:
            continue
        read = next((each for each in about if isinstance(each, _TYPES)), kind)
        if float in (read, *get_args(read)):
            option.callback = _finite
        default = one.default if one.default != () else None
        if default is None and get_args(read)[:1] != (read,) and type(None) not in get_args(read):
            read = read | None
        found[name] = Parameter(
            name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[read, option]
        )
    return found


def _option(name: str, default: object, about: Sequence[Any]) -> Any:
    """The option that texts and bounds of a parameter describe; None without a text."""
    texts = [each for each in about if isinstance(each, str)]
    names = [text for text in texts if text.startswith("--")]
    if default is False:
        names = [f"--{name.replace('_', '-')}"]
    if not texts:
        return None
    *metavar, said = (text for text in texts if text not in names)
    look: dict[str, Any] = {"metavar": metavar[0]} if metavar else {}
    for each in about:
        look |= {end: getattr(each, key) for end, key in _BOUNDS if hasattr(each, key)}
    return typer.Option(*names, help=said, **look)


def _finite(value: float | None) -> float | None:
    """A bound alone lets NaN and infinity through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def application(
    groups: Mapping[str, Mapping[str, Callable[..., None]]], **about: Any
) -> typer.Typer:
    """Commands by what they are about, in the order of ``--help``."""
    app = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 100},
        **about,
    )
    for title, commands in groups.items():
        for name, called in commands.items():
            app.command(name, rich_help_panel=title)(called)
    return app


GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Simulate": {
        "run": command(library.run, dry=library.check, out=RUNS, result=library.result_of),
        "sweep": command(library.sweep, dry=library.plan, out=RUNS, json=False),
        "compare": command(library.compare, quiet=False),
        "plot": command(library.plot, json=False),
        "report": command(library.report, json=False),
    },
    "Decide": {
        "capacity": command(library.capacity, out=RUNS),
        "recommend": command(library.partial_answers, out=RUNS),
    },
    "Your own server": {
        "profile": command(own_server.profile, json=False),
        "fit": command(own_server.fit, json=False, quiet=False),
        "score": command(own_server.score),
        "tune": command(own_server.tune),
    },
    "Data": {
        "list": command(library.list_, quiet=False, verbose=False, aside=False),
        "workload": command(library.workload, quiet=False, verbose=False),
    },
}
app = application(
    GROUPS,
    name="sarathi-sim",
    help="Simulate LLM inference serving: which scheduler, chunk size, batch and TP x PP layout is "
    "best, and where does the time go?",
    epilog="Exit codes: 0 success; 1 a run of a sweep, or a comparison of lab, failed; 2 a wrong "
    "option, file or policy, or a problem of this machine; 70 a bug: please report it.",
)


def _laboratory() -> Any:
    if find_spec("sarathi_sim.experiments.lab") is None:
        raise UserError("lab: the laboratory is not installed")
    return typer.main.get_command(import_module("sarathi_sim.experiments.lab.cli").app)


@app.command("lab", rich_help_panel="Data", add_help_option=False)
def lab() -> None:
    """The evidence: scores, claims, decision logs, calibration."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from sarathi_sim.profiler.facts.device import engines

        try:
            typer.echo(version("sarathi-sim"))
        except PackageNotFoundError:
            typer.echo("not installed: run from its source")
        known = (f"{name} {one.newest}" for name, one in engines().items() if one.lockstep)
        typer.echo(f"engines without a policy.version: {', '.join(known)}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="SARATHI_SIM_DEBUG", help="Show the traceback of an error."),
    ] = False,
) -> None:
    """The options before a command."""


class _Pipe(FileIO):
    """A pipe whose reader may leave, as ``head`` does: the command still goes on to its end."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except BrokenPipeError:
            return memoryview(content).nbytes


def _robust(stream: TextIO) -> TextIO:
    """A stream that shows what its encoding has not, and that may lose its reader."""
    if not isinstance(stream, TextIOWrapper):
        return stream
    stream.reconfigure(errors="backslashreplace")
    try:
        number = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return stream
    except OSError:  # no file of the system
        return stream
    pipe = BufferedWriter(_Pipe(number, "w", closefd=False))
    return TextIOWrapper(
        pipe, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering
    )


def main() -> None:
    """The ``sarathi-sim`` command."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Names of files are UTF-8 here, and go into files: Python must read them as such.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1"})
    default_to_one_thread()
    sys.stdout, sys.stderr = _robust(sys.stdout), _robust(sys.stderr)
    end_on_signals()
    atexit.register(gc.freeze)  # a process that ends need not look for circles
    app()
