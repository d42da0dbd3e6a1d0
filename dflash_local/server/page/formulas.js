/**
 * Formulas in TeX as models write them, $…$, $$…$$, \(…\) and \[…\]: an extension of the Markdown
 * parser, and the MathML of a formula. Temml makes elements, and no string is parsed as markup.
 */

import temml from "./vendor/temml.js";

/** A longer one is shown as it was written. */
const MAX_LENGTH = 2000;
const MATHML = "http://www.w3.org/1998/Math/MathML";
const OPTIONS = { throwOnError: true, trust: false, maxSize: [20, 200], maxExpand: 200 };

/** Of several that fit, the first. */
const DELIMITERS = [
  { open: "$$", close: "$$" },
  { open: "$", close: "$" },
  { open: "\\(", close: "\\)" },
  { open: "\\[", close: "\\]" },
];

export const Formulas = {
  defineNodes: ["Formula", "FormulaMark", { name: "FormulaBlock", block: true }],
  parseInline: [{ name: "Formula", before: "Escape", parse: parseInline }],
  parseBlock: [
    { name: "FormulaBlock", before: "IndentedCode", parse: parseBlock, endLeaf: beginsBlock },
  ],
};

function parseInline(inline, next, from) {
  if (next !== 36 /* $ */ && next !== 92 /* \ */) return -1;
  const begin = inline.slice(from, Math.min(from + 2, inline.end));
  const marks = DELIMITERS.find(({ open }) => begin.startsWith(open));
  if (!marks) return -1;
  const inner = from + marks.open.length;
  const text = inline.slice(inner, Math.min(inline.end, inner + MAX_LENGTH));
  const length = marks.open === "$" ? dollarEnd(inline, from, text) : text.indexOf(marks.close);
  if (length < 0 || !text.slice(0, length).trim()) return -1;
  const [end, to] = [inner + length, inner + length + marks.close.length];
  const inside = [inline.elt("FormulaMark", from, inner), inline.elt("FormulaMark", end, to)];
  return inline.addElement(inline.elt("Formula", from, to, inside));
}

/** Where the text behind a single dollar ends as a formula; -1 where it is about money. */
function dollarEnd(inline, from, text) {
  const before = from > inline.offset ? inline.slice(from - 1, from) : " ";
  if (/[\w\\]/.test(before) || /^\s/.test(text)) return -1;
  const end = text.search(/(?<![\s\\])\$(?![\w$])/);
  return text.slice(0, Math.max(end, 0)).includes("`") ? -1 : end;
}

/** What a line opens that only a later line closes; null where there is no such thing. */
function opened(line) {
  const text = line.text.slice(line.pos);
  const marks = DELIMITERS.find(({ open }) => open === text.slice(0, 2) && !text.startsWith("\\("));
  return marks && !text.includes(marks.close, 2) ? marks : null;
}

function beginsBlock(_, line, leaf) {
  if (line.indent >= line.baseIndent + 4 || !opened(line)) return false;
  // It may as well close what the paragraph has opened.
  return leaf.content.split("$$").length % 2 === 1;
}

/** A formula of several lines. One that is not closed before a blank line is text. */
function parseBlock(context, line) {
  const marks = line.indent < line.baseIndent + 4 ? opened(line) : null;
  if (!marks) return false;
  const from = context.lineStart + line.pos;
  const parts = [];
  let close = null;
  while (!close && context.nextLine() && line.depth >= context.depth && line.next >= 0) {
    parts.push(...line.markers);
    const at = context.lineStart + line.text.indexOf(marks.close, line.pos);
    if (at >= context.lineStart) {
      close = context.elt("FormulaMark", at, at + 2);
      context.nextLine();
    }
  }
  const to = context.prevLineEnd();
  const inside = close ? [context.elt("FormulaMark", from, from + 2), ...parts, close] : parts;
  context.addElement(context.elt(close ? "FormulaBlock" : "Paragraph", from, to, inside));
  return true;
}

/** The element of a formula, or null where it is none, or none that can be shown. */
export function formula(tex, isDisplay) {
  if (tex.length > MAX_LENGTH) return null;
  const element = document.createElement("span");
  element.className = isDisplay ? "formula display" : "formula";
  try {
    temml.render(tex, element, { ...OPTIONS, displayMode: isDisplay, macros: {} });
  } catch {
    return null;
  }
  for (const part of element.querySelectorAll("*")) {
    if (part.namespaceURI !== MATHML) return null;
    // A name could stand for an element of the page's own, and nothing here leads anywhere.
    for (const name of ["id", "href", "name"]) part.removeAttribute(name);
  }
  return element;
}
