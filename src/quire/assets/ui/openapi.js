// An OpenAPI document in words: types, bounds, access, and curl commands.

const BOUNDS = [["exclusiveMinimum", ">"], ["minimum", "≥"], ["exclusiveMaximum", "<"], ["maximum", "≤"]];
const ACCESS = {
  open: "Open to all, without a key.",
  metrics: "Open to all; with --protect-metrics an API key is needed.",
  key: "Needs an API key if the server has any.",
  admin: "For administrators: on the admin listener, with an API key if the server has any.",
};

const UNBOUNDED = 1e15; // a larger bound is that of 64 bits
const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 17 });
const atMost = (schema, name) => (name in schema ? ` (≤ ${number(schema[name])})` : "");

export const accessInWords = (operation) => ACCESS[operation["x-access"]] ?? "";

/** Returns the schema that a reference names, and the name; any other schema unchanged. */
export function resolve(document, schema) {
  const name = schema.$ref?.split("/").at(-1);
  return name === undefined ? { schema } : { name, schema: document.components.schemas[name] };
}

/** Describes a schema's type and bounds. */
export function typeInWords(schema) {
  if (schema.anyOf) return schema.anyOf.map(typeInWords).join(" or ");
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (Array.isArray(schema.type)) return schema.type.join(" or ");
  if (schema.type === "array") return `list${atMost(schema, "maxItems")} of ${schema.items ? typeInWords(schema.items) : "anything"}`;
  if (schema.type === "object") return `object${atMost(schema, "maxProperties")}`;
  if (schema.type === "string") return `string${atMost(schema, "maxLength")}`;
  const bounds = BOUNDS.filter(([name]) => Math.abs(schema[name]) < UNBOUNDED)
    .map(([name, sign]) => `${sign} ${number(schema[name])}`);
  return (schema.type ?? "anything") + (bounds.length ? ` (${bounds.join(", ")})` : "");
}

/** Returns the objects with fields in a schema, by name. */
export function partsOf(document, schema) {
  if (schema.$ref) {
    const { name, schema: target } = resolve(document, schema);
    return target?.properties ? new Map([[name, target]]) : new Map();
  }
  const inner = [...(schema.anyOf ?? []), schema.items, schema.additionalProperties].filter((one) => one && typeof one === "object");
  return new Map(inner.flatMap((one) => [...partsOf(document, one)]));
}

/** Returns all operations: {path, method, tag, operation, schema, example, text}; a search looks through `text`. */
export function operationsOf(document) {
  return Object.entries(document.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => {
    const body = operation.requestBody?.content?.["application/json"];
    const schema = body && resolve(document, body.schema).schema;
    const names = [...Object.keys(schema?.properties ?? {}), ...(operation.parameters ?? []).map((one) => one.name)];
    const tag = operation.tags?.[0] ?? path.split("/")[1];
    const text = [method, path, tag, operation.summary, operation["x-access"], ...names].join(" ").toLowerCase();
    return { path, method: method.toUpperCase(), tag, operation, schema, example: body?.example, text };
  }));
}

/** Returns whether every word of a search occurs. */
export const matches = (text, search) => search.toLowerCase().split(/\s+/).every((word) => text.includes(word));

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Returns a curl command for the operation; {name} in a path becomes NAME, and `model` replaces the example's. */
export function curlOf({ path, method, example, operation }, { base, needsKey, model }) {
  const url = base + path.slice(1).replace(/{(\w+)}/g, (_, name) => name.toUpperCase());
  const parts = [`curl ${quote(url)}`];
  if (method !== "GET" && !(method === "POST" && example)) parts.push(`-X ${method}`);
  if (needsKey && operation["x-access"] !== "open") parts.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
  if (example) {
    const body = "model" in example && model ? { ...example, model } : example;
    parts.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(body))}`);
  }
  return parts.join(" \\\n  ");
}
