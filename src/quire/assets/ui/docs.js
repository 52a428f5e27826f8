// The API page: reads openapi.json and shows every operation with its fields and a curl command.

import { BASE, call, getKey } from "./api.js";
import { byId, el, plural, setText, wireTheme } from "./dom.js";
import { accessInWords, curlOf, matches, operationsOf, partsOf, resolve, typeInWords } from "./openapi.js";

const KEY_PAUSE_MS = 300;
const search = byId("search"), keyBox = byId("key");
let api = null, needsKey = false, model = null, sections = [];

wireTheme(byId("theme-button"));

/** Shows one field or parameter and its content. `above` are the enclosing objects. */
function field(name, schema, { isRequired = false, note = "", above = [] } = {}) {
  const marks = [isRequired ? "required" : null, schema["x-support"] ?? null].filter(Boolean);
  const hasDefault = !isRequired && schema.default !== undefined && schema.default !== null;
  const parts = [...partsOf(api, schema)].filter(([part]) => !above.includes(part));
  return el("li", {},
    el("p", { class: "field" }, el("code", { class: "field-name" }, name), " ",
      ...marks.flatMap((mark) => [el("span", { class: "mark" }, mark), " "]),
      el("span", { class: "type" }, typeInWords(schema)),
      hasDefault ? el("span", { class: "type" }, " · default ", el("code", {}, JSON.stringify(schema.default))) : null),
    note || schema.description ? el("p", { class: "hint" }, note || schema.description) : null,
    ...parts.map(([part, inner]) => folded(part, () => fields(inner, [...above, part]))));
}

/** Makes a <details> whose content is made when it is first opened. */
function folded(title, make) {
  const details = el("details", {}, el("summary", {}, title));
  details.addEventListener("toggle", () => details.append(make()), { once: true });
  return details;
}

function fields(schema, above = []) {
  const required = schema.required ?? [], names = Object.keys(schema.properties ?? {});
  const inOrder = [...names.filter((name) => required.includes(name)), ...names.filter((name) => !required.includes(name))];
  return el("ul", { class: "fields" },
    ...inOrder.map((name) => field(name, schema.properties[name], { isRequired: required.includes(name), above })));
}

function answers(operation) {
  return el("ul", { class: "fields" }, ...Object.entries(operation.responses ?? {}).map(([status, answer]) => {
    const schema = answer.content?.["application/json"]?.schema;
    const parts = schema ? [...partsOf(api, schema)] : [];
    return el("li", {}, el("p", { class: "field" }, el("code", { class: "field-name" }, status), " ", answer.description),
      ...parts.map(([part, inner]) => folded(part, () => fields(inner, [part]))));
  }));
}

function example(one) {
  const code = el("code", { tabindex: "0", role: "region", "aria-label": `Example with curl: ${one.method} ${one.path}` },
    curlOf(one, { base: BASE.href, needsKey, model }));
  const said = el("span", { class: "hint", role: "status" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      setText(said, "Copied.");
    } catch { // no clipboard: not HTTPS, or not allowed
      getSelection().selectAllChildren(code);
      setText(said, "It is selected; Ctrl+C copies it.");
    }
  };
  return el("div", {}, el("pre", { class: "example" }, code),
    el("div", { class: "row" }, el("button", { type: "button", class: "small", onclick: copy }, "Copy"), said));
}

function inside(one) {
  const { operation, schema } = one, rows = [el("p", { class: "hint" }, accessInWords(operation))];
  if (operation.parameters) {
    rows.push(el("h4", {}, "Parameters"), el("ul", { class: "fields" }, ...operation.parameters.map((parameter) =>
      field(parameter.name, parameter.schema, { isRequired: parameter.required, note: `In the ${parameter.in}. ${parameter.description ?? ""}` }))));
  }
  if (schema) rows.push(el("h4", {}, "Body"), el("p", { class: "hint" }, schema.description ?? ""), fields(schema));
  rows.push(el("h4", {}, "Answers"), answers(operation), el("h4", {}, "Example"), example(one));
  return el("div", { class: "inside" }, ...rows);
}

function show() {
  const operations = operationsOf(api), tags = new Set([...(api.tags ?? []).map((tag) => tag.name), ...operations.map((one) => one.tag)]);
  sections = [...tags].map((tag) => {
    const entries = operations.filter((one) => one.tag === tag).map((one) => {
      const details = folded(el("span", { class: "operation-title" }, el("b", { class: "method" }, one.method), " ",
        el("code", {}, one.path), " ", el("span", { class: "hint" }, one.operation.summary)), () => inside(one));
      details.id = one.operation.operationId;
      details.classList.add("operation");
      return { details, text: one.text };
    });
    return { entries, node: el("section", { class: "panel", "aria-label": tag }, el("h2", {}, tag), ...entries.map((entry) => entry.details)) };
  });
  byId("operations").replaceChildren(...sections.map((section) => section.node));
  for (const link of document.querySelectorAll("nav a[hidden]")) link.hidden = !api.paths[`/${link.getAttribute("href")}`];
  setText(byId("version"), `${api.info.title} ${api.info.version}${model ? ` · ${model}` : ""}`);
  filter();
  openTarget();
}

function filter() {
  let shown = 0, all = 0;
  for (const { entries, node } of sections) {
    let here = 0;
    for (const { details, text } of entries) {
      details.hidden = !matches(text, search.value.trim());
      here += Number(!details.hidden);
    }
    node.hidden = !here;
    shown += here;
    all += entries.length;
  }
  setText(byId("found"), shown === all ? `${plural(all, "operation")}.` : `${shown} of ${plural(all, "operation")}.`);
}

function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  if (!target?.classList.contains("operation")) return;
  target.open = true;
  target.scrollIntoView();
  target.firstElementChild.focus();
}

let numLoads = 0;
/** Loads the document again for each key. Only the latest answer counts. */
async function load() {
  const number = ++numLoads, key = keyBox.value.trim() || getKey();
  try {
    const found = await (await call("openapi.json", { key })).json();
    const models = found.paths["/v1/models"] ? await (await call("v1/models", { key })).json() : { data: [] };
    if (number !== numLoads) return;
    [api, model, needsKey] = [found, models.data[0]?.id ?? null, needsKey || key !== ""];
    byId("notice").hidden = true;
    show();
  } catch (error) {
    if (number !== numLoads) return;
    needsKey ||= error.status === 401;
    setText(byId("found"), "");
    setText(byId("notice"), error.status === 401 ? (keyBox.value ? "The server does not accept this key." : "The server asks for a key.") : error.message);
    byId("notice").hidden = false;
    if (error.status === 401) keyBox.focus();
  }
}

let pause = 0;
keyBox.addEventListener("input", () => {
  clearTimeout(pause);
  pause = setTimeout(load, KEY_PAUSE_MS);
});
search.addEventListener("input", filter);
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  if (document.activeElement === keyBox) load();
});

const summaries = () => [...document.querySelectorAll(".operation:not([hidden]) > summary")];
document.addEventListener("keydown", (event) => {
  const here = document.activeElement, isTyping = here.matches("input, textarea");
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "/" && !isTyping) search.focus();
  else if (event.key === "Escape" && here === search && search.value) {
    search.value = "";
    filter();
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && (here === search || here.matches(".operation > summary"))) {
    const all = summaries(), next = all.indexOf(here) + (event.key === "ArrowDown" ? 1 : -1);
    (next < 0 ? search : all[Math.min(next, all.length - 1)])?.focus();
  } else return;
  event.preventDefault();
});
addEventListener("hashchange", openTarget);
load();
