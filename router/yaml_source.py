"""A YAML file into a pydantic model, with errors that name file, line and key."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from router.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

MISPLACED = "misplaced"


def fault_at(place: tuple[str | int, ...], message: str) -> PydanticCustomError:
    """For a validator of a whole section to raise: a fault at `place`, keys and indices below that section."""
    return PydanticCustomError(MISPLACED, "{message}", {"message": message, "at": place})


def load(path: Path, model: type[Model]) -> Model:
    """Reads and validates `path`. Raises `ConfigError` with one line per fault, in the file's order."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{path}: empty; expected at least 'tiers', 'policies' and 'default_policy'")
        _refuse_duplicates(root, path)
        data = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    finally:
        loader.dispose()
    try:
        return model.model_validate(data)
    except ValidationError as error:
        known = _property_names(model.model_json_schema())
        faults = sorted(_fault(path, root, fault, known) for fault in error.errors(include_url=False))
        raise ConfigError("\n".join(line for _, line in faults)) from error


def _fault(path: Path, root: yaml.Node, fault: Any, known: list[str]) -> tuple[int, str]:
    context = fault.get("ctx", {})
    inside = context.get("at", ())
    if fault["type"] == "union_tag_invalid":
        inside = (context["discriminator"].strip("'"),)
    keys, line = _locate(root, (*fault["loc"], *inside))
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        message = "unknown key; " + (f"did you mean {near[0]!r}?" if near else "remove it")
    else:
        message = fault["msg"].removeprefix("Value error, ")
        ours = fault["type"] in ("value_error", MISPLACED)  # they name the value themselves
        if not ours and not isinstance(fault["input"], dict | list):
            message += f" (found {fault['input']!r})"
    return line, f"{path}:{line}: {'.'.join(keys) or 'file'}: {message}"


def _locate(node: yaml.Node, loc: tuple[str | int, ...]) -> tuple[list[str], int]:
    """Follows pydantic's location through the nodes. A part that is no key (a union's tag) is passed over;
    a missing last key is named at its parent's line."""
    keys: list[str] = []
    line = node.start_mark.line + 1
    for position, part in enumerate(loc):
        found = _child(node, part)
        if found is not None:
            mark, node = found
            line = mark.start_mark.line + 1
            keys.append(str(part))
        elif position == len(loc) - 1:
            keys.append(str(part))
    return keys, line


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """The node that marks the place of a child, and the child."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def _refuse_duplicates(node: yaml.Node, path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            _refuse_duplicates(value, path)
            if not isinstance(key, yaml.ScalarNode):
                continue  # pydantic refuses it by name
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(f"{path}:{line}: {key.value}: given twice, first on line {seen[key.value]}; keep one")
            seen[key.value] = line
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, path)


def _property_names(schema: Any) -> list[str]:
    """Every key that the model documents, for a hint at a misspelt one."""
    names: list[str] = []
    if isinstance(schema, dict):
        names += schema.get("properties", {})
        for value in schema.values():
            names += _property_names(value)
    elif isinstance(schema, list):
        for value in schema:
            names += _property_names(value)
    return names
