"""`kvstreams sim` and `sim-pool`: simulated engines, and the CXL pool that they share."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import orjson

from streams.core.kernels.available import do_without_kernels
from streams.process import log
from streams.process.options import GroupedCommand, OutputFile
from streams.settings import Settings, load

if TYPE_CHECKING:
    from streams.lab.engines.event_publisher import EventDialect
    from streams.lab.engines.pool_server import PoolServer
    from streams.lab.engines.server import PoolReads, PoolWrites
    from streams.lab.engines.speeds import DeviceClass, ModelClass

#: A port to listen on; 0 takes a free one.
_PORT = click.IntRange(0, 65_535)

#: How long a pool that stops waits for Kafka to take its last reports.
_FLUSH_TIMEOUT_S = 5.0


@click.command(cls=GroupedCommand)
@click.option("--worker", "worker_name", default="1", help="name shown in logs")
@click.option("--model", default="demo-model", show_default=True, help="name of the model that it serves")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on; 0.0.0.0 for all")
@click.option("--port", type=_PORT, default=8100, show_default=True, help="port of its HTTP API; 0 takes a free one")
@click.option(
    "--events-port", type=_PORT, default=5557, show_default=True, help="ZMQ PUB port of its events; 0 takes a free one"
)
@click.option(
    "--replay-port", type=_PORT, default=5558, show_default=True, help="ZMQ ROUTER port for replays; 0 takes a free one"
)
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
    "--model-class",
    type=click.Choice(["8b", "70b"]),
    default=None,
    help="class of models whose speed it has, unless an option below says otherwise",
)
@click.option("--prefill-ms-base", type=float, default=None, help="time of any prefill  [default: 15]")
@click.option("--prefill-us-per-token", type=float, default=None, help="time to compute a token  [default: 100]")
@click.option("--decode-ms-per-token", type=float, default=None, help="time of a decode step  [default: 20]")
@click.option(
    "--in-place-us-per-token",
    default=0.0,
    show_default=True,
    help="time that a token that is read in the pool adds to each decode step",
)
@click.option(
    "--pool",
    default=None,
    metavar="URL",
    help="shared pool that it writes blocks to and reads them from (kvstreams sim-pool)",
)
@click.option(
    "--pool-writes",
    type=click.Choice(["all", "prompt", "none"]),
    default="all",
    show_default=True,
    help="which full blocks it writes to the pool: those of prompts and answers, of prompts alone, or none",
)
@click.option(
    "--pool-reads",
    type=click.Choice(["load", "in-place"]),
    default="load",
    show_default=True,
    help="whether requests load the blocks that the pool has, or read them there and take no blocks for them",
)
@click.option(
    "--accessible-worker",
    "accessible_workers",
    type=click.IntRange(min=0),
    multiple=True,
    default=None,
    help="worker that can read the blocks that it writes to the pool; repeat for several  [default: all members]",
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
    "--fault",
    type=click.Choice(["die", "stall", "refuse"]),
    default=None,
    help="how it fails: it exits as by SIGKILL, sends nothing more, or ends one stream with an error",
)
@click.option(
    "--fault-after-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="tokens of an answer after which it fails so, once",
)
@click.option(
    "--chat-style",
    default=None,
    help="default `style` of its chat template, so that it makes other tokens of chats than other engines",
)
@click.option(
    "--journal",
    type=OutputFile(),
    default=None,
    help="file to which every change of its cache is appended, with its time",
)
@click.option("--info", type=OutputFile(), default=None, help="file to which the addresses are written, as JSON")
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
    model_class: ModelClass | None,
    prefill_ms_base: float | None,
    prefill_us_per_token: float | None,
    decode_ms_per_token: float | None,
    in_place_us_per_token: float,
    pool: str | None,
    pool_writes: PoolWrites,
    pool_reads: PoolReads,
    accessible_workers: tuple[int, ...],
    kv_cache_report_mode: Literal["incremental", "full"],
    event_dialect: EventDialect | None,
    page_size: int,
    damage_every: int,
    moe_layer: int | None,
    moe_expert: int | None,
    moe_group: int | None,
    fault: str | None,
    fault_after_tokens: int,
    chat_style: str | None,
    journal: Path | None,
    info: Path | None,
) -> None:
    """Run a simulated engine that a router cannot distinguish from vLLM."""
    # It hashes each prompt once, which pure Python does in a millisecond for 32,768 tokens. Without numba, it starts in
    # half the time, and after SIGKILL its connections close sooner, since the kernel frees its memory first.
    do_without_kernels()
    from streams.core.events import MoeLabels
    from streams.lab.engines.engine_config import EngineConfig
    from streams.lab.engines.faults import Fault, FaultKind
    from streams.lab.engines.server import SimServerConfig, run
    from streams.lab.engines.speeds import MODELS

    log.configure(Settings())
    speed = EngineConfig() if model_class is None else MODELS[model_class]
    engine = EngineConfig(
        block_size=block_size,
        n_blocks=blocks,
        prefill_ms_base=speed.prefill_ms_base if prefill_ms_base is None else prefill_ms_base,
        prefill_us_per_token=speed.prefill_us_per_token if prefill_us_per_token is None else prefill_us_per_token,
        decode_ms_per_token=speed.decode_ms_per_token if decode_ms_per_token is None else decode_ms_per_token,
        in_place_us_per_token=in_place_us_per_token,
        transfer_us_per_token=transfer_us_per_token,
    )
    labels = (moe_layer, moe_expert, moe_group)
    moe = None if labels == (None, None, None) else MoeLabels(*labels)
    sim_config = SimServerConfig(
        host=host,
        port=port,
        events_port=events_port,
        replay_port=replay_port,
        worker=worker_name,
        model=model,
        engine=engine,
        time_scale=time_scale,
        pool=pool,
        pool_writes=pool_writes,
        pool_reads=pool_reads,
        accessible_workers=accessible_workers,
        fault=None if fault is None else Fault(FaultKind(fault), fault_after_tokens),
        chat_style=chat_style or "",
        moe=moe,
        kv_cache_report_mode=kv_cache_report_mode,
        journal=journal,
        # Events in array form have no field for labels.
        event_dialect=event_dialect or ("array" if moe is None else "map"),
        page_size=page_size,
        damage_every=damage_every,
    )
    run(sim_config, lambda server: _print_addresses(server.info(), info))


@click.command("sim-pool", cls=GroupedCommand)
@click.option("--pool-id", default="pool", show_default=True, help="id under which the pool is registered")
@click.option("--model", default="demo-model", show_default=True, help="model of the engines that share it")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on; 0.0.0.0 for all")
@click.option("--port", type=_PORT, default=8200, show_default=True, help="port of its HTTP API; 0 takes a free one")
@click.option("--block-size", default=16, show_default=True, help="tokens per block, the same as the engines'")
@click.option(
    "--model-class",
    type=click.Choice(["8b", "70b"]),
    default=None,
    help="class of models whose size of KV cache it has, unless --bytes-per-token says otherwise",
)
@click.option(
    "--device",
    type=click.Choice(["cxl-x8", "cxl-x16"]),
    default=None,
    help="memory whose bandwidth it has in both directions, unless an option below says otherwise",
)
@click.option("--bytes-per-token", type=int, default=None, help="bytes of KV cache per token  [default: 131072]")
@click.option("--capacity-blocks", default=65536, show_default=True, help="capacity in blocks")
@click.option("--offload-gb-per-s", type=float, default=None, help="bandwidth for writing to the pool  [default: 25]")
@click.option("--load-gb-per-s", type=float, default=None, help="bandwidth for reading from the pool  [default: 25]")
@click.option(
    "--link",
    type=click.Choice(["shared", "own"]),
    default="shared",
    show_default=True,
    help="whether all engines share the bandwidth, or each has it",
)
@click.option(
    "--latency-us", default=20.0, show_default=True, help="latency of each transfer, added to the time for its bytes"
)
@click.option(
    "--latency-class", default="default", show_default=True, help="shown at /pool/info, for registering the pool"
)
@click.option("--time-scale", default=1.0, show_default=True, help="model seconds per second, the same as the engines'")
@click.option(
    "--journal",
    type=OutputFile(),
    default=None,
    help="file to which every change of its content is appended, and what it gives",
)
@click.option(
    "--lmcache",
    metavar="INSTANCE",
    help="store whole chunks, and report them as this instance of LMCache does, to the Kafka of the settings",
)
@click.option("--lmcache-topic", default="lmcache-cache-events", show_default=True, help="topic of these reports")
@click.option("--lmcache-backend", default="devdax", show_default=True, help="backend that they name")
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="tokens per chunk")
@click.option("--info", type=OutputFile(), default=None, help="file to which the address is written, as JSON")
def sim_pool(
    pool_id: str,
    model: str,
    host: str,
    port: int,
    block_size: int,
    model_class: ModelClass | None,
    device: DeviceClass | None,
    bytes_per_token: int | None,
    capacity_blocks: int,
    offload_gb_per_s: float | None,
    load_gb_per_s: float | None,
    link: Literal["shared", "own"],
    latency_us: float,
    latency_class: str,
    time_scale: float,
    journal: Path | None,
    lmcache: str | None,
    lmcache_topic: str,
    lmcache_backend: str,
    chunk_tokens: int,
    info: Path | None,
) -> None:
    """Run a CXL pool that simulated engines share."""
    if lmcache is None:
        do_without_kernels()
    from streams.lab.engines.pool import PoolConfig
    from streams.lab.engines.pool_server import PoolServerConfig, run
    from streams.lab.engines.speeds import DEVICES, MODELS

    log.configure(Settings())
    usual = PoolConfig()
    bandwidth = usual.load_gb_per_s if device is None else DEVICES[device]
    if bytes_per_token is None:
        bytes_per_token = usual.bytes_per_token if model_class is None else MODELS[model_class].bytes_per_token
    pool = PoolConfig(
        pool_id=pool_id,
        block_size=block_size,
        bytes_per_token=bytes_per_token,
        capacity_blocks=capacity_blocks,
        offload_gb_per_s=bandwidth if offload_gb_per_s is None else offload_gb_per_s,
        load_gb_per_s=bandwidth if load_gb_per_s is None else load_gb_per_s,
        link=link,
        latency_us=latency_us,
        latency_class=latency_class,
    )
    config = PoolServerConfig(host=host, port=port, model=model, pool=pool, time_scale=time_scale, journal=journal)
    on_started = partial(_print_pool, info=info)
    if lmcache is None:
        run(config, on_started)
        return
    from streams.kafka.clients import ensure_topics, producer
    from streams.lab.engines.chunked_pool import ChunkedPool, LmcacheReports
    from streams.topics import TopicSpec

    settings = load().settings
    reports = LmcacheReports(lmcache, lmcache_backend, chunk_tokens)
    chunked = ChunkedPool(pool, reports, model, int(time.time()))
    ensure_topics(settings, [TopicSpec(lmcache_topic, "instance", None, 1, settings.replication, {})])
    kafka = producer(settings)

    def publish(record: bytes) -> None:
        kafka.produce(lmcache_topic, record, lmcache)
        kafka.poll(0)

    try:
        run(config, on_started, chunked, publish)
    finally:
        kafka.flush(_FLUSH_TIMEOUT_S)


def _print_pool(server: PoolServer, info: Path | None) -> None:
    _print_addresses(server.info(), info)


def _print_addresses(addresses: dict[str, str], path: Path | None) -> None:
    """Print where a process listens, as JSON, and write the same to a file if one is given."""
    text = orjson.dumps(addresses).decode()
    click.echo(text)
    if path is not None:
        # Written elsewhere and moved: a process that waits for the file must never read half of it.
        half = path.with_suffix(".half")
        half.write_text(text)
        half.replace(path)


COMMANDS = (sim, sim_pool)
