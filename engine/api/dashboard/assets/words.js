// Events as sentences. Each is { kind, at, job, text, why }: `text` is what follows the job's name.

function causeWords(event) {
  const blocks = formatMany(event.num_blocks ?? 0, "block");
  const held = event.held_s === undefined ? "" : ` after ${formatSeconds(event.held_s)}`;
  switch (event.cause) {
    case "handed_over":
      return { kind: "handed-over", text: `came back${held} and took over its ${blocks}`, why: "they need not be computed again" };
    case "expired":
      return { kind: "expired", text: `was not back${held}: its ${blocks} are let go`, why: "they stay cached until somebody needs the room" };
    case "revoked":
      return { kind: "revoked", text: `lost its ${blocks}${held}`, why: event.by ? `revoked for request ${plainId(event.by)}` : "pins may hold only so much" };
    case "superseded":
      return { kind: "released", text: `went on without ${blocks}${held}`, why: "its next prompt parted from them" };
    case "superseded":
      return { kind: "released", text: `went on without its ${blocks}${held}`, why: "its next prompt parts from them" };
    default:
      return { kind: "released", text: `let its ${blocks} go${held}`, why: "no turn is expected, or its client has left" };
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
  if (!event.ttl_s) return { kind: "released", text: `is not held${tools}`, why };
  return { kind: "pinned", text: `is held for ${formatSeconds(event.ttl_s)}${tools}, ${blocks}`, why };
}

function pinWords(event) {
  switch (event.kind) {
    case "decided":
      return decidedWords(event);
    case "refused":
      return { kind: "revoked", text: "is not held", why: event.reason ?? "" };
    case "shrunk":
      if (event.cause) return causeWords(event);
      return { kind: "revoked", text: `lost ${formatMany(event.num_blocks, "block")} of what is held`, why: event.by ? `for request ${plainId(event.by)}` : "" };
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
      return { kind: "revoked", text: `computes ${formatCount(event.recomputed_tokens)} of ${formatCount(event.num_prompt_tokens)} prompt tokens again`, why: "an earlier turn had them, and they were let go" };
    case "turn_aborted":
      return { kind: "released", text: `gave up turn ${event.turn}`, why: "its client left, or ended it" };
    case "reported_started":
    case "reported_progress":
      return { kind: "tool", text: `says ${tools || "its call"} runs`, why: remaining === undefined ? "" : `${formatSeconds(remaining)} to go` };
    case "reported_finished":
      return { kind: "tool", text: `says ${tools || "its call"} is done`, why: "its next turn is about to come" };
    case "reported_cancelled":
      return { kind: "tool", text: `says ${tools || "its call"} was cancelled`, why: "" };
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

/** Before it is known what runs, a pin is only for the moment: no news. */
function isForTheMoment(event) {
  const inputs = event.inputs ?? {};
  return event.type === "pin_event" && event.kind === "decided" && inputs.called_tools === true && !inputs.tools;
}
