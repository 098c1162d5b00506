// The KV pool by what its blocks are, and the requests by what they do, over time.
"use strict";

const POOL_KINDS = [
  ["running", "running"],
  ["pinned", "pinned: held over a tool call"],
  ["cached", "cached: free, but a prefix may be found"],
  ["free", "free"],
];
const REQUEST_KINDS = [
  ["num_running", "running", "running"],
  ["num_waiting", "queued", "queue"],
  ["num_loading", "loading KV from host memory", "loading"],
];

function drawPool() {
  const { series, trace } = report;
  const host = byId("pool");
  fillLegend(
    byId("pool-legend"),
    POOL_KINDS.map(([kind, label]) => [kind, label]),
  );
  const stacked = [];
  for (const [kind] of POOL_KINDS) {
    const below = stacked.at(-1);
    stacked.push(series[kind].map((value, index) => value + (below ? below[index] : 0)));
  }
  const stepped = uPlot.paths.stepped({ align: 1 });
  // From the top down: each fills all that is below it, and those after it are drawn over that.
  const order = [3, 2, 1, 0];
  const chart = timeChart(
    host,
    240,
    closed(
      series,
      order.map((index) => stacked[index]),
    ),
    {
      series: order.map((index) => ({
        paths: stepped,
        width: 0,
        points: { show: false },
        fill: () => colour(POOL_KINDS[index][0]),
        stroke: () => colour(POOL_KINDS[index][0]),
      })),
      besideLanes: true,
      y: { range: () => [0, Math.max(1, trace.num_blocks)] },
      axis: {
        values: (self, splits) => splits.map(count),
        label: "KV blocks",
        labelSize: 18,
        labelFont: "12px system-ui, sans-serif",
      },
      hooks: { setCursor: [(self) => hoverBucket(self, host, poolTip)] },
    },
  );
  finish(host, chart);
}

function poolTip(index) {
  const { series, trace } = report;
  return lines(
    POOL_KINDS.map(([kind]) => {
      const blocks = series[kind][index];
      return [kind, `${counted(blocks, "block")}, ${percent(blocks / trace.num_blocks)}`, kind];
    }),
  );
}

function drawQueue() {
  const { series } = report;
  const host = byId("queue");
  const kinds = REQUEST_KINDS.filter(
    ([name]) => name !== "num_loading" || series[name].some((value) => value > 0),
  );
  fillLegend(
    byId("queue-legend"),
    kinds.map(([, label, token]) => [token, label, "thin"]),
  );
  const stepped = uPlot.paths.stepped({ align: 1 });
  const most = Math.max(1, ...kinds.map(([name]) => series[name].reduce((a, b) => Math.max(a, b), 0)));
  const chart = timeChart(
    host,
    180,
    closed(
      series,
      kinds.map(([name]) => series[name]),
    ),
    {
      series: kinds.map(([, , token]) => ({
        paths: stepped,
        width: 1.5,
        points: { show: false },
        stroke: () => colour(token),
      })),
      besideLanes: true,
      y: { range: () => [0, most * 1.06] },
      axis: {
        values: (self, splits) => splits.map((split) => (Number.isInteger(split) ? count(split) : "")),
        label: "requests",
        labelSize: 18,
        labelFont: "12px system-ui, sans-serif",
      },
      hooks: {
        setCursor: [
          (self) =>
            hoverBucket(self, host, (index) =>
              lines([
                ...kinds.map(([name, label, token]) => [label, series[name][index].toFixed(1), token]),
                ["most queued at once", count(series.peak_waiting[index])],
              ]),
            ),
        ],
      },
    },
  );
  finish(host, chart);
}

/** The last bucket lasts as long as the others. */
function closed(series, columns) {
  if (!series.t.length) return [[0], ...columns.map(() => [null])];
  return [
    [...series.t, series.t.at(-1) + series.bucket_s],
    ...columns.map((column) => [...column, column.at(-1)]),
  ];
}

function hoverBucket(chart, host, content) {
  const { idx, left, top } = chart.cursor;
  if (!host.matches(":hover") || left < 0 || idx === null || idx === undefined) return;
  const { series } = report;
  const at = chart.posToVal(left, "x");
  let index = Math.min(idx, series.t.length - 1);
  if (index > 0 && series.t[index] > at) index -= 1;
  if (index < 0) return;
  const box = chart.over.getBoundingClientRect();
  tip.show(
    box.left + left,
    box.top + top,
    el("strong", {}, "At " + moment(at, (timeWindow.max - timeWindow.min) / 500)),
    content(index),
    el("p", {}, `mean over ${duration(series.bucket_s)}`),
  );
}

function finish(host, chart) {
  connectKeys(host, (how) => timeWindow.move(how));
  keepWidth(host, (width) => chart.setSize({ width, height: chart.height }));
}
