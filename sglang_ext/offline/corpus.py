"""Prompts for calibration: JSON lines of messages or text, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from sglang_ext.errors import CalibrationError

FAMILY = "family:"


def read_prompts(data: str) -> Iterator[dict[str, Any]]:
    """Records with `messages` (OpenAI chat) or `text`.

    data: a JSON-lines file, or `family:N` for N prompts of the tiny family's calibration split. Raises
    CalibrationError that names the file and line of a record that is neither.
    """
    if data.startswith(FAMILY):
        yield from _family(data)
        return
    path = Path(data)
    if not path.exists():
        raise CalibrationError(f"{path} does not exist; expected a JSON-lines file or {FAMILY}N")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _record(line, f"{path}:{number}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict) or not ("messages" in record or "text" in record):
        raise CalibrationError(f"{where}: expected an object with `messages` or `text`")
    if "messages" in record:
        messages = record["messages"]
        if not (isinstance(messages, list) and messages):
            raise CalibrationError(f"{where}: messages must be a non-empty list, found {messages!r}")
        for message in messages:
            if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
                raise CalibrationError(
                    f"{where}: a message must be an object with `role` and `content`, found {message!r}"
                )
    elif not isinstance(record["text"], str):
        raise CalibrationError(f"{where}: text must be a string, found {record['text']!r}")
    return record


def _family(data: str) -> Iterator[dict[str, Any]]:
    from sglang_ext.offline.family.tasks import TASKS, make_item

    count = data.removeprefix(FAMILY)
    if not count.isdigit():
        raise CalibrationError(f"{data!r}: expected {FAMILY}N with a whole number of prompts")
    for index in range(int(count)):
        item = make_item(TASKS[index % len(TASKS)], "calibration", index // len(TASKS))
        yield {"messages": item.messages}


def encode(tokenizer: Any, record: dict[str, Any]) -> list[int]:
    """Token ids as a worker makes them: the chat template with its generation prompt, or plain text.

    Raises CalibrationError where the template refuses the messages.
    """
    if "messages" not in record:
        return tokenizer.encode(record["text"])
    try:
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise CalibrationError(f"the chat template refuses {record['messages']!r}: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)
