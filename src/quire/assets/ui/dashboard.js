// The dashboard: reads /debug/state and /metrics once a second and shows them.

import { showAdapters } from "./adapters.js";
import { call, keyProblem, offer, wireKey } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { LineChart } from "./chart.js";
import { CoreWatch, isAsleep } from "./core.js";
import { byId, count, duration, el, percent, plural, rate, setText, wireTheme } from "./dom.js";
import "./icons.js";
import { labelled, parse, Readings } from "./metrics.js";
import { RequestTables } from "./tables.js";
import { Timeline } from "./timeline.js";
import { inWords } from "./words.js";

const PERIOD_MS = 1000, TIMEOUT_MS = 15000, RATE_S = 4, LATENCY_S = 20, HITS_S = 60, OLD_S = 3;
const WRITTEN = "vllm:generation_tokens_total", READ = "vllm:prompt_tokens_total";
const TTFT = "vllm:time_to_first_token_seconds", ITL = "vllm:inter_token_latency_seconds";

const readings = new Readings();
const core = new CoreWatch();
let shownAt = performance.now(); // the moment of the figures
let lastEnded = 0, isHeld = false, keyAsked = false;

wireTheme(byId("theme-button"));
offer(byId("docs-link"));
const askKey = wireKey(byId("key-button"), () => {
  keyAsked = false;
  poll();
});
byId("pause-button").addEventListener("click", () => {
  isHeld = !isHeld;
  byId("pause-button").setAttribute("aria-pressed", String(isHeld));
  setText(byId("pause-button"), isHeld ? "Go on" : "Hold still");
});

const tiles = Object.fromEntries([
  ["written", "Writing"], ["read", "Reading"], ["running", "Running"], ["waiting", "Waiting"],
  ["cache", "KV cache in use"], ["hits", "Found in cache"], ["ttft", "First token after"], ["itl", "Each further one"],
].map(([name, label]) => {
  const value = el("p", { class: "value" }, "–"), note = el("p", { class: "note" });
  byId("tiles").append(el("div", { class: "panel tile", "data-tile": name }, el("p", { class: "label" }, label), value, note));
  return [name, { value, note }];
}));
function tile(name, value, unit, note) {
  tiles[name].value.replaceChildren(value, ...(unit ? [el("small", {}, unit)] : []));
  setText(tiles[name].note, note);
}

const charts = byId("charts");
const throughput = new LineChart(charts, {
  title: "Throughput", format: rate,
  what: "Tokens per second: written one after the other in answers, read many at once from prompts.",
  lines: [{ label: "written", variable: "--s1" }, { label: "read", variable: "--s2", dashed: true }],
});
const queue = new LineChart(charts, {
  title: "Requests", format: count, isCounted: true,
  what: "Running requests share each step of the model. Waiting ones queue for a place or for blocks.",
  lines: [{ label: "running", variable: "--s1" }, { label: "waiting", variable: "--s2", dashed: true }],
});
const ttft = new LineChart(charts, {
  title: "Time to first token (TTFT)", format: duration,
  what: "From a request's arrival to its first token. Half of the requests are below the first line, 19 of 20 below the second.",
  lines: [{ label: "median", variable: "--s1" }, { label: "95th percentile", variable: "--s2", dashed: true }],
});
const itl = new LineChart(charts, {
  title: "Time between tokens (ITL)", format: duration,
  what: "From one token of an answer to the next. The lines mean the same as in the chart beside it.",
  lines: [{ label: "median", variable: "--s1" }, { label: "95th percentile", variable: "--s2", dashed: true }],
});
const saturation = new LineChart(charts, {
  title: "How full it is", format: percent, max: 1,
  what: "Saturation. The resource whose line reaches the top holds new requests back: places, memory, or time to compute.",
  lines: [{ label: "places", variable: "--s1" }, { label: "KV cache", variable: "--s2", dashed: true },
    { label: "compute", variable: "--s3" }],
});
const hits = new LineChart(charts, {
  title: "Prefix cache", format: percent, max: 1,
  what: "Share of the prompt tokens of the last minute that were found in free or shared blocks, and not computed again.",
  lines: [{ label: "found", variable: "--s1" }],
});

let drafts = null; // the chart of speculation, where there is some
function showDrafts(time, now) {
  if (now.drafts === null) return;
  drafts ??= new LineChart(charts, {
    title: "Speculation", format: percent, max: 1,
    what: "Share of the guessed tokens of the last minute that were right. Wrong guesses cost a little time and change no answer.",
    lines: [{ label: "accepted", variable: "--s1" }],
  });
  drafts.push(time, [now.drafts.accepted]);
}

let outside = null; // the chart of what was loaded, where there is a store or peers
function showOutside(time, now) {
  if (now.outside === null) return;
  outside ??= new LineChart(charts, {
    title: "Loaded prompt tokens", format: percent, max: 1,
    what: "Share of the prompt tokens of the last minute whose keys and values were read from a store or taken from another engine.",
    lines: [{ label: "disk", variable: "--s1" }, { label: "other engines", variable: "--s2", dashed: true },
      { label: "elsewhere", variable: "--s3" }],
  });
  outside.push(time, now.outside);
}

const map = new BlockMap(byId("map"), { detail: byId("map-detail"), bar: byId("bar"), legend: byId("map-legend") });
const timeline = new Timeline(byId("timeline"), { detail: byId("line-detail"), legend: byId("line-legend") });
const tables = new RequestTables(async (id) => {
  await call("abort_requests", { body: { request_ids: [id] } });
});

/** Returns what became of the drafts of the last minute; null without speculation. */
function measureDrafts() {
  const [steps, guessed, right] = ["drafts", "draft_tokens", "accepted_tokens"].map((name) =>
    readings.growth(`vllm:spec_decode_num_${name}_total`, HITS_S));
  if (steps === null) return null;
  return { accepted: guessed ? right / guessed : null, length: steps ? 1 + right / steps : null };
}

/** Returns the shares of the prompt tokens of the last minute that came from disk, other engines and elsewhere; null
 * without a store and peers. */
function measureOutside() {
  if (!readings.last.has("quire_kv_loads_total")) return null;
  const read = readings.growth(READ, HITS_S);
  const found = readings.growthBy("vllm:prompt_tokens_cached_by_source_total", "source", HITS_S);
  const all = [["disk"], ["p2p"], ["host", "external_unspecified"]];
  return all.map((sources) => (read ? sources.reduce((sum, source) => sum + (found.get(source) ?? 0), 0) / read : null));
}

/** Computes the present figures; null where there is no data. */
function measure(state) {
  const queries = readings.growth("vllm:prefix_cache_queries_total", HITS_S);
  const found = readings.growth("vllm:prefix_cache_hits_total", HITS_S);
  const usable = Math.max(1, state.kv_cache.total - 1);
  return {
    written: readings.rate(WRITTEN, RATE_S), read: readings.rate(READ, RATE_S),
    ttft: [0.5, 0.95].map((q) => readings.quantile(TTFT, q, LATENCY_S)),
    itl: [0.5, 0.95].map((q) => readings.quantile(ITL, q, LATENCY_S)),
    hits: queries ? found / queries : null,
    drafts: measureDrafts(), outside: measureOutside(),
    places: state.running / state.max_num_seqs,
    cache: (usable - state.kv_cache.free) / usable,
    compute: labelled(readings.last, "quire_saturation_by_resource", "resource", "compute"),
    preempted: readings.growth("vllm:num_preemptions_total", HITS_S),
    isAsleep: isAsleep(readings.last),
    restarts: readings.growthBy("quire_engine_restarts_total", "cause", HITS_S),
  };
}

function show(state) {
  const now = measure(state), usable = state.kv_cache.total - 1;
  setText(byId("model"), `${state.model} · Quire ${state.version}`);
  byId("model").title = byId("model").textContent;
  setText(byId("block-size"), count(state.block_size));
  tile("written", rate(now.written), "", "tokens/s, of answers");
  tile("read", rate(now.read), "", "tokens/s, of prompts (cached ones too)");
  tile("running", count(state.running), `of ${count(state.max_num_seqs)}`, "answered together, in one batch");
  tile("waiting", count(state.waiting), "", "for a place, or for blocks");
  tile("cache", percent(now.cache), "", `${count(usable - state.kv_cache.free)} of ${count(usable)} blocks`);
  tile("hits", percent(now.hits), "", "of prompt tokens, last minute");
  tile("ttft", duration(now.ttft[0]), "", `1 in 20 above ${duration(now.ttft[1])}`);
  tile("itl", duration(now.itl[0]), "", `1 in 20 above ${duration(now.itl[1])}`);
  throughput.push(state.time, [now.written, now.read]);
  queue.push(state.time, [state.running, state.waiting]);
  ttft.push(state.time, now.ttft);
  itl.push(state.time, now.itl);
  saturation.push(state.time, [now.places, now.cache, now.compute]);
  hits.push(state.time, [now.hits]);
  showDrafts(state.time, now);
  showOutside(state.time, now);
  map.update(state.kv_cache, state.requests, state.block_size);
  timeline.update(state);
  tables.update(state);
  showAdapters(readings, RATE_S);
  say(inWords(state, now));
}

/** Shows sentences of the same moment as the figures. A screen reader reads out only the urgent ones. */
function say(sentences, { isUrgent = false } = {}) {
  byId("words").setAttribute("aria-live", isUrgent ? "polite" : "off");
  setText(byId("words"), sentences);
}

/** Shows whether the figures are of this moment: "live", or "late" or "lost", and then they are dimmed. */
function pulse(kind) {
  byId("pulse").className = `pulse ${kind}`;
  document.querySelector("main").classList.toggle("stale", kind !== "live");
}

function fail(error) {
  if (error.status === 401) {
    pulse("lost");
    say(`${keyProblem()} Give one with the API key button.`, { isUrgent: true });
    if (!keyAsked) askKey(keyProblem());
    keyAsked = true;
  } else if (error.status === 503 || error.name === "TimeoutError") {
    pulse("late");
    say(core.trouble || (error.status ? error.message : "The server is slow to answer."), { isUrgent: true });
  } else if (error.status === 404) {
    pulse("lost");
    say("This server shows no state (it was started with --disable-ui, or is not Quire).", { isUrgent: true });
  } else {
    pulse("lost");
    if (!error.status) core.lose();
    say(`${error.message} ${error.nextStep ?? ""}`, { isUrgent: true });
  }
}

/** Says how old the figures are, once they are not of this moment. */
function showAge() {
  const seconds = Math.floor((performance.now() - shownAt) / 1000);
  byId("age").hidden = seconds < OLD_S;
  setText(byId("age"), `${isHeld ? "Held still: the" : "The"} figures below are ${duration(seconds).replace(/\.0+ /, " ")} old.`);
  if (seconds >= OLD_S && !isHeld) document.querySelector("main").classList.add("stale");
}
setInterval(showAge, 500);

async function readMetrics(time) {
  try {
    const text = await (await call("metrics", { accept: "text/plain", signal: AbortSignal.timeout(TIMEOUT_MS) })).text();
    const metrics = parse(text);
    readings.add(time, metrics);
    if (core.read(metrics)) return;
    pulse("late"); // the state comes once the core is back
    say(core.trouble, { isUrgent: true });
  } catch (error) {
    if (error.status !== 404) throw error; // 404: started with --disable-log-stats; the rest works without
  }
}

async function poll() {
  try {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const [state] = await Promise.all([
      call(`debug/state?after=${lastEnded}`, { signal }).then((response) => response.json()),
      readMetrics(performance.now() / 1000),
    ]);
    lastEnded = state.ended.at(-1)?.number ?? lastEnded;
    if (core.trouble) return; // the metrics are later than the state
    pulse("live");
    show(state);
    shownAt = performance.now();
    showAge();
  } catch (error) {
    fail(error);
  }
}

async function run() {
  for (;;) {
    const start = performance.now();
    if (!isHeld && !document.hidden) await poll();
    await new Promise((resolve) => setTimeout(resolve, Math.max(200, PERIOD_MS - (performance.now() - start))));
  }
}
run();
