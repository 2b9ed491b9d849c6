// Elements made without HTML: a text, of a model or a user, never becomes markup.

export const at = (id) => document.getElementById(id);

export function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function button(label, onClick) {
  const made = element("button", { type: "button", className: "small" }, label);
  made.addEventListener("click", onClick);
  return made;
}

/** Code below its label and a button that copies it. */
export function codeBlock(label, text) {
  const head = element("div", {}, element("span", {}, label), copyButton(() => text));
  const body = element("pre", { tabIndex: 0 }, element("code", {}, text)); // arrow keys scroll it
  return element("div", { className: "code" }, head, body);
}

/** A button that copies what `text()` returns when it is pressed. */
export function copyButton(text) {
  const made = button("Copy", async () => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 2000);
  });
  return made;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Over plain HTTP, browsers have the clipboard API for localhost alone.
  const fill = (event) => {
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  };
  document.addEventListener("copy", fill, { once: true });
  document.execCommand("copy");
}
