// Jobs as lanes that scroll in time: what each request did, what its job waits for, and when it is expected back.

const ROW = 26;
const NAMES = 168;
const MAX_LANES = 200;
const FUTURE = 0.18; // of the width, right of now
const WINDOWS = [[30, "30 s"], [120, "2 min"], [600, "10 min"]];
const PHASES = {
  queue: "waits in the queue",
  memory: "preempted, waits for blocks",
  loading: "its KV is being loaded",
  prefill: "its prompt is computed",
  decode: "generates",
  tool: "its tool runs, or its client is idle",
};
const LANE_LEGEND = [["queue", "queue"], ["memory", "no memory"], ["loading", "loading"], ["prefill", "prefill"], ["decode", "decode"], ["tool", "tool call"], ["pinned", "pinned", "thin"], ["accent", "expected back", "dot"]];
const TICKS = [1, 2, 5, 10, 20, 30, 60, 120, 300];

class Lanes {
  constructor(state, onJob) {
    this.state = state;
    this.onJob = onJob;
    this.canvas = byId("lanes-canvas");
    this.axis = byId("lanes-axis");
    this.rows = [];
    this.names = new Map();
    this.chosen = null;
    this.seconds = 30;
    byId("lanes-legend").replaceChildren(...LANE_LEGEND.map(([token, text, shape]) => {
      const swatch = el("i", `swatch ${shape ?? ""}`);
      swatch.style.background = `var(--${token})`;
      return el("li", "", swatch, text);
    }));
    choice(byId("window"), WINDOWS, this.seconds, (seconds) => {
      this.seconds = Number(seconds);
    });
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => tip.hide());
    this.canvas.addEventListener("click", (event) => {
      const lane = this.laneAt(event);
      if (lane) onJob(lane.key);
    });
  }

  draw(now) {
    this.arrange(now);
    this.width = this.axis.clientWidth;
    this.left = innerWidth <= 640 ? 110 : NAMES;
    const track = this.width - this.left;
    this.nowX = this.left + track * (1 - FUTURE);
    this.scale = (track * (1 - FUTURE)) / this.seconds;
    this.now = now;
    this.drawAxis();
    this.drawRows();
  }

  x(at) {
    return this.nowX + (at - this.now) * this.scale;
  }

  // ---- which lanes ----

  /** Those that were active in the time that is shown: the ones that go on, then the ones that are done. */
  arrange(now) {
    const since = now - this.seconds;
    const shown = [...this.state.lanes.values()].filter((lane) => lane.open.size > 0 || lane.lastActive > since || this.holds(lane));
    const goesOn = (lane) => lane.open.size > 0 || lane.gap !== null;
    shown.sort((one, other) => goesOn(other) - goesOn(one) || (goesOn(one) ? one.firstSeen - other.firstSeen : other.lastActive - one.lastActive));
    this.numHidden = Math.max(0, shown.length - MAX_LANES);
    const rows = shown.slice(0, MAX_LANES);
    if (rows.length !== this.rows.length || rows.some((lane, place) => lane !== this.rows[place])) this.setRows(rows);
    byId("lanes-empty").hidden = rows.length > 0;
  }

  holds(lane) {
    for (const pin of this.state.pins.values()) if (pin.job === lane.jobId) return true;
    return false;
  }

  setRows(rows) {
    this.rows = rows;
    const names = new Map();
    for (const lane of rows) names.set(lane.key, this.names.get(lane.key) ?? this.nameOf(lane));
    this.names = names;
    byId("lane-names").replaceChildren(...names.values());
  }

  nameOf(lane) {
    const swatch = el("i", "swatch");
    swatch.style.background = lane.jobId === null ? "var(--cached)" : palette.job(lane.jobId);
    const name = button("", "", () => this.onJob(lane.key));
    name.append(swatch, el("span", "name", cutInTheMiddle(lane.key)));
    name.title = lane.key;
    name.setAttribute("aria-label", lane.key);
    name.dataset.job = lane.key;
    name.setAttribute("aria-pressed", String(lane.key === this.chosen));
    return el("li", "", name);
  }

  choose(key) {
    this.chosen = key;
    for (const [name, item] of this.names) item.firstChild.setAttribute("aria-pressed", String(name === key));
  }

  recolor() {
    this.names.clear();
    this.rows = [];
  }

  // ---- drawing ----

  ticks() {
    const every = TICKS.find((seconds) => seconds * this.scale >= 70) ?? 600;
    const found = [];
    for (let seconds = -Math.ceil(this.seconds / every) * every; this.nowX + seconds * this.scale < this.width; seconds += every) {
      const x = this.nowX + seconds * this.scale;
      if (x > this.left) found.push([x, seconds]);
    }
    return found;
  }

  drawAxis() {
    const { context, height } = fitCanvas(this.axis);
    context.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [x, seconds] of this.ticks()) {
      context.fillStyle = palette.token(seconds === 0 ? "text" : "quiet");
      if (x > this.left + 20 && x < this.width - 20) context.fillText(this.tickText(seconds), x, height / 2);
    }
    if (this.numHidden) {
      context.textAlign = "left";
      context.fillText(`+${this.numHidden} more`, 12, height / 2);
    }
  }

  tickText(seconds) {
    if (seconds === 0) return "now";
    const sign = seconds < 0 ? "−" : "+";
    const size = Math.abs(seconds);
    return size >= 60 && size % 60 === 0 ? `${sign}${size / 60} min` : `${sign}${size} s`;
  }

  drawRows() {
    const scroll = byId("lanes-scroll");
    const height = Math.max(this.rows.length * ROW, scroll.clientHeight - 1);
    const { context } = fitCanvas(this.canvas, height);
    context.fillStyle = palette.token("panel");
    context.fillRect(this.nowX, 0, this.width - this.nowX, height);
    context.fillStyle = palette.token("line");
    for (const [x] of this.ticks()) context.fillRect(Math.round(x), 0, 1, height);
    this.rows.forEach((_, row) => {
      if (row) context.fillRect(0, row * ROW, this.width, 0.5);
    });
    const [first, last] = [Math.floor(scroll.scrollTop / ROW), Math.ceil((scroll.scrollTop + scroll.clientHeight) / ROW)];
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.width - this.left, height);
    context.clip();
    const pins = this.pinsByJob();
    for (let row = first; row < Math.min(last, this.rows.length); row += 1) this.drawRow(context, this.rows[row], row * ROW, pins);
    context.restore();
    context.fillStyle = palette.token("edge");
    context.fillRect(Math.round(this.nowX), 0, 1, height);
  }

  pinsByJob() {
    const found = new Map();
    for (const pin of this.state.pins.values()) found.set(pin.job, [...(found.get(pin.job) ?? []), pin]);
    return found;
  }

  drawRow(context, lane, top, pins) {
    const held = pins.get(lane.jobId) ?? [];
    for (const span of lane.spans) this.drawSpan(context, span, top);
    for (const hold of lane.holds) this.drawHold(context, hold, top);
    const isBack = lane.gap === null && lane.open.size > 0;
    for (const pin of held) {
      if (isBack) this.drawClaim(context, pin, top);
      else this.drawPin(context, pin, top);
    }
    if (held.length && !isBack) this.drawOutlook(context, held[0], top);
  }

  drawSpan(context, span, top) {
    const from = Math.max(this.x(span.from), this.left - 2);
    const to = this.x(Math.min(span.to ?? this.now, this.now));
    if (to < this.left) return;
    const isGap = span.phase === GAP;
    const tall = isGap ? 4 : 14;
    context.fillStyle = palette.token(span.phase);
    context.beginPath();
    context.roundRect(from, top + (ROW - tall) / 2, Math.max(to - from, isGap ? 0 : 1.5), tall, isGap ? 0 : 2);
    context.fill();
  }

  /** A pin, over the gap that it bridged; a mark where it ended otherwise than by the job's return. */
  drawHold(context, hold, top) {
    const from = Math.max(this.x(hold.from), this.left - 2);
    const to = this.x(hold.to);
    if (to < this.left) return;
    context.fillStyle = palette.token("pinned");
    context.fillRect(from, top + ROW / 2 - 2, Math.max(to - from, 0), 4);
    if (hold.cause !== "expired" && hold.cause !== "revoked") return;
    context.fillStyle = palette.token(hold.cause);
    context.fillRect(to - 1, top + ROW / 2 - 7, 2, 14);
  }

  /** From where the turn ended to the deadline: solid as far as it was pinned, an outline for the rest. */
  drawPin(context, pin, top) {
    const y = top + ROW / 2 - 4;
    const until = Math.max(pin.deadline, this.now);
    const from = Math.max(this.x(pin.since), this.left - 2);
    context.fillStyle = palette.token("pinned");
    context.fillRect(from, y, Math.max(0, this.nowX - from), 8);
    context.globalAlpha = 0.32;
    context.fillRect(this.nowX, y, Math.min(this.x(until), this.width) - this.nowX, 8);
    context.globalAlpha = 1;
    if (this.x(until) < this.width) context.fillRect(this.x(until) - 1, y - 3, 2, 14);
  }

  /** Its job goes on, or waits to: the pin is drawn under its spans. */
  drawClaim(context, pin, top) {
    const from = Math.max(this.x(pin.since), this.left - 2);
    context.fillStyle = palette.token("pinned");
    context.fillRect(from, top + ROW - 5, Math.max(0, this.nowX - from), 3);
  }

  /** Nine in ten are back between the ends of the whisker's, half before its dot. */
  drawOutlook(context, pin, top) {
    const back = pin.back;
    if (!back || back.median === null) return;
    const y = top + ROW / 2;
    const edge = this.width - 7;
    const [early, median] = [this.x(Math.max(back.early ?? back.median, this.now)), this.x(Math.max(back.median, this.now))];
    const late = back.late === null ? edge : Math.min(this.x(Math.max(back.late, this.now)), edge);
    context.fillStyle = palette.token("accent");
    context.fillRect(Math.min(early, edge), y - 0.75, Math.max(late - early, 0), 1.5);
    context.beginPath();
    context.arc(Math.min(median, edge), y, 4, 0, 2 * Math.PI);
    context.fill();
    context.strokeStyle = palette.token("ground");
    context.lineWidth = 1.5;
    context.stroke();
  }

  // ---- the pointer ----

  laneAt(event) {
    return this.rows[Math.floor((event.clientY - this.canvas.getBoundingClientRect().top) / ROW)] ?? null;
  }

  hover(event) {
    const lane = this.laneAt(event);
    if (!lane || this.now === undefined) return tip.hide();
    const at = this.now + (event.clientX - this.canvas.getBoundingClientRect().left - this.nowX) / this.scale;
    const text = at > this.now ? this.futureWords(lane) : this.pastWords(lane, at);
    return text ? tip.show(text, event.clientX, event.clientY) : tip.hide();
  }

  pastWords(lane, at) {
    const slack = 2 / this.scale;
    const span = lane.spans.findLast((each) => each.from - slack <= at && (each.to ?? this.now) + slack >= at);
    if (!span) return lane.key;
    const lasted = formatSpan((span.to ?? this.now) - span.from);
    return `${lane.key}\n${PHASES[span.phase]}, ${span.to === null ? "for " : ""}${lasted}${span.to === null ? " so far" : ""}`;
  }

  futureWords(lane) {
    const pin = [...this.state.pins.values()].find((each) => each.job === lane.jobId);
    if (!pin) return null;
    return `${lane.key}\npinned for ${formatSeconds(Math.max(0, pin.deadline - this.now))} more\n${outlookWords(pin, this.now)}`;
  }
}
