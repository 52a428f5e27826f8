// The map of the KV cache: a square per block, in the colour of the request that holds it.

import { colour, count, el, followPointer, onTheme, percent, plural, prepare, setText, swatch } from "./dom.js";
import { light, litKey, onLit, ownerColour } from "./palette.js";
import { SOURCES } from "./tables.js";

const MAX_HEIGHT = 320, LARGEST = 18, SMALLEST = 4;

export class BlockMap {
  constructor(canvas, { detail, bar, legend }) {
    Object.assign(this, { canvas, detail, bar });
    this.cells = []; // { id, references, isCached, owners, source }
    this.stride = 1;
    this.chosen = null;
    this.columns = 1;
    this.pitch = LARGEST;
    this.kinds = [
      ["Held by one request", "--o0"], ["Shared by several", "--shared", "dot"], ["Free, content can be reused", "--cached"],
      ["Free and empty", "--free"], ["Never used yet", null],
    ].map(([label, variable, shape]) => {
      const value = el("b", {}, "–");
      legend.append(el("li", {}, variable && swatch(variable, shape), label, value));
      return value;
    });
    this.segments = ["--writing", "--cached"].map((variable) => {
      const part = el("span");
      part.style.background = `var(${variable})`;
      bar.append(part);
      return part;
    });
    followPointer(canvas, (event) => this.choose(this.#indexAt(event.offsetX, event.offsetY)), () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    onTheme(() => this.draw());
    onLit(() => this.draw());
  }

  /** `cache` and `requests` are those of /debug/state. */
  update(cache, requests, blockSize) {
    const owners = new Map(), sources = new Map();
    for (const request of requests) {
      const loaded = loadedPlaces(request, blockSize);
      let place = 0;
      for (const [first, length] of request.blocks) {
        for (let id = first; id < first + length; id++, place++) {
          if (owners.has(id)) owners.get(id).push(request);
          else owners.set(id, [request]);
          if (place >= loaded.start && place < loaded.end) sources.set(id, request.external_source);
        }
      }
    }
    this.stride = cache.stride;
    this.cells = [];
    for (const [length, references, isCached] of cache.runs) {
      for (let i = 0; i < length; i++) {
        const id = this.cells.length * cache.stride;
        this.cells.push({ id, references, isCached: isCached === 1, owners: owners.get(id) ?? [], source: sources.get(id) });
      }
    }
    this.#count(cache);
    this.draw();
  }

  #count(cache) {
    const listed = this.cells.slice(1);
    const scaled = (test) => listed.filter(test).length * cache.stride;
    const inUse = cache.total - 1 - cache.free, never = cache.total - cache.touched;
    const shared = Math.min(inUse, scaled((cell) => cell.references > 1));
    const cached = Math.min(cache.free, scaled((cell) => cell.references === 0 && cell.isCached));
    const about = cache.stride > 1 ? "≈ " : "";
    [about + count(inUse - shared), about + count(shared), about + count(cached),
      about + count(Math.max(0, cache.free - cached - never)), count(never)].forEach((text, i) => setText(this.kinds[i], text));
    [inUse, cached].forEach((value, i) => {
      this.segments[i].style.width = `${(100 * value) / Math.max(1, cache.total - 1)}%`;
    });
    this.summary = `${plural(inUse, "block")} of ${count(cache.total - 1)} in use (${percent(inUse / Math.max(1, cache.total - 1))}), `
      + `${count(shared)} of them shared; ${count(cached)} free ones can be reused`;
    this.held = Object.entries(cache.held ?? {}).map(([state, number]) => `${count(number)} ${state}`).join(", ");
    this.canvas.setAttribute("aria-label", `Map of blocks: ${this.summary}. Arrow keys go from block to block.`);
    if (this.chosen === null) setText(this.detail, this.#hint());
  }

  #hint() {
    const drawn = this.stride > 1 ? ` Of this large cache every ${this.stride}th block is drawn.` : "";
    const held = this.held ? ` Transfers from and to other memory hold blocks: ${this.held}.` : "";
    return `Point at a block or tap it, or move with the arrow keys.${drawn}${held}`;
  }

  choose(index) {
    this.chosen = index !== null && index >= 0 && index < this.cells.length ? index : null;
    const cell = this.cells[this.chosen];
    setText(this.detail, cell ? describe(cell, this.held) : this.#hint());
    light(cell && cell.owners.length === 1 ? cell.owners[0].key : null);
    this.draw();
  }

  #indexAt(x, y) {
    const column = Math.floor(x / this.pitch);
    return column < this.columns ? Math.floor(y / this.pitch) * this.columns + column : null;
  }

  #onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const ends = { Home: 0, End: this.cells.length - 1 };
    if (!(event.key in moves) && !(event.key in ends)) return;
    event.preventDefault();
    const target = event.key in ends ? ends[event.key] : this.chosen === null ? 0 : this.chosen + moves[event.key];
    if (target >= 0 && target < this.cells.length) this.choose(target);
  }

  draw() {
    const width = this.canvas.clientWidth, cells = this.cells;
    if (!width) return;
    for (this.pitch = LARGEST; this.pitch > SMALLEST; this.pitch--) {
      if (Math.ceil(cells.length / Math.floor(width / this.pitch)) * this.pitch <= MAX_HEIGHT) break;
    }
    this.columns = Math.max(1, Math.floor(width / this.pitch));
    const rows = Math.max(1, Math.ceil(cells.length / this.columns));
    const { context: c } = prepare(this.canvas, rows * this.pitch);
    const size = this.pitch - (this.pitch > 6 ? 2 : 1), lit = litKey();
    cells.forEach((cell, i) => {
      const x = (i % this.columns) * this.pitch, y = Math.floor(i / this.columns) * this.pitch;
      c.globalAlpha = lit !== null && !cell.owners.some((owner) => owner.key === lit) ? 0.22 : 1;
      c.fillStyle = colour(fill(cell));
      c.fillRect(x, y, size, size);
      if (cell.references > 1 && size >= 6) {
        c.fillStyle = colour("--panel");
        c.fillRect(x + size / 2 - 1.5, y + size / 2 - 1.5, 3, 3);
      }
    });
    c.globalAlpha = 1;
    if (this.chosen !== null) {
      c.strokeStyle = colour("--focus");
      c.lineWidth = 2;
      c.strokeRect((this.chosen % this.columns) * this.pitch, Math.floor(this.chosen / this.columns) * this.pitch, size, size);
    }
  }
}

/** Returns the places in a request's list of blocks whose content was loaded when it was admitted; none if its layers
 * have several lists. */
function loadedPlaces({ external_tokens, cached_tokens, computed_tokens, num_blocks }, blockSize) {
  const isOneList = num_blocks <= Math.ceil((Math.max(cached_tokens, computed_tokens) + 1) / blockSize) + 1;
  if (!external_tokens || !isOneList) return { start: 0, end: 0 };
  return { start: (cached_tokens - external_tokens) / blockSize, end: cached_tokens / blockSize };
}

function fill(cell) {
  if (cell.id === 0) return "--line";
  if (cell.references > 1) return "--shared";
  if (cell.references === 1) return cell.owners.length ? ownerColour(cell.owners[0].key) : "--unknown";
  return cell.isCached ? "--cached" : "--free";
}

function describe({ id, references, isCached, owners, source }, held) {
  if (id === 0) return "Block 0: the null block. It takes the place of blocks that are no longer read, and is never given out.";
  if (references === 0) {
    return isCached
      ? `Block ${id}: free, and still has its content. A request that begins the same way reuses it instead of computing it.`
      : `Block ${id}: free and empty.`;
  }
  const names = owners.slice(0, 4).map((owner) => owner.id).join(", ");
  const more = owners.length > 4 ? ` and ${owners.length - 4} more` : "";
  const who = names ? `: ${names}${more}` : "";
  const state = isCached ? "It is full, so others that begin the same way can share it." : "It is not full yet, so no other request can share it.";
  const origin = source ? ` Its content was not computed here, but read from ${SOURCES[source] ?? source}.` : "";
  return references > 1
    ? `Block ${id}: shared by ${references} requests${held ? " or transfers" : ""}${who}.${origin}`
    : `Block ${id}: held by one request${who || (held ? " or transfer" : "")}. ${state}${origin}`;
}
