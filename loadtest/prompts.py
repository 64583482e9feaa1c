"""Chat prompts of exact length that share nothing but the template.

The length counts what a worker prefills: the whole rendered prompt, template included, by the target's own tokenizer.
Rendered with jinja2 and counted with `tokenizers`, because the transformers library would import torch.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from loadtest.errors import BadPrompt
from loadtest.schedule import Arrival

_MOST_ATOMS = 4096
_FEWEST_ATOMS = 64
_WORD = re.compile(r"[Ġ▁]([A-Za-z]{2,})")  # a word of the vocabulary with its leading space
_TRIES = 8


class Prompts(Protocol):
    """Makes the text of a user message."""

    def text(self, seed: int, index: int, tokens: int) -> str:
        """The prompt of one arrival: the same for the same three numbers. Raises `BadPrompt`."""


def for_arrivals(prompts: Prompts, arrivals: Iterable[Arrival], seed: int, tokens: int) -> dict[int, str]:
    """Every arrival's prompt by its index; `tokens` holds where an arrival does not say. Raises `BadPrompt`."""
    return {a.index: prompts.text(seed, a.index, a.context_tokens or tokens) for a in arrivals}


class ExactPrompts:
    """Prompts by the tokenizer and template of a model folder.

    A prompt is words that are one token each. Its first word is number `index` of the vocabulary's words, counted from
    one that the seed chooses, and its second word tells apart what the first does not: prompts of one seed whose
    indices differ by less than `words` share only the template, all others at most one token more. (A template that
    strips its messages may cut the first word into several tokens, of which the first may be shared.)
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: a local model with tokenizer.json and a chat template. Raises `BadPrompt`."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises no narrower class
            raise BadPrompt(f"{folder}: no usable tokenizer.json ({error}); expected a local model folder") from error
        self._template = _Template(folder)
        self._atoms = self._find_atoms(folder)
        self._template_tokens = self._count("")

    @property
    def words(self) -> int:
        """How many words the prompts are made of."""
        return len(self._atoms)

    def text(self, seed: int, index: int, tokens: int) -> str:
        """A user message whose rendered prompt has exactly `tokens` tokens. Raises `BadPrompt`."""
        if tokens <= self._template_tokens:
            raise BadPrompt(
                f"a prompt of {tokens} tokens: the chat template alone takes {self._template_tokens}; "
                f"ask for {self._template_tokens + 1} or more"
            )
        count = len(self._atoms)
        begin = random.Random(seed).randrange(count)
        names = [self._atoms[(begin + digit) % count] for digit in (index, index // count)]
        words = [*names, *random.Random(f"{seed}:{index}").choices(self._atoms, k=tokens)]
        wanted = tokens - self._template_tokens
        for _ in range(_TRIES):
            text = "".join(words[:wanted])
            excess = self._count(text) - tokens
            if excess == 0:
                return text
            wanted -= excess
            if wanted < 1:
                break
        raise BadPrompt(f"no prompt of {tokens} tokens found with this tokenizer; ask for a few tokens more")

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(self._template.render(text), add_special_tokens=False).ids)

    def _find_atoms(self, folder: Path) -> list[str]:
        """Words, each with a leading space, that are one token wherever they stand."""
        atoms: list[str] = []
        for token, number in sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]):
            match = _WORD.fullmatch(token)
            if match and self._tokenizer.encode(f" {match[1]}", add_special_tokens=False).ids == [number]:
                atoms.append(f" {match[1]}")
                if len(atoms) == _MOST_ATOMS:
                    break
        if len(atoms) < _FEWEST_ATOMS:
            raise BadPrompt(
                f"{folder}: {len(atoms)} words of the vocabulary are one token behind a space; "
                f"{_FEWEST_ATOMS} are needed to make prompts that differ"
            )
        return atoms


class PlainPrompts:
    """Prompts of so many short words, for servers whose tokenizer is not here: about that many tokens, not exactly.

    What the server counted is in the rows.
    """

    _SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")

    def text(self, seed: int, index: int, tokens: int) -> str:
        if tokens < 1:
            raise BadPrompt(f"a prompt of {tokens} tokens; expected 1 or more")
        rng = random.Random(f"{seed}:{index}")
        return f"{seed}.{index} " + " ".join("".join(rng.choices(self._SYLLABLES, k=2)) for _ in range(tokens - 1))


class _Template:
    """A model folder's chat template, rendered as workers render it: one user message, generation prompt added."""

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        beside = folder / "chat_template.jinja"
        source = beside.read_text() if beside.exists() else config.get("chat_template")
        if not isinstance(source, str):
            raise BadPrompt(f"{folder}: no chat template; expected chat_template.jinja or tokenizer_config.json's")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals.update(raise_exception=_refuse, strftime_now=_today)
        self._folder = folder
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise BadPrompt(f"{folder}: the chat template cannot be read: {error}") from error
        self._special = {name: _token(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}

    def render(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise BadPrompt(f"{self._folder}: the chat template refuses a user message: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _today(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)


def _token(value: Any) -> str:
    """A special token's text; configurations hold it plain or as an object."""
    return str(value["content"]) if isinstance(value, Mapping) else str(value or "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise BadPrompt(f"{path}: not JSON: {error}") from error
