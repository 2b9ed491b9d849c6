// The images of the message in the field: added by the button, by pasting or dropping them, shown until they are sent.

import { at, button, element } from "./dom.js";

export const readsImages = Boolean(document.body.dataset.images && document.body.dataset.chats); // the model
const MAX_SIDE = 2048; // pixels; more are scaled down here
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // what the server decodes
const list = at("images");
let images = []; // data: URLs
let reading = Promise.resolve(); // once all files that were added are read

export const getImages = () => images;
export const imagesAreRead = () => reading;

export function setImages(urls) {
  images = urls;
  list.replaceChildren(...images.map((url, index) => element("li", {}, thumbnail(url, index), removeButton(index))));
  list.hidden = images.length === 0;
  at("prompt").required = images.length === 0;
}

export const thumbnail = (url, index) => element("img", { src: url, alt: `Image ${index + 1}` });

function removeButton(index) {
  const made = button("Remove", () => {
    setImages(images.filter((_, place) => place !== index));
    at("prompt").focus();
  });
  made.ariaLabel = `Remove image ${index + 1}`;
  return made;
}

function addFiles(files) {
  at("image-error").textContent = "";
  reading = [...files].reduce((before, file) => before.then(() => addFile(file)), reading);
}

async function addFile(file) {
  try {
    setImages([...images, await read(file)]);
  } catch {
    at("image-error").textContent = `${file.name} is not an image that this browser can read.`;
  }
}

/** A file as a data: URL, scaled down to MAX_SIDE. */
async function read(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && AS_THEY_ARE.includes(file.type)) return dataUrl(file);
  const canvas = element("canvas", {
    width: Math.max(1, Math.round(bitmap.width * scale)),
    height: Math.max(1, Math.round(bitmap.height * scale)),
  });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = reject;
    reader.readAsDataURL(file);
  });
}

function listen() {
  at("add-image").hidden = false;
  at("add-image").addEventListener("click", () => at("file").click());
  at("file").addEventListener("change", () => {
    addFiles(at("file").files);
    at("file").value = ""; // so that the same file can be chosen again
  });
  at("prompt").addEventListener("paste", (event) => {
    const { files } = event.clipboardData;
    if (!files.length || event.clipboardData.getData("text/plain")) return; // programs copy texts as images, too
    event.preventDefault();
    addFiles(files);
  });
  const isOfFiles = (event) => event.dataTransfer.types.includes("Files");
  const show = (isOver) => document.body.classList.toggle("dropping", isOver);
  addEventListener("dragover", (event) => {
    if (!isOfFiles(event)) return;
    event.preventDefault();
    show(true);
  });
  addEventListener("dragleave", (event) => show(event.relatedTarget !== null));
  addEventListener("drop", (event) => {
    show(false);
    if (!isOfFiles(event)) return;
    event.preventDefault();
    addFiles(event.dataTransfer.files);
    at("prompt").focus();
  });
}

if (readsImages) listen();
