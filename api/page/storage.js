// What the browser keeps across reloads: nothing where storage is disabled or full.

const NAME = "neuron-textgen";

export function load() {
  try {
    return JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    return {};
  }
}

/** Whether it is kept. */
export function save(value) {
  try {
    localStorage.setItem(NAME, JSON.stringify(value));
    return true;
  } catch {
    return false; // the conversation goes on without it
  }
}
