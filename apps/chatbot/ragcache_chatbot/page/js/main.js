// Puts the parts of the page together.

import { Api } from "./api.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { ConversationsView } from "./conversations-view.js";
import { Documents } from "./documents.js";
import { DocumentsView } from "./documents-view.js";
import { byId } from "./dom.js";
import { closeDrawers, prepareDrawers } from "./drawers.js";
import { showHints } from "./hints.js";
import { Keyring } from "./keyring.js";
import { Settings } from "./settings.js";
import { StoreView } from "./store-view.js";
import { prepareTabs } from "./tabs.js";
import { Talk } from "./talk.js";
import { troubleBox } from "./trouble.js";
import { UploadView } from "./upload-view.js";

const api = new Api(new Keyring());
const settings = new Settings();
const store = new StoreView(api);
const conversations = new Conversations();

const talk = new Talk(api, conversations.current, settings, {
  model: servedModel,
  busy: (busy) => composer.busy(busy),
  answered: ({ state }) => {
    if (state !== "failed") void refresh(); // what failed is told where it was asked
  },
  saved: () => kept.update(),
});
const ask = (/** @type {string} */ question) => void talk.ask(question);
const composer = new Composer({ ask, stop: () => talk.stop(), busy: () => talk.busy });
const kept = new ConversationsView(conversations, opened);

/** @param {import("./conversation.js").Conversation} conversation */
function opened(conversation) {
  closeDrawers();
  if (conversation === talk.conversation) return;
  talk.open(conversation);
  composer.write("");
}

const documents = new Documents(api);
const list = new DocumentsView(documents, () => void refresh());
const uploads = new UploadView(documents, (ids) => void refresh(ids));

/** What the server holds, the list of documents where ids are given. One message says why it cannot be had. @param {string[]} [ids] */
async function refresh(ids) {
  try {
    await Promise.all([refreshStore(), ids && list.refresh(ids)]);
    byId("trouble").replaceChildren();
  } catch (error) {
    byId("trouble").replaceChildren(troubleBox(error, () => void refresh(ids ?? [])));
  }
}

async function refreshStore() {
  const figures = await store.refresh();
  byId("served").textContent = figures.model;
  uploads.allow(figures);
  showHints(figures, ask);
  await offerMethods(figures.method);
}

/** The model's name, which a question may need before the store's figures are here. Raises ApiError, ConnectionError. */
async function servedModel(/** @type {AbortSignal} */ signal) {
  const { model } = store.figures ?? (await api.json("v1/store", { signal }));
  return model;
}

/** @param {string} own */
async function offerMethods(own) {
  if (byId("method").options.length > 1) return;
  const { data } = await api.json("v1/methods");
  settings.offer(data, own);
  talk.update();
}

prepareDrawers();
prepareTabs();
kept.update();
void refresh([]);
byId("question").focus();
