"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["request", "shared", "cache", "transaction", "quarantine", "free", "dummy"];
const MEANING = {
  request: "owned by request rows", shared: "owned by a cache, read by requests", cache: "owned by a cache",
  transaction: "reserved, not yet written", quarantine: "freed, waits for a forward", free: "free", dummy: "dummy page 0",
};
const LETTER = { f: "free", r: "request", c: "cache", s: "shared", t: "transaction", q: "quarantine", d: "dummy" };
const runsOf = (text) => [...text.matchAll(/([a-z])(\d+)/g)].map((found) => [LETTER[found[1]], Number(found[2])]);
const times = data.time.values, snapshots = data.snapshots;
const byId = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en-US", { maximumFractionDigits: 2 });
const color = (kind) => getComputedStyle(document.documentElement).getPropertyValue("--" + kind).trim();
let current = 0;

function node(name, attributes = {}, parent = null, text = null) {
  const svg = ["svg", "path", "line", "rect", "text", "g"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function tip(event, text) {
  const box = byId("tip");
  if (!text) { box.style.display = "none"; return; }
  box.textContent = text;
  box.style.display = "block";
  const wide = box.offsetWidth, high = box.offsetHeight;
  box.style.left = Math.min(event.clientX + 14, innerWidth - wide - 8) + "px";
  box.style.top = (event.clientY + high + 24 > innerHeight ? event.clientY - high - 10 : event.clientY + 16) + "px";
}

function niceTicks(bottom, top, wanted) {
  const raw = (top - bottom) / wanted, power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || power * 10;
  const ticks = [];
  for (let value = Math.ceil(bottom / step) * step; value <= top * 1.0001; value += step) ticks.push(value);
  return ticks;
}

function nearest(value, list) {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - list[low - 1] < list[low] - value ? low - 1 : low;
}

/* One chart over time: stacked areas, or a line. Series far longer than the pixels are thinned to one point a pixel. */
class TimeChart {
  constructor(parent, spec) {
    Object.assign(this, { spec, width: spec.width || 1130, height: spec.height || 118, left: 56, right: 12, bottom: 20 });
    const panel = node("div", { class: "panel" }, parent);
    const head = node("div", { class: "panel-head" }, panel);
    node("h3", {}, head, spec.name);
    node("span", {}, head, spec.caption);
    this.svg = node("svg", { viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": `${spec.name} over time` }, panel);
    this.first = times[0] || 0;
    this.span = Math.max((times[times.length - 1] || 0) - this.first, 1e-9);
    this.top = Math.max(spec.top, 1e-9) * 1.04;
    this.draw();
    this.svg.addEventListener("mousemove", (event) => this.read(event));
    this.svg.addEventListener("mouseleave", () => { tip(null, ""); charts.forEach((c) => c.cross.setAttribute("visibility", "hidden")); });
    this.svg.addEventListener("click", (event) => { if (snapshots.length) show(nearest(this.timeAt(event), snapshots.map((s) => s.time))); });
  }
  x(time) { return this.left + (time - this.first) / this.span * (this.width - this.left - this.right); }
  y(value) { return 6 + (1 - value / this.top) * (this.height - 6 - this.bottom); }
  timeAt(event) {
    const box = this.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * this.width;
    return this.first + (x - this.left) / (this.width - this.left - this.right) * this.span;
  }
  draw() {
    const { svg, spec } = this, base = this.y(0);
    for (const value of niceTicks(0, this.top, 3)) {
      node("line", { class: value ? "gridline" : "axis", x1: this.left, x2: this.width - this.right, y1: this.y(value), y2: this.y(value) }, svg);
      node("text", { x: this.left - 8, y: this.y(value) + 4, "text-anchor": "end" }, svg, count(value));
    }
    for (const value of niceTicks(this.first, this.first + this.span, this.width / 140)) {
      if (this.x(value) > this.width - this.right - 56) continue;
      node("text", { x: this.x(value), y: this.height - 5, "text-anchor": "middle" }, svg, count(value));
    }
    node("text", { x: this.width - this.right, y: this.height - 5, "text-anchor": "end" }, svg, data.time.unit);
    const stride = Math.max(1, Math.floor(times.length / (this.width * 1.5)));
    const picked = times.map((_, i) => i).filter((i) => i % stride === 0 || i === times.length - 1);
    const bottom = new Float64Array(times.length);
    for (const layer of spec.layers) {
      const up = picked.map((i) => `${this.x(times[i]).toFixed(1)},${this.y(bottom[i] + layer.values[i]).toFixed(1)}`);
      if (spec.line) {
        node("path", { d: "M" + up.join("L"), fill: "none", "stroke-width": 1.8, "stroke-linejoin": "round", style: `stroke:var(--${layer.color})` }, svg);
        continue;
      }
      const down = picked.map((i) => `${this.x(times[i]).toFixed(1)},${this.y(bottom[i]).toFixed(1)}`).reverse();
      node("path", { d: `M${up.join("L")}L${down.join("L")}Z`, style: `fill:var(--${layer.color})` }, svg);
      layer.values.forEach((value, i) => { bottom[i] += value; });
    }
    if (!spec.line && spec.total <= this.top) node("line", { class: "total", x1: this.left, x2: this.width - this.right, y1: this.y(spec.total), y2: this.y(spec.total) }, svg);
    this.mark = node("line", { class: "mark", y1: 4, y2: base, visibility: "hidden" }, svg);
    this.cross = node("line", { class: "cross", y1: 4, y2: base, visibility: "hidden" }, svg);
  }
  read(event) {
    const index = nearest(this.timeAt(event), times);
    for (const chart of charts) {
      const x = chart.x(times[index]);
      chart.cross.setAttribute("x1", x); chart.cross.setAttribute("x2", x); chart.cross.setAttribute("visibility", "visible");
    }
    const lines = this.spec.layers.filter((l) => l.values[index] || this.spec.layers.length === 1).map((l) => `${l.name}: ${count(l.values[index])}`);
    tip(event, [`${data.time.unit} ${count(times[index])}`, ...lines.reverse()].join("\n"));
  }
}

const charts = [];

function drawCharts() {
  const used = new Set(["free", "dummy"]);
  if (times.length) {
    for (const family of data.families) {
      const kinds = KINDS.filter((kind) => family.kinds && family.kinds[kind] && family.kinds[kind].some((n) => n > 0));
      kinds.forEach((kind) => used.add(kind));
      const layers = kinds.length ? kinds.map((kind) => ({ name: kind, color: kind, values: family.kinds[kind] }))
        : [{ name: "used", color: "request", values: family.used }];
      const peak = family.used.reduce((a, b) => Math.max(a, b), 0);
      const share = (100 * peak / family.total).toFixed(1);
      charts.push(new TimeChart(byId("charts"), { name: family.name, layers, total: family.total,
        top: peak > family.total / 2 ? family.total : 1.2 * peak,
        caption: `peak of the samples ${count(peak)} of ${count(family.total)} pages (${share} %)` }));
    }
    const small = node("div", { class: "small" }, byId("charts"));
    for (const line of data.series || []) {
      const peak = line.values.reduce((a, b) => Math.max(a, b), 0);
      charts.push(new TimeChart(small, { name: line.name, line: true, width: 560, height: 104, top: peak || 1,
        layers: [{ name: line.name, color: "accent", values: line.values }], caption: `most ${count(peak)}` }));
    }
  } else {
    byId("timeline").hidden = true;
  }
  snapshots.forEach((s) => Object.values(s.maps).forEach((text) => runsOf(text).forEach(([kind]) => used.add(kind))));
  for (const kind of KINDS.filter((kind) => used.has(kind))) {
    const item = node("span", {}, byId("legend"));
    node("i", { style: `background:var(--${kind})` }, item);
    item.append(`${kind}: ${MEANING[kind]}`);
  }
}

/* The page map: one cell a page, in page order; big pools put several pages into a cell and show its commonest owner. */
class PageMap {
  constructor(parent, name) {
    this.name = name;
    this.box = node("div", { class: "map" }, parent);
    node("h3", {}, this.box, name);
    this.counts = node("div", { class: "counts" }, this.box);
    this.canvas = node("canvas", { role: "img", "aria-label": `page map of ${name}` }, this.box);
    this.canvas.addEventListener("mousemove", (event) => this.read(event));
    this.canvas.addEventListener("mouseleave", () => tip(null, ""));
  }
  show(runs) {
    this.kinds = [];
    const totals = {};
    for (const [kind, length] of runs) {
      totals[kind] = (totals[kind] || 0) + length;
      for (let i = 0; i < length; i++) this.kinds.push(kind);
    }
    this.counts.replaceChildren();
    for (const kind of KINDS.filter((kind) => totals[kind] && kind !== "dummy")) {
      const item = node("span", {}, this.counts);
      node("i", { style: `background:var(--${kind})` }, item);
      item.append(`${kind} ${count(totals[kind])}`);
    }
    this.layout();
    if (this.pages > 1) node("span", {}, this.counts, `one cell = ${this.pages} pages`);
    this.paint();
  }
  layout() {
    const width = Math.max(200, this.box.clientWidth), total = this.kinds.length;
    this.pages = 1;
    for (this.cell = 14; this.cell > 4; this.cell--) {
      if (Math.ceil(total / Math.floor(width / this.cell)) * this.cell <= 230) break;
    }
    this.columns = Math.floor(width / this.cell);
    while (Math.ceil(total / this.pages / this.columns) * this.cell > 330) this.pages++;
    this.rows = Math.ceil(total / this.pages / this.columns);
  }
  paint() {
    const ratio = window.devicePixelRatio || 1, { cell, columns, rows, pages } = this;
    this.canvas.width = columns * cell * ratio;
    this.canvas.height = rows * cell * ratio;
    this.canvas.style.width = columns * cell + "px";
    this.canvas.style.height = rows * cell + "px";
    const pen = this.canvas.getContext("2d"), gap = cell > 5 ? 1 : 0.5, fills = {};
    KINDS.forEach((kind) => { fills[kind] = color(kind); });
    pen.scale(ratio, ratio);
    for (let at = 0; at * pages < this.kinds.length; at++) {
      pen.fillStyle = fills[this.kindOf(at)];
      pen.fillRect(at % columns * cell, Math.floor(at / columns) * cell, cell - gap, cell - gap);
    }
  }
  kindOf(at) {
    if (this.pages === 1) return this.kinds[at];
    const votes = {};
    for (const kind of this.kinds.slice(at * this.pages, (at + 1) * this.pages)) votes[kind] = (votes[kind] || 0) + 1;
    return Object.keys(votes).reduce((a, b) => (votes[b] > votes[a] ? b : a));
  }
  read(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = Math.floor((event.clientY - box.top) / this.cell) * this.columns + Math.floor((event.clientX - box.left) / this.cell);
    const first = at * this.pages, last = Math.min(first + this.pages, this.kinds.length) - 1;
    if (first >= this.kinds.length) { tip(event, ""); return; }
    const kind = this.kindOf(at);
    tip(event, `${this.name} page ${first}${last > first ? " to " + last : ""}\n${kind}: ${MEANING[kind]}`);
  }
}

function drawHistogram(counts) {
  const box = byId("histogram");
  box.replaceChildren();
  const entries = Object.entries(counts).map(([holders, pages]) => [Number(holders), pages]).sort((a, b) => a[0] - b[0]);
  const pagesHeld = entries.reduce((sum, entry) => sum + entry[1], 0);
  byId("refcount-hint").textContent = entries.length
    ? `${count(pagesHeld)} pages held. Bars: pages by number of holders (request rows and cache nodes); heights on a logarithmic scale.`
    : "No C128 page is held at this moment.";
  if (!entries.length) return;
  const bins = entries.length > 24 ? binned(entries, 24) : entries.map(([n, pages]) => [String(n), pages]);
  const width = 1130, height = 190, base = height - 36, step = Math.min(96, (width - 20) / bins.length);
  const top = Math.log10(Math.max(...bins.map((bin) => bin[1])) + 1);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "C128 reference counts" }, box);
  bins.forEach(([label, pages], i) => {
    const high = Math.max(2, Math.log10(pages + 1) / top * (base - 24)), x = 10 + i * step;
    const bar = node("rect", { x, y: base - high, width: step * 0.72, height: high, rx: 3, style: "fill:var(--request)" }, svg);
    node("text", { class: "bar-label", x: x + step * 0.36, y: base - high - 6, "text-anchor": "middle" }, svg, count(pages));
    node("text", { x: x + step * 0.36, y: base + 15, "text-anchor": "middle" }, svg, label);
    bar.addEventListener("mousemove", (event) => tip(event, `${count(pages)} pages with ${label} holders`));
    bar.addEventListener("mouseleave", () => tip(null, ""));
  });
  node("line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }, svg);
  node("text", { x: 10, y: height - 4 }, svg, "holders of a page");
}

function binned(entries, most) {
  const size = Math.ceil(entries.length / most), bins = [];
  for (let i = 0; i < entries.length; i += size) {
    const part = entries.slice(i, i + size), first = part[0][0], last = part[part.length - 1][0];
    bins.push([first === last ? String(first) : `${first}–${last}`, part.reduce((sum, entry) => sum + entry[1], 0)]);
  }
  return bins;
}

const maps = {};

function show(index) {
  current = Math.max(0, Math.min(index, snapshots.length - 1));
  const snapshot = snapshots[current];
  byId("slider").value = current;
  byId("when").textContent = `${data.time.unit} ${count(snapshot.time)}${snapshot.label ? " · " + snapshot.label : ""}  (${current + 1} of ${snapshots.length})`;
  for (const [name, text] of Object.entries(snapshot.maps)) (maps[name] ||= new PageMap(byId("maps"), name)).show(runsOf(text));
  drawHistogram(snapshot.c128_refcounts);
  for (const chart of charts) {
    const x = chart.x(snapshot.time);
    chart.mark.setAttribute("x1", x); chart.mark.setAttribute("x2", x); chart.mark.setAttribute("visibility", "visible");
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  Object.values(maps).forEach((map) => map.paint());
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
drawCharts();
if (snapshots.length) {
  byId("slider").max = snapshots.length - 1;
  byId("slider").addEventListener("input", (event) => show(Number(event.target.value)));
  byId("previous").addEventListener("click", () => show(current - 1));
  byId("next").addEventListener("click", () => show(current + 1));
  addEventListener("resize", () => show(current));
  const peak = snapshots.findIndex((s) => s.label.startsWith("peak"));
  show(peak >= 0 ? peak : snapshots.length - 1);
} else {
  byId("moment").hidden = byId("refcounts").hidden = true;
}
