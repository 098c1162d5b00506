// Time granted against time needed: a point for each gap between two turns, and a line of figures for each call.
"use strict";

const POINT_PX = 3.6;
const NEAR_PX = 14;

class GrantChart {
  constructor(host) {
    this.host = host;
    this.points = [];
    this.hovered = null;
    this.limits = this.wholeLimits();
    this.chart = new uPlot(
      {
        width: host.clientWidth - horizontalPadding(host),
        height: 400,
        padding: [12, 32, 0, 0],
        legend: { show: false },
        cursor: {
          points: { show: false },
          drag: { x: true, y: true, setScale: false, dist: 4 },
          bind: {
            dblclick: () => () => {
              this.show(this.wholeLimits());
              return null;
            },
          },
        },
        scales: { x: { time: false, distr: 3 }, y: { distr: 3, range: () => this.limits.y } },
        axes: [
          {
            ...axisStyle(),
            size: 50,
            label: "actual gap, from one turn to the next",
            labelSize: 20,
            labelFont: "12px system-ui, sans-serif",
            filter: (chart, splits) => splits,
            splits: (chart, axis, min, max) => powers(min, max),
            values: (chart, splits) => splits.map(powerLabel),
          },
          {
            ...axisStyle(),
            size: 78,
            label: "granted: until the KV would be unpinned",
            labelSize: 20,
            labelFont: "12px system-ui, sans-serif",
            filter: (chart, splits) => splits,
            splits: (chart, axis, min, max) =>
              [this.floor, ...powers(min, max).filter((one) => one > this.floor * 1.5)].filter(
                (one) => one >= min && one <= max,
              ),
            values: (chart, splits) =>
              splits.map((split) => (split < this.floor * 1.01 ? "nothing" : powerLabel(split))),
          },
        ],
        series: [{}, { paths: () => null, points: { show: false } }],
        hooks: { draw: [() => this.draw()], setSelect: [(chart) => this.zoomToSelection(chart)] },
      },
      [
        [this.limits.x[0], this.limits.x[1]],
        [null, null],
      ],
      host,
    );
    this.show(this.limits);
    this.chart.over.addEventListener("mousemove", (event) => this.hover(event));
    this.chart.over.addEventListener("mouseleave", () => {
      this.hovered = null;
      tip.hide();
      this.chart.redraw(false, false);
    });
    this.chart.over.addEventListener(
      "click",
      () => this.hovered && jobById.has(this.hovered.job) && openLife(jobById.get(this.hovered.job)),
    );
    connectKeys(host, (how) => this.move(how));
    keepWidth(host, (width) => this.chart.setSize({ width, height: this.chart.height }));
    onTheme(() => this.chart.redraw(true, true));
  }

  /** Where all points of all calls are; what was granted nothing is at the floor. */
  wholeLimits() {
    const all = report.tools.flatMap((tool) => tool.points);
    const gaps = all.map(([gap_s]) => gap_s).filter((value) => value > 0);
    const granted = all.map(([, granted_s]) => granted_s).filter((value) => value > 0);
    const low =
      10 **
      Math.floor(
        Math.log10(
          Math.max(
            1e-4,
            gaps.concat(granted).reduce((a, b) => Math.min(a, b), 1),
          ),
        ),
      );
    const high = 10 ** Math.ceil(Math.log10(gaps.concat(granted).reduce((a, b) => Math.max(a, b), 1) * 1.05));
    const lowGranted =
      10 **
      Math.floor(
        Math.log10(
          Math.max(
            1e-4,
            granted.reduce((a, b) => Math.min(a, b), 1),
          ),
        ),
      );
    this.least = low;
    this.floor = lowGranted / 4;
    return { x: [low, high], y: [this.floor / 1.6, high] };
  }

  show(limits) {
    this.limits = limits;
    this.chart.batch(() => {
      this.chart.setScale("x", { min: limits.x[0], max: limits.x[1] });
      this.chart.setScale("y", { min: limits.y[0], max: limits.y[1] });
    });
  }

  showTool(index) {
    const tools = index === null ? report.tools : [report.tools[index]];
    const order = Object.keys(OUTCOMES); // what is rarer is drawn over what is not
    this.points = tools
      .flatMap((tool) =>
        tool.points.map(([gap_s, granted_s, outcome, job]) => ({
          gap_s,
          granted_s,
          outcome,
          job: report.strings[job],
          tool: tool.name,
          x: Math.max(gap_s, this.least),
          y: granted_s > 0 ? Math.max(granted_s, this.floor) : this.floor,
        })),
      )
      .sort((a, b) => order.indexOf(a.outcome) - order.indexOf(b.outcome));
    this.chart.redraw(false, false);
  }

  draw() {
    const chart = this.chart;
    if (!chart) return;
    const { ctx, bbox } = chart;
    const scale = uPlot.pxRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    this.drawDiagonal(ctx, scale);
    for (const point of this.points) this.drawPoint(ctx, point, scale, POINT_PX);
    if (this.hovered) this.drawPoint(ctx, this.hovered, scale, POINT_PX * 1.9);
    ctx.restore();
  }

  drawDiagonal(ctx, scale) {
    const { x, y } = this.limits;
    const low = Math.max(Math.min(x[0], y[0]), 1e-9);
    const high = Math.max(x[1], y[1]);
    ctx.beginPath();
    ctx.moveTo(this.chart.valToPos(low, "x", true), this.chart.valToPos(low, "y", true));
    ctx.lineTo(this.chart.valToPos(high, "x", true), this.chart.valToPos(high, "y", true));
    ctx.strokeStyle = colour("edge");
    ctx.lineWidth = 1.25 * scale;
    ctx.setLineDash([5 * scale, 4 * scale]);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  drawPoint(ctx, point, scale, radius) {
    ctx.globalAlpha = point === this.hovered ? 1 : 0.6;
    ctx.fillStyle = colour(OUTCOME_TOKENS[point.outcome]);
    ctx.beginPath();
    ctx.arc(
      this.chart.valToPos(point.x, "x", true),
      this.chart.valToPos(point.y, "y", true),
      radius * scale,
      0,
      2 * Math.PI,
    );
    ctx.fill();
    ctx.globalAlpha = 1;
  }

  hover(event) {
    const box = this.chart.over.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let near = null;
    let least = NEAR_PX ** 2;
    for (const point of this.points) {
      const distance =
        (this.chart.valToPos(point.x, "x") - x) ** 2 + (this.chart.valToPos(point.y, "y") - y) ** 2;
      if (distance < least) [near, least] = [point, distance];
    }
    if (near !== this.hovered) {
      this.hovered = near;
      this.chart.over.style.cursor = near && jobById.has(near.job) ? "pointer" : "";
      this.chart.redraw(false, false);
    }
    if (!near || event.buttons) return tip.hide();
    tip.show(
      event.clientX,
      event.clientY,
      el("strong", {}, el("bdi", {}, near.tool)),
      lines([
        ["actual gap", duration(near.gap_s)],
        ["granted", duration(near.granted_s)],
        ["pin", near.outcome.replace("_", " "), OUTCOME_TOKENS[near.outcome]],
        ["job", el("span", { className: "id" }, near.job)],
      ]),
    );
  }

  zoomToSelection(chart) {
    const { left, top, width, height } = chart.select;
    if (width <= 0 && height <= 0) return;
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width < 6 || height < 6) return;
    this.show({
      x: [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")],
      y: [chart.posToVal(top + height, "y"), chart.posToVal(top, "y")],
    });
  }

  /** On axes of powers of ten, moving is multiplying. */
  move(how) {
    if (how === "all") return this.show(this.wholeLimits());
    const moved = ([low, high], by) => [low * by, high * by];
    const zoomed = ([low, high], factor) => {
      const [middle, half] = [
        (Math.log(low) + Math.log(high)) / 2,
        ((Math.log(high) - Math.log(low)) / 2) * factor,
      ];
      return [Math.exp(middle - half), Math.exp(middle + half)];
    };
    const { x, y } = this.limits;
    if (how === "left") return this.show({ x: moved(x, 1 / 2), y });
    if (how === "right") return this.show({ x: moved(x, 2), y });
    const factor = how === "in" ? 0.6 : 1 / 0.6;
    return this.show({ x: zoomed(x, factor), y: zoomed(y, factor) });
  }
}

/** Powers of ten between two values; with 2 and 5 times them where there are few, every other one where many. */
function powers(min, max) {
  const all = [];
  const step = max / min > 1e5 && innerWidth < 640 ? 2 : 1;
  for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power += step) {
    for (const factor of max / min < 300 ? [1, 2, 5] : [1])
      all.push(Number((factor * 10 ** power).toPrecision(3)));
  }
  return all.filter((one) => one >= min * 0.999 && one <= max * 1.001);
}

function powerLabel(seconds) {
  if (seconds < 0.9e-3) return plainNumber(seconds * 1e6) + " µs";
  return seconds < 0.9 ? plainNumber(seconds * 1e3) + " ms" : plainNumber(seconds) + " s";
}

let grants = null;

function drawTools() {
  const present = Object.keys(OUTCOMES).filter((outcome) =>
    report.tools.some((tool) => tool.outcomes[outcome]),
  );
  byId("no-pins").hidden = present.some((outcome) => outcome !== "none");
  fillLegend(
    byId("scatter-legend"),
    present.map((outcome) => [OUTCOME_TOKENS[outcome], OUTCOMES[outcome], "dot"]),
  );
  grants = new GrantChart(byId("scatter"));
  const select = byId("scatter-tool");
  select.append(
    el("option", { value: "" }, "all calls"),
    ...report.tools.map((tool, index) => el("option", { value: String(index) }, tool.name)),
  );
  select.addEventListener("change", () => grants.showTool(select.value === "" ? null : Number(select.value)));
  grants.showTool(null);
  fillToolTable(present, (index) => {
    select.value = String(index);
    grants.showTool(index);
  });
}

function fillToolTable(present, choose) {
  const told = present.filter((outcome) => outcome !== "none");
  sortableTable(
    byId("tool-table"),
    [
      {
        head: "call",
        left: true,
        cell: (tool) =>
          el(
            "button",
            { type: "button", className: "link", onclick: () => choose(report.tools.indexOf(tool)) },
            el("bdi", {}, tool.name),
          ),
        key: (tool) => tool.name,
      },
      { head: "gaps", cell: (tool) => count(tool.num_gaps), key: (tool) => tool.num_gaps },
      {
        head: "median gap, s",
        cell: (tool) => inSeconds(tool.gap_p50_s),
        key: (tool) => tool.gap_p50_s ?? -1,
      },
      {
        head: "90 % of gaps within, s",
        cell: (tool) => inSeconds(tool.gap_p90_s),
        key: (tool) => tool.gap_p90_s ?? -1,
      },
      {
        head: "median granted, s",
        cell: (tool) => inSeconds(tool.granted_p50_s),
        key: (tool) => tool.granted_p50_s ?? -1,
      },
      ...told.map((outcome) => ({
        head: outcome.replace("_", " "),
        cell: (tool) => count(tool.outcomes[outcome] ?? 0),
        key: (tool) => tool.outcomes[outcome] ?? 0,
      })),
      { head: "computing spared, s", cell: (tool) => inSeconds(tool.spared_s), key: (tool) => tool.spared_s },
      { head: "held, block-s", cell: (tool) => count(tool.held_block_s), key: (tool) => tool.held_block_s },
      {
        head: "of it wasted",
        cell: (tool) => percent(tool.vain_block_s / tool.held_block_s),
        key: (tool) => tool.vain_block_s / (tool.held_block_s || 1),
      },
    ],
    report.tools,
    1,
  );
}
