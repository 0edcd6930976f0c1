// Charts as SVG. A panel: {title, hint, curves, stacked, log, bottom, top, line, counter}; a run: {name, series}, where
// series[metric] is [steps, values].
"use strict";

const COLORS = ["#2563eb", "#ea7317", "#16a34a", "#9333ea", "#dc2626", "#0d9488", "#db2777", "#ca8a04", "#60a5fa", "#8b8b8b"];
const SIZE = { width: 420, height: 210, left: 54, right: 10, top: 8, bottom: 24 };

const colorOf = (run) => COLORS[run % COLORS.length];

// A piece of a line as it is drawn in the charts.
function swatch(color, dash = "", kind = "line") {
  const mark = kind === "area" ? element("path", { d: "M0 1H22V9H0Z", fill: color, opacity: 0.8 })
    : kind === "band" ? element("path", { d: "M0 0H22V10H0Z", fill: color, opacity: 0.25 })
    : kind === "points" ? element("circle", { cx: 11, cy: 5, r: 3.4, fill: color })
    : element("path", { d: "M0 5H22", stroke: color, "stroke-width": 1.8, "stroke-dasharray": dash });
  return element("svg", { class: "swatch", viewBox: "0 0 22 10", width: 22, height: 10 }, mark);
}

// The only way to make an element: text is text, whatever is in it.
function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function short(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size > 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) found.push(10 ** power);
  const within = found.filter((at) => at >= low * 0.999 && at <= high * 1.001);
  const every = Math.ceil(within.length / 6);
  return within.length > 1 ? within.filter((_, i) => i % every === 0) : ticks(low, high, 4).filter((at) => at > 0);
}

// A moving mean over a twelfth of the points.
function smooth(values) {
  const half = Math.floor(values.length / 24);
  if (!half) return values;
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - half), i + half + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

// Lines of a panel: of one run a colour a curve; of several a colour a run and a dash a curve.
function linesOf(panel, runs) {
  const several = runs.length > 1;
  const dashes = ["", "6 3", "2 3", "8 3 2 3", "1 4", "10 4", "4 4", "12 3 2 3"];
  const lines = [];
  runs.forEach((run, r) => panel.curves.forEach((curve, c) => {
    const found = run.series[curve.metric];
    if (!found) return;
    const label = several ? (panel.curves.length > 1 ? run.name + ": " + curve.label : run.name) : curve.label;
    const color = colorOf(several ? r : c);
    const bounds = [curve.low, curve.high].map((name) => (name && run.series[name] ? run.series[name][1] : null));
    const bounded = bounds.every((values) => values && values.length === found[0].length);
    lines.push({ curve, label, color, dash: several ? dashes[c % dashes.length] : "", steps: found[0], values: found[1],
                 low: bounded ? bounds[0] : null, high: bounded ? bounds[1] : null });
  }));
  return lines;
}

// Heights of curves on top of each other, at the steps of the first.
function stack(lines) {
  if (!lines.length) return lines;
  const steps = lines[0].steps.filter((step) => step > 0 || lines[0].steps.length === 1);
  let below = steps.map(() => 0);
  return lines.map((line) => {
    const at = new Map(line.steps.map((step, i) => [step, line.values[i]]));
    const own = steps.map((step) => at.get(step) || 0), top = own.map((value, i) => value + below[i]);
    const stacked = { ...line, steps, values: own, base: below, tops: top };
    below = top;
    return stacked;
  });
}

function rangeOf(panel, lines) {
  // An interval is drawn in full, the spread behind a mean as far as it fits: it must not flatten the mean.
  const all = lines.flatMap((l) => l.tops || (l.curve.smooth ? smooth(l.values).concat(l.values) : l.values))
    .concat(lines.flatMap((l) => (l.curve.points && l.low ? l.low.concat(l.high) : [])));
  const least = panel.log ? panel.bottom || Number.MIN_VALUE : -Infinity;
  const usable = all.filter((v) => isFinite(v) && v >= least);
  if (!usable.length) return panel.log ? [panel.bottom || 0.1, 10 * (panel.bottom || 0.1)] : [0, 1];
  let low = Math.min(...usable), high = Math.max(...usable);
  if (panel.stacked) {
    const sorted = [...lines[lines.length - 1].tops].sort((a, b) => a - b);
    high = Math.max(1e-3, 1.15 * sorted[Math.floor(0.95 * (sorted.length - 1))]);
  }
  if (panel.log) return [all.some((v) => v > 0 && v < least) ? least / 1.3 : low / 1.3, high * 1.3];
  if (panel.line !== null) { low = Math.min(low, panel.line); high = Math.max(high, panel.line); }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  low -= room; high += room;
  if (panel.bottom !== null) low = panel.bottom === 0 ? 0 : Math.max(low, panel.bottom);
  if (panel.top !== null) high = Math.min(high, panel.top + 0.02);
  return [low, high <= low ? low + 1 : high];
}

function pathOf(steps, values, x, y) {
  let path = "", pen = "M";
  steps.forEach((step, i) => {
    if (!isFinite(y(values[i]))) { pen = "M"; return; }
    path += pen + x(step).toFixed(1) + " " + y(values[i]).toFixed(1);
    pen = "L";
  });
  return path;
}

function area(steps, tops, bases, x, y) {
  const back = steps.map((step, i) => "L" + x(step).toFixed(1) + " " + y(bases[i]).toFixed(1)).reverse().join("");
  return pathOf(steps, tops, x, y) + back + "Z";
}

function drawLine(group, line, x, y) {
  const { curve, color, dash, steps, values, low, high } = line;
  const stroke = { fill: "none", stroke: color, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": dash };
  if (line.tops) {
    group.append(element("path", { d: area(steps, line.tops, line.base, x, y), fill: color, opacity: 0.8 }));
  } else if (curve.points) {
    steps.forEach((step, i) => {
      if (low) group.append(element("path", { ...stroke, d: `M${x(step)} ${y(low[i])}L${x(step)} ${y(high[i])}`, opacity: 0.55, class: "interval" }));
      group.append(element("circle", { cx: x(step), cy: y(values[i]), r: 3.4, fill: color }));
    });
    group.append(element("path", { ...stroke, d: pathOf(steps, values, x, y), opacity: 0.35 }));
  } else {
    if (low) group.append(element("path", { d: area(steps, high, low, x, y), fill: color, opacity: 0.13 }));
    if (curve.smooth && values.length >= 24) group.append(element("path", { ...stroke, d: pathOf(steps, values, x, y), opacity: 0.22, "stroke-width": 1 }));
    const drawn = curve.smooth ? smooth(values) : values;
    group.append(element("path", { ...stroke, d: pathOf(steps, drawn, x, y), class: "curve" }));
    if (steps.length === 1) group.append(element("circle", { cx: x(steps[0]), cy: y(drawn[0]), r: 3, fill: color }));
  }
}

function legendOf(panel, lines, step) {
  return lines.map((line) => {
    let text = line.label;
    const mark = swatch(line.color, line.dash, line.tops ? "area" : line.curve.points ? "points" : "line");
    const hasBand = line.low && !line.curve.points;
    const band = hasBand ? [" ", swatch(line.color, "", "band"), line.curve.band] : [];
    if (step === null) return element("span", {}, mark, text, band);
    let near = 0;
    line.steps.forEach((at, i) => { if (Math.abs(at - step) < Math.abs(line.steps[near] - step)) near = i; });
    const bounds = line.low ? ` [${short(line.low[near])}, ${short(line.high[near])}]` : "";
    return element("span", {}, mark, text + " ", element("b", {}, short(line.values[near]) + bounds), band);
  });
}

let charts = 0;
function chart(panel, runs) {
  let lines = linesOf(panel, runs).filter((line) => line.steps.length);
  if (panel.stacked) lines = stack(lines);
  if (!lines.length) return null;
  const all = lines.flatMap((line) => line.steps), first = Math.min(...all), last = Math.max(...all);
  const [low, high] = rangeOf(panel, lines), scale = panel.log ? (v) => Math.log10(v > 0 ? Math.max(v, low) : v) : (v) => v;
  const { width, height, left, right, top, bottom } = SIZE;
  const x = (step) => left + ((step - first) / (last - first || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom);
  const clip = "clip" + charts++;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": panel.title });
  const box = document.createElementNS("http://www.w3.org/2000/svg", "clipPath");
  box.setAttribute("id", clip);
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  Object.entries({ x: left - 4, y: top - 4, width: width - left - right + 8, height: height - top - bottom + 6 }).forEach(([k, v]) => rect.setAttribute(k, v));
  box.append(rect);
  svg.append(box);
  for (const at of panel.log ? logTicks(low, high) : ticks(low, high, 4)) {
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(at), y2: y(at) }));
    svg.append(element("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, short(at)));
  }
  for (const at of ticks(first, last, 5).filter((step) => Number.isInteger(step))) {
    svg.append(element("text", { x: x(at), y: height - 7, "text-anchor": "middle" }, short(at)));
  }
  if (panel.line !== null) svg.append(element("line", { class: "level", x1: left, x2: width - right, y1: y(panel.line), y2: y(panel.line) }));
  const group = element("g", { "clip-path": `url(#${clip})` });
  lines.forEach((line) => drawLine(group, line, x, y));
  const cursor = element("line", { class: "cursor", x1: 0, x2: 0, y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(group, cursor);
  const legend = element("div", { class: "legend" }, legendOf(panel, lines, null));
  const counter = panel.counter.split("/").pop();
  svg.addEventListener("mousemove", (event) => {
    const place = svg.getBoundingClientRect(), at = ((event.clientX - place.left) / place.width) * width;
    const step = Math.round(Math.min(last, Math.max(first, first + ((at - left) / (width - left - right)) * (last - first))));
    cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); cursor.setAttribute("visibility", "visible");
    legend.replaceChildren(element("span", {}, counter + " " + step), ...legendOf(panel, lines, step));
  });
  svg.addEventListener("mouseleave", () => {
    cursor.setAttribute("visibility", "hidden");
    legend.replaceChildren(...legendOf(panel, lines, null));
  });
  return element("section", { class: "chart" }, element("h3", {}, panel.title), svg, legend,
                 panel.hint ? element("p", { class: "hint" }, panel.hint) : null);
}
