// Jobs as the page's data has them, made ready to be drawn: what a job did at each moment, and which KV was held.
"use strict";

const report = JSON.parse(byId("data").textContent);

/** How seconds are coloured and called, in the order in which a turn goes through them. */
const KINDS = {
  queue: { token: "queue", label: "queued", means: "waits for its place" },
  memory: {
    token: "memory",
    label: "waiting for memory",
    means: "the engine had token budget and a free batch slot, but too few free blocks",
  },
  grammar: { token: "queue", label: "grammar", means: "the grammar of its answer is compiled" },
  load: { token: "loading", label: "loading", means: "its KV is loaded from host memory or disk" },
  prefill: { token: "prefill", label: "prefill", means: "its prompt is computed" },
  recompute: {
    token: "recompute",
    label: "recompute",
    means: "tokens lost by a preemption are recomputed",
  },
  decode: { token: "decode", label: "decode", means: "its answer is made" },
  preempted: { token: "preempted", label: "preempted", means: "lost its blocks and waits to run again" },
  tool: { token: "tool", label: "tool", means: "its calls are under way" },
  client: { token: "client", label: "client", means: "between two turns, and nothing was called" },
};
const OUTCOMES = {
  handed_over: "handed over to the next turn",
  expired: "expired before the next turn came",
  revoked: "revoked: the memory was needed",
  released: "released: the job ended",
  superseded: "superseded: the job went on without it",
  refused: "refused: the pins hold as much as they may",
  open: "still held where the trace ends",
  none: "not held",
};
const OUTCOME_TOKENS = {
  handed_over: "handed-over",
  expired: "expired",
  revoked: "revoked",
  released: "released",
  superseded: "released",
  refused: "edge",
  open: "pinned",
  none: "edge",
};

const rows = {
  turn: (row) => ({
    req_id: row[0],
    number: row[1],
    arrived_s: row[2],
    end: row[3],
    num_prompt_tokens: row[4],
    num_output_tokens: row[5],
    num_known_tokens: row[6],
    cached_tokens: row[7],
    loaded_tokens: row[8],
    recomputed_tokens: row[9],
    num_preemptions: row[10],
    tiles: tilesOf(row[11], row[2], row[1]),
  }),
  gap: (row) => ({
    req_id: row[0],
    started_s: row[1],
    ended_s: row[2],
    tools: row[3] === null ? null : report.strings[row[3]],
    told: row[4],
  }),
  pin: (row) => ({
    req_id: row[0],
    began_s: row[1],
    ended_s: row[2],
    outcome: row[3],
    num_blocks: row[4],
    blocks_at_end: row[5],
    deadline_s: row[6],
    num_shrinks: row[7],
    revoked_by: row[8],
    spared_s: row[9],
    decisions: row[10].map(rows.decision),
    inputs: report.input_names[row[11]].map((name, index) => [name, row[12][index]]),
  }),
  decision: (row) => ({
    now_s: row[0],
    ttl_s: row[1],
    rule: report.strings[row[2]],
    reason: report.strings[row[3]],
  }),
};

/** Spans that follow each other, as tiles. A wait is two of them: for its place, and for memory. */
function tilesOf(spans, start_s, turn) {
  const tiles = [];
  const push = (kind, seconds) => {
    if (seconds > 0) tiles.push({ kind, start_s, end_s: start_s + seconds, turn });
    start_s += seconds;
  };
  for (let index = 0; index < spans.length; index += 3) {
    const phase = report.phases[spans[index]];
    const [seconds, memory_s] = [spans[index + 1], spans[index + 2]];
    if (phase === "wait") {
      push("queue", seconds - memory_s);
      push("memory", memory_s);
    } else push(phase, seconds);
  }
  return tiles;
}

/** What was granted in the end, if the trace says. */
function grantedSeconds(pin) {
  return pin.outcome === "refused" ? 0 : (pin.decisions.at(-1)?.ttl_s ?? null);
}

class Job {
  constructor(data) {
    Object.assign(this, data);
    this.turns = data.turns.map(rows.turn);
    this.gaps = data.gaps.map(rows.gap);
    this.pins = data.pins.map(rows.pin);
    this.wall_s = this.ended_s - this.began_s;
    this.gapAfter = new Map(this.gaps.map((gap) => [gap.req_id, gap]));
    this.pinAfter = new Map(this.pins.map((pin) => [pin.req_id, pin]));
    this.tiles = data.tiles ? tilesOf(data.tiles, this.began_s, null) : this.sequence();
  }

  /** What it did, turn after gap after turn. */
  sequence() {
    const tiles = this.turns.flatMap((turn) => turn.tiles);
    for (const gap of this.gaps) {
      if (gap.ended_s !== null && gap.ended_s > gap.started_s)
        tiles.push({ kind: gap.tools ? "tool" : "client", start_s: gap.started_s, end_s: gap.ended_s, gap });
    }
    return tiles.sort((a, b) => a.start_s - b.start_s);
  }

  /** Numbers of the first tile that ends after this moment. */
  firstTile(time_s) {
    let low = 0;
    let high = this.tiles.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tiles[middle].end_s > time_s) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  secondsOf(...kinds) {
    return kinds.reduce((sum, kind) => sum + this.seconds[report.kinds.indexOf(kind)], 0);
  }

  sum(field) {
    return this.turns.reduce((sum, turn) => sum + turn[field], 0);
  }
}

/** How all of these texts begin, up to a separator: it tells none apart. */
function commonBeginning(texts) {
  if (texts.length < 2) return "";
  let length = Math.min(...texts.map((text) => text.length));
  for (const text of texts) {
    while (!text.startsWith(texts[0].slice(0, length))) length -= 1;
  }
  return texts[0].slice(0, length).match(/^.*[/:|]/s)?.[0] ?? "";
}

const jobs = report.jobs.map((data) => new Job(data));
const shared = commonBeginning(jobs.map((job) => job.job_id));
for (const job of jobs) job.name = job.job_id.slice(shared.length) || job.job_id;
const jobById = new Map(jobs.map((job) => [job.job_id, job]));

/** A bar of where seconds went, by kind. */
function secondsBar(seconds, className) {
  const total = seconds.reduce((a, b) => a + b, 0) || 1;
  const parts = report.kinds.map((kind, index) => [
    KINDS[kind].token,
    seconds[index] / total,
    `${KINDS[kind].label}: ${duration(seconds[index])}, ${percent(seconds[index] / total)}`,
  ]);
  const told = parts
    .filter(([, share]) => share > 0)
    .map(([, , text]) => text)
    .join("; ");
  return partsBar(parts, told || "nothing", className);
}

/** The bar with its parts named. */
function secondsTold(seconds) {
  const total = seconds.reduce((a, b) => a + b, 0) || 1;
  const items = report.kinds.map((kind, index) => [kind, seconds[index]]).filter(([, value]) => value > 0);
  return [
    secondsBar(seconds, "bar"),
    el(
      "ul",
      { className: "shares" },
      ...items.map(([kind, value]) =>
        el(
          "li",
          { title: KINDS[kind].means },
          swatch(KINDS[kind].token),
          el("span", {}, KINDS[kind].label),
          el("span", {}, duration(value)),
          el("span", {}, percent(value / total)),
        ),
      ),
    ),
  ];
}
