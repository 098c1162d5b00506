// Puts the page together.
"use strict";

let gantt = null;

function fillJobTable() {
  const seconds = (head, ...kinds) => ({
    head,
    cell: (job) => inSeconds(job.secondsOf(...kinds)),
    key: (job) => job.secondsOf(...kinds),
  });
  const setFilter = sortableTable(
    byId("job-table"),
    [
      {
        head: "job",
        left: true,
        className: "name",
        key: (job) => job.job_id,
        cell: (job) =>
          el(
            "button",
            { type: "button", className: "link id", title: job.job_id, onclick: () => openLife(job) },
            shortened(job.name, 44),
          ),
      },
      { head: "began at", cell: (job) => moment(job.began_s), key: (job) => job.began_s },
      {
        head: "job time, s",
        cell: (job) => inSeconds(job.wall_s) + (job.is_open ? " +" : ""),
        key: (job) => job.wall_s,
      },
      {
        head: "where it went",
        left: true,
        cell: (job) => secondsBar(job.seconds, "bar small"),
        key: (job) => job.secondsOf("queue", "memory", "preempted") / (job.wall_s || 1),
      },
      seconds("queued, s", "queue"),
      seconds("for memory, s", "memory", "preempted"),
      ...(report.seconds[report.kinds.indexOf("load")] > 0 ? [seconds("loading, s", "load")] : []),
      seconds("prefill, s", "prefill", "recompute"),
      seconds("decode, s", "decode"),
      seconds("tools, s", "tool", "client"),
      { head: "turns", cell: (job) => count(job.num_turns), key: (job) => job.num_turns },
      {
        head: "recomputed, tokens",
        cell: (job) => count(job.sum("recomputed_tokens")),
        key: (job) => job.sum("recomputed_tokens"),
      },
    ],
    jobs,
    2,
  );
  const filter = byId("job-filter");
  filter.addEventListener("input", () =>
    setFilter((job) => job.job_id.toLowerCase().includes(filter.value.toLowerCase())),
  );
}

function start() {
  connectTheme();
  const { duration_s } = report.trace;
  timeWindow.whole = [0, duration_s > 0 ? duration_s : 1];
  timeWindow.all();
  byId("where").append(...secondsTold(report.seconds));
  fillLegend(byId("gantt-legend"), ganttLegend());
  if (jobs.length) gantt = new Gantt(byId("gantt"));
  drawPool();
  drawQueue();
  for (const button of document.querySelectorAll("[data-move]"))
    button.addEventListener("click", () => timeWindow.move(button.dataset.move));
  drawTools();
  fillJobTable();
  connectLife();
}

start();
