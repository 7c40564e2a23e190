"""`kvstreams sim` and `sim-pool`: simulated engines, and the CXL pool that they share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from streams import log, warming
from streams.cli.options import GroupedCommand
from streams.cli.output import print_addresses
from streams.settings import Settings

if TYPE_CHECKING:
    from streams.sim.event_publisher import EventDialect


@click.command(cls=GroupedCommand)
@click.option("--worker", "worker_name", default="1", help="name shown in logs")
@click.option("--model", default="demo-model", show_default=True, help="name of the model that it serves")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on; 0.0.0.0 for all")
@click.option("--port", default=8100, show_default=True, help="port of its HTTP API; 0 takes a free one")
@click.option("--events-port", default=5557, show_default=True, help="ZMQ PUB port of its events; 0 takes a free one")
@click.option("--replay-port", default=5558, show_default=True, help="ZMQ ROUTER port for replays; 0 takes a free one")
@click.option("--block-size", default=16, show_default=True, help="tokens per block")
@click.option("--blocks", default=16384, show_default=True, help="capacity of the cache, in blocks")
@click.option("--time-scale", default=1.0, show_default=True, help="model seconds per second")
@click.option(
    "--transfer-us-per-token",
    default=5.0,
    show_default=True,
    help="time to transfer the KV cache of a token from another engine (kv_transfer_params)",
)
@click.option(
    "--pool",
    default=None,
    metavar="URL",
    help="shared pool that it writes blocks to and reads them from (kvstreams sim-pool)",
)
@click.option(
    "--kv-cache-report-mode",
    type=click.Choice(["incremental", "full"]),
    default="incremental",
    show_default=True,
    help="full also reports the cached blocks that a request reuses, as vLLM does for requests that ask for it",
)
@click.option(
    "--event-dialect",
    type=click.Choice(["array", "map", "map_batch", "sglang_array", "sglang_map", "trtllm"]),
    default=None,
    help="form of its events: vLLM's arrays (the default; maps with labels), SGLang's, or TensorRT-LLM's JSON",
)
@click.option("--page-size", default=0, help="tokens per page of SGLang and TensorRT-LLM; 0 for whole blocks")
@click.option("--damage-every", default=0, help="every how many batches of events one is damaged; 0 for none")
@click.option("--moe-layer", type=int, default=None, help="layer that its blocks are labelled with")
@click.option("--moe-expert", type=int, default=None, help="expert that its blocks are labelled with")
@click.option("--moe-group", type=int, default=None, help="expert group that its blocks are labelled with")
@click.option(
    "--journal",
    type=click.Path(path_type=Path),
    default=None,
    help="file to which every change of its cache is appended, with its time",
)
@click.option(
    "--info", type=click.Path(path_type=Path), default=None, help="file to which the addresses are written, as JSON"
)
def sim(
    worker_name: str,
    model: str,
    host: str,
    port: int,
    events_port: int,
    replay_port: int,
    block_size: int,
    blocks: int,
    time_scale: float,
    transfer_us_per_token: float,
    pool: str | None,
    kv_cache_report_mode: Literal["incremental", "full"],
    event_dialect: EventDialect | None,
    page_size: int,
    damage_every: int,
    moe_layer: int | None,
    moe_expert: int | None,
    moe_group: int | None,
    journal: Path | None,
    info: Path | None,
) -> None:
    """Run a simulated engine that a router cannot distinguish from vLLM."""
    from streams.core.events import MoeLabels
    from streams.sim.engine_config import EngineConfig
    from streams.sim.server import SimServerConfig, run

    log.configure(Settings())
    labels = (moe_layer, moe_expert, moe_group)
    moe = None if labels == (None, None, None) else MoeLabels(*labels)
    sim_config = SimServerConfig(
        host=host,
        port=port,
        events_port=events_port,
        replay_port=replay_port,
        worker=worker_name,
        model=model,
        engine=EngineConfig(block_size=block_size, n_blocks=blocks, transfer_us_per_token=transfer_us_per_token),
        time_scale=time_scale,
        pool=pool,
        moe=moe,
        kv_cache_report_mode=kv_cache_report_mode,
        journal=journal,
        # Events in array form have no field for labels.
        event_dialect=event_dialect or ("array" if moe is None else "map"),
        page_size=page_size,
        damage_every=damage_every,
    )
    warming.warm(warming.HASHING)
    run(sim_config, lambda server: print_addresses(server.info(), info))


@click.command("sim-pool", cls=GroupedCommand)
@click.option("--pool-id", default="pool", show_default=True, help="id under which the pool is registered")
@click.option("--model", default="demo-model", show_default=True, help="model of the engines that share it")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on; 0.0.0.0 for all")
@click.option("--port", default=8200, show_default=True, help="port of its HTTP API; 0 takes a free one")
@click.option("--block-size", default=16, show_default=True, help="tokens per block, the same as the engines'")
@click.option("--bytes-per-token", default=131072, show_default=True, help="bytes of KV cache per token")
@click.option("--capacity-blocks", default=65536, show_default=True, help="capacity in blocks")
@click.option(
    "--offload-gb-per-s",
    default=25.0,
    show_default=True,
    help="bandwidth for writing to the pool, shared by all engines",
)
@click.option(
    "--load-gb-per-s",
    default=25.0,
    show_default=True,
    help="bandwidth for reading from the pool, shared by all engines",
)
@click.option(
    "--latency-us", default=20.0, show_default=True, help="latency of each transfer, added to the time for its bytes"
)
@click.option(
    "--latency-class", default="default", show_default=True, help="shown at /pool/info, for registering the pool"
)
@click.option("--time-scale", default=1.0, show_default=True, help="model seconds per second, the same as the engines'")
@click.option(
    "--info", type=click.Path(path_type=Path), default=None, help="file to which the address is written, as JSON"
)
def sim_pool(
    pool_id: str,
    model: str,
    host: str,
    port: int,
    block_size: int,
    bytes_per_token: int,
    capacity_blocks: int,
    offload_gb_per_s: float,
    load_gb_per_s: float,
    latency_us: float,
    latency_class: str,
    time_scale: float,
    info: Path | None,
) -> None:
    """Run a CXL pool that simulated engines share."""
    from streams.sim.pool import PoolConfig
    from streams.sim.pool_server import PoolServerConfig, run

    log.configure(Settings())
    pool = PoolConfig(
        pool_id=pool_id,
        block_size=block_size,
        bytes_per_token=bytes_per_token,
        capacity_blocks=capacity_blocks,
        offload_gb_per_s=offload_gb_per_s,
        load_gb_per_s=load_gb_per_s,
        latency_us=latency_us,
        latency_class=latency_class,
    )
    run(
        PoolServerConfig(host=host, port=port, model=model, pool=pool, time_scale=time_scale),
        lambda server: print_addresses(server.info(), info),
    )


COMMANDS = (sim, sim_pool)
