"""What is said about a replay: how much of everything there was, and which records that includes.

What lives here: the summary as a value, as JSON and as text. What must not: rebuilding.
"""

from __future__ import annotations

from typing import Any

from streams.replay.cuts import Cut, time_text
from streams.replay.rebuilding import Replay


def summary(replay: Replay) -> dict[str, Any]:
    """Count what the router knows. Loads and avoidances are those of the moment that is replayed."""
    router, cut = replay.router, replay.cut
    view = router.view
    fleet, counts = view.fleet, view.rank_counts()
    states = view.index.rank_states()
    with router.loads.locked() as loads:
        n_bookings = sum(load.requests for load in loads.ranks().values())
    return {
        "moment": time_text(cut.moment_ms),
        "moment_ms": cut.moment_ms,
        "records": replay.n_records,
        "bad_records": router.feeds.bad_records,
        "seconds": round(replay.seconds, 3),
        "ranks": {
            "registered": counts.registered,
            "indexed": len(states),
            "silent": counts.silent,
            "approximate": counts.approximate,
            "degraded": {str(reason): n for reason, n in sorted(counts.degraded.items())},
        },
        "blocks": sum(state.n_blocks for state in states),
        "labelled_records": view.facts.labelled()[0],
        "bookings": n_bookings,
        "pools": len(view.facts.pools()),
        "pooled_blocks": view.facts.n_pooled(),
        "workers": len(fleet.workers),
        "cordons": fleet.n_cordons,
        "avoidances": len(fleet.avoidances),
        "engine_metrics": len(fleet.engines.reports()),
        "offsets": offsets_of(cut),
    }


def offsets_of(cut: Cut) -> dict[str, dict[str, int]]:
    """The offsets of a cut by topic and partition, as --until takes them."""
    offsets: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(cut.ends.items()):
        offsets.setdefault(topic, {})[str(partition)] = offset
    return offsets


def as_text(values: dict[str, Any]) -> str:
    """A summary in lines for people."""
    ranks = values["ranks"]
    degraded = ", ".join(f"{n} degraded ({reason})" for reason, n in ranks["degraded"].items())
    trusted = ", ".join(filter(None, (f"{ranks['approximate']} approximate", degraded)))
    rate = values["records"] / values["seconds"] if values["seconds"] else 0.0
    rows = [
        ("as of", values["moment"]),
        ("read", f"{values['records']:,} records in {values['seconds']:,.1f} s, {rate:,.0f} per second"),
        ("ranks", f"{ranks['registered']} registered, {ranks['indexed']} with events, {trusted}"),
        ("blocks", f"{values['blocks']:,}, {values['labelled_records']:,} records with labels"),
        ("bookings", f"{values['bookings']:,}"),
        ("pools", f"{values['pools']}, with {values['pooled_blocks']:,} rows of blocks"),
        ("registry", f"{values['workers']} workers, {values['cordons']} cordons, {values['avoidances']} avoidances"),
        ("engine metrics", f"{values['engine_metrics']} ranks"),
    ]
    if values["bad_records"]:
        rows.append(("unusable", f"{values['bad_records']:,} records"))
    for topic, offsets in values["offsets"].items():
        rows.append((topic, " ".join(f"{partition}:{offset}" for partition, offset in offsets.items())))
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows)
