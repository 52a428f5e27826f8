// A colour for each request, the same in the map, the timeline and the table; neighbours in time differ.

const NUM_COLOURS = 12, MAX_KEPT = 4096;
const given = new Map();
let next = 0;

/** The variable of the style sheet that is a request's colour. */
export function ownerColour(key) {
  if (!given.has(key)) {
    given.set(key, next);
    next = (next + 1) % NUM_COLOURS;
    if (given.size > MAX_KEPT) given.delete(given.keys().next().value);
  }
  return `--o${given.get(key)}`;
}

/** The request that is pointed at, here or there; whoever draws requests draws it apart. */
let lit = null;
const listeners = [];
export const onLit = (listener) => listeners.push(listener);
export const litKey = () => lit;
export function light(key) {
  if (key === lit) return;
  lit = key;
  for (const listener of listeners) listener();
}
