"""Prompts for calibration: JSON lines of messages or text, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sglang_ext.errors import CalibrationError

if TYPE_CHECKING:
    from sglang_ext.offline.family.tasks import Item

FAMILY = "family:"
DOCUMENTS = "family-documents:"
_SENTENCES = (1, 1, 1, 2, 3, 6)  # of a document, in turn


def read_prompts(data: str) -> Iterator[dict[str, Any]]:
    """Records with `messages` (OpenAI chat) or `text`.

    data: a JSON-lines file, `family:N` for N prompts of the tiny family's calibration split, or `family-documents:N` for
    N documents of it: sentences by themselves, as a compiler of documents sees them. Raises CalibrationError that names
    the file and line of a record that is neither.
    """
    if data.startswith(FAMILY):
        for item in _family(data, FAMILY):
            yield {"messages": item.messages}
        return
    if data.startswith(DOCUMENTS):
        for index, item in enumerate(_family(data, DOCUMENTS)):
            yield {"text": "".join(item.facts[: _SENTENCES[index // 2 % len(_SENTENCES)]])}
        return
    path = Path(data)
    if not path.exists():
        raise CalibrationError(f"{path} does not exist; expected a JSON-lines file, {FAMILY}N or {DOCUMENTS}N")
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


def _family(data: str, form: str) -> Iterator[Item]:
    from sglang_ext.offline.family.tasks import TASKS, make_item

    count = data.removeprefix(form)
    if not count.isdigit():
        raise CalibrationError(f"{data!r}: expected {form}N with a whole number of prompts")
    for index in range(int(count)):
        yield make_item(TASKS[index % len(TASKS)], "calibration", index // len(TASKS))


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
