// The feed: fetched with the reader's key, read as it comes, begun again when it ends.

const KEY = "continuum-key";
const SILENCE_MS = 8000; // a view comes several times a second: after this long the server is taken to be gone
const RETRY_MS = [500, 1000, 2000, 4000];

/** Headers of a request to this server. */
function withKey() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

class KeyNeeded extends Error {}

class Feed {
  /** `on.hello`, `on.view`: what came. `on.status(state, text)`: live, connecting, gone, key. */
  constructor(on) {
    this.on = on;
    this.failures = 0;
  }

  async run() {
    for (;;) {
      try {
        await this.readOnce();
        this.on.status("gone", "the server has ended the feed; trying again");
      } catch (error) {
        if (error instanceof KeyNeeded) {
          this.on.status("key", "needs a key");
          await this.on.askKey(sessionStorage.getItem(KEY) !== null);
          this.failures = 0;
          continue;
        }
        this.on.status("gone", `${error.message}; trying again`);
      }
      const wait = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
      this.failures += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  async readOnce() {
    const cut = new AbortController();
    let watch = setTimeout(() => cut.abort(), SILENCE_MS);
    try {
      const response = await fetch("dashboard/feed", { headers: withKey(), signal: cut.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) throw new KeyNeeded();
      if (!response.ok) throw new Error(await refusalOf(response));
      for await (const [name, data] of eventsOf(response.body)) {
        clearTimeout(watch);
        watch = setTimeout(() => cut.abort(), SILENCE_MS);
        this.take(name, data);
      }
    } catch (error) {
      if (error instanceof KeyNeeded) throw error;
      if (error instanceof TypeError) throw new Error("the server does not answer");
      if (error.name === "AbortError") throw new Error("the server has gone silent");
      throw error;
    } finally {
      clearTimeout(watch);
      cut.abort();
    }
  }

  take(name, data) {
    if (name === "hello") this.on.hello(data);
    else if (name === "view") {
      this.failures = 0;
      this.on.view(data);
    } else if (data.error) throw new Error(data.error.message.replace(/\.$/, ""));
  }
}

async function refusalOf(response) {
  try {
    return (await response.json()).error.message.replace(/\.$/, "");
  } catch {
    return `the server answers ${response.status}`;
  }
}

/** Server-sent events of a body: pairs of name and data. Comments are left out. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const event = eventOf(rest.slice(0, end));
      rest = rest.slice(end + 2);
      if (event) yield event;
    }
  }
}

function eventOf(block) {
  let name = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data ? [name, JSON.parse(data)] : null;
}
