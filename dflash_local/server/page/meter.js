/** What drafting gains at the moment: speed, tokens per round, and each round as a bar. */

const MOST_BARS = 64;
const LEAST_HEIGHT = 8;
const AGAINST_REPEATS = "a temperature of 0.8 or a repeat penalty of 1.1 helps most models";
const SVG = "http://www.w3.org/2000/svg";

/** The counts of one answer, from the `draft_detail` of its chunks. */
export class Tally {
  /** `choice` says why there are drafts or none, if the user has decided that. */
  constructor(choice) {
    this.choice = choice;
    this.rounds = []; // the tokens of each
    this.copied = []; // those of them that are copies
    this.tokens = 0;
    this.begun = null;
    this.seconds = 0;
    this.perSecond = null;
    this.repeated = false;
  }

  add(detail, now) {
    this.begun ??= now;
    this.seconds = (now - this.begun) / 1000;
    for (const n of detail.rounds) {
      this.rounds.push(n);
      this.tokens += n;
    }
    this.copied.push(...detail.copied);
    this.drafting = detail.drafting;
    this.warning = detail.warning;
  }

  /** The answer is complete: from now on the speed is what the server measured. */
  end(timings) {
    if (timings && this.tokens) this.perSecond = timings.predicted_per_second;
    this.repeated = Boolean(timings?.repeated_n);
  }

  get speed() {
    return this.perSecond ?? (this.seconds > 0.05 ? this.tokens / this.seconds : 0);
  }

  /** Tokens per round: accepted drafts, and one token of the model's own. */
  get length() {
    return this.rounds.length ? this.tokens / this.rounds.length : 0;
  }

  /** The part of the answer that was drafted. */
  get share() {
    return this.tokens ? (this.tokens - this.rounds.length) / this.tokens : 0;
  }

  /** The part of the answer that was copied. */
  get copiedShare() {
    return this.tokens ? this.copied.reduce((sum, n) => sum + n, 0) / this.tokens : 0;
  }

  /**
   * Whether there were drafts, and why not. The figures beside it are what came, so nothing is said
   * of a forecast; and where the drafter was off, what was drafted are copies.
   */
  get reason() {
    if (this.drafting?.startsWith("drafting is on")) return "drafting is on";
    if (this.drafting?.startsWith("drafting is off") && this.share > 0)
      return `copies of the text are drafted; ${this.drafting.replace("drafting", "the drafter")}`;
    return this.drafting ?? this.choice;
  }

  get text() {
    if (!this.tokens) return "";
    const [speed, length] = [this.speed.toFixed(0), this.length.toFixed(1)];
    // Any drafter is good at a text without end.
    if (this.repeated) return `${speed} tokens/s · the text repeats itself: ${AGAINST_REPEATS}`;
    const parts = [`${speed} tokens/s`, `${length} tokens per round`];
    // By the drafter and by copies, or by one of them.
    if (this.share !== this.copiedShare || !this.share) parts.push(`${percent(this.share)} drafted`);
    if (this.copiedShare) parts.push(`${percent(this.copiedShare)} copied`);
    return parts.join(" · ");
  }
}

/** Shows a tally in the page's own elements. */
export class Meter {
  constructor(elements) {
    this.elements = elements;
  }

  show(tally) {
    const { speed, length, share, drafter, copies, rounds, reason, warning, drafting } =
      this.elements;
    drafting.classList.toggle("measured", tally.rounds.length > 0);
    speed.textContent = tally.speed ? tally.speed.toFixed(0) : "–";
    length.textContent = tally.length ? tally.length.toFixed(1) : "–";
    share.textContent = tally.tokens ? percent(tally.share) : "–";
    drafter.textContent = `: ${percent(tally.share - tally.copiedShare)}`;
    copies.textContent = `: ${percent(tally.copiedShare)}`;
    reason.textContent = tally.reason;
    warning.textContent = tally.warning ?? "";
    warning.hidden = !tally.warning;
    const [latest, copied] = [tally.rounds.slice(-MOST_BARS), tally.copied.slice(-MOST_BARS)];
    const height = Math.max(LEAST_HEIGHT, ...latest);
    rounds.setAttribute("viewBox", `0 0 ${MOST_BARS} ${height}`);
    rounds.replaceChildren(...latest.flatMap((n, i) => bar(n, copied[i], i, height)));
    const told = `Tokens of the last rounds: ${latest.slice(-12).join(", ")}`;
    rounds.setAttribute("aria-label", latest.length ? told : "No rounds yet");
  }
}

function percent(part) {
  return `${Math.round(100 * part)}%`;
}

/** The bar of a round: the drafter's tokens and the copies on top of the model's own token. */
function bar(n, copied, i, height) {
  const parts = [rect("own", i, height - 1, 1)];
  const drafted = n - 1 - copied;
  if (drafted) parts.push(rect("draft", i, height - 1 - drafted, drafted));
  if (copied) parts.push(rect("draft copied", i, height - n, copied));
  return parts;
}

function rect(name, x, y, height) {
  const element = document.createElementNS(SVG, "rect");
  for (const [key, value] of Object.entries({ class: name, x, y, width: 0.8, height }))
    element.setAttribute(key, value);
  return element;
}
