// A colour for each request, the same in the map, the timeline and the table; neighbours in time differ.

const NUM_COLOURS = 12, MAX_KEPT = 4096;
const given = new Map();
let next = 0;

/** Returns the style-sheet variable with a request's colour. */
export function ownerColour(key) {
  if (!given.has(key)) {
    given.set(key, next);
    next = (next + 1) % NUM_COLOURS;
    if (given.size > MAX_KEPT) given.delete(given.keys().next().value);
  }
  return `--o${given.get(key)}`;
}

/** The key of the request that the pointer is on, in any of the views. All views highlight it. */
let lit = null;
const listeners = [];
export const onLit = (listener) => listeners.push(listener);
export const litKey = () => lit;
export function light(key) {
  if (key === lit) return;
  lit = key;
  for (const listener of listeners) listener();
}
