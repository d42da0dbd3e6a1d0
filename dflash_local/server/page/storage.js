/** What this browser keeps of the page: values by name, as JSON. Without storage nothing is kept. */

const PREFIX = "dflash-local-";

/** The value of that name, or undefined. */
export function read(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? undefined;
  } catch {
    return undefined;
  }
}

/** Keep a value; returns whether there was room for it. */
export function write(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Whether this browser keeps anything at all. */
export function isThere() {
  try {
    return localStorage.length >= 0;
  } catch {
    return false;
  }
}

export function remove(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // Then nothing is kept.
  }
}

/** The names that begin with `start`. */
export function names(start) {
  try {
    const found = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + start));
    return found.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}
