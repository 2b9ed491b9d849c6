// What the browser keeps across reloads: nothing where storage is disabled or full.

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
    // The conversation goes on without it.
  }
}
