// The turns of one conversation, kept in this browser over a reload.

const STORED = "ragcache.conversation";
const VERSION = 1;

/**
 * What came of one question.
 * @typedef {object} Answer
 * @property {"asking" | "done" | "stopped" | "failed"} state
 * @property {string} text as far as it came
 * @property {string} method that was asked for; "" for the store's own
 * @property {boolean} earlier whether earlier turns were sent
 * @property {boolean} trim whether passages that do not fit were left out
 * @property {import("./chat.js").Source[] | null} sources
 * @property {import("./chat.js").Ending | null} ending
 * @property {import("./chat.js").Usage | null} usage
 * @property {number | null} first_token_s until the first token was seen here
 * @property {import("./comparison.js").Comparison | null} [comparison] with a full prefill, where one was measured
 * @property {import("./errors.js").Trouble | null} trouble
 */

/** @typedef {Answer & {question: string}} Turn */

export class Conversation {
  /** @type {Turn[]} */
  turns = [];

  constructor() {
    this.turns = stored();
  }

  /**
   * @param {string} question
   * @param {{method: string, earlier: boolean, trim: boolean}} how
   * @returns {Turn}
   */
  add(question, how) {
    const nothing = { sources: null, ending: null, usage: null, first_token_s: null, comparison: null, trouble: null };
    /** @type {Turn} */
    const turn = { question, state: "asking", text: "", ...how, ...nothing };
    this.turns.push(turn);
    return turn;
  }

  /** @param {Turn} turn */
  remove(turn) {
    this.turns = this.turns.filter((other) => other !== turn);
  }

  clear() {
    this.turns = [];
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
    return [...history, { role: "user", content: turn.question }];
  }

  /** @returns {boolean} false where the browser would not keep it */
  save() {
    try {
      localStorage.setItem(STORED, JSON.stringify({ version: VERSION, turns: this.turns }));
      return true;
    } catch {
      return false; // storage is full, or forbidden
    }
  }
}

/** @returns {Turn[]} */
function stored() {
  try {
    const { version, turns } = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    return version === VERSION && Array.isArray(turns) ? turns.map(settled) : [];
  } catch {
    return []; // written by something else
  }
}

/** A turn that a reload cut off has stopped. @param {Turn} turn @returns {Turn} */
function settled(turn) {
  return turn.state === "asking" ? { ...turn, state: "stopped" } : turn;
}
