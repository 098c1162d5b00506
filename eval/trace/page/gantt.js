// Jobs as lanes over time: what each did at every moment, and below it when its KV was held over a tool call.
// Only jobs that were there in the time window have a lane.
"use strict";

const LANE_PX = 20;
const BAR_PX = 10;

class Gantt {
  constructor(host) {
    this.host = host;
    this.spacer = el("div", { className: "spacer" });
    this.stuck = el("div", { className: "stuck" });
    this.lanes = jobs;
    this.chosen = null; // a job; likewise the next
    this.hovered = null;
    this.spacer.append(this.stuck);
    host.append(this.spacer);
    this.chart = timeChart(
      this.stuck,
      this.height(),
      [
        [0, 1],
        [null, null],
      ],
      {
        series: [{ paths: () => null, points: { show: false } }],
        y: { range: () => [0, 1] },
        axis: { values: () => [], grid: { show: false }, ticks: { show: false } },
        hooks: { draw: [() => this.draw()], setScale: [(chart, scale) => scale === "x" && this.lay()] },
      },
    );
    this.lay();
    host.addEventListener("scroll", () => this.chart.redraw(false, false));
    this.connectMouse();
    this.connectKeys();
    keepWidth(host, () => this.chart.setSize({ width: host.clientWidth, height: this.height() }));
  }

  height() {
    return Math.min(jobs.length * LANE_PX + 8 + AXIS_PX, Math.round(Math.min(540, innerHeight * 0.68)));
  }

  lay() {
    this.lanes = jobs.filter((job) => job.ended_s >= timeWindow.min && job.began_s <= timeWindow.max);
    this.spacer.style.height = Math.max(this.height(), this.lanes.length * LANE_PX + 8 + AXIS_PX) + "px";
    byId("job-count").textContent =
      this.lanes.length < jobs.length
        ? `${count(this.lanes.length)} of ${count(jobs.length)} in this stretch of time`
        : counted(jobs.length, "job");
  }

  // ---- drawing: in CSS pixels, on uPlot's canvas ----

  draw() {
    const chart = this.chart;
    if (!chart) return;
    const { ctx } = chart;
    const scale = uPlot.pxRatio;
    ctx.save();
    ctx.scale(scale, scale);
    const box = {
      left: chart.bbox.left / scale,
      top: chart.bbox.top / scale,
      width: chart.bbox.width / scale,
      height: chart.bbox.height / scale,
    };
    ctx.beginPath();
    ctx.rect(0, box.top, box.left + box.width, box.height);
    ctx.clip();
    const first = Math.max(0, Math.floor(this.host.scrollTop / LANE_PX));
    const last = Math.min(this.lanes.length, Math.ceil((this.host.scrollTop + box.height) / LANE_PX));
    for (let index = first; index < last; index++)
      this.drawLane(ctx, box, this.lanes[index], box.top + index * LANE_PX - this.host.scrollTop);
    ctx.restore();
  }

  drawLane(ctx, box, job, top) {
    if (job === this.chosen || job === this.hovered) {
      ctx.fillStyle = colour(job === this.chosen ? "line" : "panel");
      ctx.fillRect(0, top, box.left + box.width, LANE_PX);
    }
    this.drawName(ctx, box, job, top);
    ctx.save();
    ctx.beginPath();
    ctx.rect(box.left, top, box.width, LANE_PX);
    ctx.clip();
    const x = (time_s) =>
      box.left + (box.width * (time_s - timeWindow.min)) / (timeWindow.max - timeWindow.min);
    for (let number = job.firstTile(timeWindow.min); number < job.tiles.length; number++) {
      const tile = job.tiles[number];
      if (tile.start_s > timeWindow.max) break;
      const between = tile.kind === "tool" || tile.kind === "client";
      ctx.fillStyle = colour(KINDS[tile.kind].token);
      const left = x(tile.start_s);
      ctx.fillRect(left, top + (between ? 7 : 3), Math.max(x(tile.end_s) - left, 0.75), between ? 3 : BAR_PX);
    }
    for (const pin of job.pins) {
      if (pin.outcome === "refused" || pin.ended_s < timeWindow.min || pin.began_s > timeWindow.max) continue;
      ctx.fillStyle = colour("pinned");
      const left = x(pin.began_s);
      ctx.fillRect(left, top + 15, Math.max(x(pin.ended_s) - left, 0.75), 2.5);
      if (pin.outcome === "revoked" || pin.outcome === "expired") {
        ctx.fillStyle = colour(OUTCOME_TOKENS[pin.outcome]);
        ctx.fillRect(x(pin.ended_s) - 1, top + 13, 2, 6);
      }
    }
    ctx.restore();
  }

  drawName(ctx, box, job, top) {
    ctx.font = "11.5px ui-monospace, Menlo, Consolas, monospace";
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillStyle = colour("text");
    const room = Math.floor((box.left - 18) / ctx.measureText("m").width);
    ctx.fillText(shortened(job.name, room), 8, top + LANE_PX / 2);
  }

  // ---- mouse and keys ----

  /** The job whose lane it is. */
  laneAt(event) {
    const { top, bottom } = this.chart.over.getBoundingClientRect();
    if (event.clientY < top || event.clientY > bottom) return null;
    return this.lanes[Math.floor((event.clientY - top + this.host.scrollTop) / LANE_PX)] ?? null;
  }

  connectMouse() {
    const { over } = this.chart;
    over.style.cursor = "pointer";
    over.addEventListener("mousemove", (event) => this.hover(event));
    over.addEventListener("mouseleave", () => this.highlight(null));
    // Names are left of what uPlot listens to. A drag, too, ends in a click.
    let downAt = 0;
    this.stuck.addEventListener(
      "mousedown",
      (event) => {
        downAt = event.clientX;
      },
      true,
    );
    this.stuck.addEventListener("click", (event) => {
      const job = this.laneAt(event);
      if (job && Math.abs(event.clientX - downAt) < 4) openLife(job);
    });
  }

  highlight(job) {
    if (job === this.hovered) return;
    this.hovered = job;
    this.chart.redraw(false, false);
  }

  hover(event) {
    const job = this.laneAt(event);
    this.highlight(job);
    if (!job || event.buttons) return tip.hide();
    const time_s = this.chart.posToVal(event.clientX - this.chart.over.getBoundingClientRect().left, "x");
    tip.show(
      event.clientX,
      event.clientY,
      ...laneTip(job, time_s, (timeWindow.max - timeWindow.min) / this.chart.over.clientWidth),
    );
  }

  connectKeys() {
    connectKeys(this.host, (how) => timeWindow.move(how));
    this.host.addEventListener("keydown", (event) => {
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
      if (event.key in moves) {
        event.preventDefault();
        const from = this.lanes.indexOf(this.chosen);
        this.choose(this.lanes[Math.min(Math.max(from + moves[event.key], 0), this.lanes.length - 1)]);
      } else if (event.key === "Enter" && this.chosen !== null) {
        event.preventDefault(); // else it goes on to the button that gets the focus
        openLife(this.chosen);
      }
    });
    this.host.addEventListener("blur", () => {
      this.chosen = null;
      byId("gantt-choice").textContent = "";
      this.chart.redraw(false, false);
    });
  }

  choose(job) {
    if (!job) return;
    this.lay(); // the time window may just have moved
    this.chosen = job;
    const top = this.lanes.indexOf(job) * LANE_PX;
    const room = this.host.clientHeight - AXIS_PX - LANE_PX - 8;
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (top > this.host.scrollTop + room) this.host.scrollTop = top - room;
    byId("gantt-choice").textContent =
      `${job.job_id}: ${counted(job.num_turns, "turn")}, ${duration(job.wall_s)}. Enter opens its life.`;
    this.chart.redraw(false, false);
  }
}

/** What the job was doing at a moment; short things within a few pixels of it count. */
function laneTip(job, time_s, perPixel_s) {
  const number = job.firstTile(time_s - 2 * perPixel_s);
  const tile = job.tiles[number];
  const title = el("strong", { className: "id" }, job.job_id);
  if (!tile || tile.start_s > time_s + 2 * perPixel_s)
    return [
      title,
      lines([
        ["turns", count(job.num_turns)],
        ["job time", duration(job.wall_s)],
        ["began at", moment(job.began_s)],
      ]),
    ];
  const { token, label } = KINDS[tile.kind];
  const entries = [[label, duration(tile.end_s - tile.start_s), token]];
  if (tile.turn !== null && tile.turn !== undefined)
    entries.unshift(["turn", `${tile.turn} of ${job.num_turns}`]);
  if (tile.gap?.tools) entries.push(["call", el("bdi", {}, tile.gap.tools)]);
  const pin = tile.gap
    ? job.pinAfter.get(tile.gap.req_id)
    : job.pins.find((one) => one.began_s <= time_s && time_s <= one.ended_s);
  if (pin && pin.outcome !== "refused") {
    entries.push([
      "KV held",
      `${duration(pin.ended_s - pin.began_s)}, ${counted(pin.num_blocks, "block")}`,
      "pinned",
    ]);
    entries.push(
      ["granted", duration(grantedSeconds(pin))],
      ["pin", pin.outcome.replace("_", " "), OUTCOME_TOKENS[pin.outcome]],
    );
  } else if (tile.gap) entries.push(["KV", pin ? "refused: the pins hold as much as they may" : "not held"]);
  return [title, lines(entries), el("p", {}, `at ${moment(tile.start_s, 0.001)}; click for the job's life`)];
}

function ganttLegend() {
  const present = new Set(
    jobs.flatMap((job) => report.kinds.filter((kind, index) => job.seconds[index] > 0)),
  );
  return [
    ...Object.entries(KINDS)
      .filter(([kind]) => present.has(kind))
      .map(([kind, { token, label, means }]) => [
        token,
        label,
        kind === "tool" || kind === "client" ? "thin" : "",
        means,
      ]),
    ...(jobs.some((job) => job.pins.length)
      ? [
          ["pinned", "KV held by a pin", "thin"],
          ["expired", "pin expired", "tick"],
          ["revoked", "pin revoked", "tick"],
        ]
      : []),
  ];
}
