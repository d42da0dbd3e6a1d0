/** The colors of code: which part of it is a keyword, a string, a comment, and so on. */

import { lowlight } from "./vendor/lowlight.js";

/** Longer code stays without colors: to find them takes a millisecond for a few thousand. */
const MAX_LENGTH = 50_000;

/** The parts of a code in turn: how long each is, and its class, or "". */
export function coloredParts(code, language) {
  const name = language.toLowerCase();
  if (code.length > MAX_LENGTH || !lowlight.registered(name))
    return [{ length: code.length, name: "" }];
  const parts = [];
  collect(lowlight.highlight(name, code), "", parts);
  return parts;
}

function collect(node, name, parts) {
  for (const child of node.children)
    if (child.type === "text") parts.push({ length: child.value.length, name });
    else collect(child, child.properties.className[0], parts);
}
