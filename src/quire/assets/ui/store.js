// The conversations of this browser (IndexedDB). Where it gives no room for them, they last as long as the page.

const STORE = "conversations";
const memory = new Map();
const others = new BroadcastChannel("quire-conversations");

const opened = new Promise((resolve) => {
  try {
    const request = indexedDB.open("quire", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  } catch {
    resolve(null); // storage is disabled
  }
});

async function access(mode, act) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = act(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const isLasting = async () => (await opened) !== null;

/** Returns all conversations, the latest first. */
export async function list() {
  const found = (await isLasting()) ? await access("readonly", (store) => store.getAll()) : [...memory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function get(id) {
  return (await isLasting()) ? access("readonly", (store) => store.get(id)) : memory.get(id);
}

/** Stores a conversation. Throws where the browser has no room left. */
export async function put(record) {
  if (await isLasting()) await access("readwrite", (store) => store.put(record));
  else memory.set(record.id, record);
  others.postMessage(record.id);
}

export async function remove(id) {
  if (await isLasting()) await access("readwrite", (store) => store.delete(id));
  else memory.delete(id);
  others.postMessage(id);
}

/** Calls `listener` with the id of a conversation that another window has changed. */
export const onChange = (listener) => others.addEventListener("message", ({ data }) => listener(data));

const WHO = { user: "You", assistant: "Model", tool: "Result of the tool", system: "Instructions" };

/** Returns what `quire chat` saves and loads, with a title. */
export function asJson({ title, model, created, settings, messages }) {
  const system = settings?.system ? [{ role: "system", content: settings.system }] : [];
  const kept = messages.filter((message) => !message.dropped).map(({ stats, dropped, ...message }) => message);
  return JSON.stringify({ title, model, created: new Date(created).toISOString(), messages: [...system, ...kept] }, null, 2);
}

export function asMarkdown(record) {
  const { title, model, messages } = JSON.parse(asJson(record));
  const parts = messages.map((message) => {
    const calls = (message.tool_calls ?? []).map((call) => `\n\n    ${call.function.name}(${call.function.arguments})`).join("");
    return `## ${WHO[message.role]}\n\n${message.content}${calls}`;
  });
  return `# ${title}\n\nA conversation with ${model}.\n\n${parts.join("\n\n")}\n`;
}
