// The block pool as a map: a cell is a block, or several of them in a large pool.

const KINDS = [
  ["running", "running", "read or written by a running request, pinned for another job or not"],
  ["pinned", "only pinned", "kept for a job whose tool runs, and used by no request"],
  ["cached", "cached", "not in use, but in the prefix cache"],
  ["free", "empty", "not in use, and not in the prefix cache"],
];
const SHARED_OWNER = 1;
const FLASH_MS = 700;

function bytesOf(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

class BlockMap {
  constructor(state, onJob) {
    this.state = state;
    this.canvas = byId("pool-map");
    this.source = null;
    this.cells = null;
    this.changed = null;
    this.byJob = true;
    this.counts = KINDS.map(() => el("b", "", "0"));
    this.shares = KINDS.map(() => el("span", "share", ""));
    this.bars = KINDS.map(([token]) => {
      const bar = el("i");
      bar.style.background = `var(--${token})`;
      return bar;
    });
    byId("pool-bar").replaceChildren(...this.bars);
    byId("pool-legend").replaceChildren(...KINDS.map(([token, text, title], place) => this.legend(token, text, title, place)));
    choice(byId("pool-colors"), [["job", "by job"], ["kind", "by kind"]], "job", (value) => this.colorBy(value));
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => tip.hide());
    this.canvas.addEventListener("click", (event) => {
      const job = this.jobOf(this.cellAt(event));
      if (job !== null) onJob(job);
    });
  }

  colorBy(value) {
    this.byJob = value === "job";
    const swatches = byId("pool-legend").querySelectorAll(".swatch");
    swatches.forEach((swatch, place) => {
      swatch.classList.toggle("jobs", this.byJob && place < 2);
      swatch.classList.toggle("hollow", this.byJob && place === 1);
    });
  }

  legend(token, text, title, place) {
    const swatch = el("i", "swatch");
    swatch.style.background = `var(--${token})`;
    const item = el("li", "", swatch, el("span", "", text), this.counts[place], this.shares[place]);
    item.title = title;
    item.dataset.kind = token;
    return item;
  }

  draw() {
    const blocks = this.state.blocks;
    if (blocks === null) return;
    if (blocks !== this.source) this.take(blocks);
    const { context, width, height } = fitCanvas(this.canvas);
    this.layout(width, height);
    const now = performance.now();
    for (let cell = 0; cell < this.numCells; cell += 1) this.drawCell(context, cell, now);
  }

  take(blocks) {
    const before = this.cells;
    const cells = { running: bytesOf(blocks.running), pinned: bytesOf(blocks.pinned), cached: bytesOf(blocks.cached), owners: bytesOf(blocks.owners) };
    this.numCells = cells.running.length;
    if (!before || before.running.length !== this.numCells) this.changed = new Float64Array(this.numCells).fill(-Infinity);
    else this.noteChanges(before, cells);
    this.cells = cells;
    this.source = blocks;
    this.showCounts(blocks);
  }

  noteChanges(before, cells) {
    const now = performance.now();
    for (let cell = 0; cell < this.numCells; cell += 1) {
      const same = before.running[cell] === cells.running[cell] && before.pinned[cell] === cells.pinned[cell];
      if (!same) this.changed[cell] = now;
    }
  }

  showCounts(blocks) {
    const total = blocks.num_blocks;
    const numbers = [blocks.num_running, blocks.num_pinned, blocks.num_cached];
    numbers.push(total - numbers[0] - numbers[1] - numbers[2]);
    numbers.forEach((number, place) => {
      setText(this.counts[place], formatCount(number));
      setText(this.shares[place], formatShare(number / total));
      this.bars[place].style.width = `${(number / total) * 100}%`;
    });
    setText(byId("pool-note"), this.note(blocks));
  }

  note(blocks) {
    const size = `${formatCount(blocks.num_blocks)} blocks of ${this.state.hello.block_size} tokens. `;
    const cell = size + (blocks.blocks_per_cell > 1 ? `A cell is ${blocks.blocks_per_cell} of them. ` : "A cell is a block. ");
    const { host_blocks: slots, used_host_blocks: used } = this.state.gauges;
    return cell + (this.byJob ? "Dark: shared by several jobs. " : "") + (slots ? `Host memory holds ${formatCount(used)} of ${formatCount(slots)} offloaded blocks.` : "");
  }

  layout(width, height) {
    const gapOf = (size) => (size > 7 ? 2 : size > 3.5 ? 1 : 0.5);
    let columns = Math.max(1, Math.floor(Math.sqrt((this.numCells * width) / height)));
    while (Math.ceil(this.numCells / columns) * (width / columns) > height) columns += 1;
    this.columns = columns;
    this.pitch = Math.min(width / columns, 22);
    this.size = this.pitch - gapOf(this.pitch);
  }

  drawCell(context, cell, now) {
    const x = (cell % this.columns) * this.pitch;
    const y = Math.floor(cell / this.columns) * this.pitch;
    const { running, pinned, cached } = this.cells;
    this.fill(context, palette.token("free"), x, y, this.size);
    let bottom = y + this.size;
    const part = (share, color, alpha) => {
      if (!share) return;
      const tall = (this.size * share) / 255;
      bottom -= tall;
      context.globalAlpha = alpha;
      this.fill(context, color, x, bottom, tall);
      context.globalAlpha = 1;
    };
    const job = this.jobOf(cell);
    const jobColor = this.colorOf(cell, job);
    part(running[cell], jobColor ?? palette.token("running"), 1);
    part(pinned[cell], jobColor ?? palette.token("pinned"), jobColor ? 0.62 : 1);
    part(cached[cell], palette.token("cached"), 0.55);
    if (pinned[cell] && jobColor) this.drawHold(context, x, y, jobColor);
    const fresh = 1 - (now - this.changed[cell]) / FLASH_MS;
    if (fresh > 0) {
      context.globalAlpha = fresh * 0.55;
      this.fill(context, palette.token("ground"), x, y, this.size);
      context.globalAlpha = 1;
    }
  }

  /** In the map by job: the color of its job, or that of shared blocks. Null: by kind. */
  colorOf(cell, job) {
    if (!this.byJob) return null;
    if (job !== null) return palette.job(job);
    return this.cells.owners[cell] === SHARED_OWNER ? palette.token("quiet") : null;
  }

  /** Pinned blocks have a hollow middle, so that they differ from running ones in more than color. */
  drawHold(context, x, y, color) {
    if (this.size < 5) return;
    const inset = this.size * 0.3;
    context.fillStyle = palette.token("panel");
    context.globalAlpha = 0.75;
    context.fillRect(x + inset, y + inset, this.size - 2 * inset, this.size - 2 * inset);
    context.globalAlpha = 1;
    context.fillStyle = color;
  }

  fill(context, color, x, y, tall) {
    context.fillStyle = color;
    context.fillRect(x, y, this.size, tall);
  }

  jobOf(cell) {
    if (cell === null || this.cells === null) return null;
    const owner = this.cells.owners[cell];
    return owner > SHARED_OWNER ? this.source.jobs[owner - 2] : null;
  }

  cellAt(event) {
    if (!this.numCells) return null;
    const { left, top } = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - left) / this.pitch);
    const cell = Math.floor((event.clientY - top) / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns && cell >= 0 && cell < this.numCells ? cell : null;
  }

  hover(event) {
    const cell = this.cellAt(event);
    this.canvas.style.cursor = this.jobOf(cell) === null ? "default" : "pointer";
    if (cell === null) tip.hide();
    else tip.show(this.words(cell), event.clientX, event.clientY);
  }

  words(cell) {
    const per = this.source.blocks_per_cell;
    const first = cell * per + 1;
    const name = per > 1 ? `Blocks ${formatCount(first)} to ${formatCount(Math.min(first + per - 1, this.source.num_blocks))}` : `Block ${formatCount(first)}`;
    const parts = KINDS.slice(0, 3)
      .filter(([token]) => this.cells[token][cell])
      .map(([token, text]) => (per > 1 ? `${formatShare(this.cells[token][cell] / 255)} ${text}` : text));
    const owner = this.cells.owners[cell];
    const whose = owner === SHARED_OWNER ? "\nshared by several jobs" : this.jobOf(cell) === null ? "" : `\n${this.jobOf(cell)}`;
    return `${name}: ${parts.join(", ") || "free"}${whose}`;
  }
}
