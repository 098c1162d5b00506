// One job's life: what the engine knows of it, its turns with their receipts, and what was decided about its KV.

const LIFE_REFRESH_MS = 1000;
const LIFE_LANE_S = 60;

class Life {
  constructor(state, onChoose) {
    this.state = state;
    this.onChoose = onChoose;
    this.panel = byId("life");
    this.body = byId("life-body");
    this.key = null;
    this.status = null; // as the server has it; null: not known, or no job
    this.asked = -Infinity;
    byId("life-close").addEventListener("click", () => this.close());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    this.facts = el("div", "chips");
    this.note = el("p", "quiet small");
    this.canvas = el("canvas");
    this.ahead = el("div");
    this.turns = el("tbody");
    this.events = el("ol", "decision-list");
    this.past = el("div", "", heading("Turns and their receipts"), this.table());
    this.body.append(this.facts, this.note, heading("Last minute"), this.canvas, this.ahead, this.past, heading("What was decided"), this.events);
  }

  table() {
    const columns = [["turn", "left"], ["queue"], ["prefill"], ["decode"], ["prompt"], ["cached"], ["recomputed"], ["output"], ["its pin", "left"], ["then ran", "left"], ["pinned", ""]];
    const head = el("tr", "", ...columns.map(([text, className]) => el("th", className ?? "", text)));
    return el("div", "scroll", el("table", "", el("thead", "", head), this.turns));
  }

  open(key) {
    this.key = key;
    this.status = null;
    this.asked = -Infinity;
    this.numEvents = -1;
    setText(byId("life-title"), key);
    byId("life-swatch").style.background = this.isJob() ? palette.job(key) : "var(--cached)";
    this.tellTurns([]);
    this.events.replaceChildren();
    this.facts.replaceChildren();
    this.ahead.replaceChildren();
    this.panel.hidden = false;
    this.onChoose(key);
    byId("life-close").focus();
  }

  close() {
    if (this.key === null) return;
    this.key = null;
    this.panel.hidden = true;
    this.onChoose(null);
  }

  isJob() {
    const lane = this.state.lanes.get(this.key);
    return lane ? lane.jobId !== null : true;
  }

  draw(now) {
    if (this.key === null) return;
    if (performance.now() - this.asked > LIFE_REFRESH_MS) this.ask();
    this.drawLane(now);
    this.drawEvents();
  }

  async ask() {
    this.asked = performance.now();
    const key = this.key;
    if (!this.state.hello.knows_jobs) return this.show(null, `This server's policy (${this.state.policy}) tracks no jobs: this is what the page has seen.`);
    if (!this.isJob()) return this.show(null, "This request belongs to no job that the server knows.");
    try {
      const response = await fetch(`dashboard/jobs/${encodeURIComponent(key)}`, { headers: withKey(), cache: "no-store" });
      const { job, past_turns: turns } = response.ok ? await response.json() : { job: null, past_turns: [] };
      if (key !== this.key) return undefined;
      if (job) this.status = job;
      this.tellTurns(turns);
      return this.show(this.status, job ? "" : "The job is finished, or was forgotten.");
    } catch {
      return undefined; // the feed says that the server is gone
    }
  }

  // ---- what the server knows ----

  show(status, note) {
    setText(this.note, note);
    this.note.hidden = !note;
    if (!status) return;
    const facts = [["turns", formatCount(status.turns)], ["age", formatSeconds(status.age_s)], ["pinned", formatMany(status.pinned_blocks, "block")]];
    if (status.tenant) facts.push(["tenant", status.tenant]);
    if (status.inferred) facts.push(["recognized by", "its prompts"]);
    if (status.kind) facts.push(["kind", status.kind]);
    this.facts.replaceChildren(...facts.map(([name, value]) => el("span", "chip", `${name} `, el("b", "", value))));
    this.ahead.replaceChildren(...this.aheadOf(status));
  }

  tellTurns(turns) {
    this.past.hidden = turns.length === 0;
    this.turns.replaceChildren(...turns.toReversed().map((turn) => turnRow(turn)));
  }

  /** What is expected of each branch that has not gone on yet. */
  aheadOf(status) {
    const waiting = status.branches.filter((branch) => branch.tools !== null);
    if (!waiting.length) return [];
    const rows = waiting.map((branch) => {
      const tools = branch.tools.length ? branch.tools.join(", ") : "no call: it answered";
      const held = branch.ttl_s === null ? "not pinned" : `pinned for ${formatSeconds(branch.ttl_s)} more`;
      const back = { early: branch.earliest_return_s, median: branch.expected_return_s, late: branch.latest_return_s, seen: branch.num_observations };
      return el("tr", "", el("td", "left", String(branch.turn)), el("td", "left mono", tools), el("td", "", formatSeconds(branch.elapsed_s)), el("td", "left", held), el("td", "left wrap", outlookWords({ back, told: branch.told }, 0)));
    });
    const head = el("tr", "", ...[["after turn", "left"], ["runs now", "left"], ["since", ""], ["its KV", "left"], ["expected back in", "left"]].map(([text, className]) => el("th", className, text)));
    return [heading("Now"), el("div", "scroll", el("table", "", el("thead", "", head), el("tbody", "", ...rows)))];
  }

  // ---- what the page has seen ----

  drawLane(now) {
    const { context, width, height } = fitCanvas(this.canvas, 30);
    const lane = this.state.lanes.get(this.key);
    const x = (at) => width * (1 - (now - at) / LIFE_LANE_S);
    context.fillStyle = palette.token("panel");
    context.fillRect(0, 0, width, height);
    const draw = (color, since, until, tall) => {
      const [from, to] = [Math.max(0, x(since)), x(Math.min(until ?? now, now))];
      if (to < 0) return;
      context.fillStyle = palette.token(color);
      context.fillRect(from, (height - tall) / 2, Math.max(to - from, 1.5), tall);
    };
    for (const span of lane?.spans ?? []) draw(span.phase, span.from, span.to, span.phase === GAP ? 6 : 20);
    for (const hold of lane?.holds ?? []) draw("pinned", hold.from, hold.to, 6);
  }

  drawEvents() {
    const events = this.state.jobEvents.get(this.key) ?? [];
    if (events.length === this.numEvents) return;
    this.numEvents = events.length;
    const sentences = events.filter((event) => !isProvisional(event)).map(sentenceOf).filter((sentence) => sentence !== null);
    const items = sentences.toReversed().map((sentence) => decisionItem(sentence, null));
    this.events.replaceChildren(...(items.length ? items : [el("li", "none quiet", "Nothing since this page was opened.")]));
  }
}

function heading(text) {
  return el("h3", "", text);
}

/** A turn that ended, with its receipt. */
function turnRow(turn) {
  const [color, words] = ENDS[turn.previous_pin] ?? [null, "–"];
  const pin = el("td", "left", words);
  if (color) pin.style.color = `var(--${color})`;
  const held = turn.ttl_s > 0 ? formatSeconds(turn.ttl_s) : "not";
  const last = el("td", "", held);
  last.title = turn.reason;
  const tools = turn.tools === null ? "…" : turn.tools.join(", ") || "an answer";
  const output = el("td", "", formatCount(turn.output_tokens));
  output.title = `in ${formatCount(turn.output_steps)} steps; ${formatCount(turn.accepted_tokens)} of ${formatCount(turn.drafted_tokens)} draft tokens accepted`;
  const row = el(
    "tr",
    "",
    el("td", "left", String(turn.turn)),
    el("td", "", formatSpan(turn.queue_s)),
    el("td", "", formatSpan(turn.prefill_s)),
    el("td", "", formatSpan(turn.decode_s)),
    el("td", "", formatCount(turn.prompt_tokens)),
    el("td", "", formatCount(turn.cached_tokens)),
    el("td", turn.recomputed_tokens ? "lost" : "", formatCount(turn.recomputed_tokens)),
    output,
    pin,
    el("td", "left mono", tools),
    last,
  );
  row.dataset.turn = String(turn.turn);
  return row;
}
