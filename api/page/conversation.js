// The conversation on the screen: an article for each message, in the same order, and after them a problem.

import { at, button, copyButton, element } from "./dom.js";
import { thumbnail } from "./images.js";
import { show } from "./markdown.js";

const chat = at("chat");
export const chats = Boolean(document.body.dataset.chats); // false: a model without a chat template
const TITLES = chats
  ? { user: "You", assistant: "Model", error: "Error" }
  : { user: "Text", assistant: "Continuation", error: "Error" };
let follows = true; // the view is at the end, and stays there

/** All that the articles show: {role, content, images}, of a response also {reasoning, thought, plain, figures}. */
export const messages = [];

/** Returns the message's article, for `paint`. */
export function add(message) {
  const text = element("div", { className: "text" });
  const copy = copyButton(() => message.content);
  const article = element("article", { className: message.role }, element("h2", {}, TITLES[message.role]));
  if (message.role === "user") {
    article.append(element("div", { className: "images" }, ...(message.images ?? []).map(thumbnail)));
    article.append(text, actions(copy, changeButton("Edit", message)));
  } else {
    const figures = element("span", { className: "figures" });
    article.append(thinking(), text, actions(figures, copy, changeButton("Regenerate", message)));
  }
  messages.push(message);
  chat.append(article);
  paint(message, article);
  return article;
}

const actions = (...children) => element("div", { className: "actions" }, ...children);

/** A button whose event, "edit" or "regenerate" of the chat, tells the index of the message. */
function changeButton(label, message) {
  const name = label.toLowerCase();
  const made = button(label, () => {
    chat.dispatchEvent(new CustomEvent(name, { detail: messages.indexOf(message) }));
  });
  made.classList.add(name);
  return made;
}

function thinking() {
  const thoughts = element("div", { className: "literal" });
  return element("details", { className: "thinking" }, element("summary", {}), thoughts);
}

/** Shows what the message has become. */
export function paint(message, article) {
  const text = article.querySelector(".text");
  const isLiteral = message.role === "user" || message.plain;
  text.classList.toggle("literal", isLiteral);
  if (isLiteral) text.textContent = message.content;
  else show(text, message.content);
  if (message.role === "assistant") {
    const details = article.querySelector(".thinking");
    details.hidden = !message.reasoning;
    details.firstChild.textContent = message.thought ? `Thought for ${message.thought} s` : "Thinking";
    details.lastChild.textContent = message.reasoning;
    article.querySelector(".figures").textContent = message.figures;
  }
  follow();
}

/** Removes the messages from `index` on, and a problem. */
export function cut(index) {
  messages.length = index;
  while (chat.children.length > index) chat.lastChild.remove();
}

export function addProblem(text, retry) {
  const article = element("article", { className: "error" }, element("h2", {}, TITLES.error));
  article.append(element("div", { className: "text", role: "alert" }, text), actions(button("Retry", retry)));
  chat.append(article);
  follow();
}

export function scrollToEnd() {
  follows = true;
  follow();
}

function follow() {
  if (follows) chat.scrollTop = chat.scrollHeight;
}

// Only the user scrolls away from the end: texts that grow and a view that shrinks fire no such event.
chat.addEventListener("scroll", () => {
  follows = chat.scrollHeight - chat.clientHeight - chat.scrollTop < 2;
});
new ResizeObserver(follow).observe(chat);
