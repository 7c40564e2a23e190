"""`kvstreams front`: the OpenAI-compatible front."""

from __future__ import annotations

import click

from streams.cli.prompt_options import prompt_files, with_prompt_options
from streams.cli.serving import run_until_signalled
from streams.process import log
from streams.process.options import GroupedCommand, with_settings
from streams.settings import Resolved


@click.command(cls=GroupedCommand)
@with_settings
@click.option(
    "--router-url",
    "routers",
    multiple=True,
    required=True,
    metavar="URL",
    help="a router, such as http://127.0.0.1:8000; repeat the option for each. A call goes to one, and to the next if "
    "that one does not answer",
)
@click.option(
    "--router-token-file",
    default="",
    metavar="FILE",
    help="file with the front's token for the routers, with the rights route and read",
)
@with_prompt_options
def front(
    resolved: Resolved,
    routers: tuple[str, ...],
    router_token_file: str,
    tokenizers: tuple[str, ...],
    engine_keys: tuple[str, ...],
) -> None:
    """Serve OpenAI's API in front of all engines: tokenize, route, and copy the chosen engine's answer."""
    from streams.frontend.server import FrontOptions, serve

    log.configure(resolved.settings)
    paths, keys = prompt_files(tokenizers, engine_keys)
    run_until_signalled(serve(resolved.settings, FrontOptions(routers, router_token_file, paths, keys)))


COMMANDS = (front,)
