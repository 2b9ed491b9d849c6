// Markdown as elements: the part of CommonMark that models write, and GitHub's tables. HTML stays text.

import { codeBlock, element } from "./dom.js";

const FENCE = /^ *(`{3,}|~{3,}) *([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^(?<indent>\s*)(?:[-*+]|(?<number>\d{1,9})[.)]) +(?<text>(?!(?:[-*] *){2,}$)\S.*)$/;

// The kinds of blocks: which line starts one, which lines after it join it, and the element of its lines.
const KINDS = [
  { starts: (line) => FENCE.test(line), joins: isInFence, build: buildCode },
  { starts: (line) => HEADING.test(line), joins: () => false, build: ([line]) => heading(line) },
  { starts: (line) => RULE.test(line), joins: () => false, build: () => element("hr") },
  { starts: (line) => QUOTE.test(line), joins: (lines, at) => QUOTE.test(lines[at]), build: buildQuote },
  { starts: startsTable, joins: (lines, at) => lines[at].includes("|"), build: buildTable },
  { starts: (line) => ITEM.test(line), joins: isInList, build: buildList },
];
const PARAGRAPH = {
  joins: (lines, at) => lines[at - 1].trim() && lines[at].trim() && !kindAt(lines, at),
  build: (lines) => element("p", {}, ...inline(lines.join("\n").trim())),
};
const kindAt = (lines, at) => KINDS.find((kind) => kind.starts(lines[at], lines[at + 1] ?? ""));
const elements = (lines) => split(lines).map(({ kind, source }) => kind.build(source.split("\n")));
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);

/** Shows a text that may have grown. Blocks that are the same stay, and with them what is selected there. */
export function show(container, text) {
  const blocks = split(text.split("\n"));
  let same = 0;
  while (same < blocks.length && container.children[same]?.source === blocks[same].source) same += 1;
  while (container.children.length > same) container.lastChild.remove();
  for (const { kind, source } of blocks.slice(same)) {
    container.append(Object.assign(kind.build(source.split("\n")), { source }));
  }
}

function split(lines) {
  const blocks = [];
  let start = 0;
  while (start < lines.length) {
    const kind = kindAt(lines, start) ?? PARAGRAPH;
    let end = start + 1;
    while (end < lines.length && kind.joins(lines, end, start)) end += 1;
    if (lines[start].trim()) blocks.push({ kind, source: lines.slice(start, end).join("\n") });
    start = end;
  }
  return blocks;
}

function isInFence(lines, at, start) {
  return at === start + 1 || lines[at - 1].trim() !== FENCE.exec(lines[start])[1];
}

function buildCode(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const end = lines.at(-1).trim() === fence ? -1 : lines.length;
  const text = lines.slice(1, end).join("\n");
  return codeBlock(language, text);
}

function heading(line) {
  const [, marks, text] = HEADING.exec(line);
  return element("h3", { className: `level${marks.length}` }, ...inline(text)); // below the h2 of its message
}

function buildQuote(lines) {
  return element("blockquote", {}, ...elements(lines.map((line) => QUOTE.exec(line)[1])));
}

function startsTable(line, next) {
  return line.includes("|") && /^[ |:]*-[ |:-]*$/.test(next) && cells(line).length === cells(next).length;
}

function buildTable([head, , ...rows]) {
  const cell = (text, tag) => element(tag, {}, ...inline(text.trim()));
  const row = (line, tag) => element("tr", {}, ...cells(line).map((text) => cell(text, tag)));
  const body = element("tbody", {}, ...rows.map((line) => row(line, "td")));
  const table = element("table", {}, element("thead", {}, row(head, "th")), body);
  return element("div", { className: "table", tabIndex: 0 }, table);
}

function isInList(lines, at, start) {
  const first = ITEM.exec(lines[start]).groups;
  const isPart = (line) => {
    const item = ITEM.exec(line)?.groups;
    if (item && item.indent.length <= first.indent.length) return !item.number === !first.number;
    return line.search(/\S/) > first.indent.length;
  };
  if (!lines[at].trim()) return isPart(lines.slice(at).find((line) => line.trim()) ?? "");
  return isPart(lines[at]) || (lines[at - 1].trim() && !kindAt(lines, at));
}

function buildList(lines) {
  const { indent, number, text } = ITEM.exec(lines[0]).groups;
  const width = lines[0].length - text.length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line)?.groups;
    if (item && item.indent.length <= indent.length) items.push([item.text]);
    else items.at(-1).push(line.slice(Math.min(width, line.search(/\S|$/))));
  }
  const list = number ? element("ol", { start: Number(number) }) : element("ul");
  list.append(...items.map((item) => element("li", {}, ...elements(item))));
  return list;
}

const END = String.raw`(?:(?<=\*)(?!\*)|(?<=_)(?!\w))`; // of emphasis: snake_case has none
const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[!-/:-@[-\x60{-~])`,
    String.raw`(?<ticks>\x60+)(?<code>[^]*?[^\x60])\k<ticks>(?!\x60)`,
    String.raw`!?\[(?<label>[^\]]*)\]\((?<href>https?:\/\/[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?: +"[^"]*")?\)`,
    String.raw`(?<url>https?:\/\/[^\s<>"\x60]*[^\s<>"\x60.,:;!?'()*_~\]])`,
    String.raw`(?<two>\*\*|(?<!\w)__)(?!\s)(?<strong>[^]{1,1000}?)(?<!\s)\k<two>${END}`,
    String.raw`(?<one>\*|(?<!\w)_)(?!\k<one>|\s)(?<emphasis>[^]{1,1000}?)(?<!\k<one>|\s)\k<one>${END}`,
    String.raw`(?<newline><br *\/?>)`, // the one tag that models need: within the cells of tables
  ].join("|"),
  "g",
);

/** The elements and strings of a text within a block. */
function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(text.slice(end, match.index), span(match.groups));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

function span({ escaped, code, label, href, url, strong, emphasis }) {
  if (escaped) return escaped;
  if (code) return element("code", {}, code.trim());
  if (href || url) return link(href || url, label ? inline(label) : [href || url]);
  if (strong) return element("strong", {}, ...inline(strong));
  if (emphasis) return element("em", {}, ...inline(emphasis));
  return element("br");
}

function link(href, children) {
  const made = element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
  made.querySelectorAll("a").forEach((inner) => inner.replaceWith(inner.textContent));
  return made;
}
