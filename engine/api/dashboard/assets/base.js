"use strict";
// What every part of the page uses: elements, colors, canvases, how numbers are written, the server's clock.

const byId = (id) => document.getElementById(id);

/** An element of a class with children; strings become text, never markup. */
function el(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function button(className, text, onClick) {
  const made = el("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

/** What `continuum bench` puts behind the ids of a run's jobs: the same for all of them. */
const RUN_MARK = /\.[0-9a-f]{6}$/;

/** A name that loses its middle where it does not fit: jobs differ at their ends, but for the mark of their run. */
function cutInTheMiddle(whole) {
  const name = whole.replace(RUN_MARK, "");
  const tail = name.length > 12 ? 6 : 0;
  return el("span", "cut", el("span", "head", name.slice(0, name.length - tail)), tail ? el("span", "", name.slice(-tail)) : null);
}

/** What opens a job. */
function jobButton(className, job, onClick) {
  const made = button(className, cutInTheMiddle(job), onClick);
  made.title = job;
  made.setAttribute("aria-label", job);
  return made;
}

/** Sets text only where it differs: an idle page costs nothing. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Buttons of which one is pressed. */
function choice(container, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) => {
    const made = button("", text, () => choose(value));
    made.dataset.value = String(value);
    return made;
  });
  function choose(value) {
    for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.value === String(value)));
    onChoose(value);
  }
  container.replaceChildren(...buttons);
  choose(chosen);
}

// ---- colors ----

const palette = {
  probe: document.createElement("i"),
  known: new Map(),
  jobs: new Map(),
  dark: false,

  start() {
    this.probe.hidden = true;
    document.body.append(this.probe);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.reset());
    this.reset();
  },

  reset() {
    this.known.clear();
    const chosen = document.documentElement.dataset.theme;
    this.dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },

  /** What a token of the style sheet is in the theme that is shown. */
  token(name) {
    let color = this.known.get(name);
    if (color === undefined) {
      this.probe.style.color = `var(--${name})`;
      color = getComputedStyle(this.probe).color;
      this.known.set(name, color);
    }
    return color;
  },

  /** A job keeps its color while the page is open; neighbors in time are far apart in hue. */
  job(id) {
    let place = this.jobs.get(id);
    if (place === undefined) {
      place = this.jobs.size;
      this.jobs.set(id, place);
    }
    const hue = (265 + place * 137.508) % 360;
    return this.dark ? `oklch(74% 0.13 ${hue.toFixed(0)})` : `oklch(60% 0.15 ${hue.toFixed(0)})`;
  },
};

/** The canvas's context in CSS pixels, sized to its place. */
function fitCanvas(canvas, height) {
  const width = canvas.clientWidth;
  const tall = height ?? canvas.clientHeight;
  const ratio = devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(tall * ratio)];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    canvas.width = pixelWidth;
    canvas.height = pixelHeight;
    if (height !== undefined) canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}

// ---- numbers ----

const whole = new Intl.NumberFormat("en");

function formatCount(number) {
  return whole.format(Math.round(number));
}

function formatRate(number) {
  if (number >= 99_950) return `${(number / 1000).toFixed(0)}k`;
  if (number >= 9_995) return `${(number / 1000).toFixed(1)}k`;
  return formatCount(number);
}

function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 119.5) return `${seconds.toFixed(0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Where a tenth of a second says nothing: how long a phase took. */
function formatSpan(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 0.995 ? `${Math.round(seconds * 1000)} ms` : formatSeconds(seconds);
}

function formatShare(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

function formatMany(number, one, many) {
  return `${formatCount(number)} ${number === 1 ? one : many ?? `${one}s`}`;
}

// ---- time ----

/** The server's clock, estimated from its messages: those with the least delay count. */
const clock = {
  samples: [],
  offset: null,

  observe(serverNow) {
    this.samples.push(serverNow - performance.now() / 1000);
    if (this.samples.length > 50) this.samples.shift();
    const best = Math.max(...this.samples);
    this.offset = this.offset === null || Math.abs(best - this.offset) > 1 ? best : this.offset + (best - this.offset) * 0.2;
  },

  forget() {
    this.samples = [];
    this.offset = null;
  },

  now() {
    return this.offset === null ? null : performance.now() / 1000 + this.offset;
  },

  /** The time of day of a moment on the server's clock. */
  timeOfDay(at) {
    const now = this.now();
    return new Date(Date.now() + (at - (now ?? at)) * 1000).toLocaleTimeString("en-GB");
  },
};

// ---- the tip under the pointer ----

const tip = {
  show(text, x, y) {
    const box = byId("tip");
    setText(box, text);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    box.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  },
  hide() {
    byId("tip").hidden = true;
  },
};
