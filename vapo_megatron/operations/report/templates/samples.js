// Responses to browse: chosen, sorted, their tokens coloured. What is chosen stands in the address, behind #.
"use strict";

const PAGE = 20;
const KEYS = { step: (s) => s.step ?? -1, reward: (s) => s.reward ?? Number(s.correct), length: (s) => s.tokens ?? 0,
               value: (s) => meanValue(s) ?? -Infinity };

function chosen() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return { run: "0", origin: "", grade: "", sort: "step", order: "down", colour: "values", from: "0",
           shortest: "", longest: "", lowest: "", highest: "", ...found };
}

function choose(change) {
  const all = { ...chosen(), from: "0", ...change };
  history.replaceState(null, "", "#" + new URLSearchParams(all));
}

// The critic's mean value over a response; null where its values are not kept.
function meanValue(sample) {
  const values = ((sample.estimates || {}).values || []).filter((value) => value !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

// Whether a number lies between two bounds, as they were typed in; an empty one does not bound.
function within(number, low, high) {
  if (low === "" && high === "") return true;
  return number !== null && (low === "" || number >= Number(low)) && (high === "" || number <= Number(high));
}

const originOf = (sample) => (sample.step !== undefined ? "step " + sample.step : sample.set);

// Restating the problem is no answer: such responses come first, whatever the order.
const isCopied = (sample) => Boolean(sample.copied || sample.grade_reason === "copied");

function samplesShown(samples, state) {
  const key = KEYS[state.sort] || KEYS.step, sign = state.order === "up" ? 1 : -1;
  return samples
    .filter((s) => !state.origin || originOf(s) === state.origin)
    .filter((s) => !state.grade || Boolean(s.correct) === (state.grade === "correct"))
    .filter((s) => within(s.tokens ?? null, state.shortest, state.longest))
    .filter((s) => within(meanValue(s), state.lowest, state.highest))
    .map((s, i) => [s, i])
    .sort((a, b) => isCopied(b[0]) - isCopied(a[0]) || sign * (key(a[0]) - key(b[0])) || a[1] - b[1])
    .map(([s]) => s);
}

// Blue is high, red is low, by how far a number is from the middle of the scale.
function tint(value, scale) {
  const share = Math.max(-1, Math.min(1, (value - scale.middle) / (scale.width || 1)));
  const colour = share < 0 ? "220, 38, 38" : "37, 99, 235";
  return `rgba(${colour}, ${(0.08 + 0.6 * Math.abs(share)).toFixed(2)})`;
}

// What tokens are coloured by, and the scale: advantages are around 0; values within what this response spans.
function scaleOf(estimates, colour) {
  const name = estimates[colour] ? colour : "advantages", numbers = estimates[name] || [];
  const written = numbers.filter((number) => number !== null);
  const low = Math.min(...written), high = Math.max(...written);
  return name === "advantages"
    ? { name, numbers, middle: 0, width: Math.max(Math.abs(low), Math.abs(high)) }
    : { name, numbers, middle: (low + high) / 2, width: (high - low) / 2 };
}

// Which colour is which number, for one response.
function keyOf(estimates, colour) {
  const scale = scaleOf(estimates, colour);
  if (!isFinite(scale.width)) return null;
  const marks = [-1, -0.5, 0, 0.5, 1].map((share) => {
    const value = scale.middle + share * scale.width;
    return element("span", { class: "token", style: `background:${tint(value, scale)}` }, ` ${short(Number(value.toFixed(4)))} `);
  });
  return element("p", { class: "hint key" }, `${scale.name.slice(0, -1)} of a token: `, marks);
}

function tokensOf(estimates, colour) {
  const scale = scaleOf(estimates, colour), numbers = scale.numbers;
  const half = estimates.left_out ? estimates.tokens.length / 2 : -1;
  const several = numbers.includes(null);
  let turn = 0;
  return estimates.tokens.flatMap((text, i) => {
    const observed = numbers[i] === null;
    const begins = several && (i === 0 || observed !== (numbers[i - 1] === null));
    const value = estimates.values && !observed ? `, value ${short(estimates.values[i])}` : "";
    const marker = begins ? [element("span", { class: "turn" }, observed ? "observed" : `turn ${++turn}${value}`)] : [];
    const said = observed ? "observed" : ["values", "advantages", "rewards"].filter((name) => estimates[name] && estimates[name][i] !== null)
      .map((name) => `${name.slice(0, -1)} ${short(estimates[name][i])}`).join(", ");
    const style = observed ? "opacity:0.6;font-style:italic" : `background:${tint(numbers[i], scale)}`;
    // A token that ends within a character, or is special, has no text of its own.
    const token = element("span", { class: "token", title: `token ${i < half || half < 0 ? i : i + estimates.left_out}: ${said}`, style }, text || "·");
    return [...(i === half ? [element("span", { class: "where" }, ` … ${estimates.left_out} tokens … `)] : []), ...marker, token];
  });
}

// An episode without estimates: what the policy wrote, tool calls and all, and what it was given.
function turnsOf(turns) {
  let turn = 0;
  return turns.flatMap(({ observed, text }) => [element("span", { class: "turn" }, observed ? "observed" : `turn ${++turn}`),
                                                element("span", observed ? { class: "observed" } : {}, text)]);
}

function sampleView(sample, colour) {
  const grade = sample.correct ? ["right", "correct"] : ["wrong", "incorrect"];
  const facts = [originOf(sample), `problem ${sample.prompt_id ?? sample.id}`, `${sample.tokens} tokens`, sample.finish_reason,
                 sample.reward !== undefined && sample.reward !== null ? `reward ${short(sample.reward)}` : null, sample.grade_reason,
                 meanValue(sample) !== null ? `mean value ${short(Number(meanValue(sample).toFixed(4)))}` : null,
                 sample.copied ? "restates the problem" : null,
                 ...(sample.episode ? [`${sample.episode.turns} turns`, sample.episode.tool_errors ? `${sample.episode.tool_errors} tool errors` : null] : [])];
  const coloured = sample.estimates && colour !== "none";
  return element("article", { class: "sample" },
    element("header", {}, element("span", { class: grade[0] }, grade[1]), facts.filter(Boolean).map((fact) => element("span", {}, String(fact)))),
    element("div", { class: "problem" }, `${sample.problem}\nground truth: ${sample.answer}`),
    element("div", { class: "response" }, coloured ? tokensOf(sample.estimates, colour) : sample.turns ? turnsOf(sample.turns) : String(sample.response)),
    coloured ? keyOf(sample.estimates, colour) : null);
}

// Two fields, for the bounds of a number.
function bounds(label, names, state, redraw) {
  const field = (name, placeholder) => {
    const made = element("input", { name, type: "number", step: "any", placeholder, "aria-label": `${label} ${placeholder}`, value: state[name] });
    made.addEventListener("change", () => { choose({ [name]: made.value }); redraw(); });
    return made;
  };
  return element("label", {}, `${label} `, field(names[0], "from"), " ", field(names[1], "to"));
}

function select(name, value, options, redraw) {
  const made = element("select", { name }, options.map(([key, text]) => element("option", { value: key }, text)));
  made.value = value;
  made.addEventListener("change", () => { choose({ [name]: made.value }); redraw(); });
  return made;
}

function samplesSection(runs) {
  const with_samples = runs.map((run, i) => [String(i), run.name]).filter(([i]) => runs[i].samples.length);
  if (!with_samples.length) return null;
  const section = element("section", { id: "samples" });
  const redraw = () => {
    const state = chosen();
    if (!with_samples.some(([i]) => i === state.run)) state.run = with_samples[0][0];
    const samples = runs[Number(state.run)].samples;
    const origins = [...new Set(samples.map(originOf))];
    if (!origins.includes(state.origin)) state.origin = "";
    const shown = samplesShown(samples, state), from = Math.min(Number(state.from) || 0, Math.max(0, shown.length - 1));
    const more = (to, text) => {
      const button = element("button", {}, text);
      button.addEventListener("click", () => { choose({ from: String(to) }); redraw(); });
      return button;
    };
    section.replaceChildren(
      element("h2", {}, "Samples"),
      element("div", { class: "controls" },
        with_samples.length > 1 ? select("run", state.run, with_samples, redraw) : null,
        select("origin", state.origin, [["", "all"], ...origins.map((o) => [o, o])], redraw),
        select("grade", state.grade, [["", "correct and not"], ["correct", "correct"], ["incorrect", "incorrect"]], redraw),
        select("sort", state.sort, [["step", "sort by step"], ["reward", "sort by reward"], ["length", "sort by length"],
          ...(samples.some((s) => s.estimates) ? [["value", "sort by value"]] : [])], redraw),
        select("order", state.order, [["down", "highest first"], ["up", "lowest first"]], redraw),
        bounds("tokens", ["shortest", "longest"], state, redraw),
        samples.some((s) => meanValue(s) !== null) ? bounds("mean value", ["lowest", "highest"], state, redraw) : null,
        samples.some((s) => s.estimates)
          ? select("colour", state.colour, [["values", "tokens by value"], ["advantages", "tokens by advantage"], ["none", "no colours"]], redraw) : null,
        element("span", { class: "where" }, `${shown.length} of ${samples.length} responses here; all are in ${runs[Number(state.run)].directory}`)),
      ...shown.slice(from, from + PAGE).map((sample) => sampleView(sample, state.colour)),
      element("div", { class: "controls" },
        from > 0 ? more(Math.max(0, from - PAGE), "previous") : null,
        from + PAGE < shown.length ? more(from + PAGE, "next") : null));
  };
  redraw();
  return section;
}
