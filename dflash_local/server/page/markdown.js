/**
 * Markdown to DOM nodes, as a model writes it, with each character still knowing who wrote it.
 *
 * Every text node is a piece of the source, so hostile text stays text: no string is ever parsed
 * as HTML, images are shown as links, and links lead only to the web or to mail.
 */

/** A text and, for each of its UTF-16 units, whether it was an accepted draft. */
export class Source {
  constructor(text = "") {
    this.text = text;
    this.marks = new Array(text.length).fill(false);
  }

  add(text, fromDraft) {
    this.text += text;
    for (let i = 0; i < text.length; i++) this.marks.push(fromDraft);
  }
}

/** Shows a source that grows: blocks that have not changed keep their nodes, and a selection. */
export class View {
  constructor(element, source) {
    this.element = element;
    this.source = source;
    this.shown = [];
  }

  update() {
    const blocks = parseBlocks(this.source, sourceLines(this.source.text));
    blocks.forEach((block, i) => {
      const id = `${block.begin} ${block.end} ${block.kind}`;
      if (this.shown[i]?.id === id) return;
      const node = render(block, this.source);
      if (this.shown[i]) this.shown[i].node.replaceWith(node);
      else this.element.append(node);
      this.shown[i] = { id, node };
    });
    for (const { node } of this.shown.splice(blocks.length)) node.remove();
  }
}

// Lines: [begin, end) in the source, where a list or a quote has taken its own marks away.

function sourceLines(text) {
  const lines = [];
  let begin = 0;
  while (begin <= text.length) {
    let end = text.indexOf("\n", begin);
    if (end < 0) end = text.length;
    lines.push({ begin, end: text[end - 1] === "\r" && end > begin ? end - 1 : end });
    begin = end + 1;
  }
  return lines;
}

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])([ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MAX_DEPTH = 12;
/** How far ahead the end of a span is looked for, so that no text takes long. */
const MAX_SPAN = 4096;

function parseBlocks(source, lines, depth = 0) {
  const blocks = [];
  const content = (line) => source.text.slice(line.begin, line.end);
  const add = (kind, first, after, more = {}) =>
    blocks.push({ kind, begin: lines[first].begin, end: lines[after - 1].end, ...more });
  let i = 0;
  while (i < lines.length) {
    const text = content(lines[i]);
    const first = i;
    let match;
    if (!text.trim()) {
      i++;
    } else if ((match = FENCE.exec(text))) {
      const [, indent, fence, info] = match;
      const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
      for (i++; i < lines.length && !closing.test(content(lines[i])); ) i++;
      const inner = lines.slice(first + 1, i).map((line) => dedent(source, line, indent.length));
      i = Math.min(i + 1, lines.length);
      add("code", first, i, { lines: inner, language: info.trim().split(/\s/)[0] });
    } else if ((match = HEADING.exec(text))) {
      const rest = { begin: lines[i].begin + match[0].length, end: lines[i].end };
      add("heading", first, ++i, { lines: [rest], level: match[1].length });
    } else if (RULE.test(text)) {
      add("rule", first, ++i);
    } else if (QUOTE.test(text) && depth < MAX_DEPTH) {
      const inner = [];
      for (; i < lines.length && (match = QUOTE.exec(content(lines[i]))); i++)
        inner.push({ begin: lines[i].begin + match[0].length, end: lines[i].end });
      add("quote", first, i, { blocks: parseBlocks(source, inner, depth + 1) });
    } else if ((match = ITEM.exec(text)) && depth < MAX_DEPTH) {
      const ordered = match[3] !== undefined;
      const items = [];
      while (i < lines.length && (match = ITEM.exec(content(lines[i])))) {
        if ((match[3] !== undefined) !== ordered || RULE.test(content(lines[i]))) break;
        const bare = match[0].trimEnd().length + 1;
        const indent = match[4].length > 4 || !match[4] ? bare : match[0].length;
        const begin = Math.min(lines[i].begin + indent, lines[i].end);
        const inner = [{ begin, end: lines[i].end }];
        for (i++; i < lines.length; i++) {
          const next = content(lines[i]);
          const deep = next.search(/\S/) >= Math.min(indent, 2 + match[1].length);
          if (next.trim() && !deep) {
            // A line that goes on with the item's paragraph, without its indentation.
            if (!content(lines[i - 1]).trim() || ITEM.test(next) || startsBlock(next)) break;
          }
          inner.push(dedent(source, lines[i], indent));
        }
        items.push({ number: match[3], blocks: parseBlocks(source, inner, depth + 1) });
      }
      add("list", first, i, { ordered, items });
    } else if (text.includes("|") && lines[i + 1] && TABLE_RULE.test(content(lines[i + 1]))) {
      for (i += 2; i < lines.length && content(lines[i]).includes("|"); ) i++;
      add("table", first, i, { lines: lines.slice(first, i) });
    } else {
      for (i++; i < lines.length; i++) {
        const next = content(lines[i]);
        if (!next.trim() || startsBlock(next) || (ITEM.test(next) && depth < MAX_DEPTH)) break;
      }
      add("paragraph", first, i, { lines: lines.slice(first, i) });
    }
  }
  return blocks;
}

function startsBlock(text) {
  return [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(text));
}

function dedent(source, line, most) {
  let { begin } = line;
  while (begin < line.end && begin - line.begin < most && source.text[begin] === " ") begin++;
  return { begin, end: line.end };
}

// Nodes.

function make(name, className) {
  const element = document.createElement(name);
  if (className) element.className = className;
  return element;
}

function render(block, source) {
  switch (block.kind) {
    case "code":
      return renderCode(block, source);
    case "heading": {
      // The page has headings of its own above these.
      const heading = make(`h${Math.min(block.level + 2, 6)}`);
      renderInline(heading, source, block.lines);
      return heading;
    }
    case "rule":
      return make("hr");
    case "quote": {
      const quote = make("blockquote");
      quote.append(...block.blocks.map((inner) => render(inner, source)));
      return quote;
    }
    case "list": {
      const list = make(block.ordered ? "ol" : "ul");
      if (block.ordered) list.start = Number(block.items[0].number);
      for (const item of block.items) {
        const element = make("li");
        element.append(...item.blocks.map((inner) => render(inner, source)));
        list.append(element);
      }
      return list;
    }
    case "table":
      return renderTable(block, source);
    default: {
      const paragraph = make("p");
      renderInline(paragraph, source, block.lines);
      return paragraph;
    }
  }
}

function renderCode(block, source) {
  const figure = make("div", "code");
  const bar = make("div", "bar");
  const language = make("span");
  language.textContent = block.language || "text";
  const copy = make("button");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy the code");
  copy.dataset.copies = "code";
  bar.append(language, copy);
  const pre = make("pre");
  pre.tabIndex = 0; // so that the keyboard can scroll it
  const code = make("code");
  const { chars, at } = joined(source, block.lines);
  tint(code, source, chars, at, 0, chars.length);
  pre.append(code);
  figure.append(bar, pre);
  return figure;
}

function renderTable(block, source) {
  const frame = make("div", "table");
  frame.tabIndex = 0;
  const table = make("table");
  const [head, , ...rows] = block.lines;
  const columns = cells(source, head).length;
  const section = (name, cell, lines) => {
    const part = make(name);
    for (const line of lines) {
      const row = make("tr");
      const found = cells(source, line);
      for (let i = 0; i < columns; i++) {
        const element = make(cell);
        if (found[i]) renderInline(element, source, [found[i]]);
        row.append(element);
      }
      part.append(row);
    }
    return part;
  };
  table.append(section("thead", "th", [head]), section("tbody", "td", rows));
  frame.append(table);
  return frame;
}

function cells(source, line) {
  const text = source.text;
  let { begin, end } = line;
  while (begin < end && /\s/.test(text[begin])) begin++;
  while (end > begin && /\s/.test(text[end - 1])) end--;
  if (text[begin] === "|") begin++;
  if (end > begin && text[end - 1] === "|" && text[end - 2] !== "\\") end--;
  const found = [];
  for (let from = begin, i = begin; i <= end; i++) {
    if (i === end || (text[i] === "|" && text[i - 1] !== "\\")) {
      found.push(trimmed(text, from, i));
      from = i + 1;
    }
  }
  return found;
}

function trimmed(text, begin, end) {
  while (begin < end && /\s/.test(text[begin])) begin++;
  while (end > begin && /\s/.test(text[end - 1])) end--;
  return { begin, end };
}

/** The text of some lines, and for each of its characters its place in the source. */
function joined(source, lines) {
  let chars = "";
  const at = [];
  lines.forEach((line, n) => {
    if (n) {
      chars += "\n";
      at.push(lines[n - 1].end);
    }
    chars += source.text.slice(line.begin, line.end);
    for (let i = line.begin; i < line.end; i++) at.push(i);
  });
  return { chars, at };
}

/** Append characters [begin, end), those that were drafted within elements of their own. */
function tint(parent, source, chars, at, begin, end) {
  for (let i = begin; i < end; ) {
    const mark = source.marks[at[i]];
    let next = i + 1;
    while (next < end && source.marks[at[next]] === mark) next++;
    const text = document.createTextNode(chars.slice(i, next));
    if (mark) {
      const span = make("span", "draft");
      span.append(text);
      parent.append(span);
    } else {
      parent.append(text);
    }
    i = next;
  }
}

const ESCAPABLE = /[!-/:-@[-`{-~]/;
const LINK = /^!?\[((?:[^\][\\]|\\.)*)\]\(\s*([^\s()<>]+)(?:\s+"[^"]*")?\s*\)/;
const WEB = /^(https?:\/\/|mailto:)/i;

function renderInline(parent, source, lines) {
  const { chars, at } = joined(source, lines);
  inline(parent, source, chars, at, 0, chars.length, 0);
}

function inline(parent, source, chars, at, begin, end, depth) {
  let plain = begin;
  const flush = (to) => {
    if (to > plain) tint(parent, source, chars, at, plain, to);
  };
  for (let i = begin; i < end; ) {
    const char = chars[i];
    if (char === "\\" && i + 1 < end && ESCAPABLE.test(chars[i + 1])) {
      flush(i);
      plain = i + 1;
      i += 2;
      continue;
    }
    const span = depth < MAX_DEPTH ? spanAt(chars, i, end) : null;
    if (!span) {
      // A run of marks that opens nothing is text as a whole.
      i += "`*_~".includes(char) ? runAt(chars, i, end) : 1;
      continue;
    }
    flush(i);
    const element = make(span.name);
    if (span.href) {
      element.href = span.href;
      element.target = "_blank";
      element.rel = "noopener noreferrer nofollow";
    }
    if (span.name === "code") tint(element, source, chars, at, span.begin, span.end);
    else inline(element, source, chars, at, span.begin, span.end, depth + 1);
    parent.append(element);
    plain = i = span.after;
  }
  flush(end);
}

/** What begins at i: its element's name, the range of its content, and where it is over. */
function spanAt(chars, i, end) {
  const char = chars[i];
  if (char === "`") return codeAt(chars, i, end);
  if (char === "[" || (char === "!" && chars[i + 1] === "[")) return linkAt(chars, i, end);
  return "*_~".includes(char) ? emphasisAt(chars, i, end) : null;
}

/** Closed by a run of as many marks; a run of three may close one or two that lie within. */
function emphasisAt(chars, i, end) {
  const char = chars[i];
  const length = runAt(chars, i, end);
  if (char === "~" ? length !== 2 : length > 3) return null;
  if (/\s/.test(chars[i + length] ?? " ")) return null;
  if (char === "_" && /\w/.test(chars[i - 1] ?? " ")) return null;
  const marks = Math.min(length, 2);
  const name = char === "~" ? "del" : marks === 2 ? "strong" : "em";
  const last = Math.min(end, i + MAX_SPAN);
  for (let j = i + length; j < last; ) {
    if (chars[j] !== char) {
      j += chars[j] === "\\" ? 2 : 1;
      continue;
    }
    const n = runAt(chars, j, end);
    const fits = length === 1 ? n === 1 || n === 3 : n >= length;
    const inWord = char === "_" && /\w/.test(chars[j + n] ?? " ");
    if (fits && !inWord && !/\s/.test(chars[j - 1])) {
      return { name, begin: i + marks, end: j + n - marks, after: j + n };
    }
    j += n;
  }
  return null;
}

function codeAt(chars, i, end) {
  const length = runAt(chars, i, end);
  const last = Math.min(end, i + MAX_SPAN);
  for (let j = i + length; (j = chars.indexOf("`", j)) >= 0 && j < last; ) {
    const n = runAt(chars, j, end);
    if (n === length) {
      let [from, to] = [i + length, j];
      // Blanks that keep a backtick of the content apart from the marks.
      const padded = to - from > 2 && chars[from] === " " && chars[to - 1] === " ";
      if (padded) [from, to] = [from + 1, to - 1];
      return { name: "code", begin: from, end: to, after: j + n };
    }
    j += n;
  }
  return null;
}

function linkAt(chars, i, end) {
  const match = LINK.exec(chars.slice(i, Math.min(end, i + MAX_SPAN)));
  if (!match || !WEB.test(match[2])) return null;
  const begin = i + match[0].indexOf("[") + 1;
  const range = { begin, end: begin + match[1].length, after: i + match[0].length };
  return { name: "a", href: match[2], ...range };
}

function runAt(chars, i, end) {
  let j = i;
  while (j < end && chars[j] === chars[i]) j++;
  return j - i;
}
