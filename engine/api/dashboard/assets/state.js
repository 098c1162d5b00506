// What the page knows of the engine, put together from views. Knows nothing of how it is drawn.

const KEPT_S = 660; // spans and figures older than that are forgotten
const MAX_DECISIONS = 300;
const MAX_JOB_EVENTS = 200;
const MAX_JOBS_WITH_EVENTS = 400;
const ENDED_PIN_S = 2.5; // how long a pin that ended is still shown, with its end
const MAX_ENDED_PINS = 3;
const GAP = "tool";

class Lane {
  constructor(key, jobId, at) {
    this.key = key;
    this.jobId = jobId; // null: a request of no job
    this.spans = []; // { phase, from, to (null: still), req }
    this.open = new Map(); // request -> its span
    this.gap = null;
    this.holds = []; // { from, to, cause } of pins that ended
    this.firstSeen = at;
    this.lastActive = at;
  }

  enter(req, phase, at) {
    const before = this.open.get(req);
    if (before) {
      if (before.phase === phase) return;
      at = Math.max(at, before.from);
      before.to = at;
    }
    if (this.gap) {
      this.gap.to = Math.max(at, this.gap.from);
      this.gap = null;
    }
    const span = { phase, from: at, to: null, req };
    this.spans.push(span);
    this.open.set(req, span);
    this.lastActive = Math.max(this.lastActive, at);
  }

  end(req, at) {
    const span = this.open.get(req);
    if (!span) return;
    span.to = Math.max(at, span.from);
    this.open.delete(req);
    this.lastActive = Math.max(this.lastActive, at);
    if (this.jobId !== null && this.open.size === 0) this.beginGap(at);
  }

  beginGap(from) {
    this.gap = { phase: GAP, from, to: null, req: null };
    this.spans.push(this.gap);
  }

  finish(at) {
    if (this.gap) this.gap.to = Math.max(at, this.gap.from);
    this.gap = null;
    this.lastActive = Math.max(this.lastActive, at);
  }

  forget(before) {
    if (this.holds.length && this.holds[0].to < before) this.holds = this.holds.filter((hold) => hold.to >= before);
    if (this.spans.length && (this.spans[0].to ?? Infinity) < before) {
      this.spans = this.spans.filter((span) => (span.to ?? Infinity) >= before);
    }
  }
}

/** When a turn that ended then is expected back, as far as a decision says. */
function backOf(inputs, ended) {
  const median = inputs.tool_median_s;
  return { early: null, median: median === null || median === undefined ? null : ended + median, late: null, seen: inputs.tool_observations ?? 0 };
}

class EngineState {
  constructor() {
    this.reset(null);
  }

  reset(hello) {
    this.hello = hello;
    this.policy = "";
    this.now = null;
    this.gauges = null;
    this.blocks = null;
    this.series = []; // one per view: { at, s, generated, prefill, prompt, hits, ... }
    this.lanes = new Map();
    this.laneOf = new Map(); // request -> lane
    this.pins = new Map();
    this.endedPins = [];
    this.decisions = []; // newest last
    this.numDecisions = 0;
    this.jobEvents = new Map();
    this.jobs = new Map(); // id -> status as of `jobsAt`
    this.jobsAt = null;
    this.numLeftOut = 0;
  }

  take(view) {
    this.now = view.now;
    this.gauges = view.gauges;
    this.numLeftOut += view.num_left_out;
    this.takeTotals(view);
    for (const [req, job, phase, at] of view.phases) this.takePhase(req, job, phase, at);
    for (const event of view.events) this.takeEvent(event);
    if (view.scene) this.takeScene(view.scene, view.now);
    this.forgetOld(view.now);
  }

  takeTotals({ now, totals, gauges }) {
    this.series.push({
      at: now,
      s: totals.elapsed_s,
      generated: totals.generated_tokens,
      outputs: totals.output_steps,
      prefill: totals.prefill_tokens,
      prompt: totals.prompt_tokens,
      hits: totals.hit_tokens,
      preemptions: totals.preemptions,
      steps: totals.steps,
      running: gauges.running,
      waiting: gauges.waiting + gauges.loading,
      pinned: this.held().share,
      used: 1 - gauges.free_blocks / gauges.total_blocks,
    });
  }

  /** Blocks that pins hold, each counted once, as the map of the pool has them; `used`: those that a request runs on. */
  held() {
    if (this.blocks === null) return { blocks: 0, share: 0, used: 0 };
    const { num_held: blocks, num_pinned: alone, num_blocks: total } = this.blocks;
    return { blocks, share: blocks / total, used: blocks - alone };
  }

  // ---- lanes ----

  lane(job, req, at) {
    const key = job ?? `request ${plainId(req)}`;
    let lane = this.lanes.get(key);
    if (!lane) {
      lane = new Lane(key, job, at);
      this.lanes.set(key, lane);
    }
    return lane;
  }

  takePhase(req, job, phase, at) {
    const known = this.laneOf.get(req);
    if (phase === null) {
      known?.end(req, at);
      this.laneOf.delete(req);
      return;
    }
    const lane = known ?? this.lane(job, req, at);
    this.laneOf.set(req, lane);
    lane.enter(req, phase, at);
    if (phase === "memory") {
      this.decide({ kind: "memory", at, job: lane.jobId ?? lane.key, text: "was preempted", why: "no blocks were left for it" });
    }
  }

  /** A request that was there before the page was. */
  takeOpen(request) {
    const lane = this.lane(request.job_id, request.req_id, request.arrived_s);
    this.laneOf.set(request.req_id, lane);
    lane.enter(request.req_id, "queue", request.arrived_s);
    if (request.started_s !== null) lane.enter(request.req_id, "prefill", request.started_s);
    if (request.first_token_s !== null) lane.enter(request.req_id, "decode", request.first_token_s);
    lane.enter(request.req_id, request.phase, this.now);
  }

  takeScene(scene, now) {
    const open = new Set(scene.requests.map((request) => request.req_id));
    for (const [req, lane] of this.laneOf) {
      if (!open.has(req) && scene.requests.length < 512) {
        lane.end(req, now);
        this.laneOf.delete(req);
      }
    }
    for (const request of scene.requests) {
      if (!this.laneOf.has(request.req_id)) this.takeOpen(request);
    }
    this.policy = scene.policy;
    this.blocks = scene.blocks;
    this.jobs = new Map(scene.jobs.map((job) => [job.id, job]));
    this.jobsAt = now;
    this.takePins(scene.pins, now);
    for (const job of scene.jobs) this.takeStatus(job, now);
  }

  /** A job that waits for its tools since before the page was there. */
  takeStatus(job, now) {
    if (!job.branches.length || job.open_turns.length || this.lanes.has(job.id)) return;
    const from = now - Math.min(...job.branches.map((branch) => branch.elapsed_s));
    if (now - from < KEPT_S) this.lane(job.id, "", from).beginGap(from);
  }

  // ---- pins ----

  takePins(held, now) {
    const alive = new Set(held.map((pin) => pin.pin_id));
    for (const id of this.pins.keys()) if (!alive.has(id) && held.length < 256) this.pins.delete(id);
    for (const pin of held) {
      const known = this.pins.get(pin.pin_id) ?? { since: now };
      this.pins.set(pin.pin_id, Object.assign(known, { id: pin.pin_id, job: pin.job_id, req: pin.req_id, blocks: pin.num_blocks, deadline: pin.deadline_s }));
    }
    this.matchOutlooks(now);
  }

  /** Pins of a job and the branches that have one, in the order in which they run out: they are the same. */
  matchOutlooks(now) {
    const byJob = new Map();
    for (const pin of this.pins.values()) {
      byJob.set(pin.job, [...(byJob.get(pin.job) ?? []), pin]);
    }
    for (const [job, pins] of byJob) {
      const branches = (this.jobs.get(job)?.branches ?? []).filter((branch) => branch.ttl_s !== null);
      for (const pin of pins) pin.isBack = this.jobs.has(job) && branches.length === 0;
      if (branches.length !== pins.length) continue;
      branches.sort((one, other) => one.ttl_s - other.ttl_s);
      pins.sort((one, other) => one.deadline - other.deadline);
      pins.forEach((pin, place) => this.setOutlook(pin, branches[place], now));
    }
  }

  setOutlook(pin, branch, now) {
    pin.since = now - branch.elapsed_s;
    pin.tools = branch.tools;
    pin.reason = branch.reason;
    pin.told = branch.told;
    const at = (seconds) => (seconds === null ? null : now + seconds);
    pin.back = { early: at(branch.earliest_return_s), median: at(branch.expected_return_s), late: at(branch.latest_return_s), seen: branch.num_observations };
  }

  takePinEvent(event) {
    if (event.kind === "created") {
      this.pins.set(event.pin_id, { id: event.pin_id, job: event.job_id, req: event.req_id, blocks: event.num_blocks, deadline: event.deadline_s, since: event.now });
      return;
    }
    const pin = this.pins.get(event.pin_id);
    if (!pin) return;
    if (event.kind === "decided" && event.ttl_s) {
      const ended = event.now - (event.inputs?.elapsed_s ?? 0);
      pin.deadline = ended + event.ttl_s;
      pin.reason = event.reason;
      pin.back = backOf(event.inputs ?? {}, ended);
    } else if (event.kind === "shrunk") {
      pin.blocks -= event.num_blocks;
    } else if (event.kind === "ended") {
      this.pins.delete(event.pin_id);
      this.endedPins.push({ ...pin, ended: event.now, cause: event.cause ?? "released", heldFor: event.held_s });
      this.lanes.get(pin.job)?.holds.push({ from: pin.since, to: event.now, cause: event.cause ?? "released" });
    }
  }

  takeTools(event) {
    for (const pin of this.pins.values()) if (pin.req === event.req_id) pin.tools = event.tools ?? [];
  }

  // ---- decisions ----

  takeEvent(event) {
    this.keepJobEvent(event);
    if (event.type === "pin_event") this.takePinEvent(event);
    else if (event.kind === "tools_started") this.takeTools(event);
    else if (event.kind === "finished") this.lanes.get(event.job_id)?.finish(event.now);
    if (isProvisional(event)) return;
    const sentence = sentenceOf(event);
    if (sentence) this.decide(sentence);
  }

  decide(sentence) {
    this.decisions.push(sentence);
    this.numDecisions += 1;
    if (this.decisions.length > MAX_DECISIONS) this.decisions.splice(0, this.decisions.length - MAX_DECISIONS);
  }

  keepJobEvent(event) {
    let events = this.jobEvents.get(event.job_id);
    if (!events) {
      if (this.jobEvents.size >= MAX_JOBS_WITH_EVENTS) this.jobEvents.delete(this.jobEvents.keys().next().value);
      events = [];
      this.jobEvents.set(event.job_id, events);
    }
    events.push(event);
    if (events.length > MAX_JOB_EVENTS) events.shift();
  }

  // ---- what is derived ----

  forgetOld(now) {
    const before = now - KEPT_S;
    while (this.series.length && this.series[0].at < before) this.series.shift();
    this.endedPins = this.endedPins.filter((pin) => now - pin.ended < ENDED_PIN_S).slice(-MAX_ENDED_PINS);
    for (const [key, lane] of this.lanes) {
      lane.forget(before);
      if (!lane.open.size && !lane.spans.length) this.lanes.delete(key);
      else if (!lane.open.size && lane.gap && lane.gap.from < before) this.lanes.delete(key);
    }
  }

  /** Sum of a figure over the last seconds, and over how long that is. */
  recent(names, seconds) {
    const sums = Object.fromEntries(names.map((name) => [name, 0]));
    let time = 0;
    for (let place = this.series.length - 1; place >= 0 && time < seconds; place -= 1) {
      const entry = this.series[place];
      time += entry.s;
      for (const name of names) sums[name] += entry[name];
    }
    return { ...sums, time };
  }

  rate(name, seconds) {
    const sum = this.recent([name], seconds);
    return sum.time > 0 ? sum[name] / sum.time : 0;
  }

  /** Output tokens of a step of a request: more than 1 where drafts are accepted; null if nothing came. */
  tokensPerStep(seconds) {
    const sum = this.recent(["generated", "outputs"], seconds);
    return sum.outputs > 0 ? sum.generated / sum.outputs : null;
  }

  /** Share of prompt tokens that were found; null if no prompt came. */
  hitRate(seconds) {
    const sum = this.recent(["prompt", "hits"], seconds);
    return sum.prompt > 0 ? sum.hits / sum.prompt : null;
  }
}
