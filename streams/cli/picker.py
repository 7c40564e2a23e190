"""`kvstreams picker`: the endpoint picker."""

from __future__ import annotations

from pathlib import Path

import click

from streams.cli.scope import empty_scope
from streams.cli.serving import run_until_signalled
from streams.process import log
from streams.process.options import GroupedCommand, with_settings
from streams.settings import Resolved


@click.command(cls=GroupedCommand)
@with_settings
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    metavar="MODEL=PATH",
    help="folder with the tokenizer.json of a model, and with its chat template; repeat the option for each model. A "
    "path alone is for all other models. Without it, engines are asked to tokenize",
)
@click.option(
    "--engine-key",
    "engine_keys",
    multiple=True,
    metavar="MODEL=FILE",
    help="file with the API key of a model's engines, which then tokenize; a file alone is for all other models",
)
@click.option(
    "--inference-pool",
    "pool",
    metavar="[NAMESPACE/]POOL",
    default="",
    help="pick only endpoints of this InferencePool, which is read by the pod's service account. Without it, all "
    "workers of the registry count",
)
@click.option("--ends-with-parent", is_flag=True, hidden=True, help="end when standard input ends")
def picker(
    resolved: Resolved, tokenizers: tuple[str, ...], engine_keys: tuple[str, ...], pool: str, ends_with_parent: bool
) -> None:
    """Run a router that Envoy gateways ask over gRPC (ext_proc) which engine a request goes to."""
    from streams.kafka.schema_compatibility import check_schemas
    from streams.picker.process import PickerOptions, serve_picker
    from streams.process.kept_processes import end_with_parent
    from streams.prompts.engine_keys import parse_by_model

    settings = resolved.settings
    log.configure(settings)
    if ends_with_parent:  # which has done what follows
        end_with_parent()
    else:
        check_schemas()
    if settings.router_reset_states:
        empty_scope(settings, settings.router_reset_force, may_be_new=True)
    paths = {model: Path(path) for model, path in parse_by_model("--tokenizer", tokenizers).items()}
    keys = parse_by_model("--engine-key", engine_keys)
    run_until_signalled(serve_picker(settings, PickerOptions(paths, keys, pool)))


COMMANDS = (picker,)
