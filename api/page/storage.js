// What the browser keeps of the page across reloads. It may refuse to, or be full: then nothing is kept.

const NAME = "neuron-textgen";

export function load() {
  try {
    return JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    return {};
  }
}

export function save(value) {
  try {
    localStorage.setItem(NAME, JSON.stringify(value));
  } catch {
    // The conversation goes on all the same.
  }
}
