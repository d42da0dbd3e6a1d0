/**
 * Markdown to DOM nodes, as a model writes it. Each character keeps its mark: drafted or not.
 *
 * Lezer's parser says where in the source each part stands, and the nodes are made from that: every
 * text node is a piece of the source and no string is ever parsed as HTML, so hostile text stays
 * text. Images are shown as links, and links lead only to the web or to mail.
 */

import { coloredParts } from "./colors.js";
import { make } from "./elements.js";
import { Formulas, formula } from "./formulas.js";
import { Strikethrough, Table, TaskList, TreeFragment, parser } from "./vendor/lezer-markdown.js";

/** Quotes and lists within each other. A list counts twice: as a list and as its item. */
const MAX_DEPTH = 24;
/** A longer paragraph is shown without emphasis and links: to find them could take very long. */
const MAX_INLINE = 8192;

const markdown = parser.configure([
  Table,
  Strikethrough,
  TaskList,
  {
    remove: ["HTMLBlock", "Entity", "LinkReference"], // all of these are text
    parseBlock: [{ name: "TooDeep", before: "IndentedCode", parse: endNesting }],
    parseInline: [
      {
        name: "TooLong",
        before: "Escape",
        parse: (inline) => (inline.end - inline.offset > MAX_INLINE ? inline.end : -1),
      },
    ],
  },
  Formulas,
]);

function endNesting(context, line) {
  if (context.depth <= MAX_DEPTH) return false;
  const { lineStart } = context;
  context.addElement(
    context.elt("Paragraph", lineStart + line.pos, lineStart + line.text.length),
  );
  context.nextLine();
  return true;
}

/** The classes of accepted drafts: of a drafter, and copied from the text. */
const MARKS = new Set(["draft", "draft copied"]);

/** A text and, for each of its UTF-16 units, the classes of an accepted draft, or false. */
export class Source {
  constructor() {
    this.text = "";
    this.marks = [];
  }

  add(text, mark) {
    this.text += text;
    for (let i = 0; i < text.length; i++) this.marks.push(mark);
  }

  /** The marks as a list of `[length, mark]`. */
  get runs() {
    const runs = [];
    for (const mark of this.marks) {
      if (runs.at(-1)?.[1] === (mark || "")) runs.at(-1)[0]++;
      else runs.push([1, mark || ""]);
    }
    return runs;
  }

  /** Fill an empty source with a text and its `runs`. */
  restore(text, runs) {
    let at = 0;
    for (const [length, mark] of runs) {
      this.add(text.slice(at, at + length), MARKS.has(mark) && mark);
      at += length;
    }
    this.add(text.slice(at), false);
  }
}

/** Shows a source that grows: blocks that have not changed keep their nodes, and a selection. */
export class View {
  constructor(element, source) {
    this.element = element;
    this.source = source;
    this.shown = [];
    this.parsed = "";
    this.fragments = [];
  }

  update() {
    // Places must stay what they are, so a carriage return becomes a blank.
    const text = this.source.text.replaceAll("\r", " ");
    const end = this.parsed.length;
    const added = [{ fromA: end, toA: end, fromB: end, toB: text.length }];
    const known = TreeFragment.applyChanges(this.fragments, added);
    const tree = markdown.parse(text, known);
    this.fragments = TreeFragment.addTree(tree, known);
    this.parsed = text;
    const blocks = children(tree.topNode);
    blocks.forEach((block, i) => {
      const id = `${block.from} ${block.to} ${block.name}`;
      if (this.shown[i]?.id === id) return;
      const node = new Renderer(this.source).block(block);
      if (this.shown[i]) this.shown[i].node.replaceWith(node);
      else this.element.append(node);
      this.shown[i] = { id, node };
    });
    for (const { node } of this.shown.splice(blocks.length)) node.remove();
  }
}

const WEB = /^(https?:\/\/|mailto:)/i;
const INLINE = { Emphasis: "em", StrongEmphasis: "strong", Strikethrough: "del" };
/** What Markdown marks the form with, and which is not shown. */
const MARK = /Mark$|^(URL|LinkTitle|LinkLabel)$/;

class Renderer {
  constructor({ text, marks }) {
    this.source = text;
    this.marks = marks;
  }

  /** The element of a block. */
  block(node) {
    switch (node.name) {
      case "HorizontalRule":
        return make("hr");
      case "FencedCode":
      case "CodeBlock":
        return this.code(node);
      case "Blockquote":
        return this.container("blockquote", node);
      case "BulletList":
        return this.container("ul", node);
      case "OrderedList": {
        const list = this.container("ol", node);
        list.start = parseInt(this.source.slice(node.from), 10);
        return list;
      }
      case "ListItem":
        return this.container("li", node);
      case "Table":
        return this.table(node);
      case "FormulaBlock": {
        const element = make("p");
        this.formula(element, node, true);
        this.lines(element, node.lastChild.to, node.to);
        return element;
      }
      default:
        return this.leaf(node);
    }
  }

  container(name, node) {
    const element = make(name);
    const blocks = children(node).filter((child) => !MARK.test(child.name));
    element.append(...blocks.map((child) => this.block(child)));
    if (blocks[0]?.name === "Task") element.className = "task";
    return element;
  }

  /** A paragraph or a heading. */
  leaf(node) {
    const level = /^(?:ATX|Setext)Heading(\d)$/.exec(node.name)?.[1];
    // The page has headings of its own above these.
    const element = make(level ? `h${Math.min(Number(level) + 2, 6)}` : "p");
    let { from, to } = node;
    for (const mark of level ? node.getChildren("HeaderMark") : []) {
      if (mark.from === node.from) from = mark.to;
      else to = mark.from;
    }
    this.inline(element, node, this.trimmed(from, to));
    return element;
  }

  code(node) {
    const figure = make("div", "code");
    const bar = make("div", "bar");
    const info = node.getChild("CodeInfo");
    const language = info ? this.source.slice(info.from, info.to).split(/\s/)[0] : "text";
    const copy = make("button", "", "Copy");
    copy.type = "button";
    copy.setAttribute("aria-label", "Copy the code");
    copy.dataset.copies = "code";
    bar.append(make("span", "", language), copy);
    const pre = make("pre");
    pre.tabIndex = 0; // so that the keyboard can scroll it
    const code = make("code");
    this.colored(code, node.getChildren("CodeText"), language);
    pre.append(code);
    figure.append(bar, pre);
    return figure;
  }

  /** Append pieces of code, in the colors of its language. */
  colored(parent, pieces, language) {
    const code = pieces.map(({ from, to }) => this.source.slice(from, to)).join("");
    let [i, at] = [0, pieces[0]?.from];
    for (const { length, name } of coloredParts(code, language)) {
      const element = name ? make("span", name) : parent;
      for (let rest = length; rest > 0; ) {
        if (at === pieces[i].to) at = pieces[++i].from;
        const next = Math.min(at + rest, pieces[i].to);
        this.text(element, at, next);
        rest -= next - at;
        at = next;
      }
      if (name) parent.append(element);
    }
  }

  table(node) {
    const frame = make("div", "table");
    frame.tabIndex = 0;
    const table = make("table");
    const head = cells(node.getChild("TableHeader"));
    const rule = node.getChild("TableDelimiter");
    const aligned = this.source.slice(rule.from, rule.to).match(/:?-+:?/g).map(alignment);
    const section = (part, cell, rows) => {
      const element = make(part);
      for (const row of rows) {
        const line = make("tr");
        head.forEach((_, column) => {
          const field = make(cell, aligned[column]);
          if (row[column]) this.inline(field, row[column]);
          line.append(field);
        });
        element.append(line);
      }
      return element;
    };
    table.append(
      section("thead", "th", [head]),
      section("tbody", "td", node.getChildren("TableRow").map(cells)),
    );
    frame.append(table);
    return frame;
  }

  /** Append what a node holds between `from` and `to`; its own marks too, if it is `asWritten`. */
  inline(parent, node, { from, to } = node, asWritten = false) {
    let at = from;
    for (const child of children(node)) {
      const beginsLine = ["QuoteMark", "HardBreak"].includes(child.name);
      const isMark = MARK.test(child.name);
      if (child.to <= from || child.from >= to || (isMark && asWritten && !beginsLine)) continue;
      this.lines(parent, at, child.from);
      at = beginsLine ? this.skipBlanks(child.to, to) : child.to;
      if (!isMark) this.span(parent, child);
    }
    this.lines(parent, at, to);
  }

  span(parent, node) {
    const { name, from, to } = node;
    if (name === "Escape") this.text(parent, from + 1, to);
    else if (name === "HardBreak") parent.append(make("br"));
    else if (name === "InlineCode") parent.append(this.inlineCode(node));
    else if (name === "Formula")
      this.formula(parent, node, ["$$", "\\["].includes(this.source.slice(from, from + 2)));
    else if (name === "TaskMarker") parent.append(box(/x/i.test(this.source.slice(from, to))));
    else if (INLINE[name]) {
      const element = make(INLINE[name]);
      this.inline(element, node);
      parent.append(element);
    } else this.link(parent, node);
  }

  /** A formula is tinted where all of it was drafted: it cannot be shown in parts. */
  formula(parent, node, isDisplay) {
    const [open, ...quotes] = children(node);
    const close = quotes.pop();
    let [tex, at] = ["", open.to];
    for (const quote of [...quotes, close]) {
      tex += this.source.slice(at, quote.from);
      at = quote.to;
    }
    const element = formula(tex, isDisplay);
    if (!element) {
      this.inline(parent, node, { from: open.from, to: close.to }, true);
      return;
    }
    const marks = [...new Set(this.marks.slice(open.from, close.to))];
    if (marks.every(Boolean)) element.className += ` ${marks.length > 1 ? "draft" : marks[0]}`;
    parent.append(element);
  }

  inlineCode(node) {
    const element = make("code");
    let [from, to] = [node.firstChild.to, node.lastChild.from];
    // Blanks that keep a backtick of the content apart from the marks.
    const content = this.source.slice(from, to);
    if (/^ .*[^ ].* $/s.test(content)) [from, to] = [from + 1, to - 1];
    this.inline(element, node, { from, to });
    return element;
  }

  /** A link or an image. As it was written: an HTML tag, and what leads nowhere or elsewhere. */
  link(parent, node) {
    const url = node.getChild("URL");
    let href = url ? this.source.slice(url.from, url.to).replace(/^<|>$/g, "") : "";
    if (node.name === "Autolink" && /^[^:]+@/.test(href)) href = `mailto:${href}`;
    if (!WEB.test(href)) {
      this.inline(parent, node, node, true);
      return;
    }
    const element = make("a");
    element.href = href;
    element.target = "_blank";
    element.rel = "noopener noreferrer nofollow";
    const [open, close] = node.getChildren("LinkMark");
    if (node.name === "Autolink") this.text(element, url.from, url.to);
    else this.inline(element, node, { from: open.to, to: close.from });
    parent.append(element);
  }

  /** Append characters of a paragraph, without the blanks that begin a line. */
  lines(parent, from, to) {
    while (from < to) {
      const end = this.source.indexOf("\n", from) + 1;
      const next = end && end < to ? end : to;
      this.text(parent, from, next);
      from = end && next === end ? this.skipBlanks(end, to) : next;
    }
  }

  /** Append characters, those that were drafted within elements of their own. */
  text(parent, from, to) {
    for (let i = from; i < to; ) {
      const indent = this.indentEnd(i, to);
      const mark = indent > i ? "" : this.marks[i];
      let next = Math.max(indent, i + 1);
      if (mark || indent === i)
        while (next < to && this.marks[next] === this.marks[i] && this.source[next - 1] !== "\n") next++;
      const text = document.createTextNode(this.source.slice(i, next));
      if (mark) {
        const span = make("span", mark);
        span.append(text);
        parent.append(span);
      } else {
        parent.append(text);
      }
      i = next;
    }
  }

  /** Where the indentation ends that begins at `at`: it is not tinted. */
  indentEnd(at, to) {
    return at === 0 || this.source[at - 1] === "\n" ? this.skipBlanks(at, to) : at;
  }

  trimmed(from, to) {
    while (to > from && /\s/.test(this.source[to - 1])) to--;
    return { from: this.skipBlanks(from, to), to };
  }

  skipBlanks(from, to) {
    while (from < to && " \t".includes(this.source[from])) from++;
    return from;
  }
}

/** The class of a column, from its part of the rule below a table's head. */
function alignment(rule) {
  const [left, right] = [rule.startsWith(":"), rule.endsWith(":")];
  return right ? (left ? "center" : "right") : "";
}

/** The box of a task, done or to do. */
function box(isDone) {
  const element = make("input");
  element.type = "checkbox";
  element.disabled = true;
  element.setAttribute("aria-label", isDone ? "done" : "to do");
  // So that it is in the markup, and not in the state alone.
  element.toggleAttribute("checked", isDone);
  return element;
}

/** A row's cells by column; null where one is empty. */
function cells(row) {
  const found = [];
  let cell = null;
  for (const child of children(row)) {
    if (child.name === "TableCell") cell = child;
    else if (cell || child.from > row.from) {
      found.push(cell);
      cell = null;
    }
  }
  return cell ? [...found, cell] : found;
}

function children(node) {
  const found = [];
  for (let child = node.firstChild; child; child = child.nextSibling) found.push(child);
  return found;
}
