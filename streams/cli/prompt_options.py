"""Options of the commands that make prompts: the front, the picker and the gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_prompt_options(command: _Command) -> _Command:
    """Add --tokenizer and --engine-key, as `tokenizers` and `engine_keys`."""
    command = click.option(
        "--engine-key",
        "engine_keys",
        multiple=True,
        metavar="MODEL=FILE",
        help="file with the API key of a model's engines; a file alone is for all other models",
    )(command)
    return click.option(
        "--tokenizer",
        "tokenizers",
        multiple=True,
        metavar="MODEL=PATH",
        help="folder with the tokenizer.json of a model, and with its chat template; repeat the option for each model. "
        "A path alone is for all other models. Without it, engines are asked to tokenize",
    )(command)


def prompt_files(tokenizers: Sequence[str], engine_keys: Sequence[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the folders of tokenizers and the files with keys, both by model. Raises SettingsError."""
    from streams.prompts.engine_keys import parse_by_model

    paths = {model: Path(path) for model, path in parse_by_model("--tokenizer", tokenizers).items()}
    return paths, parse_by_model("--engine-key", engine_keys)
