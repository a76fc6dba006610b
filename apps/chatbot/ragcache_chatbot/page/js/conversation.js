// The turns of one conversation, kept in this browser.

const VERSION = 1;

/**
 * What came of one question.
 * @typedef {object} Answer
 * @property {"asking" | "done" | "stopped" | "failed"} state
 * @property {string} text as far as it came
 * @property {string} [thoughts] what the model thought before it answered
 * @property {number | null} [thought_s] how long it thought
 * @property {string} method that was asked for; "" for the store's own
 * @property {import("./chat.js").Source[] | null} sources
 * @property {import("./chat.js").Ending | null} ending
 * @property {import("./chat.js").Usage | null} usage
 * @property {number | null} first_token_s until the first token was seen here
 * @property {import("./comparison.js").Comparison | null} [comparison] with a full prefill, where one was measured
 * @property {import("./errors.js").Trouble | null} trouble
 */

/**
 * One question. `earlier`: whether earlier turns were sent; `trim`: whether passages that do not fit were left out;
 * `beside`: what another method answers over the same passages
 * @typedef {Answer & {question: string, earlier: boolean, trim: boolean, system?: string, beside?: Answer | null}} Turn
 */

export class Conversation {
  /** @param {string} name that it is kept under */
  constructor(name) {
    this.name = name;
    const { turns, changed_ms } = stored(name);
    this.turns = turns;
    this.changed_ms = changed_ms;
  }

  /**
   * @param {string} question
   * @param {{method: string, earlier: boolean, trim: boolean, system: string}} how
   * @returns {Turn}
   */
  add(question, how) {
    const turn = { question, ...asking(how.method), ...how };
    this.turns.push(turn);
    this.changed_ms = Date.now();
    return turn;
  }

  /** Remove a turn and all that follow it. @param {Turn} turn */
  cut(turn) {
    this.turns.splice(this.turns.indexOf(turn));
  }

  /**
   * The messages that a turn is asked with: where earlier turns are wanted, those that were answered.
   * @param {Turn} turn
   * @returns {import("./chat.js").Message[]}
   */
  messages(turn) {
    const before = turn.earlier ? this.turns.slice(0, this.turns.indexOf(turn)).filter(({ text }) => text) : [];
    const history = before.flatMap(({ question, text }) => [
      { role: "user", content: question },
      { role: "assistant", content: text },
    ]);
    const system = turn.system ? [{ role: "system", content: turn.system }] : [];
    return [...system, ...history, { role: "user", content: turn.question }];
  }

  /** @returns {boolean} false where the browser would not keep it */
  save() {
    try {
      const { turns, changed_ms } = this;
      if (turns.length) localStorage.setItem(this.name, JSON.stringify({ version: VERSION, changed_ms, turns }));
      else localStorage.removeItem(this.name);
      return true;
    } catch {
      return false; // storage is full, or forbidden
    }
  }
}

/** An answer that is asked for. @param {string} method @returns {Answer} */
export function asking(method) {
  const nothing = { sources: null, ending: null, usage: null, first_token_s: null, comparison: null, trouble: null };
  return { state: "asking", text: "", method, ...nothing };
}

/** @param {string} name @returns {{turns: Turn[], changed_ms: number}} */
function stored(name) {
  try {
    const { version, turns, changed_ms = 0 } = JSON.parse(localStorage.getItem(name) ?? "{}");
    if (version === VERSION && Array.isArray(turns)) return { turns: turns.map(settled), changed_ms };
  } catch {
    // written by something else
  }
  return { turns: [], changed_ms: 0 };
}

/** An answer that a reload cut off has stopped. @template {Answer} T @param {T} answer @returns {T} */
function settled(answer) {
  const beside = /** @type {Answer & {beside?: Answer | null}} */ (answer).beside;
  const whole = beside ? { ...answer, beside: settled(beside) } : answer;
  return whole.state === "asking" ? { ...whole, state: "stopped" } : whole;
}
