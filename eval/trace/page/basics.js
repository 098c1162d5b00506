// What every part of a page about a trace uses: elements, numbers with units, colours, the tooltip.
// Text from a trace (ids of jobs, names of tools) is a stranger's: it only ever becomes text, never markup.
"use strict";

const byId = (id) => document.getElementById(id);

/** An element with properties (`data`, `style` and `aria` are objects) and children; a text stays a text. */
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style")
      for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "aria")
      for (const [key, one] of Object.entries(value)) node.setAttribute("aria-" + key, one);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// ---- numbers ----

const NONE = "–";
const wholeNumber = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 1,234 */
function count(value) {
  return wholeNumber.format(value);
}

/** A number and its noun: 1 block, 2 blocks. */
function counted(value, one, many = one + "s") {
  return count(value) + " " + (Math.round(value) === 1 ? one : many);
}

/** A share in [0, 1] as a percentage. */
function percent(share) {
  if (!Number.isFinite(share)) return NONE;
  const value = 100 * share;
  return (value > 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)) + " %";
}

/** Seconds in the unit that suits them. */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0) return "−" + duration(-seconds);
  if (seconds === 0) return "0 s";
  if (seconds < 0.00095) return (seconds * 1e6).toFixed(0) + " µs";
  if (seconds < 0.01) return (seconds * 1e3).toFixed(1) + " ms";
  if (seconds < 0.9995) return (seconds * 1e3).toFixed(0) + " ms";
  if (seconds < 9.995) return seconds.toFixed(2) + " s";
  if (seconds < 119.95) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds);
  if (whole < 7200) return Math.floor(whole / 60) + " min " + (whole % 60) + " s";
  return count(Math.floor(whole / 3600)) + " h " + (Math.floor(whole / 60) % 60) + " min";
}

const hundredths = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

/** Seconds for a column whose head says the unit: 1,234.50 */
function inSeconds(seconds) {
  return seconds === null || seconds === undefined ? NONE : hundredths.format(seconds);
}

/** A number of a kind that is not known, with four digits that count. */
function plainNumber(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return count(value);
  return String(Number(value.toPrecision(4)));
}

/** A moment on the axis of time: 12 s, 2:05, 1:02:05. `step_s`: how far it is to the next one. */
function moment(seconds, step_s = 1) {
  const digits = step_s >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step_s) - 1e-9));
  const sign = seconds < 0 ? "−" : "";
  const value = Number(Math.abs(seconds).toFixed(digits));
  if (value < 60) return sign + value.toFixed(digits) + " s";
  const rest = (value % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return sign + minutes + ":" + rest;
  return sign + Math.floor(minutes / 60) + ":" + String(minutes % 60).padStart(2, "0") + ":" + rest;
}

/** A long text without its middle; what cannot be seen in it is made visible. */
function shortened(text, room) {
  const clean = text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "\u{fffd}");
  const signs = [...clean];
  if (signs.length <= room) return clean;
  const head = Math.max(0, Math.floor((room - 1) * 0.4));
  return (
    signs.slice(0, head).join("") + "…" + signs.slice(signs.length - Math.max(1, room - 1 - head)).join("")
  );
}

// ---- colours ----

const colourProbe = el("i", { hidden: true });
let colours = new Map();

/** What a token of the style sheet is in the present theme, for a canvas. */
function colour(token) {
  if (!colours.has(token)) {
    if (!colourProbe.isConnected) document.body.append(colourProbe);
    colourProbe.style.color = "var(--" + token + ")";
    colours.set(token, getComputedStyle(colourProbe).color);
  }
  return colours.get(token);
}

const themeListeners = [];

/** Called whenever the colours have changed. */
function onTheme(listener) {
  themeListeners.push(listener);
}

function themeChanged() {
  colours = new Map();
  for (const listener of themeListeners) listener();
}

/** The buttons that choose light, dark, or what the system says. */
function connectTheme() {
  const buttons = [...document.querySelectorAll("[data-theme-choice]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const choice = button.dataset.themeChoice;
      if (choice === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = choice;
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      themeChanged();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
}

// ---- parts of a page ----

/** A small square of a colour, for legends and tooltips. */
function swatch(token, shape = "") {
  return el("i", { className: "swatch " + shape, style: { background: "var(--" + token + ")" } });
}

/** Entries are [token, label, shape, what it means]. */
function fillLegend(list, entries) {
  list.replaceChildren(
    ...entries.map(([token, label, shape, means]) =>
      el("li", { title: means ?? "" }, swatch(token, shape), label),
    ),
  );
}

/** Label and value, a line each; a label may have a colour. Lines are [label, value, token]. */
function lines(entries) {
  return el(
    "dl",
    {},
    ...entries.flatMap(([label, value, token]) => [
      el("dt", {}, token ? swatch(token) : null, label),
      el("dd", {}, value),
    ]),
  );
}

/** One bar of several parts: [token, share, label], shares of the whole. */
function partsBar(parts, label, className = "bar") {
  return el(
    "div",
    { className, role: "img", ariaLabel: label },
    ...parts
      .filter(([, share]) => share > 0)
      .map(([token, share, told]) =>
        el("i", {
          title: told,
          style: { width: (100 * share).toFixed(3) + "%", background: "var(--" + token + ")" },
        }),
      ),
  );
}

const tip = {
  box: byId("tip"),

  show(x, y, ...content) {
    const { box } = this;
    const host = document.querySelector("dialog[open]") || document.body;
    if (box.parentNode !== host) host.append(box); // a modal dialog covers whatever is not in it
    box.replaceChildren(...content);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const right = x + 16 + width > innerWidth - 8;
    const left = Math.max(8, right ? Math.min(x - 16, innerWidth - 8) - width : x + 16);
    const top = Math.max(8, Math.min(y + 16, innerHeight - height - 8));
    box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  },
  hide() {
    this.box.hidden = true;
  },
};
