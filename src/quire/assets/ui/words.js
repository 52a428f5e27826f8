// The figures as sentences, for readers who have never seen an inference engine.

import { inWords as causesInWords } from "./core.js";
import { count, duration, percent, plural, rate } from "./dom.js";

/** `now` are the measures of dashboard.js. */
export function inWords(state, now) {
  return [restarts(now), activity(state, now), queueing(state, now), latency(now), speculation(now), memory(state, now)].filter(Boolean).join(" ");
}

function restarts(now) {
  if (!now.restarts.size) return "";
  return `In the last minute the engine core ${causesInWords(now.restarts)} and was started again; its requests went on where they were.`;
}

function activity(state, now) {
  if (now.isAsleep) return "The engine is asleep and has given back memory: POST /wake_up wakes it.";
  if (state.paused !== "no") return `The engine is paused: ${state.paused}.`;
  if (!state.running && !state.waiting) return "The engine is idle: there are no requests.";
  const speed = now.written > 0.5 ? ` and writes ${rate(now.written)} tokens per second in all` : "";
  if (!state.running) return "Nothing is running yet.";
  if (state.running === 1) return `The engine answers one request${speed.replace(" in all", "")}.`;
  return `The engine answers ${count(state.running)} requests at the same time${speed}.`;
}

function queueing(state, now) {
  if (now.preempted > 0) {
    return `Its memory is too small for all of them: in the last minute ${plural(now.preempted, "time")} a request had to give up its blocks and start over.`;
  }
  if (!state.waiting) return state.running ? "No request has to wait." : "";
  const verb = state.waiting === 1 ? "waits" : "wait";
  if (now.isAsleep) return "The engine is asleep and has given back memory: POST /wake_up wakes it.";
  if (state.paused !== "no") return `${plural(state.waiting, "request")} ${verb} for it to go on.`;
  if (state.running >= state.max_num_seqs) return `${count(state.waiting)} more ${verb}: all ${count(state.max_num_seqs)} places are taken.`;
  if (now.cache > 0.9) return `${count(state.waiting)} more ${verb} for memory: the KV cache is nearly full.`;
  return `${count(state.waiting)} more ${verb} for their turn: long prompts are being read.`;
}

function latency(now) {
  if (now.ttft[0] === null) return "";
  const further = now.itl[0] === null ? "" : `, then one more every ${duration(now.itl[0])}`;
  return `A request gets its first token after about ${duration(now.ttft[0])}${further}.`;
}

function speculation(now) {
  if (!now.drafts?.length) return "";
  return `Of the tokens that were guessed in the last minute ${percent(now.drafts.accepted)} were right: a step that verifies guesses yields ${now.drafts.length.toFixed(1)} tokens of a request.`;
}

function memory(state, now) {
  const hits = now.hits > 0.005 ? ` ${percent(now.hits)} of all prompt tokens were found there and did not have to be computed.` : "";
  return `The KV cache, where the engine keeps what it has computed for its requests, is ${percent(now.cache)} in use.${hits}`;
}
