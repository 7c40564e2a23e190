"""`kvstreams cxl`: CXL pools, and transitions that scripts publish for the blocks in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from streams.process.options import GroupedGroup, with_settings, worker_ids
from streams.settings import Resolved

if TYPE_CHECKING:
    from streams.cxl.events import CxlPool
    from streams.engines.verdicts import TransitionVerdict

#: Longest --wait. Agents reach a verdict within a second or not at all; after an hour, a script has lost its terminal.
WAIT_MAX_S = 3600.0


@click.group(cls=GroupedGroup)
def cxl() -> None:
    """Manage CXL pools, and publish transitions of the blocks in them."""


@cxl.command("pool")
@with_settings
@click.argument("pool_id")
@click.option(
    "--member",
    "members",
    type=int,
    multiple=True,
    help="a worker whose host can access the pool; repeat for each, the list replaces the previous one",
)
@click.option("--no-members", is_flag=True, help="no worker's host can access the pool")
@click.option(
    "--latency-class",
    default=None,
    help="which pool_class_load_gb_per_s gives a speed  [default of a new pool: default]",
)
@click.option(
    "--capacity-blocks",
    type=int,
    default=None,
    help="capacity in blocks, shown to people; it does not affect routing; 0: unknown",
)
@click.option("--epoch", type=int, default=None, help="a greater epoch than before: the pool lost its contents")
@click.option("--lost", is_flag=True, help="the pool no longer exists, and its contents are lost")
def cxl_pool(
    resolved: Resolved,
    pool_id: str,
    members: tuple[int, ...],
    no_members: bool,
    latency_class: str | None,
    capacity_blocks: int | None,
    epoch: int | None,
    lost: bool,
) -> None:
    """Register a pool or change it; without options, show it.

    Options that are left out keep their values. A new pool, or one that was lost, needs --member or --no-members.
    """
    from streams.cxl.pool_registry import PoolChange, change_pool, lose_pool

    if members and no_members:
        raise click.UsageError("--member and --no-members contradict each other")
    new_members = worker_ids(tuple(sorted(set(members)))) if members or no_members else None
    change = PoolChange(new_members, latency_class, capacity_blocks, epoch)
    if lost and change != PoolChange():
        raise click.UsageError("--lost cannot be combined with other changes")
    pool = lose_pool(resolved.settings, pool_id) if lost else change_pool(resolved.settings, pool_id, change)
    click.echo(_pool_line(pool))


def _pool_line(pool: CxlPool) -> str:
    state = "lost" if pool.lost else f"members {', '.join(map(str, pool.members)) or 'none'}"
    capacity = "" if pool.capacity_blocks is None else f", capacity {pool.capacity_blocks} blocks"
    return f"pool {pool.pool_id}: epoch {pool.epoch}, {state}, latency class {pool.latency_class}{capacity}"


@cxl.command("transition")
@with_settings
@click.option("--worker-id", type=int, required=True, help="worker whose blocks change state")
@click.option("--dp-rank", type=int, default=0, show_default=True, help="its data-parallel rank")
@click.option("--event-id", type=int, default=0, show_default=True, help="a number shown in logs and dead letters")
@click.option(
    "--state",
    type=click.Choice(["local_gpu", "in_transit", "cxl_pooled", "evicted"]),
    required=True,
    help="the state that the blocks enter",
)
@click.option("--pool-id", default=None, help="the pool that they go to; required for in_transit")
@click.option(
    "--accessible-worker",
    "workers",
    type=int,
    multiple=True,
    help="a worker that can read the blocks; repeat for each  [default: all members of the pool]",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0.0, WAIT_MAX_S),
    default=None,
    metavar="SECONDS",
    help="wait at most this long for the agents' verdict, and print it",
)
@click.option("--force", is_flag=True, help="publish even if the pool is not registered or was lost")
@click.argument("hashes", type=int, nargs=-1, required=True)
def cxl_transition(
    resolved: Resolved,
    worker_id: int,
    dp_rank: int,
    event_id: int,
    state: str,
    pool_id: str | None,
    workers: tuple[int, ...],
    wait_s: float | None,
    force: bool,
    hashes: tuple[int, ...],
) -> None:
    """Publish that blocks, given by the engine's own HASHES, enter a state.

    The agents decide later whether the transition is legal. The exit status is 1 if hashes are unknown, or if --wait
    finds that the transition was refused, or if there is no verdict in time.
    """
    from streams.core.ids import DpRank, RankId
    from streams.cxl.events import state_changed
    from streams.engines.script_transitions import send_transition

    (owner,) = worker_ids((worker_id,))
    changed = state_changed(event_id, hashes, state, pool_id, worker_ids(workers))
    rank = RankId(owner, DpRank(dp_rank))
    sent = send_transition(resolved.settings, rank, changed, any_pool=force, wait_s=wait_s)
    n_sent = len(hashes) - len(sent.unknown)
    if n_sent:
        judged = "" if sent.verdict is not None else "; the agents judge it, and --wait prints their verdict"
        click.echo(f"sent: {n_sent} blocks of worker {worker_id} rank {dp_rank} to {state}{judged}")
    wrong = _verdict_lines(sent.verdict, wait_s or 0.0)
    if sent.unknown:
        wrong.append(f"{len(sent.unknown)} hashes are unknown for this rank: {' '.join(map(str, sent.unknown[:10]))}")
    if sent.verdict is not None and sent.verdict.applied:
        click.echo("applied")
    for line in wrong:
        click.echo(line, err=True)
    if wrong:
        raise SystemExit(1)


def _verdict_lines(verdict: TransitionVerdict | None, wait_s: float) -> list[str]:
    """What is wrong with a transition, one line each; empty if it was applied, or if --wait was not given."""
    from streams.engines.verdicts import VerdictStatus

    if verdict is None:
        return []
    lines = [f"refused: {reason}: {message}" for reason, message in verdict.refused]
    if verdict.status is VerdictStatus.PARKED:
        lines.append(
            f"not judged within {wait_s:g} s: it waits for the batch of kv-events that it follows, "
            "or for another transition that waits"
        )
    elif verdict.status is VerdictStatus.UNKNOWN:
        lines.append(f"not judged within {wait_s:g} s: no agent has read it; is a worker of this scope running?")
    return lines


COMMANDS = (cxl,)
