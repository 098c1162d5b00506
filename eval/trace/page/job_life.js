// One job's life: each turn as a line of a waterfall, the gap after it, and the pin over that gap with its reasons.
"use strict";

function openLife(job) {
  tip.hide();
  document.body.append(tip.box);
  const dialog = byId("life");
  dialog.replaceChildren(lifeHead(job, dialog), lifeBody(job));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", "#job=" + encodeURIComponent(job.job_id));
}

function connectLife() {
  const dialog = byId("life");
  dialog.addEventListener("close", () => {
    tip.hide();
    document.body.append(tip.box);
    history.replaceState(null, "", location.pathname + location.search);
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  openFromAddress();
  addEventListener("hashchange", openFromAddress);
}

function openFromAddress() {
  if (!location.hash.startsWith("#job=")) return;
  let id = "";
  try {
    id = decodeURIComponent(location.hash.slice(5));
  } catch {
    /* an address that somebody cut */
  }
  if (jobById.has(id)) openLife(jobById.get(id));
}

function lifeHead(job, dialog) {
  const showInTime = () => {
    dialog.close();
    const margin = Math.max(job.wall_s * 0.03, LEAST_WINDOW_S);
    timeWindow.set(job.began_s - margin, job.ended_s + margin);
    gantt.choose(job);
    byId("timeline").scrollIntoView();
    gantt.host.focus({ preventScroll: true });
  };
  const prompt = job.sum("num_prompt_tokens");
  const facts = [
    `${duration(job.wall_s)} from its first turn's arrival to its last turn's end`,
    `began at ${moment(job.began_s)}`,
    counted(job.num_turns, "turn"),
    `${percent(job.sum("cached_tokens") / prompt)} of ${counted(prompt, "prompt token")} found in the cache`,
    `${counted(job.sum("recomputed_tokens"), "token")} recomputed`,
    `${counted(job.sum("num_preemptions"), "preemption")}`,
  ];
  if (job.is_open) facts.push("not over where the trace ends");
  return el(
    "div",
    { className: "life-head" },
    el(
      "div",
      { className: "head" },
      el("h2", { id: "life-title", className: "id" }, job.job_id),
      el(
        "div",
        { className: "life-buttons" },
        el("button", { type: "button", onclick: showInTime }, "Show on the timeline"),
        el("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Close"),
      ),
    ),
    el("p", { className: "facts" }, ...facts.map((fact) => el("span", {}, fact))),
  );
}

function lifeBody(job) {
  const left = job.num_turns - job.turns.length;
  return el(
    "div",
    { className: "life-body" },
    el("div", { className: "where" }, ...secondsTold(job.seconds)),
    el(
      "ul",
      { className: "legend" },
      ...[
        ["tool", "gap until the next turn", "thin"],
        ["pinned", "KV held", "thin"],
        ["edge", "end of the granted time", "tick"],
      ].map(([token, label, shape]) => el("li", {}, swatch(token, shape), label)),
    ),
    el("div", { className: "scroll" }, turnTable(job)),
    left > 0 ? el("p", { className: "quiet" }, `${counted(left, "later turn")} not on this page.`) : null,
  );
}

function turnTable(job) {
  const heads = [
    "turn",
    null,
    "gap after it, s",
    "called",
    "prompt",
    "cached",
    "recomputed",
    "output",
    "granted, s",
    "pin",
    "",
  ];
  const cells = heads.map((head, index) =>
    el(
      "th",
      { scope: "col", className: [1, 3].includes(index) ? "left" + (head ? "" : " fall") : "" },
      index === 1 ? fallAxis(job) : head,
    ),
  );
  return el(
    "table",
    { className: "turns" },
    el("thead", {}, el("tr", {}, ...cells)),
    el("tbody", {}, ...job.turns.flatMap((turn) => turnRows(job, turn))),
  );
}

function fallAxis(job) {
  const marks = [];
  const steps = innerWidth < 1000 ? 2 : 4;
  for (let step = 0; step <= steps; step++) {
    const at = (job.wall_s * step) / steps;
    marks.push(
      el(
        "span",
        { className: step === steps ? "last" : "", style: { left: (100 * step) / steps + "%" } },
        step ? "+" + moment(at, job.wall_s < 10 ? 0.1 : 1) : "0 s",
      ),
    );
  }
  return el("div", { className: "axis", ariaLabel: "time since the job began" }, ...marks);
}

function turnRows(job, turn) {
  const gap = job.gapAfter.get(turn.req_id);
  const pin = job.pinAfter.get(turn.req_id);
  const why = el("tr", { className: "why", hidden: true, id: "why-" + job.turns.indexOf(turn) });
  const open = el(
    "button",
    { type: "button", aria: { expanded: "false", controls: why.id, label: `Turn ${turn.number}: why` } },
    "Why",
  );
  open.addEventListener("click", () => {
    why.hidden = !why.hidden;
    open.setAttribute("aria-expanded", String(!why.hidden));
    if (!why.hidden && !why.childElementCount)
      why.append(el("td", { colSpan: 11 }, whyGrid(job, turn, gap, pin)));
  });
  const gap_s = gap && gap.ended_s !== null ? gap.ended_s - gap.started_s : null;
  return [
    el(
      "tr",
      {},
      el("th", { scope: "row" }, String(turn.number) + (turn.end === "ended" ? "" : ` (${turn.end})`)),
      el("td", { className: "fall" }, track(job, turn, gap, pin)),
      el("td", {}, inSeconds(gap_s)),
      el(
        "td",
        { className: "left name" },
        gap?.tools ? el("bdi", {}, gap.tools) : el("span", { className: "none" }, NONE),
      ),
      el("td", {}, count(turn.num_prompt_tokens)),
      el("td", {}, count(turn.cached_tokens)),
      el("td", {}, count(turn.recomputed_tokens)),
      el("td", {}, count(turn.num_output_tokens)),
      el("td", {}, pin ? inSeconds(grantedSeconds(pin)) : NONE),
      el(
        "td",
        {},
        pin
          ? el("span", {}, swatch(OUTCOME_TOKENS[pin.outcome], "dot"), " " + pin.outcome.replace("_", " "))
          : NONE,
      ),
      el("td", {}, open),
    ),
    why,
  ];
}

/** The turn's phases, the gap after it and the pin over that gap, where they are in the job's time. */
function track(job, turn, gap, pin) {
  const place = (from_s, to_s) => ({
    left: (100 * (from_s - job.began_s)) / (job.wall_s || 1) + "%",
    width: (100 * (Math.min(to_s, job.ended_s) - from_s)) / (job.wall_s || 1) + "%",
  });
  const part = (className, token, from_s, to_s) =>
    el("i", { className, style: { ...place(from_s, to_s), background: `var(--${token})` } });
  const parts = turn.tiles.map((tile) => part("", KINDS[tile.kind].token, tile.start_s, tile.end_s));
  if (gap && gap.ended_s !== null)
    parts.push(part("gap", gap.tools ? "tool" : "client", gap.started_s, gap.ended_s));
  if (pin && pin.outcome !== "refused") {
    parts.push(part("pin", "pinned", pin.began_s, pin.ended_s));
    if (pin.deadline_s !== null && pin.deadline_s <= job.ended_s)
      parts.push(
        el("i", {
          className: "until",
          style: { left: place(pin.deadline_s, pin.deadline_s).left, background: "var(--edge)" },
        }),
      );
  }
  const node = el("div", { className: "track" }, ...parts);
  const show = (event) =>
    tip.show(event.clientX, event.clientY, el("strong", {}, "Turn " + turn.number), trackTip(turn, gap, pin));
  node.addEventListener("mousemove", show);
  node.addEventListener("mouseleave", () => tip.hide());
  return node;
}

function trackTip(turn, gap, pin) {
  const entries = turn.tiles.map((tile) => [
    KINDS[tile.kind].label,
    duration(tile.end_s - tile.start_s),
    KINDS[tile.kind].token,
  ]);
  if (gap)
    entries.push([
      gap.tools ? el("bdi", {}, gap.tools) : "nothing called",
      gap.ended_s === null ? "no turn followed" : duration(gap.ended_s - gap.started_s),
      gap.tools ? "tool" : "client",
    ]);
  if (pin && pin.outcome !== "refused")
    entries.push(["KV held", duration(pin.ended_s - pin.began_s), "pinned"]);
  return lines(entries);
}

// ---- why ----

function whyGrid(job, turn, gap, pin) {
  return el(
    "div",
    { className: "why-grid" },
    el(
      "div",
      {},
      el("h4", {}, "This turn"),
      lines([
        ["request", el("span", { className: "id" }, turn.req_id)],
        ["arrived", "at " + moment(turn.arrived_s, 0.001)],
        ...turn.tiles.map((tile) => [
          KINDS[tile.kind].label,
          duration(tile.end_s - tile.start_s),
          KINDS[tile.kind].token,
        ]),
        ["prompt", counted(turn.num_prompt_tokens, "token")],
        ["of these known from the turn before", counted(turn.num_known_tokens, "token")],
        ["of these found in the cache", counted(turn.cached_tokens, "token")],
        ...(turn.loaded_tokens
          ? [["of that loaded from host memory or disk", counted(turn.loaded_tokens, "token")]]
          : []),
        ["preempted", counted(turn.num_preemptions, "time")],
      ]),
    ),
    pin
      ? whyPin(pin, gap)
      : el("div", {}, el("h4", {}, "Its KV"), el("p", {}, "The trace has no decision about holding it.")),
    pin && pin.inputs.length
      ? el(
          "div",
          {},
          el("h4", {}, "Inputs of the last decision"),
          lines(
            pin.inputs.map(([name, value]) => [
              inputLabel(name),
              value === null ? NONE : inputValue(name, value),
            ]),
          ),
        )
      : null,
  );
}

function whyPin(pin, gap) {
  const told = {
    handed_over: "was handed over to the next turn",
    expired: "expired before the next turn came",
    revoked: "was revoked: the memory was needed",
    released: "was released",
    superseded: "was unpinned: the job went on without it",
    refused: "was refused: the pins hold as much as they may",
    open: "is still held where the trace ends",
  };
  const held =
    pin.outcome === "refused"
      ? []
      : [
          ["held", duration(pin.ended_s - pin.began_s)],
          [
            "blocks",
            pin.blocks_at_end === pin.num_blocks
              ? count(pin.num_blocks)
              : `${count(pin.num_blocks)}, at its end ${count(pin.blocks_at_end)}`,
          ],
          ...(pin.num_shrinks ? [["revoked in parts", counted(pin.num_shrinks, "time")]] : []),
          ...(pin.revoked_by ? [["revoked for request", el("span", { className: "id" }, pin.revoked_by)]] : []),
          ...(pin.spared_s > 0 ? [["computing spared", duration(pin.spared_s)]] : []),
        ];
  if (gap && gap.ended_s !== null) held.push(["actual gap", duration(gap.ended_s - gap.started_s)]);
  return el(
    "div",
    {},
    el("h4", {}, "Its KV " + told[pin.outcome]),
    lines(held),
    el("h4", {}, "Decisions"),
    el(
      "ol",
      {},
      ...pin.decisions.map((decision) =>
        el(
          "li",
          {},
          `after ${duration(decision.now_s - pin.began_s)}: hold ${duration(decision.ttl_s)}; `,
          el("bdi", {}, decision.reason),
          ` (${decision.rule})`,
        ),
      ),
    ),
    ...(gap?.told.length
      ? [
          el("h4", {}, "What the client said"),
          el(
            "ol",
            {},
            ...gap.told.map(([now_s, state, left_s]) =>
              el(
                "li",
                {},
                `after ${duration(now_s - gap.started_s)}: ${state}` +
                  (left_s === null ? "" : `, ${duration(left_s)} to go`),
              ),
            ),
          ),
        ]
      : []),
  );
}

/** An input's name says its unit at its end. */
function inputLabel(name) {
  return name.replace(/_s$/, "").replaceAll("_", " ");
}

function inputValue(name, value) {
  if (typeof value === "number" && name.endsWith("_s")) return duration(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return el("bdi", {}, plainNumber(value));
}
