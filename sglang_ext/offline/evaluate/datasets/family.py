"""The tiny family's own tasks: so many items of each."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.offline.evaluate.datasets.items import Item
from sglang_ext.offline.family import evaluate, tasks


def read(split: tasks.Split, count: int) -> Iterator[Item]:
    """The first `count` items of each task, the tasks in turn, so that every batch holds some of both."""
    for index in range(count):
        for task in tasks.TASKS:
            yield _item(tasks.make_item(task, split, index))


def _item(made: tasks.Item) -> Item:
    return Item(
        f"{made.split}/{made.task}/{made.index}", made.task, {"messages": list(made.messages)}, (made.final,),
        lambda text, _gold: float(tasks.is_correct(made, text)), "accuracy", evaluate.MAX_ANSWER_TOKENS,
    )  # fmt: skip
