"""`kvstreams gateway`: Envoy, pickers and the registered engines on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from streams.cli.prompt_options import with_prompt_options
from streams.cli.scope import prepare_scope
from streams.cli.serving import run_until_signalled
from streams.process import log
from streams.process.options import GroupedCommand, http_urls, with_settings
from streams.settings import Resolved

if TYPE_CHECKING:
    from streams.picker.addresses import Endpoint


@click.command(cls=GroupedCommand)
@with_settings
@click.option("--pickers", type=click.IntRange(1, 64), default=2, show_default=True, help="pickers that it starts")
@click.option(
    "--picker",
    "elsewhere",
    multiple=True,
    metavar="HOST:PORT",
    help="a picker that runs elsewhere, with picker_ends_stream off; repeat the option for each. The gateway then "
    "starts none, and needs --router-url",
)
@click.option(
    "--router-url",
    "routers",
    multiple=True,
    callback=http_urls,
    metavar="URL",
    help="with --picker: the HTTP API of a picker or another router, whose registry names the engines; repeat the "
    "option for each",
)
@click.option(
    "--router-token-file",
    default="",
    metavar="FILE",
    help="file with the gateway's token for that API, with the right read",
)
@with_prompt_options
def gateway(
    resolved: Resolved,
    pickers: int,
    elsewhere: tuple[str, ...],
    routers: tuple[str, ...],
    router_token_file: str,
    tokenizers: tuple[str, ...],
    engine_keys: tuple[str, ...],
) -> None:
    """Serve OpenAI's API by an Envoy that asks endpoint pickers which engine a request goes to."""
    from streams.gateway.process import GatewayOptions, serve_gateway

    if bool(elsewhere) != bool(routers):
        raise click.UsageError("--picker and --router-url go together")
    if elsewhere and (tokenizers or engine_keys):
        raise click.UsageError("--tokenizer and --engine-key are of pickers that the gateway starts, not of --picker")
    settings = resolved.settings
    log.configure(settings)
    if not elsewhere:
        prepare_scope(settings)
    arguments = [f"--tokenizer={value}" for value in tokenizers] + [f"--engine-key={value}" for value in engine_keys]
    options = GatewayOptions(pickers, _endpoints(elsewhere), routers, router_token_file, tuple(arguments))
    run_until_signalled(serve_gateway(settings, options))


def _endpoints(addresses: Sequence[str]) -> tuple[Endpoint, ...]:
    from streams.picker.addresses import Endpoint

    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65_535:
            raise click.BadParameter(f"{address!r} is not HOST:PORT", param_hint="--picker")
        found.append(Endpoint(host, int(port)))
    return tuple(found)


COMMANDS = (gateway,)
