"""`kvlift loadtest mu | sweep | all | report`. This module imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from loadtest.conduct import Measure
    from loadtest.run import Settings

app = typer.Typer(help="What users feel when load rises, with and without the lift.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder; a run that is there goes on")]
Target = Annotated[str | None, typer.Option(help="a running large worker; without it the load pair is started")]
Source = Annotated[str | None, typer.Option(help="the small worker, as the large one reaches it")]
Router = Annotated[str | None, typer.Option(help="a router before both, for the cascade")]
Tokenizer = Annotated[Path | None, typer.Option(help="model folder, for prompts of exact length", file_okay=False)]
TargetThreads = Annotated[int | None, typer.Option(min=1, help="of the large worker, for the report")]
SourceThreads = Annotated[int | None, typer.Option(min=1, help="of the small worker, for the report")]
Systems = Annotated[str, typer.Option(help="comma-separated: large, lift-RHO, automatic, cascade, small")]
Tokens = Annotated[int, typer.Option(min=2, help="length of each prompt, template included")]
Limit = Annotated[float, typer.Option(min=0, help="seconds to the first token that goodput allows")]

_PLACE = ("target", "source", "router", "tokenizer", "target_threads", "source_threads")
_Value = TypeVar("_Value")


@app.command()
def mu(
    context: typer.Context,
    folder: Folder,
    systems: Systems = "large,lift-0.2,lift-0.3,lift-0.5",
    tokens: Tokens = 149,
    repeats: Annotated[int, typer.Option(min=1, help="of each measurement; the median counts")] = 3,
    batches: Annotated[str, typer.Option(help="comma-separated: the b of S(b), for the simulator")] = "1,2,4,8,16,32",
    ttft_limit: Limit = 2.0,
    target: Target = None,
    source: Source = None,
    router: Router = None,
    tokenizer: Tokenizer = None,
    target_threads: TargetThreads = None,
    source_threads: SourceThreads = None,
) -> None:
    """Measure the most requests per second that each system can answer (equation 10), and S(b)."""
    from loadtest.conduct import measure_mu
    from loadtest.mu import FULL
    from loadtest.protocols import Saturations
    from loadtest.simulate import CAP

    sizes = _listed(batches, _whole, "--batches")
    if any(not 1 <= batch <= CAP for batch in sizes):
        raise typer.BadParameter(f"{batches}; expected batches of 1 to {CAP}", param_hint="--batches")
    wanted = Saturations(tokens, _systems(systems), repeats, sizes)
    _run(context, None, FULL * CAP, tokens, lambda *bench: measure_mu(wanted, *bench))


@app.command()
def sweep(
    context: typer.Context,
    folder: Folder,
    systems: Systems = "large,lift-0.2,lift-0.3,lift-0.5,automatic,cascade,small",
    u: Annotated[str, typer.Option("--u", help="comma-separated: arrival rates over mu")] = "0.5,0.75,0.98",
    seeds: Annotated[str, typer.Option(help="comma-separated: each point is measured once with each")] = "0,1,2",
    requests: Annotated[int, typer.Option(min=2, help="per point")] = 500,
    warm_up: Annotated[int, typer.Option(min=0, help="the first arrivals, which no figure counts")] = 50,
    tokens: Tokens = 149,
    ttft_limit: Limit = 2.0,
    target: Target = None,
    source: Source = None,
    router: Router = None,
    tokenizer: Tokenizer = None,
    target_threads: TargetThreads = None,
    source_threads: SourceThreads = None,
) -> None:
    """Walk u = rate / mu for every system; points that are measured already are skipped."""
    from loadtest.conduct import measure_sweep
    from loadtest.run import Settings
    from loadtest.sweep import Plan

    if warm_up >= requests:
        raise typer.BadParameter(f"{warm_up} of {requests} requests leaves none; discard fewer", param_hint="--warm-up")
    plan = Plan(_systems(systems), _listed(u, _load, "--u"), _listed(seeds, _whole, "--seeds"))
    settings = Settings(tokens=tokens, requests=requests, warm_up=warm_up)
    _run(context, settings, requests, tokens, lambda *bench: measure_sweep(plan, *bench))


@app.command("all")
def everything(
    context: typer.Context,
    folder: Folder,
    full: Annotated[
        bool, typer.Option("--full", help="all systems, three loads, three seeds: 3 to 6 hours on two cores")
    ] = False,
    ttft_limit: Limit = 2.0,
    target: Target = None,
    source: Source = None,
    router: Router = None,
    tokenizer: Tokenizer = None,
    target_threads: TargetThreads = None,
    source_threads: SourceThreads = None,
) -> None:
    """mu, a sweep and the report on the load pair: about half an hour on two cores."""
    from loadtest.conduct import measure_all
    from loadtest.protocols import FULL, SHORT

    protocol = FULL if full else SHORT
    longest = max(wanted.tokens for wanted in protocol.mus)
    _run(context, protocol.settings, protocol.settings.requests, longest, lambda *bench: measure_all(protocol, *bench))


@app.command("report")
def show(folder: Folder, ttft_limit: Limit = 2.0) -> None:
    """Make table, plots and page anew from a run's rows."""
    from rich.console import Console

    from loadtest.report import report
    from loadtest.run import RunFolder
    from sglang_ext.errors import KVLiftError

    try:
        report(RunFolder(folder), ttft_limit, Console())
    except KVLiftError as error:
        _fail(error)


def _run(context: typer.Context, settings: Settings | None, prompts: int, tokens: int, measure: Measure) -> None:
    """On servers that run, or on the load pair, started for it: then this command runs once more, with addresses."""
    from rich.console import Console

    from loadtest.conduct import Place, conduct
    from loadtest.setup import with_load_pair
    from sglang_ext.errors import KVLiftError

    given = context.params
    console = Console(stderr=True)
    place = Place(**{name: given[name] for name in _PLACE})
    if place.target is None:
        stray = [name for name in _PLACE[1:] if given[name] is not None]
        if stray:
            raise typer.BadParameter("is of use only together with --target", param_hint=f"--{stray[0]}")
        try:
            code = with_load_pair(_again(context), prompts, tokens, console)
        except KVLiftError as error:
            _fail(error)
    else:
        code = conduct(given["folder"], place, settings, measure, given["ttft_limit"], console)
    raise typer.Exit(code)


def _again(context: typer.Context) -> list[str]:
    """The words of this command, with every option as it is now."""
    words = [context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is True:
            words.append(parameter.opts[0])
        elif value is not None and value is not False:
            words += [parameter.opts[0], str(value)] if parameter.param_type_name == "option" else [str(value)]
    return words


def _systems(text: str) -> list[str]:
    from loadtest.lineup import rho_of

    def system(word: str) -> str:
        rho_of(word)
        return word

    return _listed(text, system, "--systems")


def _listed(text: str, read: Callable[[str], _Value], option: str) -> list[_Value]:
    from sglang_ext.errors import KVLiftError

    try:
        values = [read(word.strip()) for word in text.split(",")]
    except (ValueError, KVLiftError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if len(set(values)) < len(values):
        raise typer.BadParameter(f"{text} names one twice", param_hint=option)
    return values


def _whole(word: str) -> int:
    if not word.isdecimal():
        raise ValueError(f"{word!r}; expected whole numbers, separated by commas")
    return int(word)


def _load(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{word!r}; expected numbers above 0, separated by commas")
    return value


def _fail(error: Exception) -> None:
    typer.echo(f"kvlift: {error}", err=True)
    raise typer.Exit(1) from error


if __name__ == "__main__":
    app(prog_name="kvlift loadtest")
