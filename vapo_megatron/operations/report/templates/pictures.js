// Pictures of figures as SVG, of the data that monitoring/pictures.py draws in a terminal.
"use strict";

const WIDE = { width: 620, right: 70, top: 6, line: 26 };
const GOOD = "#2563eb", BAD = "#dc2626", SAME = "#8b8b8b";

const svgOf = (picture, width, height, ...children) =>
  element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": picture.title }, ...children);
const textAt = (x, y, anchor, text) => element("text", { x, y, "text-anchor": anchor }, text);
const box = (x, y, width, height, fill, title) => {
  const made = element("path", { d: `M${x} ${y}h${Math.max(0, width)}v${height}h${-Math.max(0, width)}Z`, fill });
  made.append(element("title", {}, title));
  return made;
};
// Room for the longest of these labels.
const roomFor = (labels) => 14 + 6.4 * Math.max(0, ...labels.map((label) => label.length));

function barsOf(picture) {
  const left = roomFor(picture.rows.map(([name]) => name)), space = WIDE.width - left - WIDE.right;
  const totals = picture.rows.map(([, parts]) => parts.reduce((sum, [, size]) => sum + size, 0));
  const most = Math.max(...totals, picture.limit || 0) || 1;
  const sizes = new Map();
  picture.rows.forEach(([, parts]) => parts.forEach(([name, size]) => sizes.set(name, Math.max(sizes.get(name) || 0, size))));
  const names = [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a));
  const height = WIDE.top + WIDE.line * picture.rows.length + 4;
  const marks = picture.rows.flatMap(([name, parts], row) => {
    const y = WIDE.top + row * WIDE.line;
    let at = left;
    const ordered = [...parts].sort((a, b) => names.indexOf(a[0]) - names.indexOf(b[0]));
    const boxes = ordered.map(([part, size]) => {
      const made = box(at, y + 3, size / most * space, WIDE.line - 8, colorOf(names.indexOf(part)), `${part}: ${short(size)} ${picture.unit}`);
      at += size / most * space;
      return made;
    });
    return [textAt(left - 8, y + 16, "end", name), ...boxes, textAt(at + 6, y + 16, "start", short(Number(totals[row].toFixed(1))))];
  });
  const limit = picture.limit === null ? [] : [element("line", { class: "limit", x1: left + picture.limit / most * space, x2: left + picture.limit / most * space, y1: 0, y2: height })];
  const legend = names.length > 1 ? names.map((name, i) => element("span", {}, swatch(colorOf(i), "", "area"), name)) : [];
  if (limit.length) legend.push(element("span", {}, `dashed: ${short(Number(picture.limit.toFixed(1)))} ${picture.unit} usable`));
  return [svgOf(picture, WIDE.width, height, marks, limit), element("div", { class: "legend" }, legend.length ? legend : picture.unit)];
}

function intervalsOf(picture) {
  const left = roomFor(picture.rows.map(([name]) => name)), right = 150, space = WIDE.width - left - right;
  const x = (value) => left + (value - picture.low) / (picture.high - picture.low || 1) * space;
  const bottom = WIDE.top + WIDE.line * picture.rows.length, height = bottom + 20;
  const grid = ticks(picture.low, picture.high, 4).flatMap((at) => [
    element("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: bottom }), textAt(x(at), height - 4, "middle", short(at))]);
  const level = picture.line === null ? [] : [element("line", { class: "level", x1: x(picture.line), x2: x(picture.line), y1: 0, y2: bottom })];
  const marks = picture.rows.flatMap(([name, low, figure, high], row) => {
    const y = WIDE.top + row * WIDE.line + WIDE.line / 2;
    const stroke = { stroke: GOOD, "stroke-width": 1.8, fill: "none" };
    return [textAt(left - 8, y + 4, "end", name),
      element("path", { ...stroke, d: `M${x(low)} ${y - 5}V${y + 5}M${x(low)} ${y}H${x(high)}M${x(high)} ${y - 5}V${y + 5}` }),
      element("circle", { cx: x(figure), cy: y, r: 4, fill: GOOD }),
      textAt(WIDE.width - right + 10, y + 4, "start", `${figure.toFixed(3)} [${low.toFixed(3)}, ${high.toFixed(3)}]`)];
  });
  return [svgOf(picture, WIDE.width, height, grid, level, marks)];
}

function histogramOf(picture) {
  const { width, height, left, right, top, bottom } = SIZE, count = picture.counts.length;
  const most = Math.max(...picture.counts, 1), space = (width - left - right) / count;
  const y = (value) => height - bottom - value / most * (height - top - bottom);
  const grid = ticks(0, most, 4).filter(Number.isInteger).flatMap((at) => [
    element("line", { class: "grid", x1: left, x2: width - right, y1: y(at), y2: y(at) }), textAt(left - 6, y(at) + 4, "end", short(at))]);
  const bars = picture.counts.map((value, i) => {
    const [low, high] = [picture.edges[i], picture.edges[i + 1]];
    const colour = high <= picture.line + 1e-9 ? BAD : low <= picture.line && picture.line < high - 1e-9 ? SAME : GOOD;
    return box(left + i * space + 1, y(value), space - 2, height - bottom - y(value), colour, `${low.toFixed(2)} to ${high.toFixed(2)}: ${value}`);
  });
  // The middle of a bin is what it stands for.
  const every = Math.ceil((count - 1) / 4);
  const labels = picture.counts.map((_, i) => [(picture.edges[i] + picture.edges[i + 1]) / 2, i]).filter(([, i]) => i % every === 0)
    .map(([at, i]) => textAt(left + (i + 0.5) * space, height - 7, "middle", short(Number(at.toFixed(2)))));
  return [svgOf(picture, width, height, grid, bars, labels), element("div", { class: "legend" }, picture.unit)];
}

function scatterOf(picture) {
  const size = 330, left = 46, bottom = 34, top = 8;
  const all = [...picture.points, ...picture.means].flat(), low = Math.min(...all), high = Math.max(...all);
  const place = (value) => (value - low) / (high - low || 1) * (size - left - top);
  const x = (value) => left + place(value), y = (value) => size - bottom - place(value) * (size - bottom - top) / (size - left - top);
  const grid = ticks(low, high, 4).flatMap((at) => [
    element("line", { class: "grid", x1: left, x2: size - top, y1: y(at), y2: y(at) }), textAt(left - 6, y(at) + 4, "end", short(at)),
    element("line", { class: "grid", x1: x(at), x2: x(at), y1: top, y2: size - bottom }), textAt(x(at), size - bottom + 15, "middle", short(at))]);
  const diagonal = element("line", { class: "level", x1: x(low), x2: x(high), y1: y(low), y2: y(high) });
  const points = picture.points.map(([a, b]) => element("circle", { cx: x(a), cy: y(b), r: 2.6, fill: GOOD, opacity: 0.35 }));
  const line = picture.means.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const means = [element("path", { d: line, fill: "none", stroke: BAD, "stroke-width": 1.6 }),
                 ...picture.means.map(([a, b]) => element("circle", { cx: x(a), cy: y(b), r: 3.6, fill: BAD }))];
  return [svgOf(picture, size, size, grid, diagonal, points, means, textAt(size / 2 + 20, size - 4, "middle", picture.x)),
          element("div", { class: "legend" }, `up: ${picture.y}`, element("span", {}, swatch(GOOD, "", "points"), "a state"),
                  element("span", {}, swatch(BAD), "means of tenths by value: the calibration"), element("span", {}, swatch(SAME), "equal"))];
}

const KINDS = { bars: barsOf, intervals: intervalsOf, histogram: histogramOf, scatter: scatterOf };

function pictureOf(picture) {
  const wide = picture.kind === "bars" || picture.kind === "intervals";
  return element("section", { class: wide ? "chart picture broad" : "chart picture" }, element("h3", {}, picture.title), ...KINDS[picture.kind](picture));
}

function picturesSection(runs) {
  const found = runs.filter((run) => run.pictures.length);
  if (!found.length) return null;
  return titled("pictures", "At a glance", ...found.flatMap((run) => [
    runs.length > 1 ? element("h3", {}, run.name) : null, element("div", { class: "charts" }, run.pictures.map(pictureOf))]).filter(Boolean));
}
