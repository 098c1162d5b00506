// Events as sentences. Each is { kind, at, job, text, why }: `text` is what follows the job's name.

/** What a pin was good for: without it, some of its blocks would have been evicted meanwhile. */
function neededWords(event) {
  if (event.needed_blocks === undefined || event.needed_blocks === null) return "";
  if (event.needed_blocks === 0) return "they would have stayed cached without the pin";
  return `without the pin ${formatMany(event.needed_blocks, "block")} would have been evicted`;
}

function causeWords(event) {
  const blocks = formatMany(event.num_blocks ?? 0, "block");
  const held = event.held_s === undefined ? "" : ` after ${formatSeconds(event.held_s)}`;
  switch (event.cause) {
    case "handed_over":
      return { kind: "handed-over", text: `returned${held} and took over its ${blocks}`, why: neededWords(event) };
    case "expired":
      return { kind: "expired", text: `did not return${held}: its ${blocks} are unpinned`, why: "they stay cached until other requests need them" };
    case "revoked":
      return { kind: "revoked", text: `lost its ${blocks}${held}`, why: event.by ? `revoked for request ${plainId(event.by)}` : "the pin budget is used up" };
    case "superseded":
      return { kind: "released", text: `went on without ${blocks}${held}`, why: "its next prompt does not contain them" };
    default:
      return { kind: "released", text: `released its ${blocks}${held}`, why: "no turn is expected, or its client has left" };
  }
}

function curveWords(inputs) {
  const seen = inputs.tool_observations;
  if (!seen) return "";
  const median = inputs.tool_median_s;
  const times = `seen ${formatSeen(seen)}`;
  return median === null || median === undefined ? times : `${times}, half are back within ${formatSpan(median)}`;
}

/** Old and borrowed observations count in part. */
function formatSeen(number) {
  const rounded = number < 9.95 ? Math.round(number * 10) / 10 : Math.round(number);
  return rounded === 1 ? "once" : `${whole.format(rounded)} times`;
}

function decidedWords(event) {
  const inputs = event.inputs ?? {};
  const tools = inputs.tools ? ` while ${String(inputs.tools)} runs` : "";
  const why = [event.reason, curveWords(inputs)].filter(Boolean).join(" · ");
  const blocks = formatMany(event.num_blocks ?? 0, "block");
  if (!event.ttl_s) return { kind: "released", text: `is not pinned${tools}`, why };
  return { kind: "pinned", text: `is pinned for ${formatSeconds(event.ttl_s)}${tools}, ${blocks}`, why };
}

function pinWords(event) {
  switch (event.kind) {
    case "decided":
      return decidedWords(event);
    case "refused":
      return { kind: "revoked", text: "is not pinned", why: event.reason ?? "" };
    case "shrunk":
      if (event.cause) return causeWords(event);
      return { kind: "revoked", text: `lost ${formatMany(event.num_blocks, "block")} of its pin`, why: event.by ? `for request ${plainId(event.by)}` : "" };
    case "ended":
      return causeWords(event);
    default:
      return null;
  }
}

function jobWords(event) {
  const tools = (event.tools ?? []).join(", ");
  const remaining = event.reported_remaining_s;
  switch (event.kind) {
    case "turn_admitted":
      if (!event.recomputed_tokens) return null;
      return { kind: "revoked", text: `recomputes ${formatCount(event.recomputed_tokens)} of ${formatCount(event.num_prompt_tokens)} prompt tokens`, why: "an earlier turn had them, and they were evicted" };
    case "turn_aborted":
      return { kind: "released", text: `gave up turn ${event.turn}`, why: "its client left, or ended it" };
    case "reported_started":
    case "reported_progress":
      return { kind: "tool", text: `says ${tools || "its call"} runs`, why: remaining === undefined ? "" : `${formatSeconds(remaining)} to go` };
    case "reported_finished":
      return { kind: "tool", text: `says ${tools || "its call"} is done`, why: "its next turn is about to come" };
    case "reported_cancelled":
      return { kind: "tool", text: `says ${tools || "its call"} was canceled`, why: "" };
    case "finished":
      return { kind: "released", text: `is finished after ${formatMany(event.turn, "turn")}`, why: "" };
    default:
      return null;
  }
}

/** A request's id as its client knows it: the engine adds a few characters of its own. */
function plainId(reqId) {
  return reqId.replace(/-[0-9a-f]{8}$/, "");
}

function sentenceOf(event) {
  const words = event.type === "pin_event" ? pinWords(event) : jobWords(event);
  return words === null ? null : { ...words, at: event.now, job: event.job_id };
}

/** Before it is known which tool runs, a pin is provisional and not worth a line. */
function isProvisional(event) {
  const inputs = event.inputs ?? {};
  return event.type === "pin_event" && event.kind === "decided" && inputs.called_tools === true && !inputs.tools;
}
