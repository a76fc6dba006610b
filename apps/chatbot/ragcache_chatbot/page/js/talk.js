// The conversation as it happens: asking, stopping, asking again, comparing, measuring.

import { announce, SpokenAnswer } from "./announcer.js";
import { askStreaming } from "./chat.js";
import { compare, passagesField } from "./comparison.js";
import { asking } from "./conversation.js";
import { showFigures } from "./conversation-figures.js";
import { byId } from "./dom.js";
import { explain } from "./errors.js";
import { TurnView } from "./turn-view.js";

const CLOCK_MS = 100;
const BUSY = "An answer is still coming. Esc stops it.";

/** @typedef {import("./conversation.js").Turn} Turn */
/** @typedef {import("./answer-view.js").AnswerView} AnswerView */

export class Talk {
  /** @type {TurnView[]} */
  #views = [];
  /** @type {AbortController | null} */
  #running = null;
  /** @type {AbortController | null} */
  #measuring = null;

  /**
   * @param {import("./api.js").Api} api
   * @param {import("./conversation.js").Conversation} conversation
   * @param {import("./settings.js").Settings} settings
   * @param {{model: (signal: AbortSignal) => Promise<string>, busy: (busy: boolean) => void,
   *   answered: (answer: import("./conversation.js").Answer) => void, saved: () => void}} page
   *   model: what requests name; busy: an answer is coming, or is not any more; answered: the store was used
   */
  constructor(api, conversation, settings, page) {
    this.api = api;
    this.conversation = conversation;
    this.settings = settings;
    this.page = page;
    this.#fill();
    addEventListener("pagehide", () => {
      if (this.busy) this.#save(); // else it is kept already, and another tab may have added to it
    });
  }

  get busy() {
    return this.#running !== null;
  }

  /** What can be done with a turn has changed. */
  update() {
    for (const view of this.#views) view.update();
  }

  /** Show a conversation instead of the one that is shown. @param {import("./conversation.js").Conversation} conversation */
  open(conversation) {
    this.stop();
    this.#measuring?.abort();
    this.conversation = conversation;
    this.#fill();
    announce(conversation.turns.length ? "Conversation opened" : "New conversation");
  }

  #fill() {
    this.#views = [];
    byId("turns").replaceChildren();
    for (const turn of this.conversation.turns) this.#show(turn);
    this.#showOverview();
    this.#views.at(-1)?.node.scrollIntoView();
  }

  /** @param {string} question @param {import("./turn-view.js").Change} [change] what is asked unlike the settings */
  async ask(question, change = {}) {
    if (this.busy) return;
    this.#measuring?.abort();
    const { method, earlier, system } = this.settings;
    const { conversation } = this;
    const turn = conversation.add(question, { method, earlier, trim: false, system, ...change });
    const view = this.#show(turn);
    view.node.scrollIntoView();
    this.#save();
    const ask = { messages: conversation.messages(turn), ...this.settings.asked, method, trim: turn.trim };
    await this.#run(view, view.answer, ask);
  }

  stop() {
    this.#running?.abort();
  }

  /** Ask a turn's question, or another in its place. @param {TurnView} view @param {import("./turn-view.js").Change} [change] @param {string} [question] */
  #again(view, change, question = view.turn.question) {
    if (this.busy) return announce(BUSY);
    this.conversation.cut(view.turn);
    for (const gone of this.#views.splice(this.#views.indexOf(view))) gone.node.remove();
    byId("question").focus();
    void this.ask(question, change);
  }

  /** The answer of another method beside a turn's own, over the same passages. @param {TurnView} view @param {string} method */
  #beside(view, method) {
    if (this.busy) return announce(BUSY);
    const { turn } = view;
    turn.beside = asking(method);
    const passages = passagesField(turn.sources ?? []);
    const ask = { messages: this.conversation.messages(turn), ...this.settings.asked, method, trim: turn.trim, passages };
    void this.#run(view, view.showBeside(turn.beside), ask);
  }

  /** @param {TurnView} view @param {AnswerView} answer @param {Omit<import("./chat.js").Ask, "model">} ask */
  async #run(view, answer, ask) {
    const { conversation } = this; // another one may be shown when this answer ends
    const running = (this.#running = new AbortController());
    this.page.busy(true);
    announce("Reading");
    view.update();
    await this.#follow(view, answer, this.#stream(ask, running.signal), running.signal);
    this.#running = null;
    this.page.busy(false);
    this.page.answered(answer.answer);
    this.#showOverview();
    this.#save(conversation);
  }

  /** @param {Omit<import("./chat.js").Ask, "model">} ask @param {AbortSignal} signal */
  async *#stream(ask, signal) {
    yield* askStreaming(this.api, { model: await this.page.model(signal), ...ask }, signal);
  }

  /** Compare an answer with a full prefill, or end the comparison that runs. @param {Turn} turn @param {AnswerView} view */
  async #measure(turn, view) {
    const { answer, prefill } = view;
    if (prefill.measuring) return this.#measuring?.abort();
    this.#measuring?.abort();
    const { signal } = (this.#measuring = new AbortController());
    const show = (/** @type {Partial<import("./prefill-view.js").PrefillView>} */ change) => {
      Object.assign(prefill, change);
      view.updatePrefill();
    };
    show({ measuring: "starting", trouble: "" });
    try {
      const asked = { model: await this.page.model(signal), messages: this.conversation.messages(turn), answer };
      answer.comparison = await compare(this.api, asked, signal, (run, runs) => show({ measuring: `${run} of ${runs}` }));
      announce("Full prefill measured");
    } catch (error) {
      const { message, advice } = explain(error);
      if (!signal.aborted) prefill.trouble = `${message} ${advice}`;
    }
    show({ measuring: "" });
    this.#save();
  }

  /** @param {TurnView} view @param {AnswerView} shown @param {AsyncGenerator<import("./chat.js").ChatEvent>} events @param {AbortSignal} signal */
  async #follow(view, shown, events, signal) {
    const { answer } = shown;
    const spoken = new SpokenAnswer();
    const clock = startClock(shown);
    try {
      let thought_ms = 0;
      for await (const event of events) {
        if (event.text || event.thought) clock.stop();
        if (event.thought && !answer.thoughts) thought_ms = performance.now();
        if (event.text && thought_ms && !answer.thought_s) answer.thought_s = (performance.now() - thought_ms) / 1000;
        this.#take(shown, event);
        spoken.add(event.text ?? "");
      }
      answer.state = "done";
    } catch (error) {
      answer.state = signal.aborted ? "stopped" : "failed";
      if (answer.state === "failed") answer.trouble = explain(error);
    }
    clock.stop(answer.first_token_s === null && answer.state !== "done");
    spoken.finish(answer.state === "stopped" ? "Stopped." : "");
    view.update();
  }

  /** @param {AnswerView} view @param {import("./chat.js").ChatEvent} event */
  #take(view, { sources, text, thought, ending, usage }) {
    const { answer } = view;
    answer.sources = sources ?? answer.sources;
    answer.ending = ending ?? answer.ending;
    answer.usage = usage ?? answer.usage;
    answer.text += text ?? "";
    if (thought) answer.thoughts = (answer.thoughts ?? "") + thought;
    if (sources || ending || usage) view.update();
    else view.updateText();
    if (sources) this.#save();
  }

  /** @param {Turn} turn */
  #show(turn) {
    this.#views.at(-1)?.fold();
    /** @type {TurnView} */
    const view = new TurnView(turn, {
      again: (change, question) => this.#again(view, change, question),
      beside: (method) => this.#beside(view, method),
      measure: (answer) => void this.#measure(turn, answer),
      methods: () => this.settings.usable,
    });
    this.#views.push(view);
    byId("turns").append(view.node);
    this.#showOverview();
    return view;
  }

  #showOverview() {
    byId("welcome").hidden = this.#views.length > 0;
    showFigures(this.conversation.turns.flatMap((turn) => [turn, ...(turn.beside ? [turn.beside] : [])]));
  }

  #save(conversation = this.conversation) {
    byId("storage-note").hidden = conversation.save();
    byId("storage-note").textContent = "This browser cannot keep the conversation over a reload: it is too long, or storage is off.";
    this.page.saved();
  }
}

/** The clock until an answer's first token. @param {AnswerView} view */
function startClock(view) {
  const start_ms = performance.now();
  const since = () => (performance.now() - start_ms) / 1000;
  const timer = setInterval(() => {
    view.prefill.waited_s = since();
    view.updatePrefill();
  }, CLOCK_MS);
  return {
    /** @param {boolean} [inVain] no token came */
    stop(inVain = false) {
      clearInterval(timer);
      if (view.answer.first_token_s !== null || inVain) return;
      view.answer.first_token_s = since();
      view.updatePrefill();
    },
  };
}
