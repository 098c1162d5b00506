// The row of figures, each with its last two minutes as a line.

const SPARK_S = 120;
const BUCKET_S = 2;

class Tile {
  /** `read(state)`: { value, unit, aside }. `point(entries)`: height of a bucket of the series, or null. */
  constructor(label, color, read, point, { top } = {}) {
    this.color = color;
    this.read = read;
    this.point = point;
    this.top = top;
    this.value = el("span");
    this.unit = el("small");
    this.canvas = el("canvas");
    this.element = el("div", "tile", el("div", "label", label), el("div", "value", this.value, this.unit), this.canvas);
  }

  draw(state, now) {
    const { value, unit } = this.read(state);
    setText(this.value, value);
    setText(this.unit, unit);
    this.drawLine(this.points(state.series, now), now);
  }

  points(series, now) {
    const buckets = new Map();
    for (let place = series.length - 1; place >= 0 && series[place].at > now - SPARK_S - BUCKET_S; place -= 1) {
      const bucket = Math.floor(series[place].at / BUCKET_S);
      if (!buckets.has(bucket)) buckets.set(bucket, []);
      buckets.get(bucket).push(series[place]);
    }
    buckets.delete(Math.floor(now / BUCKET_S)); // not full yet
    return [...buckets].map(([bucket, entries]) => ({ at: (bucket + 1) * BUCKET_S, y: this.point(entries) }))
      .filter((point) => point.y !== null)
      .sort((one, other) => one.at - other.at);
  }

  drawLine(points, now) {
    const { context, width, height } = fitCanvas(this.canvas);
    const x = (at) => width - 1 - ((now - at) / SPARK_S) * (width - 2);
    const top = this.top ?? Math.max(1e-9, ...points.map((point) => point.y));
    const y = (value) => height - 2 - (value / top) * (height - 5);
    context.strokeStyle = palette.token("line");
    context.beginPath();
    context.moveTo(0, height - 0.5);
    context.lineTo(width, height - 0.5);
    context.stroke();
    if (points.length < 2) return;
    context.beginPath();
    points.forEach((point, place) => (place ? context.lineTo(x(point.at), y(point.y)) : context.moveTo(x(point.at), y(point.y))));
    context.strokeStyle = palette.token(this.color);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(points.at(-1).at), height);
    context.lineTo(x(points[0].at), height);
    context.globalAlpha = 0.13;
    context.fillStyle = palette.token(this.color);
    context.fill();
    context.globalAlpha = 1;
  }
}

const sumOf = (entries, name) => entries.reduce((sum, entry) => sum + entry[name], 0);
const meanOf = (entries, name) => sumOf(entries, name) / entries.length;
const ratePoint = (name) => (entries) => {
  const time = sumOf(entries, "s");
  return time > 0 ? sumOf(entries, name) / time : null;
};

function makeTiles(container) {
  const tiles = [
    new Tile(
      "Tokens generated",
      "decode",
      (state) => {
        const perStep = state.tokensPerStep(30);
        const drafts = perStep !== null && perStep > 1.005 ? `, ${perStep.toFixed(2)} a step` : "";
        return { value: formatRate(state.rate("generated", 5)), unit: `per second${drafts}` };
      },
      ratePoint("generated"),
    ),
    new Tile("Prompt tokens computed", "prefill", (state) => ({ value: formatRate(state.rate("prefill", 5)), unit: "per second" }), ratePoint("prefill")),
    new Tile(
      "Prompt found in cache",
      "good",
      (state) => {
        const rate = state.hitRate(30);
        return rate === null ? { value: "–", unit: "no prompt in 30 s" } : { value: formatShare(rate), unit: "of 30 s" };
      },
      (entries) => (sumOf(entries, "prompt") ? sumOf(entries, "hits") / sumOf(entries, "prompt") : null),
      { top: 1 },
    ),
    new Tile(
      "Requests running",
      "running",
      (state) => ({ value: formatCount(state.gauges.running), unit: `and ${formatCount(state.gauges.waiting + state.gauges.loading)} waiting` }),
      (entries) => meanOf(entries, "running"),
    ),
    new Tile(
      "Pinned across tool calls",
      "pinned",
      (state) => {
        const { share, used } = state.held();
        return { value: formatCount(state.gauges.pins), unit: `${formatShare(share)} of the blocks${used ? `, ${formatCount(used)} of them in use` : ""}` };
      },
      (entries) => meanOf(entries, "pinned"),
      { top: 1 },
    ),
    new Tile(
      "Blocks in use",
      "cached",
      (state) => ({ value: formatShare(1 - state.gauges.free_blocks / state.gauges.total_blocks), unit: `${formatCount(state.gauges.free_blocks)} not in use` }),
      (entries) => meanOf(entries, "used"),
      { top: 1 },
    ),
  ];
  container.replaceChildren(...tiles.map((tile) => tile.element));
  return tiles;
}
