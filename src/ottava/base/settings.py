"""Settings as frozen, typed sections, from keywords, from a mapping or from a YAML file.

Every key has a default, so an empty file is valid. pydantic checks every key, and the error for a typo names the
nearest existing key. Files and overrides come from outside, so `untrusted` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ottava.base.errors import unknown_name
from ottava.base.untrusted import MAX_YAML_BYTES, UntrustedError, parse_yaml, read_text

_PROBLEMS = 20
"""Lines of a message about settings."""
_LONGEST = 200
"""Characters of a wrong value that a message repeats."""

_MOST = 2**53
"""Schedules count in floats, which are exact up to here."""
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]


class ConfigError(ValueError):
    """A setting is unknown or out of range; the message names it and the valid values."""

    exit_code = 2


class Section(BaseModel):
    """An immutable part of the settings, which refuses unknown keys.

    Raises:
        ConfigError: one line for each problem, with the key's full path.

    Example:
        >>> class Schedule(Section):
        ...     warmup: Positive = 10
        >>> Schedule(warmpu=3)
        Traceback (most recent call last):
        ottava.base.settings.ConfigError: unknown setting 'warmpu'; did you mean 'warmup'? known: warmup
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("\n".join(_explained(type(self), error))) from None

    # as in RootModel: pydantic makes inner sections without this __init__, so the outermost one knows the full path
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def checked(cls, tree: Mapping[str, Any], path: Path | None = None) -> Self:
        """From a mapping; if it came from a file, the error names the file."""
        try:
            return cls(**tree)
        except ConfigError as error:
            raise error if path is None else ConfigError(f"{path}: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; {} of an empty one.

    Raises:
        ConfigError: no such file, or the file holds no mapping.
    """
    try:
        tree = parse_yaml(read_text(path, most=MAX_YAML_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UntrustedError as error:
        raise ConfigError(f"{path}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: got a YAML {type(tree).__name__}; needed: a mapping such as `steps: 100`")
    return {str(key): value for key, value in tree.items()}


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `a.b=c`, c in YAML, in a tree of settings; makes missing mappings.

    Raises:
        ConfigError: the override has another form.

    Example:
        >>> tree = {}
        >>> apply_override(tree, "watch.triggers={burst: 3}")
        >>> tree
        {'watch': {'triggers': {'burst': 3}}}
    """
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"got the setting {short(override)}; needed: KEY=VALUE such as optimizer.learning_rate=1e-3")
    try:
        value = parse_yaml(text)
    except UntrustedError as error:
        raise ConfigError(f"{key}: the value {short(text)} {error}") from error
    for depth, name in enumerate(names[:-1], start=1):
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{key}: {'.'.join(names[:depth])} is {below!r} here, which holds no keys")
        tree = below
    tree[names[-1]] = value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings as one level.

    Example:
        >>> flatten({"steps": 2, "model": {"layers": 5}})
        {'steps': 2, 'model.layers': 5}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _explained(section: type[Section], error: ValidationError) -> Iterable[str]:
    """Each problem as one line: the key's full path, then the fault. A section's known names stand in the first line
    about it."""
    listed: set[str] = set()
    problems = error.errors()
    for problem in problems[:_PROBLEMS]:
        parents = [str(part) for part in problem["loc"][:-1]]
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "value_error":  # our own text
            text = problem["msg"].removeprefix("Value error, ")
            yield f"{path}: {text}" if path else text
        elif problem["type"] == "missing":
            yield f"{path}: is missing"
        elif problem["type"] != "extra_forbidden":
            text = problem["msg"]
            yield f"{path}: got {short(problem['input'])}; {text[:1].lower()}{text[1:]}"
        else:
            inner = section
            for name in [name for name in parents if not name.isdecimal()]:
                kinds = (inner.model_fields[name].annotation, *get_args(inner.model_fields[name].annotation))
                inner = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
            text = unknown_name("setting", path, [".".join([*parents, name]) for name in inner.model_fields])
            yield text.partition(" known: ")[0].rstrip(";") if ".".join(parents) in listed else text
            listed.add(".".join(parents))
    if len(problems) > _PROBLEMS:
        yield f"and {len(problems) - _PROBLEMS} more problems"


def short(value: object) -> str:
    """A value for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} of very many digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
