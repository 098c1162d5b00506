// Joins the parts: views go into the state, the state is drawn some times a second while the page is seen.

const FRAME_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 500 : 60;
const STATUS = { gone: "server gone", key: "needs a key" };
const LONGEST_GUESS_S = 1.5; // so far the clock runs on without a message from the server
const SLOW_FRAMES = 4; // the figures are drawn with every fourth

function start() {
  palette.start();
  const state = new EngineState();
  const life = new Life(state, (key) => lanes.choose(key));
  const open = (key) => life.open(key);
  const lanes = new Lanes(state, open);
  const blocks = new BlockMap(state, open);
  const pins = new Pins(state, open);
  const decisions = new Decisions(state, open);
  const tiles = makeTiles(byId("tiles"));
  const redrawn = [lanes, pins];

  setUpThemes(() => redrawn.forEach((part) => part.recolor()));

  const feed = new Feed({
    hello: (hello) => {
      if (state.hello?.core !== hello.core) {
        state.reset(hello);
        clock.forget();
      }
      state.hello = hello;
    },
    view: (view) => {
      clock.observe(view.now);
      state.take(view);
      showStatus("live", "live");
      setText(byId("fact-model"), state.hello.model);
      setText(byId("fact-policy"), `policy ${state.policy}`);
      setText(byId("fact-version"), `version ${state.hello.version}`);
      showNotice(state.numLeftOut ? `${formatMany(state.numLeftOut, "event")} came faster than they can be shown, and were left out.` : "");
    },
    status: (name, text) => {
      showStatus(name, STATUS[name]);
      showNotice(name === "gone" ? `${text[0].toUpperCase()}${text.slice(1)}.` : "");
    },
    askKey,
  });

  let frame = 0;
  function draw() {
    if (state.gauges !== null) {
      const now = Math.min(clock.now(), state.now + LONGEST_GUESS_S);
      lanes.draw(now);
      pins.draw(now);
      decisions.draw();
      if (frame % SLOW_FRAMES === 0) for (const tile of tiles) tile.draw(state, state.now);
      if (frame % 2 === 0) blocks.draw();
      life.draw(now);
      frame += 1;
    }
    setTimeout(() => requestAnimationFrame(draw), FRAME_MS); // a page that is not seen draws nothing
  }
  draw();
  feed.run();
}

function showStatus(name, text) {
  const status = byId("status");
  status.dataset.state = name;
  document.body.dataset.state = name;
  setText(status.lastElementChild, text);
}

function showNotice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

function setUpThemes(onChange) {
  const names = { auto: "Auto", light: "Light", dark: "Dark" };
  const order = Object.keys(names);
  let theme = localStorage.getItem("continuum-theme") ?? "auto";
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    setText(byId("theme"), names[theme]);
    palette.reset();
    onChange();
  };
  byId("theme").addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    localStorage.setItem("continuum-theme", theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

/** Asks for a key until one is given; keeps it for this tab. */
function askKey(wasWrong) {
  const dialog = byId("key-dialog");
  byId("key-wrong").hidden = !wasWrong;
  setText(byId("key-wrong"), "The server did not take this key.");
  sessionStorage.removeItem(KEY);
  if (!dialog.open) dialog.showModal();
  byId("key").value = "";
  byId("key").focus();
  return new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) { // no header can carry it
        setText(byId("key-wrong"), "A key is made of letters, digits and signs, without spaces.");
        byId("key-wrong").hidden = false;
        return;
      }
      sessionStorage.setItem(KEY, key);
      dialog.close();
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

start();
