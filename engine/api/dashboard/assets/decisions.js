// What was decided last, in words.

const SHOWN_DECISIONS = 80;

function decisionItem(sentence, onJob) {
  const dot = el("i", "swatch dot");
  dot.style.background = `var(--${sentence.kind})`;
  const name = onJob ? jobButton("link", sentence.job, () => onJob(sentence.job)) : null;
  const words = el("span", "", name, name ? " " : null, sentence.text);
  if (sentence.why) words.append(el("span", "why", ` · ${sentence.why}`));
  const time = el("time", "", clock.timeOfDay(sentence.at));
  const item = el("li", "", dot, words, time);
  item.dataset.kind = sentence.kind;
  return item;
}

class Decisions {
  constructor(state, onJob) {
    this.state = state;
    this.onJob = onJob;
    this.list = byId("decision-list");
    this.numShown = 0;
    this.list.hidden = true;
  }

  draw() {
    const fresh = Math.min(this.state.numDecisions - this.numShown, this.state.decisions.length);
    if (fresh < 0) {
      this.list.replaceChildren();
      this.numShown = 0;
      return;
    }
    if (fresh === 0) return;
    const items = this.state.decisions.slice(-fresh).reverse().slice(0, SHOWN_DECISIONS);
    this.list.prepend(...items.map((sentence) => decisionItem(sentence, this.onJob)));
    while (this.list.children.length > SHOWN_DECISIONS) this.list.lastChild.remove();
    this.numShown = this.state.numDecisions;
    this.list.hidden = false;
    byId("decisions-empty").hidden = true;
  }
}
