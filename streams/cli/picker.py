"""`kvstreams picker`: the endpoint picker."""

from __future__ import annotations

import click

from streams.cli.prompt_options import prompt_files, with_prompt_options
from streams.cli.scope import prepare_scope
from streams.cli.serving import run_until_signalled
from streams.process import log
from streams.process.options import GroupedCommand, with_settings
from streams.settings import Resolved


@click.command(cls=GroupedCommand)
@with_settings
@with_prompt_options
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
    from streams.picker.process import PickerOptions, serve_picker
    from streams.process.kept_processes import end_with_parent

    settings = resolved.settings
    log.configure(settings)
    if ends_with_parent:  # which has done what follows
        end_with_parent()
    else:
        prepare_scope(settings)
    paths, keys = prompt_files(tokenizers, engine_keys)
    run_until_signalled(serve_picker(settings, PickerOptions(paths, keys, pool)))


COMMANDS = (picker,)
