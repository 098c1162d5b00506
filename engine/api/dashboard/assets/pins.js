// The pins, the first to expire first, with countdowns and expected returns; ended pins stay for a moment.

const ENDS = {
  handed_over: ["handed-over", "came back"],
  expired: ["expired", "expired"],
  revoked: ["revoked", "revoked for another request"],
  released: ["released", "released"],
  superseded: ["released", "superseded"],
};
const MAX_PIN_ROWS = 100;

function outlookWords(pin, now) {
  const back = pin.back;
  if (pin.told === "finished") return "about to return, says its client";
  if (!back || !back.seen) return "not known yet";
  if (back.median === null) return "later than ever seen";
  const until = (at) => formatSeconds(Math.max(0, at - now));
  const range = back.early === null || back.late === null ? "" : ` (${until(back.early)} to ${until(back.late)})`;
  if (back.median - now < 0.05) return back.late === null || back.late - now < 0.05 ? "any moment" : `any moment, or within ${until(back.late)}`;
  return `${until(back.median)}${range}`;
}

class PinRow {
  constructor(pin, onJob) {
    const swatch = el("i", "swatch");
    swatch.style.background = palette.job(pin.job);
    this.tools = el("span", "tools mono");
    this.blocks = el("span", "num");
    this.fill = el("i");
    this.left = el("b", "countdown");
    this.track = el("span", "track", this.fill);
    this.back = el("span", "back");
    const name = jobButton("link", pin.job, () => onJob(pin.job));
    name.title = pin.job;
    this.element = el("li", "", el("span", "who", swatch, name), this.tools, this.blocks, el("span", "left", this.left, this.track), this.back);
    this.element.dataset.job = pin.job;
    this.element.dataset.pin = String(pin.id);
  }

  update(pin, now) {
    setText(this.tools, this.toolWords(pin));
    this.tools.title = this.tools.textContent;
    setText(this.blocks, formatCount(pin.blocks));
    if (pin.ended !== undefined) this.showEnd(pin);
    else this.showCountdown(pin, now);
  }

  toolWords(pin) {
    if (pin.tools === undefined || pin.tools === null) return "…";
    return pin.tools.length ? pin.tools.join(", ") : "an answer, no call";
  }

  showCountdown(pin, now) {
    const left = pin.isBack ? 0 : pin.deadline - now; // a turn that is back keeps its pin until it runs
    setText(this.left, left > 0 ? formatSeconds(left) : "is back");
    this.left.title = pin.reason ?? "";
    const whole = Math.max(pin.deadline - pin.since, 0.001);
    this.fill.style.width = `${Math.max(0, Math.min(1, left / whole)) * 100}%`;
    setText(this.back, left > 0 ? outlookWords(pin, now) : "its turn waits to run");
  }

  showEnd(pin) {
    const [color, words] = ENDS[pin.cause] ?? ENDS.released;
    this.element.className = "ended";
    this.track.hidden = true;
    setText(this.left, words);
    this.left.style.color = `var(--${color})`;
    setText(this.back, pin.heldFor === undefined ? "" : `after ${formatSeconds(pin.heldFor)}`);
  }
}

class Pins {
  constructor(state, onJob) {
    this.state = state;
    this.onJob = onJob;
    this.rows = new Map();
    this.list = byId("pin-list");
  }

  draw(now) {
    const alive = [...this.state.pins.values()].sort((one, other) => one.deadline - other.deadline);
    const pins = [...alive, ...this.state.endedPins].slice(0, MAX_PIN_ROWS);
    const shown = new Map(pins.map((pin) => [pin.id, pin]));
    for (const [id, row] of this.rows) {
      if (shown.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    pins.forEach((pin, place) => this.drawRow(pin, place, now));
    byId("pins-empty").hidden = pins.length > 0;
    this.list.hidden = pins.length === 0;
    setText(byId("pins-empty"), this.emptyWords());
    const count = this.state.gauges.pins;
    setText(byId("pins-count"), count ? `${formatMany(count, "pin")}, ${formatMany(this.state.held().blocks, "block")}` : "");
  }

  drawRow(pin, place, now) {
    let row = this.rows.get(pin.id);
    if (!row) {
      row = new PinRow(pin, this.onJob);
      this.rows.set(pin.id, row);
    }
    row.update(pin, now);
    if (this.list.children[place] !== row.element) this.list.insertBefore(row.element, this.list.children[place] ?? null);
  }

  emptyWords() {
    if (this.state.hello.knows_jobs) return "Nothing is pinned right now.";
    return `This server's policy (${this.state.policy}) knows no jobs and pins nothing across tool calls. Start it with --scheduling-policy continuum to see pins.`;
  }

  recolor() {
    for (const row of this.rows.values()) row.element.remove();
    this.rows.clear();
  }
}
