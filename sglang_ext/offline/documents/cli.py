"""`kvlift documents evaluate`. Importing this module imports nothing heavy."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer


class Precision(str, Enum):
    """In which the models run."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def evaluate(
    model: Annotated[Optional[str], typer.Option(help="the model that reads: a folder or a hub name")] = None,
    data: Annotated[
        Optional[list[str]],
        typer.Option(
            help="documents:N, documents-LAYOUT:N, biographies:N, sums:N, needles:N or multihop:PATH; repeatable"
        ),
    ] = None,
    adapter: Annotated[Optional[list[Path]], typer.Option(help="folder of a trained Writer; repeatable")] = None,
    pack: Annotated[
        Optional[list[str]], typer.Option(help="PACK_FOLDER=SOURCE_MODEL: documents of the source, mapped; repeatable")
    ] = None,
    preset: Annotated[
        Optional[str], typer.Option(help="tiny: the tiny models' whole table, in place of --model and --data")
    ] = None,
    rule: Annotated[
        Optional[list[str]], typer.Option(help="epic, random, cache_blend, a3; repeatable; by default all")
    ] = None,
    share: Annotated[Optional[list[float]], typer.Option(help="budgets: shares of document tokens; repeatable")] = None,
    leading: Annotated[
        Optional[list[int]], typer.Option(help="epic's budgets: tokens per document; repeatable")
    ] = None,
    map_share: Annotated[Optional[list[float]], typer.Option(help="budgets of mapped documents; repeatable")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="of random, averaged")] = 1,
    attention: Annotated[int, typer.Option(min=0, help="prompts of each task whose attention is compared")] = 100,
    clock: Annotated[
        Optional[str],
        typer.Option(help="time full and linked prefills of a load pair's shape as well: default, qwen3-0.6b, ..."),
    ] = None,
    limit: Annotated[Optional[int], typer.Option(min=1, help="the first so many items of each task")] = None,
    out: Annotated[
        Path, typer.Option(help="folder for documents.json; plots and kept outcomes go to documents/ in it")
    ] = Path("results"),
    device: Annotated[str, typer.Option(help="where the models run")] = "cpu",
    dtype: Annotated[Precision, typer.Option(help="in which the models run")] = Precision.float32,
) -> None:
    """Methods for documents over tasks: quality, time to first token, operations, attention.

    What is done is kept below the out folder: the same command goes on where an earlier one was stopped.
    """
    import torch

    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline.documents import libraries, studies, timing
    from sglang_ext.offline.documents.session import Session
    from sglang_ext.offline.evaluate.errors import EvaluationError

    try:
        if preset is not None:
            wanted = studies.preset(preset, limit)
        elif model is None or not data:
            raise EvaluationError("--model and --data are missing; give both, or --preset tiny")
        else:
            study = studies.Study(
                model, tuple(data), tuple(map(str, adapter or ())), tuple(map(studies.pack_and_source, pack or ())),
                tuple(rule or libraries.RULES), tuple(share or libraries.SHARES),
                tuple(map(float, leading or libraries.LEADING)), tuple(map_share or studies.MAP_SHARES), seeds, attention,
            )  # fmt: skip
            wanted = studies.Plan((study,), timing.Clock(clock) if clock is not None else None)
        Session(out, device, getattr(torch, dtype.value)).run(wanted, limit)
    except KVLiftError as error:
        typer.echo(f"kvlift: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo(f"kvlift: stopped; what is done is kept below {out}, the same command goes on from there", err=True)
        raise typer.Exit(130) from None
