// The live page: reads GET /live every two seconds and draws it. It keeps no numbers of its own, so a reload shows the
// same minutes again.
"use strict";

const MODES = ["exact", "approximate", "degraded", "fallback"];
const TOKEN = "kvstreams-token";
const EVERY_MS = 2000;
const LAG_SHOWN_AS_BEHIND_S = 5;
const DECISIONS_SHOWN = 8;
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);

// -- numbers ----------------------------------------------------------------------------------------------------------

const NONE = "–";

function short(value, digits = 0) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return value < 1000 ? value.toFixed(value < 100 ? digits : 0) : Math.round(value).toLocaleString("en");
}

const percent = (value) => (value === null || value === undefined ? NONE : Math.round(100 * value) + " %");
const seconds = (value) => (value === null || value === undefined ? NONE : value.toFixed(value < 10 ? 1 : 0) + " s");
const last = (values) => (values.length ? values[values.length - 1] : null);
const lastKnown = (values) => last(values.filter((value) => value !== null));
const sum = (values) => values.reduce((total, value) => total + value, 0);

// The mean of the last ten seconds: a single sample of a quiet router jumps between 0 and its only request.
function recent(values) {
  const known = values.slice(-5).filter((value) => value !== null);
  return known.length ? sum(known) / known.length : null;
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// A chart is as wide as the time from the oldest sample to the newest one, so that it is full also if a router has run
// for a minute.
const WIDTH = 300;
const HEIGHT = 100;
let newestS = 0;
let spanS = 1;
const x = (age) => (WIDTH * (1 - (age - newestS) / spanS)).toFixed(1);

function duration(s) {
  if (s < 90) return Math.round(s) === 1 ? "1 second" : `${Math.round(s)} seconds`;
  return `${Math.round(s / 60)} minutes`;
}

function canvas(label) {
  return shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
}

function stretches(ages, values) {
  const found = [[]];
  values.forEach((value, i) => {
    if (value === null) found.push([]);
    else found[found.length - 1].push([ages[i], value]);
  });
  // A single point is drawn as a dot: a line from it to itself, with round ends.
  return found.filter((points) => points.length).map((points) => (points.length > 1 ? points : [points[0], points[0]]));
}

// top: the value at the upper edge. least: the edge is at least that high, so that what is normal looks calm.
function drawLines(holder, label, ages, series, { top, least = 1e-9 }) {
  const greatest = top ?? Math.max(least, ...series.flat().filter((value) => value !== null)) * 1.08;
  const y = (value) => (HEIGHT - (Math.min(value, greatest) / greatest) * HEIGHT).toFixed(1);
  const drawing = canvas(label);
  series.forEach((values, number) => {
    for (const points of stretches(ages, values)) {
      const path = points.map(([age, value]) => `${x(age)},${y(value)}`).join(" ");
      if (number === 0) {
        const [first, end] = [x(points[0][0]), x(points[points.length - 1][0])];
        drawing.append(shape("polygon", { class: "area", points: `${first},${HEIGHT} ${path} ${end},${HEIGHT}` }));
      }
      drawing.append(shape("polyline", { class: number ? "line second" : "line", points: path }));
    }
  });
  holder.replaceChildren(drawing);
}

function drawModes(holder, label, ages, modes) {
  const drawing = canvas(label);
  const totals = ages.map((_, i) => sum(MODES.map((mode) => modes[mode][i])));
  const greatest = Math.max(1e-9, ...totals) * 1.05;
  const below = ages.map(() => 0);
  for (const mode of MODES) {
    if (!modes[mode].some((rate) => rate > 0)) continue;
    const point = (i) => `${x(ages[i])},${(HEIGHT - (below[i] / greatest) * HEIGHT).toFixed(1)}`;
    const floor = ages.map((_, i) => point(i)).reverse();
    ages.forEach((_, i) => (below[i] += modes[mode][i]));
    drawing.append(shape("polygon", { class: mode, points: [...ages.map((_, i) => point(i)), ...floor].join(" ") }));
  }
  holder.replaceChildren(drawing);
  at("modes-from").textContent = `${duration(spanS)} ago`;
  at("modes-top").textContent = `at most ${short(Math.max(0, ...totals), 1)} per second`;
}

// -- tiles ------------------------------------------------------------------------------------------------------------

const TILES = [
  {
    id: "decisions",
    title: "Decisions per second",
    value: (s) => short(recent(s.decisions_per_s), 1),
    series: (s) => [s.decisions_per_s],
  },
  { id: "hits", title: "Hit share of prompts", value: (s) => percent(recent(s.hit_rate)), series: (s) => [s.hit_rate], top: 1 },
  {
    id: "agreed",
    title: "Exact answers that engines confirmed",
    value: (s, router) => (router.agreed_share === null ? NONE : `${(100 * router.agreed_share).toFixed(1)} %`),
    small: (s, router) => {
      if (router.agreed_share === null) return "no engine has reported yet";
      return router.audited.over ? `${short(router.audited.over)} found less` : "none found less";
    },
    series: (s) => [s.agreed_share],
    top: 1,
  },
  {
    id: "latency",
    title: "Time per decision",
    value: (s) => (lastKnown(s.latency_ms_p50) === null ? NONE : `${short(lastKnown(s.latency_ms_p50), 2)} ms`),
    small: (s) => {
      if (lastKnown(s.latency_ms_p50) === null) return "no decision yet";
      return `p50, ${short(lastKnown(s.latency_ms_p99), 2)} ms p99`;
    },
    series: (s) => [s.latency_ms_p50, s.latency_ms_p99],
  },
  {
    id: "lag",
    title: "View lag, slowest partition",
    value: (s) => seconds(last(s.lag_s)),
    series: (s) => [s.lag_s],
    least: 1,
  },
  {
    id: "requests",
    title: "Requests in flight",
    value: (s) => short(last(s.requests)),
    small: (s) => `${short(last(s.queue))} waiting, ${short(last(s.decode_blocks))} blocks`,
    series: (s) => [s.requests, s.queue],
  },
  {
    id: "balance",
    title: "Imbalance of blocks in use",
    value: (s) => short(last(s.imbalance), 2),
    small: () => "0 is even",
    series: (s) => [s.imbalance],
    least: 1,
  },
  {
    id: "gaps",
    title: "Gaps in event streams",
    value: (s) => short(sum(s.gaps.filter((n) => n > 0))),
    small: () => `in ${duration(spanS)}`,
    series: (s) => [s.gaps],
  },
];

function drawTiles(samples, router) {
  const holder = at("tiles");
  newestS = last(samples.age_s) ?? 0;
  spanS = Math.max(1, (samples.age_s[0] ?? 0) - newestS);
  at("now-heading").textContent = `Last ${duration(spanS)}`;
  for (const tile of TILES) {
    let card = at(`tile-${tile.id}`);
    if (!card) {
      card = element(
        "article",
        { class: "tile", id: `tile-${tile.id}` },
        element("h3", {}, tile.title),
        element("p", { class: "value" }),
        element("div", { class: "chart" }),
      );
      holder.append(card);
    }
    const value = tile.value(samples, router);
    const small = tile.small ? tile.small(samples, router) : "";
    card.querySelector(".value").replaceChildren(value, " ", element("small", {}, small));
    const label = `${tile.title} over the last ${duration(spanS)}; now ${value} ${small}`.trim();
    drawLines(card.querySelector(".chart"), label, samples.age_s, tile.series(samples), tile);
  }
}

// -- the rest of the page ---------------------------------------------------------------------------------------------

function drawLegend(samples) {
  const totals = MODES.map((mode) => sum(samples.modes[mode]));
  const all = sum(totals);
  const shares = MODES.map((mode, i) => [mode, all ? percent(totals[i] / all) : NONE]);
  at("modes-legend").replaceChildren(
    ...shares.map(([mode, share]) => element("li", { class: mode }, `${mode} `, element("strong", {}, share))),
  );
  return shares.map(([mode, share]) => `${mode} ${share}`).join(", ");
}

function bar(text, share) {
  const made = element("span", { class: "bar" }, text);
  made.style.setProperty("--share", `${(100 * Math.min(Math.max(share ?? 0, 0), 1)).toFixed(0)}%`);
  return made;
}

const number = (...content) => element("td", { class: "number" }, ...content);
const roomy = (...content) => element("td", { class: "number roomy" }, ...content);

function workerRow(worker, most, explanations) {
  const state = element("span", { class: `state ${worker.state}` }, worker.state.replaceAll("_", " "));
  const why = worker.reason ?? worker.state;
  if (explanations[why]) {
    const text = worker.reason ? worker.reason.replaceAll("_", " ") : "why";
    state.append(" ", element("a", { href: `#why-${why}` }, text));
  }
  const name = worker.ranks > 1 ? `${worker.worker_id} (${worker.ranks} ranks)` : worker.worker_id;
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, name),
    element("td", { class: "roomy model" }, worker.model),
    element("td", { class: "wrap" }, state),
    number(short(worker.requests)),
    roomy(bar(short(worker.prefill_tokens), worker.prefill_tokens / Math.max(most.prefill_tokens, 1))),
    number(bar(short(worker.decode_blocks), worker.decode_blocks / Math.max(most.decode_blocks, 1))),
    roomy(bar(percent(worker.cache_usage), worker.cache_usage)),
    number(bar(percent(worker.hit_rate), worker.hit_rate)),
  );
}

// Workers arrive in order of their load. Rows in order of their ids stay where they are while someone reads them.
function drawWorkers(workers, leftOut, explanations) {
  const most = {
    prefill_tokens: Math.max(0, ...workers.map((worker) => worker.prefill_tokens)),
    decode_blocks: Math.max(0, ...workers.map((worker) => worker.decode_blocks)),
  };
  const inOrder = [...workers].sort((a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
  at("workers").replaceChildren(...inOrder.map((worker) => workerRow(worker, most, explanations)));
  at("workers-empty").hidden = workers.length > 0;
  at("workers-more").hidden = !leftOut;
  at("workers-more").textContent = `${leftOut} more workers have fewer requests in flight and are not shown.`;
}

function drawPools(pools) {
  at("pools").replaceChildren(
    ...pools.map((pool) => {
      const name = pool.role === "both" ? pool.model : `${pool.model} (${pool.role})`;
      const wanted = `${short(pool.replicas)} replicas, ${pool.replicas_wanted.toFixed(1)} wanted`;
      const facts = `saturation ${percent(pool.saturation)} · backlog ${short(pool.backlog_ms)} ms · ${wanted}`;
      return element("li", {}, element("strong", {}, name), " ", facts);
    }),
  );
}

// Pools of memory that workers load blocks from: CXL memory, and what servers of LMCache have.
function drawMemoryPools(pools) {
  at("memory").hidden = !pools.length;
  at("memory-pools").replaceChildren(
    ...pools.map((pool) => {
      const blocks = pool.capacity_blocks ? `${short(pool.blocks)} of ${short(pool.capacity_blocks)}` : short(pool.blocks);
      const speed = pool.gb_per_s ? `${short(pool.gb_per_s)} GB/s` : "not used";
      const workers = `${short(pool.members)} worker${pool.members === 1 ? "" : "s"}`;
      const facts = `${pool.latency_class}, ${speed} · ${blocks} blocks · ${workers}`;
      return element("li", {}, element("strong", {}, pool.pool_id), " ", facts);
    }),
  );
}

// Drawn only when they change, so that a link to one keeps its target.
function drawExplanations(explanations) {
  const holder = at("explanations");
  const names = Object.keys(explanations);
  if (holder.dataset.names === names.join()) return;
  holder.dataset.names = names.join();
  holder.hidden = !names.length;
  holder.replaceChildren(
    ...names.flatMap((name) => [
      element("dt", { id: `why-${name}`, tabindex: -1 }, name.replaceAll("_", " ")),
      element("dd", {}, explanations[name].meaning, " ", element("strong", {}, "What to do: "), explanations[name].remedy),
    ]),
  );
}

// A term of a policy of another package has only its name.
function term(name, value, meanings) {
  const number = value === null ? NONE : signed(value);
  return meanings[name] ? `${number} ${meanings[name]}` : `${name.replaceAll("_", " ")} ${number}`;
}

const signed = (value) => (value < 0 ? "−" : "") + short(Math.abs(value), Number.isInteger(value) || Math.abs(value) >= 10 ? 0 : 1);
const rank = (choice) => `${choice.worker_id}/${choice.dp_rank}`;

function decisionRows(decision, meanings) {
  const best = decision.next_best;
  const terms = Object.entries(decision.terms).filter(([, value]) => value === null || Math.abs(value) >= 0.05);
  const held = `${short(decision.overlap_blocks)} of ${short(decision.request_blocks)}`;
  const difference = best && best.cost - decision.cost;
  const unit = decision.router_mode === "expected-time" ? " ms" : "";
  const mode = element("span", { class: `state ${decision.mode}` }, decision.mode);
  if (decision.reason) mode.append(" ", element("small", {}, decision.reason.replaceAll("_", " ")));
  const alone = decision.candidates > 1 ? NONE : "only candidate";
  return [
    element(
      "tr",
      {},
      element("td", {}, `${seconds(decision.age_s)} ago`),
      element("th", { scope: "row" }, rank(decision)),
      number(bar(held, decision.overlap_blocks / Math.max(decision.request_blocks, 1))),
      roomy(short(decision.load_blocks)),
      number(signed(decision.cost) + unit),
      roomy(best ? `${rank(best)}: ${difference < 0 ? "" : "+"}${signed(difference)}${unit}` : alone),
      element("td", { class: "roomy" }, mode),
    ),
    element(
      "tr",
      { class: "terms" },
      element("td", { colspan: 7 }, terms.map(([name, value]) => term(name, value, meanings)).join(" · ") || "all terms are 0"),
    ),
  ];
}

function drawDecisions(decisions, meanings) {
  const rows = decisions.slice(0, DECISIONS_SHOWN).flatMap((decision) => decisionRows(decision, meanings));
  at("decisions").replaceChildren(...rows);
  at("decisions-empty").hidden = decisions.length > 0;
}

function drawPartitions(partitions) {
  at("partitions").replaceChildren(
    ...partitions.map(({ partition, lag_s, lag_records }) => {
      const behind = lag_s === null || lag_s > LAG_SHOWN_AS_BEHIND_S;
      const records = lag_records === null ? "unknown" : `${short(lag_records)} record${lag_records === 1 ? "" : "s"}`;
      return element("li", behind ? { class: "behind" } : {}, `partition ${partition}`, element("strong", {}, seconds(lag_s)), records);
    }),
  );
}

function setStatus(state, text, notice = "") {
  const status = at("status");
  if (status.textContent !== text) status.textContent = text; // a screen reader announces changes only
  status.dataset.state = state;
  at("notice").hidden = !notice;
  at("notice").textContent = notice;
  document.body.classList.toggle("stale", state === "failed");
}

function draw(live) {
  const { router, samples } = live;
  const parts = [`mode ${router.router_mode}`, `${short(router.index_blocks)} blocks indexed`];
  if (router.dead_letters) parts.push(`${short(router.dead_letters)} dead letters since its start`);
  parts.push(`id ${router.id.slice(0, 8)}`);
  at("about").textContent = parts.join(" · ");
  if (router.not_ready_because) setStatus("waiting", "Not ready", router.not_ready_because);
  else if (!router.bookings_in_sync)
    setStatus("waiting", "Degraded", "Kafka is away: this router does not see the bookings of other routers.");
  else setStatus("ready", "Ready");
  drawTiles(samples, router);
  const shares = `Shares of modes over the last ${duration(spanS)}: ${drawLegend(samples)}`;
  drawModes(at("modes-chart"), shares, samples.age_s, samples.modes);
  drawPools(live.pools);
  drawMemoryPools(live.memory_pools);
  drawExplanations(live.explanations);
  drawWorkers(live.workers, live.workers_left_out, live.explanations);
  drawDecisions(live.decisions, live.term_meanings);
  drawPartitions(live.partitions);
}

// -- reading ----------------------------------------------------------------------------------------------------------

async function refresh() {
  const token = sessionStorage.getItem(TOKEN);
  let answer;
  try {
    answer = await fetch("live", {
      cache: "no-store",
      headers: token ? { Authorization: `Bearer ${token}` } : {},
      signal: AbortSignal.timeout(5 * EVERY_MS),
    });
  } catch {
    setStatus("failed", "No answer", "The router does not answer. The numbers below are the last ones that it sent.");
    return;
  }
  const refused = answer.status === 401 || answer.status === 403;
  at("token-form").hidden = !refused;
  if (refused) {
    setStatus("waiting", "Token required", token ? "The router refused this token." : "");
    return;
  }
  if (!answer.ok) {
    const error = await answer.json().catch(() => null);
    setStatus("failed", `Error ${answer.status}`, error?.error?.message ?? error?.reason ?? "");
    return;
  }
  draw(await answer.json());
}

at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, at("token").value.trim());
  at("token").value = "";
  void refresh();
});

async function keepReading() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void refresh();
});

void keepReading();
