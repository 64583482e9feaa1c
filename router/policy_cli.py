"""`kvlift policy`: what is done with policies outside the router."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from policies.outcomes import Sheet

policy = typer.Typer(no_args_is_help=True, help="Fit a policy's threshold to labelled outcomes.")


@policy.command()
def calibrate(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="CSV: score, small_right, large_right")],
    rate: Annotated[float | None, typer.Option(help="share to escalate, 0 to 1")] = None,
    quality: Annotated[float | None, typer.Option(help="share to answer right, 0 to 1")] = None,
    cost_ratio: Annotated[float, typer.Option(help="what a small call costs, in large calls")] = 0.1,
    small_column: Annotated[str | None, typer.Option(help="the column: was the small model right?")] = None,
    large_column: Annotated[str | None, typer.Option(help="the column: was the large model right?")] = None,
    score_column: Annotated[str | None, typer.Option(help="the column of the score")] = None,
    scores: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="a second CSV that holds the scores")
    ] = None,
    higher: Annotated[
        Literal["sure", "hard"], typer.Option(help="a higher score: the small model is sure, or the request is hard")
    ] = "sure",
    out: Annotated[Path, typer.Option(help="the JSON; the plot goes beside it, as .png")] = Path("results/policy.json"),
) -> None:
    """The threshold for a rate or a quality, the cost-quality curve and its area, and the break-even rate.

    Without --rate and --quality: the best quality that costs no more than the large model alone. RouteLLM's public
    outcomes are read with --small-column and --large-column (the models' names) and --scores.
    """
    from rich.console import Console

    from policies import calibrate as fitting
    from policies.outcomes import Columns, OutcomesError, read_outcomes
    from router import policy_report

    try:
        columns = Columns(score=score_column, small=small_column, large=large_column)
        outcomes = read_outcomes(_sheet(file), columns, None if scores is None else _sheet(scores))
    except OutcomesError as error:
        _fail(str(error))
    try:
        found = fitting.calibrate(outcomes, fitting.Goal(rate, quality), cost_ratio, higher)
    except OutcomesError as error:
        _fail(f"{file}: {error}")
    written = policy_report.write(found, out)
    console = Console()
    policy_report.show(found, console)
    console.print(f"written: {', '.join(str(path) for path in written)}", soft_wrap=True)


def _sheet(path: Path) -> Sheet:
    from policies.outcomes import OutcomesError, Sheet

    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return Sheet.parse(str(path), lines)
    except (OSError, UnicodeDecodeError) as error:
        raise OutcomesError(f"{path}: cannot be read: {error}; expected a CSV file in UTF-8") from error


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
