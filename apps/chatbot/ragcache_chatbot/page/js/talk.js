// The conversation as it happens: asking, stopping, asking again, measuring.

import { announce, SpokenAnswer } from "./announcer.js";
import { askStreaming } from "./chat.js";
import { compare } from "./comparison.js";
import { showFigures } from "./conversation-figures.js";
import { byId } from "./dom.js";
import { explain } from "./errors.js";
import { TurnView } from "./turn-view.js";

const CLOCK_MS = 100;

/** @typedef {import("./conversation.js").Turn} Turn */

export class Talk {
  /** @type {TurnView[]} */
  #views = [];
  /** @type {AbortController | null} */
  #running = null;
  /** @type {AbortController | null} */
  #comparing = null;

  /**
   * @param {import("./api.js").Api} api
   * @param {import("./conversation.js").Conversation} conversation
   * @param {import("./settings.js").Settings} settings
   * @param {{model: (signal: AbortSignal) => Promise<string>, busy: (busy: boolean) => void, answered: () => void}} page
   *   model: what requests name; busy: an answer is coming, or is not any more; answered: the store was used
   */
  constructor(api, conversation, settings, page) {
    this.api = api;
    this.conversation = conversation;
    this.settings = settings;
    this.page = page;
    for (const turn of conversation.turns) this.#show(turn);
    this.#showOverview();
    this.#views.at(-1)?.node.scrollIntoView();
    addEventListener("pagehide", () => this.#save());
  }

  get busy() {
    return this.#running !== null;
  }

  /** @param {string} question @param {{earlier?: boolean, trim?: boolean}} [change] what is asked unlike the settings */
  async ask(question, change = {}) {
    if (this.busy) return;
    this.#comparing?.abort();
    const { method, earlier, k } = this.settings;
    const turn = this.conversation.add(question, { method, earlier, trim: false, ...change });
    const view = this.#show(turn);
    view.node.scrollIntoView();
    this.#running = new AbortController();
    this.page.busy(true);
    announce("Reading");
    const ask = { messages: this.conversation.messages(turn), method, k, trim: turn.trim };
    await this.#follow(view, this.#stream(ask, this.#running.signal));
    this.#running = null;
    this.page.busy(false);
    this.page.answered();
    this.#showOverview();
    this.#save();
  }

  stop() {
    this.#running?.abort();
  }

  /** @param {Turn} turn the last one @param {{earlier?: boolean, trim?: boolean}} change */
  again(turn, change) {
    if (this.busy) return;
    this.conversation.remove(turn);
    this.#views.pop()?.node.remove();
    byId("question").focus();
    void this.ask(turn.question, change);
  }

  clear() {
    this.stop();
    this.#comparing?.abort();
    this.conversation.clear();
    this.#views = [];
    byId("turns").replaceChildren();
    this.#showOverview();
    this.#save();
    announce("New conversation");
  }

  /** @param {Omit<import("./chat.js").Ask, "model">} ask @param {AbortSignal} signal */
  async *#stream(ask, signal) {
    yield* askStreaming(this.api, { model: await this.page.model(signal), ...ask }, signal);
  }

  /** Compare with a full prefill, or end the comparison that runs. @param {TurnView} view */
  async #compare({ turn, answer }) {
    const { prefill } = answer;
    if (prefill.measuring) return this.#comparing?.abort();
    this.#comparing?.abort();
    const { signal } = (this.#comparing = new AbortController());
    const show = (/** @type {Partial<import("./prefill-view.js").PrefillView>} */ change) => {
      Object.assign(prefill, change);
      answer.updatePrefill();
    };
    show({ measuring: "starting", trouble: "" });
    try {
      const asked = { model: await this.page.model(signal), messages: this.conversation.messages(turn), turn };
      turn.comparison = await compare(this.api, asked, signal, (run, runs) => show({ measuring: `${run} of ${runs}` }));
      announce("Full prefill measured");
    } catch (error) {
      const { message, advice } = explain(error);
      if (!signal.aborted) prefill.trouble = `${message} ${advice}`;
    }
    show({ measuring: "" });
    this.#save();
  }

  /** @param {TurnView} view @param {AsyncGenerator<import("./chat.js").ChatEvent>} events */
  async #follow(view, events) {
    const { turn } = view;
    const spoken = new SpokenAnswer();
    const clock = this.#startClock(view);
    try {
      for await (const event of events) {
        if (event.text) clock.stop();
        this.#take(view, event);
        spoken.add(event.text ?? "");
      }
      turn.state = "done";
    } catch (error) {
      turn.state = this.#running?.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.trouble = explain(error);
    }
    clock.stop(turn.first_token_s === null && turn.state !== "done");
    spoken.finish(turn.state === "stopped" ? "Stopped." : "");
    view.update();
  }

  /** @param {TurnView} view @param {import("./chat.js").ChatEvent} event */
  #take(view, { sources, text, ending, usage }) {
    const { turn } = view;
    turn.sources = sources ?? turn.sources;
    turn.ending = ending ?? turn.ending;
    turn.usage = usage ?? turn.usage;
    turn.text += text ?? "";
    if (sources || ending || usage) view.update();
    else view.answer.updateText();
    if (sources) this.#save();
  }

  /** The clock until the first token. @param {TurnView} view */
  #startClock(view) {
    const start_ms = performance.now();
    const since = () => (performance.now() - start_ms) / 1000;
    const timer = setInterval(() => {
      view.answer.prefill.waited_s = since();
      view.answer.updatePrefill();
    }, CLOCK_MS);
    return {
      /** @param {boolean} [inVain] no token came */
      stop(inVain = false) {
        clearInterval(timer);
        if (view.turn.first_token_s !== null || inVain) return;
        view.turn.first_token_s = since();
        view.answer.updatePrefill();
      },
    };
  }

  /** @param {Turn} turn */
  #show(turn) {
    this.#views.at(-1)?.fold();
    const actions = {
      again: this.again.bind(this),
      measure: () => void this.#compare(view),
    };
    /** @type {TurnView} */
    const view = new TurnView(turn, actions);
    this.#views.push(view);
    byId("turns").append(view.node);
    this.#showOverview();
    return view;
  }

  #showOverview() {
    byId("welcome").hidden = this.#views.length > 0;
    showFigures(this.conversation.turns);
  }

  #save() {
    byId("storage-note").hidden = this.conversation.save();
    byId("storage-note").textContent = "This browser cannot keep the conversation over a reload: it is too long, or storage is off.";
  }
}
