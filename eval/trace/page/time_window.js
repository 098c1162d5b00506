// The stretch of time that all charts of the page show, and what moves it: mouse, wheel, keys, buttons.
"use strict";

const STEPS_S = [
  1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15,
  30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000,
];
const LEAST_WINDOW_S = 0.0005;
const AXIS_PX = 34;

const timeWindow = {
  whole: [0, 1],
  min: 0,
  max: 1,
  charts: [],

  /** Show from min to max, as far as the trace goes. */
  set(min, max) {
    const [first, last] = this.whole;
    const width = Math.min(Math.max(max - min, LEAST_WINDOW_S), last - first);
    this.min = Math.min(Math.max(min, first), last - width);
    this.max = this.min + width;
    for (const chart of this.charts) chart.setScale("x", { min: this.min, max: this.max });
    const told = byId("window");
    if (told)
      told.textContent = `${moment(this.min, width / 100)} – ${moment(this.max, width / 100)} (${duration(width)})`;
  },
  /** Narrower (factor below 1) or wider, with `at` staying where it is. */
  zoom(factor, at = (this.min + this.max) / 2) {
    this.set(at - (at - this.min) * factor, at + (this.max - at) * factor);
  },
  /** Shift by a number of window widths; earlier if negative. */
  pan(widths) {
    const by = widths * (this.max - this.min);
    const [first, last] = this.whole;
    const allowed = Math.min(Math.max(by, first - this.min), last - this.max);
    this.set(this.min + allowed, this.max + allowed);
  },
  all() {
    this.set(...this.whole);
  },
  move(how) {
    const moves = {
      left: () => this.pan(-0.25),
      right: () => this.pan(0.25),
      in: () => this.zoom(0.5),
      out: () => this.zoom(2),
      all: () => this.all(),
    };
    moves[how]();
  },
};

const MOVE_KEYS = {
  ArrowLeft: "left",
  ArrowRight: "right",
  "+": "in",
  "=": "in",
  "-": "out",
  "−": "out",
  0: "all",
};

/** Keys that move what a chart shows; `move` is told left, right, in, out or all. */
function connectKeys(host, move) {
  host.addEventListener("keydown", (event) => {
    const how = MOVE_KEYS[event.key];
    if (!how || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(how);
  });
}

/** Room at the left of every chart, so that a moment is at the same place in each. */
function gutter() {
  return innerWidth < 640 ? 84 : 168;
}

/** The lanes scroll, and what tells so takes room from them. */
function lanesScrollbarPx() {
  const lanes = byId("gantt");
  return Math.max(0, lanes.offsetWidth - 2 - lanes.clientWidth);
}

function axisStyle() {
  return {
    stroke: () => colour("quiet"),
    font: "12px system-ui, sans-serif",
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1, size: 5 },
  };
}

function timeAxis() {
  return {
    ...axisStyle(),
    size: AXIS_PX,
    space: 70,
    incrs: STEPS_S,
    values: (chart, splits, axis, space, step_s) => splits.map((split) => moment(split, step_s)),
  };
}

/** A chart over time that keeps to the time window. `options`: series, bands, hooks, y (its scale), axis (of y), besideLanes. */
function timeChart(host, height, data, options) {
  const chart = new uPlot(
    {
      width: host.clientWidth - horizontalPadding(host),
      height,
      padding: [8, () => 14 + (options.besideLanes ? lanesScrollbarPx() : 0), 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false, click: () => {} },
        sync: {
          key: "trace",
          scales: ["x", null],
          setSeries: false,
          filters: { pub: isHover, sub: isHover },
        },
        bind: {
          mousedown: (self, target, handler) => (event) => {
            if (event.button === 0 && event.shiftKey) startPan(self, event);
            else if (event.button === 0) handler(event);
            return null;
          },
          dblclick: () => () => {
            timeWindow.all();
            return null;
          },
        },
      },
      scales: { x: { time: false }, y: options.y || {} },
      axes: [
        timeAxis(),
        { ...axisStyle(), size: () => gutter() - (options.axis.labelSize ?? 0), ...options.axis },
      ],
      series: [{}, ...options.series],
      bands: options.bands || [],
      hooks: { ...options.hooks, setSelect: [zoomToSelection] },
    },
    data,
    host,
  );
  timeWindow.charts.push(chart);
  chart.setScale("x", { min: timeWindow.min, max: timeWindow.max });
  chart.over.addEventListener("wheel", (event) => onWheel(chart, event), { passive: false });
  chart.over.addEventListener("mouseleave", () => tip.hide());
  onTheme(() => chart.redraw(true, true));
  return chart;
}

function horizontalPadding(host) {
  const style = getComputedStyle(host);
  return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
}

function isHover(type) {
  return type === "mousemove" || type === "mouseleave";
}

function zoomToSelection(chart) {
  const { left, width } = chart.select;
  if (width <= 0) return;
  chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  if (width < 4) return;
  timeWindow.set(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
}

function startPan(chart, event) {
  const { min, max } = timeWindow;
  const perPixel = (max - min) / chart.over.clientWidth;
  const onMove = (moved) => {
    const by = (event.clientX - moved.clientX) * perPixel;
    timeWindow.set(min + by, max + by);
  };
  const onUp = () => {
    removeEventListener("mousemove", onMove);
    removeEventListener("mouseup", onUp);
  };
  addEventListener("mousemove", onMove);
  addEventListener("mouseup", onUp);
}

function onWheel(chart, event) {
  const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    const x = event.clientX - chart.over.getBoundingClientRect().left;
    timeWindow.zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * 0.004))), chart.posToVal(x, "x"));
  } else if (sideways && (event.shiftKey || Math.abs(sideways) > Math.abs(event.deltaY))) {
    event.preventDefault();
    timeWindow.pan(sideways / chart.over.clientWidth);
  }
}

/** Keep a chart as wide as what it stands in. */
function keepWidth(host, setWidth) {
  let width = host.clientWidth;
  new ResizeObserver(() => {
    if (host.clientWidth === width || !host.clientWidth) return;
    width = host.clientWidth;
    setWidth(width - horizontalPadding(host));
  }).observe(host);
}
