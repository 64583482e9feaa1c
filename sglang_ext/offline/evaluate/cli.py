"""`kvlift evaluate`. Importing this module imports nothing heavy."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer


class Measured(str, Enum):
    """What is measured of each cache."""

    answers = "answers"
    fidelity = "fidelity"


class Dtype(str, Enum):
    """In which the models run."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def evaluate(
    data: Annotated[
        Optional[str],
        typer.Option(
            help="family:N, family-dev:N, gsm8k:PATH, mmlu-redux:PATH, arc:PATH, multihop:PATH or corpus:PATH"
        ),
    ] = None,
    target: Annotated[Optional[str], typer.Option(help="target model: a folder or a hub name")] = None,
    pack: Annotated[Optional[list[str]], typer.Option(help="PACK_FOLDER=SOURCE_MODEL; repeatable")] = None,
    preset: Annotated[
        Optional[str], typer.Option(help="family: the tiny family's whole table, in place of --target and --pack")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="folder for evaluate.json; plots and kept outcomes go to evaluate/ in it")
    ] = Path("results"),
    measure: Annotated[
        Measured, typer.Option(help="answers, or the fidelity of continuations to the target")
    ] = Measured.answers,
    rho: Annotated[Optional[list[float]], typer.Option(help="budgets of rank disagreement; repeatable")] = None,
    selector: Annotated[
        Optional[list[str]], typer.Option(help="other selectors to compare; repeatable; by default all")
    ] = None,
    compare_at: Annotated[
        Optional[list[float]], typer.Option(help="budgets of the other selectors; repeatable")
    ] = None,
    coverage: Annotated[
        Optional[list[float]], typer.Option(help="coverage budgets of rank disagreement; repeatable")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="of the random selector, averaged")] = 1,
    limit: Annotated[Optional[int], typer.Option(min=1, help="the first so many items of each task")] = None,
    batch: Annotated[int, typer.Option(min=1, help="prompts of one forward")] = 64,
    device: Annotated[str, typer.Option(help="where the models run")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="in which the models run")] = Dtype.float32,
    accept: Annotated[
        bool, typer.Option(help="write each pack's acceptance record, measured on this data, and nothing else")
    ] = False,
    accept_rho: Annotated[float, typer.Option(min=0, max=1, help="budget of the acceptance record")] = 0.3,
    accept_prompts: Annotated[int, typer.Option(min=2, help="prompts of the acceptance record")] = 48,
) -> None:
    """Target alone, source alone, and lifted by selector and budget, over a dataset.

    What is done is kept below the out folder: the same command goes on where an earlier one was stopped.
    """
    import torch

    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline.evaluate import plans
    from sglang_ext.offline.evaluate.session import Session

    try:
        if preset is not None:
            plan = plans.preset(preset, data)
        else:
            plan = plans.plan_of(
                plans.Options(
                    data, target, pack or (), selector or (), rho or (), compare_at or (), coverage or (), seeds
                )
            )
        session = Session(out, measure.value, device, getattr(torch, dtype.value), batch)
        if accept:
            session.accept(plan, limit, accept_rho, accept_prompts)
        else:
            session.run(plan, limit)
    except KVLiftError as error:
        typer.echo(f"kvlift: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo(f"kvlift: stopped; what is done is kept below {out}, the same command goes on from there", err=True)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(evaluate)
